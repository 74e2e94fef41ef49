"""The exact diagonal of the GGN, for parameters without a rule."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, close, forked_random_numbers, num_examples
from kfac_backend.model.checks import is_out_of_memory

__all__ = ["squared_gradients"]

ENTRIES = 2**24
"""Of all gradients that are held at a time, at most."""


def squared_gradients(
    model: nn.Module, names: Sequence[str], x: Any, f: Tensor, vectors: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Σ_n Σ_v (∂ v_nᵀf_n / ∂θ_i)² of each named parameter, in its shape.

    Many examples together where torch can map the model over them; otherwise with a call for each
    example, or, where the model takes none alone, a backward pass of the batch for each.

    Args:
        model: mixes no examples.
        names: of parameters.
        x: a batch of N examples.
        f: the model's outputs there, (N, ..., C).
        vectors: v, in the shape of f.
    """
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    vectors = list(vectors)
    for way in (_together, _alone) if num_examples(x) == len(f) else ():
        with torch.enable_grad(), forked_random_numbers(model):
            try:
                outputs, diagonal = way(model, leaves, x, vectors)
            except Exception as error:
                # torch maps over no loop that depends on values, and a model may need a whole batch
                if is_out_of_memory(error):
                    raise
                continue
        if model.training or close(f.detach(), outputs):
            return diagonal
    with torch.enable_grad(), forked_random_numbers(model):
        return _of_the_batch(model, leaves, x, vectors)


def _together(
    model: nn.Module, leaves: dict[str, Tensor], x: Any, vectors: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the diagonal by torch's map over examples, as many at once as fit."""

    def of_example(x_n: Any, vectors_n: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def output(leaves: dict[str, Tensor]) -> Tensor:
            return call_with(model, leaves, examples(x_n, None))[0]

        f_n, back, *_ = torch.func.vjp(output, leaves)
        (gradients,) = torch.func.vmap(back)(vectors_n)
        return f_n, {name: gradient.square().sum(0) for name, gradient in gradients.items()}

    stacked = torch.stack(vectors, 1)  # (N, V, ..., C)
    entries = len(vectors) * sum(leaf.numel() for leaf in leaves.values())
    size, N = max(1, ENTRIES // entries), len(stacked)
    outputs, diagonal = [], {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for start in range(0, N, size):
        which = slice(start, start + size)
        with warnings.catch_warnings():  # that an operation is mapped one by one inside
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            f, squares = torch.func.vmap(of_example)(examples(x, which), stacked[which])
        outputs.append(f.detach())
        for name, square in squares.items():
            diagonal[name] += square.detach().sum(0)
    return torch.cat(outputs), diagonal


def _alone(
    model: nn.Module, leaves: dict[str, Tensor], x: Any, vectors: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the diagonal by a call for each example, and a backward pass for each vector."""
    outputs, diagonal = [], {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for n in range(len(vectors[0])):
        f_n = call_with(model, leaves, examples(x, slice(n, n + 1)))
        outputs.append(f_n.detach())
        for vector in vectors:
            _add(diagonal, leaves, f_n, vector[n : n + 1])
    return torch.cat(outputs), diagonal


def _of_the_batch(
    model: nn.Module, leaves: dict[str, Tensor], x: Any, vectors: list[Tensor]
) -> dict[str, Tensor]:
    """The diagonal by a backward pass of the whole batch for each example."""
    diagonal = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    f = call_with(model, leaves, x)
    for vector in vectors:
        for n in range(len(f)):
            v_n = torch.zeros_like(f)
            v_n[n] = vector[n]
            _add(diagonal, leaves, f, v_n)
    return diagonal


def _add(diagonal: dict[str, Tensor], leaves: dict[str, Tensor], f: Tensor, vector: Tensor) -> None:
    if not f.requires_grad:
        return
    gradients = torch.autograd.grad(
        f, list(leaves.values()), vector.to(f.dtype),
        retain_graph=True, allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    for total, gradient in zip(diagonal.values(), gradients, strict=True):
        total += gradient.square()
