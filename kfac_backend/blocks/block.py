"""The curvature block of one parameter tensor: B ⊗ A, B alone, or a diagonal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kfac_backend.blocks.eigen import (
    check_finite_factor,
    check_gram,
    eigenvalues,
    eigh,
    map_on_cores,
)
from kfac_backend.blocks.sketch import (
    Basis,
    Factor,
    Frame,
    SketchedFactor,
    add_factors,
    whole,
)
from kfac_backend.ranks import Ranks

__all__ = [
    "EigenBlock",
    "KroneckerBlock",
    "compute_eigenvalues",
    "coordinates",
    "decompose_on_ranks",
]


@dataclass(frozen=True)
class KroneckerBlock:
    """Block-diagonal over G groups of B_g ⊗ A_g, for a tensor flattened as PyTorch flattens it.

    One group is the common case. Grouped convolutions and packed projections have more, and may
    share one A; a diagonal block is P groups of size one. Without A the block is B itself (a bias,
    a scalar). B is always the factor over the parameter's rows. For a weight that is stored inputs
    first (an embedding, a transposed convolution) it is the Gram matrix of inputs, as a sum, and A
    is that of gradients, divided by the same number of terms.
    """

    name: str
    """The parameter's name, for errors."""
    B: Factor
    """Gradient factor, a sum over the data: (d_out, d_out) or (G, d_out, d_out), or a sketch."""
    A: Factor | None = None
    """Input factor, a mean over the data: (d_in, d_in) or (G, d_in, d_in), or a sketch."""
    num_terms: float | tuple[float, ...] = 0
    """The number of terms that A is the mean of: N·R for expand, N for reduce, where an example of
    weight c counts c times. One number for all groups, or one for each."""

    def __post_init__(self) -> None:
        A_shape = None if self.A is None else self.A.shape
        square = self.B.dim() in (2, 3) and self.B.shape[-1] == self.B.shape[-2]
        if A_shape is not None:
            same_groups = A_shape[:-2] in (self.B.shape[:-2], ())
            square = square and same_groups and A_shape[-1] == A_shape[-2]
        if not square:
            raise ValueError(
                f"Factors of '{self.name}' have shapes B {tuple(self.B.shape)} and A "
                f"{None if A_shape is None else tuple(A_shape)}; expected square matrices, with "
                "the same leading number of groups if there are groups."
            )

    def check(self) -> None:
        """Raise a ValueError unless a pass can have made the block; for factors from a file."""
        terms = torch.tensor(_terms(self), dtype=torch.float64)
        if (
            len(terms) not in (1, *self.B.shape[:-2])
            or not (terms >= 0).all()
            or terms.isinf().any()
        ):
            raise ValueError(f"The block of '{self.name}' has num_terms={self.num_terms}.")
        for F, name in self.named_factors():
            if isinstance(F, SketchedFactor):
                F.check(name)
            else:
                check_gram(F, name)

    @property
    def numel(self) -> int:
        """P, the number of parameters of the block."""
        return self.B.shape[:-1].numel() * (1 if self.A is None else self.A.shape[-1])

    def fits(self, shape: torch.Size) -> bool:
        """Whether the block can be that of a parameter of this shape: B's rows are its first axes.

        A block that is B alone, dense or diagonal, runs over all of its entries.
        """
        rows = self.B.shape[:-1].numel()
        first_axes = [shape[:k].numel() for k in range(1, len(shape) + 1)]
        return self.numel == shape.numel() and rows in first_axes

    def to_dense(self) -> Tensor:
        """The block as a (P, P) matrix."""
        B = _dense(self.B)
        B = B.reshape(-1, *B.shape[-2:])
        if self.A is None:
            return torch.block_diag(*B)
        A = _dense(self.A)
        A = A.expand(len(B), *A.shape[-2:])  # groups may share one
        return torch.block_diag(*(torch.kron(b, a) for b, a in zip(B, A, strict=True)))

    def matvec(self, v: Tensor) -> Tensor:
        """(B ⊗ A) v for vectors v (..., P)."""
        V = self._as_matrices(v)
        V = self.B.times(V.mT).mT if isinstance(self.B, SketchedFactor) else self.B @ V
        if self.A is not None:
            V = self.A.times(V) if isinstance(self.A, SketchedFactor) else V @ self.A.mT
        return V.reshape(v.shape)

    def scale(self, weight: float) -> "KroneckerBlock":
        """The block of the same data with a weight ≥ 0, which multiplies B and A's terms."""
        terms = tuple(number * weight for number in _terms(self))
        return replace(self, B=self.B * weight, num_terms=terms[0] if len(terms) == 1 else terms)

    def add(self, other: "KroneckerBlock") -> "KroneckerBlock":
        """The block of the union of both data sets: B is summed, A averaged over all terms."""
        kinds = {type(block) for block in (self, other)}
        if len(kinds) > 1:
            raise ValueError(
                f"One of the blocks of '{self.name}' has corrected eigenvalues and the other has "
                "none. Add the factors as they are, and correct the sum over all the data."
            )
        if self.B.shape != other.B.shape or (self.A is None) != (other.A is None):
            raise ValueError(
                f"The blocks of '{self.name}' and '{other.name}' differ in shape; only factors of "
                "the same model can be added."
            )
        for mine, theirs in ((self.B, other.B), (self.A, other.A)):
            if mine is not None and theirs is not None and mine.dtype != theirs.dtype:
                raise ValueError(
                    f"The blocks of '{self.name}' are in {mine.dtype} and {theirs.dtype}, whose "
                    f"sum would have the digits of neither. Take factors.to(dtype={mine.dtype}) of "
                    "both."
                )
        if [type(F) for F in (self.B, self.A)] != [type(F) for F in (other.B, other.A)]:
            raise ValueError(
                f"One of the blocks of '{self.name}' has a sketched factor where the other has a "
                "whole one. Make both with the same sketch_rank."
            )
        if self.A is None or other.A is None:
            return replace(self, B=add_factors(self.B, other.B))
        for block in (self, other):
            if not any(_terms(block)) and block.B.any() and block.A is not None and block.A.any():
                raise ValueError(
                    f"The block of '{self.name}' needs num_terms for its mean A to be added. That "
                    "of a tensor used in two ways has none: pass all the data at once."
                )
        pairs = list(zip(_terms(self), _terms(other), strict=True))
        terms = tuple(mine + theirs for mine, theirs in pairs)
        # The share of the other block in each group's terms; 0 where neither has a term.
        shares = [
            pair[1] / total if total else 0.0 for pair, total in zip(pairs, terms, strict=True)
        ]
        B = add_factors(self.B, other.B)
        if isinstance(self.A, SketchedFactor) or isinstance(other.A, SketchedFactor):
            A = add_factors(self.A * (1 - shares[0]), other.A * shares[0])
        else:
            share = torch.tensor(shares, dtype=torch.float64)
            share = (share[:, None, None] if len(terms) > 1 else share).to(self.A)
            A = self.A * (1 - share) + other.A * share
        return replace(self, B=B, A=A, num_terms=terms[0] if len(terms) == 1 else terms)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The block on another device or in another dtype."""
        A = None if self.A is None else self.A.to(device, dtype)
        return replace(self, B=self.B.to(device, dtype), A=A)

    @property
    def sketches(self) -> dict[str, SketchedFactor]:
        """Which of "B" and "A" are sketches -> the factor."""
        return {
            which: F for which, F in (("B", self.B), ("A", self.A)) if isinstance(F, SketchedFactor)
        }

    def whole_factors(self, what: str) -> tuple[Tensor, Tensor | None]:
        """B and A as matrices, where something cannot use sketches.

        Args:
            what: what needs matrices, for the error.

        Raises:
            NotImplementedError: one of them is a sketch.
        """
        A = None if self.A is None else whole(self.A, self.name, what)
        return whole(self.B, self.name, what), A

    def named_factors(self) -> list[tuple[Factor, str]]:
        """B, and A if there is one, with their names for errors."""
        factors = [(self.B, f"{self.name}, B")]
        return factors if self.A is None else [*factors, (self.A, f"{self.name}, A")]

    @property
    def cost(self) -> int:
        """The cost of decomposing or inverting the block, up to a constant: Σ d³ of its factors."""
        return sum(_cost(F) for F, _ in self.named_factors())

    @property
    def knows_eigenvalues(self) -> bool:
        """Whether the eigenvalues are computed already."""
        # Not a field: it is a cache, which comparing and copying blocks must leave out.
        return "_known" in self.__dict__

    @property
    def knows_eigenvectors(self) -> bool:
        """Whether `decompose` costs nothing, since the eigenvectors are stored."""
        return False

    def keep_eigenvalues(self, known: list[tuple[Tensor, int]]) -> None:
        """Keep the eigenvalues of each factor, and how many of them were clipped."""
        self.__dict__["_known"] = known

    def _eigenvalues(self) -> list[tuple[Tensor, int]]:
        if not self.knows_eigenvalues:
            compute_eigenvalues([self])
        return self.__dict__["_known"]

    def factor_eigenvalues(self) -> tuple[Tensor, Tensor | None]:
        """β (..., d_out) of B and α (..., d_in) of A, ≥ 0, in float64; computed once.

        Without α, β has the block's eigenvalues themselves.
        """
        values = [values for values, _ in self._eigenvalues()]
        return values[0], values[1] if len(values) == 2 else None

    def eigenvalues(self) -> Tensor:
        """All P eigenvalues β_i α_j ≥ 0, in float64."""
        of_B, of_A = self.factor_eigenvalues()
        return (of_B if of_A is None else of_B[..., :, None] * of_A[..., None, :]).flatten()

    def num_clipped(self) -> int:
        """The number of the factors' eigenvalues that rounding made negative (they count as 0)."""
        return sum(clipped for _, clipped in self._eigenvalues())

    def decompose(self) -> "EigenBlock":
        """Eigenvalues and eigenvectors of the factors."""
        of_B = _decomposed(self.B, f"{self.name}, B")
        of_A = (None, None) if self.A is None else _decomposed(self.A, f"{self.name}, A")
        return EigenBlock(*of_B, *of_A)

    def _as_matrices(self, v: Tensor) -> Tensor:
        """(..., P) as (..., d_out, d_in), with G before d_out if there are groups."""
        columns = 1 if self.A is None else self.A.shape[-1]
        return v.reshape(*v.shape[:-1], *self.B.shape[:-1], columns)


