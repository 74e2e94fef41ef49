"""That the studies measure what they say: their own algebra against oracles."""

import math
import statistics

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from experiments.data.uci import UCI
from experiments.exactness import modes
from experiments.exactness.networks import Config as Exactness
from experiments.exactness.networks import cases
from experiments.optimizers.steps_to_target import best_candidate, settled_at
from experiments.predictions.out_of_distribution import Row, predict_rows
from experiments.table2 import marglik_cifar10 as table2
from experiments.uci import regression as uci
from experiments.weight_decay import any_loop
from marglik.application.cli import main as marglik
from marglik.models import MLP
from marglik.posterior.posterior import Posterior
from marglik.prediction.links import Calibration
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive, map_predictive
from tests import oracles
from tests.experiments.data.text_and_graphs import write_uci

TINY = Exactness(seeds=2, num_examples=3, num_positions=3, num_outputs=2, nodes=(2, 3, 5))


def test_exact_blocks_are_those_of_the_oracle():
    for case in list(cases(TINY))[:6]:
        torch.manual_seed(0)
        model, (x, _) = case.build()
        blocks = modes.exact_blocks(model, x)
        for name, block in oracles.dense_ggn_blocks(model, x, "regression").items():
            assert_close(blocks[name], block)


def test_rows_of_one_pass_are_the_predictives():
    torch.manual_seed(0)
    posterior = Posterior(MLP(5, (7,), 3), "classification", prior_precision=0.5)
    posterior.fit([(torch.randn(20, 5), torch.arange(20) % 3)])
    x, samples = torch.randn(9, 5), 30
    rows = {
        "scaled": Row("all", Calibration(0, 0.4)),
        "calibrated": Row("all", Calibration(0.3, 0.6)),
        "last": Row("last", Calibration(0.3, 0.6)),
    }
    found = predict_rows(posterior, rows, x.split(4), samples)
    expected = {"scaled": map_predictive(posterior.model, output_temperature=0.4)(x)}
    for name in ("calibrated", "last"):
        config = PredictiveConfig("mc", samples=samples, layers=rows[name].layers)
        generator = torch.Generator().manual_seed(0)
        expected[name] = laplace_predictive(posterior, config, generator, rows[name].calibration)(x)
    for name, prediction in expected.items():
        assert_close(found[name].mean, prediction.mean)
        assert_close(found[name].epistemic, prediction.epistemic)
    assert not torch.allclose(found["calibrated"].mean, found["last"].mean, atol=1e-3)


# Regression


ROWS = np.array(
    [[1.0, 7.0, 10.0, 4.0], [2.0, 7.0, 20.0, 3.0], [4.0, 7.0, 60.0, 9.0], [9.0, 8.0, 90.0, 1.0]]
)  # the second column is constant over the first three rows, the third is the target
UCI_TEXTS = {
    "data": "\n".join(" ".join(map(str, row)) for row in ROWS),
    "index_features": "0\n1\n3\n",
    "index_target": "2\n",
    "index_train_0": "0.0\n2.0\n1.0\n",
    "index_test_0": "3.0\n",
}


def test_uci_is_standardised_by_the_training_part(tmp_path):
    splits = UCI("tiny", path=write_uci(tmp_path / "uci.tar.gz", "tiny", UCI_TEXTS)).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    # By hand: rows 0, 2, 1; targets 10, 60, 20 with mean 30 and variance (400 + 900 + 100) / 3.
    std = (1400 / 3) ** 0.5
    assert splits.target_scale == pytest.approx((30, std))
    assert_close(y, torch.tensor([[-20.0], [30.0], [-10.0]]) / std)
    assert_close(y_test, torch.tensor([[60.0]]) / std)
    assert_close(x[:, 0], (torch.tensor([1.0, 4.0, 2.0]) - 7 / 3) / (14 / 9) ** 0.5)
    assert not x[:, 1].any() and x_test[0, 1] == 1  # its scale is not known
    # Negative control: with the test example the mean would be another.
    assert abs(splits.target_scale[0] - ROWS[:, 2].mean()) > 1


