"""Studies over several seeds: one JSON file for each run, running the missing ones, the tables."""

import argparse
import io
import json
import logging
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    "markdown",
    "mean_with_error",
    "of_each_problem",
    "quiet_training",
    "results_in",
    "run_missing",
    "save_figure",
    "standard_error",
    "study",
    "study_folder",
]


class Run(Protocol):
    """One run's configuration."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        ...


Result = dict[str, Any]
"""What a run leaves as JSON, with its "config" and its "seconds"."""


def study(
    name: str,
    description: str | None,
    run: Callable[[Any], Result],
    tasks: Callable[[argparse.Namespace], Sequence[Run]],
    table: Callable[[list[Result]], str],
    arguments: Sequence[str] | None = None,
    *,
    problems: Collection[str] = (),
    default: Sequence[str] | None = None,
    seeds: int | None = None,
    figures: Callable[[list[Result]], Mapping[str, Figure]] = lambda found: {},
) -> int:
    """The command of a study: run what is missing, write table.md; returns the exit status.

    Args:
        name: of the folder of results.
        description: its first paragraph describes the command.
        run: as in `run_missing`.
        tasks: from the options (``data``, ``seeds``) to all runs.
        table: makes Markdown from all results.
        arguments: the command line's; None for this process's.
        problems: the choices of --data.
        default: the default of --data; all problems if not given.
        seeds: the default of --seeds; None for a study without that option.
        figures: makes figures from all results, by the names of their files.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    if problems:
        chosen = list(default or problems)
        parser.add_argument(
            "--data", nargs="*", choices=list(problems), default=chosen,
            help=f"problems; default: {', '.join(chosen)}",
        )  # fmt: skip
    if seeds is not None:
        parser.add_argument(
            "--seeds", type=int, default=seeds, help=f"number of seeds; default: {seeds}"
        )
    add_study_options(parser)
    options = parser.parse_args(arguments)

    def report(folder: Path) -> str:
        found = results_in(folder)
        text = table(found).rstrip()
        write_file(folder / "table.md", f"{text}\n".encode())
        for stem, figure in figures(found).items():
            save_figure(figure, folder / f"{stem}.png")
        return text

    return run_missing(run, tasks(options), study_folder(parser, options, name), report, options)


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """The options --report, --jobs and --results."""
    parser.add_argument("--report", action="store_true", help="make the tables from the JSON alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    add_results(parser)


def study_folder(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> Path:
    """Make the folder of a study's files and return it; exits if --report finds no results."""
    folder = options.results / name
    if options.report and not list(folder.glob("*.json")):
        parser.error(f"--report: no JSON in {folder}/; run without --report first")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def results_in(folder: Path) -> list[Result]:
    """The contents of all JSON files, in the order of their names."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


def run_missing(
    run: Callable[[Any], Result],
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
    if any(folder.rglob("*.json")):
        print(report(folder))
        print(f"Written to {folder}/")
    return 1 if failed else 0


# Tables and figures


def of_each_problem(
    table: Callable[[list[Result]], str], problems: Iterable[str]
) -> Callable[[list[Result]], str]:
    """A table of each problem that has results ("data" in their configurations), in that order."""

    def tables(found: list[Result]) -> str:
        own = ([run for run in found if run["config"]["data"] == name] for name in problems)
        return "\n\n".join(table(runs) for runs in own if runs)

    return tables


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * (head.count(" | ") + 1), *others])


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
