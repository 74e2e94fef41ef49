"""Calibration: scale the outputs and their covariance so that held-out data becomes most likely.

At temperature 1 the Laplace posterior is too wide for clean labels, and the network itself is often
over- or underconfident. Two numbers correct both: the covariance of the outputs is multiplied by
s ≥ 0, and outputs are divided by τ > 0,

    p(y|x) = ∫ p(y | (f + √s V^½ ε) / τ) N(ε; 0, I) dε,    V = J Σ Jᵀ.

s = 0 is temperature scaling of the MAP (Guo et al. 2017, arXiv:1706.04599), s = τ = 1 the plain
Laplace predictive. In regression σ takes the place of τ: p(y|x) = N(f, s V + σ²). Outputs and
covariances of the held-out data are computed once; finding the two numbers then takes a moment.

Few held-out examples say little about s and τ: the least NLL of a hundred is often that of absurd
numbers, such as τ → 0, or s = 0 with intervals that cover too little. Both therefore have a prior
at the uncalibrated s = τ = 1: what is minimised is

    NLL + (`PRIOR_OF_SHARPNESS` (log τ)² + `PRIOR_OF_SCALE` (√s − 1)²) / (2 M)

for M loss terms (log σ relative to the posterior's own in regression). It is negligible beside a
hundred examples. It is finite at s = 0, which is always tried.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from kfac_backend.loss import check_targets, counted_terms
from kfac_backend.model.batches import Targets, each_batch, split_batch
from kfac_backend.options import Likelihood, check_option
from kfac_backend.ranks import Ranks
from marglik.eval_mode import in_eval_mode
from marglik.posterior.calibration import Calibration, CalibrationFit
from marglik.posterior.posterior import Posterior
from marglik.prediction.links import Link, deviations, probit_outputs
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    PredictiveMethod,
    laplace_predictive,
    outputs_of,
)

_logger = logging.getLogger(__name__)

__all__ = [
    "CalibratedPredictive",
    "HeldOut",
    "calibrate",
    "calibrations_of",
    "collected",
    "fit_calibration",
    "fit_sharpness",
]

LOG_SCALES = math.log(1e-6), math.log(1e4)
"""Bounds of the search for log s; below, s = 0 predicts the same."""
LOG_SHARPNESS = math.log(1e-3), math.log(1e3)
"""Bounds of the search for log τ, and for log σ relative to the posterior's."""
PRIOR_OF_SHARPNESS, PRIOR_OF_SCALE = 3.0, 3.0
"""Precisions of the prior of log τ (log σ) and √s. They were chosen on six data sets with 30, 90
and 300 held-out examples, and checked on five others; see docs/calibration.md."""
STARTS = (1.0, 0.1, 0.01)
"""Scales from which the search starts, as the NLL may have several valleys in s."""
ROUGH_TERMS = 1000
"""Number of loss terms in these searches; only the best one is continued with all terms."""
MOST_NUMBERS = 2**24
"""Most numbers in the outputs of all samples, and in all covariances. Of a language model's many
positions this leaves some thousand, which are plenty for s and τ."""

Loss = Callable[[Tensor | None, Tensor], Tensor]
"""Mean NLL at (s, τ or σ); None for s = 0, where √s has no derivative."""


@dataclass(frozen=True)
class CalibratedPredictive:
    """A predictive with the calibration that it uses."""

    predict: Predictive = field(repr=False)
    uncalibrated: Predictive = field(repr=False)
    """The same at s = τ = 1. Its epistemic uncertainty ranks inputs by how unlike the training data
    they are, also where calibration found s = 0 and ``predict`` has none."""
    fit: CalibrationFit
    model: torch.nn.Module = field(repr=False)
    likelihood: Likelihood

    def __call__(self, x: Any) -> Any:
        """The prediction for inputs x."""
        return self.predict(x)

    @property
    def calibration(self) -> Calibration:
        """s, τ and σ."""
        return self.fit.calibration


