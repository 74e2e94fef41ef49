"""`marglik train --logger`: the numbers of a run, as TensorBoard and Weights & Biases have them."""

import pytest

from marglik.application.cli import main
from marglik.application.run_folder import read_log
from marglik.application.runs.loggers import MetricsLogger
from tests.marglik.application.runs.command_line import DATA, MODEL, TRAIN, evaluated, refusal


def expected(folder):
    """Each curve with its (epoch, value), from the run's own files."""
    curves = {}

    def add(path, epoch, value):
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{path}/{name}", epoch, inner)
        elif not isinstance(value, str):
            curves.setdefault(path, []).append((epoch, pytest.approx(float(value), rel=1e-6)))

    for record in read_log(folder):
        numbers = {k: v for k, v in record.items() if k not in ("kind", "epoch")}
        add(record["kind"], record["epoch"], numbers)
    last = record["epoch"]
    for name, scores in evaluated(folder).predictives.items():
        for metric, value in scores.metrics.items():
            add(f"test/{name}/{metric}", last, value)
    return curves


def curves_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def test_tensorboard_has_the_numbers_of_the_log_and_the_test(tmp_path):
    """A run that replaces it removes its curves."""
    folder = tmp_path / "run"
    run = [*TRAIN, *MODEL, *DATA, "--output", str(folder), "--no_baseline"]
    assert main([*run, "--logger", "tensorboard"]) == 0
    numbers = expected(folder)
    assert {"epoch/loss", "update/evidence_per_example", "test/MAP/nll"} < set(numbers)
    assert any(tag.startswith("update/weight_decay/") for tag in numbers)
    assert all(len(numbers[f"epoch/{name}"]) > 1 for name in ("loss", "accuracy"))
    assert curves_of(folder) == numbers
    assert main([*run, "--overwrite"]) == 0
    assert list((folder / "tensorboard").iterdir()) == []


def test_wandb_has_the_numbers(tmp_path, monkeypatch):
    """Offline; the numbers that a run's summary shows."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = MetricsLogger("wandb", tmp_path / "mine", {"data": "digits", "sums": {"x": "0"}})
    logger.write({"kind": "epoch", "epoch": 1, "loss": 2.0})
    logger.write({"kind": "update", "epoch": 1, "weight_decay": {"fc.weight": 0.5}, "fisher": "mc"})
    logger.write({"kind": "epoch", "epoch": 2, "loss": 1.0})
    run = wandb.run
    assert (run.name, dict(run.config)) == ("mine", {"data": "digits"})
    summary = dict(run.summary)
    assert (summary["epoch/loss"], summary["update/weight_decay/fc.weight"]) == (1.0, 0.5)
    assert "update/fisher" not in summary
    logger.close({})
    assert wandb.run is None


def test_an_unknown_logger_is_refused(capsys):
    assert "tensorboard" in refusal(capsys, *TRAIN, *MODEL, *DATA, "--logger", "mlflow")
