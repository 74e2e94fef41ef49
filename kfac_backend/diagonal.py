"""The exact GGN diagonal of parameters without a rule, by one backward pass per example."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.loss.vectors import BackwardVectors
from kfac_backend.model.calls import call_with

__all__ = ["ggn_diagonal"]


def ggn_diagonal(
    model: nn.Module,
    names: Sequence[str],
    x: Any,
    y: Tensor,
    vectors: BackwardVectors,
) -> dict[str, Tensor]:
    """Σ_n Σ_v (∂ v_nᵀf_n / ∂θ_i)² of each named parameter, in its shape.

    Right for any layer that does not mix examples, and slow: N·V backward passes a batch.
    """
    by_name = dict(model.named_parameters())
    parameters = {name: by_name[name].detach().requires_grad_() for name in names}
    diagonal = {name: torch.zeros_like(p) for name, p in parameters.items()}
    with torch.enable_grad():
        f = call_with(model, parameters, x)
    if not f.requires_grad:
        return diagonal
    for vector in vectors(f, y):
        for n in range(len(f)):
            only = torch.zeros_like(f)
            only[n] = vector[n].to(f.dtype)
            grads = torch.autograd.grad(
                f, list(parameters.values()), only, retain_graph=True, allow_unused=True
            )
            for total, g in zip(diagonal.values(), grads, strict=True):
                if g is not None:
                    total += g.square()
    return diagonal
