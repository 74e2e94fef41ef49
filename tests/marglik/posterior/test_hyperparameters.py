"""Both ways to climb the evidence reach its maximum."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import Hyperparameters, KronLaplace, PriorGroups


def fitted(likelihood="classification", temperature=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(30, 4).double()
    y = x[:, :3].argmax(-1) if likelihood == "classification" else x[:, :3].sin()
    la = KronLaplace(model, likelihood, temperature=temperature)
    la.fit([(x, y)])
    return la, PriorGroups.from_model(model)


@pytest.mark.parametrize("structure", ["layerwise", "kind", "scalar"])
@pytest.mark.parametrize(("method", "steps"), [("adam", 600), ("mackay", 200)])
def test_both_methods_reach_a_stationary_point(method, steps, structure):
    la, _ = fitted()
    groups = PriorGroups.from_model(la.model, structure)
    hyper = Hyperparameters(groups, 1.0, method=method, lr=0.1)
    evidences = hyper.update(la, steps)
    assert len(evidences) == steps + 1
    assert evidences[-1] > evidences[0]
    delta = hyper.prior_precision.requires_grad_()
    evidence = la.log_marginal_likelihood(groups.for_laplace(delta))
    (gradient,) = torch.autograd.grad(evidence, delta)
    assert_close(gradient * delta, torch.zeros_like(delta), atol=1e-8, rtol=0)
    # Negative control: the start was not stationary.
    start = torch.ones_like(delta).requires_grad_()
    evidence = la.log_marginal_likelihood(groups.for_laplace(start))
    assert torch.autograd.grad(evidence, start)[0].abs().max() > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_methods_agree_on_noise_and_precision(temperature):
    la, groups = fitted("regression", temperature)
    results = []
    for method in ("adam", "mackay"):
        hyper = Hyperparameters(groups, 1.0, learn_sigma_noise=True, method=method, lr=0.1)
        hyper.update(la, 600)
        results.append((hyper.prior_precision.log(), hyper.sigma_noise.log()))
    assert_close(results[0][0], results[1][0], atol=1e-8, rtol=0)
    assert_close(results[0][1], results[1][1], atol=1e-8, rtol=0)
    assert results[0][1].abs() > 0.1


def test_fixed_point_stays_finite_for_a_group_that_is_zero():
    la, groups = fitted()
    la.params[0].data.zero_()
    la.restore(la.factors)
    hyper = Hyperparameters(groups, 1.0, method="mackay")
    hyper.update(la, 5)
    assert torch.isfinite(hyper.prior_precision).all()
    assert hyper.prior_precision[0] > 1e6 * hyper.prior_precision[2]


def test_noise_stays_without_leave_to_learn_it():
    la, groups = fitted("regression")
    la.sigma_noise = 0.5
    hyper = Hyperparameters(groups, 1.0, sigma_noise=0.5)
    hyper.update(la, 5)
    assert_close(hyper.sigma_noise, torch.tensor(0.5).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": -1.0}, "positive and finite, not -1.0"),
        ({"prior_precision": torch.ones(3)}, "has length 3; expected 1 or 4"),
        ({"sigma_noise": 0.0}, "sigma_noise must be positive"),
        ({"lr": 0.0}, "learning rate must be positive"),
        ({"method": "newton"}, "'newton' is not supported; choose 'adam' or 'mackay'"),
    ],
)
def test_wrong_options(options, message):
    _, groups = fitted()
    with pytest.raises(ValueError, match=message):
        Hyperparameters(groups, **{"prior_precision": 1.0} | options)
