"""Sequences: a loss term for each position, some of which do not count; by brute force."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.options import CurvatureOptions
from marglik.application.runs.config import CurvatureConfig
from marglik.data import Splits
from marglik.posterior.posterior import Posterior
from marglik.prediction import predictive as predictive_module
from marglik.prediction.calibration import calibrate
from marglik.prediction.links import predict_from_gaussian
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import (
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
    predict_all,
)
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineTraining
from tests import oracles
from tests.marglik.networks import TokenNetwork

N, R, C = 5, 4, 3
IGNORED = -100


def network():
    torch.manual_seed(0)
    model = TokenNetwork(C, hidden=2).double()
    for p in model.parameters():
        p.data *= 3  # sure enough that labels matter
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(C, (N, R), generator=generator) for _ in range(2))
    y[:, 3] = y[0, 0] = IGNORED
    y[2] = torch.tensor([IGNORED, 1, IGNORED, IGNORED])
    return x, y


def splits(classes=("a", "b", "c"), ignore_index=IGNORED):
    return Splits(data(), None, data(), "words", classes, ignore_index)


def terms():
    """The logits and the label of each position that counts."""
    x, y = data()
    f = network()(x).detach()
    return [(f[n, r], y[n, r]) for n in range(N) for r in range(R) if y[n, r] != IGNORED]


def losses():
    return [oracles.negative_log_likelihood(f, y, "classification") for f, y in terms()]


@pytest.fixture
def predicted():
    x, y = data()
    predict = map_predictive(network())
    return predict_all(predict, [(x[:2], y[:2]), (x[2:], y[2:])], targets=splits().targets)


def test_metrics_are_means_over_positions_that_count(predicted):
    prediction, labels = predicted
    found = compute_metrics(prediction, labels, "classification")
    count = len(terms())
    assert prediction.mean.shape == (count, C)
    assert labels.shape == (count,) and count == 12
    assert found.nll == pytest.approx(float(sum(losses())) / count)
    right = [int(f.argmax()) == int(y) for f, y in terms()]
    assert found.accuracy == pytest.approx(sum(right) / count)
    for row, entropy, (f, _) in zip(prediction.mean, prediction.aleatoric, terms(), strict=True):
        p = torch.softmax(f, -1)
        assert_close(row, p)
        assert_close(entropy, -(p * p.log()).sum())
    assert_close(prediction.epistemic, torch.zeros(count, dtype=torch.float64))


def test_what_does_not_count_would_change_them():
    """Negative control: with all positions the numbers are others."""
    x, y = data()
    prediction, labels = predict_all(map_predictive(network()), [(x, y.clamp(min=0))])
    assert prediction.mean.shape == (N * R, C)
    every = compute_metrics(prediction, labels, "classification").nll
    assert abs(every - float(sum(losses())) / len(terms())) > 0.05


def trained(ignore_index, y, steps_lr=0.1):
    """The record of an epoch of one batch, and the parameters after its step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=steps_lr)
    learner = PriorLearner(
        "classification", CurvatureOptions(ignore_index=ignore_index), weight_decay=0.01
    )
    training = OnlineTraining(model, optimizer, [(data()[0], y)], learner)
    return training.train_epoch(), torch.cat([p.flatten() for p in model.parameters()])


def test_the_objective_is_the_sum_over_positions_averaged_over_examples():
    record, after = trained(IGNORED, data()[1])
    assert record["loss"] == pytest.approx(float(sum(losses())) / N)
    right = [int(f.argmax()) == int(y) for f, y in terms()]
    assert record["accuracy"] == pytest.approx(sum(right) / len(terms()))
    model = network()
    total = torch.zeros((), dtype=torch.float64)
    x, y = data()
    for f_n, y_n in zip(model(x), y, strict=True):
        for f, label in zip(f_n, y_n, strict=True):
            if label != IGNORED:
                total = total - torch.log_softmax(f, -1)[label]
    penalty = sum(p.square().sum() for p in model.parameters())
    (total / N + 0.5 * 0.01 * penalty).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()])
    assert_close(after, expected)


