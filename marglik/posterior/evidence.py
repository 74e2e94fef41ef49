"""Compute the Laplace approximation of the log marginal likelihood from curvature eigenvalues.

log p(D) ≈ log p(D|θ*)/T − ½ θ*ᵀ P₀ θ* − ½ (log det(H/(σ²T) + P₀) − log det P₀), in nats, a sum over
the data. Source: Immer et al. 2021 (arXiv:2104.04975). Here the likelihood has a temperature T.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_backend.blocks.block import decompose
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.factor_derivatives import BlockDerivative
from kfac_backend.likelihoods import Likelihood
from kfac_backend.ranks import Ranks
from marglik.posterior.jacobian_ggn import JacobianGGN


@dataclass(frozen=True)
class EvidenceTerms:
    """Quantities of a fitted network for the evidence, independent of the hyperparameters."""

    spectra: Spectra | JacobianGGN
    """The eigenvalues of each block of the curvature at σ = 1. For a GGN from Jacobians it is the
    GGN itself, in which each parameter is a separate block."""
    squared_norms: Tensor
    """‖θ_b‖² per block, (B,), float64."""
    tensors: Tensor
    """Number of the trainable tensor that each block belongs to, (B,)."""
    loss: float
    """Σ ℓ over the data (nats) at σ = 1."""
    num_targets: float
    """Number of scalars in all targets: N·C with one loss term per example. The normaliser of a
    Gaussian likelihood needs it."""
    likelihood: Likelihood
    names: Sequence[str]
    """Names of the trainable tensors."""

    def sum_over_blocks(self, values: Tensor, groups: Sequence[int]) -> Tensor:
        """Sum one value per block (B,) within the groups of tensors, given by tensor index.

        With ``range(number of tensors)`` each tensor is a separate group.
        """
        index = torch.tensor([*groups], device=values.device)
        return values.new_zeros(max(groups) + 1).index_add(0, index[self.tensors], values)

    def log_likelihood(
        self, sigma_noise: Tensor | float = 1.0, temperature: Tensor | float = 1.0
    ) -> Tensor:
        """Return log p(D|θ*) / T (nats, a sum over data), with the normaliser of regression."""
        sigma = torch.as_tensor(sigma_noise, dtype=torch.float64)
        value = -self.loss / sigma.square()
        if self.likelihood.has_sigma:
            value = value - self.num_targets * (sigma.log() + 0.5 * math.log(2 * math.pi))
        return value / temperature

    def log_marginal_likelihood(
        self, delta: Tensor, sigma_noise: Tensor, temperature: Tensor | float = 1.0
    ) -> Tensor:
        """Return the Laplace evidence (nats, a sum over the data), differentiable in its arguments.

        Args:
            delta: δ > 0 of each block (B,), which includes N; see `Posterior.precision_per_block`
                and `prior`.
            sigma_noise: σ > 0; 1 unless the likelihood is regression.
            temperature: T > 0.

        Raises:
            FloatingPointError: the evidence is not finite; the error names the tensor.
        """
        sigma = sigma_noise.to(self.squared_norms)
        # log(λ/δ + 1) is log(λ + δ) − log δ without cancellation if the prior dominates.
        ratios = self.spectra.log_det_ratio(1 / (sigma.square() * temperature) / delta)
        scatter = (delta * self.squared_norms).sum()
        value = self.log_likelihood(sigma, temperature) - 0.5 * (ratios.sum() + scatter)
        if not torch.isfinite(value):
            raise FloatingPointError(_why_not_finite(self, delta))
        return value

    def effective_parameters(
        self, delta: Tensor, sigma_noise: Tensor, temperature: Tensor | float = 1.0
    ) -> Tensor:
        """Return γ_b = Σ_i λ_i / (λ_i + δ_b), (B,): parameters that the data determine.

        Source: MacKay 1992, "Bayesian interpolation". Arguments: see `log_marginal_likelihood`.
        """
        sigma = sigma_noise.to(self.squared_norms)
        return self.spectra.effective(1 / (sigma.square() * temperature) / delta)

    def gradient(
        self, delta: Tensor, sigma_noise: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the evidence's derivatives in log δ of each block (B,), and in log σ.

        The derivative in log δ is ½(γ − δ‖θ‖²). The log determinant's derivative in log σ is Σγ.
        See `log_marginal_likelihood` for the arguments.
        """
        sigma = sigma_noise.to(self.squared_norms)
        gamma = self.spectra.effective(1 / (sigma.square() * temperature) / delta)
        in_sigma = 2 * self.loss / sigma.square()
        if self.likelihood.has_sigma:
            in_sigma = in_sigma - self.num_targets
        return 0.5 * (gamma - delta * self.squared_norms), in_sigma / temperature + gamma.sum()


def derivatives_in_factors(
    factors: KroneckerFactors,
    prior_precision: Tensor | float,
    sigma_noise: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> dict[str, BlockDerivative]:
    """Return ∂/∂B and ∂/∂A of the evidence for each block, at fixed θ, δ, σ and T.

    With r = 1/(σ²T) and D_ij = r / (r β_i α_j + δ), for −½ log det(r B ⊗ A + δI) they are −½ Q_B
    diag_i(Σ_j D_ij α_j) Q_Bᵀ and −½ Q_A diag_j(Σ_i D_ij β_i) Q_Aᵀ.

    Args:
        factors: the factors at σ = 1.
        prior_precision: δ, a scalar or one per block.
        sigma_noise: σ.
        temperature: T.
        ranks: the ranks that share the factors. All of them must call this function.
        device: device of the derivatives; by default the factors'.
    """
    delta = torch.as_tensor(prior_precision, dtype=torch.float64).expand(len(factors))
    r = 1 / (torch.as_tensor(sigma_noise, dtype=torch.float64).square() * temperature).item()
    derivatives = {}
    eigen_blocks = decompose(factors.blocks.values(), ranks, device)
    for name, eigen, d in zip(factors.blocks, eigen_blocks, delta.tolist(), strict=True):
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
    """Return Q diag Qᵀ."""
    return (Q * diagonal.to(Q)[..., None, :]) @ Q.mT


def _why_not_finite(terms: EvidenceTerms, delta: Tensor) -> str:
    for b, largest in enumerate(terms.spectra.largest):
        if not torch.isfinite(largest + terms.squared_norms[b] + delta[b]):
            name = terms.names[int(terms.tensors[b])]
            return (
                f"The evidence is not finite: the block of '{name}' has eigenvalues up to "
                f"{largest:.3g}, ‖θ‖² = {terms.squared_norms[b]:.3g} and prior precision "
                f"{delta[b]:.3g}. Likely causes: the training diverged, or the step on the "
                "hyperparameters is too large."
            )
    return (
        f"The evidence is not finite, because the loss is {terms.loss}. The training diverged. Try "
        "a lower learning rate."
    )
