"""A wide factor by its leading eigenvectors, in memory d·r instead of d², with an error bound.

Rows x come batch by batch, and F = Σ x xᵀ (d, d) is never formed. `Sketch` keeps at most r rows S,
with Sᵀ S = Σ_k λ_k u_k u_kᵀ. When enough new rows wait, it computes the eigenvalues of all rows
together, keeps the r largest, and shrinks these by the (r + 1)-th. Δ is the sum of these (r + 1)-th
eigenvalues over all steps (Frequent Directions: Liberty 2013; Ghashami et al. 2016,
arXiv:1501.01711). The eigenvalues of the missing part E = F − Sᵀ S then lie in [0, Δ], since each
step removes a matrix whose largest eigenvalue is the (r + 1)-th.

`SketchedFactor` is the estimate F̂ of F, with U the kept eigenvectors:

    F̂ = U diag(λ + Δ) Uᵀ + ρ (I − U Uᵀ),    ρ = (tr F − Σ_k (λ_k + Δ)) / (d − r).

- ‖F − F̂‖₂ ≤ Δ, and so is the error of each eigenvalue (Weyl): F − F̂ = E − ΔUUᵀ − ρ(I − UUᵀ) has
  its eigenvalues in [−Δ, Δ], since 0 ≤ ρ ≤ Δ. ρ is not negative, as a step that shrinks r
  eigenvalues by δ takes (r + 1) δ off the trace, at least; it is at most Δ, as tr E ≤ dΔ.
- tr F̂ = tr F exactly, since the trace is summed up row by row. Without ρ, the data would seem to
  tell nothing about directions outside of U, and the predictive variance would be too large there.
- F̂ = F where F has rank r or less: Δ and ρ are zero.

Giving Δ back to the kept directions is the "compensative" variant of Desai, Ghashami & Phillips
2016 (arXiv:1501.06561), whose bound it keeps; they leave ρ = 0.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.blocks.eigen import check_orthonormal
from kfac_backend.precision import at_least_float32

__all__ = [
    "Basis",
    "Factor",
    "Frame",
    "Sketch",
    "SketchedFactor",
    "add_factors",
    "dense",
    "diagonal_of",
    "rows_of",
    "times_counted",
    "whole",
]

WAITING = 3
"""New rows wait until there are this many times r: that means fewer steps, and a smaller Δ."""


@dataclass(frozen=True)
class Frame:
    """Q = (U, I − U Uᵀ): the eigenvectors of a `SketchedFactor` and all that is outside of them.

    Q is (d, k + d) with Q Qᵀ = I. If the last d entries of c are equal, Q diag(c) Qᵀ has the
    eigenvalues c_1..c_k on U and that number outside. So a frame takes the place of a matrix of
    orthonormal eigenvectors, with k + d entries instead of d: rows X have the coordinates X @ Q,
    and Y @ Q.mT are the rows that have coordinates Y. The matrix itself is never formed.
    """

    U: Float[Tensor, "*G d k"]
    is_transposed: bool = False
    """Whether this is Qᵀ."""

    @property
    def shape(self) -> torch.Size:
        """(..., d, k + d), or (..., k + d, d)."""
        *G, d, k = self.U.shape
        return torch.Size((*G, k + d, d) if self.is_transposed else (*G, d, k + d))

    def dim(self) -> int:
        """The number of axes."""
        return self.U.dim()

    @property
    def dtype(self) -> torch.dtype:
        """That of the eigenvectors."""
        return self.U.dtype

    @property
    def mT(self) -> "Frame":
        """Qᵀ."""
        return Frame(self.U, not self.is_transposed)

    def __getitem__(self, index: Any) -> "Frame":
        """Q[None] or Q[g], as of a tensor: with an axis of groups, or one group of it."""
        return Frame(self.U[index], self.is_transposed)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Frame":
        """The frame on another device or in another dtype."""
        return Frame(self.U.to(device, dtype), self.is_transposed)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """X Q for rows x (..., d), or Y Qᵀ for coordinates y (..., k + d)."""
        if not self.is_transposed:
            inside = x @ self.U
            return torch.cat([inside, x - inside @ self.U.mT], -1)
        k = self.U.shape[-1]
        inside, outside = x[..., :k], x[..., k:]  # which may have been scaled in between
        return (inside - outside @ self.U) @ self.U.mT + outside


Basis = Tensor | Frame
"""Orthonormal eigenvectors (d, d) or (G, d, d), or a frame."""


def diagonal_of(c: Float[Tensor, "*rows k"], Q: Basis) -> Float[Tensor, "*rows d"]:
    """The diagonals of Q diag(c) Qᵀ for rows c, of a frame constant outside of U."""
    if not isinstance(Q, Frame):
        return c @ Q.square().mT
    k, squared = Q.U.shape[-1], Q.U.square()
    return c[..., :k] @ squared.mT + c[..., k:] * (1 - squared.sum(-1))


def rows_of(Q: Basis, indices: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows k"]:
    """Rows of Q: the coordinates of unit vectors."""
    if not isinstance(Q, Frame):
        return Q[indices]
    return torch.nn.functional.one_hot(indices, Q.shape[0]).to(Q.dtype) @ Q


def times_counted(Q: Basis, like: Tensor) -> Tensor:
    """How many eigenvalues each of Q's entries stands for: 1, but (d − k)/d outside of a frame.

    A frame has d equal entries for the d − k directions outside of U.
    """
    counts = like.new_ones(Q.shape[-1])
    if isinstance(Q, Frame):
        d, k = Q.U.shape[-2:]
        counts[k:] = (d - k) / d
    return counts


@dataclass(frozen=True)
class SketchedFactor:
    """A symmetric factor F (d, d) ⪰ 0 by r eigenvectors; see the module for F̂ and its error."""

    U: Float[Tensor, "d k"]
    """Orthonormal; k ≤ rank."""
    kept: Float[Tensor, "k"]
    """λ, descending, in float64."""
    error: float
    """Δ ≥ ‖F − F̂‖₂."""
    trace: float
    """tr F."""
    rank: int
    """r, the most eigenvectors to keep where sketches are added."""

    @classmethod
    def zero(cls, like: Tensor, size: int, rank: int) -> "SketchedFactor":
        """The sketch of no rows, in a tensor's dtype and on its device."""
        return cls(like.new_zeros(size, 0), like.new_zeros(0, dtype=torch.float64), 0.0, 0.0, rank)

    def check(self, name: str) -> None:
        """Raise a ValueError unless `Sketch` can have made the factor; for factors from a file."""
        check_orthonormal(self.U, name)
        numbers = torch.tensor([self.error, self.trace, *self.kept.tolist()], dtype=torch.float64)
        right = (numbers >= 0).all() and not numbers.isinf().any()
        if not right or self.kept.shape != self.U.shape[1:] or not len(self.kept) <= self.rank:
            raise ValueError(f"The sketch of '{name}' has numbers that no rows have.")

    @property
    def values(self) -> Float[Tensor, "k"]:
        """The eigenvalues λ + Δ on U."""
        return self.kept + self.error

    @property
    def rest(self) -> float:
        """ρ, the eigenvalue of all d − k directions outside of U."""
        d, k = self.U.shape
        return max(0.0, (self.trace - float(self.values.sum())) / (d - k)) if d > k else 0.0

    @property
    def relative_error(self) -> float:
        """Δ as a share of F̂'s largest eigenvalue; 0 of a factor that is zero."""
        largest = max(float(self.values.max()) if len(self.values) else 0.0, self.rest)
        return self.error / largest if largest else 0.0

    @property
    def shape(self) -> torch.Size:
        """(d, d)."""
        return torch.Size((len(self.U), len(self.U)))

    def dim(self) -> int:
        """2, the axes."""
        return 2

    @property
    def dtype(self) -> torch.dtype:
        """That of the eigenvectors."""
        return self.U.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.U.device

    def any(self) -> bool:
        """Whether it is not zero."""
        return self.trace > 0

    def eigenvalues(self) -> Float[Tensor, "d"]:
        """All d eigenvalues, ascending, in float64."""
        d, k = self.U.shape
        return torch.cat([self.values, self.values.new_full((d - k,), self.rest)]).sort().values

    def decompose(self) -> tuple[Tensor, Frame]:
        """The eigenvalues (k + d,) in the order of the frame's entries, and the frame."""
        outside = self.values.new_full((len(self.U),), self.rest)
        return torch.cat([self.values, outside]).to(self.dtype), Frame(self.U)

    def to_dense(self) -> Float[Tensor, "d d"]:
        """F̂ as a matrix; for tests, and where d is small."""
        return torch.eye(len(self.U), dtype=self.dtype, device=self.device) @ self

    def __rmatmul__(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """X F̂ for rows x."""
        values, Q = self.decompose()
        return (x @ Q * values) @ Q.mT

    def __mul__(self, weight: float) -> "SketchedFactor":
        """F̂ times a number ≥ 0."""
        c = float(weight)
        return replace(self, kept=self.kept * c, error=self.error * c, trace=self.trace * c)

    __rmul__ = __mul__

    def __add__(self, other: "SketchedFactor") -> "SketchedFactor":
        """The sketch of the sum, of the smaller rank: errors and traces add up.

        Raises:
            ValueError: another size.
        """
        if self.shape != other.shape:
            raise ValueError(
                f"Sketches of {len(self.U)} and of {len(other.U)} entries cannot be added; only "
                "factors of the same model can."
            )
        rank = min(self.rank, other.rank)
        rows = [(F.U * F.kept.sqrt().to(F.dtype)).mT for F in (self, other)]
        U, kept, shrunk = _compress(torch.cat(rows), rank)
        error = self.error + other.error + shrunk
        return SketchedFactor(U, kept, error, self.trace + other.trace, rank)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "SketchedFactor":
        """The factor on another device or in another dtype; eigenvalues stay in float64."""
        return replace(self, U=self.U.to(device, dtype), kept=self.kept.to(device))


Factor = Tensor | SketchedFactor
"""A factor of a block, whole or sketched."""


def add_factors(first: Factor, second: Factor) -> Factor:
    """The sum of two factors of one kind."""
    assert isinstance(first, Tensor) == isinstance(second, Tensor)
    return first + second  # pyright: ignore[reportOperatorIssue]


def dense(factor: Factor) -> Tensor:
    """The factor as a matrix; for tests, and where d is small."""
    return factor.to_dense() if isinstance(factor, SketchedFactor) else factor


def whole(factor: Factor, name: str, what: str) -> Tensor:
    """The factor, unless it is a sketch.

    Args:
        factor: the factor.
        name: its parameter's name.
        what: what needs it whole, for the error.

    Raises:
        NotImplementedError: a sketch.
    """
    if isinstance(factor, SketchedFactor):
        raise NotImplementedError(
            f"{what} needs whole factors, and one of '{name}' ({len(factor.U)}×{len(factor.U)}) is "
            f"a sketch of rank {factor.rank}. Make the factors with sketch_rank=None."
        )
    return factor


class _Compressed(NamedTuple):
    U: Tensor
    kept: Tensor
    shrunk: float


class Sketch:
    """Frequent Directions of rows that come batch by batch.

    Args:
        rank: r ≥ 1, the most directions to keep.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._kept: Tensor | None = None  # rows (k, d), k ≤ r, orthogonal
        self._waiting: list[Tensor] = []
        self._num_waiting = 0
        self._error = 0.0
        self._trace: Tensor | float = 0.0  # a tensor, so that a GPU need not wait for each batch

    def add(self, rows: Float[Tensor, "M d"]) -> None:
        """Add the rows' outer products."""
        rows = at_least_float32(rows)
        while len(rows):
            room = WAITING * self.rank - self._num_waiting
            self._trace += torch.linalg.vector_norm(rows[:room], dtype=torch.float64).square()
            self._waiting.append(rows[:room].clone())  # a view would keep the layer's whole input
            self._num_waiting += len(self._waiting[-1])
            rows = rows[room:]
            if self._num_waiting == WAITING * self.rank:
                self._shrink()

    def factor(self) -> SketchedFactor | None:
        """The sketch of the rows that were added so far; None before the first rows."""
        self._shrink()
        if self._kept is None:
            return None
        U, kept, _ = _compress(self._kept, self.rank)
        # Rounding errors grow with the steps. Orthonormalise U, so that Q Qᵀ of the frame is I.
        U = torch.linalg.qr(U.double()).Q.to(U.dtype)
        # LAPACK returns columns one after the other in memory, but a file has rows. Products of the
        # two layouts are rounded differently, so a loaded factor would differ.
        U = U.contiguous()
        return SketchedFactor(U, kept, self._error, float(self._trace), self.rank)

    def _shrink(self) -> None:
        if not self._waiting:
            return
        rows = torch.cat(self._waiting if self._kept is None else [self._kept, *self._waiting])
        self._waiting, self._num_waiting = [], 0
        U, kept, shrunk = _compress(rows, self.rank)
        self._error += shrunk
        self._kept = (U * kept.sqrt().to(U.dtype)).mT


def _compress(rows: Float[Tensor, "M d"], rank: int) -> _Compressed:
    """The r leading eigenvectors U of Σ x xᵀ, their eigenvalues less the next one, δ, and δ itself.

    They are computed from the rows' inner products (M, M) in float64, since M is only a few times
    r, and d is large.
    """
    wide = rows.double()
    products = wide @ wide.mT
    # The trace is not finite then, and `check_finite_factor` raises an error with the block's name.
    if not torch.isfinite(products).all():
        return _Compressed(rows.new_zeros(rows.shape[1], 0), products.new_zeros(0), float("nan"))
    # X Xᵀ and Xᵀ X have the same eigenvalues that are not zero; eigh sorts them ascending.
    values, vectors = torch.linalg.eigh(products)
    values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
    shrunk = values[rank] if len(values) > rank else values.new_zeros(())
    # Directions with eigenvalues below the rounding error would not be orthogonal to the others.
    least = values[:1] * torch.finfo(torch.float64).eps * max(wide.shape)
    k = int(((values > least) & (values > shrunk)).sum()) if len(values) else 0
    k = min(k, rank)
    # From an eigenvector w of X Xᵀ to Xᵀ w / √λ, the one of Xᵀ X, of norm one.
    U = wide.mT @ (vectors[:, :k] / values[:k].sqrt())
    return _Compressed(U.to(rows.dtype), values[:k] - shrunk, float(shrunk))
