"""Metrics and curves against hand-worked cases, loops and other libraries; wrong inputs."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_calibration_error,
)

from marglik.application.records import to_json
from marglik.prediction.links import Prediction
from marglik.prediction.metric_types import Metrics
from marglik.prediction.metrics import (
    POINTS,
    _bins,
    _calibration_error,
    compute_metrics,
    confidence_threshold,
    confusion_matrix,
    out_of_distribution_metrics,
    reliability_curve,
    risk_coverage_curve,
    roc_curve,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def of(mean, variance=None):
    """A prediction; half of a variance is noise."""
    part = torch.zeros(len(mean)) if variance is None else variance / 2
    return Prediction(mean, part, part)


def classification(p, y):
    return compute_metrics(of(p), y, "classification")


def bernoulli(p, y):
    return compute_metrics(of(p), y, "bernoulli")


def regression(mean, variance, y):
    return compute_metrics(of(mean, variance), y, "regression")


def classified(num=300, classes=4, seed=0):
    """Class probabilities without ties, and labels that they predict better than chance."""
    random = np.random.default_rng(seed)
    f = random.normal(size=(num, classes))
    labels = (f + random.normal(size=f.shape)).argmax(1)
    return torch.softmax(torch.from_numpy(2 * f), dim=1), torch.from_numpy(labels)


def two_classes(confidence, correct):
    """Probabilities of two classes with these top probabilities, and labels they get right."""
    p = tensor(*confidence)
    return torch.stack([p, 1 - p], dim=1), torch.tensor([0 if right else 1 for right in correct])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_impossible_label_costs_the_smallest_number_of_the_dtype(dtype):
    tiny = -math.log(torch.finfo(dtype).tiny)
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    metrics = classification(p, torch.tensor([1, 0]))
    assert metrics.nll == pytest.approx((tiny + math.log(2)) / 2)
    assert metrics.brier == pytest.approx((2.0 + 0.5) / 2)  # 2 is the worst there is
    for target in (0, 1):
        p = torch.tensor([[1.0 - target]], dtype=dtype)
        assert bernoulli(p, torch.tensor([[target]])).nll == pytest.approx(tiny)


def test_classification_is_that_of_scikit_learn_and_torchmetrics():
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

    p, y = classified()
    metrics = classification(p, y)
    per_class = [brier_score_loss(y == c, p[:, c]) for c in range(4)]
    assert metrics.nll == pytest.approx(log_loss(y, p))
    assert metrics.accuracy == pytest.approx(accuracy_score(y, p.argmax(dim=1)))
    assert metrics.brier == pytest.approx(sum(per_class))
    of_torchmetrics = multiclass_calibration_error(p, y, 4, n_bins=15).item()
    assert metrics.ece == pytest.approx(of_torchmetrics, abs=1e-6)
    # Negative control: with the labels of other examples everything is worse.
    for (name, wrong), (_, right) in zip(
        classification(p, y.roll(1)).items(), metrics.items(), strict=True
    ):
        is_worse = wrong < 0.9 * right if "acc" in name else wrong > 1.1 * right
        assert is_worse, name


def test_risk_coverage_with_ties_is_the_mean_over_their_orders():
    confidence = [0.9, 0.7, 0.7, 0.7, 0.6, 0.6]
    correct = [False, True, False, False, True, False]
    areas = [
        np.mean([1 - np.mean([correct[i] for i in order[:k]]) for k in range(1, 7)])
        for order in itertools.permutations(range(6))
        if all(confidence[i] >= confidence[j] for i, j in itertools.pairwise(order))
    ]
    assert len(areas) == math.factorial(3) * math.factorial(2)
    found = classification(*two_classes(confidence, correct)).aurc
    assert found == pytest.approx(np.mean(areas))
    assert max(areas) - min(areas) > 0.1  # one order of the data would not do


def test_bernoulli_by_hand_and_as_two_classes():
    p = tensor([0.8, 0.3], [0.6, 0.1])
    of_two_outputs = bernoulli(p, tensor([1, 0], [0, 1]))
    # The sum over outputs of an example, the mean over examples.
    assert of_two_outputs.nll == pytest.approx(-math.log(0.8 * 0.7 * 0.4 * 0.1) / 2)
    p, y = classified(classes=2)
    as_classes = classification(p, y)
    as_classes = replace(as_classes, aurc=None)
    as_classes |= Metrics(brier=as_classes.brier / 2)  # each error was counted for both classes
    found = bernoulli(p[:, 1:], y[:, None])
    assert to_json(found) == pytest.approx(to_json(as_classes))


def test_regression_by_hand():
    mean, variance = tensor([0.0, 1.0], [2.0, 3.0]), tensor([1.0, 4.0], [1.0, 1.0])
    targets = tensor([0.5, 5.0], [2.0, 4.8])  # 0.5, 2, 0 and 1.8 standard deviations away
    squares = 0.25 + 4 + 0 + 1.8**2
    assert regression(mean, variance, targets) == Metrics(
        nll=pytest.approx((squares + math.log(4) + 4 * math.log(2 * math.pi)) / 2 / 2),
        rmse=pytest.approx(math.sqrt((0.25 + 16 + 0 + 1.8**2) / 4)),
        coverage50=0.5,  # 0.674
        coverage90=0.5,  # 1.645
        coverage95=0.75,  # 1.960
    )


def test_coverage_is_that_of_scipy_intervals():
    generator = torch.Generator().manual_seed(0)
    mean, noise = (torch.randn(500, 2, generator=generator, dtype=torch.float64) for _ in "mn")
    variance = 0.1 + torch.rand(500, 2, generator=generator, dtype=torch.float64)
    targets = mean + variance.sqrt() * noise
    curve = reliability_curve(of(mean, variance), targets, "regression")
    assert curve.count == 1000
    for level, coverage in zip(curve.levels, curve.coverage, strict=True):
        low, high = stats.norm.interval(level, mean.numpy(), variance.sqrt().numpy())
        assert coverage == ((low <= targets.numpy()) & (targets.numpy() <= high)).mean()
        assert coverage == pytest.approx(level, abs=0.05)  # drawn from the predictive
    # Negative control: half the standard deviation covers far less than it promises.
    narrow = regression(mean, variance / 4, targets)
    assert narrow.coverage90 < 0.7


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "counts", "error"),
    [
        # Weights 2/5, 2/5, 1/5.
        ((0.1, 0.2, 0.9, 0.6, 0.55), (0, 1, 1, 1, 0), 4, [2, 0, 2, 1],
         (2 * 0.35 + 2 * 0.075 + 0.1) / 5),
        # Closed above, and the first below, too.
        ((0.0, 0.25, 0.5, 1.0), (1, 1, 1, 1), 4, [2, 1, 0, 1], 2.25 / 4),
        # A confidence of one shares the last bin; in bins of their own, the gaps do not cancel.
        ((0.95, 1.0), (1, 0), 2, [0, 2], 0.975 - 0.5),
        ((0.95, 1.0), (1, 0), 40, [0] * 37 + [1, 0, 1], (0.05 + 1.0) / 2),
    ],
)  # fmt: skip
def test_bins_by_hand(confidence, correct, num_bins, counts, error):
    bins = _bins(tensor(*confidence), torch.tensor(correct).bool(), num_bins)
    assert bins.counts == counts and len(bins.edges) == num_bins + 1
    assert [mean is None for mean in bins.accuracy] == [n == 0 for n in counts]
    assert _calibration_error(bins) == pytest.approx(error)


def test_risk_and_errors_by_loops():
    p, y = classified(60)
    found = risk_coverage_curve(p, y)
    wrong = (p.argmax(1) != y).numpy()[np.argsort(-p.amax(1).numpy())]
    assert found.x == pytest.approx([k / 60 for k in range(1, 61)], abs=1e-6)
    assert found.y == pytest.approx([wrong[:k].mean() for k in range(1, 61)], abs=1e-6)
    assert np.mean(found.y) == pytest.approx(classification(p, y).aurc, abs=1e-6)
    matrix = np.zeros((4, 4), int)
    for label, row in zip(y.tolist(), p, strict=True):
        matrix[label, int(row.argmax())] += 1
    assert confusion_matrix(p, y) == matrix.tolist() and (matrix != matrix.T).any()
    assert confusion_matrix(*classified(50, classes=21)) is None


def test_long_curves_are_thinned():
    p, y = classified(5000)
    found = risk_coverage_curve(p, y)
    assert len(found.y) == len(found.x) == POINTS
    assert found.x[0] == pytest.approx(1 / 5000) and found.x[-1] == 1
    aurc = classification(p, y).aurc
    assert np.trapezoid(found.y, found.x) == pytest.approx(aurc, abs=0.005)
    random = np.random.default_rng(1)
    sides = [torch.from_numpy(random.normal(mean, 1, 4000)) for mean in (0, 1)]
    curve = roc_curve(*sides)
    assert len(curve.x) == POINTS
    area = out_of_distribution_metrics(*sides).auroc
    assert np.trapezoid(curve.y, curve.x) == pytest.approx(area, abs=0.003)


def test_out_of_distribution_by_hand():
    assert out_of_distribution_metrics(tensor(1, 2, 3, 4), tensor(3.5, 5)) == Metrics(
        auroc=pytest.approx(7 / 8),  # 3.5 beats three of four, 5 all of them
        aupr=pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3),
        fpr95=0.25,  # 4 >= 3.5
    )
    # Exactly 95 % are enough: of 20, the 19 highest; the lowest lies below everything inside.
    outside = torch.arange(20) + 100
    outside[0] = -1
    assert out_of_distribution_metrics(torch.arange(10), outside).fpr95 == 0
    assert out_of_distribution_metrics(torch.arange(10), outside[:19]).fpr95 == 1
    # A straight curve could be drawn by its ends, but the first threshold counts.
    x = torch.arange(100)
    assert out_of_distribution_metrics(x, x).fpr95 == 0.95


@settings(deadline=None, max_examples=30)
@given(
    inside=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    outside=st.lists(st.integers(4, 16), min_size=1, max_size=30),
)
def test_out_of_distribution_is_that_of_torchmetrics(inside, outside):
    """Scores in [0, 1], with ties."""
    one, other = tensor(*inside) / 16, tensor(*outside) / 16
    metrics = out_of_distribution_metrics(one, other)
    scores = torch.cat([one, other])
    labels = torch.cat([torch.zeros(len(one)), torch.ones(len(other))]).long()
    assert metrics.auroc == pytest.approx(binary_auroc(scores, labels).item(), abs=1e-6)
    precision = binary_average_precision(scores, labels).item()
    assert metrics.aupr == pytest.approx(precision, abs=1e-6)


def half(*shape):
    return torch.full(shape, 0.5)


WRONG = [
    (classification, (half(0, 3), torch.zeros(0).long()), ValueError, "at least one example"),
    (classification, (half(2, 2), torch.tensor([0, 11])), ValueError, "include 11; .* 0 to 1"),
    (classification, (half(2, 2), half(2)), TypeError, "float32. .* class indices"),
    (classification, (half(2, 2), torch.tensor([0])), ValueError, r"\(2, 2\), targets \(1,\)"),
    (classification, (torch.tensor([[3.0, -2.0]]), torch.tensor([0])), ValueError, "include 3; "),
    (bernoulli, (half(1, 2), 0.6 * half(1, 2)), ValueError, "include 0.3; expected 0 or 1"),
    (regression, (half(1, 1), 0 * half(1, 1), half(1, 1)), ValueError, "include 0; .* positive"),
    (regression, (torch.nan * half(1, 1), half(1, 1), half(1, 1)), ValueError, "means .* nan"),
    (out_of_distribution_metrics, (half(0), half(2)), ValueError, r"inside has shape \(0,\)"),
    (out_of_distribution_metrics, (half(2), torch.nan * half(2)), ValueError, "outside .* nan"),
]


@pytest.mark.parametrize(("metrics", "given", "error", "message"), WRONG)
def test_wrong_inputs_are_named(metrics, given, error, message):
    with pytest.raises(error, match=message):
        metrics(*given)


def test_confidence_threshold_keeps_its_promise():
    """P(right|confidence c) is c, of density 2c: the threshold of the data alone breaks it."""
    generator = torch.Generator().manual_seed(0)
    broken = {"ours": 0, "empirical": 0}
    for _ in range(200):
        c = torch.rand(2000, generator=generator).sqrt()
        right = torch.rand(2000, generator=generator) < c
        ours = confidence_threshold(c, right, risk=0.1, level=0.9)
        risks = (~right[c.argsort(descending=True)]).cumsum(0) / torch.arange(1, 2001)
        last = int((risks <= 0.1).nonzero().max())
        empirical = c.sort(descending=True).values[last].item()
        assert empirical <= ours < 0.95  # a fifth of the answers at least
        for name, t in (("ours", ours), ("empirical", empirical)):
            broken[name] += 1 - 2 / 3 * (1 - t**3) / (1 - t**2) > 0.1
    assert broken["ours"] <= 20 and broken["empirical"] > 80, broken


def test_confidence_threshold_by_hand():
    """Without a mistake log(1 - level) / log(1 - risk) answers are asked for: 22, of 1 % 230."""
    c = torch.linspace(1, 0.5, 500)
    right = torch.ones(500, dtype=torch.bool)
    assert confidence_threshold(c, right, risk=0.01, level=0.9) == 0.5
    assert confidence_threshold(c[:22], right[:22], risk=0.1, level=0.9) == c[21].item()
    assert confidence_threshold(c[:21], right[:21], risk=0.1, level=0.9) == math.inf
    assert confidence_threshold(c, ~right, risk=0.5, level=0.9) == math.inf
    for wrong in (
        {"risk": 5.0},
        {"level": 1.0},
        {"right": right[1:]},
        {"right": right.long()},
        {"confidence": c * math.nan},
    ):
        with pytest.raises(ValueError, match=r"between 0 and 1|one boolean"):
            confidence_threshold(**{"confidence": c, "right": right} | wrong)
    # Answers that are as sure are answered, too, and so are tested: half of these are wrong.
    alike = torch.arange(500) < 100
    assert confidence_threshold(torch.ones(500), alike, risk=0.1, level=0.9) == math.inf
