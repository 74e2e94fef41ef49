"""Gradients of single examples in parameters without a rule, whose blocks are diagonals."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.layers import ExampleGradients
from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, forked_random_numbers, num_examples

__all__ = ["gradients_without_rule"]


def gradients_without_rule(
    model: nn.Module,
    names: Sequence[str],
    x: Any,
    positions: Tensor,
    columns: Tensor,
    at_once: int,
    differentiable: bool,
) -> Iterator[tuple[slice, dict[str, ExampleGradients]]]:
    """Slices of the examples, one after the other, and their gradients by parameter.

    Each example runs alone, with a backward pass for each of its outputs. A batch that cannot be
    split runs whole.

    Args:
        model: a model that mixes no examples.
        names: names of the parameters.
        x: a batch of N examples.
        positions: (N,) the position of the wanted outputs, among all positions of an output.
        columns: (N, K) the indices of the outputs there.
        at_once: examples in a slice.
        differentiable: keep the graph of the gradients with respect to the inputs.
    """
    N, K = columns.shape
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    whole = None
    if num_examples(x) != N:
        with torch.enable_grad(), forked_random_numbers(model):
            whole = call_with(model, leaves, x)

    def jacobian(n: int) -> list[tuple[Tensor, ...]]:
        """The gradients of one example's outputs."""
        with torch.enable_grad(), forked_random_numbers(model):
            f = call_with(model, leaves, examples(x, slice(n, n + 1))) if whole is None else whole
            f_n = f[0 if whole is None else n].reshape(-1, f.shape[-1])[positions[n], columns[n]]
            return [
                torch.autograd.grad(
                    f_n[k], list(leaves.values()),
                    retain_graph=True, create_graph=differentiable,
                    allow_unused=True, materialize_grads=True,
                )
                for k in range(K)
            ]  # fmt: skip

    for start in range(0, N if names else 0, at_once):
        which = slice(start, min(start + at_once, N))
        found = [jacobian(n) for n in range(which.start, which.stop)]
        by_name = {}
        for i, name in enumerate(names):
            # (n, K, P) as P groups of one entry, (P, n, 1, K, 1).
            J = torch.stack([torch.stack([g[i].flatten() for g in of_one]) for of_one in found])
            by_name[name] = ExampleGradients(J.movedim(2, 0)[:, :, None, :, None])
        yield which, by_name
