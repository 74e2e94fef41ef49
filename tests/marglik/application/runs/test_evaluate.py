"""`marglik evaluate`: what a saved posterior predicts, and with which calibration."""

import json
import shutil

import pytest

from kfac_backend.atomic_files import file_sum
from marglik.application.cli import main
from marglik.application.data.splits import split_batches
from marglik.data import DataSource
from marglik.models import MLP
from marglik.posterior_file import load_posterior, save_posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig
from marglik.specification import build_from_spec
from marglik.storage.record_files import read_posterior, write_record
from tests.marglik.application.runs.command_line import (
    DATA,
    MODEL,
    NOISE,
    QUIET,
    evaluated,
    metrics,
    refusal,
)


def evaluate(folder, *options):
    """Run the command; returns the metrics of each predictive."""
    assert main(["evaluate", str(folder), *QUIET, *options]) == 0
    return metrics(type(folder)(options[-1]) if "--output" in options else folder)


def test_an_evaluation_replaces_the_last_one(run):
    found = evaluate(run, "--methods", "[probit, mc]")
    assert list(found) == ["MAP", "MAP, temperature-scaled", "Laplace, probit", "Laplace, mc"]
    assert evaluated(run).ood is None
    found = evaluate(run, *NOISE, "--methods", "[]")
    assert list(found) == ["MAP"] and found["MAP"].auroc is not None


def test_what_is_not_calibrated_yet_is_by_the_validation_set(run, tmp_path, capsys):
    """The run has calibrated all layers' uncertainty, not the last one's alone."""
    last, out = ["--predictive.layers", "last"], ["--output", str(tmp_path / "out")]
    before = (run / "posterior.json").read_bytes()
    found = evaluate(run, *last, *out)
    assert (run / "posterior.json").read_bytes() == before
    assert list(found) == ["MAP", "MAP, temperature-scaled", "Laplace, probit, last layer"]
    assert "Laplace, probit, last layer: calibrated on " in capsys.readouterr().out
    posterior = load_posterior(run, MLP(64, (6,), 3))
    splits = build_from_spec(DataSource, read_posterior(run)["data"]["source"]).load()
    config = PredictiveConfig("probit", layers="last")
    by_hand = calibrate(posterior, split_batches(splits, "validation", 256), config).calibration_fit
    entry = evaluated(tmp_path / "out").predictives["Laplace, probit, last layer"]
    for key in ("covariance_scale", "output_temperature"):
        expected = getattr(by_hand.calibration, key)
        assert getattr(entry.calibration, key) == pytest.approx(expected, rel=5e-3)
    # Data that may have been trained on calibrates nothing.
    found = evaluate(run, *last, *DATA, "--data.data.seed", "5", *out)
    assert list(found) == ["MAP", "Laplace, probit, last layer, uncalibrated"]


def test_what_was_trained_on_is_said_to_be(run, tmp_path, capsys):
    other, out = [*DATA, "--data.data.seed", "5"], ["--output", str(tmp_path / "out")]
    message = refusal(capsys, "evaluate", str(run), *other)
    assert "has other test examples" in message and "Pass --output" in message
    evaluate(run, *other, *out)
    # All images of three classes, of which one half was for training and calibration.
    source = build_from_spec(DataSource, read_posterior(run)["data"]["source"])
    seen = sum(len(part[1]) for part in (source.load().train, source.load().validation))
    every = seen + len(source.load().test[1])
    said = f"{seen} of the {every} test examples have inputs that were used for training"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "out" / "report.html").read_text()
    assert (evaluated(tmp_path / "out").num_seen, evaluated(tmp_path / "out").num_test) == (
        seen, every,
    )  # fmt: skip
    evaluate(run, *DATA)  # the control: its own test part, named
    assert evaluated(run).num_seen == 0 and "trained on" not in capsys.readouterr().out


def test_an_evaluation_belongs_to_its_posterior(run, tmp_path, capsys):
    """It carries the sum of its posterior, and is not reported beside another one."""
    own = evaluated(run).posterior
    assert own == file_sum(run / "posterior.json")
    other = tmp_path / "other"
    posterior = load_posterior(run, MLP(64, (6,), 3))
    posterior.prior_precision = 3.0
    save_posterior(posterior, other)
    message = refusal(capsys, "evaluate", str(run), *QUIET, "--output", str(other))
    assert "contains another posterior" in message and not (other / "evaluation.json").exists()
    out = tmp_path / "out"  # the control: a folder without a posterior, which is then of this run
    evaluate(run, "--methods", "[]", "--output", str(out))
    assert evaluated(out).posterior == own and main(["report", str(out)]) == 0
    shutil.copy(run / "evaluation.json", other)
    assert "to another posterior than posterior.json" in refusal(capsys, "report", str(other))
    assert main(["evaluate", str(other), *MODEL, *DATA, *QUIET, "--methods", "[]"]) == 0
    assert evaluated(other).posterior == file_sum(other / "posterior.json") != own


def test_a_forged_record_reads_and_fetches_nothing(run, tmp_path, capsys):
    """That is tested in detail in `test_build`."""
    path = run / "posterior.json"
    record = json.loads(path.read_text())
    sums = {name: of for name, of in record.pop("sha256").items() if name != path.name}
    root = tmp_path / "anywhere"
    data = {"class_path": "marglik.data.CIFAR10", "init_args": {"root": str(root)}}
    write_record(path, record | {"data": record["data"] | {"source": data}}, sums)
    message = refusal(capsys, "evaluate", str(run))
    assert f"root='{root}' is outside of the saved folder, which a file may not request" in message
    assert f"--data marglik.data.CIFAR10 --data.root {root}" in message
    assert not root.exists()
    network = {"class_path": "torchvision.models.resnet18", "init_args": {"weights": "DEFAULT"}}
    write_record(path, record | {"model": network}, sums)
    assert "weights='DEFAULT' is a download" in refusal(capsys, "evaluate", str(run))
    write_record(path, record, sums)  # the control
    evaluate(run)


def test_a_posterior_without_a_run(trained, tmp_path, capsys):
    """It does not say how its network is built."""
    folder = tmp_path / "posterior"
    save_posterior(load_posterior(trained, MLP(64, (6,), 3)), folder)
    assert "how to build its model. Pass --model" in refusal(capsys, "evaluate", str(folder))
    message = refusal(capsys, "evaluate", str(folder), *MODEL)
    assert "how to build its data. Pass --data" in message
    found = evaluate(folder, *MODEL, *DATA)
    assert {*found["MAP"].items()} <= {*metrics(trained)["MAP"].items()}
