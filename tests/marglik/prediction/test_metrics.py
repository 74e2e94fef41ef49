"""Metrics of predictions against hand-worked cases, plain loops and other libraries."""

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
    multiclass_accuracy,
    multiclass_calibration_error,
)

from marglik.prediction.metrics import bernoulli_metrics, classification_metrics, regression_metrics

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


def test_risk_coverage_without_ties_is_a_plain_loop():
    p, y = classified()
    confidence, prediction = p.max(dim=1)
    correct = (prediction == y)[confidence.argsort(descending=True)].tolist()
    metrics = classification_metrics(p, y)
    assert metrics["cls/AURC"] == pytest.approx(aurc_by_loop(correct))
    # Negative control: the least confident first is a bad order.
    assert aurc_by_loop(correct[::-1]) > 1.5 * metrics["cls/AURC"]


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


def test_equal_probabilities_predict_the_first_class():
    p = torch.full((4, 2), 0.5)
    metrics = classification_metrics(p, torch.tensor([0, 1, 1, 1]))
    assert metrics["cls/accuracy"] == 0.25
    assert metrics["cls/AURC"] == pytest.approx(0.75)  # no order at all
    assert metrics["cal/ECE"] == metrics["cal/ECE_adaptive"] == pytest.approx(0.25)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_classification_does_not_depend_on_the_order_of_the_data(data):
    rows = st.tuples(st.sampled_from([0.5, 0.6, 0.75, 1.0]), st.booleans())
    drawn = data.draw(st.lists(rows, min_size=1, max_size=40))
    order = data.draw(st.permutations(range(len(drawn))))
    p, y = two_classes(*zip(*drawn, strict=True))
    assert classification_metrics(p[order], y[order]) == pytest.approx(classification_metrics(p, y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32, torch.uint8])
def test_dtypes(dtype, index):
    p, y = classified(num_classes=10)
    expected = classification_metrics(p, y)
    metrics = classification_metrics(p.to(dtype).requires_grad_(), y.to(index))
    assert metrics == pytest.approx(expected, abs=0.02 if dtype.itemsize == 2 else 1e-5)


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


def test_a_probability_of_one_half_predicts_zero():
    metrics = bernoulli_metrics(tensor([0.5], [0.5]), torch.tensor([[0], [0]]))
    assert metrics["cls/accuracy"] == 1 and metrics["cal/ECE"] == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [0, 1])
def test_an_impossible_side_costs_the_smallest_number_of_the_dtype(dtype, target):
    p = torch.tensor([[1.0 - target]], dtype=dtype)
    metrics = bernoulli_metrics(p, torch.tensor([[target]]))
    assert metrics["cls/NLL"] == pytest.approx(-math.log(torch.finfo(dtype).tiny))
    assert metrics["cls/Brier"] == 1


def test_bernoulli_does_not_depend_on_the_order_of_the_data():
    generator = torch.Generator().manual_seed(0)
    p = torch.randint(11, (50, 2), generator=generator).double() / 10
    y = torch.rand(50, 2, generator=generator) < 0.5
    order = torch.randperm(50, generator=generator)
    assert bernoulli_metrics(p[order], y[order]) == pytest.approx(bernoulli_metrics(p, y))


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
