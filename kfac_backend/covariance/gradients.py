"""Collect each example's gradient of each parameter, as factors, from the uses of the layers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.engine.capture import Sink, unknown_examples
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.layers import ExampleGradients, Rule, Use
from kfac_backend.layers.rule import dense_gradients

PosteriorPrecision = Mapping[str, tuple[EigenBlock, Tensor]]
"""Maps a parameter's name to its block's eigenvectors, and to the precision's eigenvalues > 0 in
their basis, (..., d_out, d_in), as from `EigenBlock.spectrum`."""
LayerUse = tuple[TrackedLayer, Use, Tensor]
"""Use of a layer, and its `Rule.position_gradients` for C outputs or vectors (M, R, C, d_out)."""


class ParameterGradients(NamedTuple):
    """Examples' gradients of a parameter, or of one of its maps: a sum over uses.

    It includes the eigenvectors Q = Q_B ⊗ Q_A of the parameter's block, and a number for each.
    """

    block: EigenBlock
    spectrum: Float[Tensor, "*G rows columns"]
    uses: list[tuple[ExampleGradients, bool]]
    """Each use's gradients, and whether the use has the parameter stored as (d_in, d_out)."""
    name: str = ""
    """The parameter's name."""
    slot: int = 0
    """Index of the map among the maps in the parameter."""

    def concatenated_uses(self) -> tuple[ExampleGradients, bool] | None:
        """Return concatenated positions of uses, and whether the parameter is (d_in, d_out).

        None if it is used in both orientations, because the gradients then have no common factors.
        """
        if len({transposed for g, transposed in self.uses if g.a is not None}) > 1:
            return None
        if len(self.uses) == 1:
            return self.uses[0]
        b = torch.cat([g.b for g, _ in self.uses], 2)
        inputs = [g.a for g, _ in self.uses if g.a is not None]
        return ExampleGradients(b, torch.cat(inputs, 2) if inputs else None), self.uses[0][1]

    def dense(self, some: slice = slice(None)) -> Float[Tensor, "n C P"]:
        """Return the dense gradients of some of the examples."""
        # Sum over uses, which have no common factors in two orientations.
        g = sum(
            dense_gradients(_of_some(of_use, some), transposed) for of_use, transposed in self.uses
        )
        assert isinstance(g, Tensor)
        return g

    def dense_in_basis(
        self, most_bytes: int, q: int = 1
    ) -> Iterator[Float[Tensor, "n C *spectrum"]]:
        """Yield Qᵀ g of the dense gradients g in the spectrum's shape, some examples at a time.

        These take at most ``most_bytes``, and q divides their number.
        """
        _, N, _, C, _ = self.uses[0][0].b.shape
        dtype = self.block.Q_B.dtype
        size = max(1, most_bytes // (q * C * self.spectrum.numel() * dtype.itemsize)) * q
        for start in range(0, N, size):
            # Rotate and square the sum over uses, which keeps the products of different uses.
            yield self.block.rotate(self.dense(slice(start, start + size)).to(dtype))


class LayerGradients:
    """Collect the uses of layers, by parameter."""

    def __init__(
        self, assignment: RuleAssignment, spectra: Mapping[str, tuple[EigenBlock, Tensor]]
    ) -> None:
        self.rules: dict[TrackedLayer, Rule] = {
            tracked: tracked.rule(tracked.layer, "expand", tracked.parameters)
            for tracked in assignment.all
        }
        self.spectra = spectra
        """Maps a parameter's name to its block's eigenvectors, and a number for each."""
        places = [place for tracked in self.rules for place in _places(tracked)]
        self._tied = {place for place in places if places.count(place) > 1}

    def is_tied(self, tracked: TrackedLayer) -> bool:
        """Return whether another layer has a parameter of this one."""
        return bool(self._tied.intersection(_places(tracked)))

    def by_parameter(
        self,
        layer_uses: Iterable[LayerUse],
        uses: Mapping[TrackedLayer, int],
        most_bytes: int | None,
    ) -> Iterator[tuple[slice, ParameterGradients]]:
        """Yield the gradients of one parameter after the other, with the slice of their examples.

        Each of the layers' uses is dropped before the next one is read. ``uses`` has the number of
        runs of each layer, and ``most_bytes`` limits the bytes of a use's inputs and gradients at
        once; None takes all examples together.
        """
        tied = []
        for tracked, use, rows in layer_uses:
            # No other use contributes to the gradients of this layer's parameters. So they can be
            # squared, and dropped, before the next layer's are formed.
            alone = uses[tracked] == 1 and not self.is_tied(tracked)
            if alone and most_bytes is not None:
                for subset, some in self._some_examples((tracked, use, rows), most_bytes):
                    for gradients in self._of_uses([some]):
                        yield subset, gradients
            else:  # sum the gradients of a tied parameter first
                tied.append((tracked, use, rows))
        for gradients in self._of_uses(tied):
            yield slice(None), gradients

    def _some_examples(
        self, layer_use: LayerUse, most_bytes: int
    ) -> Iterator[tuple[slice, LayerUse]]:
        """Yield parts of a use with a limited number of bytes, but at least one example."""
        tracked, use, rows = layer_use
        if use.rows is not None:  # rows of several examples have no slices
            yield slice(None), layer_use
            return
        _, R, C, d_out = rows.shape
        entries = max(self.spectra[name][0].numel for name in tracked.parameters.values())
        # Both exist twice while they are rotated into the eigenbasis.
        of_example = 2 * R * (entries // d_out + C * d_out) * rows.element_size()
        size = max(1, most_bytes // max(1, of_example))
        for start in range(0, len(use.a), size):
            chunk = slice(start, start + size)
            yield chunk, (tracked, Use(use.a[chunk]), rows[chunk])

    def _of_uses(self, layer_uses: list[LayerUse]) -> Iterator[ParameterGradients]:
        """Yield each parameter's gradients, summed over the given uses."""
        uses: dict[tuple[str, tuple[int, int]], list[tuple[ExampleGradients, bool]]] = {}
        for tracked, use, rows in layer_uses:
            rule = self.rules[tracked]
            for local, gradients in rule.example_gradients(use.a, rows).items():
                place = tracked.parameters[local], tracked.slots.get(local, (0, 1))
                uses.setdefault(place, []).append((_by_example(gradients, use), rule.transposed))
        # All uses of a slot are known now, so add their gradients before squaring.
        for (name, (slot, slots)), of_place in uses.items():
            block, spectrum = self.spectra[name]
            if slots > 1:  # a tensor with several maps, one below the other
                block, spectrum = _group_of(block, slot), spectrum[slot]
            yield ParameterGradients(block, spectrum, of_place, name, slot)


class HeldGradients(Sink):
    """Hold the gradients of all layers' outputs, vector by vector, until `take` returns them.

    If ``num_examples`` is set, all uses must have this number.
    """

    needs_inputs = True

    num_examples: int | None = None

    def __init__(self, gradients: LayerGradients, differentiable: bool = False) -> None:
        self.gradients, self.differentiable = gradients, differentiable
        self.forget()

    def forget(self) -> None:
        """Begin with another forward pass."""
        self.uses = Counter[TrackedLayer]()
        """Number of runs of each layer."""
        # For each use, gradients (M, R, d_out) by the number of their vector.
        self._by_use: dict[tuple[TrackedLayer, Use], dict[int, Tensor]] = {}
        self._stacked: dict[tuple[TrackedLayer, Use], Tensor] = {}  # (M, R, V, d_out)
        self.num_vectors = self.nbytes = 0

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Count a use."""
        self.uses[tracked] += 1

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Store a vector's gradient."""
        number = len(use.a) if use.rows is None else use.rows.num_examples
        if self.num_examples is not None and number != self.num_examples:
            raise unknown_examples(tracked, number, self.num_examples, "outputs")
        rows = self.gradients.rules[tracked].position_gradients(use, b)
        self._by_use.setdefault((tracked, use), {})[self.num_vectors] = rows.clone()
        self.nbytes += rows.nbytes

    def vector_done(self) -> None:
        """Begin the next vector."""
        self.num_vectors += 1

    def store_at_once(self, backward: Callable[[list[Tensor]], object], vectors: Tensor) -> None:
        """Store the gradients of vectors (V, ...) by one backward pass, mapped over the vectors."""

        def of_vector(vector: Tensor) -> list[Tensor]:
            backward([vector])
            # Tensors of a mapped function exist only within it, unless it returns them.
            keys[:] = self._by_use
            return [self._by_use.pop(key)[0] for key in keys]

        keys: list[tuple[TrackedLayer, Use]] = []
        gradients = torch.vmap(of_vector)(vectors)
        self._stacked = {k: b.movedim(0, 2) for k, b in zip(keys, gradients, strict=True)}

    def take(self) -> Iterator[LayerUse]:
        """Yield the uses with gradients (M, R, V, d_out), each dropped before the next one."""
        while self._stacked:
            (tracked, use), rows = self._stacked.popitem()
            yield tracked, use, rows
        while self._by_use:
            (tracked, use), of_use = self._by_use.popitem()
            # A vector that does not reach this use has the gradient zero there.
            zero = torch.zeros_like(next(iter(of_use.values())))
            rows = [of_use.pop(v, zero) for v in range(self.num_vectors)]
            yield tracked, use, torch.stack(rows, 2)
        self.num_vectors = self.nbytes = 0


def _group_of(block: EigenBlock, g: int) -> EigenBlock:
    """Return the eigenvectors of one of a block's groups."""
    if block.alpha is None or block.Q_A is None:
        return EigenBlock(block.beta[g], block.Q_B[g])
    return EigenBlock(block.beta[g], block.Q_B[g], block.alpha[g], block.Q_A[g])


def _places(tracked: TrackedLayer) -> list[tuple[str, tuple[int, int] | None]]:
    return [(name, tracked.slots.get(local)) for local, name in tracked.parameters.items()]


def _of_some(gradients: ExampleGradients, some: slice) -> ExampleGradients:
    a = None if gradients.a is None else gradients.a[:, some]
    return ExampleGradients(gradients.b[:, some], a)


def _by_example(gradients: ExampleGradients, use: Use) -> ExampleGradients:
    """Return gradients of rows as gradients of examples, padded with zeros to equal lengths."""
    if use.rows is None:
        return gradients
    rows = use.rows

    def padded(x: Tensor) -> Tensor:  # (G, M, R, ...) as (G, N, K·R, ...)
        return rows.padded(x.movedim(1, 0)).movedim(2, 0).flatten(2, 3)

    return ExampleGradients(
        padded(gradients.b), None if gradients.a is None else padded(gradients.a)
    )
