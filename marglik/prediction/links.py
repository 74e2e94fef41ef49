"""From outputs that are Gaussian to predictions: class probabilities, means, and their uncertainty.

Entropies are in nats. Classification: the aleatoric part is the mean entropy of the class
distributions that the posterior holds possible, the epistemic part the mutual information between
label and parameters; their sum is the entropy of the mean distribution. Bernoulli: the same for
each output. Regression: variances; σ² and that of the outputs. Source of the split: Depeweg et al.
2018 (arXiv:1710.07283).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.options import Likelihood, check_option
from kfac_backend.precision import at_least_float32

__all__ = ["Link", "Prediction", "check_link", "predict_from_gaussian", "predict_from_outputs"]

Link = Literal["probit", "bridge", "mc"]

QUADRATURE_NODES = 64
"""Nodes of Gauss-Hermite quadrature for Bernoulli outputs: E σ(f) is right to 2e-7 for standard
deviations up to 3, to 6e-5 up to 5, to 4e-3 up to 10; expected entropies to four times that."""

LARGEST_LOG_ALPHA = 60.0
"""A Dirichlet whose largest count is e^60 has no spread left in any dtype."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for N inputs; of sequences for N·R positions, or (N, R) ahead of C."""

    mean: Float[Tensor, "N C"]
    """Class probabilities, each output's probability of a one (Bernoulli), or the mean."""
    aleatoric: Tensor
    """Of the data: expected entropy (N,), or (N, C) for Bernoulli; σ² (N, C) for regression."""
    epistemic: Tensor
    """Of the parameters: mutual information or variance, in the shape of ``aleatoric``."""

    @property
    def total(self) -> Tensor:
        """Both parts together: an entropy, or the variance of a new target."""
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """The entropy of ``mean`` (not for regression): `total`, but for the link "probit"."""
        return _entropy(self.mean) if self.aleatoric.dim() == 1 else _binary_entropy(self.mean)

    def terms(self, counted: Tensor | None = None) -> "Prediction":
        """The prediction for each loss term, one after the other: (N, R, C) as (M, C).

        Args:
            counted: (N, R), which terms to keep; all if None.
        """
        axes = self.mean.dim() - 1
        parts = (getattr(self, field.name).flatten(0, axes - 1) for field in fields(self))
        return Prediction(*(p if counted is None else p[counted.flatten()] for p in parts))

    def to(self, device: torch.device | str) -> "Prediction":
        """The prediction on another device."""
        return Prediction(*(getattr(self, field.name).to(device) for field in fields(self)))

    @staticmethod
    def cat(parts: "list[Prediction]") -> "Prediction":
        """One prediction for the inputs of all."""
        return Prediction(
            *(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(parts[0]))
        )


def check_link(link: str, likelihood: Likelihood) -> None:
    """Raise a ValueError unless the link is there for the likelihood."""
    check_option("likelihood", likelihood, Likelihood)
    check_option("link", link, Link)
    if link == "bridge" and likelihood == "bernoulli":
        raise ValueError(
            f"link 'bridge' is for classification, not {likelihood!r}; choose 'probit' or 'mc'."
        )


def predict_from_outputs(
    outputs: Float[Tensor, "S N C"], likelihood: Likelihood, sigma_noise: float | Tensor = 1.0
) -> Prediction:
    """The prediction of S networks of equal weight, by their outputs; of one network for S = 1."""
    check_option("likelihood", likelihood, Likelihood)
    outputs = at_least_float32(outputs)
    if likelihood == "regression":
        variance = outputs.var(0, correction=0)
        return Prediction(outputs.mean(0), _noise(variance, sigma_noise), variance)
    probabilities, entropy = _probabilities(likelihood)
    p = probabilities(outputs)
    return _mixture(p.mean(0), entropy(p).mean(0), entropy)