def test_metrics_of_regression_are_in_the_targets_units():
    class Splits:
        target_scale = 30.0, 4.0

    mean, variance = torch.tensor([[0.5], [1.0]]).double(), torch.tensor([[0.25], [1.0]]).double()
    y = torch.tensor([[0.0], [2.0]]).double()
    metrics = uci.metrics_of(uci.Gaussian(mean, variance, 1.0, 1), Splits(), y)
    densities = [
        statistics.NormalDist(30 + 4 * m, 4 * v**0.5).pdf(30 + 4 * t)
        for m, v, t in ((0.5, 0.25, 0.0), (1.0, 1.0, 2.0))
    ]
    assert metrics["log_likelihood"] == pytest.approx(statistics.mean(map(math.log, densities)))


# Optimisers


def test_what_settles_at_a_target_first():
    def curve(lr, values, diverged=None):
        candidate = {"lr": lr, "damping": None}
        steps = [*range(1, len(values) + 1)]
        return {"step": steps, "accuracy": values, "diverged": diverged, "candidate": candidate}

    curves = [curve(1.0, [0.1, 0.5, 0.3]), curve(2.0, [0.1, 0.2, 0.6]), curve(3.0, [0.9], "NaN")]
    found = {"metric": "accuracy", "curves": curves, "config": {"method": "m"}}
    # The first curve is above 0.5 for a moment only, and the last one diverged.
    assert [settled_at(c, "accuracy", 0.5) for c in curves] == [None, 3, None]
    assert [settled_at(c, "accuracy", 0.2) for c in curves] == [2, 2, None]
    assert [best_candidate(found, target).lr for target in (0.5, 0.3, None)] == [2.0, 1.0, 2.0]


# Table 2


def settings(capsys, *config):
    with pytest.raises(SystemExit):
        marglik(["train", *table2.Config(*config).options(), "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_full_size_is_the_papers(capsys, tmp_path, monkeypatch):
    """Against the paper's settings, by hand."""
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))  # there is no archive
    found = settings(capsys, "full", "expand")
    network = found["model"]["init_args"]
    assert (network["depth"], network["widen_factor"], network["num_classes"]) == (16, 4, 10)
    assert found["data"]["class_path"] == "marglik.data.CIFAR10"
    assert (found["epochs"], found["batch_size"], found["augmentation"]) == (100, 128, "standard")
    assert (found["optimizer"]["name"], found["optimizer"]["lr"]) == ("sgd", 0.1)
    prior, curvature = found["prior"], found["curvature"]
    assert (prior["weight_decay"] * 50_000, prior["structure"]) == (250, "per_tensor")
    assert (prior["every"], prior["steps"], prior["burn_in"]) == (5, 100, 0)
    assert (prior["method"], curvature["kfac_approx"], curvature["fisher"]) == (
        "adam", "expand", "exact",
    )  # fmt: skip
    assert (prior["curvature_from"], prior["keep"]) == ("pass", "best")
    sampled = settings(capsys, "full", "expand sampled")
    assert sampled["curvature"]["kfac_approx"] == "expand"
    assert (sampled["prior"]["curvature_from"], sampled["prior"]["keep"]) == ("auto", "last")
    (tmp_path / "cifar10-jpeg.tar.gz").write_bytes(b"")
    fixed = settings(capsys, "scaled", "fixed", False)
    assert fixed["data"]["init_args"]["name"] == "CIFAR-10 (JPEG)"
    assert (fixed["prior"]["method"], fixed["curvature"]["kfac_approx"]) == ("fixed", "reduce")
    assert (fixed["augmentation"], fixed["data"]["init_args"]["max_train"]) == ("none", 4000)


def test_an_average_that_was_evaluated_stays_as_it_was():
    """Torch's `vector_to_parameters` makes the parameters views of the vector."""
    model = nn.Linear(3, 2)
    before = parameters_to_vector(model.parameters()).detach().clone()
    average = torch.arange(8.0)
    with any_loop.parameters(model, average):
        assert torch.equal(parameters_to_vector(model.parameters()), average)
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(average, torch.arange(8.0))
