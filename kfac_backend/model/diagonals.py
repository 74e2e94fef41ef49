"""The exact diagonal of the GGN, for parameters without a rule."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, close, forked_random_numbers, num_examples
from kfac_backend.model.checks import is_out_of_memory

__all__ = ["squared_gradients"]


def squared_gradients(
    model: nn.Module, names: Sequence[str], x: Any, f: Tensor, vectors: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Σ_n Σ_v (∂ v_nᵀf_n / ∂θ_i)² of each named parameter, in its shape.

    It takes a backward pass for each example and vector.

    Args:
        model: mixes no examples.
        names: of parameters.
        x: a batch of N examples.
        f: the model's outputs there, (N, ..., C).
        vectors: v, in the shape of f.
    """
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    diagonal = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outputs = _outputs(model, leaves, x, f)
    for vector in vectors:
        for n in range(len(f)):
            f_n, v_n = outputs[n % len(outputs)], vector[n : n + 1].to(f.dtype)
            if len(outputs) < len(f):  # a backward pass of the whole batch
                v_n = torch.zeros_like(f)
                v_n[n] = vector[n]
            if not f_n.requires_grad:
                continue
            gradients = torch.autograd.grad(
                f_n, list(leaves.values()), v_n,
                retain_graph=True, allow_unused=True, materialize_grads=True,
            )  # fmt: skip
            for total, gradient in zip(diagonal.values(), gradients, strict=True):
                total += gradient.square()
    return diagonal


def _outputs(model: nn.Module, leaves: dict[str, Tensor], x: Any, f: Tensor) -> list[Tensor]:
    """Each example's output (1, ..., C), or that of all if the model takes no example alone."""
    with torch.enable_grad(), forked_random_numbers(model):
        try:
            if num_examples(x) == len(f):
                alone = [
                    call_with(model, leaves, examples(x, slice(n, n + 1))) for n in range(len(f))
                ]
                if model.training or close(f.detach(), torch.cat(alone).detach()):
                    return alone
        except Exception as error:
            if is_out_of_memory(error):
                raise
        return [call_with(model, leaves, x)]
