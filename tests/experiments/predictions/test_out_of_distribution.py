"""Rows of one pass are the predictives themselves; tables are made from the JSON alone."""

import json

import pytest
import torch

from experiments.predictions import out_of_distribution
from experiments.predictions.out_of_distribution import Config, Row, predict_rows, rows_of, table
from marglik.data import CORRUPTIONS, SEVERITIES
from marglik.models import MLP
from marglik.posterior.calibration import Calibration
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive, map_predictive


def row(nll, auroc, scale):
    def metrics(nll):
        return {"cls/NLL": nll, "cls/accuracy": 0.9, "cal/ECE": 0.02}

    def detection(auroc):
        return {"ood/AUROC": auroc, "ood/AUPR": 0.5, "ood/FPR95": 0.25}

    return {
        "layers": "all",
        "calibration": {"covariance_scale": scale, "output_temperature": 0.5},
        "test": metrics(nll),
        # The mean over severities 1 to 5 is 3.
        "shift": {f"{kind}/{s}": metrics(nll * s) for kind in CORRUPTIONS for s in SEVERITIES},
        "ood": {
            "noise": {
                "entropy": detection(auroc),
                "epistemic": detection(auroc - 0.1) if scale else None,
            }
        },
    }


def seed(number, nll=0.2, auroc=0.9):
    return {
        "config": {"data": "digits", "seed": number},
        "problem": {"title": "digits"},
        "num_examples": {"train": 1000, "noise": 30},
        "rows": {
            "MAP": row(nll, auroc, 0),
            "MAP, temperature-scaled": row(0.1, 0.7, 0),
            "Laplace": row(nll, auroc, 0.25),
        },
        "seconds": {"training": 1.0, "predictions": 2.0},
    }


def test_the_table_of_one_seed():
    text = table([seed(0)])
    assert "Images: 1,000 train, 30 noise; one seed." in text
    assert "| Laplace | 0.200 | 90.0 | 2.0 | 0.600 | 2.0 | 0.25 | 0.5 |" in text
    assert "| MAP | entropy | 90.0 / 50.0 / 25.0 |" in text
    assert "| MAP | epistemic | none |" in text
    assert "| Laplace | epistemic | 80.0 / 50.0 / 25.0 |" in text
    assert text.endswith("| Laplace | +0.100 | +0.300 | +20.0 |")


def test_the_table_of_two_seeds():
    text = table([seed(0), seed(1, nll=0.4, auroc=0.8)])
    assert "| MAP | 0.300 ± 0.100 | 90.0 ± 0.0 | 2.0 ± 0.0 | 0.900 ± 0.300 |" in text
    assert "| MAP | entropy | 85.0 ± 5.0 / 50.0 ± 0.0 / 25.0 ± 0.0 |" in text
    assert text.endswith("| Laplace | +0.200 ± 0.100 | +0.600 ± 0.300 | +15.0 ± 5.0 |")


@pytest.fixture
def posterior():
    """Of a small network, at parameters that are no maximum."""
    torch.manual_seed(0)
    model = MLP(5, (7,), 3)
    posterior = Posterior(model, "classification", prior_precision=0.5)
    posterior.fit([(torch.randn(20, 5), torch.arange(20) % 3)])
    return posterior


def test_rows_of_one_pass_are_the_predictives(posterior):
    x, samples = torch.randn(9, 5), 30
    rows = {
        "map": Row("all", Calibration(0)),
        "scaled": Row("all", Calibration(0, 0.4)),
        "calibrated": Row("all", Calibration(0.3, 0.6)),
        "plain": Row("all", Calibration()),
        "last": Row("last", Calibration(0.3, 0.6)),
    }
    found = predict_rows(posterior, rows, x.split(4), samples)
    for name, row in rows.items():
        if row.calibration.covariance_scale == 0:
            scaling = row.calibration.output_temperature
            expected = map_predictive(posterior.model, output_temperature=scaling)(x)
        else:
            config = PredictiveConfig("mc", samples=samples, layers=row.layers)
            generator = torch.Generator().manual_seed(0)
            expected = laplace_predictive(posterior, config, generator, row.calibration)(x)
        torch.testing.assert_close(found[name].mean, expected.mean)
        torch.testing.assert_close(found[name].epistemic, expected.epistemic)
    # Negative control: the rows differ.
    means = torch.stack([prediction.mean for prediction in found.values()])
    assert (torch.pdist(means.flatten(1)) > 0.01).all()


def test_a_calibration_that_is_known_is_taken(posterior):
    held_out = [(torch.randn(30, 5), torch.arange(30) % 3)]
    fit = calibrate(posterior, held_out, PredictiveConfig("mc", samples=20)).fit
    known = posterior.calibrations["Laplace, mc"]
    rows = rows_of(posterior, held_out, samples=20)
    assert posterior.calibrations["Laplace, mc"] is known
    assert rows["Laplace, calibrated"].calibration == fit.calibration
    assert rows["MAP, temperature-scaled"].calibration == fit.map_calibration
    assert rows["MAP"].calibration == Calibration(0)
    last = calibrate(posterior, held_out, PredictiveConfig("mc", samples=20, layers="last")).fit
    assert rows["Laplace, last layer, calibrated"] == Row("last", last.calibration)


def test_a_run_measures_every_row():
    config = Config(epochs=2, test=60, corrupted=16, outside=50, samples=5)
    found = out_of_distribution.run(config)
    sizes = {"train": 577, "calibration": 145, "test": 60, "each corruption": 16}
    sizes |= {"digits 8 and 9 (near)": 50, "noise (far)": 50}
    assert found["num_examples"] == sizes
    assert list(found["rows"])[0] == "MAP" and len(found["rows"]) == 5
    for measured in found["rows"].values():
        assert len(measured["shift"]) == 20
        for scores in measured["ood"].values():
            has_epistemic = measured["calibration"]["covariance_scale"] > 0
            assert (scores["epistemic"] is not None) == has_epistemic
    scaled, plain = (found["rows"][name] for name in ("MAP, temperature-scaled", "MAP"))
    assert scaled["test"]["cls/accuracy"] == plain["test"]["cls/accuracy"]
    json.dumps(found)
