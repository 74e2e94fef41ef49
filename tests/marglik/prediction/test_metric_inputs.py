"""What the metrics refuse, by name."""

import pytest
import torch

from marglik.prediction.metrics import (
    bernoulli_metrics,
    classification_metrics,
    out_of_distribution_metrics,
    regression_metrics,
)


@pytest.mark.parametrize(
    ("p", "y", "error", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0).long(), ValueError, r"probabilities has shape \(0, 3\)"),
        (torch.full((2, 10), 0.1), torch.tensor([0, 11]), ValueError,
         "labels reach 11, the predictive has 10 classes; expected 0 to 9"),
        (torch.full((2, 10), 0.1), torch.tensor([0, -1]), ValueError, "labels include -1"),
        (torch.full((2, 2), 0.5), torch.tensor([0.0, 1.0]), TypeError,
         "labels have dtype torch.float32; expected class indices"),
        (torch.full((2, 2), 0.5), torch.tensor([True, False]), TypeError, "torch.bool"),
        (torch.full((2, 2), 0.5), torch.tensor([0]), ValueError,
         r"probabilities \(2, 2\), labels \(1,\); expected probabilities \(N, C\), labels \(N\)"),
        (torch.full((2,), 0.5), torch.tensor([0, 1]), ValueError, r"probabilities \(2,\)"),
        (torch.full((2, 2), 0.5), torch.eye(2).long(), ValueError, r"labels \(2, 2\)"),
        (torch.ones(2, 1), torch.tensor([0, 0]), ValueError, "1 class; .* bernoulli_metrics"),
        (torch.eye(2).long(), torch.tensor([0, 1]), TypeError, "have dtype torch.int64"),
        (torch.tensor([[3.0, -2.0]]), torch.tensor([0]), ValueError,
         "include 3; .* softmax or sigmoid"),
        (torch.tensor([[1.1, -0.1]]), torch.tensor([0]), ValueError, "include 1.1"),
        (torch.tensor([[0.2, 0.9], [0.5, 0.5]]), torch.tensor([0, 0]), ValueError,
         "example 0 sum to 1.1; expected 1. Pass logits through softmax"),
        (torch.tensor([[0.5, 0.5], [0.5, torch.nan]]), torch.tensor([0, 0]), ValueError,
         "include nan; .* diverged"),
    ],
)  # fmt: skip
def test_classification_errors(p, y, error, message):
    with pytest.raises(error, match=message):
        classification_metrics(p, y)


@pytest.mark.parametrize(
    ("p", "y", "error", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0, 2), ValueError, "there is nothing to evaluate"),
        (torch.zeros(2, 2), torch.zeros(2), ValueError, r"targets \(2,\); expected"),
        (torch.zeros(2, 2), torch.zeros(2, 1), ValueError, r"targets \(2, 1\); expected"),
        (torch.full((1, 2), 2.0), torch.zeros(1, 2), ValueError, "include 2; .* sigmoid"),
        (torch.full((1, 2), torch.nan), torch.zeros(1, 2), ValueError, "include nan"),
        (torch.zeros(1, 2), torch.tensor([[0.0, 0.3]]), ValueError,
         "targets include 0.3; expected 0 or 1. Soft targets"),
        (torch.zeros(1, 2), torch.tensor([[0, -1]]), ValueError, "targets include -1"),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2), TypeError, "have dtype torch.int64"),
    ],
)  # fmt: skip
def test_bernoulli_errors(p, y, error, message):
    with pytest.raises(error, match=message):
        bernoulli_metrics(p, y)


@pytest.mark.parametrize(
    ("mean", "variance", "y", "message"),
    [
        (torch.zeros(0, 1), torch.ones(0, 1), torch.zeros(0, 1), "there is nothing to evaluate"),
        (torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(2), r"mean \(2, 1\), .* targets \(2,\)"),
        (torch.zeros(2, 1), torch.ones(1, 1), torch.zeros(2, 1), r"variance \(1, 1\)"),
        (torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1),
         "variance includes 0; expected positive"),
        (torch.zeros(2, 1), torch.tensor([[1.0], [-0.5]]), torch.zeros(2, 1), "includes -0.5"),
        (torch.zeros(1, 1), torch.tensor([[torch.inf]]), torch.zeros(1, 1), "is inf in variance"),
        (torch.full((1, 1), torch.nan), torch.ones(1, 1), torch.zeros(1, 1), "is nan in mean"),
        (torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), torch.nan), "is nan in targets"),
    ],
)  # fmt: skip
def test_regression_errors(mean, variance, y, message):
    with pytest.raises(ValueError, match=message):
        regression_metrics(mean, variance, y)


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        (torch.zeros(0), torch.zeros(2), r"inside has shape \(0,\): there is nothing"),
        (torch.zeros(2), torch.zeros(0), r"outside has shape \(0,\): there is nothing"),
        (torch.zeros(2, 1), torch.zeros(2), r"inside \(2, 1\), outside \(2,\); expected inside"),
        (torch.zeros(2), torch.tensor([0.0, torch.nan]), "is nan in outside"),
        (torch.tensor([torch.inf]), torch.zeros(2), "is inf in inside"),
    ],
)
def test_out_of_distribution_errors(inside, outside, message):
    with pytest.raises(ValueError, match=message):
        out_of_distribution_metrics(inside, outside)
