"""Studies over several seeds: one JSON file for each run, running the missing ones, the report."""

import argparse
import io
import json
import logging
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from experiments.options import add_results
from experiments.processes import as_they_finish
from kfac_backend.files import write_file
from marglik.storage.record_file import write_json

__all__ = [
    "Run",
    "add_study_options",
    "mean_with_error",
    "one_table_study",
    "quiet_training",
    "report_problems",
    "run_missing",
    "save_figure",
    "standard_error",
    "study_folder",
]


class Run(Protocol):
    """One run's configuration."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        ...


def add_study_options(parser: argparse.ArgumentParser, jobs: bool = True) -> None:
    """The options --report, --results and, for `run_missing`, --jobs."""
    parser.add_argument("--report", action="store_true", help="make the tables from the JSON alone")
    if jobs:
        parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    add_results(parser)


def study_folder(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> Path:
    """Make the folder of a study's files and return it; exits if --report finds no results."""
    folder = options.results / name
    if options.report and not list(folder.glob("*.json")):
        parser.error(f"--report: no JSON in {folder}/; run without --report first")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def one_table_study(
    name: str,
    description: str,
    run: Callable[[Any], dict[str, Any]],
    tasks: Sequence[Run],
    table: Callable[[Path], str],
    arguments: Sequence[str] | None = None,
) -> int:
    """The command of a study whose report is one table, ``table.md``; returns the exit status.

    Args:
        name: of the folder of results.
        description: its first line describes the command.
        run: as in `run_missing`.
        tasks: all runs of the study.
        table: makes Markdown from the folder of results.
        arguments: the command line's; None for this process's.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_study_options(parser)
    options = parser.parse_args(arguments)

    def report(folder: Path) -> str:
        text = table(folder)
        write_file(folder / "table.md", text.encode())
        return text

    return run_missing(run, tasks, study_folder(parser, options, name), report, options)


def run_missing(
    run: Callable[[Any], dict[str, Any]],
    tasks: Sequence[Run],
    folder: Path,
    report: Callable[[Path], str],
    options: argparse.Namespace,
) -> int:
    """Run the tasks that have no file yet and report on all; returns the exit status.

    A run that fails is named on stderr; the others go on.

    Args:
        run: returns the results of a task as plain data, with its "seconds".
        tasks: all runs of the study.
        folder: where their files are.
        report: writes tables and figures from a folder's files, and returns the tables.
        options: those of `add_study_options`.
    """
    missing = [task for task in tasks if not (folder / f"{task.name}.json").exists()]
    failed = 0
    for task, found in as_they_finish(run, [] if options.report else missing, options.jobs):
        if isinstance(found, Exception):
            failed += 1
            print(f"{task.name}: {found}", file=sys.stderr, flush=True)
            continue
        write_json(folder / f"{task.name}.json", found)
        seconds = found["seconds"]
        total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        print(f"{task.name}: {total:.0f} s", flush=True)
    if list(folder.glob("*.json")):
        print(report(folder))
        print(f"Written to {folder}/")
    return 1 if failed else 0


def report_problems(
    folder: Path,
    problems: Iterable[str],
    table: Callable[[list[dict[str, Any]]], str],
    figure: Callable[[list[dict[str, Any]]], Figure],
) -> str:
    """Write table.md and a figure for each problem that has results; returns the tables.

    Args:
        folder: where results are read, and tables and figures written.
        problems: names of problems ("data" in their configurations), in the tables' order.
        table: makes Markdown from a problem's results.
        figure: makes the figure from a problem's results.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        found[run["config"]["data"]].append(run)
    there = [name for name in problems if name in found]
    text = "\n\n".join(table(found[name]) for name in there)
    write_file(folder / "table.md", (text + "\n").encode())
    for name in there:
        save_figure(figure(found[name]), folder / f"{name}.png")
    return text


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    write_file(path, content.getvalue())


@contextmanager
def quiet_training() -> Iterator[None]:
    """Silence the line that training logs after each epoch, for many short epochs."""
    logger = logging.getLogger("marglik.training")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def mean_with_error(values: Sequence[float], form: str = "{:.3f}") -> str:
    """The mean ± its standard error; the mean alone for a single value.

    Args:
        values: at least one.
        form: format of the mean. The error has no sign, so a "+" is dropped for it.
    """
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.replace('+', '').format(standard_error(values))}"


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
