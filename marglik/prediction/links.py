"""From Gaussian outputs to predictions: class probabilities or means, and their uncertainty.

Entropies are in nats. Classification: the aleatoric part is the mean, under the posterior, of the
entropy of the class distribution; the epistemic part is the mutual information between label and
parameters; their sum is the entropy of the mean distribution. Bernoulli: the same for each output.
Regression: the aleatoric part is σ², the epistemic part the variance of the outputs. Source of the
split: Depeweg et al. 2018 (arXiv:1710.07283).
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
from marglik.posterior.calibration import Calibration

__all__ = [
    "Link",
    "Prediction",
    "bridge_log_counts",
    "check_link",
    "deviations",
    "is_link_of",
    "predict_from_deviations",
    "predict_from_gaussian",
    "predict_from_outputs",
    "probit_outputs",
    "quadrature",
]

Link = Literal["probit", "bridge", "mc"]

QUADRATURE_NODES = 64
"""Nodes of Gauss-Hermite quadrature for Bernoulli outputs. The error of E σ(f) is at most 2e-7 for
standard deviations up to 3, 6e-5 up to 5, 4e-3 up to 10; that of entropies is four times as large.
"""

LARGEST_LOG_ALPHA = 60.0
"""Limit of the counts' logarithms: a Dirichlet whose largest count is e^60 has no spread that any
dtype could represent, and larger ones would overflow."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """Predictions for N inputs; for sequences with N·R rows, or with axes (N, R) instead of (N,).

    Its ``repr`` shows the shapes of the tensors.
    """

    mean: Float[Tensor, "N C"]
    """Class probabilities, each output's probability of a one (Bernoulli), or the mean."""
    aleatoric: Tensor
    """Uncertainty due to noise in the data: expected entropy (N,), or (N, C) for Bernoulli; σ²
    (N, C) for regression."""
    epistemic: Tensor
    """Uncertainty about the parameters: mutual information or variance, shaped as ``aleatoric``."""

    def __repr__(self) -> str:
        shapes = (
            f"{field.name}: {tuple(getattr(self, field.name).shape)}" for field in fields(self)
        )
        return f"Prediction({', '.join(shapes)})"

    @property
    def total(self) -> Tensor:
        """The sum of both parts: an entropy, or the variance of a new target."""
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """The entropy of ``mean`` (not for regression); equals `total` except for link "probit"."""
        return _entropy(self.mean) if self.aleatoric.dim() == 1 else _binary_entropy(self.mean)

    def terms(self, counted: Tensor | None = None) -> "Prediction":
        """The prediction with one row per loss term: (N, R, C) becomes (M, C).

        Args:
            counted: (N, R) mask of the terms to keep; all if None.
        """
        axes = self.mean.dim() - 1
        parts = (getattr(self, field.name).flatten(0, axes - 1) for field in fields(self))
        return Prediction(*(p if counted is None else p[counted.flatten()] for p in parts))

    def to(self, device: torch.device | str) -> "Prediction":
        """The prediction on another device."""
        return Prediction(*(getattr(self, field.name).to(device) for field in fields(self)))

    @staticmethod
    def cat(parts: "list[Prediction]") -> "Prediction":
        """The predictions of several batches as one."""
        return Prediction(
            *(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(parts[0]))
        )


def is_link_of(link: Link, likelihood: Likelihood) -> bool:
    """Whether the link supports the likelihood; regression accepts any link and uses none."""
    return link != "bridge" or likelihood != "bernoulli"


def check_link(link: str, likelihood: Likelihood) -> None:
    """Raise a ValueError unless the link supports the likelihood."""
    check_option("likelihood", likelihood, Likelihood)
    check_option("link", link, Link)
    if not is_link_of(link, likelihood):  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"link 'bridge' is for classification, not {likelihood!r}; choose 'probit' or 'mc'."
        )


