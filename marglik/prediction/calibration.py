"""Calibration: scale the outputs and their covariance to maximise the likelihood of held-out data.

At temperature 1 the Laplace posterior is too wide for clean labels, and the network itself is often
over- or underconfident. Two numbers correct both. The covariance of the outputs is multiplied by s
≥ 0, and outputs are divided by τ > 0:

    p(y|x) = ∫ p(y | (f + √s V^½ z) / τ) N(z; 0, I) dz,    V = J Σ Jᵀ.

s = 0 is temperature scaling of the MAP (Guo et al. 2017, arXiv:1706.04599), and s = τ = 1 is the
plain Laplace predictive. In regression σ replaces τ: p(y|x) = N(f, s V + σ²). Outputs and
covariances of the held-out data are computed once. The search for the two numbers then takes a
moment.

Few held-out examples determine s and τ poorly. With a hundred examples, the minimum of the NLL
sometimes has absurd numbers, such as τ → 0, or s = 0 with intervals that are too narrow. Both
numbers therefore have a prior around the uncalibrated s = τ = 1. The search minimises

    NLL + (`PRIOR_OF_SHARPNESS` (log τ)² + `PRIOR_OF_SCALE` (√s − 1)²) / (2 M)

for M loss terms. In regression, log(σ / σ of the posterior) replaces log τ. At τ = ½ and s = 0 the
prior adds 0.02 nats to the mean NLL of a hundred terms, and 0.002 nats to the mean NLL of a
thousand. At τ = 0.001 and a hundred terms it adds 0.7 nats, so the search avoids such a τ. The
prior is finite at s = 0, which the search always tries.

Held-out labels are wrong as often as training labels. A temperature alone would account for wrong
labels by less confident predictions for all examples. For classes the search therefore has a third
number ε, the share of random labels. Labels then have the probabilities (1 − ε) p + ε/C. The prior
of ε favours 0, with `PRIOR_OF_NOISE` log(1 + ε/`SMALL_NOISE`) nats, so that a few hard examples do
not count as noise.

Held-out labels may not distinguish ε from τ. If a network has learned almost nothing, ε → 1 and τ →
∞ explain them equally well. For example, if the outputs of two classes differ by a small f, (1 − ε)
p + ε/2 = ½ ± (1 − ε)f/4τ depends only on (1 − ε)/τ. For an always confident network ε costs less
than τ, but ε does not change the confidence of softmax(f/τ), the probabilities of the true class.
Above ε = ½, where ε would replace a τ of more than 2, the prior therefore adds
½ `PRIOR_OF_MOST_NOISE` log²(2(1 − ε)). The search then selects τ for such labels.
"""

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.engine.batches import num_examples
from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood, counted_terms
from kfac_backend.options import TargetOptions, check_option
from kfac_backend.ranks import Ranks
from marglik.eval_mode import eval_mode
from marglik.posterior.fingerprints import FingerprintedBatches, concatenated, num_in_common
from marglik.posterior.posterior import Posterior
from marglik.prediction.links import (
    Calibration,
    CalibrationFit,
    Link,
    Prediction,
    deviations,
    negative_log_scores,
    variances_of,
)
from marglik.prediction.predictive import (
    ModelPredictive,
    Predictive,
    PredictiveConfig,
    PredictiveMethod,
    gathered,
    label_noise_of,
    laplace_predictive,
    outputs_of,
)

_logger = logging.getLogger(__name__)

