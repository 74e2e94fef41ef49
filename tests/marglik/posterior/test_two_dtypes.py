"""Trainable parameters of two dtypes: each keeps its own, and numbers are those of float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend.optimizer import KFAC
from marglik import Laplace, PriorLearner
from marglik.posterior.posterior import Posterior
from marglik.posterior_file import load_posterior, save_posterior
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive
from tests.random_numbers import normal

X, Y = normal(24, 4), torch.arange(24).square() % 3
DOUBLE, FLOAT, HALF = torch.float64, torch.float32, torch.bfloat16
PAIRS = [(DOUBLE, FLOAT, 1e-5), (FLOAT, DOUBLE, 1e-5), (FLOAT, HALF, 0.06), (HALF, FLOAT, 0.06)]


class TwoDtypes(nn.Module):
    """A network whose first layers and head have dtypes of their own."""

    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh()).to(first)
        self.last = nn.Linear(5, 3).to(last)
        self.dtypes = first, last

    def forward(self, x):
        first, last = self.dtypes
        return self.last(self.first(x.to(first)).to(last))

    def double(self):
        self.dtypes = DOUBLE, DOUBLE
        return super().double()


def dtypes(model):
    return [p.dtype for p in model.parameters()]


def both(first, last):
    """The network, and one in float64 with the same values."""
    model = TwoDtypes(first, last).eval()
    return model, copy.deepcopy(model).double()


def numbers(model, structure, folder):
    """What a posterior says; also saved and loaded, and with laplace-torch's calls."""
    posterior = Posterior(model, "classification", structure=structure, prior_precision=0.7)
    posterior.fit([(X, Y)])
    own = dtypes(model)
    results = {
        "evidence": posterior.log_marginal_likelihood(),
        "effective": posterior.effective_parameters(),
        "all": posterior.output_distribution(X)[1],
        "last": posterior.output_distribution(X, "last")[1],
        "variance": posterior.output_distribution(X, variance_only=True)[1],
        "joint": posterior.joint_output_distribution(X[:3])[1],
    }
    samples = posterior.sample(2000, torch.Generator().manual_seed(0))
    results["deviations"] = samples.std(0)
    la = Laplace(model, "classification", "all", structure, prior_precision=0.7)
    for name, f in (
        ("linearised", posterior.linearised_outputs(samples[:500], X[:4])),
        ("network", la.network_outputs(samples[:500], X[:4])),
    ):
        results[name] = f.std(0)
    if structure == "kron":
        save_posterior(posterior, folder)
        other = copy.deepcopy(model)
        nn.init.zeros_(other.last.weight)
        loaded = load_posterior(folder, other)
        assert torch.equal(loaded.log_marginal_likelihood(), results["evidence"])
        assert dtypes(other) == own
        module = laplace_predictive(loaded, PredictiveConfig("probit", layers="last")).module(X)
        results["served"] = torch.cat(module(X))
        posterior.fit([(X, Y)], corrected=True)
        results["corrected"] = posterior.log_marginal_likelihood()
    weights = posterior.fitted_weights()
    assert [weights[name].dtype for name, _ in model.named_parameters()] == own == dtypes(model)
    with torch.no_grad():
        model.last.weight.add_(1)
    with pytest.raises(ValueError, match="no longer has the weights"):
        posterior.log_marginal_likelihood()
    model.load_state_dict(weights, strict=False)
    posterior.to(dtype=DOUBLE)
    assert {*dtypes(model)} == {DOUBLE} and posterior.log_marginal_likelihood().isfinite()
    return results


def assert_alike(results, expected, tolerance):
    """Relative to the largest entry, as of sums in which rounding errors add up."""
    for name, value in expected.items():
        error = (results[name].double() - value.double()).abs().max() / value.abs().max()
        # Draws of another dtype are others, and of "lowrank" those of rows with other signs.
        is_drawn = name in ("deviations", "linearised", "network")
        assert error < (0.15 if is_drawn else tolerance), (name, float(error))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("structure", ["kron", "full", "diag", "lowrank"])
def test_a_posterior_has_the_numbers_of_float64(structure, pair, tmp_path):
    *of_layers, tolerance = pair
    model, wide = both(*of_layers)
    results, expected = (
        numbers(m, structure, tmp_path / str(i)) for i, m in enumerate((model, wide))
    )
    assert_alike(results, expected, tolerance)
    # Negative control: the posterior of other weights.
    other = numbers(copy.deepcopy(wide).apply(shifted), structure, tmp_path / "2")
    with pytest.raises(AssertionError):
        assert_alike(other, expected, tolerance)


@torch.no_grad()
def shifted(module):
    for p in module.parameters(recurse=False):
        p.add_(0.3)


@pytest.mark.parametrize("pair", PAIRS[1:3], ids=str)
@pytest.mark.parametrize("kind", ["SGD", "adamw", "sgd", "nadamw", "product"])
def test_training_keeps_the_dtypes(kind, pair):
    """Decays and weights as in float64, also resumed; by the learner with torch and with K-FAC."""
    *of_layers, tolerance = pair
    results = []
    for stops, model in zip((True, False), both(*of_layers), strict=True):
        own, state = dtypes(model), None
        for epochs in (range(3), range(3, 6)) if stops else (range(6),):
            if kind in ("SGD", "adamw"):
                optimizer = {"SGD": torch.optim.SGD, "adamw": torch.optim.Adam}[kind](
                    model.parameters(), 0.01
                )
            else:
                on = "product" if kind == "product" else "factors"
                base = "nadamw" if kind == "nadamw" else "sgd"
                optimizer = KFAC(
                    model, "classification", 0.01, base=base, damping_on=on, fisher="exact",
                    factor_every=1,
                )  # fmt: skip
            learner = PriorLearner("classification", every=2, burn_in=0, clip=2.0)
            if state is not None:
                optimizer.load_state_dict(state[0])
                learner.load_state_dict(state[1])
            learner.start(model, optimizer, [(X, Y)], 6)
            for _ in epochs:
                optimizer.zero_grad()
                F.cross_entropy(model(X).double(), Y).backward()
                optimizer.step()
            state = copy.deepcopy((optimizer.state_dict(), learner.state_dict()))
        learner.finish()
        assert dtypes(model) == own
        parameters = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        decays = learner.weight_decays().log()
        results.append({"parameters": parameters, "decays": decays})
    assert_alike(*results, tolerance)
