"""Reliability bins and coverage curves against hand-worked cases, scikit-learn and scipy."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchmetrics.functional.classification import binary_calibration_error

from marglik.prediction.reliability import coverage_curve, reliability


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def predictions(num, seed=0):
    """Confidences without ties and whether they are right: two in three, whatever they say."""
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.3 + 0.7 * torch.rand(num, generator=generator, dtype=torch.float64)
    correct = torch.rand(num, generator=generator, dtype=torch.float64) < 2 / 3
    assert len(confidence.unique()) == num
    return confidence, correct


def same(a, b):
    """Whether two are equal up to the order of summation."""
    return a.edges == b.edges and a.counts == b.counts and all(
        x == pytest.approx(y, abs=1e-12)
        for x, y in zip(a.confidence + a.accuracy, b.confidence + b.accuracy, strict=True)
    )  # fmt: skip


def test_bins_by_hand():
    bins = reliability(tensor(0.1, 0.2, 0.9, 0.6, 0.55), bools(0, 1, 1, 1, 0), num_bins=4)
    assert bins.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert bins.counts == (2, 0, 2, 1)
    assert bins.confidence == pytest.approx((0.15, None, 0.575, 0.9))
    assert bins.accuracy == (0.5, None, 0.5, 1.0)
    # Weights 2/5, 2/5, 1/5.
    assert bins.ece == pytest.approx((2 * 0.35 + 2 * 0.075 + 0.1) / 5)


def test_bins_are_closed_above_and_the_first_below_too():
    bins = reliability(tensor(0.0, 0.25, 0.5, 1.0), bools(1, 1, 1, 1), num_bins=4)
    assert bins.counts == (2, 1, 0, 1)


def test_a_confidence_of_one_shares_the_last_bin():
    confidence, correct = tensor(0.95, 1.0), bools(1, 0)
    bins = reliability(confidence, correct)
    assert bins.counts[-1] == 2
    assert bins.ece == pytest.approx(0.975 - 0.5)
    # Negative control: in bins of their own, the gaps do not cancel.
    assert reliability(confidence, correct, num_bins=40).ece == pytest.approx((0.05 + 1.0) / 2)


def test_rounding_above_one_counts_as_one():
    bins = reliability(torch.tensor([1.0000001]), bools(1))
    assert bins.counts[-1] == 1 and bins.confidence[-1] == 1.0


@pytest.mark.parametrize(("adaptive", "strategy"), [(False, "uniform"), (True, "quantile")])
def test_bins_are_those_of_scikit_learn(adaptive, strategy):
    from sklearn.calibration import calibration_curve

    confidence, correct = predictions(300)  # 15 divides it, so that equal mass has one meaning
    bins = reliability(confidence, correct, adaptive=adaptive)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy=strategy)
    assert [c for c in bins.confidence if c is not None] == pytest.approx(list(mean))
    assert [a for a in bins.accuracy if a is not None] == pytest.approx(list(accuracy))
    counts = np.full(15, 20) if adaptive else np.histogram(confidence, 15, (0, 1))[0]
    assert list(bins.counts) == list(counts)
    expected = (counts[counts > 0] / 300 * np.abs(accuracy - mean)).sum()
    assert bins.ece == pytest.approx(expected)
    # Negative control: the other kind of bin gives another number.
    assert reliability(confidence, correct, adaptive=not adaptive).ece != pytest.approx(expected)


def test_error_is_that_of_torchmetrics_below_one():
    confidence, correct = predictions(200)
    expected = binary_calibration_error(confidence, correct.long(), n_bins=15).item()
    assert reliability(confidence, correct).ece == pytest.approx(expected)
    assert reliability(confidence, ~correct).ece > 1.1 * expected


@settings(deadline=None, max_examples=60)
@given(num=st.integers(1, 100), num_bins=st.integers(1, 20))
def test_sizes_of_equal_mass_differ_by_at_most_one(num, num_bins):
    confidence, correct = predictions(num)
    bins = reliability(confidence, correct, num_bins, adaptive=True)
    assert sum(bins.counts) == num and len(bins.counts) == num_bins
    assert max(bins.counts) - min(bins.counts) <= 1
    assert bins.edges[0] == confidence.min() and bins.edges[-1] == confidence.max()
    assert bins.edges == tuple(sorted(bins.edges))
    below = [(confidence <= edge).sum().item() for edge in bins.edges[1:]]
    assert np.cumsum(bins.counts).tolist() == below


def test_a_tie_stays_in_one_bin_of_equal_mass():
    confidence = tensor(0.6, 0.7, 0.7, 0.7, 0.7, 0.9)
    bins = reliability(confidence, bools(1, 0, 0, 1, 1, 1), num_bins=3, adaptive=True)
    assert bins.edges == (0.6, 0.7, 0.7, 0.9)
    assert bins.counts == (5, 0, 1)
    expected = (abs(3 - 3.4) + 0.1) / 6
    assert bins.ece == pytest.approx(expected)
    # The same examples in another order, where bins of two in the order of the data would differ.
    other = reliability(confidence, bools(1, 1, 1, 0, 0, 1), num_bins=3, adaptive=True)
    assert other.ece == pytest.approx(expected)
    by_order = [
        sum(abs(c - 2 * a) for c, a in ((1.3, x / 2), (1.4, y / 2), (1.6, z / 2))) / 6
        for x, y, z in ((1, 1, 2), (2, 1, 1))
    ]
    assert by_order[0] != pytest.approx(by_order[1])


@pytest.mark.parametrize("adaptive", [False, True])
def test_one_confidence_for_all_is_one_bin(adaptive):
    bins = reliability(torch.full((40,), 0.8), torch.arange(40) < 10, adaptive=adaptive)
    assert sorted(bins.counts) == [0] * 14 + [40]
    assert bins.ece == pytest.approx(0.8 - 0.25)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), adaptive=st.booleans())
def test_the_order_of_the_data_decides_nothing(data, adaptive):
    pairs = st.tuples(st.sampled_from([0.2, 0.5, 0.6, 0.95, 1.0]), st.booleans())
    drawn = data.draw(st.lists(pairs, min_size=1, max_size=40))
    shuffled = data.draw(st.permutations(drawn))
    one, other = (
        reliability(tensor(*(c for c, _ in x)), bools(*(y for _, y in x)), 5, adaptive)
        for x in (drawn, shuffled)
    )
    assert same(one, other)


def test_json_has_null_for_empty_bins():
    bins = reliability(tensor(0.9, 0.1), bools(1, 0), num_bins=3)
    assert json.loads(json.dumps(bins.to_json(), allow_nan=False)) == {
        "edges": pytest.approx([0.0, 1 / 3, 2 / 3, 1.0]),
        "counts": [1, 0, 1],
        "confidence": [0.1, None, 0.9],
        "accuracy": [0.0, None, 1.0],
    }


def test_reliability_is_frozen():
    bins = reliability(tensor(0.9), bools(1))
    with pytest.raises(FrozenInstanceError):
        bins.counts = (2,)  # pyright: ignore


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "error", "message"),
    [
        (tensor(), bools(), 15, ValueError, r"confidence has shape \(0,\): there is nothing"),
        (tensor(0.5), bools(1, 0), 15, ValueError, r"confidence \(1,\), correct \(2,\); expected"),
        (tensor(0.5), tensor(1.0), 15, TypeError, "correct has dtype torch.float64; expected bool"),
        (bools(1), bools(1), 15, TypeError, "confidence have dtype torch.bool"),
        (tensor(0.5, 1.2), bools(1, 1), 15, ValueError, r"include 1.2; expected numbers in \[0"),
        (tensor(0.5, -0.1), bools(1, 1), 15, ValueError, "include -0.1"),
        (tensor(0.5, torch.nan), bools(1, 1), 15, ValueError, "include nan"),
        (tensor(0.5), bools(1), 0, ValueError, "num_bins must be at least 1, not 0"),
    ],
)
def test_errors(confidence, correct, num_bins, error, message):
    with pytest.raises(error, match=message):
        reliability(confidence, correct, num_bins)


def test_coverage_by_hand():
    """Φ⁻¹(0.75) = 0.674, Φ⁻¹(0.975) = 1.96 standard deviations."""
    mean, variance = torch.zeros(2, 2), torch.full((2, 2), 4.0)
    targets = torch.tensor([[1.3, -1.4], [3.8, -4.0]])  # 0.65, 0.7, 1.9 and 2 of them
    curve = coverage_curve(mean, variance, targets, levels=(0.5, 0.95))
    assert curve == {"levels": [0.5, 0.95], "coverage": [0.25, 0.75], "count": 4}


def test_coverage_is_that_of_scipy_intervals():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    variance = 0.1 + torch.rand(500, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    targets = mean + variance.sqrt() * noise
    curve = coverage_curve(mean, variance, targets)
    assert curve["levels"] == pytest.approx([0.05 * k for k in range(1, 20)])
    for level, coverage in zip(curve["levels"], curve["coverage"], strict=True):
        low, high = stats.norm.interval(level, mean.numpy(), variance.sqrt().numpy())
        inside = (low <= targets.numpy()) & (targets.numpy() <= high)
        assert coverage == inside.mean()
        assert coverage == pytest.approx(level, abs=0.05)  # drawn from the predictive
    # Negative control: half the standard deviation covers far less than it promises.
    overconfident = coverage_curve(mean, variance / 4, targets, (0.9,))["coverage"][0]
    assert overconfident < 0.7
    order = torch.randperm(500, generator=generator)
    assert coverage_curve(mean[order], variance[order], targets[order]) == curve


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_levels_lie_between_zero_and_one(level):
    ones = torch.ones(2, 1)
    with pytest.raises(ValueError, match=f"levels include {level}; expected numbers between 0 and"):
        coverage_curve(ones, ones, ones, (0.5, level))
