"""A run of one second that leaves every file that runs leave, and what is compared of it."""

import io
import json
import os
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from marglik.cli import main
from marglik.storage.run_folder import RunFolder
from marglik.storage.run_log import read_log
from tests.faults.copies import at_write, command
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
    writes: dict[str, int] = field(hash=False)
    """How often a "train" and a "fit" write; see `at_write`."""

    def like(self, arguments: list[str]) -> Path:
        """The run that a command should end like."""
        return self.fit if arguments[0] == "fit" else self.train


def whole_runs(folder: Path) -> Whole:
    """Make them; this process has then imported what commands import."""
    train, fit, again = folder / "train", folder / "fit", folder / "again"
    _quietly(training(train))
    checkpoint = Path(shutil.copy(train / "model.safetensors", folder / "net.safetensors"))
    start = time.perf_counter()
    writes = {"train": _number_of_writes(training(again), folder)}
    seconds = time.perf_counter() - start
    writes["fit"] = _number_of_writes(fitting(checkpoint, fit), folder)
    for found in (again, train):
        check_same(found, train)
    shutil.rmtree(again)
    return Whole(train, fit, checkpoint, seconds, writes)


def _number_of_writes(arguments: list[str], folder: Path) -> int:
    """Run a command in a copy of this process; how often it writes."""
    with (folder / "writes").open("wb") as file:
        # By no method of the file, as the copy is not to write to it as it ends.
        each = partial(os.write, file.fileno(), b"1")
        ended = command(arguments, folder / "printed", lambda: at_write(0, lambda _: each())).wait()
    assert ended.status == 0, ended
    return (folder / "writes").stat().st_size


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