LOG_SCALES = math.log(1e-6), math.log(1e4)
"""Bounds of the search for log s. Below them, predictions are the same as with s = 0."""
LOG_SHARPNESS = math.log(1e-3), math.log(1e3)
"""Bounds of the search for log τ, and for log(σ / σ of the posterior)."""
PRIOR_OF_SHARPNESS, PRIOR_OF_SCALE = 3.0, 3.0
"""Precisions of the prior of log τ (log σ) and √s. They were chosen on six data sets with 30, 90
and 300 held-out examples, and checked on five others; see docs/calibration.md."""
PRIOR_OF_NOISE, SMALL_NOISE = 0.5, 1e-3
"""Scale of the prior p(ε) ∝ (ε + `SMALL_NOISE`)^−`PRIOR_OF_NOISE`. Chosen on four networks on
digits with 200 held-out examples. With twice and four times the value, some networks did not detect
40 % of wrong labels."""
PRIOR_OF_MOST_NOISE, MUCH_NOISE = 32.0, 0.5
"""Scale of the additional prior on ε, and the ε above which it applies. Chosen on two, five and ten
classes with 200 and 1,000 held-out examples, see experiments/labels/README.md."""
LARGEST_NOISE = 0.95
WRONG_LABELS = 0.03
"""Share of wrong held-out labels above which a likelihood without label noise logs a hint."""
NOISES = (0.0, 0.1, 0.4)
"""Initial values of ε in the search, because the NLL may have several minima."""
STARTS = (1.0, 0.1, 0.01)
"""Initial scales of the search, because the NLL may have several minima in s."""
FEWEST_TERMS = 30
"""Number of loss terms below which a warning appears. The prior was not checked with fewer."""
ROUGH_TERMS = 1000
"""Number of loss terms in the searches from `STARTS`. The best one continues with all terms."""
MOST_NUMBERS = 2**24
"""Maximum number of entries in the outputs of all samples, and in all covariances. For a language
model this leaves some thousand positions, which are sufficient for s and τ."""

Loss = Callable[[Tensor | None, Tensor, Tensor | None], Tensor]
"""Mean NLL (nats) at (s, τ or σ, ε). None stands for s = 0, where √s has no derivative, and for
likelihoods without ε."""


