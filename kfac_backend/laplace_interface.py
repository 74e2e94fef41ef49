"""Backends of laplace-torch: `KfacGGN` and `KfacEF`. The only file that imports laplace.

laplace-torch holds the curvature as a `Kron`, a list of factors [B, A] or [B] in the order of the
trainable parameters, adds batches, and decomposes the sum. `FactorKron` and `EigenKron` below are
such objects with our blocks inside, so that grouped convolutions fit, the eigendecomposition falls
back instead of leaving the process, damping survives a sum, and the noise has its whole gradient.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import torch
from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface
from laplace.utils import Kron, KronDecomposed
from torch import Tensor, nn

from kfac_backend.block import EigenBlock, KroneckerBlock
from kfac_backend.factors import CurvaturePass
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.options import Fisher, KfacApprox, Unsupported

__all__ = ["EigenKron", "FactorKron", "KfacEF", "KfacGGN", "KfacInterface", "check_alignment"]


class FactorKron(Kron):
    """laplace-torch's Kron of one model: [B, A] or [B] per trainable parameter, in their order."""

    def __init__(self, kfacs: list[list[Tensor]], names: list[str]) -> None:
        super().__init__(kfacs)  # pyright: ignore[reportArgumentType]
        self.names = names

    @classmethod
    def from_factors(cls, factors: KroneckerFactors, dtype: torch.dtype | None = None):
        """A Kron of these factors, in the parameters' dtype if one is given."""
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
            if len(other) != len(self) or any(F.any() for Fs in other.kfacs for F in Fs):
                raise ValueError("Can only add curvature from the same backend and model.")
            return self
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


class KfacInterface(CurvatureInterface):
    """`kron` on top of `CurvaturePass`; what laplace-torch's interfaces have is inherited.

    Args:
        model: the network, or laplace-torch's feature extractor around it.
        likelihood: "classification" or "regression".
        last_layer: only the last layer's curvature.
        subnetwork_indices: for laplace-torch's subnetwork Laplace (full, diag).
        dict_key_x: the input's key in batches that are mappings.
        dict_key_y: the targets' key in batches that are mappings.
        kfac_approx: "expand" or "reduce".
        unsupported: see `kronecker_factors`.
        generator: source of Monte Carlo labels.
        kwargs: those of laplace-torch's interfaces (``stochastic``, ``num_samples``).
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: torch.LongTensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        kfac_approx: KfacApprox = "expand",
        unsupported: Unsupported = "error",
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, **kwargs
        )
        self.kfac_approx: KfacApprox = kfac_approx
        self.unsupported: Unsupported = unsupported
        self.generator = generator
        self._passes: dict[tuple[KfacApprox, int], CurvaturePass] = {}

    @property
    def fisher(self) -> Fisher:
        """The Fisher kind of `kron`."""
        raise NotImplementedError

    def kron(  # pyright: ignore[reportIncompatibleMethodOverride]  # names the keywords
        self,
        x: Tensor | MutableMapping[str, Any],
        y: Tensor,
        N: int,
        kfac_approx: KfacApprox | None = None,
        mc_samples: int | None = None,
    ) -> tuple[Tensor, FactorKron]:
        """Loss (a sum, nats) and curvature of one batch, scaled so that batches add up.

        A is the batch's mean times M/N, B the batch's sum.

        Args:
            x: input (M, ...) or a mapping.
            y: targets.
            N: number of examples in all batches together.
            kfac_approx: instead of the constructor's.
            mc_samples: instead of the constructor's ``num_samples``, if stochastic.
        """
        model: nn.Module = self.model
        if self.last_layer:
            with torch.no_grad():
                _, x = self.model.forward_with_features(x)  # pyright: ignore
            model = self.model.last_layer  # pyright: ignore[reportAssignmentType]
        curvature = self._curvature_pass(
            model,
            kfac_approx or self.kfac_approx,
            mc_samples or getattr(self, "num_samples", 1),
        )
        curvature.reset()
        curvature.add(x, y)
        factors = curvature.factors()
        check_alignment(model, factors)
        kron = FactorKron.from_factors(factors, self.params[0].dtype)
        for F in kron.kfacs:
            if len(F) == 2:
                F[1] = F[1] * (factors.num_data / N)
        return self.params[0].new_tensor(factors.loss), kron

    def _curvature_pass(
        self, model: nn.Module, kfac_approx: KfacApprox, mc_samples: int
    ) -> CurvaturePass:
        # Kept, since the first batch of each also proves that the model is covered.
        key = (kfac_approx, mc_samples)
        if key not in self._passes:
            self._passes[key] = CurvaturePass(
                model,
                self.likelihood,  # pyright: ignore[reportArgumentType]
                kfac_approx=kfac_approx,
                fisher=self.fisher,
                mc_samples=mc_samples,
                unsupported=self.unsupported,
                generator=self.generator,
            )
        return self._passes[key]


class KfacGGN(KfacInterface, GGNInterface):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The GGN by K-FAC, expand or reduce, for laplace-torch 0.3.

    Use it as ``Laplace(model, "classification", hessian_structure="kron", backend=KfacGGN,
    backend_kwargs={"kfac_approx": "reduce"})``. With ``stochastic=True`` labels are drawn from the
    model, ``num_samples`` per example.
    """

    @property
    def fisher(self) -> Fisher:
        """Monte Carlo if stochastic, else exact."""
        return "mc" if self.stochastic else "exact"


class KfacEF(KfacInterface, EFInterface):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The empirical Fisher by K-FAC, expand or reduce, for laplace-torch 0.3.

    Gradients are those of −log p(y|f), with unit noise for "regression": ``f − y``. laplace-torch's
    own full and diagonal empirical Fisher are twice that, as they halve the outer product of
    gradients of the whole squared error.
    """

    @property
    def fisher(self) -> Fisher:
        """Always empirical."""
        return "empirical"

    def gradients(self, x: Tensor | MutableMapping[str, Any], y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (M, P) of each example's ``lossfunc``, and the batch's sum of it."""
        if not self.last_layer and isinstance(x, Tensor):
            return super().gradients(x, y)
        # laplace-torch has no way for mappings or the last layer: chain the Jacobians instead.
        Js, f = self.last_layer_jacobians(x) if self.last_layer else self.jacobians(x)
        f = f.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.lossfunc(f, y)
        (g,) = torch.autograd.grad(loss, f)
        return torch.einsum("nc,ncp->np", g, Js), loss.detach()

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and dense empirical Fisher (P, P) of one batch."""
        loss, H = super().full(x, y, **kwargs)
        return loss, self.factor * H

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and diagonal (P,) of the empirical Fisher of one batch."""
        loss, H = super().diag(x, y, **kwargs)
        return loss, self.factor * H


def check_alignment(model: nn.Module, factors: KroneckerFactors) -> None:
    """Raise a ValueError unless there is one block per trainable parameter, in the same order.

    laplace-torch pairs blocks and parameters by position, in silence.
    """
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    blocks = {name: block.numel for name, block in factors.blocks.items()}
    if list(blocks.items()) != list(trainable.items()):
        differ = [name for name in trainable if blocks.get(name) != trainable[name]]
        raise ValueError(
            "laplace-torch needs a block for every trainable parameter, but these have none: "
            f"{', '.join(differ) or list(blocks)}. Freeze them with requires_grad_(False) before "
            "the Laplace approximation is made."
        )