def _dense(factor: Factor) -> Tensor:
    return factor.to_dense() if isinstance(factor, SketchedFactor) else factor


def _decomposed(factor: Factor, name: str) -> tuple[Tensor, Basis]:
    if isinstance(factor, SketchedFactor):
        check_finite_factor(torch.tensor(factor.trace), name)
        return factor.decompose()
    found = eigh(factor, name)
    return found.values, found.vectors


def _unsolved(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised eigenvalues and eigenvectors, to receive another rank's."""
    return torch.empty_like(factor[..., 0]), torch.empty_like(factor)


def _eigenvalues(factor: Factor, name: str) -> tuple[Tensor, int]:
    """Eigenvalues, ascending, and how many were clipped; a sketch knows its own."""
    if isinstance(factor, SketchedFactor):
        check_finite_factor(torch.tensor(factor.trace), name)
        return factor.eigenvalues(), 0
    return eigenvalues(factor, name)


def _identity(factor: Factor) -> object:
    """A key that is equal for factors in the same memory, such as two views of one tensor."""
    if isinstance(factor, SketchedFactor):
        return id(factor)
    return factor.data_ptr(), factor.device, factor.dtype, factor.shape, factor.stride()


def _cost(factor: Factor) -> int:
    """G d³ for G groups; 0 for a sketch, which is stored by its eigenvectors."""
    if isinstance(factor, SketchedFactor):
        return 0
    return factor.shape[:-2].numel() * factor.shape[-1] ** 3


def _terms(block: KroneckerBlock) -> tuple[float, ...]:
    """The numbers of terms as a tuple: one for all groups, or one for each."""
    return block.num_terms if isinstance(block.num_terms, tuple) else (block.num_terms,)


def compute_eigenvalues(blocks: Iterable[KroneckerBlock], ranks: Ranks | None = None) -> None:
    """Compute the eigenvalues of all blocks, which keep them.

    On a CPU several factors are solved at once, one on each thread (`map_on_cores`). A factor that
    a weight and its bias share is solved once.

    Args:
        blocks: the blocks; those that know their eigenvalues already are left out.
        ranks: the ranks that share the work, the largest factors first by d³. All must have the
            same blocks and call this; all get the same numbers to the bit. None: this process does
            all the work.

    Raises:
        ValueError: a factor that is not finite.
        RankError: another rank is gone, or has such a factor.
    """
    blocks = [block for block in blocks if not block.knows_eigenvalues]
    factors: dict[object, tuple[Factor, str]] = {}
    for block in blocks:
        for F, name in block.named_factors():
            factors.setdefault(_identity(F), (F, name))
    ordered = sorted(factors.values(), key=lambda factor: -factor[0].shape[-1])
    if ranks is None or ranks.size == 1:
        solved = _solve(ordered)
    else:
        solved = _solve_on_ranks(ordered, ranks)
    by_factor = dict(zip((_identity(F) for F, _ in ordered), solved, strict=True))
    for block in blocks:
        block.keep_eigenvalues([by_factor[_identity(F)] for F, _ in block.named_factors()])


def _solve(factors: Sequence[tuple[Factor, str]]) -> list[tuple[Tensor, int]]:
    """The eigenvalues of named factors, and how many were clipped; the largest factor is first."""
    small = not factors or factors[0][0].shape[-1] < 256
    if small or factors[0][0].device.type != "cpu":
        return [_eigenvalues(*factor) for factor in factors]
    return map_on_cores(lambda factor: _eigenvalues(*factor), factors)


def _solve_on_ranks(
    factors: Sequence[tuple[Factor, str]], ranks: Ranks
) -> list[tuple[Tensor, int]]:
    """`_solve`, with each factor solved by one rank and sent to the others."""
    what = "eigenvalues"
    owners = ranks.owners([_cost(F) for F, _ in factors])
    own = [i for i, owner in enumerate(owners) if owner == ranks.rank]
    solved = dict(zip(own, _solve([factors[i] for i in own]), strict=True))
    values = [
        solved[i][0]
        if i in solved
        else torch.empty(F.shape[:-1], dtype=torch.float64, device=F.device)
        for i, (F, _) in enumerate(factors)
    ]
    ranks.exchange_(values, owners, what)
    clipped: dict[int, int] = {}
    for of_rank in ranks.gather({i: number for i, (_, number) in solved.items()}, what):
        clipped |= of_rank
    return [(of_factor, clipped[i]) for i, of_factor in enumerate(values)]


def decompose_on_ranks(blocks: Iterable[KroneckerBlock], ranks: Ranks) -> dict[str, "EigenBlock"]:
    """Name -> eigenvalues and eigenvectors of each block; each whole factor is solved by one rank.

    The ranks share the work, the largest factors first by d³. The factor beside a sketch is an
    exception: each rank solves it. A factor that a weight and its bias
    share is solved once. All ranks must have the same blocks and call this; all get the same
    numbers to the bit.

    Raises:
        ValueError: a factor that is not finite.
        RankError: another rank is gone, or has such a factor.
    """
    blocks, what = list(blocks), "eigenvectors"
    if ranks.size == 1:
        return {block.name: block.decompose() for block in blocks}
    # Corrected blocks and sketches store their eigenvectors. (The whole factor beside a sketch is
    # the narrow one, such as an adapter's of a few rows.)
    found = {b.name: b.decompose() for b in blocks if b.knows_eigenvectors or b.sketches}
    whole: dict[object, tuple[Tensor, str]] = {}
    for block in blocks:
        if block.name not in found:
            for F, name in block.named_factors():
                assert isinstance(F, Tensor)
                whole.setdefault(_identity(F), (F, name))
    factors = list(whole.values())
    owners = ranks.owners([_cost(F) for F, _ in factors])
    solved = [
        eigh(F, name)[:2] if owner == ranks.rank else _unsolved(F)
        for (F, name), owner in zip(factors, owners, strict=True)
    ]
    tensors = [tensor for of_factor in solved for tensor in of_factor]
    ranks.exchange_(tensors, [owner for owner in owners for _ in range(2)], what)
    by_factor = dict(zip(whole, solved, strict=True))
    for block in blocks:
        if block.name not in found:
            of_factors = [by_factor[_identity(F)] for F, _ in block.named_factors()]
            found[block.name] = EigenBlock(*(part for of_one in of_factors for part in of_one))
    return {block.name: found[block.name] for block in blocks}


@dataclass(frozen=True)
class EigenBlock:
    """A block by eigenvalues and eigenvectors: Q_B diag(β) Q_Bᵀ ⊗ Q_A diag(α) Q_Aᵀ.

    A sketched factor has a `Frame` of k + d vectors as its eigenvectors, and k + d eigenvalues.
    ``corrected`` eigenvalues take the place of the products β_i α_j.
    """

    beta: Tensor
    """(d_out) or (G, d_out)."""
    Q_B: Basis
    """(d_out, d_out) or (G, d_out, d_out)."""
    alpha: Tensor | None = None
    """(d_in) or (G, d_in)."""
    Q_A: Basis | None = None
    """(d_in, d_in) or (G, d_in, d_in)."""
    corrected: Tensor | None = None
    """(..., d_out, d_in), or (..., d_out, 1) without Q_A; see `CorrectedBlock`."""

    @property
    def numel(self) -> int:
        """P, the number of parameters of the block."""
        return self.spectrum_shape.numel()

    @property
    def spectrum_shape(self) -> torch.Size:
        """(..., d_out, d_in), the parameter's as a matrix."""
        columns = 1 if self.Q_A is None else self.Q_A.shape[-2]
        return torch.Size((*self.Q_B.shape[:-1], columns))

    def scale(self, factor: Tensor | float) -> "EigenBlock":
        """The block times a factor ≥ 0, spread evenly over B and A; differentiable in it."""
        corrected = None if self.corrected is None else self.corrected * factor
        if self.alpha is None:
            return replace(self, beta=self.beta * factor, corrected=corrected)
        root = factor**0.5
        return replace(self, beta=self.beta * root, alpha=self.alpha * root, corrected=corrected)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "EigenBlock":
        """The block on another device or in another dtype."""
        moved: dict[str, Any] = {
            name: tensor.to(device, dtype)
            for name, tensor in vars(self).items()
            if tensor is not None
        }
        return replace(self, **moved)

    def spectrum(self, delta: Tensor | float = 0.0, damping: bool = False) -> Tensor:
        """Eigenvalues of the block + δI: βα + δ; with damping (β + √δ)(α + √δ). (..., d_out, d_in).

        Differentiable in δ and in the eigenvalues.

        Raises:
            ValueError: damping of corrected eigenvalues, which are no products.
        """
        if self.corrected is not None:
            if damping:
                raise ValueError(
                    "damping adds √δ to the eigenvalues of both factors, and corrected "
                    "eigenvalues are no products of such. Take damping=False, or factors that are "
                    "not corrected."
                )
            return self.corrected + delta
        if self.alpha is None:
            return (self.beta + delta)[..., None]
        if damping:
            root = torch.as_tensor(delta, device=self.beta.device).sqrt()
            return (self.beta + root)[..., :, None] * (self.alpha + root)[..., None, :]
        return self.beta[..., :, None] * self.alpha[..., None, :] + delta

    def log_det(self, spectrum: Tensor) -> Tensor:
        """Log det of Q diag(spectrum) Qᵀ, in float64.

        A frame has d equal entries for the d − k directions outside of U, so that each of these
        entries counts (d − k)/d times.
        """
        logs = spectrum.double().log()
        for axis, Q in ((-2, self.Q_B), (-1, self.Q_A)):
            if isinstance(Q, Frame):
                d, k = Q.U.shape
                weights = logs.new_full((k + d,), (d - k) / d)
                weights[:k] = 1
                logs = logs * (weights[:, None] if axis == -2 else weights)
        return logs.sum()

    def power_matvec(self, v: Tensor, spectrum: Tensor, exponent: float) -> Tensor:
        """Q diag(spectrum ** exponent) Qᵀ v for vectors v (..., P), with Q = Q_B ⊗ Q_A."""
        V = v.reshape(*v.shape[:-1], *self.spectrum_shape)
        Q_B, Q_A = self.Q_B, self.Q_A
        V = Q_B.coordinates(V.mT).mT if isinstance(Q_B, Frame) else Q_B.mT @ V
        if Q_A is not None:
            V = coordinates(V, Q_A)
        V = V * spectrum.pow(exponent)
        V = Q_B.rows(V.mT).mT if isinstance(Q_B, Frame) else Q_B @ V
        if Q_A is not None:
            V = Q_A.rows(V) if isinstance(Q_A, Frame) else V @ Q_A.mT
        return V.reshape(v.shape)

    def diagonal(self, spectrum: Tensor, exponent: float = 1.0) -> Tensor:
        """The diagonal (P,) of Q diag(spectrum ** exponent) Qᵀ."""
        d, Q_B, Q_A = spectrum.pow(exponent), self.Q_B, self.Q_A
        d = Q_B.squares(d.mT).mT if isinstance(Q_B, Frame) else Q_B.square() @ d
        if Q_A is not None:
            d = Q_A.squares(d) if isinstance(Q_A, Frame) else d @ Q_A.square().mT
        return d.flatten()


def coordinates(x: Tensor, Q: Basis) -> Tensor:
    """X Q: the coordinates of rows x."""
    return Q.coordinates(x) if isinstance(Q, Frame) else x @ Q