@dataclass(frozen=True)
class CalibratedPredictive(ModelPredictive):
    """A predictive with its calibration."""

    uncalibrated: Predictive = field(repr=False)
    """The predictive at s = τ = 1. It has epistemic uncertainty even if the calibrated s is 0. To
    score how unusual an input is, use the entropy of the calibrated prediction."""
    calibration_fit: CalibrationFit
    """The calibration, with the NLL of the held-out data with and without calibration."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out data for a calibration, with M loss terms."""

    likelihood: Likelihood
    f: Float[Tensor, "M C"]
    """The network's outputs."""
    spread: Float[Tensor, "M C *other"] | Float[Tensor, "M S C"]
    """J Σ Jᵀ of a posterior that was fitted to other data. Its diagonal (M, C) is enough for
    regression, Bernoulli outputs and the link "probit". Otherwise deviations from ``f`` of the
    outputs of linearised networks, or of the members of an ensemble."""
    targets: Tensor
    """Class indices (M,), or (M, C)."""
    sigma_noise: float = 1.0
    """The posterior's σ of regression."""
    is_sampled: bool = False
    """Whether the spread contains deviations (M, S, C)."""
    fingerprints: Tensor | None = None
    """Fingerprints of the examples, see `marglik.posterior.fingerprints`."""

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
        """Return outputs, spread and targets of all batches, or an evenly spaced part of many.

        Args:
            posterior: the posterior, fitted to other data.
            batches: (x, y), or mappings, with targets as in the fit.
            config: options of the predictive: its layers, and whether it samples linearised
                networks.
            progress: whether to show a progress bar.
            ranks: the ranks that each have a part of every batch, see `predict_all`. All get the
                whole result.
            links: the links to calibrate; "probit" alone needs only variances.

        Raises:
            ValueError: there is no batch, no target counts, or targets do not fit the outputs.
        """
        model, likelihood, device = posterior.model, posterior.likelihood, posterior.mean.device
        config = config.for_posterior(posterior)
        layers = config.layers
        assert layers != "auto"
        if layers == "all":
            posterior.share_eigenvectors(ranks)
        samples = None
        if config.method == "linearised":
            samples = posterior.sample(config.networks, torch.Generator(device).manual_seed(0))
        by_probit = likelihood.has_probit and set(links) == {"probit"}
        variance_only = likelihood.kind != "classes" or by_probit

        def outputs_and_spread(x: Any, counted: Tensor | None) -> tuple[Tensor, Tensor]:
            with eval_mode(model):
                f = outputs_of(model, x)
            config.check_cost(f[0, ..., 0].numel(), f.shape[-1], likelihood)
            if samples is not None:
                spread = posterior.linearised_outputs(samples, x) - f
                return f, spread.flatten(1, -2).movedim(0, 1)
            _, spread = posterior.output_distribution(
                x,
                layers,
                positions=counted if f.dim() > 2 else None,
                variance_only=variance_only,
            )
            return f, spread.flatten(0, -2 if variance_only else -3)

        number = None if samples is None else len(samples)
        read = FingerprintedBatches(batches, model, posterior.options)
        f, spread, y = collected(
            outputs_and_spread, read, model, likelihood, posterior.options, number, ranks,
            progress=progress,
        )  # fmt: skip
        sigma, is_sampled = float(posterior.sigma_noise), samples is not None
        tensors = f.to(device), spread.to(device), y.to(device)
        examples = concatenated(ranks.gather(concatenated(read.parts)))
        return HeldOut(likelihood, *tensors, sigma, is_sampled, examples)

    def some(self, number: int) -> "HeldOut":
        """Return at most ``number`` of the terms, evenly spaced."""
        some = slice(None, None, max(1, -(-len(self.f) // number)))
        f, spread, targets = self.f[some], self.spread[some], self.targets[some]
        return replace(self, f=f, spread=spread, targets=targets)

    def double(self) -> "HeldOut":
        """Return the data in float64."""
        return replace(self, f=self.f.double(), spread=self.spread.double())

    def loss(self, link: Link, noise: Float[Tensor, "S C"]) -> Loss:
        """Return the mean NLL of a link as a function of (s, τ, ε), or (s, σ) for regression."""
        f, likelihood, weights = self.f, self.likelihood, None
        none, variance = torch.zeros_like(f), torch.zeros_like(f)
        sampled = none[None]  # (S, M, C)
        # Use samples, or variances if there is a closed form.
        if self.is_sampled:
            sampled = self.spread.movedim(1, 0)
        elif likelihood.kind == "continuous" or (link == "probit" and likelihood.has_probit):
            variance = variances_of(self.spread)
        else:
            sampled, weights = deviations(self.spread, likelihood, noise)

        def loss(scale: Tensor | None, sharp: Tensor, label_noise: Tensor | None) -> Tensor:
            temperature, sigma = (1.0, sharp) if likelihood.kind == "continuous" else (sharp, sharp)
            if scale is None:
                outputs, of_outputs = f[None], none
            else:
                outputs, of_outputs = f + scale.sqrt() * sampled, scale * variance
            losses = negative_log_scores(
                outputs / temperature, of_outputs / temperature**2, self.targets, likelihood, sigma,
                None if scale is None else weights, label_noise,
            )  # fmt: skip
            return losses.sum() / len(f)

        return loss


def collected(
    outputs_and_spread: Callable[[Any, Tensor | None], tuple[Tensor, Tensor]],
    batches: Iterable[Any],
    model: torch.nn.Module,
    likelihood: Likelihood,
    options: TargetOptions,
    samples: int | None,
    ranks: Ranks,
    *,
    progress: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, spreads and targets of all held-out terms, or an evenly spaced part of many.

    Args:
        outputs_and_spread: function from inputs and a mask of the loss terms that count (None for
            all) to outputs (N, ..., C) and their spread, one row per loss term that counts.
        batches: (x, y), or mappings.
        model: the network, which may determine whether labels are shifted.
        likelihood: likelihood of the targets.
        options: form of the targets in batches.
        samples: S, if the spread contains deviations (M, S, C).
        ranks: the ranks that each have a part of every batch. All get the whole result.
        progress: whether to show a progress bar.

    Raises:
        ValueError: there is no batch, or no target counts.
    """
    task = Task(likelihood, options)

    def of_batch(x: Any, y: Any) -> tuple[Tensor, ...]:
        if num_examples(y) == 0:
            raise ValueError("A held-out batch has no examples. Omit this batch.")
        y = task.targets(model, x, y)
        task.check_axis(model, x, y)
        counted = counted_terms(y, likelihood)
        f, spread = outputs_and_spread(x, counted)
        y = y.to(f.device)
        task.check(f, y)
        task.look_at(f)
        f, y = f.flatten(0, -2), y.flatten(0, f.dim() - 2)  # (M, C), (M,) or (M, C)
        if counted is not None:
            is_counted = counted.flatten().to(f.device)
            spread = spread if len(spread) < len(f) else spread[is_counted]
            f, y = f[is_counted], y[is_counted]
        return f.cpu(), spread.cpu(), y.cpu()

    chosen: list[tuple[Tensor, ...]] = []
    num_seen, stride = 0, 1
    parts = gathered(of_batch, batches, options, "Calibrating", progress, ranks)
    for f, spread, y in parts:
        # Use the same terms for variances and covariances. Otherwise the calibration of a link
        # would depend on the other requested links.
        most = max(ROUGH_TERMS, MOST_NUMBERS // (f.shape[1] * (samples or f.shape[1])))
        is_chosen = (torch.arange(num_seen, num_seen + len(f)) % stride) == 0
        num_seen += len(f)
        chosen.append((f[is_chosen], spread[is_chosen], y[is_chosen]))
        # Two numbers need no more terms than this. If there are more, keep every second one, also
        # of later batches.
        while sum(len(y) for *_, y in chosen) > most:
            stride *= 2
            chosen = [tuple(torch.cat(column)[::2] for column in zip(*chosen, strict=True))]
    if not sum(len(y) for *_, y in chosen):
        raise ValueError(
            "There are no held-out targets to calibrate with: there is no batch, or no target "
            "counts. Pass held-out data with targets."
        )
    f, spread, y = (torch.cat(column) for column in zip(*chosen, strict=True))
    return f, spread, y


def calibrate(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> CalibratedPredictive:
    """Fit s and τ (or s and σ) to held-out data, and return the posterior's calibrated predictive.

    Use it if predictions serve as probabilities. A few hundred validation examples are enough for
    two numbers. The posterior stores the calibration. `laplace_predictive` then uses it, and
    `save_posterior` saves it.

    Args:
        posterior: the fitted posterior.
        batches: validation data (x, y), or mappings. A warning appears if some of the examples are
            training data of the posterior.
        config: options of the predictive.
        generator: generator of the samples, on the model's device. None draws the same samples as
            the search.
        progress: whether to show a progress bar over the batches.

    Raises:
        AttributeError: the posterior is not fitted.
        ValueError: no held-out target counts, or a batch has no examples.
    """
    config = config.for_posterior(posterior)
    fit = calibrations_of(posterior, batches, config, [config.method], progress=progress)[
        config.label
    ]
    # Use the seed of the search, because s and τ are best for its samples.
    generator = generator or torch.Generator(posterior.mean.device).manual_seed(0)
    return _calibrated(posterior, config, generator.get_state(), fit)


def _calibrated(
    posterior: Posterior, config: PredictiveConfig, state: Tensor, fit: CalibrationFit
) -> CalibratedPredictive:
    """Return the predictive at a calibration, with samples from a generator in this state."""
    generator, predictives = torch.Generator(posterior.mean.device), []
    # Without a calibration, ε is the ε of the likelihood. Both predictives use the same samples.
    plain = Calibration(label_noise=label_noise_of(posterior.likelihood, None))
    for calibration in (plain, fit.calibration):
        generator.set_state(state)
        predictives.append(laplace_predictive(posterior, config, generator, calibration))
    uncalibrated, predict = predictives

    def at_calibration(x: Any) -> Prediction:
        if config.label not in posterior.calibrations:
            raise ValueError(
                "The posterior changed after its calibration: it was fitted again, or its prior "
                "precision, noise or temperature has changed. Calibrate it again."
            )
        return predict(x)

    recipe = _calibrated, (posterior, config, state, fit)
    arguments = vars(predict) | {"predict": at_calibration, "recipe": recipe}
    return CalibratedPredictive(**arguments, uncalibrated=uncalibrated, calibration_fit=fit)


@torch.inference_mode(False)  # gradients are needed in any mode of the caller
def calibrations_of(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    links: Sequence[PredictiveMethod] = get_args(Link),
    *,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> dict[str, CalibrationFit]:
    """Calibrate the predictives of several links, and return label -> calibration.

    One pass over the data is enough, because all links need the same outputs and covariances. With
    method "linearised", only this predictive is calibrated. The posterior stores the calibrations.

    Args:
        posterior: the fitted posterior.
        batches: validation data (x, y), or mappings.
        config: options of the predictive: its layers, and the number of samples of link "mc".
        links: the links.
        progress: whether to show a progress bar over the batches.
        ranks: the ranks that each have a part of every batch, see `predict_all`; all get exactly
            the same calibrations.
    """
    config = config.for_posterior(posterior)
    methods = [config.method] if config.method == "linearised" else links
    held_out = HeldOut.of(posterior, batches, config, progress=progress, ranks=ranks, links=methods)
    training, validation = posterior.fingerprints, held_out.fingerprints
    if training is not None and validation is not None and ranks.rank == 0:
        number, is_too_many = num_in_common(training, validation)
        if is_too_many:
            warnings.warn(
                f"{number} of the {len(validation)} held-out examples are training data. The "
                "network is more confident there than on new data, so the calibration is too "
                "confident. Calibrate with validation data.",
                RuntimeWarning,
                stacklevel=4,
            )
    if (number := len(held_out.f)) < FEWEST_TERMS and ranks.rank == 0:
        _logger.warning(
            "The calibration uses only %d held-out loss terms, which are too few for a reliable "
            "confidence. Hold out at least %d, preferably some hundred (held_out, or the data's "
            "validation set), or do not calibrate (predictive.calibration none).",
            number, FEWEST_TERMS,
        )  # fmt: skip
    fits = {}
    for method in methods:
        label = replace(config, method=method).label
        link: Link = "probit" if method == "probit" else "mc"
        fits[label] = fit = fit_calibration(held_out, link, config.samples)
        if fit.calibration.covariance_scale == 0:
            _logger.warning("%s: %s", label, fit.calibration.in_words)
    fits = ranks.gather(fits)[0]  # the same bits on all ranks
    C = held_out.f.shape[-1]
    wrong = max(fit.map_calibration.label_noise for fit in fits.values()) * (C - 1) / C
    if posterior.likelihood.name == "classification" and wrong > WRONG_LABELS and ranks.rank == 0:
        _logger.warning(
            "About %.0f %% of the held-out labels seem to be wrong. %sThe likelihood "
            "noisy_classification models wrong labels in training, too, see docs/label-noise.md.",
            100 * wrong,
            "Predictions are for the true labels. To predict labels that are wrong as often, use "
            "PredictiveConfig(labels='observed') or --predictive.labels observed. "
            if config.labels == "true"
            else "",
        )
    posterior.calibrations |= {label: asdict(fit) for label, fit in fits.items()}
    return fits


def fit_calibration(held_out: HeldOut, link: Link = "probit", samples: int = 100) -> CalibrationFit:
    """Return the calibration (s and τ, or s and σ) with the lowest held-out NLL.

    The search takes about a second for 10,000 examples.

    Args:
        held_out: the held-out data.
        link: method that turns Gaussian outputs into probabilities.
        samples: number of samples of link "mc", which are the same for all s and τ. It has no
            effect if ``held_out`` has sampled deviations.
    """
    check_option("link", link, Link)
    f = held_out.f
    generator = torch.Generator(f.device).manual_seed(0)
    noise = torch.randn(samples, f.shape[1], generator=generator, device=f.device, dtype=f.dtype)
    noise = noise.double()
    # Use one subset of the terms for all links, so that their NLLs can be compared. Use float64,
    # because rounding in float32 would determine the end of the search near the flat minimum.
    S = held_out.spread.shape[1] if held_out.is_sampled else samples
    held_out = held_out.some(max(ROUGH_TERMS, MOST_NUMBERS // (f.shape[1] * S))).double()
    loss, own = held_out.loss(link, noise), _own(held_out)

    # Step 1: search only τ and ε, for the temperature-scaled MAP.
    of_map, at_map = _least_at_scale(held_out, loss, 0.0)
    # Step 2: search all numbers, from several starts on some terms, then from the best on all.
    subset = held_out.some(ROUGH_TERMS)
    starts = [_least(subset, subset.loss(link, noise), [math.log(s), *at_map]) for s in STARTS]
    of_all, (log_scale, *others) = _least(held_out, loss, min(starts)[1])
    # Step 3: if the covariance does not help, use the MAP, the simpler predictive.
    best = (math.exp(log_scale), others) if of_all < of_map else (0.0, at_map)

    def nll(s: float, others: Sequence[float]) -> float:
        sharp, label_noise = _numbers(torch.tensor(others, dtype=torch.float64))
        scale = torch.tensor(s, dtype=torch.float64) if s else None
        return loss(scale, sharp, label_noise).item()

    # Without a calibration, ε is the ε of the likelihood.
    own_noise = label_noise_of(held_out.likelihood, None)
    uncalibrated = [own] + [_log_noise(own_noise)] * (len(at_map) - 1)
    return CalibrationFit(
        calibration=_calibration(held_out, *best),
        nll=nll(*best),
        nll_uncalibrated=nll(1.0, uncalibrated),
        map_calibration=_calibration(held_out, 0.0, at_map),
        nll_temperature_scaled=nll(0.0, at_map),
        nll_map=nll(0.0, uncalibrated),
        num_terms=len(held_out.f),
    )


def fit_sharpness(held_out: HeldOut, scale: float) -> Calibration:
    """Return the τ and ε, or σ of regression, with the lowest held-out NLL at a fixed s.

    Args:
        held_out: the held-out data.
        scale: s. 0 is the MAP, which does not use the spread. 1 is a mixture of networks, whose
            deviations are the spread.
    """
    held_out = held_out.double()
    loss = held_out.loss("mc", held_out.f[:0])
    return _calibration(held_out, scale, _least_at_scale(held_out, loss, scale)[1])


def scaled_loss(held_out: HeldOut) -> float:
    """Return the MAP's NLL (nats per loss term), with τ and ε, or σ, from `fit_sharpness`."""
    held_out = held_out.double()
    loss = held_out.loss("mc", held_out.f[:0])
    _, at_map = _least_at_scale(held_out, loss, 0.0)
    return loss(None, *_numbers(torch.tensor(at_map, dtype=torch.float64))).item()


def _least_at_scale(held_out: HeldOut, loss: Loss, scale: float) -> tuple[float, list[float]]:
    """Return the minimum at a fixed s over log τ, and for classes over the coordinate of ε."""
    has_noise = held_out.likelihood.kind == "classes"
    starts = [[_log_noise(noise)] for noise in NOISES] if has_noise else [[]]
    return min(_least(held_out, loss, [_own(held_out), *start], scale) for start in starts)


def _log_noise(noise: float) -> float:
    """Return the coordinate log(1 + ε/`SMALL_NOISE`) of ε, in which the prior is linear."""
    return math.log1p(noise / SMALL_NOISE)


def _numbers(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return τ or σ, and ε, from (log τ, coordinate of ε) or (log σ,)."""
    return values[0].exp(), SMALL_NOISE * values[1].expm1() if len(values) > 1 else None


def _own(held_out: HeldOut) -> float:
    """Return log σ of the posterior, or log τ = 0: the uncalibrated value."""
    return math.log(held_out.sigma_noise) if held_out.likelihood.has_sigma else 0.0


def _calibration(held_out: HeldOut, scale: float, values: Sequence[float]) -> Calibration:
    sharp, label_noise = _numbers(torch.tensor(values, dtype=torch.float64))
    if held_out.likelihood.has_sigma:
        return Calibration(scale, 1.0, sharp.item())
    return Calibration(
        scale, sharp.item(), None, 0.0 if label_noise is None else label_noise.item()
    )


def _least(
    held_out: HeldOut, loss: Loss, start: Sequence[float], scale: float = 1.0
) -> tuple[float, list[float]]:
    """Return the minimum of NLL and prior, and its position, by L-BFGS-B with exact gradients.

    Args:
        held_out: the data.
        loss: its NLL.
        start: initial values: log s unless s is fixed, then log τ (log σ for regression), then for
            classes the coordinate of ε.
        scale: the fixed s.

    Raises:
        FloatingPointError: the loss is not finite at the start.
    """
    with extra("statistics"):
        from scipy.optimize import minimize  # imported here, because it takes long

    likelihood, own, M = held_out.likelihood, _own(held_out), len(held_out.f)
    own_noise, of_sharpness = label_noise_of(likelihood, None), LOG_SHARPNESS
    log_least_right = math.log1p(-max(MUCH_NOISE, own_noise))
    has_noise = likelihood.kind == "classes"
    has_scale = len(start) > 1 + has_noise
    if likelihood.kind == "continuous" and not likelihood.has_sigma:
        of_sharpness = 0.0, 0.0  # no τ and no σ, because these outputs are not logits
    bounds = [LOG_SCALES] * has_scale + [(own + of_sharpness[0], own + of_sharpness[1])]
    bounds += [(0.0, _log_noise(LARGEST_NOISE))] * has_noise

    @torch.enable_grad()
    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        s = v[0].exp() if has_scale else torch.tensor(scale)
        root = (0.5 * v[0]).exp() if has_scale else s.sqrt()
        others = v[1:] if has_scale else v
        prior = PRIOR_OF_SHARPNESS * (others[0] - own) ** 2 + PRIOR_OF_SCALE * (root - 1) ** 2
        sharp, noise = _numbers(others)
        if noise is not None:
            excess = (log_least_right - torch.log1p(-noise)).clamp_min(0)
            prior = prior + PRIOR_OF_MOST_NOISE * excess**2
            if not own_noise:  # a likelihood with ε means that the user expects wrong labels
                prior = prior + 2 * PRIOR_OF_NOISE * others[1]
        value = loss(s if has_scale or scale else None, sharp, noise) + 0.5 * prior / M
        (gradient,) = torch.autograd.grad(value, v)
        return value.item(), gradient.numpy()

    function: Callable[[np.ndarray], tuple[float, np.ndarray]] = objective
    is_softmax = likelihood.name in ("classification", "noisy_classification")
    if is_softmax and scale == 0 and not has_scale:  # the same function, ten times as fast
        function = objective_of_map(held_out)
    if not math.isfinite(function(np.array(start))[0]):
        raise FloatingPointError(
            "The held-out NLL is not finite. Check the network's outputs and the held-out targets."
        )
    # With scipy's default tolerances, the results of two starts, or of two ways of rounding, would
    # differ by per cents.
    tolerances = {"ftol": 1e-13, "gtol": 1e-9}
    minimum: Any = minimize(
        function, start, jac=True, method="L-BFGS-B", bounds=bounds, options=tolerances
    )
    return float(minimum.fun), minimum.x.tolist()


def objective_of_map(held_out: HeldOut) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Return NLL and prior at (log τ, coordinate of ε), s = 0, for softmax, with gradient."""
    own_noise = label_noise_of(held_out.likelihood, None)
    log_least_right = math.log1p(-max(MUCH_NOISE, own_noise))
    f, y = held_out.f.double().cpu().numpy(), held_out.targets.long().cpu().numpy()
    f = f - f.max(-1, keepdims=True)
    rows, (M, C) = np.arange(len(f)), f.shape

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        log_tau, of_noise = map(float, values)
        noise = SMALL_NOISE * math.expm1(of_noise) + np.finfo(float).tiny  # as with_label_noise
        # Step 1: log p of each label at τ, and its derivative in log τ.
        z = f * math.exp(-log_tau)
        p = np.exp(z)
        total = p.sum(-1)
        log_p = z[rows, y] - np.log(total)
        slope = (p * z).sum(-1) / total - z[rows, y]
        # Step 2: log q, q = (1 − ε) p + ε/C, and its derivatives in log τ and ε.
        log_right = log_p + math.log1p(-noise)
        log_q = np.logaddexp(log_right, math.log(noise) - math.log(C))
        in_log_tau = np.exp(log_right - log_q) * slope
        in_noise = np.exp(np.minimum(-math.log(C) - log_q, 700)) - np.exp(log_p - log_q)
        # Step 3: the prior, and its derivatives.
        excess = max(log_least_right - math.log1p(-noise), 0.0)
        prior = PRIOR_OF_SHARPNESS * log_tau**2 + PRIOR_OF_SCALE + PRIOR_OF_MOST_NOISE * excess**2
        of_tau = 2 * PRIOR_OF_SHARPNESS * log_tau
        of_epsilon = 2 * PRIOR_OF_MOST_NOISE * excess / (1 - noise)
        linear = 0.0 if own_noise else 2 * PRIOR_OF_NOISE
        value = -log_q.mean() + 0.5 * (prior + linear * of_noise) / M
        slopes = -in_log_tau.mean() + 0.5 * of_tau / M, -in_noise.mean() + 0.5 * of_epsilon / M
        per_coordinate = SMALL_NOISE * math.exp(of_noise)
        return value, np.array([slopes[0], slopes[1] * per_coordinate + 0.5 * linear / M])

    return objective