def predict_from_outputs(
    outputs: Float[Tensor, "S N C"], likelihood: Likelihood, sigma_noise: float | Tensor = 1.0
) -> Prediction:
    """The prediction of an ensemble of S equally weighted networks, from their outputs."""
    check_option("likelihood", likelihood, Likelihood)
    outputs = at_least_float32(outputs)
    if likelihood == "regression":
        variance = outputs.var(0, correction=0)
        return Prediction(outputs.mean(0), _noise(variance, sigma_noise), variance)
    probabilities, entropy = _probabilities(likelihood)
    p = probabilities(outputs)
    return _mixture(p.mean(0), entropy(p).mean(0), entropy)


def predict_from_deviations(
    f: Float[Tensor, "N *R C"],
    deviations: Float[Tensor, "S N *R C"],
    likelihood: Likelihood,
    sigma_noise: float | Tensor = 1.0,
    calibration: Calibration = Calibration(),  # noqa: B008
) -> Prediction:
    """The prediction for S equally probable outputs (f + √s d)/τ, d their deviations from f.

    Args:
        f: the network's outputs.
        deviations: of linearised networks' outputs from them, at sampled parameters.
        likelihood: how outputs become a distribution of targets.
        sigma_noise: σ of regression.
        calibration: s and τ.
    """
    if calibration.sigma_noise is not None:
        sigma_noise = calibration.sigma_noise
    scale, outputs = calibration.covariance_scale, f[None]
    if scale:
        outputs = outputs + math.sqrt(scale) * deviations
    outputs = outputs / calibration.output_temperature
    return predict_from_outputs(outputs, likelihood, sigma_noise)


def predict_from_gaussian(
    f: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C *other"],
    likelihood: Likelihood,
    link: Link,
    noise: Float[Tensor, "S C"],
    sigma_noise: float | Tensor = 1.0,
    calibration: Calibration = Calibration(),  # noqa: B008
) -> Prediction:
    """The prediction for outputs N(f/τ, s/τ² covariance).

    Args:
        f: the outputs' means.
        covariance: the outputs' covariances; variances (N, C) suffice except for classification.
        likelihood: how outputs become a distribution of targets.
        link: "mc" averages over samples. "probit" scales the outputs (MacKay 1992); its split of
            the uncertainty is that of "mc". "bridge", for classification only, takes the Dirichlet
            of which the Gaussian is the Laplace approximation (Hobbhahn, Kristiadi & Hennig 2022,
            arXiv:2003.01227). Most Gaussians are not a Laplace approximation of any Dirichlet: with
            more than two classes, "bridge" is far from the softmax of ``f`` even if the covariance
            is small. Regression uses no link; Bernoulli's "mc" is by quadrature, see
            `QUADRATURE_NODES`.
        noise: S standard normal vectors for "mc" and "probit" in classification. They are the same
            for all inputs, so that predictions do not depend on how inputs are batched.
        sigma_noise: σ of regression.
        calibration: s and τ. With s = 0, all links are the softmax or sigmoid of f/τ.

    Raises:
        ValueError: "bridge" for another likelihood than classification, an unknown option;
            variances alone for classification.
    """
    check_link(link, likelihood)
    if covariance.dim() == 2 and likelihood == "classification":
        raise ValueError(
            "Classification needs the covariances (N, C, C) of the outputs, not the variances "
            f"{tuple(covariance.shape)}: call output_distribution without variance_only."
        )
    scale, temperature = calibration.covariance_scale, calibration.output_temperature
    if scale == 0:
        f = at_least_float32(f)
        return predict_from_deviations(f, f[None], likelihood, sigma_noise, calibration)
    if calibration.sigma_noise is not None:
        sigma_noise = calibration.sigma_noise
    f = at_least_float32(f) / temperature
    covariance = at_least_float32(covariance) * (scale / temperature**2)
    variance = covariance if covariance.dim() == 2 else covariance.diagonal(dim1=1, dim2=2)
    if likelihood == "regression":
        return Prediction(f, _noise(variance, sigma_noise), variance)
    if link == "bridge":
        return _bridge(f, covariance)
    if likelihood == "bernoulli":
        sampled = _quadrature(f, variance)
        scaled = torch.sigmoid(probit_outputs(f, variance))
    else:
        sampled = predict_from_outputs(f + deviations(covariance, noise), likelihood)
        scaled = torch.softmax(probit_outputs(f, variance), dim=-1)
    if link == "mc":
        return sampled
    return Prediction(scaled, sampled.aleatoric, sampled.epistemic)


