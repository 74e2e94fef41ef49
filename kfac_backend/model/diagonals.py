"""The exact diagonal of the GGN, for parameters without a rule.

It needs the gradient of each example by itself. Examples run one by one, all at once by
`torch.func.vmap`. If a model does not run under vmap, or has other outputs there (one that decides
by its tensors' values), the whole batch runs, with a backward pass for each example.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, close, forked_random_numbers, num_examples
from kfac_backend.model.checks import is_out_of_memory

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
    at_once = num_examples(x) == len(f)
    remaining = iter(vectors)
    while some := list(islice(remaining, MOST_VECTORS)):
        u = torch.stack(some, 1).to(f.dtype)  # (N, V, ..., C)
        # As many examples at once as their gradients, one for each vector, fit into the memory.
        size = max(1, MOST_BYTES // max(1, bytes_each * len(some)))
        squares = _all_at_once(model, parameters, x, f, u, size) if at_once else None
        if squares is None:
            at_once = False  # for the other vectors, too
            squares = _whole(model, parameters, x, u)
        _add(diagonal, squares)
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
        for start in range(0, len(f), size):
            which = slice(start, start + size)
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


def _whole(model: nn.Module, parameters: dict[str, Tensor], x: Any, u: Tensor) -> dict[str, Tensor]:
    """The squares, from backward passes of the whole batch, one for each example and vector."""
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    with torch.enable_grad():
        f = call_with(model, leaves, x)
    if not f.requires_grad:
        return total
    for n, v in product(range(len(f)), range(u.shape[1])):
        only = torch.zeros_like(f)
        only[n] = u[n, v]
        gradients = torch.autograd.grad(
            f, list(leaves.values()), only, retain_graph=True, allow_unused=True
        )
        squares = zip(leaves, gradients, strict=True)
        _add(total, {name: g.square() for name, g in squares if g is not None})
    return total


def _add(total: dict[str, Tensor], squares: dict[str, Tensor]) -> None:
    for name, square in squares.items():
        total[name] = total[name] + square if name in total else square
