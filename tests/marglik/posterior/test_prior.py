"""Groups of parameters, weight decay <-> precision, and both ways to climb the evidence."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend.layers import Bias
from marglik import (
    Hyperparameters,
    Posterior,
    PriorGroups,
    precision_to_weight_decay,
    weight_decay_to_precision,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    return nn.ModuleDict(
        {"stem": nn.Conv2d(1, 2, 3), "stage1": nn.Sequential(Bias(), nn.Linear(2, 2))}
    )


@pytest.mark.parametrize(
    ("structure", "names", "index"),
    [
        (
            "per_tensor",
            ("stem.weight", "stem.bias", "stage1.0.bias", "stage1.1.weight", "stage1.1.bias"),
            (0, 1, 2, 3, 4),
        ),
        ("scalar", ("all",), (0, 0, 0, 0, 0)),
        ("per_type", ("weights", "biases", "scalars"), (0, 1, 2, 0, 1)),
        ("per_child", ("stem", "stage1"), (0, 0, 1, 1, 1)),
        (
            {"bias": "*.bias", "first": "stem.*", "rest": "*"},
            ("first", "bias", "rest"),
            (0, 1, 1, 2, 1),
        ),
    ],
)
def test_structures(model, structure, names, index):
    groups = PriorGroups.from_model(model, structure)
    assert (groups.names, groups.index) == (names, index)
    values = torch.arange(1.0, len(names) + 1)
    assert groups.per_tensor(values).tolist() == [values[i] for i in index]
    assert groups.sum_over_tensors(torch.ones(5)).tolist() == [
        index.count(g) for g in range(len(names))
    ]


def test_weight_decay_and_precision_are_inverse():
    assert weight_decay_to_precision(5e-3, 50_000) == pytest.approx(250.0)
    assert precision_to_weight_decay(weight_decay_to_precision(0.3, 7, 2.0), 7, 2.0) == 0.3
    assert precision_to_weight_decay(10.0, 100, temperature=2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("blockwise", "'blockwise' is not supported; choose one of 'per_tensor'"),
        ({"first": "stem.*"}, "No prior group matches parameter 'stage1.0.bias'"),
        ({"all": "*", "never": "stem.*"}, "'never' \\('stem.\\*'\\) matches no parameter"),
    ],
)
def test_wrong_structures(model, structure, message):
    with pytest.raises(ValueError, match=message):
        PriorGroups.from_model(model, structure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": [1.0, 2.0]}, "has length 2. Pass 1 or 5"),
        ({"prior_precision": [1.0, 1.0, -3.0, 1.0, 1.0]}, "not -3.0"),
        ({"prior_precision": float("nan")}, "not nan"),
        ({"sigma_noise": 0.0}, "sigma_noise must be positive"),
        ({"lr": 0.0}, "learning rate must be positive"),
        ({"method": "newton"}, "'newton' is not supported; choose one of 'adam', 'mackay'"),
    ],
)
def test_wrong_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        Hyperparameters(PriorGroups.from_model(model), **{"prior_precision": 1.0} | options)


def test_a_state_of_other_groups_or_of_less_is_refused_and_changes_nothing(model):
    per_tensor, scalar = (
        Hyperparameters(PriorGroups.from_model(model, structure), 2.0)
        for structure in ("per_tensor", "scalar")
    )
    state = Hyperparameters(PriorGroups.from_model(model), 1.0).state_dict()
    for wrong, message in (
        ({}, "hyperparameters lacks 'log_delta', 'log_sigma', 'adam'"),
        (scalar.state_dict(), r"'log_delta' is \(1,\) in torch.float64, but here it is \(5,\) in"),
        (
            {**state, "log_delta": state["log_delta"].float()},
            r"\(5,\) in torch.float32, but here it is \(5,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            per_tensor.load_state_dict(wrong)
        assert_close(per_tensor.prior_precision, 2 * torch.ones(5).double())
    per_tensor.load_state_dict(state)  # the control
    assert_close(per_tensor.prior_precision, torch.ones(5).double())


def fitted(likelihood="classification", temperature=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(30, 4).double()
    y = x[:, :3].argmax(-1) if likelihood == "classification" else x[:, :3].sin()
    posterior = Posterior(model, likelihood, temperature=temperature)
    posterior.fit([(x, y)])
    return posterior


@pytest.mark.parametrize(
    ("method", "steps", "structure"),
    [("adam", 600, "per_tensor"), ("mackay", 200, "per_tensor"), ("mackay", 200, "per_type")],
)
def test_both_methods_reach_a_stationary_point(method, steps, structure):
    posterior = fitted()
    groups = PriorGroups.from_model(posterior.model, structure)
    hyper = Hyperparameters(groups, 1.0, method=method, lr=0.1)
    evidences = hyper.update(posterior.evidence_terms, steps, 1.0)
    assert len(evidences) == steps + 1 and evidences[-1] > evidences[0]

    def gradient(delta):
        delta.requires_grad_()
        evidence = posterior.log_marginal_likelihood(groups.per_tensor(delta))
        return torch.autograd.grad(evidence, delta)[0] * delta

    delta = hyper.prior_precision
    assert_close(gradient(delta), torch.zeros_like(delta), atol=1e-8, rtol=0)
    assert gradient(torch.ones_like(delta)).abs().max() > 0.1  # control: the start is not


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_methods_agree_on_noise_and_precision(temperature):
    posterior = fitted("regression", temperature)
    groups, results = PriorGroups.from_model(posterior.model), []
    for method in ("adam", "mackay"):
        hyper = Hyperparameters(groups, 1.0, learn_sigma_noise=True, method=method, lr=0.1)
        hyper.update(posterior.evidence_terms, 600 if method == "adam" else 200, temperature)
        results.append((hyper.prior_precision.log(), hyper.sigma_noise.log()))
    assert_close(*results, atol=1e-8, rtol=0)
    assert results[0][1].abs() > 0.1
    # The noise alone settles there, too, unless γ takes half of the targets.
    terms, (log_delta, log_sigma) = posterior.evidence_terms, results[0]
    for sigma, number, end in ((3.0, 90.0, log_sigma), (0.1, 40.0, math.log(0.1))):
        hyper = Hyperparameters(groups, log_delta.exp(), sigma_noise=sigma)
        hyper.settle_noise(replace(terms, num_targets=number), temperature)
        assert float(hyper.sigma_noise.log()) == pytest.approx(float(end), abs=1e-5)


def test_fixed_point_stays_finite_for_a_group_that_is_zero():
    posterior = fitted()
    next(posterior.model.parameters()).data.zero_()
    posterior.restore(posterior.factors)
    hyper = Hyperparameters(PriorGroups.from_model(posterior.model), 1.0, method="mackay")
    hyper.update(posterior.evidence_terms, 5, 1.0)
    assert torch.isfinite(hyper.prior_precision).all()
    assert hyper.prior_precision[0] > 1e6 * hyper.prior_precision[2]


def test_noise_stays_without_leave_to_learn_it():
    posterior = fitted("regression")
    hyper = Hyperparameters(PriorGroups.from_model(posterior.model), 1.0, sigma_noise=0.5)
    hyper.update(posterior.evidence_terms, 5, 1.0)
    assert_close(hyper.sigma_noise, torch.tensor(0.5).double())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_pull_is_added_to_the_gradient_of_the_negative_evidence(sign):
    """Far larger than that gradient, it decides the direction of all steps on log δ."""
    posterior = fitted()
    hyper = Hyperparameters(PriorGroups.from_model(posterior.model), 1.0)
    pull = torch.full((4,), sign * 1e6).double()
    hyper.update(posterior.evidence_terms, 1, 1.0, pull=pull)
    assert_close(hyper.prior_precision.log(), torch.full((4,), -0.1 * sign).double())


def test_an_upper_bound_holds_after_a_single_step():
    posterior = fitted()
    hyper = Hyperparameters(PriorGroups.from_model(posterior.model), 1.0)
    largest, pull = torch.tensor([1.0, 1.0, 2.0, 2.0]).double(), torch.full((4,), -1e6).double()
    hyper.update(posterior.evidence_terms, 1, 1.0, largest, pull)
    assert_close(hyper.prior_precision.log(), torch.tensor([0.0, 0.0, 0.1, 0.1]).double())
