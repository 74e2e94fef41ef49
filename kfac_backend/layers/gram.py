"""Sum Gram matrices Σ x xᵀ of rows batch by batch, in place.

A block's factor is a dense matrix, a diagonal, or counts of tokens. Each kind has its own `Gram`
with the same two methods. `patch_gram` computes the Gram matrices of patches of convolutions. A
`FactorSum` holds the Gram matrix of one factor, and examples' sums that wait for other uses of the
parameter. The result is a `Factor`: a matrix, or its rows if they are few.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.layers.window import Window, patches
from kfac_backend.precision import at_least_float32

FEWEST_PRODUCTS = 4
"""A d×d Gram matrix is updated after d / 4 rows, which take a quarter of its memory."""

FEW_ROWS = 0.75
"""A d×d Gram matrix of at most 3d / 4 rows in total is stored as these rows, see `Factor`. The
eigenvalues of 784×784 matrices take 52 ms. From 392 rows they take 14 ms, and from 588 rows 36 ms
(one thread)."""

MANY_ROWS = 512
"""Number of rows with a separate product, even if more may come in the same part of a batch."""

LARGEST_DENSE = 1024
"""Maximum number of entries of an elementwise parameter with a dense block. Larger ones have a
diagonal."""

STRIP = 64
"""Minimum number of rows of a strip of a Gram matrix, except for the last strip."""

MIRRORED = 256
"""Number of rows that are mirrored at once. Fewer are not faster, and each takes four
operations."""

SMALL_PRODUCT = 2**24
"""Minimum number of multiplications of a strip, a third of a millisecond. Fewer are not worth a
call."""

LARGEST_SQUARE = 2**19
"""Number of entries that `DiagonalGram` squares at once."""


class Factor:
    """B or A of a block: a symmetric positive semi-definite matrix, or the few rows that made it.

    Rows x_m with the matrix Σ_m x_m x_mᵀ take less memory, and their M×M inner products have the
    same eigenvalues, apart from zeros. Factors keep their rows when they are scaled, added or
    moved, if there are at most 3d / 4 rows. The matrix is computed on first access. After an
    in-place change of the matrix the rows are ignored. Blocks that share a factor, such as the
    blocks of a weight and its bias, share the object, so it is computed and decomposed once.

    Args:
        matrix: (*G, d, d).
        rows: (*G, M, d), instead of the matrix.
    """

    def __init__(self, matrix: Tensor | None = None, rows: Tensor | None = None) -> None:
        self._matrix, self._rows = matrix, rows
        self._first_version = 0 if matrix is None else version_of(matrix)
        self._eigenvalues: tuple[int, tuple[Tensor, Tensor]] | None = None
        stored = rows if matrix is None else matrix
        assert stored is not None
        self.shape = stored.shape
        """Shape of the matrix, (*G, d, d)."""
        if matrix is None:
            self.shape = torch.Size((*stored.shape[:-2], *stored.shape[-1:] * 2))
        self.cost = self.shape[:-2].numel() * self.shape[-1] ** 3
        """Cost of its decomposition up to a constant: G d³ for G groups."""
        self.dtype, self.device = stored.dtype, stored.device
        self.is_meta = stored.is_meta
        """Whether another rank stores its values."""

    @property
    def matrix(self) -> Float[Tensor, "*G d d"]:
        """The matrix itself."""
        if self._matrix is None:
            assert self._rows is not None
            # Half precision is only for storage; no Gram matrix is summed in it.
            matrix = gram_matrix(at_least_float32(self._rows)).to(self._rows.dtype)
            self._matrix, self._first_version = matrix, version_of(matrix)
        return self._matrix

    @property
    def rows(self) -> Float[Tensor, "*G M d"] | None:
        """The rows, if they are few and the matrix was not changed."""
        return None if self._rows is None or self.version else self._rows

    @property
    def entries(self) -> Tensor:
        """The rows if they are known, otherwise the matrix: all data of the factor."""
        rows = self.rows
        return self.matrix if rows is None else rows

    @property
    def version(self) -> int:
        """Torch's count of in-place changes of the matrix; 0 before the matrix is computed."""
        matrix = self._matrix
        # Inference tensors have no count, and cannot change outside of inference mode.
        if matrix is None or matrix.is_inference():
            return 0
        return matrix._version - self._first_version

    @property
    def eigenvalues(self) -> tuple[Tensor, Tensor] | None:
        """Its eigenvalues and number of clipped ones, once set; None after a change in place."""
        if self._eigenvalues is None or self._eigenvalues[0] != self.version:
            return None
        return self._eigenvalues[1]

    @eigenvalues.setter
    def eigenvalues(self, values: tuple[Tensor, Tensor]) -> None:
        self._eigenvalues = self.version, values

    def clone(self) -> "Factor":
        """Return a copy in separate memory."""
        return self._with(self.entries.clone())

    def scale(self, weight: Tensor | float) -> "Factor":
        """Return the factor times a weight ≥ 0, one for all groups or (G, 1, 1)."""
        if self.rows is None:
            return Factor(self.matrix * weight)
        return Factor(rows=self.rows * weight**0.5)

    def add(self, other: "Factor") -> "Factor":
        """Return the sum of two factors, as the rows of both if these are few."""
        mine, others = self.rows, other.rows
        if mine is not None and others is not None:
            if mine.shape[-2] + others.shape[-2] <= FEW_ROWS * mine.shape[-1]:
                return Factor(rows=torch.cat([mine, others], -2))
        return Factor(self.matrix + other.matrix)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> "Factor":
        """Return the factor on another device or in another dtype."""
        # Another rank's factor has no values to move. Its eigenvalues came from its owner, which
        # may not be available again.
        entries = self.entries
        moved = entries.to(None if entries.is_meta else device, dtype)
        if moved is entries and not entries.is_meta:
            return self
        result = self._with(moved)
        if entries.is_meta and self.eigenvalues is not None:
            values, clipped = self.eigenvalues
            result.eigenvalues = values.to(device), clipped.to(device)
        return result

    def empty(self, device: torch.device | str, num_rows: int | None) -> "Factor":
        """Return a factor of this shape, of rows or a matrix, with uninitialised entries."""
        *G, d, _ = self.shape
        entries = torch.empty(*G, num_rows or d, d, dtype=self.dtype, device=device)
        return Factor(entries) if num_rows is None else Factor(rows=entries)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copies, whose tensors have new counters of changes."""
        rows = self.rows
        return Factor, (self.matrix,) if rows is None else (None, rows)

    def summand(
        self, of_ranks: Sequence[Optional["Factor"]], rank: int, device: torch.device
    ) -> "Factor":
        """Return a factor whose entries, summed over ranks, give the sum of all ranks' factors.

        If the rows of all ranks are few, they are stacked, with zeros for the rows of other ranks.
        ``of_ranks`` has each rank's factor on the meta device, or None for a rank without data. If
        this rank has none, its own factor has no values either.
        """
        rows = [None if F is None else F.rows for F in of_ranks]
        counts = [0 if x is None else x.shape[-2] for x in rows]
        *G, d, _ = self.shape
        are_rows = all(F is None or x is not None for F, x in zip(of_ranks, rows, strict=True))
        if not are_rows or not 0 < sum(counts) <= FEW_ROWS * d:
            if self.is_meta:
                return Factor(torch.zeros(self.shape, dtype=self.dtype, device=device))
            return Factor(self.matrix)
        placed = torch.zeros(*G, sum(counts), d, dtype=self.dtype, device=device)
        if not self.is_meta:
            start = sum(counts[:rank])
            placed[..., start : start + counts[rank], :] = self.entries
        return Factor(rows=placed)

    def divide_(self, number: int) -> "Factor":
        """Divide the factor by a number > 0: a matrix in place, to save the memory of a copy."""
        if self.rows is None:
            return Factor(self.matrix.div_(number))
        return Factor(rows=self.rows / number**0.5)

    @classmethod
    def concatenated(cls, factors: Sequence["Factor"]) -> "Factor":
        """Return the groups (G, d, d) of all factors, as rows if their numbers are equal."""
        numbers = {None if F.rows is None else F.rows.shape[-2] for F in factors}
        are_rows = len(numbers) == 1 and None not in numbers
        of_all = [F.entries if are_rows else F.matrix for F in factors]
        groups = torch.cat([t if t.dim() > 2 else t[None] for t in of_all])
        return cls(rows=groups) if are_rows else cls(groups)

    def _with(self, entries: Tensor) -> "Factor":
        """Return a factor of other rows, if it has rows, or of another matrix."""
        return Factor(entries) if self.rows is None else Factor(rows=entries)


def version_of(tensor: Tensor) -> int:
    """Return torch's count of in-place changes."""
    # Inference tensors have no counter, and cannot change outside of inference mode.
    return 0 if tensor.is_inference() else tensor._version


