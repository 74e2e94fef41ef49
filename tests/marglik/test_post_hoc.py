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
from tests.evidence_oracles import laplace_log_evidence
from tests.marglik.posteriors import CASES, data, fitted
from tests.uses import kfac_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = {"first": "0.*", "rest": "*"}
GROUPS = {  # of the four tensors
    "scalar": ("all", "all", "all", "all"),
    "per_tensor": ("0.weight", "0.bias", "2.weight", "2.bias"),
    "per_type": ("weights", "biases", "weights", "biases"),
    "rules": ("first", "first", "rest", "rest"),
}
STRUCTURES = {name: RULES if name == "rules" else name for name in GROUPS}


class Problem:
    """A fitted network, and its evidence by dense matrices."""

    def __init__(self, likelihood, temperature=1.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.x = torch.randn(20, 3).double()
        f = self.model(self.x).detach()
        noise = torch.randn_like(f)
        self.y = {
            "classification": (f + 0.5 * noise).argmax(-1),
            "regression": f + 0.3 * noise,
            "bernoulli": (f + 0.5 * noise > 0).double(),
        }[likelihood]
        self.likelihood, self.temperature = likelihood, temperature
        self.laplace = Posterior(self.model, likelihood, temperature=temperature)
        self.laplace.fit([(self.x[:15], self.y[:15]), (self.x[15:], self.y[15:])])
        self.theta = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.sizes = torch.tensor([p.numel() for p in self.model.parameters()])
        blocks = kfac_blocks(self.model, self.x, likelihood, "expand")
        self.H = torch.block_diag(*blocks.values())  # at σ = 1

    def log_likelihood(self, sigma):
        f = self.model(self.x).detach()
        if self.likelihood == "classification":
            return torch.distributions.Categorical(logits=f).log_prob(self.y).sum()
        if self.likelihood == "bernoulli":
            return torch.distributions.Bernoulli(logits=f).log_prob(self.y).sum()
        return torch.distributions.Normal(f, sigma).log_prob(self.y).sum()

    def evidence(self, delta, sigma=1.0):
        """Dense, of one δ or one per tensor."""
        P0 = torch.as_tensor(delta).double().expand(4).repeat_interleave(self.sizes)
        H = self.H / sigma**2
        return laplace_log_evidence(self.log_likelihood(sigma), self.theta, H, P0, self.temperature)

    def gradient(self, per_group, sigma=1.0, step=1e-4):
        """Central differences in the logarithms of (group -> δ, names of groups) and of σ."""
        values, names = per_group
        keys = [*values] + ["sigma"] * (self.likelihood == "regression")

        def at(key, shift):
            moved = {k: v * math.exp(shift * (k == key)) for k, v in values.items()}
            delta = torch.tensor([moved[name] for name in names])
            return self.evidence(delta, sigma * math.exp(shift * (key == "sigma")))

        return torch.tensor([(at(k, step) - at(k, -step)) / (2 * step) for k in keys])


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
    problem = Problem(likelihood, temperature)
    start = dict.fromkeys(GROUPS[structure], 1.0)
    # Negative control: it is not at the start.
    assert problem.gradient((start, GROUPS[structure])).abs().max() > 0.1
    before = problem.evidence(1.0)
    found = maximize_evidence(problem.laplace, STRUCTURES[structure])
    assert list(found.prior_precision) == list(start)
    gradient = problem.gradient((found.prior_precision, GROUPS[structure]), found.sigma_noise)
    assert gradient.abs().max() < 1e-4
    assert found.objective > before
    delta = torch.tensor([found.prior_precision[name] for name in GROUPS[structure]])
    dense = problem.evidence(delta, found.sigma_noise)
    assert found.objective == pytest.approx(dense, rel=0, abs=1e-8)
    assert problem.laplace.prior_precision.tolist() == pytest.approx(delta.tolist())


def test_groups_without_an_optimum_stay_in_their_bounds():
    """Weights that are zero want δ = ∞; a tensor that the data ignores wants δ = 0."""
    problem = Problem("classification")
    with torch.no_grad():
        problem.model[2].weight.zero_()  # which cuts off what is before it
    laplace = Posterior(problem.model, "classification")
    laplace.fit([(problem.x, problem.y)])
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
