"""Predictives against brute force, and metrics against hand-worked cases."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import KronLaplace
from marglik.evaluation import (
    PredictiveConfig,
    classification_metrics,
    laplace_predictive,
    map_predictive,
)


@pytest.fixture
def fitted():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
    ).double()  # fmt: skip
    x = torch.randn(20, 3).double()
    la = KronLaplace(model, "classification", prior_precision=3.0)
    la.fit([(x, x.argmax(-1))])
    model.train()
    return la, x


def predictive(la, method, samples=20):
    config = PredictiveConfig(method, samples)
    return laplace_predictive(la, config, torch.Generator().manual_seed(0))


def test_linearized_samples_are_those_of_the_jacobian(fitted):
    la, x = fitted
    la.model.eval()
    Js, f = la.backend.jacobians(x)
    la.model.train()
    changes = la.sample(20, torch.Generator().manual_seed(0)) - la.mean
    samples = f + torch.einsum("ncp,sp->snc", Js, changes)
    assert_close(predictive(la, "linearized")(x), torch.softmax(samples, -1).mean(0))
    assert la.model.training
    # Negative control: networks that are not linearised predict otherwise.
    assert (predictive(la, "nn")(x) - predictive(la, "linearized")(x)).abs().max() > 1e-3


def test_sampled_networks(fitted):
    la, x = fitted
    samples = la.sample(20, torch.Generator().manual_seed(0))
    expected = torch.zeros(20, 3).double()
    la.model.eval()
    for sample in samples:
        torch.nn.utils.vector_to_parameters(sample, la.params)
        expected += torch.softmax(la.model(x), -1).detach() / 20
    torch.nn.utils.vector_to_parameters(la.mean, la.params)
    assert_close(predictive(la, "nn")(x), expected)


def test_many_linearized_samples_approach_the_sampled_glm(fitted):
    la, x = fitted
    la.model.eval()
    mean, variance = la._glm_predictive_distribution(x)
    noise = torch.randn(4000, 20, 3, generator=torch.Generator().manual_seed(1)).double()
    samples = mean + torch.einsum("nij,snj->sni", torch.linalg.cholesky(variance), noise)
    exact = torch.softmax(samples, -1).mean(0)
    assert (predictive(la, "linearized", 4000)(x) - exact).abs().max() < 0.05


def test_probit_by_its_formula(fitted):
    la, x = fitted
    la.model.eval()
    mean, covariance = la._glm_predictive_distribution(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    expected = torch.softmax(mean / (1 + math.pi / 8 * variance).sqrt(), -1)
    assert_close(predictive(la, "probit")(x), expected)


def test_bridge_by_its_formula(fitted):
    """Zero-sum correction, then α_k = (1 − 2/C + e^{m_k}/C² Σ_j e^{−m_j}) / v_k, normalised."""
    la, x = fitted
    la.model.eval()
    for mean, S, p in zip(
        *la._glm_predictive_distribution(x), predictive(la, "bridge")(x), strict=True
    ):
        m = mean - S.sum(1) * mean.sum() / S.sum()
        v = (S - torch.outer(S.sum(1), S.sum(0)) / S.sum()).diagonal()
        alpha = (1 - 2 / 3 + m.exp() / 9 * (-m).exp().sum()) / v
        assert_close(p, alpha / alpha.sum())


def test_map_predictive_is_the_softmax_in_eval_mode(fitted):
    la, x = fitted
    p = map_predictive(la.model)(x)
    assert la.model.training and not p.requires_grad
    la.model.eval()
    assert_close(p, torch.softmax(la.model(x), -1).detach())


def test_metrics_by_hand():
    p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.0, 1.0]])
    y = torch.tensor([0, 1, 1, 0])
    batches = [(p[:1], y[:1]), (p[1:], y[1:])]  # unequal: the mean is over examples
    metrics = classification_metrics(lambda x: x, batches, 2)
    tiny = torch.finfo(torch.float32).tiny
    expected = -(math.log(0.8) + math.log(0.4) + math.log(0.9) + math.log(tiny)) / 4
    assert metrics["cls/NLL"] == pytest.approx(expected, rel=1e-5)
    assert metrics["cls/accuracy"] == 0.5
    # Bins of width 1/15, one example in each: |right or wrong − confidence|, 1.0 included.
    assert metrics["cal/ECE"] == pytest.approx((0.2 + 0.6 + 0.1 + 1.0) / 4, rel=1e-5)


def test_rounding_above_one_does_not_turn_probabilities_into_logits():
    p = torch.tensor([[1.0000001, 0.0], [0.0, 1.0]])
    assert p.max() > 1
    metrics = classification_metrics(lambda x: x, [(p, torch.tensor([0, 1]))], 2)
    assert metrics["cal/ECE"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("field", ["samples", "batch_size"])
def test_wrong_options(field):
    with pytest.raises(ValueError, match=f"predictive.{field} must be positive, not 0"):
        PredictiveConfig(**{field: 0})
