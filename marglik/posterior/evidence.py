"""The Laplace approximation of the log marginal likelihood, from the curvature's eigenvalues.

log p(D) ≈ log p(D|θ*)/T − ½ θ*ᵀ P₀ θ* − ½ (log det(H/(σ²T) + P₀) − log det P₀), in nats, a sum
over the data. Source: Immer et al. 2021 (arXiv:2104.04975); the likelihood is tempered here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_backend.blocks.block import decompose
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.factor_derivatives import BlockDerivative
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import check_positive
from kfac_backend.ranks import Ranks
from marglik.posterior.jacobian_ggn import JacobianGGN


@dataclass(frozen=True)
class EvidenceTerms:
    """What the evidence needs of a fitted network; independent of the hyperparameters."""

    spectra: Spectra | JacobianGGN
    """The eigenvalues of each block of the curvature at σ = 1; of a GGN from Jacobians the GGN
    itself, in which each parameter is a block of its own."""
    sizes: Tensor
    """Parameters per block, (B,), float64; without entries that are constants."""
    squared_norms: Tensor
    """‖θ_b‖² per block, (B,), float64."""
    loss: float
    """Σ ℓ over the data (nats) at σ = 1."""
    num_targets: float
    """Number of scalars in all targets, N·C with one loss term per example; the Gaussian's
    normaliser of regression needs it."""
    likelihood: Likelihood

    @classmethod
    def from_factors(cls, factors: KroneckerFactors, mean: Tensor) -> "EvidenceTerms":
        """The terms of factors at the parameters ``mean`` (P,), both in ``parameters()`` order."""
        blocks = list(factors.blocks.values())
        squares = mean.double().square().split([block.numel for block in blocks])
        for block, part in zip(blocks, squares, strict=True):
            part[slice(*block.constants)] = 0
        return cls.of_norms(factors, torch.stack([part.sum() for part in squares]))

    @classmethod
    def of_norms(cls, factors: KroneckerFactors, squared_norms: Tensor) -> "EvidenceTerms":
        """The terms of factors at parameters of these ‖θ_b‖² (B,)."""
        blocks = list(factors.blocks.values())
        sizes = [block.num_parameters for block in blocks]
        return cls(
            spectra=Spectra.of(blocks),
            sizes=torch.tensor(sizes, dtype=torch.float64, device=squared_norms.device),
            squared_norms=squared_norms,
            loss=factors.loss,
            num_targets=factors.num_loss_terms * factors.num_outputs,
            likelihood=factors.likelihood,
        )

    @classmethod
    def from_ggn(cls, ggn: JacobianGGN, mean: Tensor) -> "EvidenceTerms":
        """The terms of a GGN from Jacobians; ``mean`` are all trainable parameters."""
        squares = mean.double().square()[ggn.indices]
        return cls(
            spectra=ggn,
            sizes=torch.ones_like(squares),
            squared_norms=squares,
            loss=ggn.loss,
            num_targets=ggn.num_loss_terms * ggn.num_outputs,
            likelihood=ggn.likelihood,
        )

    def log_likelihood(
        self, sigma_noise: Tensor | float = 1.0, temperature: Tensor | float = 1.0
    ) -> Tensor:
        """Log p(D|θ*) / T (nats, a sum over the data); of regression with its normaliser / T."""
        sigma = torch.as_tensor(sigma_noise, dtype=torch.float64)
        value = -self.loss / sigma.square()
        if self.likelihood.has_sigma:
            value = value - self.num_targets * (sigma.log() + 0.5 * math.log(2 * math.pi))
        return value / temperature


def as_tensor(value: float | Tensor) -> Tensor:
    """A tensor as it is, a number in float64.

    In torch's default dtype, float32, a number would be rounded even for a float64 model.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)


def checked_precision(prior_precision: float | Tensor, blocks: int, each: int = 1) -> Tensor:
    """δ as a vector, (1,), (blocks,) or (each,), of single parameters.

    Raises:
        ValueError: a precision of wrong length, or one that is not positive.
    """
    check_positive("prior_precision", prior_precision)
    delta = as_tensor(prior_precision)
    if delta.dim() > 1 or delta.numel() not in (1, blocks, each):
        raise ValueError(
            f"prior_precision has shape {tuple(delta.shape)}; expected a scalar or ({blocks},), "
            "one per trainable tensor."
        )
    return delta.reshape(-1)


def log_marginal_likelihood(
    terms: EvidenceTerms,
    prior_precision: Tensor | float,
    sigma_noise: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
) -> Tensor:
    """The Laplace evidence (nats, a sum over the data), a float64 scalar.

    Differentiable in all three hyperparameters.

    Args:
        terms: the fitted network.
        prior_precision: δ > 0, a scalar or one per block (B,); includes N, see `prior`.
        sigma_noise: σ > 0; 1 unless the likelihood is regression.
        temperature: T > 0.

    Raises:
        ValueError: a precision of wrong length, a hyperparameter that is not positive, or a σ other
            than 1 for another likelihood than regression.
        FloatingPointError: the evidence is not finite; the error names the block.
    """
    sigma = _float64(sigma_noise, terms)
    T = _float64(temperature, terms)
    for name, value in (("sigma_noise", sigma), ("temperature", T)):
        check_positive(name, value)
    if not terms.likelihood.has_sigma and sigma != 1:
        raise ValueError(f"sigma_noise is {sigma.item()}; only regression has noise other than 1.")

    return evidence_of(terms, _precision(terms, prior_precision), sigma, T)