class Gram(ABC):
    """Running sum of a Gram matrix for each of G groups, without memory before the first rows.

    Args:
        like: a tensor on the same device. The sum has its dtype, or float32 if that is more
            precise.
        groups: G.
        size: d.
    """

    def __init__(self, like: Tensor, groups: int, size: int) -> None:
        self.groups, self.size = groups, size
        dtype = torch.promote_types(like.dtype, torch.float32)
        # like.new_empty would be sharded for a sharded weight.
        self.like = torch.empty(0, dtype=dtype, device=like.device)
        """Empty tensor of its dtype, on its device."""
        self.nbytes = groups * size**2 * dtype.itemsize
        """Memory of the sum in bytes."""

    @abstractmethod
    def add(self, rows: Tensor, fresh: bool = False) -> None:
        """Add the outer products of rows (G, M, d).

        ``fresh`` rows, which nothing else will change, may wait without a copy.
        """

    def entries(self, rows: Tensor) -> Tensor:
        """Return the rows (G, M, d) of an argument of `add`."""
        return rows

    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch of images, with the kernel's windows ``axes``."""
        self.add(patches(image, self.groups, *axes).flatten(1, 2))

    @abstractmethod
    def total(self) -> Float[Tensor, "G d d"]:
        """Return the sum so far; zeros before the first rows."""

    def factor(self) -> Factor:
        """Return the sum so far as a factor, (d, d) for one group; later sums may change it."""
        total = self.total()
        return Factor(total if self.groups > 1 else total[0])

    def zeros(self) -> Float[Tensor, "G d d"]:
        """Return the sum of no rows."""
        return self.like.new_zeros(self.groups, self.size, self.size)


