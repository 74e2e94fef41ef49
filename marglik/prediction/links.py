"""Compute predictions from Gaussian outputs: class probabilities or means, with uncertainty.

A prediction is a mixture over outputs (f + √s d)/τ. The deviations d from the network's outputs f
are samples ("mc", "linearised") or the nodes of a quadrature (Bernoulli). "probit" replaces the
mean of the mixture by a closed form. Regression needs neither, because its moments have one.

Entropies are in nats. For classification, the aleatoric part is the mean entropy of the class
distribution under the posterior. The epistemic part is the mutual information between label and
parameters. Their sum is the entropy of the mean distribution. Bernoulli outputs have the same parts
for each output. For regression, the aleatoric part is σ², and the epistemic part is the variance of
the outputs. Source of the split: Depeweg et al. 2018 (arXiv:1710.07283).
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.likelihoods import Likelihood, Moments, likelihood_of, with_label_noise
from kfac_backend.options import check_option, check_positive
from kfac_backend.precision import at_least_float32

Link = Literal["probit", "mc"]

QUADRATURE_NODES = 64
"""Number of nodes of the Gauss-Hermite quadrature for Bernoulli outputs. The error of E σ(f) is at
most 2e-7 for standard deviations up to 3, 6e-5 up to 5, and 4e-3 up to 10. The error of entropies
is four times as large."""


@dataclass(frozen=True)
class Prediction:
    """Predictions for N inputs. Sequences have N·R rows, or axes (N, R) instead of (N,)."""

    mean: Float[Tensor, "N C"]
    """Class probabilities; for Bernoulli the probability of a one per output; otherwise means."""
    aleatoric: Tensor
    """Uncertainty due to noise in the data: expected entropy in nats, (N,), or (N, C) for
    Bernoulli. For regression it is σ² (N, C)."""
    epistemic: Tensor
    """Uncertainty about the parameters: mutual information in nats, or for regression variance of
    the outputs; shaped as ``aleatoric``."""

    @property
    def total_uncertainty(self) -> Tensor:
        """Sum of both parts: entropy (nats) of a label, or variance of a numeric target."""
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """Entropy (nats) of ``mean``, not for regression.

        It equals `total_uncertainty`, except for the link "probit".
        """
        entropy = torch.special.entr(self.mean)
        if self.aleatoric.dim() < self.mean.dim():
            return entropy.sum(-1)
        return entropy + torch.special.entr(1 - self.mean)  # (N, C), one entropy per output

    def tensors(self) -> list[Tensor]:
        """Return ``mean``, ``aleatoric`` and ``epistemic``."""
        return [getattr(self, field.name) for field in fields(self)]

    def terms(self, counted: Tensor | None = None) -> "Prediction":
        """Return the prediction with one row per loss term, (N, R, C) as (M, C).

        Args:
            counted: mask (N, R) of the terms to keep; None keeps all.
        """
        axes = self.mean.dim() - 1
        rows = (part.flatten(0, axes - 1) for part in self.tensors())
        return Prediction(*(p if counted is None else p[counted.flatten()] for p in rows))

    def to(self, device: torch.device | str) -> "Prediction":
        """Return the prediction on another device."""
        return Prediction(*(part.to(device) for part in self.tensors()))

    @staticmethod
    def cat(parts: "list[Prediction]") -> "Prediction":
        """Return the predictions of several batches as one."""
        return Prediction(*map(torch.cat, zip(*(p.tensors() for p in parts), strict=True)))


@dataclass(frozen=True)
class Calibration:
    """Numbers that `calibrate` fits to held-out data. s = τ = 1 changes nothing.

    Args:
        covariance_scale: s ≥ 0, by which the outputs' covariance is multiplied; 0 is the MAP.
        output_temperature: τ > 0, by which outputs are divided; 1 in regression. It is not the
            temperature T of the likelihood.
        sigma_noise: σ of regression, which replaces the σ of the posterior; None otherwise.
        label_noise: ε, the share of labels that are random draws from all classes. Predictions of
            the observed label include it. Predictions of the true class do not.
    """

    covariance_scale: float = 1.0
    output_temperature: float = 1.0
    sigma_noise: float | None = None
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.covariance_scale < math.inf:
            raise ValueError(
                f"covariance_scale must be 0 (the MAP) or positive, not {self.covariance_scale}."
            )
        check_positive("output_temperature", self.output_temperature)
        if self.sigma_noise is not None:
            check_positive("sigma_noise", self.sigma_noise)
        if not 0 <= self.label_noise < 1:
            raise ValueError(f"label_noise must lie in [0, 1), not {self.label_noise}.")

    @property
    def in_words(self) -> str:
        """Description of the calibration in words."""
        outputs = (
            f"outputs divided by {self.output_temperature:.3g}"
            if self.sigma_noise is None
            else f"noise of standard deviation {self.sigma_noise:.3g}"
        )
        if self.label_noise:
            outputs += f", {self.label_noise:.1%} of the labels modelled as random"
        if self.covariance_scale == 0:
            text = f"{outputs}, covariances times 0: no larger factor lowered the held-out NLL. "
            if self.sigma_noise is None:
                return text + "The predictive has no epistemic uncertainty; use its entropy"
            return text + "All intervals have the same width; the uncalibrated ones do not"
        none = " (in effect none)" if self.covariance_scale < 1e-3 else ""
        return f"covariances times {self.covariance_scale:.3g}{none}, {outputs}"


@dataclass(frozen=True)
class CalibrationFit:
    """A calibration, and NLLs of the held-out data to compare it (nats, mean over loss terms)."""

    calibration: Calibration
    nll: float
    """NLL with the calibration."""
    nll_uncalibrated: float
    """NLL at s = τ = 1, or with the posterior's own σ."""
    map_calibration: Calibration
    """The best calibration with s = 0: the temperature-scaled MAP."""
    nll_temperature_scaled: float
    """NLL of the temperature-scaled MAP."""
    nll_map: float
    """NLL of the MAP."""
    num_terms: int
    """Number of held-out loss terms (examples, or positions of sequences)."""

    @staticmethod
    def of(content: dict[str, Any]) -> "CalibrationFit":
        """Return the fit from plain data, the form in which posteriors store and save it.

        Raises:
            KeyError, TypeError, ValueError: the data is not a fit.
        """
        names = ("calibration", "map_calibration")
        made: dict[str, Any] = {name: Calibration(**content[name]) for name in names}
        return CalibrationFit(**content | made)


