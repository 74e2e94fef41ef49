"""The gradients of a batch's outputs in all parameters, layer by layer, and their covariance."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.gradient_covariance import dense_covariance, gradient_covariance
from kfac_backend.layers import ExampleGradients, Rule, Use
from kfac_backend.layers.rule import dense_gradients
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer

__all__ = ["LayerGradients", "PosteriorPrecision"]

PosteriorPrecision = Mapping[str, tuple[EigenBlock, Tensor]]
"""Parameter name -> its block's eigenvectors, and the precision's eigenvalues > 0 in their basis,
(..., d_out, d_in) as `EigenBlock.spectrum` returns them."""


class _Term(NamedTuple):
    """What one use of one layer adds to the gradients in a parameter."""

    gradients: ExampleGradients
    transposed: bool


class LayerGradients:
    """Turns output gradients of layers into the outputs' covariance.

    Args:
        assignment: the layers.
        precision: the posterior precision.
        product_bytes: as of `gradient_covariance`.
    """

    def __init__(
        self, assignment: RuleAssignment, precision: PosteriorPrecision, product_bytes: int
    ) -> None:
        self._precision = precision
        self._product_bytes = product_bytes
        self.rules: dict[TrackedLayer, Rule] = {
            tracked: tracked.rule(tracked.layer, "expand", tracked.parameters)
            for tracked in assignment.all
        }
        places = [place for tracked in self.rules for place in _places(tracked)]
        self._tied = {place for place in places if places.count(place) > 1}

    def stands_alone(self, tracked: TrackedLayer, uses: int) -> bool:
        """Whether no other use has a part in its parameters' gradients."""
        return uses == 1 and not self._tied.intersection(_places(tracked))

    def add_one(
        self, covariance: Tensor, tracked: TrackedLayer, use: Use, rows: Tensor, size: int
    ) -> None:
        """Add the part of a layer that stands alone, some examples at a time.

        Args:
            covariance: (N, C, C), added to in place.
            tracked: the layer.
            use: its input.
            rows: its `Rule.position_gradients` for all outputs (M, R, C, d_out).
            size: examples at a time.
        """
        if use.rows is not None:
            self.add(covariance, [(tracked, use, rows)])
            return
        for start in range(0, len(use.a), size):
            chunk = slice(start, start + size)
            self.add(covariance[chunk], [(tracked, Use(use.a[chunk]), rows[chunk])])

    def add(self, covariance: Tensor, seen: list[tuple[TrackedLayer, Use, Tensor]]) -> None:
        """Add the part of all uses that were seen, whose gradients add up in tied parameters."""
        terms: dict[tuple[str, tuple[int, int]], list[_Term]] = {}
        for tracked, use, rows in seen:
            rule = self.rules[tracked]
            for local, gradients in rule.example_gradients(use.a, rows).items():
                place = tracked.parameters[local], tracked.slots.get(local, (0, 1))
                term = _Term(_by_example(gradients, use), rule.transposed)
                terms.setdefault(place, []).append(term)
        for (name, (slot, slots)), of_place in terms.items():
            block, spectrum = self._precision[name]
            if slots > 1:
                block, spectrum = _group(block, slot), spectrum[slot]
            covariance += self._covariance(of_place, block, spectrum)

    def _covariance(self, terms: list[_Term], block: EigenBlock, spectrum: Tensor) -> Tensor:
        ways = {term.transposed for term in terms if term.gradients.a is not None}
        if len(ways) > 1:
            return self._dense(terms, block, spectrum)
        return gradient_covariance(
            _joined([term.gradients for term in terms]),
            block,
            spectrum,
            self._product_bytes,
            transposed=terms[0].transposed,
        )

    def _dense(self, terms: list[_Term], block: EigenBlock, spectrum: Tensor) -> Tensor:
        """From dense gradients, of as many examples at once as there is room for."""
        N, _, C = terms[0].gradients.b.shape[1:4]
        row = C * spectrum.numel() * spectrum.element_size()
        size = max(1, self._product_bytes // row)
        parts = []
        for start in range(0, N, size):
            some = slice(start, start + size)
            dense = []
            for gradients, transposed in terms:
                a = None if gradients.a is None else gradients.a[:, some]
                of_some = ExampleGradients(gradients.b[:, some], a)
                dense.append(dense_gradients(of_some, transposed))
            parts.append(dense_covariance(torch.stack(dense).sum(0), block, spectrum))
        return torch.cat(parts)


def _places(tracked: TrackedLayer) -> list[tuple[str, tuple[int, int] | None]]:
    return [(name, tracked.slots.get(local)) for local, name in tracked.parameters.items()]


def _by_example(gradients: ExampleGradients, use: Use) -> ExampleGradients:
    """Rows put together by example, with zeros where one has fewer than another."""
    if use.rows is None:
        return gradients
    rows = use.rows

    def padded(x: Tensor) -> Tensor:  # (G, M, R, ...) as (G, N, K·R, ...)
        return rows.padded(x.movedim(1, 0)).movedim(2, 0).flatten(2, 3)

    return ExampleGradients(
        padded(gradients.b), None if gradients.a is None else padded(gradients.a)
    )


def _joined(gradients: list[ExampleGradients]) -> ExampleGradients:
    """One behind the other, along the positions."""
    if len(gradients) == 1:
        return gradients[0]
    inputs = [g.a for g in gradients if g.a is not None]
    b = torch.cat([g.b for g in gradients], 2)
    return ExampleGradients(b, torch.cat(inputs, 2) if inputs else None)


def _group(block: EigenBlock, g: int) -> EigenBlock:
    """One of a block's groups."""
    if block.alpha is None or block.Q_A is None:
        return EigenBlock(block.beta[g], block.Q_B[g])
    return EigenBlock(block.beta[g], block.Q_B[g], block.alpha[g], block.Q_A[g])
