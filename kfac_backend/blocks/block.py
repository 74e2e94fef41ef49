"""The curvature block of one parameter tensor: B ⊗ A, B alone, or a diagonal.

`CorrectedBlock` has corrected eigenvalues in the eigenbasis of B ⊗ A (EKFAC).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from kfac_backend.blocks.eigen import eigendecompositions
from kfac_backend.layers.gram import Factor, version_of
from kfac_backend.ranks import Ranks


class KroneckerBlock:
    """Block-diagonal over G groups of B_g ⊗ A_g, for a tensor flattened as PyTorch flattens it.

    One group is the common case. Grouped convolutions and packed projections have more, and may
    share one A. A diagonal block is P groups of size one. Without A the block is B itself (a bias,
    a scalar). B is always the factor over the parameter's rows. A weight that is stored inputs
    first (an embedding, a transposed convolution) has the Gram matrix of inputs as B, as a sum. Its
    A is the Gram matrix of gradients, divided by the same number of terms.

    Args:
        name: the parameter's name, for errors.
        B: gradient factor, a sum over the data: (d_out, d_out) or (G, d_out, d_out). Blocks that
            share the same `Factor` object, instead of its matrix, compute and decompose it once.
        A: input factor, a mean over the data: (d_in, d_in) or (G, d_in, d_in).
        num_terms: the number of terms in the mean A: N·R for expand, N for reduce, where an example
            of weight c counts c times. One number for all groups, or one for each. None if there is
            no A. With A, None means that the number is unknown, and the block cannot be added to
            another block.
        constants: (first, last + 1) of the flattened entries that are constants, such as an
            embedding's padding; the block is zero there, and they have no prior.
    """

    def __init__(
        self,
        name: str,
        B: Factor | Tensor,
        A: Factor | Tensor | None = None,
        num_terms: float | tuple[float, ...] | None = None,
        constants: tuple[int, int] = (0, 0),
    ) -> None:
        self.name, self.num_terms, self.constants = name, num_terms, constants
        matrices = {"B": B} if A is None else {"B": B, "A": A}
        self.factors: Mapping[str, Factor] = {
            letter: F if isinstance(F, Factor) else Factor(F) for letter, F in matrices.items()
        }
        """B, and A if there is one, by name, stored as rows if these are few."""
        of_B, of_A = B.shape, None if A is None else A.shape
        square = len(of_B) in (2, 3) and of_B[-1] == of_B[-2]
        if of_A is not None:
            square = square and of_A[:-2] in (of_B[:-2], ()) and of_A[-1] == of_A[-2]
        if not square:
            raise ValueError(
                f"Factors of '{name}' have shapes B {tuple(of_B)} and A "
                f"{None if of_A is None else tuple(of_A)}; expected square matrices, with the same "
                "leading number of groups if there are groups."
            )
        self.numel = of_B[:-1].numel() * (1 if of_A is None else of_A[-1])
        """P, the number of entries of the parameter tensor."""
        self.is_meta = self.factors["B"].is_meta
        """Whether another rank has its values."""

    def __repr__(self) -> str:
        shapes = ", ".join(f"{letter} {tuple(F.shape)}" for letter, F in self.factors.items())
        return f"{type(self).__name__}('{self.name}', {shapes})"

    @property
    def B(self) -> Tensor:
        """The matrix of B; `factors` has the `Factor`."""
        return self.factors["B"].matrix

    @property
    def A(self) -> Tensor | None:
        """The matrix of A, if there is one."""
        return self.factors["A"].matrix if "A" in self.factors else None

    def replace(self, **changes: Any) -> Self:
        """Return the block with some arguments changed; factors stay shared."""
        fields = {"name": self.name, "num_terms": self.num_terms, "constants": self.constants}
        return type(self)(**{**fields, **self.factors, **changes})

    @property
    def num_parameters(self) -> int:
        """The number of entries without constants."""
        return self.numel - (self.constants[1] - self.constants[0])

    @property
    def version(self) -> object:
        """Version number, which changes when a tensor of the block is changed in place."""
        return [factor.version for factor in self.factors.values()]

    def fits(self, shape: torch.Size) -> bool:
        """Return whether the block fits a parameter of this shape. B's rows are its first axes.

        If the block is B alone, dense or diagonal, it covers all entries.
        """
        rows = self.factors["B"].shape[:-1].numel()
        first_axes = [shape[:k].numel() for k in range(1, len(shape) + 1)]
        return self.numel == shape.numel() and rows in first_axes

    def to_dense(self) -> Tensor:
        """Return the block as a (P, P) matrix."""
        self._check_is_here()
        B = self.B.reshape(-1, *self.B.shape[-2:])
        if self.A is None:
            return torch.block_diag(*B)
        A = self.A.expand(len(B), *self.A.shape[-2:])  # groups may share one A
        return torch.block_diag(*(torch.kron(b, a) for b, a in zip(B, A, strict=True)))

    def matvec(self, v: Tensor) -> Tensor:
        """Return (B ⊗ A) v for vectors v (..., P)."""
        self._check_is_here()
        columns = 1 if self.A is None else self.A.shape[-1]
        V = v.reshape(*v.shape[:-1], *self.B.shape[:-1], columns)  # (..., G, d_out, d_in)
        # W ↦ B W A for the matrix W of v, row by row. First B V, since B is symmetric:
        V = (V.mT @ self.B).mT
        if self.A is not None:
            V = V @ self.A
        return V.reshape(v.shape)

    def scale(self, weight: float, scale: Callable[[Factor, float], Factor] = Factor.scale) -> Self:
        """Return the block of the same data with a weight ≥ 0, which multiplies B and A's terms.

        If ``scale`` caches its results, blocks that share a B share the result, too.
        """
        terms = self.num_terms
        if terms is not None:
            terms = _one_or_all(tuple(number * weight for number in self._terms))
        return self.replace(B=scale(self.factors["B"], float(weight)), num_terms=terms)

    def add(
        self, other: "KroneckerBlock", add: Callable[[Factor, Factor], Factor] = Factor.add
    ) -> "KroneckerBlock":
        """Return the block of both data sets together: B is summed, A averaged over all terms."""
        self._check_same_kind(other)
        if self.is_meta != other.is_meta:  # the owner has both and makes the sum
            return self._without_values().add(other._without_values())
        B = add(self.factors["B"], other.factors["B"])
        A, others = self.factors.get("A"), other.factors.get("A")
        if A is None or others is None:
            return self.replace(B=B)
        terms = tuple(m + t for m, t in zip(self._terms, other._terms, strict=True))
        # The share of the other block in each group's terms; 0 where neither has a term.
        shares = [t / n if n else 0.0 for t, n in zip(other._terms, terms, strict=True)]
        share: Any = shares[0]
        if len(shares) > 1:
            share = torch.tensor(shares, dtype=A.dtype, device=A.device)[:, None, None]
        A = A.scale(1 - share).add(others.scale(share))
        return self.replace(B=B, A=A, num_terms=_one_or_all(terms))

    def check_semidefinite(self) -> None:
        """Raise a ValueError unless each factor is finite, and may be positive semi-definite.

        Its diagonal must be ≥ 0, and |F_ij| ≤ √(F_ii F_jj); products of few rows always satisfy
        this. This is for factors from outside, because negative eigenvalues are otherwise clipped
        as rounding errors.
        """
        for F, name in self.named_factors():
            if F.is_meta:
                continue
            if not F.entries.isfinite().all():
                raise ValueError(f"the factor '{name}' contains NaN or infinity")
            if F.rows is not None or not F.matrix.numel():
                continue
            diagonal = F.matrix.diagonal(dim1=-2, dim2=-1)
            roots = diagonal.clamp(min=0).sqrt()
            bounds = roots[..., :, None] * roots[..., None, :]
            rounding = 1e-3 * diagonal.abs().amax(-1)[..., None, None]
            if (diagonal < 0).any() or (F.matrix.abs() > bounds + rounding).any():
                raise ValueError(f"the factor '{name}' is not positive semi-definite")

    def _check_is_here(self) -> None:
        if self.is_meta:
            raise missing_values(self.name)

    def _without_values(self) -> "KroneckerBlock":
        """Return the block as another rank has it."""
        return self.replace(**{name: F.to("meta", None) for name, F in self.factors.items()})

    def _check_same_kind(self, other: "KroneckerBlock") -> None:
        """Raise a ValueError that says why two blocks have no sum."""
        if isinstance(self, CorrectedBlock) or isinstance(other, CorrectedBlock):
            raise ValueError(
                f"The block of '{self.name}' has corrected eigenvalues, which cannot be added, "
                "because the sum has other eigenvectors. Add uncorrected factors, and correct the "
                "sum with all the data."
            )
        mine, others = (
            {letter: F.shape for letter, F in block.factors.items()} for block in (self, other)
        )
        if mine != others or self.constants != other.constants:
            raise ValueError(
                f"The blocks of '{self.name}' and '{other.name}' differ in shape or constants. Add "
                "only factors of the same model."
            )
        # Do not compare values, which only the owner of a block has: all ranks add, or none.
        if "A" in mine and None in (self.num_terms, other.num_terms):
            raise ValueError(
                f"The block of '{self.name}' needs num_terms to add its mean A. A tensor that is "
                "used in two ways has no num_terms. Pass all the data at once."
            )

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        to: Callable[[Factor, Any, Any], Factor] = Factor.to,
    ) -> Self:
        """Return the block on another device or in another dtype; ``to`` is as in `scale`."""
        moved = {name: to(factor, device, dtype) for name, factor in self.factors.items()}
        return self.replace(**moved)

    def named_factors(self) -> list[tuple[Factor, str]]:
        """Return B, and A if there is one, with their names for errors."""
        return [(factor, f"{self.name}, {letter}") for letter, factor in self.factors.items()]

    @property
    def cost(self) -> int:
        """Cost of a decomposition or inverse, up to a constant: Σ d³ of its factors."""
        return sum(factor.cost for factor in self.factors.values())

    @property
    def _terms(self) -> tuple[float, ...]:
        """Numbers of terms as a tuple: one for all groups, or one for each."""
        assert self.num_terms is not None
        return self.num_terms if isinstance(self.num_terms, tuple) else (self.num_terms,)

    def _solved(self) -> list[tuple[Tensor, Tensor]]:
        """Return each factor's eigenvalues and number of clipped ones; computed once."""
        solved = [factor.eigenvalues for factor in self.factors.values()]
        if None in solved:
            compute_eigenvalues([self])
            solved = [factor.eigenvalues for factor in self.factors.values()]
        return cast(list[tuple[Tensor, Tensor]], solved)

    def factor_eigenvalues(self) -> tuple[Tensor, Tensor | None]:
        """Return β (..., d_out) of B and α (..., d_in) of A, ≥ 0, in float64.

        They are computed once, and again after a factor was changed in place. Without α, β has the
        block's eigenvalues.
        """
        values = [values for values, _ in self._solved()]
        return values[0], values[1] if len(values) == 2 else None

    def eigenvalues(self) -> Tensor:
        """Return all P eigenvalues β_i α_j ≥ 0, in float64."""
        return products_of(*self.factor_eigenvalues())

    def num_clipped(self) -> int:
        """Return the number of the factors' eigenvalues that rounding made negative."""
        return sum(int(clipped) for _, clipped in self._solved())

    def decompose(self) -> "EigenBlock":
        """Return eigenvalues and eigenvectors of the factors."""
        return decompose([self])[0]


