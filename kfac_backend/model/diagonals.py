"""The exact diagonal of the GGN, for parameters without a rule.

It needs each example's gradient by itself. Three ways lead to it, from the fastest to the slowest,
and the first one that gives the model's outputs is used: single examples, all at once
(`torch.func.vmap`); single examples, one after the other (for a forward that decides by its
tensors' values); the whole batch, with a backward pass for each example.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, forked_random_numbers, num_examples
from kfac_backend.model.comparison import close
from kfac_backend.model.memory import is_out_of_memory

__all__ = ["squared_gradients"]

MOST_BYTES = 64 * 2**20
"""Bytes of gradients that are held at once, but at least one example's for one vector."""
MOST_VECTORS = 16
"""Vectors that share a forward pass. Each holds gradients of all activations."""


def squared_gradients(
    model: nn.Module, names: Sequence[str], x: Any, f: Tensor, vectors: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Σ_n Σ_v (∂ v_nᵀf_n / ∂θ_i)² of each named parameter, in its shape.

    Args:
        model: mixes no examples.
        names: of parameters.
        x: a batch of N examples.
        f: the model's outputs there, (N, ..., C).
        vectors: v, in the shape of f.
    """
    by_name = dict(model.named_parameters())
    parameters = {name: by_name[name].detach() for name in names}
    diagonal = {name: torch.zeros_like(p) for name, p in parameters.items()}
    bytes_each = sum(p.nbytes for p in parameters.values())
    ways = [_all_at_once, _one_by_one] if num_examples(x) == len(f) else []
    remaining = iter(vectors)
    while some := list(islice(remaining, MOST_VECTORS)):
        u = torch.stack(some, 1).to(f.dtype)  # (N, V, ..., C)
        size = max(1, MOST_BYTES // max(1, bytes_each * len(some)))
        while True:
            way = ways[0] if ways else _whole
            squares = way(model, parameters, x, f, u, size)
            if squares is not None:
                break
            ways.pop(0)  # a way that fails for some vectors fails for the others
        for name, square in squares.items():
            diagonal[name] += square
    return diagonal


def _all_at_once(
    model: nn.Module, parameters: dict[str, Tensor], x: Any, f: Tensor, u: Tensor, size: int
) -> dict[str, Tensor] | None:
    """The squares, ``size`` examples at a time; None if the model does not run under vmap."""

    def of_one(x_n: Any, u_n: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        one = {k: v[None] for k, v in x_n.items()} if isinstance(x_n, dict) else x_n[None]
        f_n, pull, *_ = vjp(lambda values: call_with(model, values, one)[0], parameters)
        (gradients,) = vmap(pull)(u_n)  # (V, ...)
        return f_n, {name: g.square().sum(0) for name, g in gradients.items()}

    if not isinstance(x, Tensor | dict):
        return None
    total: dict[str, Tensor] = {}
    try:
        for which in _slices(len(f), size):
            with forked_random_numbers(model):
                g, squares = vmap(of_one, randomness="different")(examples(x, which), u[which])
            if not model.training and not close(f[which].detach(), g.detach()):
                return None
            _add(total, {name: square.sum(0) for name, square in squares.items()})
    except Exception as error:  # whatever vmap cannot do
        if is_out_of_memory(error):
            raise
        return None
    return total


def _one_by_one(
    model: nn.Module, parameters: dict[str, Tensor], x: Any, f: Tensor, u: Tensor, size: int
) -> dict[str, Tensor] | None:
    """The squares, from a forward pass for each example; None if that gives other outputs."""
    total: dict[str, Tensor] = {}
    leaves = {name: p.requires_grad_() for name, p in _detached(parameters).items()}
    for which in _slices(len(f), 1):
        with torch.enable_grad():
            try:
                f_n = call_with(model, leaves, examples(x, which))
            except Exception as error:  # a model that needs its whole batch
                if is_out_of_memory(error):
                    raise
                return None
        if not model.training and not close(f[which].detach(), f_n.detach()):
            return None
        _add(total, _squares(f_n, leaves, u[which].transpose(0, 1)))
    return total


def _whole(
    model: nn.Module, parameters: dict[str, Tensor], x: Any, f: Tensor, u: Tensor, size: int
) -> dict[str, Tensor]:
    """The squares, from backward passes of the whole batch, one for each example and vector."""
    leaves = {name: p.requires_grad_() for name, p in _detached(parameters).items()}
    total: dict[str, Tensor] = {}
    with torch.enable_grad():
        f = call_with(model, leaves, x)
    for n in range(len(f)):
        only = torch.zeros_like(f).expand(u.shape[1], *f.shape).clone()
        only[:, n] = u[n]
        _add(total, _squares(f, leaves, only))
    return total


def _squares(f: Tensor, leaves: dict[str, Tensor], vectors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Σ_v (∂ vᵀf / ∂θ_i)²."""
    total: dict[str, Tensor] = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    if not f.requires_grad:
        return total
    gradients = partial(
        torch.autograd.grad, f, list(leaves.values()), retain_graph=True, allow_unused=True
    )
    for vector in vectors:
        for name, g in zip(leaves, gradients(vector), strict=True):
            if g is not None:
                total[name] = total[name] + g.square()
    return {name: of_name.detach() for name, of_name in total.items()}


def _detached(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in parameters.items()}


def _add(total: dict[str, Tensor], squares: dict[str, Tensor]) -> None:
    for name, square in squares.items():
        total[name] = total[name] + square if name in total else square


def _slices(N: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, N, size))
