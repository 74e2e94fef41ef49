"""Whether two tensors that should be the same are, up to rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["close", "noise_like", "same_with_derivatives"]


def same_with_derivatives(should: Tensor, does: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether two outputs agree, and their derivatives in some parameters along random ones."""
    if should.shape != does.shape or should.requires_grad != does.requires_grad:
        return False
    if not close(should.detach(), does.detach()):
        return False
    if not parameters:
        return True
    if not does.requires_grad:
        return False
    u = noise_like(does)
    # Unused, where only a part of a layer's parameters is trainable.
    first = torch.autograd.grad(should, parameters, u, allow_unused=True)
    second = torch.autograd.grad(does, parameters, u, retain_graph=True, allow_unused=True)
    return all(
        (a is None) == (b is None) and (a is None or b is None or close(a, b))
        for a, b in zip(first, second, strict=True)
    )


def close(should: Tensor, does: Tensor) -> bool:
    """Whether two tensors agree to the rounding of the second's dtype; also if NaN is expected."""
    if should.shape != does.shape:
        return False
    if should.is_sparse or does.is_sparse:
        should, does = should.to_dense(), does.to_dense()
    if not torch.isfinite(should).all():
        return True  # reported with the model's output
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(does.dtype, 0.1)
    return bool((should - does).norm() <= tolerance * should.norm())


def noise_like(x: Tensor) -> Tensor:
    """The same normal numbers each time: the user's random numbers are not touched."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
