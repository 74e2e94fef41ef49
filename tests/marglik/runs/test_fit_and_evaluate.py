"""`marglik fit`, `evaluate` and `report`: posteriors of trained networks, metrics, pages."""

import pytest
import torch
from safetensors.torch import load_file

from marglik.cli import main
from marglik.data import DataSource
from marglik.data.batches import split_batches
from marglik.models import MLP
from marglik.posterior.posterior_file import load_posterior, save_posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.build import build_from_spec
from marglik.storage.run_folder import read_posterior
from tests.marglik import threads
from tests.marglik.runs.command_line import (
    DATA,
    MODEL,
    NOISE,
    QUIET,
    UNCALIBRATED,
    evaluated,
    metrics,
    refusal,
)
from tests.marglik.runs.tensor_problems import SIGMA

TENSORS = ["layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]
LAPLACE = "Laplace, probit, uncalibrated"


def fit(checkpoint, folder, *options):
    """Run the command, without a calibration unless asked for; returns what it saved."""
    arguments = ["fit", *DATA, *MODEL, "--checkpoint", str(checkpoint), "--no_progress"]
    assert main([*arguments, *UNCALIBRATED, "--output", str(folder), *options]) == 0
    return read_posterior(folder)


def evaluate(folder, *options):
    """Run the command; returns the metrics of each predictive."""
    assert main(["evaluate", str(folder), *QUIET, *options]) == 0
    return metrics(type(folder)(options[-1]) if "--output" in options else folder)


@pytest.fixture(scope="module")
def fits(trained, tmp_path_factory):
    """Fits by evidence, of one precision, and with a fixed one, without calibration."""
    folder = tmp_path_factory.mktemp("fits")
    options = {
        "layers": [],
        "one": ["--prior.structure", "scalar"],
        "rules": ["--prior.structure", "{inner: 'layers.1.*', outer: '*'}"],
        "fixed": ["--prior.method", "fixed", "--prior.temperature", "0.5"],
        "corrected": ["--curvature.corrected", "true", "--prior.method", "fixed"],
        "last": ["--prior.layers", "last"],
    }
    with threads.one_thread():
        return folder, {
            name: fit(trained / "model.safetensors", folder / name, *more)
            for name, more in options.items()
        }


def test_the_prior_that_fit_finds(fits):
    _, found = fits
    delta = {name: record["prior_precision"] for name, record in found.items()}
    assert list(delta["layers"]) == TENSORS and len(set(delta["layers"].values())) == 4
    assert len(set(delta["one"].values())) == 1
    a, b, c, d = delta["rules"].values()
    assert a == b != c == d
    N = found["layers"]["num_data"]
    assert delta["fixed"] == pytest.approx(dict.fromkeys(TENSORS, 5e-4 * N / 0.5))
    assert list(delta["last"]) == TENSORS[2:]
    evidence = {name: record["evidence"] for name, record in found.items()}
    assert evidence["one"] < evidence["layers"]
    assert found["corrected"]["corrected"] and not found["layers"]["corrected"]


def test_what_fit_leaves_is_evaluated_and_shown(fits, tmp_path, capsys):
    folder, _ = fits
    found = {
        name: evaluate(folder / name, *UNCALIBRATED, "--output", str(tmp_path / name))
        for name in ("layers", "corrected", "last")
    }
    assert found["layers"][LAPLACE]["test/cls/accuracy"] > 0.8
    assert found["layers"]["MAP"] == found["last"]["MAP"]
    assert len({one[LAPLACE]["test/cls/NLL"] for one in found.values()}) == 3
    page = tmp_path / "both.html"
    assert main(["report", str(folder / "layers"), str(folder / "one"), "--output", str(page)]) == 0
    assert str(folder / "layers") in page.read_text() and "layers.1.weight" in page.read_text()


def test_other_likelihoods(problem, tmp_path, capsys):
    checkpoint = ["--checkpoint", str(problem.checkpoint), "--no_progress"]
    command = ["fit", *problem.options, *checkpoint, "--output", str(tmp_path / "fit")]
    assert main(command) == 0
    assert "Checkpoint: the prefix 'module.' was removed from all names." in capsys.readouterr().out
    predictives = evaluate(tmp_path / "fit", "--methods", "[probit, mc, linearised]")
    assert list(predictives) == [
        "MAP", "MAP, temperature-scaled", "Laplace, probit", "Laplace, mc", "Laplace, linearised",
    ]  # fmt: skip
    if problem.likelihood == "regression":
        sigma = read_posterior(tmp_path / "fit")["sigma_noise"]
        assert sigma == pytest.approx(SIGMA, rel=0.4)
        # The MAP predicts with the noise that was found.
        model, tensors = MLP(3, (4,), 2, "tanh"), load_file(problem.data)
        load_posterior(tmp_path / "fit", model)
        normal = torch.distributions.Normal(model(tensors["x_test"]).detach(), sigma)
        nll = -normal.log_prob(tensors["y_test"]).sum(1).mean().item()
        assert predictives["MAP"]["test/reg/NLL"] == pytest.approx(nll, rel=1e-5)
    else:
        assert all(values["test/cls/accuracy"] > 0.8 for values in predictives.values())
    message = refusal(capsys, "evaluate", str(tmp_path / "fit"), *QUIET, "--shift=true")
    assert "holds no images; shift and ood are for images. Leave them out." in message
    # Over the old one, whose evaluation goes.
    assert main([*command, "--prior.method", "fixed", "--overwrite"]) == 0
    assert not (tmp_path / "fit" / "evaluation.json").exists()


def test_an_evaluation_replaces_the_last_one(run):
    found = evaluate(run, "--methods", "[probit, mc]", "--shift", "true")
    assert list(found) == ["MAP", "MAP, temperature-scaled", "Laplace, probit", "Laplace, mc"]
    worst, mildest = (found["MAP"][f"shift/noise/{s}/cls/NLL"] for s in (5, 1))
    assert worst > mildest and len(evaluated(run)["shift"]["kinds"]) == 4
    found = evaluate(run, *NOISE, "--methods", "[]")
    assert list(found) == ["MAP"] and "ood/AUROC" in found["MAP"]
    assert evaluated(run)["shift"] is None


def test_what_is_not_calibrated_yet_is_by_the_validation_set(run, tmp_path, capsys):
    """The run has calibrated all layers' uncertainty, not the last one's alone."""
    last, out = ["--predictive.layers", "last"], ["--output", str(tmp_path / "out")]
    before = (run / "posterior.json").read_bytes()
    found = evaluate(run, *last, *out)
    assert (run / "posterior.json").read_bytes() == before
    assert list(found) == ["MAP", "MAP, temperature-scaled", "Laplace, probit, last layer"]
    assert "Laplace, probit, last layer: calibrated on " in capsys.readouterr().out
    assert (
        evaluated(tmp_path / "out")["in_sample"] in (tmp_path / "out" / "report.html").read_text()
    )
    posterior = load_posterior(run, MLP(64, (6,), 3))
    splits = build_from_spec(DataSource, read_posterior(run)["data"]["source"]).load()
    config = PredictiveConfig("probit", layers="last")
    by_hand = calibrate(posterior, split_batches(splits, "validation", 256), config).fit
    entry = evaluated(tmp_path / "out")["predictives"]["Laplace, probit, last layer"]
    for key in ("covariance_scale", "output_temperature"):
        expected = getattr(by_hand.calibration, key)
        assert entry["calibration"][key] == pytest.approx(expected, rel=5e-3)
    # Data that may have been trained on calibrates nothing.
    found = evaluate(run, *last, *DATA, "--data.data.seed", "5", *out)
    assert list(found) == ["MAP", "Laplace, probit, last layer, uncalibrated"]


def test_a_posterior_without_a_run(trained, tmp_path, capsys):
    """It does not say how its network is built."""
    folder = tmp_path / "posterior"
    save_posterior(load_posterior(trained, MLP(64, (6,), 3)), folder)
    assert "how its model is built; pass --model" in refusal(capsys, "evaluate", str(folder))
    message = refusal(capsys, "evaluate", str(folder), *MODEL)
    assert "how its data is built; pass --data" in message
    found = evaluate(folder, *MODEL, *DATA)
    assert found["MAP"].items() <= metrics(trained)["MAP"].items()


MY_NET = "from marglik.models import MLP\nclass MyNet(MLP):\n    pass\n"


def test_a_class_of_ones_own(trained, checkpoint, tmp_path, monkeypatch, capsys):
    """Found where the command was started, by `fit` at once, by `evaluate` once it is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_net_of_test.py").write_text(MY_NET)
    fit(checkpoint, tmp_path / "a", "--model", "my_net_of_test.MyNet", *MODEL[2:])
    message = refusal(capsys, "evaluate", "a")
    assert "name it on the command line: --model my_net_of_test.MyNet" in message
    evaluate(tmp_path / "a", "--model", "my_net_of_test.MyNet")
