"""Gradients of single examples in parameters without a rule, whose blocks are diagonals.

The model runs on single examples, many at once by `torch.func.vmap`. If it cannot, for example
because its forward decides by its tensors' values, they run one after the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from kfac_backend.layers import ExampleGradients
from kfac_backend.model.batches import examples
from kfac_backend.model.calls import (
    call_with,
    close,
    forked_random_numbers,
    num_examples,
    plain_attention,
)
from kfac_backend.model.checks import is_out_of_memory

__all__ = ["GradientsWithoutRule"]


class GradientsWithoutRule:
    """A function to the outputs' gradients in some parameters, in the form for diagonal blocks.

    They are differentiable in the inputs if these have a graph.

    Args:
        model: a model that mixes no examples.
        names: names of the parameters.
        most_bytes: bytes of gradients to compute at once, but at least one example's.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], most_bytes: int) -> None:
        own = dict(model.named_parameters())
        self._model = model
        self._parameters = {name: own[name].detach() for name in names}
        self._bytes = sum(p.nbytes for p in self._parameters.values())
        self._most_bytes = most_bytes
        self._at_once = True

    def __call__(
        self, x: Any, f: Tensor, positions: Tensor, columns: Tensor, together: bool = False
    ) -> Iterator[tuple[slice, dict[str, ExampleGradients]]]:
        """Slices of the examples, one after the other, and their gradients by parameter.

        Args:
            x: a batch of N examples.
            f: their wanted outputs, (N, K).
            positions: (N,) the position of these outputs, among all positions of an output.
            columns: (N, K) the indices of the outputs there.
            together: return those of all examples at once.
        """
        parts = self._parts(x, f, positions, columns)
        if not together:
            yield from ((which, _as_diagonal(found)) for which, found in parts)
        elif self._parameters:
            found = [of_part for _, of_part in parts]
            whole = {name: torch.cat([J[name] for J in found]) for name in self._parameters}
            yield slice(None), _as_diagonal(whole)

    def _parts(
        self, x: Any, f: Tensor, positions: Tensor, columns: Tensor
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Name -> (n, K, ...), of some examples after the other."""
        N, K = f.shape
        apart = num_examples(x) == N
        self._at_once = self._at_once and apart and isinstance(x, Tensor | Mapping)
        start = 0 if self._parameters else N
        while start < N:
            jacobians = None
            size = max(1, self._most_bytes // max(1, K * self._bytes)) if apart else N
            which = slice(start, start + size)
            if self._at_once:
                jacobians = self._all_at_once(x, f, positions, columns, which)
                self._at_once = jacobians is not None  # for the other batches, too
            if jacobians is None:
                which = slice(start, start + (1 if apart else N))
                jacobians = self._of_batch(x, positions, columns, which, apart)
            yield which, jacobians
            start = which.stop

    def _all_at_once(
        self, x: Any, f: Tensor, positions: Tensor, columns: Tensor, which: slice
    ) -> dict[str, Tensor] | None:
        """Name -> (n, K, ...); None if the model fails under vmap, or has other outputs there."""

        def of_one(x_n: Any, position: Tensor, column: Tensor) -> tuple[Any, Tensor]:
            one = x_n[None] if isinstance(x_n, Tensor) else {k: v[None] for k, v in x_n.items()}

            def outputs(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                f_n = call_with(self._model, p, one)
                f_n = f_n.reshape(-1, f_n.shape[-1]).index_select(0, position[None])[0]
                f_n = f_n.gather(0, column)
                return f_n, f_n

            return jacrev(outputs, has_aux=True)(self._parameters)

        try:
            with forked_random_numbers(self._model), plain_attention.held():
                jacobians, g = vmap(of_one, randomness="different")(
                    examples(x, which), positions[which], columns[which]
                )
        except Exception as error:  # whatever vmap cannot do
            if is_out_of_memory(error):
                raise
            return None
        same = self._model.training or close(f[which].detach(), g.detach())
        return jacobians if same else None

    def _of_batch(
        self, x: Any, positions: Tensor, columns: Tensor, which: slice, apart: bool
    ) -> dict[str, Tensor]:
        """Name -> (n, K, ...), from one forward pass of these examples, or of the whole batch."""

        def outputs(p: dict[str, Tensor], x: Any) -> Tensor:
            f = call_with(self._model, p, x)
            f = f.flatten(1, -2) if f.dim() > 2 else f[:, None]
            rows = torch.arange(len(f), device=f.device)[:, None]
            return f[rows, positions[which, None], columns[which]]

        some = examples(x, which) if apart else x
        return jacrev(partial(outputs, x=some))(self._parameters)


def _as_diagonal(jacobians: dict[str, Tensor]) -> dict[str, ExampleGradients]:
    """(N, K, ...) as P groups of one entry, (P, N, 1, K, 1)."""
    return {
        name: ExampleGradients(J.flatten(2).movedim(2, 0)[:, :, None, :, None])
        for name, J in jacobians.items()
    }
