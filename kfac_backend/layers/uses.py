"""The runs of a layer in a forward pass, and one block's factors summed up over all of them.

A parameter may be used several times in a forward pass, by one layer that runs twice or by layers
that share it. In expand mode each use just adds more rows. In reduce mode, and for elementwise
parameters, a block is the sum of outer products of one row per example, and that row is itself a
sum over all uses. So the sum waits here until the last use: the last of the forward pass for
inputs, the last of each vector for gradients. Outer products of single uses would drop the cross
terms between uses, and the block would be wrong.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.sketch import Factor
from kfac_backend.layers.gram.gram import Gram
from kfac_backend.layers.rows import Rows
from kfac_backend.precision import at_least_float32

__all__ = ["BlockSums", "GradientFactor", "InputFactor", "PositionSums", "Use"]


@dataclass(frozen=True, eq=False)
class Use:
    """One run of a layer in a forward pass."""

    a: Tensor
    """The layer's input, detached: (N, ...), or (M, ...) with `rows`."""
    rows: Rows | None = None
    """Which example each of the M rows belongs to; None where row n is example n."""


class BlockSums(NamedTuple):
    """The sums of one parameter's block, before scaling; the factor over its rows comes first."""

    B: Factor
    """Sum over the data (G, d_out, d_out), or a sketch of it."""
    A: Factor | None = None
    """Sum over all terms (G, d_in, d_in), or (d_in, d_in) for all groups, or a sketch; None for a
    parameter without an input factor."""
    num_terms: int = 0
    """The number of terms in A."""


class PositionSums:
    """Sums over positions, computed once for all layers that receive the same gradient tensor.

    The gradient with respect to x + θ is also that with respect to x. So a convolution and the bias
    behind it, or the two ends of a residual branch, receive the same tensor, one after the other:
    remembering the last tensor is enough.
    """

    def __init__(self) -> None:
        self._source: tuple[Tensor, int, int] | None = None
        self._sums = torch.empty(0)

    def __call__(self, b: Float[Tensor, "N ..."], features: int) -> Float[Tensor, "N d"]:
        """Σ over all axes of b but the first and the axis ``features``, in float32 at least."""
        # Identity is not enough: autograd may accumulate into b in place (a new version).
        version = b._version  # pyright: ignore[reportPrivateUsage]
        known = self._source
        if known is None or known[0] is not b or known[1:] != (version, features):
            self._sums = _over_positions(b, features)
            self._source = (b, version, features)
        return self._sums

    def clear(self) -> None:
        """Release the last tensor, at the end of a part."""
        self._source, self._sums = None, torch.empty(0)


class GradientFactor:
    """Σ b bᵀ, where b may be a sum over the parameter's uses.

    Args:
        gram: sums the outer products.
        by_example: whether uses are summed before the outer product; otherwise each use adds rows
            of its own.
    """

    def __init__(self, gram: Gram, by_example: bool) -> None:
        self.gram = gram
        self.by_example = by_example
        self.roots: Tensor | None = None
        """(N,) √R_n by which each example's sum is divided; None without, see `InputFactor`."""
        # Uses in this forward pass, and those of them that the present vector has reached so far.
        self._uses = self._seen = 0
        self._waiting: Tensor | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._uses = 0

    def count_use(self) -> None:
        """One more use in this forward pass."""
        self._uses += 1

    def add(self, rows: Float[Tensor, "G M d"]) -> None:
        """Add one use's rows of one or more vectors; if by_example, row n of all uses is added up.

        After the last use the sum goes into the Gram matrix at once, which releases its memory. A
        vector need not reach all uses; then `end_vector` adds what there is.
        """
        if not self.by_example or self._uses <= 1:
            self.gram.add(self._scaled(rows))
            return
        rows = at_least_float32(rows)
        # A clone, since `rows` may be the tensor that autograd or `PositionSums` still holds.
        self._waiting = rows.clone() if self._waiting is None else self._waiting.add_(rows)
        self._seen += 1
        if self._seen == self._uses:
            self.end_vector()

    def end_vector(self) -> None:
        """Add the waiting sum; uses that the vector did not reach have gradient zero."""
        if self._waiting is not None:
            self.gram.add(self._scaled(self._waiting))
            self._waiting, self._seen = None, 0

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.roots is None:
            return rows
        by_vector = at_least_float32(rows).unflatten(1, (-1, len(self.roots)))
        return (by_vector / self.roots[:, None].to(by_vector.dtype)).flatten(1, 2)


class InputFactor:
    """Σ a aᵀ over positions, or over examples' means â of the positions of all uses.

    In the first case a rule adds to ``gram`` itself. In the second it calls `add_sums`.

    Args:
        gram: sums the outer products.
    """

    def __init__(self, gram: Gram) -> None:
        self.gram = gram
        self.num_terms = 0
        # Of this forward pass, over its uses so far: positions per example, and their sums.
        self._counts: int | Tensor = 0
        self._waiting: Tensor | None = None
        self._by_roots: bool | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._counts, self._waiting = 0, None

    def add_sums(
        self, sums: Float[Tensor, "G N d"], positions: int | Tensor, by_roots: bool
    ) -> None:
        """Add one use's sums of each example over ``positions``, or (N,) of them.

        They are scaled in `end_forward`, so that uses with different R are weighted by their
        positions.
        """
        if self._by_roots not in (None, by_roots):
            raise NotImplementedError(
                "A weight's inputs are scaled by 1/√R_n in one use (examples_of_rows) and not in "
                "another. Use examples_of_rows in all of its uses, or in none."
            )
        self._by_roots = by_roots
        self._waiting = sums if self._waiting is None else self._waiting + sums
        self._counts = self._counts + positions

    @property
    def roots(self) -> Tensor | None:
        """(N,): √R_n over all uses, which divides the gradients' sums as well, or None.

        None if only the inputs' sums are divided, by R_n. Known after the last use of a forward
        pass.
        """
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


def _over_positions(b: Tensor, features: int) -> Tensor:
    features %= b.dim()
    positions = [axis for axis in range(1, b.dim()) if axis != features]
    if not positions:
        return at_least_float32(b)
    return b.sum(positions, dtype=torch.promote_types(b.dtype, torch.float32))
