"""Whether two tensors that should be equal are equal up to rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["DtypesInUse", "close", "noise_like", "same_with_derivatives"]

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
OTHER_TOLERANCE = 0.1


class DtypesInUse(TorchFunctionMode):
    """A context that records the coarsest dtype of all results, since a layer may cast inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = 0.0
        """The tolerance of the coarsest dtype so far."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            self.tolerance = max(self.tolerance, _tolerance(output))
        return output


def same_with_derivatives(
    should: Tensor, does: Tensor, parameters: Sequence[Tensor], tolerance: float = 0.0
) -> bool:
    """Whether two outputs agree, and their gradients in some parameters from one random vector.

    Args:
        should: the output as expected; its graph is freed.
        does: the other; its graph stays.
        parameters: the parameters.
        tolerance: see `close`.
    """
    if should.shape != does.shape or should.requires_grad != does.requires_grad:
        return False
    if not close(should.detach(), does.detach(), tolerance):
        return False
    if not parameters:
        return True
    if not does.requires_grad:
        return False
    u = noise_like(does)
    # Some may be unused, where only a part of a layer's parameters is trainable.
    first = torch.autograd.grad(should, parameters, u, allow_unused=True)
    second = torch.autograd.grad(does, parameters, u, retain_graph=True, allow_unused=True)
    return all(
        (a is None) == (b is None) and (a is None or b is None or close(a, b, tolerance))
        for a, b in zip(first, second, strict=True)
    )


def close(should: Tensor, does: Tensor, tolerance: float = 0.0) -> bool:
    """Whether ‖should − does‖ ≤ tolerance · ‖should‖; also True if NaN or infinity is expected.

    Args:
        should: the tensor as expected.
        does: the other; its dtype has a tolerance.
        tolerance: that of a coarser dtype in which they were computed, see `DtypesInUse`; the
            larger of both counts.
    """
    if should.shape != does.shape:
        return False
    if should.is_sparse or does.is_sparse:
        should, does = should.to_dense(), does.to_dense()
    if not torch.isfinite(should).all():
        return True  # reported with the model's output
    tolerance = max(tolerance, _tolerance(does))
    return bool((should - does).norm() <= tolerance * should.norm())


def noise_like(x: Tensor) -> Tensor:
    """Normal numbers in the shape of x, the same each time; the user's generators are not used."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def _tolerance(x: Tensor) -> float:
    return TOLERANCES.get(x.dtype, OTHER_TOLERANCE)