def evidence_of(terms: EvidenceTerms, delta: Tensor, sigma: Tensor, T: Tensor | float) -> Tensor:
    """`log_marginal_likelihood` of arguments that are checked, for many steps over them.

    Args:
        terms: the fitted network.
        delta: δ per block (B,), float64, on the terms' device.
        sigma: σ, a float64 scalar there.
        T: the temperature.
    """
    # log(λ/δ + 1) is log(λ + δ) − log δ without cancellation where the prior dominates.
    log_det_ratio = terms.spectra.log_det_ratio(1 / (sigma.square() * T) / delta).sum()
    scatter = (delta * terms.squared_norms).sum()
    evidence = terms.log_likelihood(sigma, T) - 0.5 * (log_det_ratio + scatter)
    if not torch.isfinite(evidence):
        raise FloatingPointError(_why_not_finite(terms, delta))
    return evidence


def effective_parameters(
    terms: EvidenceTerms,
    prior_precision: Tensor | float,
    sigma_noise: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
) -> Tensor:
    """γ_b = Σ_i λ_i / (λ_i + δ_b): how many directions of each block the data determines, (B,).

    Source: MacKay 1992, "Bayesian interpolation".
    """
    sigma, T = _float64(sigma_noise, terms), _float64(temperature, terms)
    return terms.spectra.effective(1 / (sigma.square() * T) / _precision(terms, prior_precision))


def derivatives_in_factors(
    factors: KroneckerFactors,
    prior_precision: Tensor | float,
    sigma_noise: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> dict[str, BlockDerivative]:
    """∂/∂B and ∂/∂A of the evidence for each block, at fixed θ, δ, σ and T.

    With r = 1/(σ²T) and D_ij = r / (r β_i α_j + δ), for −½ log det(r B ⊗ A + δI):
    −½ Q_B diag_i(Σ_j D_ij α_j) Q_Bᵀ and −½ Q_A diag_j(Σ_i D_ij β_i) Q_Aᵀ.

    Args:
        factors: at σ = 1.
        prior_precision: δ, a scalar or one per block.
        sigma_noise: σ.
        temperature: T.
        ranks: those that share the factors, which then all call this.
        device: of the derivatives; by default the factors'.
    """
    delta = torch.as_tensor(prior_precision, dtype=torch.float64).expand(len(factors))
    r = 1 / (torch.as_tensor(sigma_noise).double().square() * temperature).item()
    derivatives = {}
    of_blocks = decompose(factors.blocks.values(), ranks, device)
    for name, eigen, d in zip(factors.blocks, of_blocks, delta.tolist(), strict=True):
        beta, alpha = eigen.beta.double(), None if eigen.alpha is None else eigen.alpha.double()
        if alpha is None or eigen.Q_A is None:
            derivatives[name] = BlockDerivative(_in_basis(eigen.Q_B, -0.5 * r / (r * beta + d)))
            continue
        D = -0.5 * r / (r * beta[..., :, None] * alpha[..., None, :] + d)
        of_alpha = (D * beta[..., :, None]).sum(-2)
        if alpha.dim() < beta.dim():  # groups that share one A
            of_alpha = of_alpha.sum(0)
        derivatives[name] = BlockDerivative(
            _in_basis(eigen.Q_B, (D * alpha[..., None, :]).sum(-1)),
            _in_basis(eigen.Q_A, of_alpha),
        )
    return derivatives


def _in_basis(Q: Tensor, diagonal: Tensor) -> Tensor:
    """Q diag Qᵀ."""
    return (Q * diagonal.to(Q)[..., None, :]) @ Q.mT


def _float64(value: Tensor | float, terms: EvidenceTerms) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).to(terms.squared_norms.device).squeeze()


def _precision(terms: EvidenceTerms, prior_precision: Tensor | float) -> Tensor:
    """δ per block, checked, (B,)."""
    blocks = len(terms.squared_norms)
    return checked_precision(prior_precision, blocks).to(terms.squared_norms).expand(blocks)


def _why_not_finite(terms: EvidenceTerms, delta: Tensor) -> str:
    for b, largest in enumerate(terms.spectra.largest):
        if not torch.isfinite(largest + terms.squared_norms[b] + delta[b]):
            return (
                f"The evidence is not finite: block {b} has eigenvalues up to {largest:.3g}, "
                f"‖θ‖² = {terms.squared_norms[b]:.3g}, prior precision {delta[b]:.3g}. Likely "
                "causes: training has diverged, or the step on the hyperparameters is too large."
            )
    return f"The evidence is not finite: the loss is {terms.loss}. Training has diverged."
