"""Intervals against definitions, exact coverages, plain loops and scipy's own; with controls."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marglik.prediction.intervals import (
    area_interval,
    differences,
    intervals,
    of_examples,
    share_interval,
)
from marglik.prediction.metric_types import Metrics

Z = stats.norm.ppf(0.975)


def wilson_by_roots(k, n):
    """Where (k/n − p)² = z² p (1 − p) / n, as the method is defined."""

    def excess(p):
        return (k / n - p) ** 2 - Z**2 * p * (1 - p) / n

    beside = 1e-9  # k/n itself is a root where it is 0 or 1
    low = optimize.brentq(excess, 0, k / n - beside) if k else 0.0
    high = optimize.brentq(excess, k / n + beside, 1) if k < n else 1.0
    return low, high


@pytest.mark.parametrize(("k", "n"), [(0, 7), (349, 359), (12, 12)])
def test_shares_by_the_definition(k, n):
    assert share_interval(k, n) == pytest.approx(wilson_by_roots(k, n), abs=1e-9)


def scores_of(num=120, seed=0):
    """Scores of two networks that nearly agree, on the same examples."""
    random = np.random.default_rng(seed)
    nll, change = random.exponential(size=num), 0.02 * random.normal(size=num)
    right = (random.random(num) < 0.8).astype(float)
    return [
        Metrics(nll=torch.from_numpy(nll + c), accuracy=torch.from_numpy(right))
        for c in (0, change)
    ]


def student(values):
    return tuple(stats.ttest_1samp(np.asarray(values), 0).confidence_interval(0.95))


def test_means_and_shares():
    scores, _ = scores_of()
    found = intervals(scores)
    assert found.nll == pytest.approx(student(scores.nll))
    right = int(scores.accuracy.sum())
    assert found.accuracy == pytest.approx(wilson_by_roots(right, 120), abs=1e-9)
    squares = scores.nll.square()
    found = intervals(Metrics(rmse=squares)).rmse
    assert found == pytest.approx(tuple(np.sqrt(student(squares))))


def test_positions_and_outputs_of_an_example_are_not_independent():
    """Each position said 16 times: the interval stays, where that of positions alone shrinks."""
    scores, _ = scores_of()
    repeated = scores.nll.repeat_interleave(16)
    assert torch.allclose(of_examples(repeated, 16), scores.nll)
    assert torch.allclose(of_examples(repeated.view(120, 16)), scores.nll)
    width = np.diff(intervals(Metrics(nll=repeated)).nll) / np.diff(intervals(scores).nll)
    assert width == pytest.approx(0.25, rel=0.05)  # the control
    # Shares of outputs are means.
    shares = torch.rand(40)
    found = intervals(Metrics(accuracy=shares)).accuracy
    assert found == pytest.approx(student(shares), rel=1e-5)


def test_nothing_is_said_where_nothing_varies():
    sure = Metrics(nll=torch.zeros(4), accuracy=torch.ones(4))
    assert intervals(sure) == Metrics(accuracy=pytest.approx(wilson_by_roots(4, 4), abs=1e-9))
    assert intervals(Metrics(nll=torch.ones(1))) == Metrics()


def test_differences_are_paired():
    one, other = scores_of(200)
    found = differences(one, other)
    d = one.nll - other.nll
    assert found.nll == pytest.approx((float(d.mean()), *student(d)))
    unpaired = intervals(one).nll  # the control: side by side they say nothing
    assert np.diff(found.nll[1:]) < 0.2 * np.diff(unpaired)
    # The same by construction, as the accuracy under temperature scaling.
    assert found.accuracy == (0, 0, 0)


def test_paired_shares_by_counts():
    """Two images more of 359, as 97.21 against 96.66 %: no difference that is there for sure."""
    right, rival = torch.zeros(359), torch.zeros(359)
    right[:349], rival[:347] = 1, 1
    gained, lost = 3 / 361, 1 / 361
    half = Z * math.sqrt((gained + lost - (gained - lost) ** 2) / 361)
    found = differences(Metrics(accuracy=right), Metrics(accuracy=rival)).accuracy
    assert found == pytest.approx((2 / 359, gained - lost - half, gained - lost + half))
    assert found[1] < 0 < found[2]
    rival[:300] = 0  # the control: 302 images more
    assert differences(Metrics(accuracy=right), Metrics(accuracy=rival)).accuracy[1] > 0.7


@pytest.mark.parametrize("ties", [False, True])
def test_area_by_loops(ties):
    """AUROC and its variance from every pair."""
    random = np.random.default_rng(3)
    inside, outside = random.normal(0, 1, 40), random.normal(1.5, 2, 25)
    if ties:
        inside, outside = inside.round(), outside.round()
    wins = (outside > inside[:, None]) + 0.5 * (outside == inside[:, None])  # (N, M)
    area, parts = wins.mean(), [np.var(wins.mean(i), ddof=1) / wins.shape[1 - i] for i in (0, 1)]

    def ends(variance):
        half = Z * math.sqrt(variance) / (area * (1 - area))
        return tuple(1 / (1 + math.exp(-(math.log(area / (1 - area)) + s * half))) for s in (-1, 1))

    found = area_interval(torch.from_numpy(inside), torch.from_numpy(outside))
    assert found == pytest.approx(ends(sum(parts)))
    for part in parts:  # the control: neither side's variance is enough
        assert found != pytest.approx(ends(part), rel=1e-3)
