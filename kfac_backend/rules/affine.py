"""Elementwise affine layers with one scalar parameter: the exact GGN entry, in either mode.

One scalar θ has the entry Σ_n Σ_v (∂ v_nᵀf_n / ∂θ)²; nothing is approximated.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers import Bias, Scale
from kfac_backend.rules.rule import ExampleGradients, GramSums, Rule
from kfac_backend.weight_sharing import PositionSums, at_least_float32

__all__ = ["BiasRule", "ScaleRule"]


MOST_WAITING = 32
"""Backward vectors whose derivatives wait to be squared together: fewer, larger operations."""


class _ScalarRule(Rule):
    """Σ of squared derivatives."""

    needs_examples = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sum: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add_input(self, a: Tensor) -> None:
        """Nothing: the block is B alone."""

    def _add_parts(self, parts: Tensor) -> None:
        """Add derivatives of examples and vectors, each still to be summed over a row (M, k)."""
        self._waiting.append(parts)
        if len(self._waiting) == MOST_WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add Σ d² of the derivatives d that wait; their rows may differ in length."""
        squares = torch.stack([parts.sum(1).square().sum() for parts in _by_length(self._waiting)])
        self._sum = squares.sum() if self._sum is None else self._sum + squares.sum()
        self._waiting = []

    def gram_sums(self) -> dict[str, GramSums]:
        """The sum as a (1, 1, 1) Gram matrix."""
        if self._waiting:
            self._add_waiting()
        (name,) = self.names
        return {name: GramSums(None if self._sum is None else self._sum.reshape(1, 1, 1))}

    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """The derivatives themselves: one position, one entry."""
        (name,) = self.names
        return {name: ExampleGradients(b[None])}


class BiasRule(_ScalarRule):
    """`layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    layer_type = Bias
    parameter_names = frozenset({"bias"})

    def add_gradient(self, a: Tensor | None, b: Tensor, sums: PositionSums) -> None:
        """Σ_n (Σ b_n)²."""
        if b.dim() <= 2:  # nothing to share, and b itself must not wait
            self._add_parts(at_least_float32(b).reshape(len(b), -1).sum(1, keepdim=True))
            return
        # By features first, as the convolution or the linear layer in front needs it, too.
        self._add_parts(sums(b, features=1 if b.dim() == 4 else -1))

    def position_gradients(self, a: Tensor, b: Tensor) -> Float[Tensor, "M 1 1"]:
        """The derivatives Σ b_n."""
        return at_least_float32(b).reshape(len(b), -1).sum(1)[:, None, None]


class ScaleRule(_ScalarRule):
    """`layers.Scale`, θ·x: the derivative is the inner product of input and output gradient."""

    layer_type = Scale
    parameter_names = frozenset({"scale"})
    needs_input = True

    def add_gradient(self, a: Tensor | None, b: Tensor, sums: PositionSums) -> None:
        """Σ_n (a_n · b_n)²."""
        assert a is not None
        self._add_parts(self._derivatives(a, b))

    def position_gradients(self, a: Tensor, b: Tensor) -> Float[Tensor, "M 1 1"]:
        """The derivatives a_n · b_n."""
        return self._derivatives(a, b).sum(1)[:, None, None]

    def _derivatives(self, a: Tensor, b: Tensor) -> Float[Tensor, "M k"]:
        """a_n · b_n in k parts."""
        a, b = at_least_float32(a), at_least_float32(b)
        if a.dim() == 1:
            a, b = a[:, None], b[:, None]
        if not a.is_contiguous():  # channels last: bring both into the order in memory
            a, b = a.movedim(1, -1), b.movedim(1, -1)
        a, b = a.flatten(1), b.flatten(1).unflatten(0, (-1, len(a)))
        return _inner_products(a, b).flatten(0, 1)


def _inner_products(a: Float[Tensor, "N D"], b: Float[Tensor, "V N D"]) -> Float[Tensor, "V N k"]:
    """a_n · b_vn in k parts, diagonals of small products: half the traffic of (a * b).sum()."""
    k = next(k for k in (4, 2, 1) if a.shape[-1] % k == 0)
    a, b = a.unflatten(-1, (k, -1)), b.unflatten(-1, (k, -1))
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1)


def _by_length(rows: list[Tensor]) -> list[Tensor]:
    """Matrices of the same number of columns, stacked."""
    lengths = dict.fromkeys(matrix.shape[1] for matrix in rows)
    return [torch.cat([m for m in rows if m.shape[1] == length]) for length in lengths]
