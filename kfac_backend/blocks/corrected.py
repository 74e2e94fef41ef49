"""A block with corrected eigenvalues in the eigenbasis of B ⊗ A (EKFAC)."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock, KroneckerBlock
from kfac_backend.blocks.eigen import check_orthonormal
from kfac_backend.blocks.sketch import Basis, Factor

__all__ = ["CorrectedBlock"]


@dataclass(frozen=True)
class CorrectedBlock(KroneckerBlock):
    """(Q_B ⊗ Q_A) diag(s) (Q_B ⊗ Q_A)ᵀ, with s the exact block's diagonal in that basis.

    Of all matrices with these eigenvectors it is the nearest to the exact block in Frobenius norm,
    and it has the exact block's trace. Source: George et al. 2018, "Fast Approximate Natural
    Gradient Descent in a Kronecker-factored Eigenbasis" (arXiv:1806.03884), section 3.

    B and A are the factors whose eigenvectors form the basis. The block is not their product.
    """

    eigen: EigenBlock = field(kw_only=True)
    """The eigenbasis of B ⊗ A, and the ``corrected`` eigenvalues in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_factors("A correction of eigenvalues")
        if self._corrected.numel() != self.numel:
            raise ValueError(
                f"The block of '{self.name}' has {self.numel} entries and corrected eigenvalues of "
                f"shape {tuple(self._corrected.shape)}; there is one for each entry."
            )

    def check(self) -> None:
        """Raise a ValueError unless a pass can have made the block; for factors from a file."""
        super().check()
        sums = self._corrected
        if sums.shape != self.eigen.spectrum_shape or not (sums >= 0).all() or sums.isinf().any():
            raise ValueError(
                f"The corrected eigenvalues of '{self.name}', {tuple(sums.shape)}, are not sums of "
                f"squares {tuple(self.eigen.spectrum_shape)}."
            )
        for Q, F in ((self.eigen.Q_B, self.B), (self.eigen.Q_A, self.A)):
            if Q is not None and F is not None:
                assert isinstance(Q, Tensor)  # sketches are not corrected
                if Q.shape != F.shape:
                    raise ValueError(
                        f"The eigenvectors of '{self.name}' are {tuple(Q.shape)}, the factor "
                        f"{tuple(F.shape)}."
                    )
                check_orthonormal(Q, self.name)

    @property
    def _corrected(self) -> Tensor:
        assert self.eigen.corrected is not None
        return self.eigen.corrected

    def to_dense(self) -> Tensor:
        """The block as a (P, P) matrix."""
        return self.matvec(torch.eye(self.numel, dtype=self.B.dtype, device=self.B.device))

    def matvec(self, v: Tensor) -> Tensor:
        """The block times vectors v (..., P)."""
        return self.eigen.power_matvec(v, self._corrected, 1.0)

    def scale(self, weight: float) -> "CorrectedBlock":
        """The block of the same data with a weight ≥ 0."""
        scaled = super().scale(weight)
        assert isinstance(scaled, CorrectedBlock)
        return replace(scaled, eigen=self.eigen.scale(weight))

    def add(self, other: KroneckerBlock) -> "CorrectedBlock":
        """The block of the union of both data sets, if both have the same eigenvectors.

        Raises:
            ValueError: different eigenvectors, since those of the sum differ from both.
        """
        total = super().add(other)
        assert isinstance(total, CorrectedBlock) and isinstance(other, CorrectedBlock)
        mine, theirs = self.eigen, other.eigen
        if not (_same(mine.Q_B, theirs.Q_B) and _same(mine.Q_A, theirs.Q_A)):
            raise ValueError(
                f"The blocks of '{self.name}' have corrected eigenvalues for different "
                "eigenvectors, and their sum has others again. Add (or average) the factors before "
                "they are corrected, and correct the sum over all the data."
            )
        alpha = None if total.A is None else _diagonal_in(mine.Q_A, total.A)
        eigen = EigenBlock(
            _diagonal_in(mine.Q_B, total.B),
            mine.Q_B,
            alpha,
            mine.Q_A,
            self._corrected + other._corrected,
        )
        return replace(total, eigen=eigen)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "CorrectedBlock":
        """The block on another device or in another dtype."""
        moved = super().to(device, dtype)
        return replace(moved, eigen=self.eigen.to(device, dtype))

    def factor_eigenvalues(self) -> tuple[Tensor, None]:
        """All P eigenvalues ≥ 0, in float64, and None: they are not products of factors'."""
        return self._corrected.double().flatten(), None

    def num_clipped(self) -> int:
        """0, since the eigenvalues are sums of squares."""
        return 0

    def decompose(self) -> EigenBlock:
        """The corrected eigenvalues, and the eigenvectors of the factors."""
        return self.eigen


def _same(first: Basis | None, second: Basis | None) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first is second
    return torch.equal(first, second)


def _diagonal_in(Q: Basis | None, factor: Factor) -> Tensor:
    """The diagonal of Qᵀ F Q."""
    assert isinstance(Q, Tensor) and isinstance(factor, Tensor)  # sketches are not corrected
    return (Q * (factor @ Q)).sum(-2)
