"""What one parameter's block is summed up in, over examples, vectors and the parameter's uses.

A parameter may be used several times in a forward pass, by one layer that runs twice or by layers
that share it. Where its block is made of sums per example, these go over all uses; they wait here
until the last use of a forward pass, or of a vector, has been seen.
"""

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.weight_sharing import GramSum, at_least_float32

__all__ = ["DiagonalSum", "GramSums", "GradientSums", "InputSums", "SquareSum", "gradient_gram"]

LARGEST_DENSE = 1024
"""Entries of an elementwise parameter up to which its block is dense; its diagonal beyond."""

MOST_WAITING = 32
"""Backward vectors whose derivatives wait to be squared together: fewer, larger operations."""


class GramSums(NamedTuple):
    """The sums of one parameter's block, not scaled; rows first, as the parameter is stored."""

    B: Tensor
    """Sum over the data (G, d_out, d_out)."""
    A: Tensor | None = None
    """Sum over all terms (G, d_in, d_in), or (d_in, d_in) for all groups; None for a parameter
    without an input factor."""
    num_terms: int = 0
    """How many terms A is the sum of."""


class Gram(Protocol):
    """What rows (G, M, d) are added to."""

    def add(self, rows: Tensor) -> None:
        """Add the rows' outer products."""
        ...

    def total(self) -> Tensor | None:
        """The sum so far, None before the first rows."""
        ...


class DiagonalSum:
    """The diagonal of Σ_m x_m x_mᵀ over all rows (1, M, P), as P groups: (P, 1, 1)."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, rows: Float[Tensor, "1 M P"]) -> None:
        """Add the rows' squares."""
        squares = at_least_float32(rows[0]).square().sum(0)
        self._total = squares if self._total is None else self._total.add_(squares)

    def total(self) -> Float[Tensor, "P 1 1"] | None:
        """The sum so far, None before the first rows."""
        return None if self._total is None else self._total[:, None, None]


class SquareSum:
    """Σ_m (Σ_k x_mk)²: the Gram matrix (1, 1, 1) of one number per row, given in k parts."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add(self, rows: Float[Tensor, "1 M k"]) -> None:
        """Add the squares of the rows' sums, later."""
        self._waiting.append(rows[0])
        if len(self._waiting) == MOST_WAITING:
            self._add_waiting()

    def total(self) -> Float[Tensor, "1 1 1"] | None:
        """The sum so far, None before the first rows."""
        self._add_waiting()
        return None if self._total is None else self._total.reshape(1, 1, 1)

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        squares = torch.stack([part.sum(1).square().sum() for part in _by_length(self._waiting)])
        self._total = squares.sum() if self._total is None else self._total + squares.sum()
        self._waiting = []


def gradient_gram(size: int) -> Gram:
    """What the gradients of an elementwise parameter with so many entries are added to."""
    if size == 1:
        return SquareSum()
    return GramSum() if size <= LARGEST_DENSE else DiagonalSum()


class GradientSums:
    """Σ b bᵀ, where b may be a sum over the parameter's uses.

    Args:
        gram: what the rows end in.
        by_example: whether uses are summed before the outer product; they are further rows else.
    """

    def __init__(self, gram: Any, by_example: bool) -> None:
        self.gram: Gram = gram
        self.by_example = by_example
        self.roots: Tensor | None = None
        """(N,), what each example's sum is divided by, if anything: see `InputSums.roots`."""
        self._uses = self._seen = 0
        self._waiting: Tensor | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._uses = 0

    def count_use(self) -> None:
        """One more use in this forward pass."""
        self._uses += 1

    def add(self, rows: Float[Tensor, "G M d"]) -> None:
        """Add one use's rows of one or more vectors, the same rows in each use if by_example."""
        if not self.by_example or self._uses <= 1:
            self.gram.add(self._scaled(rows))
            return
        rows = at_least_float32(rows.sum(-1, keepdim=True) if self._of_parts else rows)
        self._waiting = rows.clone() if self._waiting is None else self._waiting.add_(rows)
        self._seen += 1
        if self._seen == self._uses:
            self.end_vector()

    def end_vector(self) -> None:
        """Add what waits: uses that the vector did not reach have the gradient zero."""
        if self._waiting is not None:
            self.gram.add(self._scaled(self._waiting))
            self._waiting, self._seen = None, 0

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.roots is None:
            return rows
        by_vector = at_least_float32(rows).unflatten(1, (-1, len(self.roots)))
        return (by_vector / self.roots[:, None].to(by_vector.dtype)).flatten(1, 2)

    @property
    def _of_parts(self) -> bool:
        return isinstance(self.gram, SquareSum)


class InputSums:
    """Σ a aᵀ over positions, or over examples' means â of the positions of all uses.

    Args:
        gram: what the rows end in.
    """

    def __init__(self, gram: Any) -> None:
        self.gram: Any = gram
        self.num_terms = 0
        self._counts: int | Tensor = 0
        self._by_roots: bool | None = None
        self._waiting: Tensor | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._counts, self._waiting = 0, None

    def add_means(self, means: Float[Tensor, "G N d"], positions: int) -> None:
        """Add one use's means of each example over so many positions."""
        self._add(at_least_float32(means) * positions, positions, by_roots=False)

    def add_sums(self, sums: Float[Tensor, "G N d"], positions: Tensor, by_roots: bool) -> None:
        """Add one use's sums of each example over (N,) positions, to be scaled as `Rows` say."""
        self._add(at_least_float32(sums), positions, by_roots)

    def _add(self, sums: Tensor, positions: int | Tensor, by_roots: bool) -> None:
        if self._by_roots not in (None, by_roots):
            raise NotImplementedError(
                "A weight's inputs are scaled by their examples' numbers of rows in one use "
                "(examples_of_rows), and not in another; say the examples in each, or in none."
            )
        self._by_roots = by_roots
        self._waiting = sums if self._waiting is None else self._waiting + sums
        self._counts = self._counts + positions

    @property
    def roots(self) -> Tensor | None:
        """(N,): √R_n, by which an example's gradients are divided, over all uses; None if not."""
        if not self._by_roots or isinstance(self._counts, int):
            return None
        return self._counts.clamp(min=1).double().sqrt()

    def end_forward(self) -> None:
        """Add the examples' sums of all uses."""
        if self._waiting is None:
            return
        scale: Any = self.roots
        if scale is None:
            scale = self._counts
        if isinstance(scale, Tensor):
            scale = scale.clamp(min=1).to(self._waiting.dtype)[:, None]
        means = self._waiting / scale
        self.gram.add(means)
        self.num_terms += means.shape[1]
        self._waiting = None


def _by_length(rows: list[Tensor]) -> list[Tensor]:
    """Matrices of the same number of columns, stacked."""
    lengths = dict.fromkeys(matrix.shape[1] for matrix in rows)
    return [torch.cat([m for m in rows if m.shape[1] == length]) for length in lengths]