@pytest.fixture
def laplace():
    options = CurvatureConfig().options(splits().targets)
    laplace = Posterior(network(), "classification", options)
    laplace.fit([data()])
    return laplace


def predictive(laplace, method, **options):
    return laplace_predictive(
        laplace, PredictiveConfig(method, **options), torch.Generator().manual_seed(0)
    )


def flat(prediction):
    return [t.flatten(0, 1) for t in (prediction.mean, prediction.aleatoric, prediction.epistemic)]


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("method", ["probit", "mc"])
def test_each_position_is_predicted_by_its_own_covariance(laplace, method, layers, monkeypatch):
    """As an output (N·R, C) would be, however few positions are worked on at a time."""
    x, _ = data()
    f, covariance = laplace.output_distribution(x, layers)
    assert covariance.shape == (N, R, C, C)
    mask, order = torch.rand(N, R) < 0.5, torch.tensor([2, 0])  # as answers of multiple choice
    chosen = laplace.output_distribution(x, layers, positions=mask, classes=order)
    wanted = f[mask][:, order], covariance[mask][:, order][:, :, order]
    assert_close(chosen, wanted)
    noise = torch.randn(50, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = predict_from_gaussian(
        f.flatten(0, 1), covariance.flatten(0, 1), "classification", method, noise
    )
    expected = [expected.mean, expected.aleatoric, expected.epistemic]
    for memory in (1, 2**13):  # one position, some examples
        monkeypatch.setattr(predictive_module, "default_memory", lambda device, m=memory: m)
        found = predictive(laplace, method, samples=50, layers=layers)(x)
        assert found.mean.shape == (N, R, C) and found.epistemic.shape == (N, R)
        assert_close(flat(found), expected)
    # Negative control: without correlations between a position's outputs.
    if method != "probit":
        diagonal = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        other = predict_from_gaussian(
            f.flatten(0, 1), diagonal.flatten(0, 1), "classification", method, noise
        )
        assert (other.mean - expected[0]).abs().max() > 1e-3


def test_linearised_networks_predict_each_position(laplace):
    x, _ = data()
    few = predictive(laplace, "linearised", networks=3)
    prediction = few(x)
    assert prediction.mean.shape == (N, R, C) and prediction.epistemic.shape == (N, R)
    assert_close(prediction.mean.sum(-1), torch.ones(N, R, dtype=torch.float64))
    assert_close(torch.cat([few(part).mean for part in x.split(2)]), prediction.mean)
    samples = laplace.sample(3, torch.Generator().manual_seed(0))
    f = laplace.linearised_outputs(samples, x)
    assert_close(prediction.mean, f.softmax(-1).mean(0))


def test_predictives_refuse_what_would_not_end(monkeypatch):
    """Before any covariance is computed, from Python as from the command line."""
    monkeypatch.setattr(OutputCovariance, "__call__", lambda *_, **__: pytest.fail("too late"))
    vocabulary = 32_000
    model = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, vocabulary))
    laplace = Posterior(model, "classification", CurvatureOptions(fisher="mc", diagonal_above=99))
    tokens = torch.arange(6).reshape(2, 3)
    laplace.fit([(tokens, tokens)])
    for layers in ("all", "last"):
        config = PredictiveConfig("probit", layers=layers)
        for use in (
            lambda config=config: laplace_predictive(laplace, config)(tokens),
            lambda config=config: calibrate(laplace, [(tokens, tokens)], config),
        ):
            with pytest.raises(ValueError, match="32000 outputs at 3 positions.*linearised"):
                use()
    config = PredictiveConfig("linearised", networks=2)
    assert laplace_predictive(laplace, config)(tokens).mean.shape == (2, 3, vocabulary)
