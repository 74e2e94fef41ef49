"""Options of small runs, what a command that refuses them says, and what others leave."""

import json
from pathlib import Path
from typing import Any

from marglik.cli import main

DATA = [
    "--data", "marglik.data.ClassSubset", "--data.data", "marglik.data.Digits",
    "--data.data.validation", "0.1", "--data.classes", "[0, 1, 2, 3, 4, 5, 6, 7]",
]  # fmt: skip
MODEL = [
    "--model", "marglik.models.MLP", "--model.in_features", "64", "--model.hidden", "[12]",
    "--model.num_classes", "8",
]  # fmt: skip
TRAIN = [
    "train", "--epochs", "4", "--prior.every", "2", "--prior.steps", "10", "--batch_size", "32",
    "--optimizer.lr", "0.05", "--no_progress",
]  # fmt: skip
HELD_OUT = [
    "--ood", "marglik.data.ClassSubset", "--ood.data", "marglik.data.Digits",
    "--ood.classes", "[8, 9]",
]  # fmt: skip
UNCALIBRATED = ["--predictive.calibration", "none"]


STEPS = ("decoding ", "evaluating ", "curvature pass ", "epoch ")
"""How lines of progress begin, which pytest gets, as its stderr is no terminal."""


def refusal(capsys: Any, *arguments: str) -> str:
    """The one line that a command prints instead of working on."""
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *progress, said = printed.err.strip().splitlines()
    assert said.startswith("marglik: error: "), printed.err
    assert all(line.startswith(STEPS) for line in progress), printed.err
    return said


def results_of(folder: Path) -> dict[str, Any]:
    """What a run has come to."""
    return json.loads((folder / "results.json").read_text())


def evaluated(folder: Path) -> dict[str, Any]:
    """What an evaluation has found."""
    return json.loads((folder / "evaluation.json").read_text())


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder, or no folder is there."""
    return not folder.exists() or not any(folder.iterdir())
