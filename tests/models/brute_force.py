"""What every block of any model should be, by brute force: no hook, no rule, no batch.

A parameter that is only used linearly, as it is, has a block by K-FAC's definition (`tests.uses`,
`tests.oracles.kfac_from_uses`). Any other has the block of the GGN.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.oracles import kfac_from_uses, loss_hessians, nearest_kronecker
from tests.uses import uses_of, watched

__all__ = ["Reference", "reference"]


class Reference(NamedTuple):
    """What a model's blocks should be."""

    products: dict[str, list[tuple[Tensor, Tensor]]]
    """Parameter -> the two factors of each of its groups, for linear uses alone."""
    gradients: dict[str, Tensor]
    """Parameter -> (K, P): the GGN's block is the sum of the outer products of the rows."""


def reference(model: nn.Module, x: Any, likelihood: str, approx: str) -> Reference:
    """The blocks by K-FAC's definition and by the GGN's."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    N = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    examples = [
        {k: v[n : n + 1] for k, v in x.items()} if isinstance(x, dict) else x[n : n + 1]
        for n in range(N)
    ]
    uses, outputs = uses_of([partial(_output, model, one) for one in examples], parameters)
    hessians = loss_hessians(outputs, likelihood)
    other = _other_ways(model, parameters, examples[0])
    products: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, _), of_group in sorted(uses.items()):
        if name not in other:
            both = []
            for use in of_group:
                B, A = kfac_from_uses([use], hessians, approx, use.ragged)
                A = torch.ones_like(A) if use.is_bias else A
                both.append((A, B) if use.input_first else (B, A))
            product = both[0] if len(both) == 1 else nearest_kronecker(both)
            products.setdefault(name, []).append(product)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for one, Lambdas in zip(examples, hessians, strict=True):
        f = _output(model, one)
        for f_t, Lambda in zip(f.reshape(-1, f.shape[-1]), Lambdas, strict=True):
            for v in _root(Lambda).T:
                g = torch.autograd.grad(
                    f_t @ v, list(parameters.values()), retain_graph=True, materialize_grads=True
                )
                for of_name, g_name in zip(rows.values(), g, strict=True):
                    of_name.append(g_name.flatten())
    return Reference(products, {name: torch.stack(of_name) for name, of_name in rows.items()})


def _other_ways(model: nn.Module, parameters: dict[str, Tensor], one: Any) -> set[str]:
    """The parameters that also act in another way than by linear uses.

    In these their weights are detached: what still has a gradient acts elsewhere.
    """
    with watched(parameters, detach=True):
        f = _output(model, one)
    if not f.requires_grad:
        return set()
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=f.dtype)
    leaves = list(parameters.values())
    grads = torch.autograd.grad((f * u).sum(), leaves, allow_unused=True)
    return {n for n, g in zip(parameters, grads, strict=True) if g is not None and g.any()}


def _output(model: nn.Module, one: Any) -> Tensor:
    f = model(**one) if isinstance(one, dict) else model(one)
    return getattr(f, "logits", f)


def _root(Lambda: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(Lambda)
    return vectors * values.clamp(min=0).sqrt()
