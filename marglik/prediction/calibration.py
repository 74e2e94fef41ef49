"""Calibration: how wide the posterior and how sharp the outputs should be, by held-out data.

At temperature 1 the Laplace posterior is too wide for clean labels, and the network itself is often
too sharp or not sharp enough. Two numbers mend both: the covariance of the outputs is multiplied
by s ≥ 0, and outputs are divided by τ > 0,

    p(y|x) = ∫ p(y | (f + √s V^½ ε) / τ) N(ε; 0, I) dε,    V = J Σ Jᵀ.

s = 0 is temperature scaling of the MAP (Guo et al. 2017, arXiv:1706.04599), s = τ = 1 the plain
Laplace predictive. In regression σ takes the place of τ: p(y|x) = N(f, s V + σ²). Outputs and
covariances of the held-out data are computed once, and two numbers are found in less than a second.
s = 0 is one of the candidates, so that the calibrated predictive cannot have a higher NLL than the
temperature-scaled MAP on the held-out data, up to the sampling error of mc and of linearised
networks.

With a hundred held-out examples the NLL alone would choose absurd numbers now and then: for τ → 0
a predictive counts the samples that vote for a class, which fits a few examples well and assigns
others probability zero. log τ therefore has a standard normal prior, which is worth one example's
loss and is nothing beside a thousand examples.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from kfac_backend.distributed import Ranks
from kfac_backend.loss.hessian import check_targets, counted_terms
from kfac_backend.model.batches import each_batch
from kfac_backend.model.targets import Targets, split_batch
from kfac_backend.options import Likelihood
from marglik.eval_mode import in_eval_mode
from marglik.posterior.posterior import Posterior
from marglik.prediction.links import (
    Calibration,
    Link,
    bridge_log_counts,
    check_link,
    deviations,
    is_link_of,
    probit_outputs,
    quadrature,
)
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    laplace_predictive,
    outputs_of,
)

__all__ = [
    "CalibratedPredictive",
    "CalibrationFit",
    "HeldOut",
    "calibrate",
    "calibrations_of",
    "fit_calibration",
]

LOG_SCALES = math.log(1e-6), math.log(1e4)
"""Bounds of the search for log s; below, s = 0 predicts the same."""
LOG_SHARPNESS = math.log(1e-3), math.log(1e3)
"""Bounds of the search for log τ, and for log σ relative to the posterior's."""
STARTS = (1.0, 0.1, 0.01)
"""Scales from which the search starts, as the NLL may have several valleys in s."""
ROUGH_TERMS = 1000
"""Loss terms that these searches look at; only the best goes on with all."""
MOST_NUMBERS = 2**24
"""Of all samples' outputs, and of all covariances, that are looked at: of a language model's
thousands of positions some thousand, which are plenty for s and τ."""

Terms = tuple[Tensor, Tensor, Tensor]
"""Outputs (M, C), their covariances or deviations, and targets of M loss terms."""
Loss = Callable[[Tensor | None, Tensor], Tensor]
"""Mean NLL at (s, τ or σ); None for s = 0, where √s has no derivative."""


@dataclass(frozen=True)
class CalibrationFit:
    """What was found, and what it brings on the held-out data, in nats per loss term."""

    calibration: Calibration
    nll: float
    """With the calibration."""
    nll_uncalibrated: float
    """At s = τ = 1, or with the posterior's own σ."""
    map_calibration: Calibration
    """The best at s = 0: the temperature-scaled MAP."""
    nll_scaled_map: float
    """With that."""
    nll_map: float
    """Of the MAP as it is."""
    num_terms: int
    """Of held-out data: examples, or positions of sequences; of many, those that were looked at."""

    @staticmethod
    def remembered(posterior: Posterior, config: PredictiveConfig) -> "CalibrationFit | None":
        """What a posterior knows of this predictive; None if nothing, or if it is not asked for."""
        content = posterior.calibrations.get(config.label)
        if content is None or not config.is_calibrated:
            return None
        names = ("calibration", "map_calibration")
        made: dict[str, Any] = {name: Calibration(**content[name]) for name in names}
        return CalibrationFit(**content | made)


