"""laplace-torch's containers of curvature, with blocks of this package inside.

laplace-torch stores the curvature as a `Kron`, a list of factors [B, A] or [B] in the order of the
trainable parameters. It adds the batches' Krons, and decomposes the sum into a `KronDecomposed`.
`FactorKron` and `EigenKron` replace these classes. They support grouped convolutions, use our
eigendecomposition (laplace-torch's ends the process if it fails), keep ``damping`` in sums, and
give the noise its full gradient.
"""

import warnings
from functools import cache, cached_property
from typing import cast

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock, KroneckerBlock, decompose
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.extras import extra
from kfac_backend.layers.gram import Factor

with warnings.catch_warnings():
    # It imports ASDL, whose scripted functions warn. It is imported only here, to hide that.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    with extra("laplace"):
        import laplace.curvature
        from laplace.utils import Kron, KronDecomposed

__all__ = ["EigenKron", "FactorKron", "laplace"]


class FactorKron(Kron):
    """laplace-torch's Kron of one model: [B, A] or [B] per trainable parameter, in their order."""

    def __init__(
        self,
        kfacs: list[list[Tensor]],
        names: list[str],
        constants: list[tuple[int, int]] | None = None,
    ) -> None:
        self.kfacs: list[list[Tensor]] = kfacs  # pyright: ignore[reportIncompatibleVariableOverride]
        self.names = names
        self.constants = constants or [(0, 0)] * len(names)
        """See `KroneckerBlock.constants`."""

    @classmethod
    def from_factors(cls, factors: KroneckerFactors, dtype: torch.dtype) -> "FactorKron":
        """Return a Kron of these factors in a dtype, at least in float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        kfacs = [
            [F.matrix.to(dtype=dtype) for F in block.factors.values()]
            for block in factors.blocks.values()
        ]
        return cls(kfacs, list(factors.blocks), [b.constants for b in factors.blocks.values()])

    @property
    def blocks(self) -> list[KroneckerBlock]:
        """A `KroneckerBlock` for each entry of ``kfacs``."""
        factor = cache(Factor)  # one for the tensor that a weight and its bias share
        return [
            KroneckerBlock(
                name, factor(F[0]), factor(F[1]) if len(F) == 2 else None, constants=constants
            )
            for name, F, constants in zip(self.names, self.kfacs, self.constants, strict=True)
        ]

    def __add__(self, other: Kron) -> "FactorKron":
        """Return the sum with another Kron of this model, or with laplace-torch's initial zeros."""
        kfacs, others = self.kfacs, cast(list[list[Tensor]], other.kfacs)
        are_zeros = len(other) == len(self) and not any(F.any() for Fs in others for F in Fs)
        if are_zeros and not isinstance(other, FactorKron):
            return self
        # Another nonzero Kron may contain our factors, loaded by laplace-torch's load_state_dict.
        if [[F.shape for F in Fs] for Fs in others] != [[F.shape for F in Fs] for Fs in kfacs]:
            raise ValueError(
                "Can only add curvature from the same backend and model, but the factors have "
                "other shapes. Fit both with the same backend, model and frozen parameters."
            )
        pairs = (zip(*both, strict=True) for both in zip(kfacs, others, strict=True))
        return FactorKron([[F + G for F, G in pair] for pair in pairs], self.names, self.constants)

    # Python calls a subclass's __radd__ before the base's __add__, so zeros + batch arrives here.
    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> "FactorKron":
        """Return the curvature times a scalar, spread evenly over a block's factors."""
        # laplace-torch detaches the scalar, so the gradient of its noise lacks a part.
        scaled = [[F * scalar ** (1 / len(Fs)) for F in Fs] for Fs in self.kfacs]
        return FactorKron(scaled, self.names, self.constants)

    __rmul__ = __mul__

    def decompose(self, damping: bool = False) -> "EigenKron":
        """Return eigenvalues and eigenvectors of every factor, computed on first use."""
        return EigenKron(_Decomposition(self.blocks), damping=damping)

    def _bmm(self, W: Tensor) -> Tensor:
        parts = W.split([block.numel for block in self.blocks], dim=-1)
        products = [block.matvec(w) for block, w in zip(self.blocks, parts, strict=True)]
        return torch.cat(products, dim=-1)

    def logdet(self) -> Tensor:
        """Return log det of the curvature without a prior; −∞ if it is singular."""
        return torch.stack([b.eigenvalues().log().sum() for b in self.blocks]).sum()

    def to_matrix(self) -> Tensor:
        """Return the dense (P, P) matrix; for tests."""
        return torch.block_diag(*(block.to_dense() for block in self.blocks))


