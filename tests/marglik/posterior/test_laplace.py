"""Posteriors: laplace-torch's numbers, modes, cached eigenvalues, wrong arguments."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.options import CurvatureOptions
from marglik import KronLaplace, Posterior
from tests.marglik.posteriors import data, network

pytestmark = pytest.mark.filterwarnings("ignore:By default `link_approx`")


def test_auto_is_the_default():
    found = {}
    for mode in ("default", "auto", "reduce", "expand"):
        options = {} if mode == "default" else {"kfac_approx": mode}
        la = KronLaplace(network(), "classification", **options)
        plain = Posterior(network(), "classification", CurvatureOptions(**options))
        for posterior in (la, plain):
            posterior.fit([data()])
        found[mode] = la.log_marginal_likelihood()
        assert torch.equal(found[mode], plain.log_marginal_likelihood())
    assert found["default"] == found["auto"]
    assert (found["expand"] - found["reduce"]).abs() > 0.1  # nats


def test_a_fit_in_inference_mode_is_the_same():
    loader = [data()]
    plain, inside = (Posterior(network().eval(), "classification") for _ in range(2))
    plain.fit(loader)
    with torch.inference_mode():
        inside.fit([(x * 1, y) for x, y in loader])
        factors = kronecker_factors(inside.model, loader, "classification", kfac_approx="auto")
    delta = torch.ones((), dtype=torch.float64, requires_grad=True)
    evidence = inside.log_marginal_likelihood(delta)
    evidence.backward()
    assert torch.equal(evidence, plain.log_marginal_likelihood()) and delta.grad
    assert torch.equal(factors.blocks["0.weight"].B, plain.factors.blocks["0.weight"].B)


def test_eigenvectors_wait_for_a_predictive(monkeypatch):
    batch = data()
    la = KronLaplace(network(), "classification")
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a, **k: pytest.fail("eigenvectors"))
    la.fit([batch])
    la.log_marginal_likelihood()
    la.optimize_prior_precision(n_steps=3)
    la.effective_parameters()
    calls = []
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda *a, **k: calls.append(a))
    la.log_marginal_likelihood(torch.tensor(2.0))
    assert not calls  # cached
    with pytest.raises(pytest.fail.Exception):
        la(batch[0])


def test_sampled_networks_leave_mean_and_parameters_apart():
    model, batch = network(), data()
    la = KronLaplace(model, "classification")
    la.fit([batch])
    mean = la.mean.clone()
    la(batch[0], pred_type="nn", link_approx="mc", n_samples=2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert_close(la.mean, mean)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"likelihood": "gamma"}, ValueError, "'gamma' is not supported"),
        ({"backend": KfacGGN}, TypeError, "'backend' is not an option; choose from .*kfac_approx"),
        ({"prior_precision": torch.ones(4)}, ValueError, "\\(4,\\); expected a scalar or \\(6,\\)"),
        ({"temperature": -1.0}, ValueError, "temperature must be positive, not -1.0"),
        ({"prior_precision": -0.5}, ValueError, "must be positive, not -0.5"),
        ({"prior_precision": None}, TypeError, "prior_precision is None; a number or a tensor"),
        ({"sigma_noise": math.nan, "likelihood": "regression"}, ValueError, "noise .*, not nan"),
        ({"model": None}, TypeError, "The model is None, of type NoneType; a torch.nn.Module"),
        ({"model": nn.DataParallel(network())}, TypeError, "in DataParallel, .* model.module"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        KronLaplace(**{"model": network(), "likelihood": "classification"} | arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("prior_precision", math.inf), ("sigma_noise", 0.0), ("sigma_noise", "1")]
)
def test_wrong_hyperparameters_leave_the_old_ones(name, value):
    la = KronLaplace(network(), "regression", sigma_noise=0.5, prior_precision=0.5)
    with pytest.raises(
        (ValueError, TypeError), match=f"{name} (must be positive( and finite)?, not|is '1')"
    ):
        setattr(la, name, value)
    assert (la.prior_precision == 0.5).all() and la.sigma_noise == 0.5


def test_weights_in_channels_last():
    """Their order in memory is not that of their entries."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
        model = model.to(memory_format=memory_format)
        laplace = KronLaplace(model, "classification")
        laplace.fit([(torch.randn(6, 2, 3, 3), torch.arange(6) % 3)])
        found.append((laplace.mean, laplace.log_marginal_likelihood()))
    assert not model[0].weight.is_contiguous()
    assert torch.equal(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])
