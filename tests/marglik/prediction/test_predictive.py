"""Predictives of a network and of its posterior, against brute force."""

import math

import pytest
import torch
from scipy import integrate, special, stats
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from marglik import KronLaplace
from marglik.prediction.calibration import calibrate
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import (
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
)
from tests import oracles
from tests.evidence_oracles import laplace_log_evidence
from tests.marglik.small_laplace import DELTAS, TakesMapping, data, fitted, network

LIKELIHOODS = ["classification", "regression", "bernoulli"]
METHODS = {
    "classification": ("probit", "bridge", "mc", "linearised"),
    "regression": ("probit", "linearised"),
    "bernoulli": ("probit", "mc", "linearised"),
}
EVERY = [(likelihood, method) for likelihood in LIKELIHOODS for method in METHODS[likelihood]]


def predictive(la, method, seed=0, **options):
    config = PredictiveConfig(method, **{"samples": 20, "networks": 5} | options)
    return laplace_predictive(la, config, torch.Generator().manual_seed(seed))


def values(prediction):
    return prediction.mean, prediction.aleatoric, prediction.epistemic


def jacobian(model, x):
    """Of the outputs with respect to all parameters, (N, C, P)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    J = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    return torch.cat([J[name].flatten(2) for name in parameters], dim=-1).detach()


def test_mc_approaches_samples_of_the_parameters():
    """Linearised networks f + J (θ − θ*), whose parameters are drawn from the posterior."""
    la, x = fitted()
    J = jacobian(la.model.eval(), x)
    changes = la.sample(20_000, torch.Generator().manual_seed(1)) - la.mean
    outputs = la.model(x).detach() + torch.einsum("ncp,sp->snc", J, changes)
    p = torch.softmax(outputs, -1)
    found = predictive(la, "mc", samples=20_000)(x)
    assert (found.mean - p.mean(0)).abs().max() < 0.015
    assert (found.aleatoric - torch.special.entr(p).sum(-1).mean(0)).abs().max() < 0.015
    sampled = predictive(la, "linearised", networks=4000)(x)
    assert (sampled.mean - found.mean).abs().max() < 0.02
    assert (sampled.epistemic - found.epistemic).abs().max() < 0.02
    # Negative control: networks that are not linearised predict otherwise.
    other = la(x, pred_type="nn", link_approx="mc", n_samples=500)
    assert (other - found.mean).abs().max() > 0.03


def test_probit_by_its_formula():
    la, x = fitted()
    f, covariance = la.output_distribution(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    expected = torch.softmax(f / (1 + math.pi / 8 * variance).sqrt(), -1)
    assert_close(predictive(la, "probit")(x).mean, expected)
    assert_close(predictive(la, "probit")(x).mean, la(x))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_linearised_networks_are_those_with_sampled_parameters(likelihood):
    la, x = fitted(likelihood, sigma_noise=0.3 if likelihood == "regression" else 1.0)
    predict = predictive(la, "linearised")
    J = jacobian(la.model.eval(), x)
    outputs = [
        la.model(x).detach() + J @ (sample - la.mean)
        for sample in la.sample(5, torch.Generator().manual_seed(0))
    ]
    before = [p.clone() for p in la.model.parameters()]
    found = predict(x)
    if likelihood == "regression":
        mean = sum(outputs) / 5
        variance = sum((f - mean) ** 2 for f in outputs) / 5
        expected = mean, torch.full_like(mean, 0.09), variance
    else:
        link = torch.sigmoid if likelihood == "bernoulli" else lambda f: torch.softmax(f, -1)
        p = [link(f) for f in outputs]
        entropies = [
            -(q * q.log()).sum(-1) if likelihood == "classification"
            else -(q * q.log() + (1 - q) * (1 - q).log()) for q in (*p, sum(p) / 5)
        ]  # fmt: skip
        aleatoric = sum(entropies[:5]) / 5
        expected = sum(p) / 5, aleatoric, entropies[5] - aleatoric
    assert_close(values(found), expected)
    assert all(torch.equal(a, b) for a, b in zip(la.model.parameters(), before, strict=True))
    assert (found.mean - predictive(la, "linearised", seed=1)(x).mean).abs().max() > 1e-3


def test_bernoulli_from_fit_to_prediction_by_brute_force():
    la, x = fitted("bernoulli", kfac_approx="expand")
    targets, model = data("bernoulli")[1], la.model.eval()
    H = torch.block_diag(*oracles.kfac_blocks(model, x, "bernoulli", "expand").values())
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    delta = torch.cat([
        d.double().expand(p.numel()) for d, p in zip(DELTAS, model.parameters(), strict=True)
    ])  # fmt: skip
    f = model(x).detach()
    log_likelihood = -binary_cross_entropy_with_logits(f, targets, reduction="sum")
    expected = laplace_log_evidence(log_likelihood, theta, H, delta)
    assert float(la.log_marginal_likelihood()) == pytest.approx(expected, rel=1e-10)

    J = jacobian(model, x)
    covariance = J @ torch.linalg.solve(H + torch.diag(delta), J.mT)
    mean = predictive(la, "mc")(x).mean
    for n in range(len(x)):
        for c in range(3):
            normal = stats.norm(float(f[n, c]), math.sqrt(covariance[n, c, c]))
            integral, _ = integrate.quad(lambda t, g=normal: special.expit(t) * g.pdf(t), -30, 30)
            assert float(mean[n, c]) == pytest.approx(integral, abs=1e-6)
    assert (mean - torch.sigmoid(f)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="'bridge' is for classification, not 'bernoulli'"):
        predictive(la, "bridge")(x)


def test_regression_adds_the_noise():
    la, x = fitted("regression", sigma_noise=0.3)
    p = predictive(la, "probit")(x)
    mean, covariance = la(x)
    assert_close(p.mean, mean)
    assert_close(p.total, covariance.diagonal(dim1=1, dim2=2) + 0.09)
    assert_close(values(predictive(la, "mc")(x)), values(p))


@pytest.mark.parametrize(("likelihood", "method"), EVERY)
def test_does_not_depend_on_batches(likelihood, method):
    la, x = fitted(likelihood)
    predict = predictive(la, method)
    whole = predict(x)
    parts = Prediction.cat([predict(part) for part in (x[:1], x[1:4], x[4:])])
    assert_close(values(parts), values(whole))
    assert_close(values(predict(x)), values(whole))  # the same noise each time
    assert_close(values(predictive(la, method)(x)), values(whole))  # and for the same seed


def test_memory_reaches_the_covariance(monkeypatch):
    given = []

    class Recording(OutputCovariance):
        def __init__(self, *args, memory):
            given.append(memory)
            super().__init__(*args, memory=memory)

    monkeypatch.setattr("marglik.posterior.posterior.OutputCovariance", Recording)
    la, x = fitted()
    for memory in (1, 64, 64):
        predictive(la, "probit", memory=memory)(x)
    assert given == [2**20, 2**26]  # and the last one was kept


def test_last_layer():
    la, x = fitted()
    frozen = network()
    frozen[:-1].requires_grad_(False)
    alone, _ = fitted(model=frozen, prior_precision=DELTAS[-2:])
    for method in ("probit", "bridge", "mc"):
        p = predictive(la, method, layers="last")(x)
        assert_close(values(p), values(predictive(alone, method)(x)))
    assert (p.epistemic < predictive(la, "mc")(x).epistemic).all()
    # Frozen layers are no obstacle for linearised networks.
    assert predictive(alone, "linearised")(x).epistemic.max() > 1e-3


@pytest.mark.parametrize(("likelihood", "method"), [*EVERY, ("classification", "map")])
def test_modes_gradients_and_inference_mode(likelihood, method):
    la, x = fitted(likelihood)
    la.model.train()
    la.model[1].eval()
    modes = [module.training for module in la.model.modules()]
    predict = map_predictive(la.model) if method == "map" else predictive(la, method)
    p = predict(x)
    assert [module.training for module in la.model.modules()] == modes
    assert not p.mean.requires_grad
    with torch.inference_mode():
        inside = predict(x * 1.0)
    assert_close(values(inside), values(p))  # dropout is off, too
    assert_close(values(predict(x)), values(p))


@pytest.mark.parametrize("method", ["probit", "linearised", "map"])
def test_mappings(method):
    x, y = data()
    batch = {"pixels": x, "labels": y}
    la = KronLaplace(TakesMapping(network()), "classification", prior_precision=DELTAS)
    la.fit([batch])
    plain, _ = fitted()
    found, expected = (
        map_predictive(each.model) if method == "map" else predictive(each, method)
        for each in (la, plain)
    )
    assert_close(values(found(batch)), values(expected(x)))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_map_is_the_networks_own_prediction(likelihood):
    model = network().train()
    x = data()[0]
    p = map_predictive(model, likelihood, sigma_noise=0.3)(x)
    assert model.training
    f = model.eval()(x).detach()
    if likelihood == "regression":
        assert_close(values(p), (f, torch.full_like(f, 0.09), torch.zeros_like(f)))
        return
    link = torch.sigmoid if likelihood == "bernoulli" else nn.Softmax(-1)
    assert_close(p.mean, link(f))
    assert_close(p.aleatoric, p.entropy)
    assert p.epistemic.abs().max() < 1e-15


def test_a_flat_posterior_is_the_map():
    la, x = fitted(prior_precision=1e14)
    expected = map_predictive(la.model)(x).mean
    for method in ("probit", "mc", "linearised"):
        assert (predictive(la, method)(x).mean - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "linearized"}, "predictive.method='linearized' is not supported; choose one"),
        ({"layers": "first"}, "predictive.layers='first' is not supported; choose one of 'all'"),
        (
            {"method": "linearised", "layers": "last"},
            "layers 'last' is not for method 'linearised'; ",
        ),
        *(
            ({name: 0}, f"predictive.{name} must be positive, not 0")
            for name in ("samples", "networks", "batch_size", "memory")
        ),
        *(({n: 10**6}, f"predictive.{n} must be at most 100000") for n in ("samples", "networks")),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        PredictiveConfig(**options)


class InPlace(nn.Sequential):
    """Changes its input in place, as normalisation at the start of a forward does."""

    def forward(self, x):
        return super().forward(x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("method", ["probit", "mc", "linearised", "last", "MAP"])
def test_a_model_that_changes_its_input_in_place(method):
    (x, y), model = data(), network()
    plain, _ = fitted(model=nn.Sequential(nn.Identity(), *model))
    plain.fit([((x - 0.5) / 0.25, y)])
    la = KronLaplace(InPlace(nn.Identity(), *model), "classification", prior_precision=DELTAS)
    la.fit([(x, y)])
    config = {"layers": "last"} if method == "last" else {"method": method}
    means = []
    for each, inputs in ((la, x), (plain, (x - 0.5) / 0.25)):
        before = inputs.clone()
        if method == "MAP":
            predict = map_predictive(each.model)
        else:
            predict = calibrate(each, [(inputs, y)], PredictiveConfig(**config))
        means.append(predict(inputs).mean)
        assert torch.equal(inputs, before)
    assert_close(*means)


@pytest.mark.parametrize("method", ["MAP", "probit", "mc", "linearised", "last"])
def test_infinite_inputs_are_named(method):
    la, x = fitted()
    if method == "MAP":
        predict = map_predictive(la.model)
    else:
        config = {"layers": "last"} if method == "last" else {"method": method}
        predict = laplace_predictive(la, PredictiveConfig(**config))
    assert predict(x).mean.isfinite().all()
    x = x.clone()
    x[1, 0] = torch.inf
    with pytest.raises(ValueError, match="inputs contain NaN or infinity"):
        predict(x)


class Twice(nn.Sequential):
    """Returns a tuple, where it is told to."""

    returns_tuple = False

    def forward(self, x):
        f = super().forward(x)
        return (f, f) if self.returns_tuple else f


@pytest.mark.parametrize("method", ["probit", "linearised", "MAP", "laplace-torch's nn"])
def test_outputs_that_are_no_tensor(method):
    model, x = Twice(nn.Linear(3, 2)), torch.randn(4, 3)
    la = KronLaplace(model, "classification")
    la.fit([(x, torch.tensor([0, 1, 0, 1]))])
    predict = {
        "MAP": map_predictive(model),
        "laplace-torch's nn": lambda x: la(x, pred_type="nn", link_approx="mc"),
    }.get(method) or predictive(la, method)
    model.returns_tuple = True
    with pytest.raises(TypeError, match="returned tuple; a tensor of outputs .* is needed. Wrap"):
        predict(x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "The model is None"),
        ((nn.DataParallel(nn.Linear(3, 2)),), TypeError, "DataParallel.* Pass what it holds"),
        ((nn.Linear(3, 2), "poisson"), ValueError, "'poisson' is not supported"),
        ((nn.Linear(3, 2), "regression", math.inf), ValueError, "sigma_noise must be positive"),
    ],
)
def test_what_the_map_cannot_predict_with(arguments, error, message):
    with pytest.raises(error, match=message):
        map_predictive(*arguments)