class _Decomposition:
    """Spectra of some blocks, computed on first use, for `EigenKron`s of any scale and δ."""

    def __init__(self, blocks: list[KroneckerBlock]) -> None:
        self.blocks = blocks

    @cached_property
    def spectra(self) -> Spectra:
        """Eigenvalues of the blocks, without eigenvectors."""
        return Spectra.of(self.blocks)

    @cached_property
    def eigen(self) -> list[EigenBlock]:
        """Eigenvalues and eigenvectors of the blocks."""
        return decompose(self.blocks)


class EigenKron(KronDecomposed):
    """laplace-torch's KronDecomposed: scale · (B ⊗ A) + δ per block, decomposed.

    A log determinant computes eigenvalues only. Eigenvectors are computed at the first product.
    """

    def __init__(
        self,
        decomposition: _Decomposition,
        deltas: Tensor | None = None,
        damping: bool = False,
        scale: Tensor | float = 1.0,
    ) -> None:
        # Not super().__init__, which would compute the eigenvectors at once.
        self._decomposition = decomposition
        if deltas is None:
            B = decomposition.blocks[0].B
            deltas = torch.zeros(len(decomposition.blocks), dtype=B.dtype, device=B.device)
        self.deltas = deltas
        self.damping = damping
        self.scale = scale

    def __len__(self) -> int:
        return len(self._decomposition.blocks)

    @property
    def blocks(self) -> list[EigenBlock]:
        """Scaled blocks, without δ."""
        return [eigen.scale(self.scale) for eigen in self._decomposition.eigen]

    @property
    def eigenvalues(self) -> list[list[Tensor]]:  # pyright: ignore
        """[β, α] or [β] of each scaled block."""
        return [[v for v in (b.beta, b.alpha) if v is not None] for b in self.blocks]

    @property
    def eigenvectors(self) -> list[list[Tensor]]:  # pyright: ignore
        """[Q_B, Q_A] or [Q_B] of each block."""
        return [[Q for Q in (b.Q_B, b.Q_A) if Q is not None] for b in self.blocks]

    def __add__(self, deltas: Tensor) -> "EigenKron":
        """Return the blocks + δ, a scalar or one per block."""
        self._check_deltas(deltas)
        return EigenKron(self._decomposition, self.deltas + deltas, self.damping, self.scale)

    __radd__ = __add__

    def __mul__(self, scalar: Tensor | float) -> "EigenKron":
        """Return the blocks times a scalar, differentiable in it; δ is unchanged."""
        return EigenKron(self._decomposition, self.deltas, self.damping, self.scale * scalar)

    __rmul__ = __mul__

    def spectra(self) -> list[tuple[EigenBlock, Tensor]]:
        """Return each scaled block's eigenvectors, and its eigenvalues + δ in their basis."""
        deltas = self.deltas.expand(len(self))
        return [
            (block, block.spectrum(delta, self.damping))
            for block, delta in zip(self.blocks, deltas, strict=True)
        ]

    def logdet(self) -> Tensor:
        """Return Σ log(βα + δ), differentiable in δ and in a scalar factor of the blocks."""
        # log det(s·H + δ) = log det(1 + s/δ · H) + P log δ, from eigenvalues alone.
        delta = self.deltas.double().expand(len(self))
        if not self.damping and (delta > 0).all():
            sizes = delta.new_tensor([block.numel for block in self._decomposition.blocks])
            ratios = self._decomposition.spectra.log_det_ratio(self.scale / delta)
            return (ratios + sizes * delta.log()).sum()
        return torch.stack([block.log_det(spectrum) for block, spectrum in self.spectra()]).sum()

    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        spectra = self.spectra()
        parts = W.split([block.numel for block, _ in spectra], dim=-1)
        products = [
            block.power_matvec(w, spectrum, exponent)
            for (block, spectrum), w in zip(spectra, parts, strict=True)
        ]
        for product, block in zip(products, self._decomposition.blocks, strict=True):
            if exponent < 0 and any(block.constants):
                product[..., slice(*block.constants)] = 0  # a constant has no variance
        return torch.cat(products, dim=-1)

    def diag(self, exponent: float = 1) -> Tensor:
        """Return the diagonal (P,) of (H + δ) ** exponent."""
        return torch.cat([block.diagonal(s, exponent) for block, s in self.spectra()])

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """Return (H + δ) ** exponent as a dense (P, P) matrix; for tests."""
        blocks = []
        for block, spectrum in self.spectra():
            identity = torch.eye(block.numel, device=spectrum.device, dtype=spectrum.dtype)
            blocks.append(block.power_matvec(identity, spectrum, exponent))
        return torch.block_diag(*blocks)
