"""Gram matrices over weight-sharing positions: the two modes, expand and reduce.

A layer's inputs are ``a`` (G, N, R, d_in) and the gradients with respect to its outputs ``b``
(G, N, R, d_out): G groups (1 unless the layer is a grouped convolution), N examples, R positions
that share the weight, features last. Source of the two modes: Eschenhagen et al. 2023
(arXiv:2311.00636), sections 3.2 (expand) and 3.3 (reduce):

- expand: A is the mean over examples and positions of a_nr a_nrᵀ, B the sum of b_nr b_nrᵀ.
- reduce: A is the mean over examples of â_n â_nᵀ, with the mean over positions â_n = 1/R Σ_r a_nr;
  B is the sum of b̂_n b̂_nᵀ, with the sum over positions b̂_n = Σ_r b_nr.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["GramSum", "PositionSums", "at_least_float32", "is_tall", "tall_product"]

FEWEST_PRODUCTS = 4
"""A Gram matrix of d×d waits for d / 4 rows; they take a quarter of its memory."""


class GramSum:
    """Σ_m x_m x_mᵀ per group over all rows x_m that were added, in place: (G, d, d)."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: list[Tensor] = []
        self._num_waiting = 0

    def add(self, rows: Float[Tensor, "G M d"]) -> None:
        """Add the rows' Gram matrices, in float32 at least.

        Few rows wait for others: a product of M rows reads and writes d² entries, whatever M is.
        """
        rows = at_least_float32(rows)
        M, d = rows.shape[1:]
        if M * FEWEST_PRODUCTS > d:
            self._add(rows)
            return
        self._waiting.append(rows.clone())
        self._num_waiting += M
        if self._num_waiting * FEWEST_PRODUCTS > d:
            self._add_waiting()

    def total(self) -> Float[Tensor, "G d d"] | None:
        """The sum so far, None before the first rows."""
        self._add_waiting()
        return self._total

    def _add_waiting(self) -> None:
        if self._waiting:
            self._add(torch.cat(self._waiting, dim=1))
            self._waiting, self._num_waiting = [], 0

    def _add(self, rows: Tensor) -> None:
        if len(rows) == 1 and is_tall(rows[0]):
            gram = tall_product(rows[0], rows[0])[None]
            self._total = gram if self._total is None else self._total.add_(gram)
        elif self._total is None:
            self._total = rows.mT @ rows
        elif len(rows) == 1:
            self._total[0].addmm_(rows[0].mT, rows[0])
        else:
            self._total.baddbmm_(rows.mT, rows)


class PositionSums:
    """Sums over positions, once for all layers that see the very same gradient tensor.

    The gradient with respect to x + θ is also that with respect to x: a convolution and the bias
    behind it, or the two ends of a residual branch, are handed one tensor.
    """

    def __init__(self) -> None:
        self._source: tuple[Tensor, int, int] | None = None
        self._sums = torch.empty(0)

    def __call__(self, b: Float[Tensor, "N ..."], features: int) -> Float[Tensor, "N d"]:
        """Σ over all axes of b but the first and the axis ``features``, in float32 at least."""
        # In-place accumulation by autograd changes the version.
        version = b._version  # pyright: ignore[reportPrivateUsage]
        known = self._source
        if known is None or known[0] is not b or known[1:] != (version, features):
            self._sums = _over_positions(b, features)
            self._source = (b, version, features)
        return self._sums

    def clear(self) -> None:
        """Let go of the last tensor."""
        self._source, self._sums = None, torch.empty(0)


def is_tall(x: Float[Tensor, "M d"]) -> bool:
    """Whether `tall_product` splits a product of this factor."""
    M, d = x.shape
    return x.device.type == "cpu" and d <= 128 and M >= 32 * d and torch.get_num_threads() > 1


def tall_product(left: Float[Tensor, "M c"], right: Float[Tensor, "M d"]) -> Float[Tensor, "c d"]:
    """leftᵀ right, split by rows among a CPU's threads if the factors are tall and narrow.

    A product of few entries is what a BLAS cannot share out well: with two threads 32768×64 rows
    take 0.80 instead of 1.08 ms, 8192×128 rows 0.69 instead of 0.78 ms.
    """
    if not is_tall(left):
        return left.mT @ right
    threads = torch.get_num_threads()
    size = len(left) // threads
    split, rest = slice(threads * size), slice(threads * size, None)
    shape = (threads, size)
    product = (left[split].unflatten(0, shape).mT @ right[split].unflatten(0, shape)).sum(0)
    return product.addmm_(left[rest].mT, right[rest])


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float64 if it is, else in float32: sums of half precision lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def _over_positions(b: Tensor, features: int) -> Tensor:
    features %= b.dim()
    positions = [axis for axis in range(1, b.dim()) if axis != features]
    if not positions:
        return at_least_float32(b)
    return b.sum(positions, dtype=torch.promote_types(b.dtype, torch.float32))
