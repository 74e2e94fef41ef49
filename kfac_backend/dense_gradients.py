"""Gradients of single examples in a layer's parameters, dense, from a rule's own factors."""

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.rules import ExampleGradients, Rule, Use

__all__ = ["dense_gradients", "summed_gradients"]


def dense_gradients(gradients: ExampleGradients, transposed: bool) -> Float[Tensor, "N C P"]:
    """Σ_r b ⊗ a of each example and output, flattened as PyTorch flattens the parameter.

    Args:
        gradients: its factors.
        transposed: whether the parameter is stored inputs first.
    """
    if gradients.a is None:
        return gradients.b.sum(2).movedim(0, 2).flatten(2)  # (G, N, C, d) -> (N, C, G·d)
    order = "gnrco,gnri->ncgio" if transposed else "gnrco,gnri->ncgoi"
    return torch.einsum(order, gradients.b, gradients.a.to(gradients.b.dtype)).flatten(2)


def summed_gradients(
    rule: Rule, use: Use, b: Float[Tensor, "M ..."]
) -> dict[str, Float[Tensor, " P"]]:
    """Local name -> the gradient of all rows together, for one gradient in the layer's output."""
    positions = rule.position_gradients(use, b)  # (M, R, d_out)
    return {
        name: dense_gradients(_as_one_example(gradients), rule.transposed)[0, 0]
        for name, gradients in rule.example_gradients(use.a, positions[:, :, None]).items()
    }


def _as_one_example(gradients: ExampleGradients) -> ExampleGradients:
    """All examples' positions in one, so that no gradient of a single one is ever made."""
    b, a = gradients
    return ExampleGradients(
        b.flatten(1, 2)[:, None], None if a is None else a.flatten(1, 2)[:, None]
    )
