"""The prior found afterwards by a validation loss: the lowest of known functions."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

from marglik.prediction.evaluation import predict_all
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import laplace_predictive
from marglik.training.post_hoc import minimize_validation_loss
from tests.marglik.posteriors import CASES, data, fitted

pytestmark = pytest.mark.usefixtures("one_thread")


def valleys(laplace):
    """A wide valley around δ = 10, and a deeper one around 10^5.6, which no grid point hits."""
    v = math.log10(float(laplace.prior_precision[0]))
    return -math.exp(-((v - 1.0) ** 2) / 4) - 1.5 * math.exp(-((v - 5.6) ** 2) / 1.5)


def test_the_deepest_of_several_valleys():
    laplace = fitted()
    calls = []

    def loss(posterior):
        calls.append(float(posterior.prior_precision[0]))
        return valleys(posterior)

    found = minimize_validation_loss(laplace, loss)
    assert list(found.prior_precision) == ["all"]
    assert found.prior_precision["all"] == pytest.approx(10**5.6, rel=0.1)
    assert laplace.prior_precision.tolist() == [found.prior_precision["all"]]
    assert found.objective == valleys(laplace)
    assert found.evaluations == len(calls) < 30
    grid = []
    for delta in torch.logspace(-2, 8, 1001).tolist():
        laplace.prior_precision = delta
        grid.append(valleys(laplace))
    assert found.objective <= min(grid) + 1e-3
    # Negative control: Brent's method alone ends in the other valley.
    laplace.prior_precision = found.prior_precision["all"]

    def alone(log_delta):
        laplace.prior_precision = math.exp(log_delta)
        return valleys(laplace)

    bounds = (math.log(1e-2), math.log(1e8))
    assert minimize_scalar(alone, bounds=bounds, method="bounded").x < math.log(100)


@pytest.mark.parametrize(("slope", "at_bound"), [(1.0, True), (-1.0, True), (None, False)])
def test_a_minimum_at_a_bound_is_named(slope, at_bound):
    def loss(laplace):
        log_delta = laplace.prior_precision.log().item()
        return (log_delta - 3) ** 2 if slope is None else slope * log_delta

    found = minimize_validation_loss(fitted(), loss)
    assert found.at_bound is at_bound


@pytest.mark.parametrize("case", ["classification", "regression", "bernoulli"])
def test_a_loader_stands_for_the_loss_on_it(case):
    laplace, other = fitted(**CASES[case]), fitted(**CASES[case])
    batches = [tuple(t.float() if t.is_floating_point() else t for t in data(case))]
    key = "reg/NLL" if case == "regression" else "cls/NLL"

    def nll(posterior):
        predict = laplace_predictive(posterior, generator=torch.Generator().manual_seed(0))
        return compute_metrics(*predict_all(predict, batches), case)[key]

    found = minimize_validation_loss(laplace, batches)
    assert found == minimize_validation_loss(other, nll)
    assert nll(laplace) == found.objective
    for delta in torch.logspace(-2, 8, 26).tolist():  # no δ of a grid is better
        laplace.prior_precision = delta
        assert found.objective <= nll(laplace) + 1e-4
    # Negative control: other data, another loss.
    x, y = batches[0]
    assert minimize_validation_loss(other, [(x[:3], y[:3])]).objective != found.objective


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_search_that_fails_leaves_the_prior(error):
    laplace, calls = fitted(), []

    def loss(posterior):
        calls.append(0)
        if len(calls) == 13:
            raise error
        return 1.0

    with pytest.raises(error):
        minimize_validation_loss(laplace, loss)
    assert laplace.prior_precision.tolist() == fitted().prior_precision.tolist()
