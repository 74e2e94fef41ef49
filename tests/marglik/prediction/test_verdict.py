"""The verdict: its numbers by brute force, its words by what the intervals contain."""

import re
from copy import deepcopy

import pytest
import torch
from scipy.stats import t, ttest_rel
from torch import nn
from torch.nn.functional import cross_entropy

from marglik import Ensemble, OnlineResult, Posterior, verdict
from marglik.models import MLP
from marglik.prediction.metric_types import Metrics
from marglik.prediction.verdict import in_words, instability

CASES = {  # differences of NLL and accuracy, and a part of the text
    "gain": (
        (-0.03, -0.05, -0.01),
        (0.01, -0.02, 0.04),
        "With learned weight decays, the network has a lower NLL than the plain network.\n"
        "NLL: 0.070 instead of 0.100. Difference -0.030, 95 % interval -0.050 to -0.010.\n"
        "Accuracy: 96.0 % instead of 95.0 %. Difference +1.0 points, 95 % interval -2.0 to +4.0. "
        "300 test examples are too few to tell.",
    ),
    "loss": (
        (0.03, 0.01, 0.05),
        (-0.01, -0.02, -0.005),
        " a higher NLL and a lower accuracy than ",
    ),
    "both": ((-0.03, -0.05, -0.01), (-0.01, -0.02, -0.005), "a lower NLL but a lower accuracy "),
    "nothing": ((-0.03, -0.07, 0.01), (0.0, 0.0, 0.0), "decays: no significant difference from"),
    "the same": (
        (-0.03, -0.07, 0.01),
        (0.0, 0.0, 0.0),
        "few to tell.\nAccuracy: 95.0 % for both, equal on every test example.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interval_with_zero_is_no_gain(case):
    nll, accuracy, text = CASES[case]
    changes = Metrics(nll=nll, accuracy=accuracy, brier=nll)
    here = Metrics(nll=0.1 + nll[0], accuracy=0.95 + accuracy[0])
    there = Metrics(nll=0.1, accuracy=0.95)
    assert text in in_words(changes, here, there, 300)
    assert "no verdict" in in_words(Metrics(), here, there, 300)


def test_numbers_are_those_of_paired_examples():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    plain, model = (MLP(4, (5,), 3) for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    test = [(x[:25], y[:25]), (x[25:], y[25:])]
    laplace = Posterior(model, "classification")
    laplace.fit(test)
    said = OnlineResult(laplace, 0.0, 1).verdict(plain, test)
    assert said == verdict(model, plain, test)
    a, b = (cross_entropy(of(x), y, reduction="none").detach().numpy() for of in (model, plain))
    low, high = ttest_rel(a, b).confidence_interval(0.95)
    assert said.startswith("With learned weight decays, the network has a lower NLL")
    assert f"e {(a - b).mean():+.3f}, 95 % interval {low:+.3f} to {high:+.3f}." in said
    assert "no significant difference" in verdict(plain, plain, test)  # negative control
    assert "a higher NLL" in verdict(plain, model, test)


def test_with_held_out_data_sharpness_counts_for_neither():
    """A network against one with five times its logits: the same one, once both are scaled."""
    torch.manual_seed(0)
    x, model = torch.randn(200, 4), nn.Linear(4, 3)
    y = model(x).softmax(1).multinomial(1).squeeze(1)
    sure = deepcopy(model)
    for p in sure.parameters():
        p.data *= 5
    assert "a lower NLL" in verdict(model, sure, [(x, y)])  # negative control
    said = verdict(model, sure, [(x, y)], held_out=iter([(x, y)]))
    nll = re.search(r"NLL: (\S+) instead of ([\d.]+\d)", said)
    assert nll and float(nll[1]) == pytest.approx(float(nll[2]), abs=0.005)
    tau = Ensemble([sure]).calibrate([(x, y)]).output_temperature
    assert float(nll[2]) == pytest.approx(cross_entropy(sure(x) / tau, y).item(), abs=6e-4)


def test_positions_of_one_example_count_once():
    torch.manual_seed(0)
    x, y = torch.randn(12, 5, 4), torch.randint(3, (12, 5))
    plain, model = nn.Linear(4, 3), nn.Linear(4, 3)
    losses = [cross_entropy(of(x).movedim(2, 1), y, reduction="none") for of in (model, plain)]
    d = (losses[0] - losses[1]).mean(1).detach()
    half = t.ppf(0.975, 11) * d.std().item() / 12**0.5
    said = verdict(model, plain, [(x, y)])
    assert f"interval {d.mean() - half:+.3f} to {d.mean() + half:+.3f}." in said
    y[0, 0] = -100  # which rows belong to which example is not known then
    assert "no verdict" in verdict(model, plain, [(x, y)])


def test_regression_needs_the_noise():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(ValueError, match="sigma_noise"):
        verdict(model, plain, [(x, y)], "regression")
    assert "NLL" in verdict(model, plain, [(x, y)], "regression", sigma_noise=(1.0, 1.0))


def test_a_plain_network_that_does_not_come_back_is_named():
    assert "rose from 0.2 to 1.1" in instability([1.2, 0.4, 0.2, 5.4, 1.3, 1.1])
    for losses in ([1.2, 0.4, 5.4, 0.2], [2.3, 0.01, 0.03], [1.1]):
        assert instability(losses) == ""