def predict_from_gaussian(
    f: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    likelihood: Likelihood,
    link: Link,
    noise: Float[Tensor, "S C"],
    sigma_noise: float | Tensor = 1.0,
) -> Prediction:
    """The prediction for outputs N(f, covariance).

    Args:
        f: the outputs' means.
        covariance: their covariances.
        likelihood: how outputs become a distribution of targets.
        link: "mc" averages over samples, "probit" scales the outputs (MacKay 1992), "bridge" is
            the Dirichlet whose Laplace approximation the Gaussian is (Hobbhahn, Kristiadi & Hennig
            2022, arXiv:2003.01227), classification only. Few Gaussians are one: of more than two
            classes, bridge is far from the softmax of ``f`` even where the covariance is small.
            Probit's parts of the uncertainty are those of mc. Regression needs none of them;
            Bernoulli's mc is by quadrature, see `QUADRATURE_NODES`.
        noise: S standard normal vectors for "mc" and "probit" in classification, the same for all
            inputs, so that predictions do not depend on how inputs are put into batches.
        sigma_noise: σ of regression.

    Raises:
        ValueError: "bridge" for another likelihood than classification, an unknown option.
    """
    check_link(link, likelihood)
    f, covariance = at_least_float32(f), at_least_float32(covariance)
    variance = covariance.diagonal(dim1=1, dim2=2)
    if likelihood == "regression":
        return Prediction(f, _noise(variance, sigma_noise), variance)
    if link == "bridge":
        return _bridge(f, covariance)
    if likelihood == "bernoulli":
        sampled = _quadrature(f, variance)
        scaled = torch.sigmoid(f / (1 + math.pi / 8 * variance).sqrt())
    else:
        sampled = predict_from_outputs(_samples(f, covariance, noise), likelihood)
        scaled = torch.softmax(f / (1 + math.pi / 8 * variance).sqrt(), dim=-1)
    if link == "mc":
        return sampled
    return Prediction(scaled, sampled.aleatoric, sampled.epistemic)


def _samples(f: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Outputs f + L z for each noise vector z, (S, N, C); L L is the covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    # The symmetric root: eigenvectors alone turn with rounding, and so with the batch's size.
    root = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT  # (N, C, C)
    return f + torch.einsum("nck,sk->snc", root, noise.to(f))


def _bridge(f: Tensor, covariance: Tensor) -> Prediction:
    """The Laplace bridge: N(f, S) given Σ_c f_c = 0, then the Dirichlet of its mean and variances.

    α_c = (1 − 2/C + e^{f_c} Σ_k e^{−f_k} / C²) / S_cc.
    """
    C, limits = f.shape[-1], torch.finfo(covariance.dtype)
    trace = covariance.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)  # (N, 1)
    rounding = limits.eps * trace + limits.tiny
    rows, total = covariance.sum(-1), covariance.sum((1, 2))[:, None]
    # A sum that is certain already is taken from all outputs alike, which softmax does not see.
    share = torch.where(total > C * rounding, rows / total, 1 / C)
    f = f - share * f.sum(-1, keepdim=True)
    covariance = covariance - share[:, :, None] * rows[:, None]
    variance = covariance.diagonal(dim1=1, dim2=2).maximum(rounding)
    # In logarithms, since the exponentials overflow.
    log_ratio = f + torch.logsumexp(-f, -1, keepdim=True) - 2 * math.log(C)
    log_alpha = torch.logaddexp(f.new_tensor(1 - 2 / C).log(), log_ratio) - variance.log()
    mean = torch.softmax(log_alpha, -1)
    excess = (log_alpha.amax(-1, keepdim=True) - LARGEST_LOG_ALPHA).clamp(min=0)
    alpha = (log_alpha - excess).exp()
    of_sum = torch.digamma(alpha.sum(-1, keepdim=True) + 1)
    aleatoric = -(mean * (torch.digamma(alpha + 1) - of_sum)).sum(-1)
    return _mixture(mean, aleatoric, _entropy)


def _quadrature(f: Tensor, variance: Tensor) -> Prediction:
    """E σ(f) and the expected entropy of each output, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
    nodes = torch.from_numpy(nodes).to(f)[:, None, None]
    weights = torch.from_numpy(weights / weights.sum()).to(f)[:, None, None]
    p = torch.sigmoid(f + variance.clamp(min=0).sqrt() * nodes)
    mean = (weights * p).sum(0)
    return _mixture(mean, (weights * _binary_entropy(p)).sum(0), _binary_entropy)


def _mixture(mean: Tensor, aleatoric: Tensor, entropy: Callable[[Tensor], Tensor]) -> Prediction:
    # Not negative but for rounding.
    return Prediction(mean, aleatoric, (entropy(mean) - aleatoric).clamp(min=0))


def _probabilities(likelihood: Likelihood) -> tuple[Callable, Callable]:
    if likelihood == "classification":
        return lambda f: torch.softmax(f, dim=-1), _entropy
    return torch.sigmoid, _binary_entropy


def _entropy(p: Tensor) -> Tensor:
    """−Σ_c p_c log p_c."""
    return torch.special.entr(p).sum(-1)


def _binary_entropy(p: Tensor) -> Tensor:
    """The entropy of each output."""
    return torch.special.entr(p) + torch.special.entr(1 - p)


def _noise(variance: Tensor, sigma_noise: float | Tensor) -> Tensor:
    return torch.as_tensor(sigma_noise).to(variance).square().expand_as(variance)