@dataclass(frozen=True)
class CalibratedPredictive:
    """A predictive, and how it was calibrated."""

    predict: Predictive = field(repr=False)
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
    """What calibration needs of held-out data, for M loss terms."""

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
    """Of linearised networks' outputs from ``f``, in the place of a covariance."""

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
        """Outputs, their covariances, and targets of all batches; of very many, a part of them.

        Args:
            posterior: fitted, to other data.
            batches: (x, y), or mappings, with targets as in the fit.
            config: whose uncertainty counts (``layers``), in what memory, and whether linearised
                networks are sampled.
            progress: whether to show a bar.
            ranks: who has a part of each batch, see `predict_all`; all get what all have.
            links: those that it is for; "probit" alone needs no covariance but the variances.

        Raises:
            ValueError: no batch, no target that counts, or targets that do not fit the outputs.
        """
        options, likelihood = posterior.options, posterior.likelihood
        targets_of = Targets(likelihood, options)
        memory = config.memory and config.memory * 2**20
        if config.layers == "all":
            posterior.share_eigenvectors(ranks)
        samples = None
        if config.method == "linearised":
            generator = torch.Generator(posterior.mean.device).manual_seed(0)
            samples = posterior.sample(config.networks, generator)
        variance_only = likelihood != "classification" or set(links) == {"probit"}
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        seen, stride, most = 0, 1, MOST_NUMBERS

        def of_batch(x: Any, y: Any) -> Terms:
            y = targets_of(posterior.model, x, y).to(posterior.mean.device)
            f = in_eval_mode(posterior.model, outputs_of)(posterior.model, x)
            check_targets(f, y, likelihood, may_ignore=targets_of.may_ignore)
            counted = counted_terms(y, likelihood)
            if likelihood == "classification":
                y = y.long()
            if samples is not None:
                spread = posterior.linearised_outputs(samples, x, memory) - f
                spread = spread.flatten(1, -2).movedim(0, 1)  # (M, S, C)
            else:
                mask = counted if f.dim() > 2 else None
                _, spread = posterior.output_distribution(
                    x,
                    config.layers,
                    memory,
                    positions=mask,
                    variance_only=variance_only,
                    tolerance=config.tolerance,
                )
                spread = spread.flatten(0, -2 if variance_only else -3)  # (M, C) or (M, C, C)
            f, y = f.flatten(0, -2), y.flatten(0, f.dim() - 2)
            if counted is not None:
                f, y = f[counted.flatten()], y[counted.flatten()]
                if len(spread) > len(f):
                    spread = spread[counted.flatten()]
            return f, spread, y

        for batch in each_batch(batches, "Calibrating", progress):
            x, y = split_batch(batch, options.dict_key_y)
            part = None
            with ranks.failing_together("calibration"):
                if len(y) or ranks.size == 1:
                    part = of_batch(x, y)
            f, spread, y = _of_all(part, ranks, posterior.mean.device)
            kept = (torch.arange(seen, seen + len(f), device=f.device) % stride) == 0
            seen += len(f)
            found.append((f[kept], spread[kept], y[kept]))
            # Not more than two numbers need: later every second term, of those that are there, too.
            # As many of variances as of covariances, so that a link finds the same in all company.
            numbers = f.shape[1] ** 2 if samples is None else spread[:1].numel()
            while sum(len(y) for *_, y in found) > max(ROUGH_TERMS, most // numbers):
                stride *= 2
                whole = (torch.cat(part)[::2] for part in zip(*found, strict=True))
                found = [tuple(whole)]  # pyright: ignore[reportAssignmentType]
        if not sum(len(y) for *_, y in found):
            raise ValueError(
                "There is nothing to calibrate with: the held-out data has no batch, or no target "
                "that counts."
            )
        f, spread, y = (torch.cat(part) for part in zip(*found, strict=True))
        sigma = float(posterior.sigma_noise)
        if samples is None:
            return HeldOut(likelihood, f, spread, y, sigma)
        return HeldOut(likelihood, f, None, y, sigma, spread.movedim(1, 0))

    def some(self, number: int) -> "HeldOut":
        """At most so many of the terms, from everywhere."""
        some = slice(None, None, max(1, -(-len(self.f) // number)))
        return replace(
            self,
            f=self.f[some],
            covariance=None if self.covariance is None else self.covariance[some],
            targets=self.targets[some],
            deviations=None if self.deviations is None else self.deviations[:, some],
        )

    def loss(self, link: Link, noise: Float[Tensor, "S C"]) -> Loss:
        """The mean NLL of a link, as a function of (s, τ), or of (s, σ) for regression."""
        if self.likelihood == "regression":
            return self._regression_loss()
        if self.likelihood == "bernoulli":
            return self._bernoulli_loss(link)
        return self._classification_loss(link, noise)

    @property
    def _variance(self) -> Float[Tensor, "M C"]:
        if self.covariance is not None:
            is_variance = self.covariance.dim() == 2
            return self.covariance if is_variance else self.covariance.diagonal(dim1=1, dim2=2)
        assert self.deviations is not None
        return self.deviations.var(0, correction=0)

    def _classification_loss(self, link: Link, noise: Tensor) -> Loss:
        f, covariance, y, variance = self.f, self.covariance, self.targets, self._variance
        spread = self.deviations  # (S, M, C)
        if covariance is not None:
            spread = deviations(covariance, noise) if link == "mc" else None

        def loss(scale: Tensor | None, temperature: Tensor) -> Tensor:
            if scale is None:
                return cross_entropy(f / temperature, y)
            if spread is None and link == "probit":
                return cross_entropy(
                    probit_outputs(f / temperature, scale / temperature**2 * variance), y
                )
            if spread is None:
                assert covariance is not None
                counts = bridge_log_counts(f / temperature, scale / temperature**2 * covariance)
                return cross_entropy(counts, y)
            outputs = (f + scale.sqrt() * spread) / temperature
            of_label = outputs.gather(-1, y.expand(len(outputs), -1)[..., None]).squeeze(-1)
            log_p = of_label - outputs.logsumexp(-1)  # (S, M)
            return math.log(len(outputs)) - log_p.logsumexp(0).mean()

        return loss

    def _bernoulli_loss(self, link: Link) -> Loss:
        f, y = self.f, self.targets.to(self.f)
        variance = self._variance
        nodes, weights = quadrature(f)
        if self.deviations is not None:
            weights = f.new_full((len(self.deviations), 1, 1), 1 / len(self.deviations))

        def loss(scale: Tensor | None, temperature: Tensor) -> Tensor:
            if scale is None or (link == "probit" and self.deviations is None):
                scaled = 0 if scale is None else scale / temperature**2 * variance
                outputs = probit_outputs(f / temperature, torch.as_tensor(scaled))
                of_one, of_zero = logsigmoid(outputs), logsigmoid(-outputs)
            else:
                spread = variance.sqrt() * nodes if self.deviations is None else self.deviations
                outputs = (f + scale.sqrt() * spread) / temperature  # (K, M, C)
                of_one = (logsigmoid(outputs) + weights.log()).logsumexp(0)
                of_zero = (logsigmoid(-outputs) + weights.log()).logsumexp(0)
            return -(y * of_one + (1 - y) * of_zero).sum(-1).mean()

        return loss

    def _regression_loss(self) -> Loss:
        residual, variance = self.targets - self.f, self._variance
        shift = 0 if self.deviations is None else self.deviations.mean(0)

        def loss(scale: Tensor | None, sigma: Tensor) -> Tensor:
            total = sigma.square() + (0 if scale is None else scale * variance)
            squares = (residual - (0 if scale is None else scale.sqrt() * shift)).square()
            terms = squares / total + (2 * math.pi * total).log()
            return 0.5 * terms.expand_as(squares).sum(-1).mean()

        return loss


def calibrate(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> CalibratedPredictive:
    """The posterior's predictive with the s and τ (regression: s and σ) that suit held-out data.

    Take it for predictions that are to be used as probabilities. A few hundred examples are enough
    for two numbers; they must not have been trained on. The posterior remembers what was found, so
    that `laplace_predictive` and `save_posterior` know it.

    Args:
        posterior: the fitted posterior.
        batches: held-out (x, y), or mappings.
        config: how the posterior predicts.
        generator: of the samples, on the model's device; those of the search if left out.
        progress: whether to show a bar over the batches.

    Raises:
        AttributeError: a posterior that is not fitted.
        ValueError: no held-out target that counts.
    """
    links = [config.method]
    held_out = HeldOut.of(posterior, batches, config, progress=progress, links=links)
    fit = _fits(posterior, held_out, [config])[config.label]
    # The samples of the search, for which s and τ are best; others differ by their sampling error.
    generator = generator or torch.Generator(posterior.mean.device).manual_seed(0)
    predict = laplace_predictive(posterior, config, generator, fit.calibration)
    return CalibratedPredictive(predict, fit, posterior.model, posterior.likelihood)


def calibrations_of(
    posterior: Posterior,
    batches: Iterable[Any],
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    *,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> dict[str, CalibrationFit]:
    """Label -> calibration, for all links, which need the same outputs and covariances.

    For method "linearised" its own alone. The posterior remembers them.

    Args:
        posterior: the fitted posterior.
        batches: held-out (x, y), or mappings.
        config: whose uncertainty counts, and how many samples link "mc" has.
        progress: whether to show a bar over the batches.
        ranks: who has a part of each batch, see `predict_all`; all find the same.
    """
    held_out = HeldOut.of(posterior, batches, config, progress=progress, ranks=ranks)
    links = [link for link in get_args(Link) if is_link_of(link, held_out.likelihood)]
    of_links = [replace(config, method=link) for link in links]
    fits = _fits(posterior, held_out, [config] if config.method == "linearised" else of_links)
    if ranks.size > 1:  # to the bit
        fits, remembered = ranks.gather((fits, posterior.calibrations), "calibration")[0]
        posterior.calibrations = remembered
    return fits


def _of_all(part: Terms | None, ranks: Ranks, device: torch.device) -> Terms:
    """The terms of all ranks' parts of a batch, in their order."""
    if ranks.size == 1:
        assert part is not None
        return part
    # On the CPU: another rank would find a tensor of a GPU on that GPU, which is not its own.
    own = None if part is None else tuple(tensor.cpu() for tensor in part)
    parts = [one for one in ranks.gather(own, "calibration") if one is not None]
    f, spread, y = (torch.cat(column).to(device) for column in zip(*parts, strict=True))
    return f, spread, y


def _fits(
    posterior: Posterior, held_out: HeldOut, configs: Sequence[PredictiveConfig]
) -> dict[str, CalibrationFit]:
    """Label -> calibration; remembered by the posterior."""
    fits = {
        config.label: fit_calibration(
            held_out, "mc" if config.method == "linearised" else config.method, config.samples
        )
        for config in configs
    }
    posterior.calibrations |= {label: asdict(fit) for label, fit in fits.items()}
    return fits


def fit_calibration(held_out: HeldOut, link: Link = "probit", samples: int = 100) -> CalibrationFit:
    """The s and τ, or s and σ, of lowest held-out NLL; about a second for 10,000 examples.

    The bridge's mean does not depend on s, which stays 1 there, or becomes 0.

    Args:
        held_out: the data.
        link: from Gaussian outputs to probabilities.
        samples: of link "mc", the same for all s and τ; those of linearised networks are there.
    """
    check_link(link, held_out.likelihood)
    S = samples if held_out.deviations is None else len(held_out.deviations)
    # The same terms for all links.
    held_out = held_out.some(max(ROUGH_TERMS, MOST_NUMBERS // (held_out.f.shape[1] * S)))
    f = held_out.f
    generator = torch.Generator(f.device).manual_seed(0)
    noise = torch.randn(samples, f.shape[1], generator=generator, device=f.device, dtype=f.dtype)
    is_regression = held_out.likelihood == "regression"
    own = math.log(held_out.sigma_noise) if is_regression else 0.0
    sharpness = own + LOG_SHARPNESS[0], own + LOG_SHARPNESS[1]
    scale = LOG_SCALES if is_regression or link != "bridge" else (0.0, 0.0)

    def minimize(data: HeldOut, *start: float) -> tuple[float, list[float]]:
        """The objective's least value and (log s, log τ) there, or (log τ,) for s = 0."""
        loss = data.loss(link, noise)

        def objective(v: Tensor) -> Tensor:
            nll = loss(v[0].exp() if len(v) == 2 else None, v[-1].exp())
            return nll + 0.5 * (v[-1] - own) ** 2 / len(data.f)

        return _minimize(objective, start, [scale, sharpness][-len(start) :])

    def calibration(scale: float, log_sharpness: float) -> Calibration:
        value = math.exp(log_sharpness)
        return Calibration(scale, 1.0, value) if is_regression else Calibration(scale, value)

    of_map, (log_map,) = minimize(held_out, own)
    few = held_out.some(ROUGH_TERMS)
    inside = {min(max(math.log(s), scale[0]), scale[1]) for s in STARTS}  # the bridge's are one
    starts = [minimize(few, log_scale, log_map) for log_scale in sorted(inside)]
    of_both, (log_scale, log_sharpness) = minimize(held_out, *min(starts)[1])
    scaled_map = found = calibration(0.0, log_map)
    loss = held_out.loss(link, noise)

    def nll(c: Calibration) -> float:
        s, sharp = c.covariance_scale, c.sigma_noise or c.output_temperature
        return loss(f.new_tensor(s) if s else None, f.new_tensor(sharp)).item()

    both = calibration(math.exp(log_scale), log_sharpness)
    # Where the covariance brings nothing, the simpler predictive.
    if of_both < of_map and nll(both) < nll(scaled_map):
        found = both
    return CalibrationFit(
        found,
        nll(found),
        nll(calibration(1.0, own)),
        scaled_map,
        nll(scaled_map),
        nll(calibration(0.0, own)),
        len(f),
    )


def _minimize(
    loss: Callable[[Tensor], Tensor], start: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> tuple[float, list[float]]:
    """Least value and where, by L-BFGS-B with the exact gradient; at worst the start.

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
    found: Any = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.fun), found.x.tolist()
