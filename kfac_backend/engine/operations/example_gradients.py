"""Compute per-example gradients of parameters without a rule, whose blocks are diagonals."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples, num_examples
from kfac_backend.engine.capture import Sink
from kfac_backend.engine.model_calls import call_with, close, forked_random_numbers, try_twice

ENTRIES = 2**24
"""Maximum number of gradient entries that are held at a time."""


def report_gradients(
    model: nn.Module,
    names: Sequence[str],
    x: Any,
    vectors_of: Callable[[Tensor], Iterator[Tensor]],
    sink: Sink,
) -> None:
    """Pass a batch's gradients of parameters without a rule to a sink.

    ``vectors_of`` returns the vectors to propagate back from outputs (N, ..., C).
    """
    with torch.no_grad(), forked_random_numbers(model):
        f = call_with(model, {}, x)
    vectors = torch.stack(list(vectors_of(f)), 1)  # (N, V, ..., C)
    for _, by_name in gradients_of_examples(
        model, names, x, f, vectors.__getitem__, vectors.shape[1]
    ):
        for name, g in by_name.items():
            sink.example_gradients(name, g)


def gradients_of_examples(
    model: nn.Module,
    names: Sequence[str],
    x: Any,
    f: Tensor,
    vectors: Callable[[slice], Tensor],
    num_vectors: int,
    *,
    entries: int = ENTRIES,
    differentiable: bool = False,
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Return slices of the examples with their gradients Jᵀ v (n, V, *shape) by name.

    Args:
        model: a model that mixes no examples.
        names: names of the parameters.
        x: a batch of N examples.
        f: the model's outputs there, (N, ..., C).
        vectors: returns the vectors v of a slice of the examples, (n, V, ..., C).
        num_vectors: V.
        entries: maximum number of gradient entries of a slice, which has at least one example.
        differentiable: keep the graph of the gradients with respect to the inputs.
    """
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}

    def output(some: Any) -> Tensor:
        with torch.enable_grad(), forked_random_numbers(model):
            return call_with(model, leaves, some)

    N, alone = len(f), num_examples(x) == len(f)
    maps, of_batch = alone and not differentiable, None
    size = max(1, entries // max(1, num_vectors * sum(leaf.numel() for leaf in leaves.values())))
    for start in range(0, N if names else 0, size):
        subset = slice(start, min(start + size, N))
        v = vectors(subset).to(f.dtype)
        # First choice: the whole slice at once, by torch's map over examples.
        mapped = _mapped(model, leaves, examples(x, subset), v) if maps else None
        if mapped is not None and (model.training or close(f[subset].detach(), mapped[0])):
            yield subset, mapped[1]
            continue
        maps = False
        # Otherwise one call per example, or one for all if the model takes no single examples.
        gradients = []  # per example and vector, in order
        for n in range(subset.start, subset.stop):
            one = slice(n, n + 1)
            f_n: Any = try_twice(lambda one=one: output(examples(x, one))) if alone else None
            is_right = isinstance(f_n, Tensor) and (model.training or close(f[one].detach(), f_n))
            if not is_right:
                alone, of_batch = False, output(x) if of_batch is None else of_batch
                with torch.enable_grad():
                    f_n = of_batch[one]
            gradients += [_gradients(f_n, leaves, w[None], differentiable) for w in v[n - start]]
        by_name = zip(names, zip(*gradients, strict=True), strict=True)
        yield subset, {name: torch.stack(g).unflatten(0, v.shape[:2]) for name, g in by_name}


def _mapped(
    model: nn.Module, leaves: dict[str, Tensor], x: Any, vectors: Tensor
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return outputs and gradients of all examples, or None if torch cannot map the model."""

    def of_example(x_n: Any, vectors_n: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def output(leaves: dict[str, Tensor]) -> Tensor:
            return call_with(model, leaves, examples(x_n, None))[0]

        f_n, back, *_ = torch.func.vjp(output, leaves)
        (gradients,) = torch.func.vmap(back)(vectors_n)
        return f_n.detach(), gradients

    def trial() -> tuple[Tensor, dict[str, Tensor]]:
        with warnings.catch_warnings(), forked_random_numbers(model), torch.no_grad():
            # vmap runs some operations one by one inside.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return torch.func.vmap(of_example)(x, vectors)

    # Fails for loops that depend on values, and for models that need whole batches.
    mapped = try_twice(trial)
    return None if isinstance(mapped, Exception) else mapped


def _gradients(
    f: Tensor, leaves: dict[str, Tensor], vector: Tensor, differentiable: bool
) -> Sequence[Tensor]:
    if not f.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves.values()]
    return torch.autograd.grad(
        f, list(leaves.values()), vector,
        retain_graph=True, create_graph=differentiable, allow_unused=True, materialize_grads=True,
    )  # fmt: skip