def compute_eigenvalues(
    blocks: Iterable[KroneckerBlock],
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> None:
    """Compute and cache the eigenvalues of all blocks, except those that all ranks know.

    ``ranks`` share the work, the largest factors first by d³; with None this process does it all.
    All ranks must have the same blocks and call this, and get the same numbers to the bit. If only
    some ranks have a factor, one of these solves it. ``device`` is the device of results from other
    ranks; None uses the factors' device.
    """
    # A corrected block has its own eigenvalues.
    plain = [block for block in blocks if type(block) is KroneckerBlock]
    factors = [named for block in plain for named in block.named_factors()]
    is_missing = [factor.eigenvalues is None for factor, _ in factors]
    if ranks is not None:  # all solve the factors that any rank still has to solve
        is_missing = [any(of_ranks) for of_ranks in zip(*ranks.gather(is_missing), strict=True)]
    factors = [named for named, missing in zip(factors, is_missing, strict=True) if missing]
    solved = _solved(factors, ranks, device, vectors=False)
    for (factor, _), eigenvalues in zip(factors, solved, strict=True):
        factor.eigenvalues = eigenvalues


def decompose(
    blocks: Iterable[KroneckerBlock],
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> list["EigenBlock"]:
    """Return eigenvalues and eigenvectors of each block; otherwise like `compute_eigenvalues`."""
    blocks = list(blocks)
    plain = [block for block in blocks if type(block) is KroneckerBlock]
    factors = [named for block in plain for named in block.named_factors()]
    solved = iter(_solved(factors, ranks, device, vectors=True))
    return [
        block.eigen
        if isinstance(block, CorrectedBlock)
        else EigenBlock(*(part for _ in block.factors for part in next(solved)))
        for block in blocks
    ]


def gathered_blocks(
    blocks: Mapping[str, KroneckerBlock], ranks: Ranks, device: torch.device | str | None = None
) -> dict[str, KroneckerBlock]:
    """Return all blocks on each rank, from the ranks that keep them.

    See `KroneckerFactors.gathered`.
    """
    holders = ranks.holders([not block.is_meta for block in blocks.values()])
    for name, of_block in zip(blocks, holders, strict=True):
        if not of_block:
            raise missing_values(name)
    device = device or _device_of(block.factors["B"] for block in blocks.values())
    # Send the numbers of rows: an owner that changed a matrix in place has no rows any more.
    rows = ranks.gather(
        [[None if F.rows is None else F.rows.shape[-2] for F in block.factors.values()]
         for block in blocks.values()]
    )  # fmt: skip
    gathered, received = dict[str, KroneckerBlock](), list[tuple[Tensor, int]]()
    for i, ((name, block), of_block) in enumerate(zip(blocks.items(), holders, strict=True)):
        # Put tensors on the receivers' devices.
        whole = block if len(of_block) == ranks.size else block.to(device)
        if block.is_meta:
            numbers = zip(block.factors.items(), rows[of_block[0]][i], strict=True)
            whole = block.replace(**{letter: F.empty(device, M) for (letter, F), M in numbers})
        gathered[name] = whole
        if len(of_block) < ranks.size:
            received += [(F.entries, of_block[0]) for F in whole.factors.values()]
    ranks.exchange_(received)
    for name, block in blocks.items():  # eigenvalues stay known
        for letter, factor in block.factors.items():
            if factor.eigenvalues is not None:
                gathered[name].factors[letter].eigenvalues = factor.eigenvalues
    return gathered


def products_of(of_B: Tensor, of_A: Tensor | None) -> Tensor:
    """Return all β_i α_j of the factors' eigenvalues (..., d_out) and (..., d_in), flat.

    Without α, return β.
    """
    return (of_B if of_A is None else of_B[..., :, None] * of_A[..., None, :]).flatten()


def _solved(
    named: list[tuple[Factor, str]],
    ranks: Ranks | None,
    device: torch.device | None,
    *,
    vectors: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Return each factor's eigenvalues, with eigenvectors or with the number of clipped ones."""
    ranks = ranks or Ranks(None)
    # Solve a factor that a weight and its bias share once.
    numbers, of_all = _numbered([factor for factor, _ in named], ranks)
    factors = {number: named[number] for number in numbers}
    # Each rank solves its own factors, the largest first, and receives the others.
    costs = {number: factor.cost for number, (factor, _) in factors.items()}
    keys = sorted(factors, key=lambda number: -costs[number])
    holders = [of_all[number] for number in keys]
    if not all(holders):
        raise missing_values(factors[keys[holders.index([])]][1])
    target_device = device or _device_of(factor for factor, _ in factors.values())
    owners = ranks.owners([costs[key] for key in keys], holders)
    own = [key for key, owner in zip(keys, owners, strict=True) if owner == ranks.rank]
    solutions = eigendecompositions([factors[key] for key in own], vectors=vectors)
    solved = {
        key: (one.values, one.vectors if vectors else one.clipped)
        for key, one in zip(own, solutions, strict=True)
    }
    for key in keys:
        if key not in solved:
            F, _ = factors[key]
            dtype = F.dtype if vectors else torch.float64
            shape, kind = (F.shape, F.dtype) if vectors else ((), torch.int64)
            values = torch.empty(F.shape[:-1], dtype=dtype, device=target_device)
            solved[key] = values, torch.zeros(shape, dtype=kind, device=target_device)
    ranks.exchange_(
        (t, owner) for key, owner in zip(keys, owners, strict=True) for t in solved[key]
    )
    return [solved[number] for number in numbers]


def missing_values(name: str) -> RuntimeError:
    """Return the error for a block or factor that none of the ranks has."""
    return RuntimeError(
        f"The values of '{name}' are kept by another rank. Bring all blocks to this one first, on "
        "all ranks: posterior.gather(), or factors.gathered(ranks)."
    )


def _device_of(factors: Iterable[Factor]) -> torch.device:
    """Return the device of the first factor with values; the CPU if this rank has none."""
    devices = (F.device for F in factors if not F.is_meta)
    return next(devices, torch.device("cpu"))


def _numbered(factors: Sequence[Factor], ranks: Ranks) -> tuple[list[int], list[list[int]]]:
    """Return each factor's number, its first place in the list, and the ranks that have it.

    The result is the same on all ranks; collective. Factors count as different if they differ on
    any rank that has them.
    """
    first: dict[Factor, int] = {}
    first_uses = [None if F.is_meta else first.setdefault(F, i) for i, F in enumerate(factors)]
    numbers, holders, of_ranks = [], [], ranks.gather(first_uses)
    for i, of_factor in enumerate(zip(*of_ranks, strict=True)):
        holders.append([rank for rank, number in enumerate(of_factor) if number is not None])
        different = {of_factor[rank] for rank in holders[-1]}
        numbers.append(different.pop() if len(different) == 1 else i)
    return numbers, holders


def _one_or_all(terms: tuple[float, ...]) -> float | tuple[float, ...]:
    return terms[0] if len(terms) == 1 else terms


@dataclass(frozen=True)
class EigenBlock:
    """Eigenvalues and eigenvectors of a block: Q_B diag(β) Q_Bᵀ ⊗ Q_A diag(α) Q_Aᵀ.

    ``corrected`` eigenvalues replace the products β_i α_j.
    """

    beta: Tensor
    """(d_out) or (G, d_out)."""
    Q_B: Tensor
    """(d_out, d_out) or (G, d_out, d_out)."""
    alpha: Tensor | None = None
    """(d_in) or (G, d_in)."""
    Q_A: Tensor | None = None
    """(d_in, d_in) or (G, d_in, d_in)."""
    corrected: Tensor | None = None
    """(..., d_out, d_in), or (..., d_out, 1) without Q_A; see `CorrectedBlock`."""

    @property
    def numel(self) -> int:
        """P, the number of parameters of the block."""
        return self.spectrum_shape.numel()

    @property
    def spectrum_shape(self) -> torch.Size:
        """Shape of the parameter as a matrix, (..., d_out, d_in)."""
        columns = 1 if self.Q_A is None else self.Q_A.shape[-2]
        return torch.Size((*self.Q_B.shape[:-1], columns))

    def scale(self, factor: Tensor | float) -> "EigenBlock":
        """Return the block times a factor ≥ 0, spread evenly over B and A; differentiable in it."""
        corrected = None if self.corrected is None else self.corrected * factor
        if self.alpha is None:
            return replace(self, beta=self.beta * factor, corrected=corrected)
        root = factor**0.5
        return replace(self, beta=self.beta * root, alpha=self.alpha * root, corrected=corrected)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "EigenBlock":
        """Return the block on another device or in another dtype."""
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return EigenBlock(**{name: tensor.to(device, dtype) for name, tensor in tensors.items()})

    def spectrum(self, delta: Tensor | float = 0.0, damping: bool = False) -> Tensor:
        """Return eigenvalues of the block + δI: βα + δ; with damping (β + √δ)(α + √δ).

        The shape is (..., d_out, d_in). The result is differentiable in δ and in the eigenvalues.

        Raises:
            ValueError: damping of corrected eigenvalues, which are not products.
        """
        if self.corrected is not None:
            if damping:
                raise ValueError(
                    "damping=True adds √δ to the eigenvalues of both factors, but corrected "
                    "eigenvalues are not products of such eigenvalues. Pass damping=False, or use "
                    "uncorrected factors."
                )
            return self.corrected + delta
        if self.alpha is None:
            return (self.beta + delta)[..., None]
        if damping:
            root = torch.as_tensor(delta, dtype=self.beta.dtype, device=self.beta.device).sqrt()
            return (self.beta + root)[..., :, None] * (self.alpha + root)[..., None, :]
        return self.beta[..., :, None] * self.alpha[..., None, :] + delta

    def log_det(self, spectrum: Tensor) -> Tensor:
        """Return log det of Q diag(spectrum) Qᵀ, in float64."""
        return spectrum.double().log().sum()

    def rotate(self, v: Tensor) -> Tensor:
        """Return Qᵀ v for vectors v (..., P), in the shape of the spectrum, (..., d_out, d_in)."""
        V = v.reshape(*v.shape[:-1], *self.spectrum_shape)
        # Q_Bᵀ V Q_A, with rows multiplied from the right.
        V = (V.mT @ self.Q_B).mT
        return V if self.Q_A is None else V @ self.Q_A

    def rotate_back(self, v: Tensor) -> Tensor:
        """Return Q v for vectors v (..., P) in the eigenbasis."""
        V = v.reshape(*v.shape[:-1], *self.spectrum_shape)
        V = (V.mT @ self.Q_B.mT).mT
        return (V if self.Q_A is None else V @ self.Q_A.mT).reshape(v.shape)

    def power_matvec(self, v: Tensor, spectrum: Tensor, exponent: float) -> Tensor:
        """Return Q diag(spectrum ** exponent) Qᵀ v for vectors v (..., P), with Q = Q_B ⊗ Q_A."""
        # Take the power entry by entry in the eigenbasis, and transform back.
        V = self.rotate(v) * spectrum.pow(exponent)
        return self.rotate_back(V.reshape(v.shape))

    def diagonal(self, spectrum: Tensor, exponent: float = 1.0) -> Tensor:
        """Return the diagonal (P,) of Q diag(spectrum ** exponent) Qᵀ."""
        d = self.Q_B.square() @ spectrum.pow(exponent)
        if self.Q_A is not None:
            d = d @ self.Q_A.square().mT
        return d.flatten()


class CorrectedBlock(KroneckerBlock):
    """Block (Q_B ⊗ Q_A) diag(s) (Q_B ⊗ Q_A)ᵀ, with s the exact block's diagonal in that basis.

    It is nearest to the exact block in Frobenius norm among all matrices with these eigenvectors,
    and it has the exact block's trace. Source: George et al. 2018, "Fast Approximate Natural
    Gradient Descent in a Kronecker-factored Eigenbasis" (arXiv:1806.03884), section 3.

    B and A are the factors whose eigenvectors form the basis. The block is not their product.

    Args:
        arguments: arguments of `KroneckerBlock`.
        eigen: the eigenbasis of B ⊗ A, and the ``corrected`` eigenvalues in it.
        keywords: keyword arguments of `KroneckerBlock`.
    """

    def __init__(self, *arguments: Any, eigen: EigenBlock, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.eigen = eigen

    def replace(self, **changes: Any) -> Self:
        """Return the block with some of its arguments changed."""
        return super().replace(**{"eigen": self.eigen, **changes})

    @property
    def version(self) -> object:
        """Version of the eigenbasis's tensors, which determine all numbers of the block."""
        return [version_of(tensor) for tensor in vars(self.eigen).values() if tensor is not None]

    def check_semidefinite(self) -> None:
        """Check the factors as in `KroneckerBlock`, and the corrected eigenvalues."""
        super().check_semidefinite()
        if not (self._corrected.isfinite() & (self._corrected >= 0)).all():
            raise ValueError(f"eigenvalues of '{self.name}' are negative, NaN or infinity")

    @property
    def _corrected(self) -> Tensor:
        assert self.eigen.corrected is not None
        return self.eigen.corrected

    def to_dense(self) -> Tensor:
        """Return the block as a (P, P) matrix."""
        return self.matvec(torch.eye(self.numel, dtype=self.B.dtype, device=self.B.device))

    def matvec(self, v: Tensor) -> Tensor:
        """Return the block times vectors v (..., P)."""
        return self.eigen.power_matvec(v, self._corrected, 1.0)

    def scale(self, weight: float, scale: Callable[[Factor, float], Factor] = Factor.scale) -> Self:
        """Return the block of the same data with a weight ≥ 0."""
        return super().scale(weight, scale).replace(eigen=self.eigen.scale(weight))

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        to: Callable[[Factor, Any, Any], Factor] = Factor.to,
    ) -> Self:
        """Return the block on another device or in another dtype."""
        return super().to(device, dtype, to).replace(eigen=self.eigen.to(device, dtype))

    def factor_eigenvalues(self) -> tuple[Tensor, None]:
        """Return all P eigenvalues ≥ 0, in float64, and None, because they are not products."""
        return self._corrected.double().flatten(), None

    def num_clipped(self) -> int:
        """Return 0, because the eigenvalues are sums of squares."""
        return 0
