"""Predictives of a network and of its posterior, against brute force."""

import pytest
import torch
from torch.testing import assert_close

from marglik import KronLaplace, calibrate
from marglik.prediction.links import Prediction, predict_from_gaussian, predict_from_outputs
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive, map_predictive
from tests.marglik.posteriors import DELTAS, TakesMapping, data, fitted, jacobians, network

LIKELIHOODS = ["classification", "regression", "bernoulli"]
# A predictive's options; None is the MAP.
KINDS = [{"method": "probit"}, {"method": "mc"}, {"method": "linearised"}, {"layers": "last"}, None]


def predictive(la, method="probit", seed=0, **options):
    config = PredictiveConfig(method, **{"samples": 20, "networks": 5} | options)
    return laplace_predictive(la, config, torch.Generator().manual_seed(seed))


def of_kind(la, kind):
    return map_predictive(la.model) if kind is None else predictive(la, **kind)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_linearised_networks_are_those_with_sampled_parameters(likelihood):
    la, x = fitted(likelihood, sigma_noise=0.3 if likelihood == "regression" else 1.0)
    J = torch.cat([*jacobians(la.model, x).values()], dim=-1)
    changes = la.sample(5, torch.Generator().manual_seed(0)) - la.mean
    outputs = la.model(x).detach() + torch.stack([J @ change for change in changes])
    before = [p.clone() for p in la.model.parameters()]
    found = predictive(la, "linearised")(x)
    expected = predict_from_outputs(outputs, likelihood, la.sigma_noise)
    assert_close(found.tensors(), expected.tensors())
    assert all(torch.equal(a, b) for a, b in zip(la.model.parameters(), before, strict=True))
    assert (found.mean - predictive(la, "linearised", seed=1)(x).mean).abs().max() > 1e-3


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_predictions_are_those_of_the_covariances(likelihood, layers):
    la, x = fitted(likelihood, sigma_noise=0.3 if likelihood == "regression" else 1.0)
    f, covariance = la.output_distribution(x, layers)
    for link in ("probit", "mc"):
        found = predictive(la, link, layers=layers)(x)
        noise = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=f.dtype)
        expected = predict_from_gaussian(f, covariance, likelihood, link, noise, la.sigma_noise)
        assert_close(found.tensors(), expected.tensors(), rtol=1e-9, atol=1e-12)
    # Negative control: the other layers' part of the variance.
    other = predictive(la, "mc", layers="last" if layers == "all" else "all")(x)
    assert (other.epistemic - expected.epistemic).norm() > 1e-2 * expected.epistemic.norm()


@pytest.mark.parametrize(
    ("likelihood", "method"),
    [
        ("classification", "probit"),
        ("classification", "mc"),
        ("regression", "linearised"),
        ("bernoulli", "mc"),
    ],
)
def test_does_not_depend_on_batches_modes_or_gradients(likelihood, method):
    la, x = fitted(likelihood)
    la.model.train()
    la.model[1].eval()
    modes = [module.training for module in la.model.modules()]
    predict = predictive(la, method)
    whole = predict(x)
    parts = Prediction.cat([predict(part) for part in (x[:1], x[1:4], x[4:])])
    assert [module.training for module in la.model.modules()] == modes
    assert not whole.mean.requires_grad
    with torch.inference_mode():
        inside = predict(x * 1.0)
    # The same noise each time, and for the same seed.
    for same in (parts, predict(x), predictive(la, method)(x), inside):
        assert_close(same.tensors(), whole.tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_mappings_and_infinite_inputs(kind):
    x, y = data()
    la = KronLaplace(TakesMapping(network()), "classification", prior_precision=DELTAS)
    la.fit([{"pixels": x, "labels": y}])
    plain, _ = fitted()
    predict = of_kind(la, kind)
    found, expected = predict({"pixels": x, "labels": y}), of_kind(plain, kind)(x)
    assert_close(found.tensors(), expected.tensors())
    infinite = x.clone()
    infinite[1, 0] = torch.inf
    with pytest.raises(ValueError, match="inputs contain NaN or infinity"):
        predict({"pixels": infinite})


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_map_is_the_networks_own_prediction(likelihood):
    model = network().train()
    x = data()[0]
    p = map_predictive(model, likelihood, sigma_noise=0.3)(x)
    assert model.training
    f = model.eval()(x).detach()
    assert_close(p.tensors(), predict_from_outputs(f[None], likelihood, 0.3).tensors())
    assert p.epistemic.abs().max() < 1e-15
    if likelihood == "classification":
        assert_close(p.mean, f.softmax(-1))
        flat, _ = fitted(prior_precision=1e14)
        assert (predictive(flat)(x).mean - p.mean).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_leaves_weights_modes_and_hooks(kind):
    la, x = fitted()
    la.model.train()[2].eval()

    def fails(*_):
        raise KeyboardInterrupt

    before = {name: value.clone() for name, value in la.model.state_dict().items()}
    modes = [module.training for module in la.model.modules()]
    predict = of_kind(la, kind)
    handle = la.model[-1].register_forward_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        predict(x)
    handle.remove()
    assert [module.training for module in la.model.modules()] == modes
    assert all(torch.equal(value, before[n]) for n, value in la.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in la.model.modules())


def test_the_default_takes_the_last_layer_of_large_networks(monkeypatch, caplog):
    """Decided by outputs times parameters; the log says so once."""
    la, x = fitted()
    everything = laplace_predictive(la, PredictiveConfig(layers="all"))(x).mean
    limit = "marglik.prediction.predictive.MOST_DERIVATIVES"
    monkeypatch.setattr(limit, la.n_params * la.n_outputs)
    assert torch.equal(laplace_predictive(la)(x).mean, everything)
    assert not caplog.records
    monkeypatch.setattr(limit, la.n_params * la.n_outputs - 1)
    last = laplace_predictive(la, PredictiveConfig(layers="last"))(x).mean
    for _ in range(2):
        assert torch.equal(laplace_predictive(la)(x).mean, last)
    assert not torch.equal(last, everything)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 backward passes through 147 parameters" in line
    calibrate(la, [data()])
    assert list(la.calibrations) == ["Laplace, probit, last layer"]
    assert laplace_predictive(la).calibration == calibrate(la, [data()]).calibration
    # Samples of all parameters cost the same however many outputs there are.
    assert PredictiveConfig("linearised").for_posterior(la).layers == "all"
