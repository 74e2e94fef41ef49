"""The gradients in each parameter, example by example, from the uses of its layers."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.layers import ExampleGradients, Rule, Use
from kfac_backend.layers.rule import dense_gradients
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer

__all__ = ["ParameterGradients", "Place", "Seen", "SumOfUses", "group_of", "some_examples"]

Seen = tuple[TrackedLayer, Use, Tensor]
"""A layer's use, and its `Rule.position_gradients` for C outputs or vectors (M, R, C, d_out)."""
Place = tuple[str, tuple[int, int]]
"""A parameter's name, and (index, count) of a row block of it; (0, 1) for a tensor with one map."""


class _Term(NamedTuple):
    """The part of one use in the gradients of a parameter."""

    gradients: ExampleGradients
    transposed: bool


class SumOfUses(NamedTuple):
    """The examples' gradients in a parameter: a sum over all its uses."""

    terms: list[_Term]

    def in_one_way(self) -> tuple[ExampleGradients, bool] | None:
        """The uses' positions concatenated, and whether the parameter is stored inputs first.

        None if it is used in both orientations, so that the gradients have no common factors.
        """
        ways = {term.transposed for term in self.terms if term.gradients.a is not None}
        if len(ways) > 1:
            return None
        gradients = [term.gradients for term in self.terms]
        return _joined(gradients), self.terms[0].transposed

    def dense(self, most_bytes: int) -> Iterator[Tensor]:
        """The dense gradients (n, C, P) of n examples after the other.

        Args:
            most_bytes: bytes that those of n examples may take; n is at least one.
        """
        b, a = self.terms[0].gradients
        G, N, _, C, d_out = b.shape
        P = G * d_out * (1 if a is None else a.shape[-1])
        size = max(1, most_bytes // (C * P * b.element_size()))
        for start in range(0, N, size):
            some = slice(start, start + size)
            parts = [dense_gradients(_of_some(g, some), way) for g, way in self.terms]
            yield torch.stack(parts).sum(0)


class ParameterGradients:
    """Collects the uses of layers, parameter by parameter.

    Args:
        assignment: the layers.
    """

    def __init__(self, assignment: RuleAssignment) -> None:
        self.rules: dict[TrackedLayer, Rule] = {
            tracked: tracked.rule(tracked.layer, "expand", tracked.parameters)
            for tracked in assignment.all
        }
        places = [place for tracked in self.rules for place in _places(tracked)]
        self._tied = {place for place in places if places.count(place) > 1}

    def stands_alone(self, tracked: TrackedLayer, uses: int) -> bool:
        """Whether no other use contributes to the gradients in the layer's parameters."""
        return uses == 1 and not self._tied.intersection(_places(tracked))

    def of_uses(self, seen: list[Seen]) -> Iterator[tuple[Place, SumOfUses]]:
        """Each parameter's gradients, summed over the given uses."""
        terms: dict[Place, list[_Term]] = {}
        for tracked, use, rows in seen:
            rule = self.rules[tracked]
            for local, gradients in rule.example_gradients(use.a, rows).items():
                place = tracked.parameters[local], tracked.slots.get(local, (0, 1))
                term = _Term(_by_example(gradients, use), rule.transposed)
                terms.setdefault(place, []).append(term)
        for place, of_place in terms.items():
            yield place, SumOfUses(of_place)


def some_examples(seen: Seen, size: int) -> Iterator[tuple[slice, Seen]]:
    """Parts of a use with ``size`` examples each; the whole use if it has `Use.rows`."""
    tracked, use, rows = seen
    if use.rows is not None:
        yield slice(None), seen
        return
    for start in range(0, len(use.a), size):
        chunk = slice(start, start + size)
        yield chunk, (tracked, Use(use.a[chunk]), rows[chunk])


def group_of(block: EigenBlock, g: int) -> EigenBlock:
    """The eigenvectors of one of a block's groups."""
    Q_B, Q_A = block.Q_B, block.Q_A
    assert isinstance(Q_B, Tensor)  # packed tensors have no sketch
    if block.alpha is None or not isinstance(Q_A, Tensor):
        return EigenBlock(block.beta[g], Q_B[g])
    return EigenBlock(block.beta[g], Q_B[g], block.alpha[g], Q_A[g])


def _places(tracked: TrackedLayer) -> list[tuple[str, tuple[int, int] | None]]:
    return [(name, tracked.slots.get(local)) for local, name in tracked.parameters.items()]


def _of_some(gradients: ExampleGradients, some: slice) -> ExampleGradients:
    a = None if gradients.a is None else gradients.a[:, some]
    return ExampleGradients(gradients.b[:, some], a)


def _by_example(gradients: ExampleGradients, use: Use) -> ExampleGradients:
    """Gradients of rows as those of examples, padded with zeros to the largest number of rows."""
    if use.rows is None:
        return gradients
    rows = use.rows

    def padded(x: Tensor) -> Tensor:  # (G, M, R, ...) as (G, N, K·R, ...)
        return rows.padded(x.movedim(1, 0)).movedim(2, 0).flatten(2, 3)

    return ExampleGradients(
        padded(gradients.b), None if gradients.a is None else padded(gradients.a)
    )


def _joined(gradients: list[ExampleGradients]) -> ExampleGradients:
    """Gradients concatenated along the positions."""
    if len(gradients) == 1:
        return gradients[0]
    inputs = [g.a for g in gradients if g.a is not None]
    b = torch.cat([g.b for g in gradients], 2)
    return ExampleGradients(b, torch.cat(inputs, 2) if inputs else None)
