"""(F + damping)⁻¹ g: what preconditioning does with a block F = B ⊗ A, and with the norms after it.

F is the block of the mean loss: A is a mean over its terms, and B one over the batch's loss terms.
A gradient G has the shape of its parameter, here (d_out, d_in); vec flattens it row by row.

- Damping on the product: (B ⊗ A + λI)⁻¹ vec(G) = vec(Q_B [(Q_Bᵀ G Q_A) / (β_i α_j + λ)] Q_Aᵀ).
- Damping on the factors: (B + λ_B I)⁻¹ G (A + λ_A I)⁻¹ with λ_A = π√λ, λ_B = √λ/π. It differs from
  the first by a cross term, λ_B I ⊗ A + λ_A B ⊗ I, that damps the large eigenvalues, too.

Source: Martens & Grosse 2015 (arXiv:1503.05671), sections 6.2 and 6.3; Eschenhagen et al. 2023
(arXiv:2311.00636), appendix on the practical choices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock, KroneckerBlock
from kfac_backend.blocks.eigen import eigh
from kfac_backend.optimizer.options import DampingOn

__all__ = [
    "DampedInverse",
    "EigenInverse",
    "FactorInverse",
    "clip_factor",
    "damped_inverse",
    "kl_clip_factor",
]


class DampedInverse(Protocol):
    """A linear map from a parameter's gradient to its preconditioned gradient."""

    def __call__(self, G: Tensor) -> Tensor:
        """The preconditioned gradient, in the shape and dtype of G."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All that it is made of, by name."""
        ...

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The one that `tensors` were of."""
        ...


@dataclass(frozen=True)
class FactorInverse:
    """Damping on the factors: G ↦ (B + λ_B I)⁻¹ G (A + λ_A I)⁻¹, group by group."""

    B: Tensor
    """(B + λ_B I)⁻¹: (d_out, d_out) or (G, d_out, d_out)."""
    A: Tensor | None = None
    """(A + λ_A I)⁻¹, or None for a block without A."""

    def __call__(self, G: Tensor) -> Tensor:
        """The preconditioned gradient."""
        columns = 1 if self.A is None else self.A.shape[-1]
        V = G.reshape(*self.B.shape[:-1], columns).to(self.B.dtype)
        # 1x1 inverses are a diagonal: its batched product would take a kernel for each entry.
        V = self.B * V if self.B.shape[-1] == 1 else self.B @ V
        V = V if self.A is None else V @ self.A
        return V.reshape(G.shape).to(G.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The two inverses."""
        return {"B": self.B} if self.A is None else {"B": self.B, "A": self.A}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "FactorInverse":
        """The one that `tensors` were of."""
        return cls(**tensors)


@dataclass(frozen=True)
class EigenInverse:
    """Damping on the product: G ↦ Q_B [(Q_Bᵀ G Q_A) / (β_i α_j + λ)] Q_Aᵀ."""

    eigen: EigenBlock
    spectrum: Tensor
    """β_i α_j + λ, (..., d_out, d_in)."""

    def __call__(self, G: Tensor) -> Tensor:
        """The preconditioned gradient."""
        V = self.eigen.power_matvec(G.reshape(-1).to(self.spectrum.dtype), self.spectrum, -1.0)
        return V.view(G.shape).to(G.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Eigenvectors and the damped eigenvalues; the factors' own are of no more use."""
        own = {"Q_B": self.eigen.Q_B, "Q_A": self.eigen.Q_A, "spectrum": self.spectrum}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "EigenInverse":
        """The one that `tensors` were of."""
        spectrum, Q_A = tensors["spectrum"], tensors.get("Q_A")
        eigen = EigenBlock(spectrum.new_empty(0), tensors["Q_B"], None, Q_A)
        return cls(eigen, spectrum)


def damped_inverse(
    block: KroneckerBlock, damping: float, damping_on: DampingOn, balanced: bool = True
) -> DampedInverse:
    """(F + damping)⁻¹ of a block of the mean loss, as a map of gradients.

    Args:
        block: F = B ⊗ A, or B alone, to which λ itself is added.
        damping: λ > 0.
        damping_on: see `PreconditionerOptions`.
        balanced: see there.

    Raises:
        FloatingPointError: a factor that is not finite.
    """
    for F, name in block.named_factors():
        if not torch.isfinite(F).all():
            raise FloatingPointError(
                f"The curvature factor of '{name}' is not finite: the training diverges. Lower the "
                "learning rate, raise the damping, warm the learning rate up, or set norm_control "
                "(kl_clip, gradient_clip)."
            )
    if damping_on == "product":
        eigen = block.decompose()
        spectrum = eigen.spectrum(damping)
        if eigen.Q_A is None:
            spectrum = spectrum.expand(*eigen.beta.shape, 1)
        return EigenInverse(replace(eigen, beta=eigen.beta.new_empty(0), alpha=None), spectrum)
    if block.A is None:
        return FactorInverse(_inverse(block.B, damping, f"{block.name}, B"))
    pi = _balance(block.B, block.A) if balanced else 1.0
    root = damping**0.5
    return FactorInverse(
        _inverse(block.B, root / pi, f"{block.name}, B"),
        _inverse(block.A, root * pi, f"{block.name}, A"),
    )


def kl_clip_factor(inner_products: Tensor, learning_rate: float, kl_limit: float) -> Tensor:
    """min(1, √(κ / (η² Σ⟨p̂, g⟩))), so that a step moves the predictions by at most κ nats or so.

    Source: Ba, Grosse & Martens 2017, section 5.

    Args:
        inner_products: ⟨p̂, g⟩ of each parameter.
        learning_rate: η.
        kl_limit: κ.
    """
    moved = learning_rate**2 * inner_products.sum()
    return (kl_limit / moved.clamp(min=torch.finfo(moved.dtype).tiny)).sqrt().clamp(max=1.0)


def clip_factor(gradients: Iterable[Tensor], largest: float) -> Tensor:
    """What gradients are multiplied by, so that their norm is at most ``largest``."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return (largest / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)


def _balance(B: Tensor, A: Tensor) -> Tensor:
    """π = √((tr A/d_in) / (tr B/d_out)), (G, 1, 1) for groups; 1 where a factor is zero.

    Groups that share an A share their damping, too: π is then of their mean.
    """
    of_A, of_B = (F.diagonal(dim1=-2, dim2=-1).mean(-1) for F in (A, B))
    if of_B.dim() > of_A.dim():
        of_B = of_B.mean()
    ratio = of_A / of_B
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))
    return ratio.sqrt()[..., None, None]


def _inverse(F: Tensor, damping: Tensor | float, name: str) -> Tensor:
    """(F + damping I)⁻¹, batched over leading axes.

    Args:
        F: a factor.
        damping: one for all groups, or (G, 1, 1).
        name: what to call the factor in an error.
    """
    damping = torch.as_tensor(damping, dtype=F.dtype, device=F.device)
    if F.shape[-1] == 1:
        return 1.0 / (F.clamp(min=0.0) + damping)
    of_diagonal = damping[..., 0] if damping.dim() else damping
    damped = F.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(of_diagonal)
    L, failed = torch.linalg.cholesky_ex(damped)
    if not failed.any():
        return torch.cholesky_inverse(L)
    # Rounding made an eigenvalue of F more negative than the damping is large: clip it.
    values, Q, _ = eigh(F, name)
    return (Q / (values + of_diagonal)[..., None, :]) @ Q.mT
