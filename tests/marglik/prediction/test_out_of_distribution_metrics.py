"""Out-of-distribution detection against hand-worked cases, torchmetrics and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from marglik.prediction.metrics import out_of_distribution_metrics


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


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


def test_large_scores_do_not_saturate():
    inside, outside = torch.linspace(100, 101, 20), torch.linspace(102, 103, 30)
    metrics = out_of_distribution_metrics(inside, outside)
    assert metrics == pytest.approx({"ood/AUROC": 1, "ood/AUPR": 1, "ood/FPR95": 0})
    # Negative control: torchmetrics takes such scores for logits, and their sigmoid is 1.
    labels = torch.cat([torch.zeros(20), torch.ones(30)]).long()
    assert binary_auroc(torch.cat([inside, outside]), labels) == 0.5
    swapped = out_of_distribution_metrics(outside, inside)
    assert swapped["ood/AUROC"] == 0 and swapped["ood/FPR95"] == 1


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
