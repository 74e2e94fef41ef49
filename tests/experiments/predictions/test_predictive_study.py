"""The study of the Laplace predictive: its dense posterior against plain algebra, its report."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from experiments.predictions import predictive_study
from experiments.predictions.predictive_study import CALIBRATIONS, Config, Dense, output_jacobians
from marglik.models import MLP
from marglik.posterior.calibration import Calibration
from marglik.prediction.calibration import HeldOut
from marglik.prediction.links import predict_from_gaussian
from tests.oracles import dense_ggn


def problem(likelihood):
    torch.manual_seed(0)
    model = MLP(4, (5,), 3).double()
    y = torch.randn(7, 3).double() if likelihood == "regression" else torch.randint(3, (7,))
    return model, torch.randn(7, 4).double(), y


def jacobian(model, x):
    """(N, C, P), all examples at once."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    parts = jacrev(lambda values: functional_call(model, values, (x,)))(parameters)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


DELTA = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_dense_covariance_is_that_of_the_explicit_inverse(likelihood):
    model, x, y = problem(likelihood)
    dense, sigma = Dense.of(model, (x, y), likelihood), 1.0
    if likelihood == "regression":
        sigma = 0.3
    f, J = output_jacobians(model, x)
    assert_close(f, model(x).detach())
    assert_close(J, jacobian(model, x))
    H = dense_ggn(model, x, likelihood)
    assert_close(dense.ggn, H)
    P0 = DELTA.repeat_interleave(torch.tensor([20, 5, 15, 3])).diag()
    full = J @ (H / sigma**2 + P0).inverse() @ J.mT
    assert_close(dense.covariance(J, DELTA, sigma), full)

    inside = torch.zeros(43, 43, dtype=torch.float64)
    for begin, end in ((0, 20), (20, 25), (25, 40), (40, 43)):
        inside[begin:end, begin:end] = 1
    blocks = J @ (H * inside / sigma**2 + P0).inverse() @ J.mT
    assert_close(dense.covariance(J, DELTA, sigma, "blocks"), blocks)
    diagonal = J @ (H.diag().diag() / sigma**2 + P0).inverse() @ J.mT
    assert_close(dense.covariance(J, DELTA, sigma, "diagonal"), diagonal)
    last = J[..., 25:] @ (H[25:, 25:] / sigma**2 + P0[25:, 25:]).inverse() @ J[..., 25:].mT
    assert_close(dense.covariance(J, DELTA, sigma, "last"), last)
    # None of them is another one.
    for other in (blocks, diagonal, last):
        assert (other - full).norm() > 0.1 * full.norm()


def test_determined_directions():
    """With the others, whose variance has a ceiling of the prior's, they make the whole."""
    model, x, y = problem("regression")
    dense = Dense.of(model, (x, y), "regression")
    _, J = output_jacobians(model, x)
    P0 = DELTA.repeat_interleave(torch.tensor([20, 5, 15, 3])).diag()
    root = P0.sqrt().inverse()
    values, vectors = torch.linalg.eigh(root @ dense_ggn(model, x, "regression") @ root)
    kept = vectors[:, values >= 1]
    inverse = root @ kept @ ((values[values >= 1] + 1) ** -1).diag() @ kept.T @ root
    assert 0 < kept.shape[1] < 43
    assert_close(dense.covariance(J, DELTA, 1.0, "determined"), J @ inverse @ J.mT)


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_the_loss_of_a_calibration_is_that_of_the_prediction(scale):
    model, x, y = problem("classification")
    dense = Dense.of(model, (x, y), "classification")
    f, J = output_jacobians(model, x)
    covariance = dense.covariance(J, DELTA, 1.0)
    noise = torch.randn(50, 3).double()
    calibration = Calibration(scale, 1.7)
    p = predict_from_gaussian(f, covariance, "classification", "mc", noise, calibration=calibration)
    loss = HeldOut("classification", f, covariance, y).loss("mc", noise)
    expected = -p.mean.gather(1, y[:, None]).log().mean()
    assert_close(loss(torch.tensor(scale), torch.tensor(1.7)), expected)


def test_a_run_has_every_cell(monkeypatch):
    tiny = replace(predictive_study.PROBLEMS["cnn"], make_model=lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10)))  # fmt: skip
    monkeypatch.setitem(predictive_study.PROBLEMS, "cnn", tiny)
    found = predictive_study.run(Config("cnn", 100, 0.2, steps=1, samples=3, test_samples=5))
    assert found["num_examples"] == {"train": 50, "held_out": 50, "test": 300}
    assert {name: len(cells) for name, cells in found["cells"].items()} == {
        "default": 3, "scalar": 3, "layerwise": 10, "online": 10,
    }  # fmt: skip
    of_one = found["cells"]["layerwise"]
    assert len({cell["nll"]["MAP"] for cell in of_one.values()}) == 1
    assert len({cell["nll"]["raw"] for cell in of_one.values()}) == 10
    json.dumps(found)


def seed(number, shift=0.0):
    def cell(nll):
        return {
            "nll": dict.fromkeys(CALIBRATIONS, nll) | {"scaled MAP": 0.5},
            "chosen": {"both": [0.0 if number else 0.25, 1.0]},
            "variance": 4 * nll,
        }

    cells = {
        precision: {
            "full": cell(1.0 + shift), "expand": cell(1.5), "determined": cell(0.25), 
        }
        for precision in ("layerwise", "online")
    }  # fmt: skip
    config = {"problem": "mlp", "num_examples": 100, "flipped": 0.0, "seed": number}
    return {"config": config, "cells": cells}


def test_the_table():
    lines = predictive_study.table([seed(0), seed(1, 0.2)]).splitlines()
    values = "+0.400 ± 0.100"  # 0.5 and 0.3
    row = f"| K-FAC expand − full GGN | {values} | {values} |  |  | {values} |  |  |"
    assert row in lines
    assert "| s > 0, %, full GGN | 50 ± 50 | 50 ± 50 |  |  | 50 ± 50 |  |  |" in lines


def test_concrete_comes_from_the_folder_that_the_environment_names(
    uci_archive, tmp_path, monkeypatch
):
    table = np.random.default_rng(0).normal(3.0, 2.0, (8, 4))
    uci_archive("concrete", table, num_train=6)
    (x, y), (x_test, _) = predictive_study._concrete(0)
    standardised = (table[:6] - table[:6].mean(0)) / table[:6].std(0)
    assert_close(torch.cat([x, y], 1).double().numpy(), standardised, check_dtype=False)
    assert len(x_test) == 2
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError):
        predictive_study._concrete(0)
