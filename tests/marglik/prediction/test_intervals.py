"""Intervals against definitions, exact coverages, plain loops and scipy's own; with controls."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marglik.prediction.evaluation import compute_metrics, example_scores
from marglik.prediction.intervals import (
    area_interval,
    differences,
    intervals,
    share_interval,
)
from marglik.prediction.links import Prediction

Z = stats.norm.ppf(0.975)


def wilson_by_roots(k, n):
    """Where (k/n − p)² = z² p (1 − p) / n, as the method is defined."""

    def excess(p):
        return (k / n - p) ** 2 - Z**2 * p * (1 - p) / n

    beside = 1e-9  # k/n itself is a root where it is 0 or 1
    low = optimize.brentq(excess, 0, k / n - beside) if k else 0.0
    high = optimize.brentq(excess, k / n + beside, 1) if k < n else 1.0
    return low, high


@pytest.mark.parametrize(("k", "n"), [(0, 7), (1, 9), (349, 359), (347, 359), (12, 12), (1, 1)])
def test_shares_by_the_definition(k, n):
    assert share_interval(k, n) == pytest.approx(wilson_by_roots(k, n), abs=1e-9)


def covered(p, n, interval):
    """Exact probability that the interval of a share holds the truth."""
    ks = np.arange(n + 1)
    inside = [low <= p <= high for low, high in (interval(int(k), n) for k in ks)]
    return stats.binom.pmf(ks, n, p)[inside].sum()


def test_shares_hold_their_level():
    def plain(k, n):  # the control: k/n ± z √(k/n (1 − k/n) / n)
        half = Z * math.sqrt(k / n * (1 - k / n) / n)
        return k / n - half, k / n + half

    for p, n in ((0.98, 50), (0.9, 100), (0.5, 30)):
        assert 0.92 < covered(p, n, share_interval) < 0.99
    assert covered(0.98, 50, plain) < 0.65


def classified(num=120, classes=4, seed=0, sharpness=2.0):
    random = np.random.default_rng(seed)
    f = random.normal(size=(num, classes))
    labels = (f + random.normal(size=f.shape)).argmax(1)
    p = torch.softmax(torch.from_numpy(sharpness * f), dim=1)
    return Prediction(p, torch.zeros(num), torch.zeros(num)), torch.from_numpy(labels)


def test_means_are_those_of_scipy():
    prediction, labels = classified()
    found = intervals(example_scores(prediction, labels, "classification"))
    p, y = prediction.mean.numpy(), labels.numpy()
    rows = np.arange(len(y))
    nll = -np.log(p[rows, y])
    brier = ((p - np.eye(4)[y]) ** 2).sum(1)
    for name, values in (("cls/NLL", nll), ("cls/Brier", brier)):
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert found[name] == pytest.approx(tuple(expected))
    k = int((p.argmax(1) == y).sum())
    assert found["cls/accuracy"] == pytest.approx(wilson_by_roots(k, len(y)), abs=1e-9)
    assert set(found) == {"cls/NLL", "cls/Brier", "cls/accuracy"}
    metrics = compute_metrics(prediction, labels, "classification")
    assert all(low < metrics[name] < high for name, (low, high) in found.items())


def test_positions_of_a_sequence_are_not_independent():
    """Each position said 16 times: the interval stays, where that of positions alone shrinks."""
    prediction, labels = classified(60)
    scores = example_scores(prediction, labels, "classification")
    repeated = {name: values.repeat_interleave(16) for name, values in scores.items()}
    once = intervals(scores)
    found = intervals(repeated, positions=16)
    assert found == {name: pytest.approx(ends) for name, ends in once.items()}
    width = np.diff(intervals(repeated)["cls/NLL"]) / np.diff(once["cls/NLL"])
    assert width == pytest.approx(0.25, rel=0.05)  # the control


def test_outputs_of_an_example_are_averaged_first():
    random = np.random.default_rng(1)
    p, y = random.random((80, 3)), random.integers(2, size=(80, 3))
    prediction = Prediction(torch.from_numpy(p), torch.zeros(80, 3), torch.zeros(80, 3))
    found = intervals(example_scores(prediction, torch.from_numpy(y), "bernoulli"))
    shares = ((p > 0.5) == (y == 1)).mean(1)
    assert found["cls/accuracy"] == pytest.approx(
        tuple(stats.ttest_1samp(shares, 0).confidence_interval(0.95))
    )


def test_regression():
    random = np.random.default_rng(2)
    targets = torch.from_numpy(random.normal(size=(90, 1)))
    zero, one = torch.zeros_like(targets), torch.ones_like(targets)
    found = intervals(example_scores(Prediction(zero, one, zero), targets, "regression"))
    squares = targets.numpy()[:, 0] ** 2
    expected = stats.ttest_1samp(squares, 0).confidence_interval(0.95)
    assert found["reg/RMSE"] == pytest.approx(tuple(np.sqrt(expected)))
    k = int((np.sqrt(squares) <= stats.norm.ppf(0.95)).sum())
    assert found["cal/coverage90"] == pytest.approx(wilson_by_roots(k, 90), abs=1e-9)


def test_nothing_is_said_where_nothing_varies():
    prediction, _ = classified(5)
    sure = Prediction(torch.eye(4).double(), torch.zeros(4), torch.zeros(4))
    found = intervals(example_scores(sure, torch.arange(4), "classification"))
    assert set(found) == {"cls/accuracy"} and found["cls/accuracy"][1] == 1
    one = Prediction(prediction.mean[:1], torch.zeros(1), torch.zeros(1))
    found = intervals(example_scores(one, torch.tensor([0]), "classification"))
    assert set(found) == {"cls/accuracy"}


def test_differences_are_paired():
    first, labels = classified(200, sharpness=2.0)
    second = Prediction(classified(200, sharpness=2.2)[0].mean, *[torch.zeros(200)] * 2)
    one, other = (example_scores(p, labels, "classification") for p in (first, second))
    found = differences(one, other)
    d = (one["cls/NLL"] - other["cls/NLL"]).numpy()
    expected = stats.ttest_rel(one["cls/NLL"].numpy(), other["cls/NLL"].numpy())
    ends = expected.confidence_interval(0.95)
    assert found["cls/NLL"] == pytest.approx((d.mean(), *ends))
    unpaired = intervals(one)["cls/NLL"]  # the control: side by side they say nothing
    assert np.diff(found["cls/NLL"][1:]) < 0.2 * np.diff(unpaired)


def test_what_is_the_same_by_construction_differs_by_exactly_nothing():
    """Temperature scaling changes no prediction's class: its accuracy is the MAP's."""
    prediction, labels = classified(200)
    p = torch.softmax(prediction.mean.log() / 3, 1)
    one, other = (
        example_scores(Prediction(mean, *[torch.zeros(200)] * 2), labels, "classification")
        for mean in (prediction.mean, p)
    )
    found = differences(other, one)
    assert found["cls/accuracy"] == (0, 0, 0)
    assert found["cls/NLL"][2] - found["cls/NLL"][1] > 0.1  # the control
    assert differences(one, one) == dict.fromkeys(one, (0, 0, 0))


def test_paired_shares_by_counts():
    """Two images more of 359, as 97.21 against 96.66 %: no difference that is there for sure."""
    right, rival = torch.zeros(359), torch.zeros(359)
    right[:349], rival[:347] = 1, 1
    gained, lost = 3 / 361, 1 / 361
    half = Z * math.sqrt((gained + lost - (gained - lost) ** 2) / 361)
    found = differences({"cls/accuracy": right}, {"cls/accuracy": rival})["cls/accuracy"]
    assert found == pytest.approx((2 / 359, gained - lost - half, gained - lost + half))
    assert found[1] < 0 < found[2]
    rival[:300] = 0  # the control: 302 images more
    assert differences({"cls/accuracy": right}, {"cls/accuracy": rival})["cls/accuracy"][1] > 0.7


def delong_by_loops(inside, outside):
    """AUROC and its variance from every pair."""

    def wins(x, y):
        return 1.0 if y > x else 0.5 if y == x else 0.0

    of_outside = [np.mean([wins(x, y) for x in inside]) for y in outside]
    of_inside = [np.mean([wins(x, y) for y in outside]) for x in inside]
    parts = np.var(of_inside, ddof=1) / len(inside), np.var(of_outside, ddof=1) / len(outside)
    return np.mean(of_outside), parts


@pytest.mark.parametrize("ties", [False, True])
def test_area_by_loops(ties):
    random = np.random.default_rng(3)
    inside, outside = random.normal(0, 1, 40), random.normal(1.5, 2, 25)
    if ties:
        inside, outside = inside.round(), outside.round()
    found = area_interval(torch.from_numpy(inside), torch.from_numpy(outside))
    area, parts = delong_by_loops(inside, outside)

    def ends(variance):
        half = Z * math.sqrt(variance) / (area * (1 - area))
        return tuple(1 / (1 + math.exp(-(math.log(area / (1 - area)) + s * half))) for s in (-1, 1))

    assert found == pytest.approx(ends(sum(parts)))
    for part in parts:  # the control: neither side's variance is enough
        assert found != pytest.approx(ends(part), rel=1e-3)


def test_area_holds_its_level():
    """Of normal scores the AUROC is known: Φ(1.2 / √2)."""
    random = np.random.default_rng(4)
    truth = stats.norm.cdf(1.2 / math.sqrt(2))
    hits = []
    for _ in range(400):
        sides = random.normal(0, 1, 60), random.normal(1.2, 1, 50)
        low, high = area_interval(*map(torch.from_numpy, sides))
        hits.append(low <= truth <= high)
    assert 0.92 < np.mean(hits) < 0.98


def test_area_without_an_interval():
    for inside, outside in itertools.product(([0.0, 0.1], [0.5]), ([0.9, 1.0],)):
        assert area_interval(torch.tensor(inside), torch.tensor(outside)) is None
    with pytest.raises(ValueError, match="at least one example"):
        area_interval(torch.zeros(0), torch.zeros(3))
