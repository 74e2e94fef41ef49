"""The estimators give the numbers of direct calls, and keep scikit-learn's promises."""

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from marglik import (
    MarglikClassifier,
    MarglikRegressor,
    acquire,
    calibrate,
    marglik_training,
)
from marglik.data import Batches

N, COLUMNS = 240, 5
random = np.random.RandomState(0)
X, Y = make_friedman1(N, COLUMNS, noise=1.0, random_state=0)
X = X * [1, 10, 100, 1, 1] + 5
LABELS = np.array(["low", "middle", "high"])[
    np.digitize(X[:, 0] + 0.1 * random.randn(N), [5.3, 5.7])
]


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


@pytest.mark.parametrize("likelihood", ["classification", "regression", "heteroscedastic"])
def test_predictions_are_those_of_the_direct_calls(likelihood):
    """`marglik_training`, `calibrate`, then a fit to all, on columns that numpy standardises."""
    is_classes = likelihood == "classification"
    options = {"epochs": 6, "random_state": np.random.RandomState(1), "held_out": 0.25}
    expected_seed = np.random.RandomState(1).randint(2**31)
    kind = MarglikClassifier if is_classes else MarglikRegressor
    outputs = {"classification": 3, "regression": 1, "heteroscedastic": 2}[likelihood]
    y = LABELS if is_classes else Y
    found = clone(kind(network(outputs), likelihood=likelihood, **options)).fit(X, y)

    inputs = torch.tensor((X - X.mean(0)) / X.std(0))
    if is_classes:
        targets = torch.tensor(np.unique(LABELS, return_inverse=True)[1])
    else:
        targets = torch.tensor((Y - Y.mean()) / Y.std())[:, None]
    train, held = train_test_split(
        np.arange(N), test_size=0.25, random_state=expected_seed,
        stratify=targets if is_classes else None,
    )  # fmt: skip
    model = network(outputs)
    loader = Batches(inputs[train], targets[train], 32, shuffle=True, seed=expected_seed)
    laplace, *_ = marglik_training(
        model, loader, likelihood, n_epochs=6, optimizer_kwargs={"lr": 1e-2},
        held_out=[(inputs[held], targets[held])],
    )  # fmt: skip
    decays = laplace.prior_precision / len(train)
    np.testing.assert_allclose([*found.weight_decays_.values()], decays)
    fit = calibrate(laplace, [(inputs[held], targets[held])])
    laplace.fit([(inputs, targets)])
    _, variance = laplace.output_distribution(inputs[:9], variance_only=True)
    s, tau = fit.calibration.covariance_scale, fit.calibration.output_temperature
    f = model(inputs[:9]).detach()
    if is_classes:
        f = f / tau / (1 + np.pi / 8 * s / tau**2 * variance).sqrt()
        torch.testing.assert_close(torch.tensor(found.predict_proba(X[:9])), f.softmax(1))
        assert [*found.predict(X[:9])] == [*np.unique(LABELS)[f.argmax(1)]]
    else:
        mean, std = map(torch.tensor, found.predict(X[:9], return_std=True))
        torch.testing.assert_close(mean, f[:, 0] * Y.std() + Y.mean())
        if outputs == 2:  # E N² exp(k u), with the learned numbers
            n, k = (laplace.likelihood.parameters[name] for name in ("noise", "strength"))
            assert k != 1 and n != 1 and f[:, 1].std() > 0.01
            total = n**2 * (k * f[:, 1:] + 0.5 * k**2 * s * variance[:, 1:]).exp()
            total = total + s * variance[:, :1]
        else:
            total = s * variance + fit.calibration.sigma_noise**2
        torch.testing.assert_close(std, total[:, 0].sqrt() * Y.std())
    assert found.posterior_.n_data == N


@pytest.mark.parametrize("kind", [MarglikClassifier, MarglikRegressor])
def test_rows_to_label_are_those_of_the_direct_call(kind):
    y = LABELS if kind is MarglikClassifier else Y
    found = kind(epochs=2, random_state=0).fit(X[:100], y[:100])
    x = torch.tensor((X - X[:100].mean(0)) / X[:100].std(0))
    for joint in (False, True):
        expected = acquire(found.posterior_, x, 4, labelled=range(100), joint=joint).index
        chosen = found.acquire(X, 4, labelled=range(100), joint=joint)
        assert chosen.tolist() == expected.tolist() and chosen.min() >= 100
    assert chosen.tolist() != found.acquire(X, 4, "random", labelled=range(100)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MarglikClassifier, MarglikRegressor])
