"""scikit-learn's models beside a network: their scores by hand, and what is said of them."""

import numpy as np
import pytest
import torch
from scipy.stats import norm, ttest_rel
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler

from kfac_backend.likelihoods import likelihood_of
from marglik.application.data.splits import Splits
from marglik.application.simple_models import (
    LINEAR,
    TREES,
    evaluate_simple_models,
    simple_models_in_words,
)
from marglik.prediction.metric_types import Metrics


def rows(likelihood, n=120):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(n, 3, generator=generator) + 1
    noise = torch.randn(n, 1, generator=generator)
    y = x[:, :1] + x[:, 1:2].abs() + noise
    y = y if likelihood == "regression" else (y[:, 0] > 2).long() + (y[:, 0] > 4)
    return (x[:80], y[:80]), (x[80:], y[80:])


def test_classes_and_the_networks_difference():
    train, test = rows("classification")
    network = torch.rand(40, generator=torch.Generator().manual_seed(1)).double()
    scores = Metrics(nll=network)
    found, differences = evaluate_simple_models(
        train, Splits(train, None, test, "rows"), likelihood_of("classification"), scores
    )
    scaler = StandardScaler().fit(train[0])
    p = (
        LogisticRegression(max_iter=1000)
        .fit(scaler.transform(train[0]), train[1])
        .predict_proba(scaler.transform(test[0]))
    )
    assert found[LINEAR].metrics.nll == pytest.approx(log_loss(test[1], p), 1e-5)
    of_rows = -np.log(p[np.arange(40), test[1]])
    ends = ttest_rel(network, of_rows).confidence_interval(0.95)
    expected = [(network.numpy() - of_rows).mean(), ends.low, ends.high]
    assert differences[LINEAR] == pytest.approx(expected, rel=1e-3)
    said = simple_models_in_words(found, {LINEAR: [0.2, 0.1, 0.3], TREES: [0.1, -0.1, 0.3]})
    assert said.endswith(f"Better than the network here: {LINEAR}.")
    said = simple_models_in_words(found, {LINEAR: [-0.2, -0.3, -0.1], TREES: [0.1, -0.1, 0.3]})
    assert "Better" not in said  # the control


@pytest.mark.parametrize("likelihood", ["regression", "heteroscedastic"])
def test_numbers_have_the_width_of_errors_across_folds(likelihood):
    train, test = rows("regression")
    scores = Metrics(nll=torch.zeros(40).double() + torch.arange(40))
    found, _ = evaluate_simple_models(
        train, Splits(train, None, test, "rows"), likelihood_of(likelihood), scores
    )
    (x, y), (x_test, y_test) = ([t.double().numpy() for t in part] for part in (train, test))
    errors = []
    for inside, outside in KFold(5).split(x):
        trees = HistGradientBoostingRegressor(random_state=0).fit(x[inside], y[inside, 0])
        errors.append(trees.predict(x[outside]) - y[outside, 0])
    std = np.mean(np.concatenate(errors) ** 2) ** 0.5
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y[:, 0]).predict(x_test)
    nll = -norm(mean, std).logpdf(y_test[:, 0]).mean()
    assert found[TREES].metrics.nll == pytest.approx(nll, rel=1e-6)


def test_other_likelihoods_have_none():
    train, test = rows("regression")
    assert evaluate_simple_models(
        train, Splits(train, None, test, "rows"), likelihood_of("poisson"), Metrics()
    ) == ({}, {})
