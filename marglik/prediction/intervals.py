"""Compute confidence intervals of metrics.

All are two-sided intervals of level `LEVEL`. They cover only the random choice of the test set. The
network, its training data and the seed are fixed. The variation between seeds is often larger.

Means have Wilson's or Student's interval, and the AUROC has DeLong's. AURC, AUPR and FPR95 depend
on the order of all examples and have no interval. The ECE has no interval either. Its estimate is
biased upwards, because |accuracy − confidence| of a bin is positive even for a calibrated
predictive. Resampling adds the same bias again: if the ECE is 0, no bootstrap interval contains it.
The reliability diagram instead has an interval for the accuracy of each bin, which shows whether
the bin deviates by more than chance.
"""

import torch
from torch import Tensor

from kfac_backend.extras import extra
from marglik.prediction.metric_types import Difference, Interval, Metrics
from marglik.prediction.metrics import SHARES

__all__ = [
    "LEVEL",
    "area_interval",
    "differences",
    "intervals",
    "of_examples",
    "share_interval",
]

LEVEL = 0.95


def share_interval(successes: int, trials: int) -> Interval:
    """Return Wilson's score interval of a share (Wilson 1927), which is accurate near 0 and 1, too.

    Args:
        successes: k.
        trials: n, the number of independent trials.
    """
    with extra("statistics"):
        from scipy.stats import binomtest  # imported here, because it takes a second

    ends = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return float(ends.low), float(ends.high)


def mean_interval(values: Tensor) -> Interval | None:
    """Return Student's interval mean ± t·s/√n of independent values (n,).

    It is None if all values are the same.
    """
    with extra("statistics"):
        from scipy.stats import t

    n = len(values)
    error = (values.std() / n**0.5).item() if n > 1 else 0.0
    if not error > 0:
        return None
    low, high = t.interval(LEVEL, n - 1, values.mean().item(), error)
    return float(low), float(high)


def of_examples(scores: Tensor, positions: int = 1) -> Tensor:
    """Return means over the outputs and the positions of each example, (N,).

    Values of one example are not independent, so an interval needs one value per example.

    Args:
        scores: scores of rows, (N·positions,) or with a column per output.
        positions: number of consecutive rows of one example.
    """
    return scores.reshape(len(scores) // positions, -1).mean(dim=1)


def intervals(scores: Metrics[Tensor]) -> Metrics[Interval]:
    """Return intervals of the metrics that are means: Wilson's for shares, otherwise Student's.

    The interval of the RMSE is the root of the interval of the mean square.

    Args:
        scores: scores of each example (N,), see `of_examples`.
    """
    ends = {
        name: share_interval(int(values.sum().item()), len(values))
        if name in SHARES and bool(((values == 0) | (values == 1)).all())
        else mean_interval(values)
        for name, values in scores.items()
    }
    if squares := ends.get("rmse"):
        ends["rmse"] = max(squares[0], 0.0) ** 0.5, squares[1] ** 0.5
    return Metrics(**ends)


def differences(scores: Metrics[Tensor], reference: Metrics[Tensor]) -> Metrics[Difference]:
    """Return differences of metrics to a reference on the same examples, with intervals.

    The differences are paired by example, so their intervals are much narrower than two separate
    intervals suggest. Means have Student's interval of the differences per example. Shares have the
    interval of Bonett & Price 2012 (J. Educ. Behav. Stat. 37), which adds one example to each kind
    of disagreement. If all scores are equal, the difference is 0 with the interval (0, 0). This
    happens for accuracies under temperature scaling, which does not change the predicted classes.

    Args:
        scores: see `intervals`.
        reference: the scores of another predictive.

    Returns:
        (d, low, high) of the metrics that are means. The RMSE, a root of a mean, is omitted.
    """
    changes, others = {}, dict(reference.items())
    for name, values in scores.items():
        if name == "rmse" or name not in others:
            continue
        d = values - others[name]
        if not d.any():
            changes[name] = 0.0, 0.0, 0.0
            continue
        is_share = name in SHARES and bool(torch.isin(d, d.new_tensor([-1, 0, 1])).all())
        ends = _interval_of_paired_shares(d) if is_share else mean_interval(d)
        if ends is not None:
            changes[name] = d.mean().item(), *ends
    return Metrics(**changes)


def _interval_of_paired_shares(differences: Tensor) -> Interval:
    with extra("statistics"):
        from scipy.stats import norm

    n = len(differences) + 2
    gained, lost = (((differences == side).sum().item() + 1) / n for side in (1, -1))
    centre = gained - lost
    half = norm.ppf((1 + LEVEL) / 2) * ((gained + lost - centre**2) / n) ** 0.5
    return float(max(centre - half, -1)), float(min(centre + half, 1))


def area_interval(inside: Tensor, outside: Tensor) -> Interval | None:
    """Return the interval of the AUROC from DeLong's variance, on the logit scale.

    It is None if the scores of both sides do not overlap, or a side has fewer than two examples. On
    the logit scale both ends stay within 0..1. Sources: DeLong, DeLong & Clarke-Pearson 1988
    (Biometrics 44), and for the computation by ranks Sun & Xu 2014 (IEEE Signal Process. Lett. 21).

    Args:
        inside: (N,) scores of in-distribution examples.
        outside: (M,) scores of out-of-distribution examples.
    """
    with extra("statistics"):
        from scipy.special import expit, logit
        from scipy.stats import norm, rankdata

    x, y = inside.double().numpy(), outside.double().numpy()
    n, m = len(x), len(y)
    ranks = rankdata([*x, *y])
    # For each example, compute the share of the other side that is ranked correctly against it.
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