def predict_from_outputs(
    outputs: Float[Tensor, "S N C"],
    likelihood: Likelihood | str,
    sigma_noise: float | Tensor = 1.0,
    weights: Float[Tensor, "S 1 1"] | None = None,
    label_noise: float = 0.0,
) -> Prediction:
    """Return the prediction of an ensemble of S networks, from their outputs.

    Args:
        outputs: outputs of each network.
        likelihood: likelihood of the targets given the outputs.
        sigma_noise: σ of regression.
        weights: weights of the networks, with sum 1, for Bernoulli; None gives equal weights.
        label_noise: ε of the predicted labels; 0 predicts the true class.
    """
    likelihood, outputs = likelihood_of(likelihood), at_least_float32(outputs)
    if likelihood.kind == "continuous":
        return Prediction(
            *_moments(likelihood, outputs, torch.zeros_like(outputs), _tensor(sigma_noise))
        )
    p = likelihood.log_probabilities(outputs).exp()
    p = (1 - label_noise) * p + label_noise / p.shape[-1]
    entropies = torch.special.entr(p).sum(-1)
    if weights is None:
        mean, aleatoric = p.mean(0), entropies.mean(0)
    else:
        mean, aleatoric = (weights[..., None] * p).sum(0), (weights * entropies).sum(0)
    # The mutual information is not negative; only rounding may make it so.
    epistemic = (torch.special.entr(mean).sum(-1) - aleatoric).clamp(min=0)
    return Prediction(mean if likelihood.kind == "classes" else mean[..., 1], aleatoric, epistemic)


def predict_from_gaussian(
    f: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C *other"],
    likelihood: Likelihood | str,
    link: Link,
    noise: Float[Tensor, "S C"],
    sigma_noise: float | Tensor = 1.0,
    calibration: Calibration = Calibration(),  # noqa: B008
    label_noise: float = 0.0,
) -> Prediction:
    """Return the prediction for outputs N(f/τ, s/τ² covariance).

    Args:
        f: means of the outputs.
        covariance: covariances of the outputs. Variances (N, C) suffice except for classification.
        likelihood: likelihood of the targets given the outputs.
        link: "mc" averages over samples. "probit" scales the outputs (MacKay 1992), and splits the
            uncertainty like "mc". Regression uses no link. For Bernoulli outputs "mc" is a
            quadrature, see `QUADRATURE_NODES`.
        noise: S standard normal vectors, for classification. They are the same for all inputs, so
            predictions do not depend on the batches of inputs.
        sigma_noise: σ of regression.
        calibration: s and τ. With s = 0, both links are the softmax or sigmoid of f/τ.
        label_noise: see `predict_from_outputs`.

    Raises:
        ValueError: an option is unknown, or there are only variances for classification.
    """
    check_option("link", link, Link)
    likelihood = likelihood_of(likelihood)
    if covariance.dim() == 2 and likelihood.kind == "classes":
        raise ValueError(
            f"Likelihood '{likelihood}' needs the covariances (N, C, C) of the outputs, not the "
            f"variances {tuple(covariance.shape)}. Call output_distribution without variance_only."
        )
    f, covariance = at_least_float32(f), at_least_float32(covariance)
    scale, temperature = calibration.covariance_scale, calibration.output_temperature
    f = f / temperature
    variance = variances_of(covariance) * (scale / temperature**2)
    if likelihood.kind == "continuous":
        sigma = sigma_noise if calibration.sigma_noise is None else calibration.sigma_noise
        return Prediction(*likelihood.moments(f, variance, _tensor(sigma)))
    sampled, weights = (
        deviations(covariance, likelihood, noise) if scale else (torch.zeros_like(f[None]), None)
    )
    outputs = f + math.sqrt(scale) / temperature * sampled
    by_samples = predict_from_outputs(outputs, likelihood, 1.0, weights, label_noise)
    if link == "mc" or not likelihood.has_probit:
        return by_samples
    outputs = probit_outputs(f, variance)[None]
    by_probit = predict_from_outputs(outputs, likelihood, label_noise=label_noise)
    return replace(by_samples, mean=by_probit.mean)


