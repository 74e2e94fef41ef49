"""Predictions and calibrations that need variances alone ask for no more, and are the same."""

import pytest
import torch
from torch.testing import assert_close

from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import HeldOut, calibrate, fit_calibration
from marglik.prediction.links import predict_from_gaussian
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive
from tests.marglik.small_laplace import data, fitted

ENOUGH = [
    ("regression", "probit"),
    ("regression", "mc"),
    ("bernoulli", "probit"),
    ("bernoulli", "mc"),
]
LAYERS = ["all", "last"]


@pytest.fixture
def asked(monkeypatch):
    """What `output_distribution` is asked for, one entry a call."""
    calls, original = [], Posterior.output_distribution

    def spy(self, *args, variance_only=False, **options):
        calls.append(variance_only)
        return original(self, *args, variance_only=variance_only, **options)

    monkeypatch.setattr(Posterior, "output_distribution", spy)
    return calls


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("likelihood", "method"), ENOUGH)
def test_predictions_are_those_of_the_covariances(likelihood, method, layers, asked):
    la, x = fitted(likelihood, sigma_noise=0.3 if likelihood == "regression" else 1.0)
    config = PredictiveConfig(method, samples=20, layers=layers)
    found = laplace_predictive(la, config, torch.Generator().manual_seed(0))(x)
    assert asked == [True]
    f, covariance = la.output_distribution(x, layers)
    assert covariance.dim() == 3
    noise = torch.zeros(1, 3, dtype=torch.float64)  # of samples, which are not drawn
    expected = predict_from_gaussian(f, covariance, likelihood, method, noise, la.sigma_noise)
    for part in ("mean", "aleatoric", "epistemic"):
        assert_close(getattr(found, part), getattr(expected, part), rtol=1e-10, atol=1e-12)
    # Negative control: another layer's part of the variance.
    other = la.output_distribution(x, LAYERS[layers == "all"], variance_only=True)[1]
    wrong = predict_from_gaussian(f, other, likelihood, method, noise, la.sigma_noise)
    assert (wrong.epistemic - expected.epistemic).norm() > 1e-2 * expected.epistemic.norm()


def test_classification_needs_the_covariances(asked):
    """Its parts of the uncertainty are of samples, whose outputs go together."""
    la, x = fitted()
    laplace_predictive(la, PredictiveConfig("probit", samples=5))(x)
    assert asked == [False]
    f, variance = la.output_distribution(x, variance_only=True)
    with pytest.raises(ValueError, match=r"needs the covariances .* not the variances \(8, 3\)"):
        predict_from_gaussian(f, variance, "classification", "probit", f)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_calibrations_are_those_of_the_covariances(likelihood, asked):
    la, _ = fitted(likelihood)
    held_out = [data(likelihood, n=24)]
    found = calibrate(la, held_out, PredictiveConfig("probit")).fit
    assert asked == [True]
    x, y = held_out[0]
    f, covariance = la.output_distribution(x)
    full = HeldOut(likelihood, f, covariance, y, float(la.sigma_noise))
    expected = fit_calibration(full, "probit")
    assert found.nll == pytest.approx(expected.nll, rel=1e-10)
    assert found.nll_uncalibrated == pytest.approx(expected.nll_uncalibrated, rel=1e-10)
    assert found.calibration.covariance_scale == pytest.approx(
        expected.calibration.covariance_scale, rel=1e-6
    )
    # Negative control: twice the covariance has another NLL.
    twice = HeldOut(likelihood, f, 2 * covariance, y, float(la.sigma_noise))
    assert abs(fit_calibration(twice, "probit").nll_uncalibrated - found.nll_uncalibrated) > 1e-6
    # All links of classification together need the covariances.
    assert HeldOut.of(la, held_out).covariance.dim() == (3 if likelihood == "classification" else 2)


def test_the_diagonal_that_laplace_torch_asks_for(asked):
    la, x = fitted("regression")
    f, variance = la._glm_predictive_distribution(x, diagonal_output=True)
    same, covariance = la._glm_predictive_distribution(x)
    assert asked == [True, False]
    assert torch.equal(f, same)
    assert_close(variance, covariance.diagonal(dim1=1, dim2=2))
