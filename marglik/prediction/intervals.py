"""Confidence intervals of metrics: the expected values that the test set is consistent with.

All are two-sided intervals of level `LEVEL`. They cover the random choice of the test set alone:
the network, its training data and the seed are fixed. Metrics often differ by more between seeds.

Means have Wilson's or Student's interval, the AUROC has DeLong's. AURC, AUPR and FPR95 depend on
the order of all examples and have the bootstrap's. The ECE has none. Its estimate is biased
upwards, since |accuracy − confidence| of a bin is positive even for a calibrated predictive, and
resampling adds the same bias again: if the ECE is 0, no bootstrap interval contains it. The
intervals of the bins' accuracies in the reliability diagram show instead which bins are off by more
than chance.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marglik.prediction.metric_inputs import as_finite, as_probabilities, check_shapes
from marglik.prediction.metrics import SHARES

__all__ = [
    "LEVEL",
    "RESAMPLES",
    "Interval",
    "area_interval",
    "differences",
    "intervals",
    "of_examples",
    "out_of_distribution_intervals",
    "risk_interval",
    "share_interval",
]

_logger = logging.getLogger(__name__)

LEVEL = 0.95

RESAMPLES = 1000
"""Number of bootstrap resamples. The seed is fixed: the same predictions get the same intervals."""

MANY = 20_000
"""Number of predictions above which resampling takes seconds and a log line announces it."""

Interval = tuple[float, float]
"""Lower and upper end."""

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def share_interval(successes: int, trials: int) -> Interval:
    """The interval of a share (Wilson 1927, score method); accurate also near 0 and 1.

    Args:
        successes: k.
        trials: n, the number of independent trials.

    Raises:
        ValueError: n is not positive, or k is not in 0..n.
    """
    from scipy.stats import binomtest  # here, since importing it takes a second

    ends = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return float(ends.low), float(ends.high)


def mean_interval(values: Tensor) -> Interval | None:
    """Student's interval mean ± t·s/√n; None if all values are the same.

    Args:
        values: (n,) independent values.
    """
    from scipy.stats import t

    n = len(values)
    error = (values.std() / n**0.5).item() if n > 1 else 0.0
    if not error > 0:
        return None
    low, high = t.interval(LEVEL, n - 1, values.mean().item(), error)
    return float(low), float(high)


def intervals(scores: Mapping[str, Tensor], positions: int = 1) -> dict[str, Interval]:
    """Intervals of the metrics that are means: Wilson's for shares of examples, else Student's.

    Values of one example (its outputs, the positions of a sequence) are not independent. They are
    averaged first, so that only examples count as independent.

    Args:
        scores: as `marglik.prediction.evaluation.example_scores` returns them.
        positions: number of consecutive rows that belong to one example.

    Returns:
        Name -> interval, of the metrics that have one. That of "reg/RMSE" is the root of the
        interval of the mean square.
    """
    found = {name: _interval_of_mean(name, of_examples(s, positions)) for name, s in scores.items()}
    if ends := found.get("reg/RMSE"):
        found["reg/RMSE"] = max(ends[0], 0.0) ** 0.5, ends[1] ** 0.5
    return {name: ends for name, ends in found.items() if ends is not None}


def of_examples(scores: Tensor, positions: int) -> Tensor:
    """Means over the positions and outputs of each example, (N,)."""
    return scores.reshape(len(scores) // positions, -1).mean(dim=1)  # (N,)


def _interval_of_mean(name: str, values: Tensor) -> Interval | None:
    if name in SHARES and bool(((values == 0) | (values == 1)).all()):
        return share_interval(int(values.sum().item()), len(values))
    return mean_interval(values)


def differences(
    scores: Mapping[str, Tensor], reference: Mapping[str, Tensor], positions: int = 1
) -> dict[str, tuple[float, float, float]]:
    """Differences d of metrics from a reference's on the same examples, with intervals.

    They are paired differences, whose intervals are much narrower than two separate intervals
    suggest. For means Student's interval of the differences per example; for shares that of Bonett
    & Price 2012 (J. Educ. Behav. Stat. 37), which adds one example to each kind of disagreement.
    Where no example's scores differ, as the accuracy's under temperature scaling, which keeps every
    prediction's class, the difference is 0 with the interval (0, 0).

    Args:
        scores: see `intervals`.
        reference: the scores of another predictive.
        positions: see `intervals`.

    Returns:
        Name -> (d, low, high), of the metrics that are means; without "reg/RMSE", a root of one.
    """
    found = {}
    for name in scores.keys() & reference.keys() - {"reg/RMSE"}:
        d = of_examples(scores[name], positions) - of_examples(reference[name], positions)
        if not d.any():
            found[name] = 0.0, 0.0, 0.0
            continue
        is_share = name in SHARES and bool(torch.isin(d, d.new_tensor([-1, 0, 1])).all())
        ends = _interval_of_paired_shares(d) if is_share else mean_interval(d)
        if ends is not None:
            found[name] = d.mean().item(), *ends
    return dict(sorted(found.items()))


def _interval_of_paired_shares(differences: Tensor) -> Interval:
    from scipy.stats import norm

    n = len(differences) + 2
    gained, lost = (((differences == side).sum().item() + 1) / n for side in (1, -1))
    centre = gained - lost
    half = norm.ppf((1 + LEVEL) / 2) * ((gained + lost - centre**2) / n) ** 0.5
    return float(max(centre - half, -1)), float(min(centre + half, 1))


def area_interval(inside: Tensor, outside: Tensor) -> Interval | None:
    """The interval of "ood/AUROC": DeLong's variance, on the logit scale.

    None if the scores of the two sides do not overlap, or a side has fewer than two examples.

    Source: DeLong, DeLong & Clarke-Pearson 1988 (Biometrics 44); by ranks, Sun & Xu 2014 (IEEE
    Signal Process. Lett. 21). On the logit scale both ends stay within 0..1.

    Args:
        inside: (N,) scores of examples from the training distribution.
        outside: (M,) scores of examples from elsewhere.

    Raises:
        ValueError: no examples on a side, wrong shapes, scores that are not finite.
    """
    from scipy.special import expit, logit
    from scipy.stats import norm, rankdata

    check_shapes(inside=(inside, "N"), outside=(outside, "M"))
    x, y = as_finite("inside", inside).numpy(), as_finite("outside", outside).numpy()
    n, m = len(x), len(y)
    ranks = rankdata([*x, *y])
    # For each example the share of the other side that it is ranked correctly against.
    of_x = 1 - (ranks[:n] - rankdata(x)) / m  # (N,)
    of_y = (ranks[n:] - rankdata(y)) / n  # (M,)
    area = of_y.mean()
    if min(n, m) < 2 or not 0 < area < 1:
        return None
    error = (of_x.var(ddof=1) / n + of_y.var(ddof=1) / m) ** 0.5 / (area * (1 - area))
    if not error > 0:
        return None
    half = norm.ppf((1 + LEVEL) / 2) * error
    return float(expit(logit(area) - half)), float(expit(logit(area) + half))


def risk_interval(confidence: Tensor, correct: Tensor, positions: int = 1) -> Interval | None:
    """The interval of "cls/AURC": percentiles of its bootstrap distribution.

    None if all predictions are right, all are wrong, or there is one example. With few errors it is
    too narrow: it contained the expected value in 94 % of 300 simulated data sets with 50 errors on
    average, in 91 % with 20 or 10 errors, and in 86 % with 5.

    Source: Efron & Tibshirani 1993 (An Introduction to the Bootstrap), ch. 13.

    Args:
        confidence: (N,) probabilities of the predicted classes, any float dtype.
        correct: (N,) bool.
        positions: number of consecutive rows that belong to one example and are resampled together.

    Raises:
        TypeError: confidences that are not floats.
        ValueError: no examples, shapes that differ, confidences outside of 0..1.
    """
    check_shapes(confidence=(confidence, "N"), correct=(correct, "N"))
    p = as_probabilities("confidence", confidence).numpy()
    levels, group = np.unique(-p, return_inverse=True)  # group 0 is the most confident
    harmonic = np.cumsum([0, *(1 / np.arange(1, len(p) + 1))])
    cells = 2 * group + ~correct.cpu().numpy()  # (N,)

    def statistic(counts: Integers) -> list[float]:
        counts = counts.reshape(len(levels), 2)
        return [aurc(counts.sum(axis=1), counts[:, 1], harmonic)]

    sample = cells.reshape(-1, positions).T
    return _bootstrap(["cls/AURC"], [sample], 2 * len(levels), statistic).get("cls/AURC")


def aurc(sizes: Integers, errors: Integers, harmonic: Floats) -> float:
    """The AURC of a resample of a data set, given how often each example occurs in it.

    A group of w equal confidences with e errors, after W examples with E errors, adds
    Σ_{m=1..w} (E + m e/w) / (W + m) = e + (E − W e/w) (H_{W+w} − H_W), H_k = 1 + 1/2 + ... + 1/k.

    Args:
        sizes: (G,) numbers w of examples in each group, the most confident first; may be 0.
        errors: (G,) numbers e of wrong ones among them.
        harmonic: (N + 1,) H_0 to H_N, where the resample has N examples.
    """
    ends, errors_before = sizes.cumsum(), errors.cumsum() - errors
    starts = ends - sizes
    excess = errors_before - starts * (errors / np.maximum(sizes, 1))
    areas = errors + excess * (harmonic[ends] - harmonic[starts])  # (G,)
    return areas.sum() / (len(harmonic) - 1)


def out_of_distribution_intervals(inside: Tensor, outside: Tensor) -> dict[str, Interval]:
    """Intervals of `marglik.prediction.metrics.out_of_distribution_metrics`.

    For "ood/AUROC" it is that of `area_interval`; for "ood/AUPR" and "ood/FPR95", percentiles of
    the bootstrap distribution (source: see `risk_interval`), with each side resampled on its own.

    Args:
        inside: (N,) scores of examples from the training distribution.
        outside: (M,) scores of examples from elsewhere.

    Returns:
        Name -> interval, of the metrics that have one. None has, if all of ``outside`` score higher
        than all of ``inside``.

    Raises:
        ValueError: see `area_interval`.
    """
    area = area_interval(inside, outside)
    found = {} if area is None else {"ood/AUROC": area}
    both = torch.cat([as_finite("inside", inside), as_finite("outside", outside)]).numpy()
    thresholds, group = np.unique(-both, return_inverse=True)  # group 0 has the largest score

    sides = np.split(group[None], [len(inside)], axis=1)
    return found | _bootstrap(["ood/AUPR", "ood/FPR95"], sides, len(thresholds), detection)


def detection(inside: Integers, outside: Integers) -> tuple[float, float]:
    """AUPR and FPR95 of a resample of a data set, given how often each score occurs in it.

    Args:
        inside: (G,) numbers of in-distribution examples with each score, the largest first.
        outside: (G,) numbers of out-of-distribution examples with each score.
    """
    false, true = inside.cumsum(), outside.cumsum()  # flagged at each threshold
    aupr = (outside * true / np.maximum(true + false, 1)).sum() / true[-1]
    threshold = (true / true[-1] >= 0.95).argmax()  # the first, so the largest
    return aupr, false[threshold] / false[-1]


def _bootstrap(
    names: Sequence[str],
    samples: Sequence[Integers],
    num_groups: int,
    statistic: Callable[..., Sequence[float]],
) -> dict[str, Interval]:
    """Percentile intervals of metrics, without those whose ends coincide.

    Args:
        names: names of the metrics.
        samples: for each sample, the group of each example, (positions, N). Each sample is
            resampled with replacement on its own.
        num_groups: number of groups.
        statistic: function from how often a resample has each group, (num_groups,) for each
            sample, to the metrics.
    """
    if min(sample.shape[1] for sample in samples) < 2:
        return {}
    size = sum(sample.size for sample in samples)
    if size >= MANY:
        _logger.info("resampling %d predictions %d times for intervals", size, RESAMPLES)
    random = np.random.default_rng(0)

    def resampled(sample: Integers) -> Integers:
        drawn = sample[:, random.integers(sample.shape[1], size=sample.shape[1])]
        return np.bincount(drawn.ravel(), minlength=num_groups)

    values = [statistic(*map(resampled, samples)) for _ in range(RESAMPLES)]
    tails = 50 * (1 - LEVEL), 50 * (1 + LEVEL)
    lows, highs = np.percentile(values, tails, axis=0).tolist()
    return {
        name: (low, high) for name, low, high in zip(names, lows, highs, strict=True) if low < high
    }