def negative_log_scores(
    outputs: Float[Tensor, "S N C"],
    variance: Float[Tensor, "N C"],
    y: Tensor,
    likelihood: Likelihood | str,
    sigma_noise: Tensor,
    weights: Float[Tensor, "S 1 1"] | None = None,
    label_noise: Tensor | None = None,
) -> Tensor:
    """Return −log p(y) of each target (nats) under the mixture of N(outputs, variance).

    The result is differentiable.

    Args:
        outputs: see `predict_from_outputs`.
        variance: variance of each output. Classes and binary outputs use the link "probit".
        y: targets. For binary outputs they may be probabilities.
        likelihood: see `predict_from_outputs`.
        sigma_noise: σ of regression.
        weights: see `predict_from_outputs`.
        label_noise: ε of the labels; None is 0.
    """
    likelihood = likelihood_of(likelihood)
    if likelihood.kind == "continuous":
        mean, noise, spread = _moments(likelihood, outputs, variance, sigma_noise)
        return -likelihood.log_score(y, mean, noise + spread)
    # (S, N, K), or (S, N, C, 2)
    log_p = likelihood.log_probabilities(probit_outputs(outputs, variance))
    y, *_ = likelihood.observed(y, variance)
    if likelihood.kind == "classes":  # select the labels first, so that the mixture is cheap
        classes = log_p.shape[-1]
        log_p = log_p.gather(-1, y.long()[..., None].expand(*log_p.shape[:-1], 1))
        if label_noise is not None:
            log_p = with_label_noise(log_p, label_noise, classes)
        shares = torch.ones_like(log_p[0])
    else:
        shares = torch.stack([1 - y, y], -1)
    log_weights = -math.log(len(outputs)) if weights is None else weights[..., None].log()
    return -(shares * (log_p + log_weights).logsumexp(0)).sum(-1)


def _moments(likelihood: Likelihood, outputs: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
    """Return moments of the mixture over outputs (S, N, C) that share variances (N, C)."""
    mean, noise, spread = likelihood.moments(outputs, variance.expand_as(outputs), sigma)
    return mean.mean(0), noise.mean(0), spread.mean(0) + mean.var(0, correction=0)


def variances_of(covariance: Float[Tensor, "N C *other"]) -> Float[Tensor, "N C"]:
    """Return the variances from covariances (N, C, C), or variances (N, C) unchanged."""
    return covariance if covariance.dim() == 2 else covariance.diagonal(dim1=1, dim2=2)


def deviations(
    covariance: Float[Tensor, "N C *other"], likelihood: Likelihood, noise: Float[Tensor, "S C"]
) -> tuple[Float[Tensor, "S N C"], Float[Tensor, "S 1 1"] | None]:
    """Return deviations d of Gaussian outputs from their means, and weights, None if equal.

    For classification they are L z for standard normal vectors z and the Cholesky factor L of the
    covariance. For Bernoulli they are √v times the nodes of a quadrature for each output.
    """
    if likelihood.kind == "binary":
        nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
        z, w = (torch.from_numpy(v).to(covariance)[:, None, None] for v in (nodes, weights))
        return variances_of(covariance).clamp(min=0).sqrt() * z, w / w.sum()
    # Use a Cholesky factor, because rounding, for example with another batch size, may rotate
    # eigenvectors. Add a little to the diagonal, because rounding may make singular covariances
    # negative, such as covariances of log-probabilities. In float32 and for ten outputs, it adds
    # 6e-6 of the largest variance.
    limits, C = torch.finfo(covariance.dtype), covariance.shape[-1]
    added = (16 * limits.eps * C**0.5 * variances_of(covariance).amax(1)).clamp(min=limits.tiny)
    root, failed = torch.linalg.cholesky_ex(covariance + added[:, None].expand(-1, C).diag_embed())
    if failed.any():
        values, vectors = torch.linalg.eigh(covariance[failed > 0])
        root[failed > 0] = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT
    return torch.einsum("nck,sk->snc", root, noise.to(root)), None


def probit_outputs(f: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]) -> Tensor:
    """Return f_c / √(1 + π/8 v_c), whose softmax or sigmoid approximates the mean probability.

    Source: MacKay 1992, "The evidence framework applied to classification networks".
    """
    return f / (1 + math.pi / 8 * variance).sqrt()


def _tensor(sigma_noise: float | Tensor) -> Tensor:
    return torch.as_tensor(sigma_noise, dtype=torch.float64)
