"""What every study shares: its options, the runs that are missing, one JSON file each, tables.

Your results and those that come with the project never mix. Without ``--results``, everything is
read from and written to ``results/`` in the working directory, which git ignores.
"""

import argparse
import io
import json
import logging
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfac_backend.atomic_files import write_file
from marglik.application.runs.printing import progress_lines
from marglik.storage.environment import environment
from marglik.storage.record_files import write_json

if TYPE_CHECKING:  # each run has a process of its own, which draws nothing
    from matplotlib.figure import Figure

SHIPPED = Path(__file__).parent / "results"
"""Results that the pages quote, under version control."""
Result = dict[str, Any]
"""What a run leaves as JSON, with its "config"; `results_in` adds the "name" of its file."""


def study(
    name: str,
    description: str | None,
    run: Callable[[Any], Result],
    tasks: Callable[[argparse.Namespace], Sequence[Any]],
    table: Callable[[list[Result]], str],
    *,
    problems: Collection[str] = (),
    default: Sequence[str] | None = None,
    seeds: int | None = None,
    extra: Mapping[str, dict[str, Any]] | None = None,
    then: Callable[[argparse.Namespace, list[Result]], Sequence[Any]] = lambda options, results: (),
    figures: Callable[[list[Result]], Mapping[str, "Figure"]] = lambda results: {},
    threads: int | None = 1,
    shows_epochs: bool = False,
) -> Callable[..., int]:
    """The command of a study: run what has no file yet, write table.md; returns the exit status.

    A run that fails is named on stderr; the others go on. The command takes the arguments of a
    command line, by default this process's.

    Args:
        name: of the folder of results; "{device}" stands for an option's value.
        description: its first paragraph describes the command.
        run: returns the results of a task as plain data; see `record_of`.
        tasks: from the options (``data``, ``seeds``) to all runs, each a dataclass of its settings.
        table: makes Markdown from all results.
        problems: the choices of --data.
        default: the default of --data; all problems if not given.
        seeds: the default of --seeds; None for a study without that option.
        extra: further options, with the arguments of ``add_argument``.
        then: from the options and the results so far to runs that need these; none at the end.
        figures: makes figures from all results, by the names of their files.
        threads: of each run; None shares the cores among the runs.
        shows_epochs: whether to show the line that training logs after each epoch.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    if problems:
        chosen = list(default or problems)
        parser.add_argument(
            "--data", nargs="*", choices=list(problems), default=chosen,
            help=f"problems or parts; default: {', '.join(chosen)}".replace("%", "%%"),
        )  # fmt: skip
    if seeds is not None:
        parser.add_argument(
            "--seeds", type=int, default=seeds, help=f"number of seeds; default: {seeds}"
        )
    for option, arguments in (extra or {}).items():
        parser.add_argument(option, **arguments)
    parser.add_argument("--report", action="store_true", help="make the tables from the JSON alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="FOLDER",
        help="folder where results are read and written; default: results/, for your own. Those "
        "that the pages quote are in experiments/results/: name it to show them (--report) or, as "
        "a maintainer, to replace them",
    )  # fmt: skip

    def main(arguments: Sequence[str] | None = None) -> int:
        options = parser.parse_args(arguments)
        folder = options.results / name.format(**vars(options))
        if options.report and not any(folder.rglob("*.json")):
            parser.error(f"--report: no JSON in {folder}/; run without --report first")
        todo, failed = [] if options.report else tasks(options), 0
        while todo and not failed:
            missing = [t for t in todo if not (folder / f"{file_name(t)}.json").exists()]
            for task, result in as_they_finish(run, missing, options.jobs, threads, shows_epochs):
                name_of_run = file_name(task)
                if isinstance(result, Exception):
                    failed += 1
                    print(f"{name_of_run}: {result}", file=sys.stderr, flush=True)
                else:
                    write_json(folder / f"{name_of_run}.json", result)
                    print(f"{name_of_run}: done", flush=True)
            todo = then(options, results_in(folder))
        if results := results_in(folder):
            text = table(results).rstrip()
            write_file(folder / "table.md", f"{text}\n".encode())
            for stem, figure in figures(results).items():
                content = io.BytesIO()
                figure.savefig(content, dpi=120, format="png")
                write_file(folder / f"{stem}.png", content.getvalue())
            print(text)
            print(f"Written to {folder}/")
        return 1 if failed else 0

    return main


def results_in(folder: Path) -> list[Result]:
    """The contents of all JSON files, in the order of their names, with these names."""
    return [
        json.loads(path.read_text("utf-8")) | {"name": path.stem}
        for path in sorted(folder.rglob("*.json"))
    ]


def as_they_finish(
    run: Callable[[Any], Result],
    tasks: Sequence[Any],
    jobs: int,
    threads: int | None,
    shows_epochs: bool,
) -> Iterator[tuple[Any, Result | Exception]]:
    """Yield each task with its record, or with the error that ended it; runs ``jobs`` at a time.

    Each has a process of its own, which gives back all memory. What the tasks log goes to stderr,
    each line after the task's name.
    """
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), _prepare, (threads, shows_epochs), max_tasks_per_child=1
    ) as pool:
        futures = {pool.submit(_with_progress, run, task): task for task in tasks}
        for future in as_completed(futures):
            error = future.exception()
            assert error is None or isinstance(error, Exception)
            yield futures[future], error or future.result()


def _prepare(threads: int, shows_epochs: bool) -> None:
    torch.set_num_threads(threads)
    if not shows_epochs:
        logging.getLogger("marglik.training").setLevel(logging.WARNING)


def _with_progress(run: Callable[[Any], Result], task: Any) -> Result:
    with progress_lines(f"{file_name(task)}: "):
        return record_of(run, task)


def record_of(run: Callable[[Any], Result], task: Any) -> Result:
    """The results of a run, with its configuration and what it ran on if it doesn't say them."""
    device = torch.device(getattr(task, "device", "cpu"))
    return {"config": asdict(task), **environment(device), **run(task)}


def file_name(task: Any) -> str:
    """The name of a run's file: the task's own ``name``, or else its fields without a default.

    Shares are in percent; what is no letter or digit becomes an underscore.
    """
    if hasattr(task, "name"):
        return task.name
    values = [getattr(task, f.name) for f in fields(task) if f.default is MISSING]
    words = [f"{100 * v:.0f}" if isinstance(v, float) else str(v).lower() for v in values]
    return "".join(c if c.isalnum() else "_" for c in "_".join(words))


# Tables


def grouped(results: Iterable[Result], *keys: str) -> dict[Any, list[Result]]:
    """Value of a key of the configuration, or values of several -> the results that have it."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        values = tuple(result["config"][key] for key in keys)
        groups[values[0] if len(keys) == 1 else values].append(result)
    return groups


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


def metric_of(result: Result, predictive: str, key: str) -> float:
    """A metric of a predictive, of those that ``marglik train`` reports.

    Args:
        result: with the "metrics" of a run.
        predictive: its name, or the beginning of it: a Laplace predictive's goes on with its
            method, and the preset's is the first.
        key: the metric's name.
    """
    names = [predictive] if predictive in result["metrics"] else result["metrics"]
    return result["metrics"][next(n for n in names if n.startswith(predictive))][key]
