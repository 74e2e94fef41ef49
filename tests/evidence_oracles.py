"""Brute-force float64 evidences: dense log determinants, and an exact Gaussian density."""

import torch
from torch import Tensor


def laplace_log_evidence(
    log_likelihood: float | Tensor,
    theta: Tensor,
    ggn: Tensor,
    prior_precision: Tensor,
    temperature: float = 1.0,
) -> float:
    """Laplace evidence log p(D|θ)/T − ½ θᵀP₀θ − ½ (log det(H/T + P₀) − log det P₀), in nats.

    Args:
        log_likelihood: Σ_n log p(y_n|θ), normalized, not divided by the temperature.
        theta: parameters (P,).
        ggn: H (P, P), a sum over data, not divided by the temperature; includes 1/σ².
        prior_precision: diagonal of P₀ (P,), of the whole data's prior.
        temperature: T.
    """
    P0 = torch.diag(prior_precision.detach().double())
    theta, H = theta.detach().double(), ggn.detach().double()
    sign, logdet_posterior = torch.linalg.slogdet(H / temperature + P0)
    sign_prior, logdet_prior = torch.linalg.slogdet(P0)
    if sign <= 0 or sign_prior <= 0:
        raise ValueError("A precision has no positive determinant; check prior_precision and ggn.")
    penalty = theta @ P0 @ theta + logdet_posterior - logdet_prior
    return float(log_likelihood) / temperature - 0.5 * float(penalty)


def bayesian_linear_regression_log_evidence(
    Phi: Tensor, y: Tensor, prior_precision: Tensor, sigma: float
) -> float:
    """Exact log N(y | 0, σ²I + Φ P₀⁻¹ Φᵀ) in nats, summed over independent outputs.

    Args:
        Phi: features (N, D); add a column of ones for a bias.
        y: targets (N, C), or (N,) for C = 1.
        prior_precision: (D,) shared by the outputs, or (C, D), one row per output.
        sigma: standard deviation of the noise.
    """
    Phi, y = Phi.detach().double(), y.detach().double().reshape(len(y), -1)
    N, C = y.shape
    precisions = prior_precision.detach().double().expand(C, Phi.shape[1])
    total = 0.0
    for c in range(C):
        covariance = sigma**2 * torch.eye(N).double() + Phi @ torch.diag(1 / precisions[c]) @ Phi.T
        normal = torch.distributions.MultivariateNormal(torch.zeros(N).double(), covariance)
        total += float(normal.log_prob(y[:, c]))
    return total
