"""A run of one second that leaves every file that runs leave, and what is compared of it."""

import io
import json
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marglik.cli import main
from marglik.storage.run_folder import RunFolder
from marglik.storage.run_log import read_log
from tests.faults.copies import command
from tests.marglik.commands.command_line import DATA, MODEL

__all__ = ["Whole", "check_same", "files_of", "fitting", "training", "whole_runs"]

EXACT = ("config.yaml", "model.safetensors", "posterior.safetensors", "posterior.json")
"""What is the same to the byte, each time."""
TIMED = ("results.json", "evaluation.json")
"""What is the same but for seconds."""


def training(folder: Path, *more: str) -> list[str]:
    """The command of a run: two epochs, two updates, a baseline, calibration, all evaluations."""
    options = [
        "--epochs", "2", "--prior.every", "1", "--prior.steps", "5", "--batch_size", "128",
        "--optimizer.lr", "0.05", "--curvature.fisher", "mc", "--baseline", "--no_progress",
        "--checkpoint_minutes", "0",
    ]  # fmt: skip
    return ["train", *DATA, *MODEL, *options, "--output", str(folder), *more]


def fitting(checkpoint: Path, folder: Path) -> list[str]:
    """The command of a fit."""
    options = ["--checkpoint", str(checkpoint), "--curvature.fisher", "mc", "--no_progress"]
    return ["fit", *DATA, *MODEL, *options, "--output", str(folder)]


@dataclass(frozen=True)
class Whole:
    """Runs that nothing happened to."""

    train: Path
    fit: Path
    checkpoint: Path
    """The network that was fitted."""
    seconds: float
    """How long a copy trains."""

    def like(self, arguments: list[str]) -> Path:
        """The run that a command should end like."""
        return self.fit if arguments[0] == "fit" else self.train


def whole_runs(folder: Path) -> Whole:
    """Make them; this process has then imported and done everything once."""
    train, fit, checkpoint = folder / "train", folder / "fit", folder / "net.safetensors"
    _quietly(training(train))
    shutil.copy(train / "model.safetensors", checkpoint)
    _quietly(fitting(checkpoint, fit))
    start = time.perf_counter()
    again = folder / "again"
    ended = command(training(again), folder / "printed").wait()
    assert ended.status == 0, ended
    seconds = time.perf_counter() - start
    for found in (again, train):
        check_same(found, train)
    shutil.rmtree(again)
    return Whole(train, fit, checkpoint, seconds)


def _quietly(arguments: list[str]) -> None:
    """Run a command in this process; what it prints is shown if it fails."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main(arguments)
    assert status == 0, printed.getvalue()


def check_same(folder: Path, whole: Path) -> None:
    """Raise an AssertionError unless a run's folder holds what an undisturbed one's holds.

    Names, parameters, posterior and options to the byte; results, evaluation and log but for the
    seconds; and the manifest finds all of them to be as they were written.
    """
    names = {path.name for path in folder.iterdir()}
    expected = {path.name for path in whole.iterdir()}
    assert names == expected, f"left: {names - expected}, lacking: {expected - names}"
    for name in EXACT:
        if name == "config.yaml":  # which names the folder
            continue
        if name in names:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), f"another {name}"
    for name in TIMED:
        if name in names:
            found, same = (json.loads((path / name).read_text()) for path in (folder, whole))
            assert without_seconds(found) == without_seconds(same), f"another {name}"
    assert without_seconds(read_log(folder)) == without_seconds(read_log(whole)), "another log"
    RunFolder(folder).check()


def without_seconds(value: Any) -> Any:
    """Plain data without durations."""
    if isinstance(value, list):
        return [without_seconds(item) for item in value]
    if isinstance(value, dict):
        return {
            key: without_seconds(item)
            for key, item in value.items()
            if not key.startswith("seconds")
        }
    return value


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> content of all files in a folder and those below it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
