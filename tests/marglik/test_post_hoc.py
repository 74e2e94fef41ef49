"""The prior found afterwards: by evidence, beside dense matrices; by validation, beside a grid."""

import math

import pytest
import torch
from torch import nn

from marglik import (
    Posterior,
    compute_metrics,
    laplace_predictive,
    maximize_evidence,
    minimize_validation_loss,
    predict_all,
)
from marglik.posterior.prior import LARGEST_PRECISION, SMALLEST_PRECISION
from tests.marglik.posteriors import CASES, data, fitted

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = {"first": "0.*", "rest": "*"}
GROUPS = {  # of the four tensors
    "scalar": ("all", "all", "all", "all"),
    "per_tensor": ("0.weight", "0.bias", "2.weight", "2.bias"),
    "per_type": ("weights", "biases", "weights", "biases"),
    "rules": ("first", "first", "rest", "rest"),
}
STRUCTURES = {name: RULES if name == "rules" else name for name in GROUPS}


def fitted_problem(likelihood, temperature=1.0):
    """A network of four tensors with its posterior, and the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(20, 3).double()
    f = model(x).detach()
    noise = torch.randn_like(f)
    y = {
        "classification": (f + 0.5 * noise).argmax(-1),
        "regression": f + 0.3 * noise,
        "bernoulli": (f + 0.5 * noise > 0).double(),
    }[likelihood]
    laplace = Posterior(model, likelihood, temperature=temperature)
    laplace.fit([(x[:15], y[:15]), (x[15:], y[15:])])
    return laplace, [(x, y)]


def evidence_and_gradient(laplace, values, names, sigma=1.0):
    """In the logarithms of (group -> δ, the group of each tensor) and of σ."""
    logs = {k: torch.tensor(math.log(v)).double().requires_grad_() for k, v in values.items()}
    log_sigma = torch.tensor(math.log(sigma)).double().requires_grad_()
    learned = [*logs.values()] + [log_sigma] * laplace.likelihood.has_sigma
    delta = torch.stack([logs[name].exp() for name in names])
    evidence = laplace.log_marginal_likelihood(delta, log_sigma.exp())
    return evidence.item(), torch.stack(torch.autograd.grad(evidence, learned))


@pytest.mark.parametrize(
    ("likelihood", "structure", "temperature"),
    [
        ("classification", "scalar", 0.4),
        ("regression", "per_tensor", 1.0),
        ("bernoulli", "per_type", 2.0),
        ("classification", "rules", 1.0),
    ],
)
def test_the_gradient_is_zero_at_the_top(likelihood, structure, temperature):
    """`test_precision` has the evidence by dense matrices."""
    laplace, _ = fitted_problem(likelihood, temperature)
    names, start = GROUPS[structure], dict.fromkeys(GROUPS[structure], 1.0)
    before, gradient = evidence_and_gradient(laplace, start, names)
    assert gradient.abs().max() > 0.1  # negative control: it is not zero at the start
    found = maximize_evidence(laplace, STRUCTURES[structure])
    assert list(found.prior_precision) == list(start)
    evidence, gradient = evidence_and_gradient(
        laplace, found.prior_precision, names, found.sigma_noise
    )
    assert gradient.abs().max() < 1e-4
    assert before < found.objective == pytest.approx(evidence, rel=0, abs=1e-8)
    delta = [found.prior_precision[name] for name in names]
    assert laplace.prior_precision.tolist() == pytest.approx(delta)


def test_groups_without_an_optimum_stay_in_their_bounds():
    """Weights that are zero want δ = ∞; a tensor that the data ignores wants δ = 0."""
    laplace, data = fitted_problem("classification")
    with torch.no_grad():
        laplace.model[2].weight.zero_()  # which cuts off what is before it
    laplace.fit(data)
    before = float(laplace.log_marginal_likelihood())
    found = maximize_evidence(laplace)
    assert found.prior_precision["2.weight"] > 1e6  # zero
    assert found.prior_precision["0.weight"] < 1e-4  # ignored
    for value in found.prior_precision.values():
        assert SMALLEST_PRECISION * (1 - 1e-9) <= value <= LARGEST_PRECISION * (1 + 1e-9)
    assert before < found.objective < math.inf
    assert 0.01 < found.prior_precision["2.bias"] < 1e4


# --- by validation ---


def valleys(laplace):
    """A wide valley around δ = 10, and a deeper one around 10^5.6, which no grid point hits."""
    v = math.log10(float(laplace.prior_precision[0]))
    return -math.exp(-((v - 1.0) ** 2) / 4) - 1.5 * math.exp(-((v - 5.6) ** 2) / 1.5)


def test_the_deepest_of_several_valleys():
    (laplace, _), calls = fitted(), []

    def loss(posterior):
        calls.append(float(posterior.prior_precision[0]))
        return valleys(posterior)

    found = minimize_validation_loss(laplace, loss)
    assert found.prior_precision["all"] == pytest.approx(10**5.6, rel=0.1)
    assert laplace.prior_precision.tolist() == [found.prior_precision["all"]]
    assert found.objective == valleys(laplace)
    assert len(calls) < 30
    with pytest.warns(UserWarning, match="still decreases at δ = 10, a bound"):
        minimize_validation_loss(laplace, valleys, bounds=(10, 100))


@pytest.mark.parametrize("case", ["classification", "regression"])
def test_a_loader_stands_for_the_loss_on_it(case):
    laplace, _ = fitted(**CASES[case])
    batches = [data(case)]

    def nll(posterior):
        predict = laplace_predictive(posterior, generator=torch.Generator().manual_seed(0))
        return compute_metrics(*predict_all(predict, batches), case).nll

    found = minimize_validation_loss(laplace, batches)
    assert nll(laplace) == found.objective
    for delta in torch.logspace(-2, 8, 6).tolist():  # no other δ is better
        laplace.prior_precision = delta
        assert found.objective <= nll(laplace) + 1e-4


def test_a_search_that_fails_leaves_the_prior():
    (laplace, _), calls = fitted(), []

    def loss(posterior):
        calls.append(0)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        minimize_validation_loss(laplace, loss)
    assert laplace.prior_precision.tolist() == fitted()[0].prior_precision.tolist()
    with pytest.raises(TypeError, match="Pass a loader or a list of batches"):
        minimize_validation_loss(laplace, iter([]))
