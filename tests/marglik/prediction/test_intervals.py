"""Intervals against definitions, exact coverages, plain loops and scipy's own; with controls."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from marglik.prediction.evaluation import compute_metrics, example_scores
from marglik.prediction.intervals import (
    area_interval,
    aurc,
    detection,
    differences,
    intervals,
    out_of_distribution_intervals,
    risk_interval,
    share_interval,
)
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import (
    classification_metrics,
    out_of_distribution_metrics,
    risk_by_coverage,
)

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


def ranked(num, decimals, seed=5):
    """Two-class probabilities whose confidences have ties at few decimals, and labels."""
    random = np.random.default_rng(seed)
    p = random.uniform(0.5, 1, num).round(decimals)
    return np.stack([p, 1 - p], 1), (random.random(num) > p).astype(int)


def aurc_of(p, y):
    return classification_metrics(torch.from_numpy(p), torch.from_numpy(y))["cls/AURC"]


def aurc_by_counts(p, y, counts, decimals=9):
    """Our AURC of each example as often as counts (B, N) say; groups by `decimals`."""
    levels = np.unique(p[:, 0].round(decimals))[::-1]
    members = (p[:, :1].round(decimals) == levels).astype(int)  # (N, G)
    harmonic = np.array([math.fsum(1 / k for k in range(1, n + 1)) for n in range(len(p) + 1)])
    resamples = zip(counts @ members, (counts * y) @ members, strict=True)
    return np.array([aurc(*resample, harmonic) for resample in resamples])


@pytest.mark.parametrize("decimals", [9, 1])
def test_risk_of_repeated_examples(decimals):
    """By counts as by the metric of the examples themselves, each as often as it was drawn."""
    p, y = ranked(150, decimals)
    rows = np.arange(150)
    drawn = [rows, *np.random.default_rng(6).choice(rows, (5, 150))]
    counts = np.stack([np.bincount(indices, minlength=150) for indices in drawn])
    found = aurc_by_counts(p, y, counts)
    expected = [aurc_of(p[indices], y[indices]) for indices in drawn]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert len({round(value, 4) for value in expected}) == 6
    if decimals == 1:  # the control: ties broken by the examples' order are another number
        order = np.argsort(-p[:, 0], kind="stable")
        in_order = (y[order].cumsum() / np.arange(1, 151)).mean()
        assert abs(in_order - expected[0]) > 1e-3
    else:  # the control: more ties than there are
        assert (abs(aurc_by_counts(p, y, counts, decimals=1) - expected) > 1e-4).all()


@pytest.mark.parametrize("ties", [False, True])
def test_detection_of_repeated_examples(ties):
    random = np.random.default_rng(7)
    sides = random.normal(0, 1, 90), random.normal(1.5, 1, 60)
    if ties:
        sides = [side.round() for side in sides]
    thresholds = np.unique(np.concatenate(sides))[::-1]
    every = [np.arange(len(side)) for side in sides]
    drawn = [every, *([random.choice(rows, len(rows)) for rows in every] for _ in range(5))]
    resamples = [[side[rows] for side, rows in zip(sides, one, strict=True)] for one in drawn]
    counts = [
        np.stack([(one[i][:, None] == thresholds).sum(0) for one in resamples]) for i in (0, 1)
    ]
    values = zip(*map(detection, *counts), strict=True)
    found = dict(zip(("ood/AUPR", "ood/FPR95"), values, strict=True))
    for i, one in enumerate(resamples):
        expected = out_of_distribution_metrics(*map(torch.from_numpy, one))
        for name, values in found.items():
            assert values[i] == pytest.approx(expected[name], abs=1e-12)
    if ties:  # the control: each example a threshold of its own, ours last
        scores, is_ood = np.concatenate(sides), np.repeat([0, 1], (90, 60))
        is_ood = is_ood[np.lexsort((-is_ood, -scores))]
        ungrouped = [[value] for value in detection(1 - is_ood, is_ood)]
        for values, (name, grouped) in zip(ungrouped, found.items(), strict=True):
            assert abs(values[0] - grouped[0]) > 1e-3, name


def test_percentiles_are_those_of_explicit_resamples():
    p, y = ranked(200, 2)
    random = np.random.default_rng(8)
    drawn = random.integers(200, size=(1000, 200))
    confidence, correct = torch.from_numpy(p[:, 0]), torch.from_numpy(y == 0)
    values = [risk_by_coverage(confidence[i], correct[i]).mean().item() for i in drawn]
    found = risk_interval(confidence, correct)
    assert found == risk_interval(confidence, correct)  # of one seed
    expected = np.percentile(values, [2.5, 97.5])
    width = expected[1] - expected[0]
    assert found == pytest.approx(tuple(expected), abs=0.08 * width)
    sides = torch.from_numpy(random.normal(0, 1, 80)), torch.from_numpy(random.normal(1, 1, 50))
    values = []
    for _ in range(250):
        one = [side[torch.from_numpy(random.integers(len(side), size=len(side)))] for side in sides]
        values.append(out_of_distribution_metrics(*one))
    ends = out_of_distribution_intervals(*sides)
    assert ends["ood/AUROC"] == area_interval(*sides)
    for name in ("ood/AUPR", "ood/FPR95"):
        expected = np.percentile([one[name] for one in values], [2.5, 97.5])
        width = expected[1] - expected[0]
        assert ends[name] == pytest.approx(tuple(expected), abs=0.15 * width), name


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr("marglik.prediction.intervals.RESAMPLES", 200)


def test_risk_holds_its_level(few_resamples):
    """Where P(error) = 1 − confidence is uniform on 0..1/2, the AURC is (N + 3) / (8 (N + 1)).

    On average: among the k most confident of N, P(error) is (k + 1) / (4 (N + 1)) in the mean.
    """
    ends = []
    for seed in range(100):
        p, y = ranked(200, 9, seed)
        ends.append(risk_interval(torch.from_numpy(p[:, 0]), torch.from_numpy(y == 0)))
    low, high = np.array(ends).T

    def held(truth):
        return ((low <= truth) & (truth <= high)).mean()

    assert 0.88 <= held(203 / 8 / 201) <= 0.99
    assert held(1 / 4) < 0.1  # the control: the error rate, as of confidences that say nothing


def test_detection_holds_its_level(few_resamples):
    """Of normal scores, AUPR by an integral over thresholds, and FPR95 in closed form."""
    N, M, shift = 200, 100, 2.0
    random = np.random.default_rng(10)
    found = [
        out_of_distribution_intervals(
            torch.from_numpy(random.normal(0, 1, N)), torch.from_numpy(random.normal(shift, 1, M))
        )
        for _ in range(100)
    ]

    def held(name, truth):
        return np.mean([one[name][0] <= truth <= one[name][1] for one in found])

    def precision_of(t):
        true, false = M * stats.norm.sf(t - shift), N * stats.norm.sf(t)
        return true / (true + false) * stats.norm.pdf(t - shift)

    aupr = integrate.quad(precision_of, -6, 9)[0]
    fpr95 = stats.norm.sf(shift + stats.norm.ppf(0.05))
    assert 0.88 <= held("ood/AUPR", aupr) <= 0.99
    assert 0.88 <= held("ood/FPR95", fpr95) <= 0.99
    # The controls: equal numbers on both sides; the threshold that flags 99 %.
    N = M
    assert held("ood/AUPR", integrate.quad(precision_of, -6, 9)[0]) < 0.5
    assert held("ood/FPR95", stats.norm.sf(shift + stats.norm.ppf(0.01))) < 0.5


def test_positions_of_a_sequence_are_drawn_together():
    p, y = ranked(150, 9)
    confidence, correct = torch.from_numpy(p[:, 0]), torch.from_numpy(y == 0)
    once = risk_interval(confidence, correct)
    repeated = confidence.repeat_interleave(9), correct.repeat_interleave(9)
    found = risk_interval(*repeated, positions=9)
    assert found == pytest.approx(once, abs=0.1 * np.diff(once).item())
    assert np.diff(risk_interval(*repeated)) / np.diff(once) == pytest.approx(1 / 3, rel=0.1)


def test_resamples_of_what_does_not_vary():
    right, one = torch.ones(9, dtype=torch.bool), torch.tensor([0.9])
    confidence = torch.linspace(0.5, 1, 9)
    assert risk_interval(confidence, right) is None and risk_interval(confidence, ~right) is None
    assert risk_interval(one, right[:1]) is None
    assert out_of_distribution_intervals(torch.tensor([0.0, 0.1]), torch.tensor([0.9, 1.0])) == {}
    assert out_of_distribution_intervals(one, torch.tensor([0.5, 1.0])) == {}
    with pytest.raises(ValueError, match="at least one example"):
        out_of_distribution_intervals(torch.zeros(0), torch.zeros(3))
    with pytest.raises(ValueError, match="expected numbers in"):
        risk_interval(confidence - 3, right)