def deviations(
    covariance: Float[Tensor, "N C C"], noise: Float[Tensor, "S C"]
) -> Float[Tensor, "S N C"]:
    """L z for each standard normal vector z, with the symmetric root L of the covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    # The symmetric root, since eigenvectors are not unique: their signs, and bases of repeated
    # eigenvalues, depend on rounding and so on the batch size.
    root = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT  # (N, C, C)
    return torch.einsum("nck,sk->snc", root, noise.to(root))


def probit_outputs(f: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]) -> Tensor:
    """f_c / √(1 + π/8 v_c), whose softmax or sigmoid approximates the mean probability.

    Source: MacKay 1992, "The evidence framework applied to classification networks".
    """
    return f / (1 + math.pi / 8 * variance).sqrt()


def bridge_log_counts(
    f: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"]
) -> Float[Tensor, "N C"]:
    """Logarithms of the Laplace bridge's Dirichlet counts; their softmax is the Dirichlet's mean.

    N(f, S) is conditioned on Σ_c f_c = 0, and the Dirichlet has its mean and variances:
    α_c = (1 − 2/C + e^{f_c} Σ_k e^{−f_k} / C²) / S_cc. Source: Hobbhahn, Kristiadi & Hennig 2022
    (arXiv:2003.01227).
    """
    C, limits = f.shape[-1], torch.finfo(covariance.dtype)
    trace = covariance.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)  # (N, 1)
    rounding = limits.eps * trace + limits.tiny
    rows, total = covariance.sum(-1), covariance.sum((1, 2))[:, None]
    # If Σ_c f_c has no variance already, it is subtracted evenly from all outputs, which does not
    # change their softmax.
    share = torch.where(total > C * rounding, rows / total, 1 / C)
    f = f - share * f.sum(-1, keepdim=True)
    covariance = covariance - share[:, :, None] * rows[:, None]
    variance = covariance.diagonal(dim1=1, dim2=2).maximum(rounding)
    # In logarithms, since the exponentials overflow.
    log_ratio = f + torch.logsumexp(-f, -1, keepdim=True) - 2 * math.log(C)
    return torch.logaddexp(f.new_tensor(1 - 2 / C).log(), log_ratio) - variance.log()


def _bridge(f: Tensor, covariance: Tensor) -> Prediction:
    """The mean and the uncertainty of the Laplace bridge's Dirichlet."""
    log_alpha = bridge_log_counts(f, covariance)
    mean = torch.softmax(log_alpha, -1)
    excess = (log_alpha.amax(-1, keepdim=True) - LARGEST_LOG_ALPHA).clamp(min=0)
    alpha = (log_alpha - excess).exp()
    of_sum = torch.digamma(alpha.sum(-1, keepdim=True) + 1)
    aleatoric = -(mean * (torch.digamma(alpha + 1) - of_sum)).sum(-1)
    return _mixture(mean, aleatoric, _entropy)


def _quadrature(f: Tensor, variance: Tensor) -> Prediction:
    """E σ(f) and the expected entropy of each output, by Gauss-Hermite quadrature."""
    nodes, weights = quadrature(f)
    p = torch.sigmoid(f + variance.clamp(min=0).sqrt() * nodes)
    mean = (weights * p).sum(0)
    return _mixture(mean, (weights * _binary_entropy(p)).sum(0), _binary_entropy)


def quadrature(like: Tensor) -> tuple[Float[Tensor, "K 1 1"], Float[Tensor, "K 1 1"]]:
    """Nodes and weights of E g(z) for standard normal z, in the dtype and device of ``like``.

    See `QUADRATURE_NODES` for the error.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)

    def as_column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(like)[:, None, None]

    return as_column(nodes), as_column(weights / weights.sum())


def _mixture(mean: Tensor, aleatoric: Tensor, entropy: Callable[[Tensor], Tensor]) -> Prediction:
    # The difference is not negative, except for rounding.
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
