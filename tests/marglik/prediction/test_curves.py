"""Curves against hand-worked cases, plain loops, scikit-learn and scipy."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchmetrics.functional.classification import binary_calibration_error

from marglik.prediction.curves import (
    POINTS,
    calibration_error,
    coverage_curve,
    errors_by_class,
    reliability,
    risk_coverage_curve,
    roc_curve,
)
from marglik.prediction.metrics import classification_metrics, out_of_distribution_metrics


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def predictions(num, seed=0):
    """Confidences without ties and whether they are right: two in three, whatever they say."""
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.3 + 0.7 * torch.rand(num, generator=generator, dtype=torch.float64)
    return confidence, torch.rand(num, generator=generator, dtype=torch.float64) < 2 / 3


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "adaptive", "counts", "error"),
    [
        # Weights 2/5, 2/5, 1/5.
        ((0.1, 0.2, 0.9, 0.6, 0.55), (0, 1, 1, 1, 0), 4, False, [2, 0, 2, 1],
         (2 * 0.35 + 2 * 0.075 + 0.1) / 5),
        # Closed above, and the first below, too.
        ((0.0, 0.25, 0.5, 1.0), (1, 1, 1, 1), 4, False, [2, 1, 0, 1], 2.25 / 4),
        # A confidence of one shares the last bin; in bins of their own, the gaps do not cancel.
        ((0.95, 1.0), (1, 0), 2, False, [0, 2], 0.975 - 0.5),
        ((0.95, 1.0), (1, 0), 40, False, [0] * 37 + [1, 0, 1], (0.05 + 1.0) / 2),
        # A tie stays in one bin of equal mass, in whatever order the data comes.
        ((0.6, 0.7, 0.7, 0.7, 0.7, 0.9), (1, 0, 0, 1, 1, 1), 3, True, [5, 0, 1], (0.4 + 0.1) / 6),
        ((0.6, 0.7, 0.7, 0.7, 0.7, 0.9), (1, 1, 1, 0, 0, 1), 3, True, [5, 0, 1], (0.4 + 0.1) / 6),
        ((0.8,) * 4, (1, 0, 0, 0), 2, True, [4, 0], 0.8 - 0.25),
        ((1.0 + 1e-9,), (1,), 2, False, [0, 1], 0.0),  # rounding
    ],
)  # fmt: skip
def test_bins_by_hand(confidence, correct, num_bins, adaptive, counts, error):
    bins = reliability(tensor(*confidence), bools(*correct), num_bins, adaptive)
    assert bins["counts"] == counts and len(bins["edges"]) == num_bins + 1
    assert [mean is None for mean in bins["accuracy"]] == [n == 0 for n in counts]
    assert calibration_error(bins) == pytest.approx(error)
    assert json.loads(json.dumps(bins, allow_nan=False)) == bins


@pytest.mark.parametrize(("adaptive", "strategy"), [(False, "uniform"), (True, "quantile")])
def test_bins_are_those_of_scikit_learn_and_torchmetrics(adaptive, strategy):
    from sklearn.calibration import calibration_curve

    confidence, correct = predictions(300)  # 15 divides it, so that equal mass has one meaning
    bins = reliability(confidence, correct, adaptive=adaptive)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy=strategy)
    assert [c for c in bins["confidence"] if c is not None] == pytest.approx(list(mean))
    assert [a for a in bins["accuracy"] if a is not None] == pytest.approx(list(accuracy))
    counts = np.full(15, 20) if adaptive else np.histogram(confidence, 15, (0, 1))[0]
    assert bins["counts"] == list(counts)
    expected = (counts[counts > 0] / 300 * np.abs(accuracy - mean)).sum()
    assert calibration_error(bins) == pytest.approx(expected)
    of_torchmetrics = binary_calibration_error(confidence, correct.long(), n_bins=15).item()
    # Negative control: the other kind of bin gives another number.
    assert (calibration_error(bins) == pytest.approx(of_torchmetrics)) is not adaptive


@settings(deadline=None, max_examples=60)
@given(num=st.integers(1, 100), num_bins=st.integers(1, 20))
def test_sizes_of_equal_mass_differ_by_at_most_one(num, num_bins):
    confidence, correct = predictions(num)
    bins = reliability(confidence, correct, num_bins, adaptive=True)
    assert sum(bins["counts"]) == num and len(bins["counts"]) == num_bins
    assert max(bins["counts"]) - min(bins["counts"]) <= 1
    below = [(confidence <= edge).sum().item() for edge in bins["edges"][1:]]
    assert np.cumsum(bins["counts"]).tolist() == below


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "error", "message"),
    [
        (tensor(), bools(), 15, ValueError, r"\(0,\), .* at least one example"),
        (tensor(0.5), bools(1, 0), 15, ValueError, r"confidence \(1,\), correct \(2,\); expected"),
        (tensor(0.5), tensor(1.0), 15, TypeError, "torch.float64; expected bool"),
        (bools(1), bools(1), 15, TypeError, "confidence have dtype torch.bool"),
        (tensor(0.5, 1.2), bools(1, 1), 15, ValueError, "include 1.2"),
        (tensor(0.5, -0.1), bools(1, 1), 15, ValueError, "include -0.1"),
        (tensor(0.5, torch.nan), bools(1, 1), 15, ValueError, "include nan"),
        (tensor(0.5), bools(1), 0, ValueError, "num_bins .*not 0"),
    ],
)
def test_what_has_no_bins(confidence, correct, num_bins, error, message):
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
    for level, coverage in zip(curve["levels"], curve["coverage"], strict=True):
        low, high = stats.norm.interval(level, mean.numpy(), variance.sqrt().numpy())
        assert coverage == ((low <= targets.numpy()) & (targets.numpy() <= high)).mean()
        assert coverage == pytest.approx(level, abs=0.05)  # drawn from the predictive
    # Negative control: half the standard deviation covers far less than it promises.
    assert coverage_curve(mean, variance / 4, targets, (0.9,))["coverage"][0] < 0.7


def classified(num, classes=4, seed=0):
    random = np.random.default_rng(seed)
    f = random.normal(size=(num, classes))
    labels = (f + random.normal(size=f.shape)).argmax(1)
    return torch.softmax(torch.from_numpy(2 * f), dim=1), torch.from_numpy(labels)


def test_risk_by_loops():
    p, y = classified(60)
    found = risk_coverage_curve(p, y)
    order = np.argsort(-p.amax(1).numpy())
    wrong = (p.argmax(1) != y).numpy()[order]
    assert found["coverage"] == pytest.approx([k / 60 for k in range(1, 61)], abs=1e-6)
    expected = [wrong[:k].mean() for k in range(1, 61)]
    assert found["risk"] == pytest.approx(expected, abs=1e-6)
    aurc = classification_metrics(p, y)["cls/AURC"]
    assert np.mean(found["risk"]) == pytest.approx(aurc, abs=1e-6)
    backwards = [wrong[::-1][:k].mean() for k in range(1, 61)]
    assert found["risk"] != pytest.approx(backwards, abs=0.05)  # the control
    assert found["risk"][-1] == pytest.approx(wrong.mean(), abs=1e-6)


def test_long_curves_are_thinned():
    p, y = classified(5000)
    found = risk_coverage_curve(p, y)
    assert len(found["risk"]) == len(found["coverage"]) == POINTS
    assert found["coverage"][0] == pytest.approx(1 / 5000) and found["coverage"][-1] == 1
    aurc = classification_metrics(p, y)["cls/AURC"]
    assert np.trapezoid(found["risk"], found["coverage"]) == pytest.approx(aurc, abs=0.005)
    random = np.random.default_rng(1)
    sides = [torch.from_numpy(random.normal(mean, 1, 4000)) for mean in (0, 1)]
    curve = roc_curve(*sides)
    assert len(curve["fpr"]) == POINTS
    area = out_of_distribution_metrics(*sides)["ood/AUROC"]
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(area, abs=0.003)


def test_roc_by_thresholds():
    inside, outside = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.4, 0.6, 0.9])
    curve = roc_curve(inside, outside)
    points = set(zip(curve["fpr"], curve["tpr"], strict=True))
    expected = {
        (round(float((inside >= t).double().mean()), 6),
         round(float((outside >= t).double().mean()), 6))
        for t in (2.0, 0.9, 0.8, 0.6, 0.4, 0.1)
    }  # fmt: skip
    assert points <= expected and {(0, 0), (1, 1)} <= points
    area = out_of_distribution_metrics(inside, outside)["ood/AUROC"]
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(area, abs=1e-5)


def test_errors_by_loops():
    p, y = classified(80)
    found = errors_by_class(p, y)
    matrix = np.zeros((4, 4), int)
    for label, row in zip(y.tolist(), p, strict=True):
        matrix[label, int(row.argmax())] += 1
    assert found["confusion"] == matrix.tolist() and (matrix != matrix.T).any()
    assert found["counts"] == matrix.sum(1).tolist()
    assert found["right"] == matrix.diagonal().tolist()


def test_many_classes_have_no_matrix():
    p, y = classified(50, classes=21)
    found = errors_by_class(p, y)
    assert set(found) == {"counts", "right"} and len(found["counts"]) == 21