@dataclass(frozen=True)
class HeldOut:
    """What calibration needs to know about held-out data, for M loss terms."""

    likelihood: Likelihood
    f: Float[Tensor, "M C"]
    """The network's outputs."""
    covariance: Float[Tensor, "M C *other"] | None
    """J Σ Jᵀ, under a posterior that has not seen this data; None for method "linearised". Its
    diagonal (M, C) is enough for regression, Bernoulli outputs and the link "probit"."""
    targets: Tensor
    """Class indices (M,), or (M, C)."""
    sigma_noise: float = 1.0
    """The posterior's σ of regression."""
    deviations: Float[Tensor, "S M C"] | None = None
    """Deviations of sampled linearised networks' outputs from ``f``, instead of a covariance."""

    @staticmethod
    @torch.no_grad()
    def of(
        posterior: Posterior,
        batches: Iterable[Any],
        config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
        *,
        progress: bool = False,
        ranks: Ranks = Ranks(None),  # noqa: B008
        links: Collection[str] = get_args(Link),
    ) -> "HeldOut":
        """Outputs, their covariances, and targets of all batches, or evenly spaced ones of many.

        Args:
            posterior: the posterior, fitted to other data.
            batches: (x, y), or mappings, with targets as in the fit.
            config: which layers' uncertainty counts, in how much memory, and whether linearised
                networks are sampled.
            progress: whether to show a bar.
            ranks: the ranks that each have a part of every batch, see `predict_all`; all get the
                whole.
            links: the links to calibrate; "probit" alone needs only variances.

        Raises:
            ValueError: no batch, no target that counts, or targets that do not fit the outputs.
        """
        likelihood, device = posterior.likelihood, posterior.mean.device
        targets_of = Targets(likelihood, posterior.options)
        if config.layers == "all":
            posterior.share_eigenvectors(ranks)
        samples = None
        if config.method == "linearised":
            samples = posterior.sample(config.networks, torch.Generator(device).manual_seed(0))
        variance_only = likelihood != "classification" or set(links) == {"probit"}

        def of_batch(x: Any, y: Any) -> tuple[Tensor, Tensor, Tensor]:
            """Outputs (M, C), their spread (M, ...), and targets of the terms that count."""
            y = targets_of(posterior.model, x, y).to(device)
            f = in_eval_mode(posterior.model, outputs_of)(posterior.model, x)
            check_targets(f, y, likelihood, may_ignore=targets_of.may_ignore)
            config.check_cost(f[0, ..., 0].numel(), f.shape[-1], likelihood)
            counted = counted_terms(y, likelihood)
            if samples is not None:
                spread = posterior.linearised_outputs(samples, x) - f
                spread = spread.flatten(1, -2).movedim(0, 1)  # (M, S, C)
            else:
                _, spread = posterior.output_distribution(
                    x,
                    config.layers,
                    config.bytes,
                    positions=counted if f.dim() > 2 else None,
                    variance_only=variance_only,
                )
                spread = spread.flatten(0, -2 if variance_only else -3)  # (M, C) or (M, C, C)
            f, y = f.flatten(0, -2), y.flatten(0, f.dim() - 2)
            if likelihood == "classification":
                y = y.long()
            if counted is not None:
                f, y = f[counted.flatten()], y[counted.flatten()]
                # The spread of positions was computed only where they count.
                spread = spread if len(spread) == len(f) else spread[counted.flatten()]
            return f, spread, y

        def numbers(f: Tensor, spread: Tensor) -> int:
            # Variances count as much as covariances, so that a link is calibrated on the same terms
            # whatever other links are asked for.
            return f.shape[1] ** 2 if samples is None else spread[:1].numel()

        f, spread, y = collected(
            batches, of_batch, numbers, posterior.options.dict_key_y, progress, ranks
        )
        f, spread, y = (column.to(device) for column in (f, spread, y))
        sigma = float(posterior.sigma_noise)
        if samples is None:
            return HeldOut(likelihood, f, spread, y, sigma)
        return HeldOut(likelihood, f, None, y, sigma, spread.movedim(1, 0))

    def some(self, number: int) -> "HeldOut":
        """At most ``number`` of the terms, evenly spaced."""
        some = slice(None, None, max(1, -(-len(self.f) // number)))
        return replace(
            self,
            f=self.f[some],
            covariance=None if self.covariance is None else self.covariance[some],
            targets=self.targets[some],
            deviations=None if self.deviations is None else self.deviations[:, some],
        )

    def double(self) -> "HeldOut":
        """The same in float64."""
        names = ("f", "covariance", "deviations")
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return replace(self, **{name: value.double() for name, value in given.items()})

    def loss(self, link: Link, noise: Float[Tensor, "S C"]) -> Loss:
        """The mean NLL of a link, as a function of (s, τ), or of (s, σ) for regression."""
        if self.likelihood == "regression":
            return self._regression_loss()
        f, y, variance = self.f, self.targets, self._variance
        # Samples d of the outputs' deviations at s = 1, (S, M, C); "probit" has a closed form.
        samples, weights = self.deviations, None
        if samples is None and link == "mc":
            assert self.covariance is not None
            samples, weights = deviations(self.covariance, self.likelihood, noise)
        # Each term's log probabilities of its possible targets, and the share of each: a label is
        # one of them; a Bernoulli output has two, so that y may lie between 0 and 1.
        shares = torch.ones(1, 1).to(f)
        if self.likelihood == "bernoulli":
            shares = torch.stack([y.to(f), 1 - y.to(f)], -1).flatten(1)  # (M, 2C)

        def log_p(outputs: Tensor) -> Tensor:
            if self.likelihood == "bernoulli":
                return torch.stack([logsigmoid(outputs), logsigmoid(-outputs)], -1).flatten(-2)
            labels = y.expand(outputs.shape[:-1])[..., None]
            return outputs.gather(-1, labels) - outputs.logsumexp(-1, keepdim=True)  # (..., M, 1)

        def loss(scale: Tensor | None, temperature: Tensor) -> Tensor:
            if scale is None:
                terms = log_p(f / temperature)
            elif samples is None:
                terms = log_p(probit_outputs(f / temperature, scale / temperature**2 * variance))
            else:
                of_samples = log_p((f + scale.sqrt() * samples) / temperature)
                log_weights = -math.log(len(samples)) if weights is None else weights.log()
                terms = (of_samples + log_weights).logsumexp(0)
            return -(shares * terms).sum() / len(f)

        return loss

    @property
    def _variance(self) -> Float[Tensor, "M C"]:
        if self.covariance is not None:
            is_variance = self.covariance.dim() == 2
            return self.covariance if is_variance else self.covariance.diagonal(dim1=1, dim2=2)
        assert self.deviations is not None
        return self.deviations.var(0, correction=0)

    def _regression_loss(self) -> Loss:
        residual, variance = self.targets - self.f, self._variance
        shift = 0 if self.deviations is None else self.deviations.mean(0)

        def loss(scale: Tensor | None, sigma: Tensor) -> Tensor:
            total = sigma.square() + (0 if scale is None else scale * variance)
            squares = (residual - (0 if scale is None else scale.sqrt() * shift)).square()
            terms = squares / total + (2 * math.pi * total).log()
            return 0.5 * terms.expand_as(squares).sum(-1).mean()

        return loss


def collected(
    batches: Iterable[Any],
    of_batch: Callable[[Any, Any], tuple[Tensor, Tensor, Tensor]],
    numbers: Callable[[Tensor, Tensor], int],
    dict_key_y: str,
    progress: bool,
    ranks: Ranks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, spreads and targets of all held-out terms, or of evenly spaced ones of many.

    Args:
        batches: (x, y), or mappings.
        of_batch: the three for inputs and targets; their first axis is that of the terms.
        numbers: how many numbers one term's outputs and spread take in a search.
        dict_key_y: the targets' key in mappings.
        progress: whether to show a bar.
        ranks: the ranks that each have a part of every batch; all get the whole.

    Raises:
        ValueError: no batch, or no target that counts.
    """
    found: list[tuple[Tensor, ...]] = []
    seen, stride = 0, 1
    for batch in each_batch(batches, "Calibrating", progress):
        x, y = split_batch(batch, dict_key_y)
        part = None
        if len(y) or ranks.size == 1:
            # On the CPU: a pickled CUDA tensor would be restored on the sender's GPU.
            part = [tensor.cpu() for tensor in of_batch(x, y)]
        parts = [one for one in ranks.gather(part, "calibration") if one is not None]
        f, spread, y = (torch.cat(column) for column in zip(*parts, strict=True))
        kept = (torch.arange(seen, seen + len(f)) % stride) == 0
        seen += len(f)
        found.append((f[kept], spread[kept], y[kept]))
        # Two numbers need no more terms than this: when there are more, keep every second one, of
        # the later batches as well.
        while sum(len(y) for *_, y in found) > max(ROUGH_TERMS, MOST_NUMBERS // numbers(f, spread)):
            stride *= 2
            found = [tuple(torch.cat(column)[::2] for column in zip(*found, strict=True))]
    if not sum(len(y) for *_, y in found):
        raise ValueError(
            "There is nothing to calibrate with: the held-out data has no batch, or no target "
            "that counts."
        )
    f, spread, y = (torch.cat(column) for column in zip(*found, strict=True))
    return f, spread, y


def calibrate(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> CalibratedPredictive:
    """The posterior's predictive with the s and τ (regression: s and σ) of least held-out NLL.

    Use it when predictions serve as probabilities. A few hundred examples are enough for two
    numbers; the network must not have been trained on them. The posterior stores the calibration,
    which `laplace_predictive` then uses and `save_posterior` saves.

    Args:
        posterior: the fitted posterior.
        batches: held-out (x, y), or mappings.
        config: how the posterior predicts.
        generator: generator of the samples, on the model's device; None draws the same samples as
            the search.
        progress: whether to show a bar over the batches.

    Raises:
        AttributeError: a posterior that is not fitted.
        ValueError: no held-out target that counts.
    """
    fit = calibrations_of(posterior, batches, config, [config.method], progress=progress)[
        config.label
    ]
    # The seed of the search: s and τ are best for its samples, others add their sampling error.
    generator = generator or torch.Generator(posterior.mean.device).manual_seed(0)
    state, found = generator.get_state(), []
    for calibration in (Calibration(), fit.calibration):  # from the same samples
        generator.set_state(state)
        found.append(laplace_predictive(posterior, config, generator, calibration))
    uncalibrated, predict = found
    return CalibratedPredictive(predict, uncalibrated, fit, posterior.model, posterior.likelihood)


def calibrations_of(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    links: Sequence[PredictiveMethod] = get_args(Link),
    *,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> dict[str, CalibrationFit]:
    """Calibrate the predictives of several links; returns label -> calibration.

    They need the same outputs and covariances, so that one pass over the data serves them all.
    With method "linearised", only that one is calibrated. The posterior stores the calibrations.

    Args:
        posterior: the fitted posterior.
        batches: held-out (x, y), or mappings.
        config: which layers' uncertainty counts, and the number of samples of link "mc".
        links: the links.
        progress: whether to show a bar over the batches.
        ranks: the ranks that each have a part of every batch, see `predict_all`; all get the same
            calibrations, to the bit.
    """
    methods = [config.method] if config.method == "linearised" else links
    held_out = HeldOut.of(posterior, batches, config, progress=progress, ranks=ranks, links=methods)
    fits = {}
    for method in methods:
        label = replace(config, method=method).label
        link: Link = "probit" if method == "probit" else "mc"
        fits[label] = fit = fit_calibration(held_out, link, config.samples)
        if fit.calibration.covariance_scale == 0:
            _logger.warning("%s: %s", label, fit.calibration.in_words)
    fits = ranks.gather(fits, "fits")[0]  # to the bit
    posterior.calibrations |= {label: asdict(fit) for label, fit in fits.items()}
    return fits


def fit_calibration(held_out: HeldOut, link: Link = "probit", samples: int = 100) -> CalibrationFit:
    """The s and τ, or s and σ, of lowest held-out NLL; takes about a second for 10,000 examples.

    Args:
        held_out: the held-out data.
        link: how Gaussian outputs become probabilities.
        samples: number of samples of link "mc", the same ones for all s and τ; without effect if
            ``held_out`` has sampled deviations.
    """
    check_option("link", link, Link)
    f = held_out.f
    generator = torch.Generator(f.device).manual_seed(0)
    noise = torch.randn(samples, f.shape[1], generator=generator, device=f.device, dtype=f.dtype)
    # One subset of the terms for all links, so that their NLLs can be compared. In float64: near
    # the flat bottom of the NLL, float32's rounding would decide where the search stops.
    S = samples if held_out.deviations is None else len(held_out.deviations)
    held_out = held_out.some(max(ROUGH_TERMS, MOST_NUMBERS // (f.shape[1] * S))).double()
    is_regression = held_out.likelihood == "regression"
    own = math.log(held_out.sigma_noise) if is_regression else 0.0
    bounds = [LOG_SCALES, (own + LOG_SHARPNESS[0], own + LOG_SHARPNESS[1])]

    def minimize(data: HeldOut, *start: float) -> tuple[float, list[float]]:
        """The objective's least value and (log s, log τ) there, or (log τ,) for s = 0."""
        loss = data.loss(link, noise.double())

        def objective(v: Tensor) -> Tensor:
            nll = loss(v[0].exp() if len(v) == 2 else None, v[-1].exp())
            root = (0.5 * v[0]).exp() if len(v) == 2 else torch.zeros(())
            prior = PRIOR_OF_SHARPNESS * (v[-1] - own) ** 2 + PRIOR_OF_SCALE * (root - 1) ** 2
            return nll + 0.5 * prior / len(data.f)

        return _minimize(objective, start, bounds[-len(start) :])

    def calibration(scale: float, log_sharpness: float) -> Calibration:
        value = math.exp(log_sharpness)
        return Calibration(scale, 1.0, value) if is_regression else Calibration(scale, value)

    of_map, (log_map,) = minimize(held_out, own)
    few = held_out.some(ROUGH_TERMS)
    starts = [minimize(few, math.log(s), log_map) for s in STARTS]
    of_both, (log_scale, log_sharpness) = minimize(held_out, *min(starts)[1])
    scaled_map = calibration(0.0, log_map)
    # If the covariance does not help, the MAP is the simpler predictive.
    found = calibration(math.exp(log_scale), log_sharpness) if of_both < of_map else scaled_map
    loss = held_out.loss(link, noise.double())

    def nll(c: Calibration) -> float:
        s, sharp = c.covariance_scale, c.sigma_noise or c.output_temperature
        return loss(torch.tensor(s).double() if s else None, torch.tensor(sharp)).item()

    return CalibrationFit(
        found,
        nll(found),
        nll(calibration(1.0, own)),
        scaled_map,
        nll(scaled_map),
        nll(calibration(0.0, own)),
        len(held_out.f),
    )


def fit_sharpness(held_out: HeldOut) -> Calibration:
    """The τ, or σ of regression, of lowest held-out NLL at s = 1: of a mixture of networks.

    Args:
        held_out: the held-out data, with the networks' ``deviations``.
    """
    is_regression = held_out.likelihood == "regression"
    own = math.log(held_out.sigma_noise) if is_regression else 0.0
    loss, M = held_out.double().loss("mc", held_out.f[:0]), len(held_out.f)

    def objective(v: Tensor) -> Tensor:
        nll = loss(torch.ones(()), v[0].exp())
        return nll + 0.5 * PRIOR_OF_SHARPNESS * (v[0] - own) ** 2 / M

    bounds = own + LOG_SHARPNESS[0], own + LOG_SHARPNESS[1]
    value = math.exp(_minimize(objective, [own], [bounds])[1][0])
    return Calibration(1.0, 1.0, value) if is_regression else Calibration(1.0, value)


def _minimize(
    loss: Callable[[Tensor], Tensor], start: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> tuple[float, list[float]]:
    """The least value of a loss and where it is, by L-BFGS-B with the exact gradient.

    Raises:
        FloatingPointError: a loss that is not finite at the start.
    """
    from scipy.optimize import minimize  # here, since it takes long to import

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = loss(v)
        (gradient,) = torch.autograd.grad(value, v)
        return value.item(), gradient.numpy()

    if not math.isfinite(objective(np.array(start))[0]):
        raise FloatingPointError(
            "The held-out NLL is not finite. Check the network's outputs and the held-out targets."
        )
    # scipy's own tolerances stop where two starts, or two roundings, still differ by per cents.
    tolerances = {"ftol": 1e-13, "gtol": 1e-9}
    found: Any = minimize(
        objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=tolerances
    )
    return float(found.fun), found.x.tolist()