def test_all_of_scikit_learns_checks_pass(kind):
    """None is expected to fail; array-API inputs are skipped by scikit-learn's own default."""
    done = check_estimator(kind(epochs=20, random_state=0), on_skip=None)
    skipped = {one["check_name"] for one in done if one["status"] != "passed"}
    assert len(done) > 40 and skipped <= {"check_array_api_input"}


def test_data_frames_intervals_and_networks_of_any_kind():
    """A function that makes the network, images as inputs; columns are matched by their names."""
    frame = pandas.DataFrame(X, columns=list("abcde"))
    regressor = MarglikRegressor(
        lambda columns, outputs: nn.Linear(columns, outputs), epochs=30, random_state=0
    ).fit(frame, Y)
    assert [*regressor.feature_names_in_] == list("abcde")
    with pytest.raises(ValueError, match="feature names"):
        regressor.predict(frame[list("edcba")])
    low, high = regressor.predict_interval(frame, 0.9)
    mean, std = regressor.predict(frame, return_std=True)
    assert 0.82 < np.mean((low < Y) & (high > Y)) < 0.97
    assert np.mean(abs(Y - mean) < 0.5 * (high - mean)) < 0.75  # the control: half as wide
    np.testing.assert_allclose((high - low) / std, 2 * 1.6448536, rtol=1e-5)
    images = X[:, None, :4].reshape(N, 1, 2, 2)
    convolution = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3))
    before = [p.clone() for p in convolution.parameters()]
    classifier = MarglikClassifier(convolution, epochs=30, random_state=0).fit(images, LABELS)
    assert classifier.score(images, LABELS) > 0.5
    assert all(map(torch.equal, before, convolution.parameters()))  # a copy was trained


def test_random_state_decides_dropout_too():
    found = []
    for state, others in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(others)
        model = nn.Sequential(nn.Dropout(0.5), network(1))
        found.append(MarglikRegressor(model, epochs=2, random_state=state).fit(X, Y).predict(X))
    np.testing.assert_array_equal(found[0], found[1])
    assert abs(found[1] - found[2]).max() > 1e-3  # the control


def test_few_examples_calibrate_nothing():
    few = MarglikClassifier(network(3), epochs=2, random_state=0).fit(X[:60], LABELS[:60])
    assert few.posterior_.n_data == 60 and not few.posterior_.calibrations
    inputs = torch.tensor((X[:60] - X[:60].mean(0)) / X[:60].std(0))
    at_map = few.model_(inputs).softmax(1).detach()
    torch.testing.assert_close(torch.tensor(few.predict_proba(X[:60])), at_map)
    with pytest.raises(ValueError, match="y contains one class, 'low'"):
        MarglikClassifier().fit(X[:3], ["low"] * 3)


def test_what_does_not_fit_is_named():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    with pytest.raises(ValueError, match=r"has 5 outputs, but there are 3 classes"):
        MarglikClassifier(lambda columns, outputs: nn.Linear(columns, 5), epochs=1).fit(x, y)
    with pytest.raises(ValueError, match="held_out=-0.5 must be a fraction"):
        MarglikClassifier(held_out=-0.5).fit(x, y)
    one = MarglikClassifier(
        lambda columns, _: nn.Linear(columns, 1),
        likelihood="ordinal(cuts=[-1,1])",
        held_out=0,
        epochs=1,
    )
    probabilities = one.fit(x, y).predict_proba(x)
    assert probabilities.shape == (60, 3) and probabilities.std() > 0.01
    with pytest.raises(ValueError, match="likelihood='poisson' is not .*'regression' or 'heteros"):
        MarglikRegressor(likelihood="poisson").fit(x, x[:, 0])
    numbers = MarglikRegressor(epochs=1).fit(x, x[:, 0])
    for level in (90, -0.5):
        with pytest.raises(ValueError, match="Pass a number between 0 and 1"):
            numbers.predict_interval(x, level)


def test_mapie_makes_intervals_of_an_estimator():
    """By the quantile of new residuals."""
    regression = pytest.importorskip("mapie.regression")

    rng = np.random.default_rng(0)
    X = rng.normal(size=(260, 2))
    y = X[:, 0] + 0.3 * rng.normal(size=260)
    regressor = MarglikRegressor(epochs=5, random_state=0).fit(X[:100], y[:100])
    conformal = regression.SplitConformalRegressor(regressor, confidence_level=0.9)
    _, intervals = conformal.conformalize(X[100:179], y[100:179]).predict_interval(X[179:])
    residuals = np.sort(abs(y[100:179] - regressor.predict(X[100:179])))
    half = (intervals[:, 1, 0] - intervals[:, 0, 0]) / 2
    np.testing.assert_allclose(half, residuals[int(np.ceil(80 * 0.9)) - 1])
