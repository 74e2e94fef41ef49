"""laplace-torch's containers of curvature, with our blocks inside.

laplace-torch holds the curvature as a `Kron`, a list of factors [B, A] or [B] in the order of the
trainable parameters, adds batches, and decomposes the sum. `FactorKron` and `EigenKron` are such
objects, so that grouped convolutions fit, the eigendecomposition falls back instead of leaving the
process, damping survives a sum, and the noise has its whole gradient.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from laplace.utils import Kron, KronDecomposed
from torch import Tensor

from kfac_backend.block import EigenBlock, KroneckerBlock
from kfac_backend.kronecker import KroneckerFactors

__all__ = ["EigenKron", "FactorKron"]


class FactorKron(Kron):
    """laplace-torch's Kron of one model: [B, A] or [B] per trainable parameter, in their order."""

    def __init__(self, kfacs: list[list[Tensor]], names: list[str]) -> None:
        super().__init__(kfacs)  # pyright: ignore[reportArgumentType]
        self.names = names

    @classmethod
    def from_factors(cls, factors: KroneckerFactors, dtype: torch.dtype | None = None):
        """A Kron of these factors, in the parameters' dtype if one is given, float32 at least."""
        if dtype is not None:
            dtype = torch.promote_types(dtype, torch.float32)
        kfacs = [
            [F.to(dtype) for F in (block.B, block.A) if F is not None]
            for block in factors.blocks.values()
        ]
        return cls(kfacs, list(factors.blocks))

    @property
    def blocks(self) -> list[KroneckerBlock]:
        """The factors as blocks."""
        kfacs = cast(list[list[Tensor]], self.kfacs)
        return [
            KroneckerBlock(name, F[0], F[1] if len(F) == 2 else None)
            for name, F in zip(self.names, kfacs, strict=True)
        ]

    def __add__(self, other: Kron) -> "FactorKron":
        """The sum with another Kron of this model, or with laplace-torch's initial zeros."""
        if not isinstance(other, Kron):
            raise ValueError(f"Can only add Kron to Kron, not {type(other).__name__}.")
        if not isinstance(other, FactorKron):
            if len(other) == len(self) and not any(F.any() for Fs in other.kfacs for F in Fs):
                return self
            # What laplace-torch's load_state_dict makes of our factors.
            shapes = [[F.shape for F in Fs] for Fs in self.kfacs]
            if [[F.shape for F in Fs] for Fs in other.kfacs] != shapes:
                raise ValueError("Can only add curvature from the same backend and model.")
            other = FactorKron(cast(list[list[Tensor]], other.kfacs), self.names)
        if self.names != other.names:
            raise ValueError("Can only add curvature of the same parameters.")
        sums = [
            [mine + theirs for mine, theirs in zip(F, G, strict=True)]
            for F, G in zip(self.kfacs, other.kfacs, strict=True)
        ]
        return FactorKron(sums, self.names)

    # Python asks a subclass's __radd__ before the base's __add__: zeros + batch arrives here.
    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> "FactorKron":
        """The curvature times a scalar, spread evenly over a block's factors."""
        return FactorKron(_times(scalar, cast(list[list[Tensor]], self.kfacs)), self.names)

    __rmul__ = __mul__

    def decompose(self, damping: bool = False) -> "EigenKron":
        """Eigenvalues and -vectors of every factor."""
        return EigenKron.from_blocks([block.decompose() for block in self.blocks], damping=damping)

    def _bmm(self, W: Tensor) -> Tensor:
        parts = W.split([block.numel for block in self.blocks], dim=-1)
        products = [block.matvec(w) for block, w in zip(self.blocks, parts, strict=True)]
        return torch.cat(products, dim=-1)

    def diag(self) -> Tensor:
        """The diagonal (P,)."""
        parts = []
        for block in self.blocks:
            d = block.B.diagonal(dim1=-2, dim2=-1)
            if block.A is not None:
                d = d[..., :, None] * block.A.diagonal(dim1=-2, dim2=-1)[..., None, :]
            parts.append(d.flatten())
        return torch.cat(parts)

    def logdet(self) -> Tensor:
        """Log det of the curvature without a prior; −∞ where it is singular."""
        return torch.stack([b.eigenvalues().log().sum() for b in self.blocks]).sum()

    def to_matrix(self) -> Tensor:
        """The dense (P, P) matrix; for tests."""
        return torch.block_diag(*(block.to_dense() for block in self.blocks))


class EigenKron(KronDecomposed):
    """laplace-torch's KronDecomposed: blocks by eigenvalues and -vectors, plus δ per block."""

    @classmethod
    def from_blocks(
        cls, blocks: list[EigenBlock], deltas: Tensor | None = None, damping: bool = False
    ) -> "EigenKron":
        """From decomposed blocks and the prior precisions to add, one per block."""
        vectors = [[Q for Q in (b.Q_B, b.Q_A) if Q is not None] for b in blocks]
        values = [[v for v in (b.beta, b.alpha) if v is not None] for b in blocks]
        return cls(vectors, values, deltas, damping)  # pyright: ignore[reportArgumentType]

    @property
    def blocks(self) -> list[EigenBlock]:
        """The blocks, without δ."""
        pairs = zip(self.eigenvalues, self.eigenvectors, strict=True)
        return [
            EigenBlock(values[0], Q[0], *((values[1], Q[1]) if len(values) == 2 else ()))
            for values, Q in cast(Iterable[tuple[list[Tensor], list[Tensor]]], pairs)
        ]

    def __add__(self, deltas: Tensor) -> "EigenKron":
        """The blocks + δ, a scalar or one per block."""
        self._check_deltas(deltas)
        return EigenKron(self.eigenvectors, self.eigenvalues, self.deltas + deltas, self.damping)

    __radd__ = __add__

    def __mul__(self, scalar: Tensor | float) -> "EigenKron":
        """The blocks times a scalar; δ stays."""
        values: Any = _times(scalar, cast(list[list[Tensor]], self.eigenvalues))
        return EigenKron(self.eigenvectors, values, self.deltas, self.damping)

    __rmul__ = __mul__

    def _spectra(self) -> list[tuple[EigenBlock, Tensor]]:
        return [
            (block, block.spectrum(delta, self.damping))
            for block, delta in zip(self.blocks, self.deltas.expand(len(self)), strict=True)
        ]

    def logdet(self) -> Tensor:
        """Σ log(βα + δ), differentiable in δ and in a scalar that multiplied the blocks."""
        return torch.stack([spectrum.log().sum() for _, spectrum in self._spectra()]).sum()

    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        spectra = self._spectra()
        parts = W.split([spectrum.numel() for _, spectrum in spectra], dim=-1)
        products = [
            block.power_matvec(w, spectrum, exponent)
            for (block, spectrum), w in zip(spectra, parts, strict=True)
        ]
        return torch.cat(products, dim=-1)

    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal (P,) of (H + δ) ** exponent."""
        return torch.cat([block.diagonal(s, exponent) for block, s in self._spectra()])

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """(H + δ) ** exponent as a dense (P, P) matrix; for tests."""
        blocks = []
        for block, spectrum in self._spectra():
            identity = torch.eye(spectrum.numel(), device=spectrum.device, dtype=spectrum.dtype)
            blocks.append(block.power_matvec(identity, spectrum, exponent))
        return torch.block_diag(*blocks)


def _times(scalar: Tensor | float, factors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Each block times a scalar, spread evenly over its factors, differentiable in the scalar.

    (laplace-torch takes the scalar out of the graph: its noise misses a part of its gradient.)
    """
    return [[F * scalar ** (1 / len(Fs)) for F in Fs] for Fs in factors]
