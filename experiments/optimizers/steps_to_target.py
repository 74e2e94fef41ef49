"""Steps and seconds to a target: the paper's comparison of K-FAC with a tuned reference optimiser.

The settings of each method are chosen among quasi-random ones. The target is the median over seeds
of the last validation metric of the tuned reference. K-FAC's settings are those of the run that
reaches it first (Eschenhagen et al. 2023, sections 4.2 and 4.3, after AlgoPerf). A run reaches the
target when it stays there: on problems small enough for two cores, an untrained network's metric
may jump above the target for a moment.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.optimizers.runs import (
    Candidate,
    Config,
    Method,
    Part,
    Problem,
    Schedule,
    Timing,
    best_candidate,
    quasi_random_search,
    run,
    run_timing,
    runs_of,
    settled_at,
)
from experiments.studies import (
    add_study_options,
    markdown,
    mean_with_error,
    results_in,
    run_missing,
    study_folder,
)
from kfac_backend.files import write_file

__all__ = ["Study", "main", "run_task", "table", "tables", "target_of"]

Row = dict[str, Any]
NO_PAPER = ("–", "–", "–")


@dataclass(frozen=True)
class Study:
    """Methods that are compared on the same problems; the first is the reference."""

    title: str
    methods: Mapping[str, Method]
    schedules: Mapping[str, Schedule]
    """Schedule by problem."""
    lr: Mapping[str, tuple[float, float]]
    """Range of learning rates that is searched, by method or else by problem."""
    damping: tuple[float, float]
    """Range of K-FAC's damping that is searched."""
    block: int
    """Steps timed in a row."""
    paper: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """The paper's cells by method: steps, % of the reference's steps, % of its time."""
    choose_first: bool = True
    """True chooses the run that reaches the target first, False that with the best last value."""
    given: Mapping[str, float] = field(default_factory=dict)
    """Damping of methods without a search; they take the reference's learning rate."""

    @property
    def reference(self) -> str:
        """Name of the reference, the first method."""
        return next(iter(self.methods))

    @property
    def searched(self) -> list[str]:
        """Names of the methods with a search of their own."""
        return [name for name in self.methods if name not in self.given]


def target_of(reference: Row) -> float:
    """Target: the median over seeds of the reference's last metric."""
    return statistics.median(curve[reference["metric"]][-1] for curve in reference["curves"])


def run_task(
    task: Config | Timing, problems: Mapping[str, Problem], methods: Mapping[str, Method]
) -> Row:
    """Run a search, the seeds, or the timing."""
    problem = problems[task.problem]
    if isinstance(task, Timing):
        return run_timing(problem, methods, task)
    return run(problem, methods[task.method], task)


# Tables and figures, from JSON alone


def table(found: Sequence[Row], study: Study, problem: str) -> str:
    """Steps and seconds to the target as Markdown, and what the searches found.

    Args:
        found: contents of all files of the study.
        study: the methods to compare.
        problem: the name of the problem.
    """
    seeds, searches = (runs_of(found, problem, part) for part in ("seeds", "search"))
    reference = seeds[study.reference]
    metric, target = reference["metric"], target_of(reference)
    timing = _timing(found, study, problem)
    base = _steps(reference, target)
    head = ["", "reached by", "steps", "%", "time of a step", "time, %", "last value", "test"]
    head += ["learning rate", "damping"]
    head += ["paper: steps", "%", "time, %"] if study.paper else []
    rows = [head]
    for name, method in study.methods.items():
        if name not in seeds:
            continue
        own = _steps(seeds[name], target)
        chosen = seeds[name]["curves"][0]["candidate"]
        share = statistics.mean(own) / statistics.mean(base) if own and base else None
        pace = None
        if name in timing:
            pace = timing[name]["median"] / timing[study.reference]["median"]
        time = None if pace is None or share is None else 100 * pace * share
        rows.append(
            [
                method.title,
                f"{len(own)} of {len(seeds[name]['curves'])}",
                _mean(own, "{:,.0f}"),
                _or_dash(share and 100 * share, "{:.0f}"),
                _or_dash(pace, "{:.2f}"),
                _or_dash(time, "{:.0f}"),
                _mean(_last(seeds[name]), "{:.4f}"),
                _mean([c["test"][metric] for c in _whole(seeds[name])], "{:.4f}"),
                f"{chosen['lr']:.3g}",
                _or_dash(chosen["damping"], "{:.3g}"),
                *(study.paper.get(name, NO_PAPER) if study.paper else ()),
            ]
        )
    of_search = [["search", "trials", "diverged", "reach the target", "best last value", "median"]]
    for name in study.searched:
        if name in searches:
            last = _last(searches[name])
            number = len(searches[name]["curves"])
            of_search.append(
                [
                    study.methods[name].title,
                    str(number),
                    str(number - len(last)),
                    str(len(_steps(searches[name], target))),
                    _or_dash((min if metric == "loss" else max)(last, default=None), "{:.4f}"),
                    _or_dash(statistics.median(last) if last else None, "{:.4f}"),
                ]
            )
    return "\n\n".join(
        [
            f"## {reference['problem']}{study.title}",
            f"Target: {metric} {target:.4f} on the validation data, the median over seeds of the "
            "reference's last value. Mean ± standard error over the seeds that reach it, of "
            f"{len(reference['curves'])}. Steps and time are also in percent of the reference's.",
            markdown(rows),
            markdown(of_search),
        ]
    )


