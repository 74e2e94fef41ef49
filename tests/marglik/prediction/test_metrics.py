"""Metrics against hand-worked cases, plain loops and other libraries; wrong inputs are named."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional as F
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_accuracy,
    multiclass_calibration_error,
)

from marglik.prediction.metrics import (
    bernoulli_metrics,
    classification_metrics,
    out_of_distribution_metrics,
    regression_metrics,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def classified(num=300, num_classes=4, seed=0):
    """Class probabilities without ties, and labels that they predict better than chance."""
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    noise = torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    return torch.softmax(2 * f, dim=1), (f + noise).argmax(dim=1)


def two_classes(confidence, correct):
    """Probabilities of two classes with these top probabilities, and labels they get right."""
    p = tensor(*confidence)
    return torch.stack([p, 1 - p], dim=1), torch.tensor([0 if right else 1 for right in correct])


def aurc_by_loop(correct):
    """Mean error rate of the first k = 1..N, in the order given."""
    return np.mean([1 - np.mean(correct[:k]) for k in range(1, len(correct) + 1)])


def test_classification_by_hand():
    p = tensor([0.8, 0.2, 0.0], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6])
    metrics = classification_metrics(p, torch.tensor([0, 1, 2]))
    brier = (0.04 + 0.04) + (0.25 + 0.36 + 0.01) + (0.01 + 0.09 + 0.16)
    assert metrics == {
        "cls/NLL": pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.6)) / 3),
        "cls/accuracy": pytest.approx(2 / 3),
        "cls/Brier": pytest.approx(brier / 3),
        "cls/AURC": pytest.approx((0 + 0 + 1 / 3) / 3),  # 0.8 right, 0.6 right, 0.5 wrong
        # One example per bin in both: |right or wrong − confidence|.
        "cal/ECE": pytest.approx((0.2 + 0.5 + 0.4) / 3),
        "cal/ECE_adaptive": pytest.approx((0.2 + 0.5 + 0.4) / 3),
    }
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_impossible_label_costs_the_smallest_number_of_the_dtype(dtype):
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    metrics = classification_metrics(p, torch.tensor([1, 0]))
    expected = (-math.log(torch.finfo(dtype).tiny) + math.log(2)) / 2
    assert metrics["cls/NLL"] == pytest.approx(expected)
    assert metrics["cls/Brier"] == pytest.approx((2.0 + 0.5) / 2)  # 2 is the worst there is


def test_rounding_above_one_does_not_turn_probabilities_into_logits():
    p = torch.tensor([[1.0000001, 0.0], [0.0, 1.0]])
    assert p.max() > 1
    metrics = classification_metrics(p, torch.tensor([0, 1]))
    assert metrics["cls/NLL"] == 0 and metrics["cls/Brier"] == 0
    assert metrics["cal/ECE"] == metrics["cal/ECE_adaptive"] == 0
    # Negative control: read as logits, its confidence would be 0.73 and the error 0.27.
    assert multiclass_calibration_error(p, torch.tensor([0, 1]), 2, n_bins=15) > 0.1


def test_classification_is_that_of_scikit_learn_and_torchmetrics():
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

    p, y = classified()
    metrics = classification_metrics(p, y)
    per_class = [brier_score_loss(y == c, p[:, c]) for c in range(4)]
    assert metrics["cls/NLL"] == pytest.approx(log_loss(y, p))
    assert metrics["cls/accuracy"] == pytest.approx(accuracy_score(y, p.argmax(dim=1)))
    assert metrics["cls/accuracy"] == pytest.approx(
        multiclass_accuracy(p, y, 4, average="micro").item()
    )
    assert metrics["cls/Brier"] == pytest.approx(sum(per_class))
    assert metrics["cal/ECE"] == pytest.approx(
        multiclass_calibration_error(p, y, 4, n_bins=15).item(), abs=1e-6
    )
    # Negative control: with the labels of other examples everything is worse.
    for name, wrong in classification_metrics(p, y.roll(1)).items():
        assert (
            wrong < 0.9 * metrics[name] if name == "cls/accuracy" else wrong > 1.1 * metrics[name]
        )


def test_adaptive_calibration_error_is_that_of_scikit_learn_quantiles():
    from sklearn.calibration import calibration_curve

    p, y = classified()
    confidence, prediction = p.max(dim=1)
    accuracy, mean = calibration_curve(prediction == y, confidence, n_bins=15, strategy="quantile")
    metrics = classification_metrics(p, y)
    assert metrics["cal/ECE_adaptive"] == pytest.approx(np.abs(accuracy - mean).mean())
    assert metrics["cal/ECE_adaptive"] != pytest.approx(metrics["cal/ECE"], rel=1e-3)


def test_risk_coverage_with_ties_is_the_mean_over_their_orders():
    confidence = [0.9, 0.7, 0.7, 0.7, 0.6, 0.6]
    correct = [False, True, False, False, True, False]
    orders = [
        [correct[i] for i in order]
        for order in itertools.permutations(range(6))
        if all(confidence[i] >= confidence[j] for i, j in itertools.pairwise(order))
    ]
    assert len(orders) == math.factorial(3) * math.factorial(2)
    areas = [aurc_by_loop(order) for order in orders]
    metrics = classification_metrics(*two_classes(confidence, correct))
    assert metrics["cls/AURC"] == pytest.approx(np.mean(areas))
    assert max(areas) - min(areas) > 0.1  # one order of the data would not do


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_classification_does_not_depend_on_the_order_of_the_data(data):
    rows = st.tuples(st.sampled_from([0.5, 0.6, 0.75, 1.0]), st.booleans())
    drawn = data.draw(st.lists(rows, min_size=1, max_size=40))
    order = data.draw(st.permutations(range(len(drawn))))
    p, y = two_classes(*zip(*drawn, strict=True))
    assert classification_metrics(p[order], y[order]) == pytest.approx(classification_metrics(p, y))


def test_bernoulli_by_hand():
    p = tensor([0.8, 0.3], [0.6, 0.1])
    metrics = bernoulli_metrics(p, tensor([1, 0], [0, 1]))
    assert metrics == {
        "cls/NLL": pytest.approx(-math.log(0.8 * 0.7 * 0.4 * 0.1) / 2),  # two examples
        "cls/accuracy": 0.5,
        "cls/Brier": pytest.approx((0.04 + 0.09 + 0.36 + 0.81) / 4),
        # Confidences 0.8, 0.7, 0.6 and 0.9 lie in four bins.
        "cal/ECE": pytest.approx((0.2 + 0.3 + 0.6 + 0.9) / 4),
        "cal/ECE_adaptive": pytest.approx((0.2 + 0.3 + 0.6 + 0.9) / 4),
    }


def test_one_bernoulli_output_is_two_classes():
    p, y = classified(num_classes=2)
    as_classes = classification_metrics(p, y)
    as_bernoulli = bernoulli_metrics(p[:, 1:], y[:, None])
    as_classes["cls/Brier"] /= 2  # each error was counted for both classes
    del as_classes["cls/AURC"]
    assert as_bernoulli == pytest.approx(as_classes)


def test_bernoulli_is_that_of_scikit_learn_and_torch():
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

    generator = torch.Generator().manual_seed(0)
    p = torch.rand(100, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(100, 3, generator=generator, dtype=torch.float64) < p).long()
    metrics = bernoulli_metrics(p, y)
    assert metrics["cls/NLL"] == pytest.approx(sum(log_loss(y[:, c], p[:, c]) for c in range(3)))
    entropy = F.binary_cross_entropy(p, y.double(), reduction="sum").item()
    assert metrics["cls/NLL"] == pytest.approx(entropy / 100)
    flat, predicted = p.flatten(), (p > 0.5).flatten()
    assert metrics["cls/accuracy"] == pytest.approx(accuracy_score(y.flatten(), predicted))
    assert metrics["cls/Brier"] == pytest.approx(brier_score_loss(y.flatten(), flat))
    confidence, correct = torch.where(predicted, flat, 1 - flat), predicted == y.flatten()
    counts = np.histogram(confidence, 15, (0, 1))[0]
    for name, strategy, n in (
        ("cal/ECE", "uniform", counts[counts > 0]),
        ("cal/ECE_adaptive", "quantile", 20),
    ):
        accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy=strategy)
        assert metrics[name] == pytest.approx((n / 300 * np.abs(accuracy - mean)).sum())
    # Negative control: the opposite targets.
    assert bernoulli_metrics(p, 1 - y)["cls/NLL"] > 1.5 * metrics["cls/NLL"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [0, 1])
def test_an_impossible_side_costs_the_smallest_number_of_the_dtype(dtype, target):
    p = torch.tensor([[1.0 - target]], dtype=dtype)
    metrics = bernoulli_metrics(p, torch.tensor([[target]]))
    assert metrics["cls/NLL"] == pytest.approx(-math.log(torch.finfo(dtype).tiny))
    assert metrics["cls/Brier"] == 1


def test_regression_by_hand():
    mean, variance = tensor([0.0, 1.0], [2.0, 3.0]), tensor([1.0, 4.0], [1.0, 1.0])
    targets = tensor([0.5, 5.0], [2.0, 4.8])  # 0.5, 2, 0 and 1.8 standard deviations away
    metrics = regression_metrics(mean, variance, targets)
    squares = 0.25 + 4 + 0 + 1.8**2
    assert metrics == {
        "reg/NLL": pytest.approx((squares + math.log(4) + 4 * math.log(2 * math.pi)) / 2 / 2),
        "reg/RMSE": pytest.approx(math.sqrt((0.25 + 16 + 0 + 1.8**2) / 4)),
        "cal/coverage50": 0.5,  # 0.674
        "cal/coverage90": 0.5,  # 1.645
        "cal/coverage95": 0.75,  # 1.960
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_regression_is_that_of_scipy(dtype):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(200, 3, generator=generator, dtype=dtype)
    variance = 1e-9 + torch.rand(200, 3, generator=generator, dtype=dtype) ** 2
    y = mean + variance.sqrt() * torch.randn(200, 3, generator=generator, dtype=dtype)
    metrics = regression_metrics(mean, variance, y)
    m, s, t = (x.double().numpy() for x in (mean, variance.double().sqrt(), y))
    assert metrics["reg/NLL"] == pytest.approx(-stats.norm.logpdf(t, m, s).sum(axis=1).mean())
    assert metrics["reg/RMSE"] == pytest.approx(np.sqrt(np.mean((t - m) ** 2)))
    for level in (50, 90, 95):
        low, high = stats.norm.interval(level / 100, m, s)
        assert metrics[f"cal/coverage{level}"] == ((low <= t) & (t <= high)).mean()
    order = torch.randperm(200, generator=generator)
    assert regression_metrics(mean[order], variance[order], y[order]) == pytest.approx(metrics)
    # Negative control: standard deviations taken for variances.
    other = regression_metrics(mean, variance.sqrt(), y)
    assert abs(other["reg/NLL"] - metrics["reg/NLL"]) > 0.1 * abs(metrics["reg/NLL"])
    assert other["cal/coverage50"] > 1.1 * metrics["cal/coverage50"]


def fpr95_by_loop(inside, outside):
    """The share of inside at the largest threshold that flags 95 in 100 of outside."""
    for threshold in sorted({*inside, *outside}, reverse=True):
        if 100 * sum(x >= threshold for x in outside) >= 95 * len(outside):
            return sum(x >= threshold for x in inside) / len(inside)
    raise AssertionError("the smallest threshold flags all")


def test_out_of_distribution_by_hand():
    metrics = out_of_distribution_metrics(tensor(1, 2, 3, 4), tensor(3.5, 5))
    assert metrics == {
        "ood/AUROC": pytest.approx(7 / 8),  # 3.5 beats three of four, 5 all of them
        "ood/AUPR": pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3),
        "ood/FPR95": 0.25,  # 4 >= 3.5
    }


def test_equal_scores_count_half():
    metrics = out_of_distribution_metrics(tensor(1, 1), tensor(1, 2))
    assert metrics["ood/AUROC"] == 0.75
    assert metrics["ood/FPR95"] == 1


def test_exactly_95_percent_are_enough():
    """Of 20, the 19 highest; the lowest lies below everything inside."""
    outside = torch.arange(20) + 100
    outside[0] = -1
    assert out_of_distribution_metrics(torch.arange(10), outside)["ood/FPR95"] == 0
    # Negative control: of 19, all.
    assert out_of_distribution_metrics(torch.arange(10), outside[:19])["ood/FPR95"] == 1


def test_the_first_threshold_counts_on_a_straight_curve():
    """With equal scores on both sides the curve is one line, that could be drawn by its ends."""
    x = torch.arange(100)
    assert out_of_distribution_metrics(x, x)["ood/FPR95"] == 0.95


@settings(deadline=None, max_examples=60)
@given(
    inside=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    outside=st.lists(st.integers(4, 16), min_size=1, max_size=30),
    shuffled=st.randoms(use_true_random=False),
)
def test_out_of_distribution_is_that_of_torchmetrics_and_loops(inside, outside, shuffled):
    """Scores in [0, 1], with ties."""
    one, other = tensor(*inside) / 16, tensor(*outside) / 16
    metrics = out_of_distribution_metrics(one, other)
    scores = torch.cat([one, other])
    labels = torch.cat([torch.zeros(len(one)), torch.ones(len(other))]).long()
    wins = np.mean([(y > x) + (y == x) / 2 for x in inside for y in outside])
    assert metrics["ood/AUROC"] == pytest.approx(wins)
    assert metrics["ood/AUROC"] == pytest.approx(binary_auroc(scores, labels).item(), abs=1e-6)
    precision = binary_average_precision(scores, labels).item()
    assert metrics["ood/AUPR"] == pytest.approx(precision, abs=1e-6)
    assert metrics["ood/FPR95"] == pytest.approx(fpr95_by_loop(inside, outside))
    shuffled.shuffle(inside)
    shuffled.shuffle(outside)
    # Another order, and scores on another scale.
    assert out_of_distribution_metrics(
        tensor(*inside).exp(), tensor(*outside).exp()
    ) == pytest.approx(metrics)


def half(*shape):
    return torch.full(shape, 0.5)


@pytest.mark.parametrize(
    ("metrics", "given", "error", "message"),
    [
        (classification_metrics, (half(0, 3), torch.zeros(0).long()), ValueError, "at least one"),
        (classification_metrics, (half(2, 2), torch.tensor([0, 11])), ValueError, "include 11"),
        (classification_metrics, (half(2, 2), torch.tensor([0, -1])), ValueError, "include -1"),
        (classification_metrics, (half(2, 2), half(2)), TypeError, "float32; .* class indices"),
        (classification_metrics, (half(2, 2), torch.tensor([True, False])), TypeError, "bool"),
        (classification_metrics, (half(2, 2), torch.tensor([0])), ValueError,
         r"probabilities \(2, 2\), labels \(1,\); expected probabilities \(N, C\), labels \(N\)"),
        (classification_metrics, (torch.ones(2, 1), torch.tensor([0, 0])), ValueError,
         "1 class; .* bernoulli_metrics"),
        (classification_metrics, (torch.eye(2).long(), torch.tensor([0, 1])), TypeError, "int64"),
        (classification_metrics, (torch.tensor([[3.0, -2.0]]), torch.tensor([0])), ValueError,
         "include 3; .* softmax or sigmoid"),
        (classification_metrics, (torch.tensor([[0.2, 0.9]]), torch.tensor([0])), ValueError,
         "sum to 1.1; .* softmax"),
        (classification_metrics, (half(1, 2) * torch.nan, torch.tensor([0])), ValueError, "nan"),
        (bernoulli_metrics, (half(0, 2), half(0, 2)), ValueError, "at least one"),
        (bernoulli_metrics, (half(2, 2), half(2, 1)), ValueError, r"targets \(2, 1\); expected"),
        (bernoulli_metrics, (4 * half(1, 2), half(1, 2)), ValueError, "include 2; .* sigmoid"),
        (bernoulli_metrics, (half(1, 2), 0.6 * half(1, 2)), ValueError, "0.3; .* Soft targets"),
        (bernoulli_metrics, (half(1, 2), torch.tensor([[0, -1]])), ValueError, "include -1"),
        (regression_metrics, (half(0, 1),) * 3, ValueError, "at least one"),
        (regression_metrics, (half(2, 1), half(2, 1), half(2)), ValueError, r"targets \(2,\)"),
        (regression_metrics, (half(2, 1), half(1, 1), half(2, 1)), ValueError, r"\(1, 1\)"),
        (regression_metrics, (half(1, 1), 0 * half(1, 1), half(1, 1)), ValueError,
         "variance includes 0; expected positive"),
        (regression_metrics, (half(1, 1), torch.inf * half(1, 1), half(1, 1)), ValueError,
         "variance include inf"),
        (regression_metrics, (torch.nan * half(1, 1), half(1, 1), half(1, 1)), ValueError,
         "mean include nan"),
        (regression_metrics, (half(1, 1), half(1, 1), torch.nan * half(1, 1)), ValueError,
         "targets include nan"),
        (out_of_distribution_metrics, (half(0), half(2)), ValueError, r"inside \(0,\)"),
        (out_of_distribution_metrics, (half(2), half(0)), ValueError, r"outside \(0,\)"),
        (out_of_distribution_metrics, (half(2, 1), half(2)), ValueError, r"inside \(2, 1\)"),
        (out_of_distribution_metrics, (half(2), torch.nan * half(2)), ValueError, "outside .* nan"),
        (out_of_distribution_metrics, (torch.inf * half(1), half(2)), ValueError, "inside .* inf"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_named(metrics, given, error, message):
    with pytest.raises(error, match=message):
        metrics(*given)
