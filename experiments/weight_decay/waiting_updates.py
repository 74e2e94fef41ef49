"""The limit on large samples of updates: `samples.LARGEST_RATIO` beside no limit.

If a network has many effective parameters γ, a sample is at most this ratio times a usual sample,
and the update corrects γ. If even the correction needs a larger sample, and the weight decays
hardly change, the update waits. Without the limit, samples are large enough without a correction,
and no update waits. The study trains the same network with and without the limit, and compares the
test NLL at a temperature that held-out data choose.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from unittest.mock import patch

from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.sampled_updates import PROBLEMS
from experiments.weight_decay.training import scores_of, with_wrong_labels
from marglik.data.batches import Batches
from marglik.training import samples

RATIOS = (samples.LARGEST_RATIO, None)
"""Values of `samples.LARGEST_RATIO`; None is no limit."""
FORMER = 2.5
"""The limit of an earlier rule, in results that are older than the correction of γ: updates above
it waited, and no update corrected γ."""


@dataclass(frozen=True)
class Config:
    """A problem, a seed and a limit."""

    problem: str
    wrong: float
    seed: int
    ratio: float | None


def run(config: Config) -> Result:
    """Train with one limit, and test."""
    problem = PROBLEMS[config.problem]
    split, held_out, test = with_wrong_labels(
        *problem.data(), problem.examples, problem.held_out, config.wrong, config.seed
    )
    problem.warm_up(split)
    loader = Batches(*split, problem.batch_size, shuffle=True, seed=config.seed)
    ratio = math.inf if config.ratio is None else config.ratio
    with patch.object(samples, "LARGEST_RATIO", ratio):
        trained = problem.run(split, config.seed, None, loader=loader)
    updates = len(trained.record["evidence_per_example"])
    scores = scores_of(trained.model, held_out, test)
    return {"results": scores | {"seconds": trained.seconds, "updates": updates}}


def tasks(options: argparse.Namespace) -> list[Config]:
    """Seed by seed."""
    return [
        Config(problem, wrong, seed, ratio)
        for seed in range(options.seeds)
        for problem in options.data
        for wrong in (0.0, 0.4)
        for ratio in RATIOS
    ]


def table(results: list[Result]) -> str:
    """Seconds, updates and NLL of each ratio; and the differences to no limit, seed by seed."""
    rows = [["network", "wrong", "ratio", "seeds", "seconds", "updates", "NLL", "NLL − no limit"]]
    for (problem, wrong, ratio), runs in grouped(results, "problem", "wrong", "ratio").items():
        trainings = {run["config"]["seed"]: run["results"] for run in runs}
        without = {
            run["config"]["seed"]: run["results"]["nll"]
            for (*of, other), others in grouped(results, "problem", "wrong", "ratio").items()
            if of == [problem, wrong] and other is None
            for run in others
        }
        differences = [
            training["nll"] - without[seed]
            for seed, training in trainings.items()
            if seed in without
        ]
        rows.append([
            problem, f"{wrong:.0%}", "no limit" if ratio is None else f"{ratio:g}",
            str(len(trainings)),
            f"{statistics.median(training['seconds'] for training in trainings.values()):.1f}",
            f"{statistics.median(training['updates'] for training in trainings.values()):g}",
            mean_with_error([training["nll"] for training in trainings.values()]),
            "" if ratio is None else mean_with_error(differences, "{:+.4f}"),
        ])  # fmt: skip
    return (
        "Processor seconds of one thread, on a machine with other work. The ratio "
        f"{FORMER} is an earlier rule, without a correction of γ.\n\n{markdown(rows)}"
    )


main = study(
    "waiting_updates", __doc__, run, tasks, table, problems=PROBLEMS,
    default=["CIFAR-10 (JPEG), 4,000 images"], seeds=6,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