def tables(found: Sequence[Row], studies: Sequence[Study], problems: Mapping[str, Problem]) -> str:
    """A table for each problem and study that has results."""
    return "\n\n".join(
        table(found, study, problem)
        for problem in problems
        for study in studies
        if study.reference in runs_of(found, problem, "seeds")
    )


def _timing(found: Sequence[Row], study: Study, problem: str) -> dict[str, dict[str, float]]:
    for result in found:
        config = result["config"]
        if "step_seconds" in result and config["problem"] == problem:
            if study.reference in config["methods"]:
                return result["step_seconds"]
    return {}


def _steps(result: Row, target: float) -> list[int]:
    reached = (settled_at(c, result["metric"], target) for c in result["curves"])
    return [step for step in reached if step is not None]


def _whole(result: Row) -> list[Row]:
    """The curves of runs that did not diverge."""
    return [curve for curve in result["curves"] if curve["diverged"] is None]


def _last(result: Row) -> list[float]:
    return [curve[result["metric"]][-1] for curve in _whole(result)]


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _mean(values: Sequence[float], form: str) -> str:
    return mean_with_error(values, form) if values else "–"


# The command


def main(
    arguments: Sequence[str] | None,
    *,
    name: str,
    description: str,
    studies: Sequence[Study],
    problems: Mapping[str, Problem],
    run_one: Callable[[Config | Timing], Row],
    data: Sequence[str],
    trials: int,
    seeds: int,
) -> int:
    """Search, run the seeds, time, write tables and figures; returns the exit status.

    Args:
        arguments: the command line's; None for this process's.
        name: of the folder of results.
        description: of the command.
        studies: to run one after the other.
        problems: by name.
        run_one: `run_task` as a module's function, so that other processes can import it.
        data: the default of --data, the problems.
        trials: the default of --trials, those of each search.
        seeds: the default of --seeds, how many each method has.
    """
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument(
        "--data",
        nargs="*",
        choices=list(problems),
        default=list(data),
        help=f"problems; default: {', '.join(data)}",
    )
    parser.add_argument("--steps", type=int, help="steps of the reference; default: the schedule's")
    parser.add_argument(
        "--trials", type=int, default=trials, help=f"trials of each search; default: {trials}"
    )
    parser.add_argument(
        "--seeds", type=int, default=seeds, help=f"number of seeds; default: {seeds}"
    )
    add_study_options(parser)
    options = parser.parse_args(arguments)
    folder = study_folder(parser, options, name)

    def report(folder: Path) -> str:
        text = tables(results_in(folder), studies, problems)
        write_file(folder / "table.md", f"{text}\n".encode())
        return text

    def finish(tasks: Sequence[Config | Timing]) -> int:
        return run_missing(run_one, tasks, folder, report, options)

    if options.report:
        return finish([])
    for problem in options.data:
        for study in studies:
            for tasks in _stages(study, problem, options, folder):
                if status := finish(tasks):
                    return status
    return 0


def _stages(
    study: Study, problem: str, options: argparse.Namespace, folder: Path
) -> Iterator[list[Config | Timing]]:
    """Yield the tasks of a study in stages; each needs the results of those before."""
    reference, schedule = study.reference, study.schedules[problem]
    if options.steps is not None:
        schedule = schedule.times(options.steps / schedule.steps)
    seeds = tuple(range(1, options.seeds + 1))  # a search has seed 0

    def task(
        name: str, part: Part, candidates: tuple[Candidate, ...], seeds: tuple[int, ...]
    ) -> Config:
        every = max(1, schedule.steps // 40)
        return Config(problem, name, part, candidates, seeds, schedule, every)

    def candidates(name: str) -> tuple[Candidate, ...]:
        lr = study.lr[name if name in study.lr else problem]
        found = quasi_random_search(lr, study.damping, options.trials)
        if study.methods[name].kfac_approx is not None:
            return found
        return tuple(Candidate(c.lr) for c in found)

    yield [task(name, "search", candidates(name), (0,)) for name in study.searched]
    searches = runs_of(results_in(folder), problem, "search")
    best = best_candidate(searches[reference])
    yield [task(reference, "seeds", (best,), seeds)]
    target = None
    if study.choose_first:
        target = target_of(runs_of(results_in(folder), problem, "seeds")[reference])
    chosen = {name: Candidate(best.lr, damping) for name, damping in study.given.items()}
    for name in study.searched[1:]:
        chosen[name] = best_candidate(searches[name], target)
    yield [
        *(task(name, "seeds", (candidate,), seeds) for name, candidate in chosen.items()),
        Timing(problem, tuple(study.methods), study.block),
    ]