class DenseGram(Gram):
    """Sum Σ_m x_m x_mᵀ per group over all rows x_m, in place: (G, d, d)."""

    _total: Tensor | None = None
    _waiting: tuple[Tensor, ...] = ()
    _num_waiting = 0

    def add(self, rows: Float[Tensor, "G M d"], fresh: bool = False) -> None:
        """Add the rows' Gram matrices, at least in float32."""
        rows = at_least_float32(rows)
        M, d = rows.shape[1:]
        # Few rows wait until there are more, because a product reads and writes d² entries for any
        # number of rows. Fresh rows are sums over positions, and each vector adds some more.
        is_product = M * FEWEST_PRODUCTS > d and not (fresh and M < MANY_ROWS)
        # If there are so few rows in total, they wait until the end, see `factor`.
        are_few = self._total is None and self._num_waiting + M <= FEW_ROWS * self.size
        if is_product and not are_few:
            self._add(rows)
            return
        self._waiting += (rows if fresh else rows.clone(),)
        self._num_waiting += M
        if self._num_waiting >= max(MANY_ROWS, d // FEWEST_PRODUCTS + 1) and not are_few:
            self._add_waiting()

    def total(self) -> Float[Tensor, "G d d"]:
        """Return the sum so far."""
        if self._waiting:
            self._add_waiting()
        if self._total is None:
            return self.zeros()
        mirror_upper_half_(self._total)
        return self._total

    def factor(self) -> Factor:
        """Return the sum so far, as its rows if they are few and all of them still wait."""
        if self._total is not None or self._num_waiting > FEW_ROWS * self.size:
            total = self.total()
            return Factor(total if self.groups > 1 else total[0])
        none = self.like.new_empty(self.groups, 0, self.size)
        self._waiting = (torch.cat(self._waiting or (none,), dim=1),)
        rows = self._waiting[0]
        return Factor(rows=rows if self.groups > 1 else rows[0])

    def _add_waiting(self) -> None:
        """Add the waiting rows in one product."""
        one = len(self._waiting) == 1
        self._add(self._waiting[0] if one else torch.cat(self._waiting, dim=1))
        self._waiting, self._num_waiting = (), 0

    def _add(self, rows: Tensor) -> None:
        # The first product writes into uninitialised memory (beta = 0), without zeros to add to.
        d, keep = rows.shape[-1], 0.0 if self._total is None else 1.0
        if self._total is None:
            self._total = rows.new_empty(len(rows), d, d)
        if len(rows) > 1:
            self._total.baddbmm_(rows.mT, rows, beta=keep)
            return
        # Strips of rows begin at the diagonal, so n strips need (n + 1) / 2n of the
        # multiplications, and `total` copies the entries below. On a core of x86-64, 1152 columns
        # of 4096 rows take 45 instead of 69 ms, and 384 columns take 5.7 instead of 8.1 ms. Several
        # smaller products do not help on a GPU, nor on a CPU with few rows.
        size = d
        if rows.device.type == "cpu":
            size = max(STRIP, -(-d // 8), min(d, SMALL_PRODUCT // max(1, rows.shape[1] * d)))
        for start in range(0, d, size):
            end = min(start + size, d)
            left, right = rows[0, :, start:end], rows[0, :, start:]
            self._total[0, start:end, start:].addmm_(left.mT, right, beta=keep)


class DiagonalGram(Gram):
    """Sum the diagonal of Σ_m x_m x_mᵀ over all rows (1, M, P), as P groups: (P, 1, 1)."""

    _total: Tensor | None = None

    def __init__(self, like: Tensor, size: int) -> None:
        super().__init__(like, size, 1)

    def add(self, rows: Float[Tensor, "1 M P"], fresh: bool = False) -> None:
        """Add the rows' squares."""
        # Take some rows at a time, so that their squares stay in the cache. The squares of all rows
        # would take as much memory as the gradient.
        for some in at_least_float32(rows[0]).split(max(1, LARGEST_SQUARE // rows.shape[-1])):
            squares = some.square().sum(0)
            self._total = squares if self._total is None else self._total.add_(squares)

    def total(self) -> Float[Tensor, "P 1 1"]:
        """Return the sum so far."""
        return self.zeros() if self._total is None else self._total[:, None, None]


class CountGram(Gram):
    """Sum one-hot tokens' Gram matrices, a diagonal: (V, 1, 1), V groups of one entry."""

    def __init__(self, like: Tensor, num_tokens: int) -> None:
        super().__init__(like, num_tokens, 1)
        # Integers, because large counts would stop growing in float32.
        self._counts = torch.zeros(num_tokens, dtype=torch.long, device=like.device)

    def add(self, rows: Int[Tensor, "*positions"], fresh: bool = False) -> None:
        """Count tokens, given as integers of any shape instead of one-hot rows."""
        self._counts += torch.bincount(rows.flatten(), minlength=self.groups)

    def total(self) -> Float[Tensor, "V 1 1"]:
        """Return the counts so far."""
        return self._counts.to(self.like.dtype)[:, None, None]


class ScalarGram(DenseGram):
    """Sum Σ_m (Σ_c x_mc)² of a scalar's gradients, given as terms x_mc of sums: (1, 1, 1).

    One operation sums the terms of all waiting rows.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__(like, 1, 1)

    def add(self, rows: Float[Tensor, "1 M c"], fresh: bool = False) -> None:
        """Add the squares of the rows' sums."""
        # Images of another size may have another number of terms.
        if self._waiting and self._waiting[0].shape[-1] != rows.shape[-1]:
            self._add_waiting()
        super().add(rows, fresh)

    def entries(self, rows: Float[Tensor, "1 M c"]) -> Float[Tensor, "1 M 1"]:
        """Return the sums of the terms."""
        return rows.sum(-1, keepdim=True)

    def _add(self, rows: Tensor) -> None:
        super()._add(self.entries(rows))


@dataclass(eq=False)
class FactorSum:
    """Sum Σ x xᵀ of a factor, A or B. A vector x is a row, or an example's sum over all uses."""

    gram: Gram
    num_terms: int = 0
    """Number of outer products of an A."""
    waiting: Tensor | None = None
    """Examples' sums over the uses so far, which `end` adds."""
    _positions: int | Tensor = 0  # per example, over these uses of an input
    _by_roots: bool = False

    def add(self, sums: Float[Tensor, "G N d"]) -> None:
        """Add one use's sums of each example, which wait for other uses and must not change."""
        sums, before = at_least_float32(sums), self.waiting
        # The uses of a scalar may differ in their number of terms.
        entries = self.gram.entries
        self.waiting = sums if before is None else entries(before) + entries(sums)

    def add_inputs(
        self, sums: Float[Tensor, "G N d"], positions: int | Tensor, by_roots: bool
    ) -> None:
        """Add one use's sums of each example over ``positions``, or (N,) of them.

        The division follows when all uses are known, so that uses with different R are weighted by
        their positions.
        """
        if self.waiting is None:  # the first use in this forward pass
            self._positions, self._by_roots = 0, by_roots
            self.num_terms += sums.shape[1]
        elif self._by_roots != by_roots:
            raise NotImplementedError(
                "One use of a weight scales its inputs by 1/√R_n (examples_of_rows), but another "
                "use does not. Use examples_of_rows in all uses or in none."
            )
        self._positions = self._positions + positions
        self.add(sums)

    @property
    def roots(self) -> Tensor | None:
        """(N, 1): √R_n over all uses, which also divides the gradients' sums, or None.

        None if only the inputs' sums are divided, by R_n. The value is known after the last use of
        a forward pass.
        """
        if not self._by_roots or isinstance(self._positions, int):
            return None
        return self._positions.clamp(min=1).double().sqrt()[:, None]

    def end(self) -> None:
        """Add the waiting sums after all uses of a forward pass, or of a vector.

        A vector need not reach all uses. Uses that it does not reach have the gradient zero.
        """
        sums, self.waiting = self.waiting, None
        if sums is None:
            return
        # For inputs, the sum over an example's positions becomes their mean.
        if isinstance(self._positions, Tensor):
            divisors = self._positions.clamp(min=1)[:, None] if self.roots is None else self.roots
            sums = sums / divisors.to(sums.dtype)
        elif self._positions:  # reset for gradients
            sums = sums / self._positions
        self.gram.add(sums, fresh=True)


def gram_matrix(rows: Float[Tensor, "*G M d"]) -> Float[Tensor, "*G d d"]:
    """Return Σ_m x_m x_mᵀ of these rows, with the same bits for the same rows."""
    groups = rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])
    gram = DenseGram(groups, len(groups), rows.shape[-1])
    gram._add(groups)
    return gram.total().view(*rows.shape[:-2], *[rows.shape[-1]] * 2)


def gram_of_gradients(parameter: Tensor) -> Gram:
    """Return an empty Gram matrix for the gradients of an elementwise parameter."""
    P = parameter.numel()
    if P == 1:
        return ScalarGram(parameter)
    return DenseGram(parameter, 1, P) if P <= LARGEST_DENSE else DiagonalGram(parameter, P)


def mirror_upper_half_(gram: Float[Tensor, "*G d d"]) -> None:
    """Copy the upper half of matrices into the lower one, so that they are symmetric to the bit.

    A BLAS may round x_iᵀ x_j and x_jᵀ x_i differently (MKL does on AMD processors).
    """
    d = gram.shape[-1]
    # One strip at a time, because a mirrored copy of a large matrix would double the memory. A
    # small matrix is mirrored whole, in fewer operations.
    size = min(d, MIRRORED)
    for start in range(0, d, size):
        end = min(start + size, d)
        corner = gram[..., start:end, start:end].triu_()
        corner += corner.triu(1).mT
        if end < d:
            gram[..., end:, start:end] = gram[..., start:end, end:].mT
