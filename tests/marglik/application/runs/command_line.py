"""Options of small runs, commands as ranks call them, and what commands say and leave."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from marglik.application.cli import main
from marglik.application.records import Evaluation, Results
from marglik.application.run_folder import read_evaluation, read_results
from marglik.prediction.metric_types import Metrics

DATA = [
    "--data", "marglik.data.ClassSubset", "--data.data", "marglik.data.Digits",
    "--data.data.test_fraction", "0.5", "--data.data.validation", "0.1", "--data.classes",
    "[0, 1, 2]",
]  # fmt: skip
MODEL = [
    "--model", "marglik.models.MLP", "--model.in_features", "64", "--model.hidden", "[6]",
    "--model.num_classes", "3",
]  # fmt: skip
TRAIN = [
    "train", "--epochs", "3", "--prior.every", "1", "--prior.steps", "5", "--batch_size", "32",
    "--optimizer.lr", "0.05", "--no_progress",
]  # fmt: skip
NOISE = ["--ood", "marglik.data.Noise", "--ood.num_images", "20"]
QUIET = ["--no_progress"]

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


def results_of(folder: Path) -> Results:
    """What a run has come to."""
    results = read_results(folder)
    assert results is not None
    return results


def evaluated(folder: Path) -> Evaluation:
    """What an evaluation has found."""
    evaluation = read_evaluation(folder)
    assert evaluation is not None
    return evaluation


def metrics(folder: Path) -> dict[str, Metrics[float]]:
    """The metrics of each predictive of an evaluation."""
    return {name: record.metrics for name, record in evaluated(folder).predictives.items()}


def content(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of each file in a folder and those below it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def without_seconds(value: Any) -> Any:
    """Nested plain data without what clocks say, and sums of it."""
    if isinstance(value, list):
        return [without_seconds(v) for v in value]
    if isinstance(value, dict):
        kept = (k for k in value if not k.startswith("seconds") and k != "sha256")
        return {k: without_seconds(value[k]) for k in kept}
    return value


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, and what was printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()
