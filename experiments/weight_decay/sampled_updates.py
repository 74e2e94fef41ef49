"""The price of learned weight decays: the default updates, beside exact ones of all data.

By default updates see a sample, with one random vector of each example, and rest once decays have
settled; the last one sees all data, but may be such an estimate.

Seconds of one thread, in plain trainings (no prior, the same average), the test NLL at a
temperature that held-out data choose, and how far the learned decays are from those of updates on
all data. Networks and data are those of other studies; labels are right, or 40 % of those in
training and held-out data are wrong.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models import VisionTransformer
from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.default_options import SMALLEST, rows_of_digits
from experiments.weight_decay.training import (
    Problem,
    convolutions,
    digits,
    no_norm,
    scores_of,
    small_images,
    with_wrong_labels,
)
from marglik.data.batches import Batches
from marglik.models import WideResNetFixup


def large_digits() -> tuple[Tensor, Tensor]:
    """The digits at 28×28 pixels."""
    x, y = digits()
    return F.interpolate(x, size=28, mode="bilinear"), y


def small_mlp() -> nn.Module:
    """784-50-10, the size of small examples everywhere."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.Tanh(), nn.Linear(50, 10))


class Recurrent(nn.Module):
    """An LSTM over an image's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of the last state, of rows (N, 8, 8)."""
        return self.head(self.lstm(x)[0][:, -1])


def grouped_convolutions() -> nn.Module:
    """Four groups of channels, each with a norm of its own."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, groups=4), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


of_digits = partial(Problem, data=digits, examples=1000)
PROBLEMS = {
    **{
        f"MLP 784-50-10, {epochs} epochs": Problem(
            small_mlp, epochs, data=large_digits, examples=1400
        )
        for epochs in (3, 6, 9, 15)
    },
    "MLP 784-50-10, 18 epochs": Problem(small_mlp, 18, data=large_digits, examples=1400),
    "MLP 784-50-10, 60 epochs": Problem(small_mlp, 60, data=large_digits, examples=1400),
    "convolutions, 25 epochs": of_digits(lambda: convolutions(no_norm, "flattened"), 25),
    "convolutions, 40 epochs": of_digits(lambda: convolutions(no_norm, "flattened"), 40),
    "BatchNorm, 12 epochs": of_digits(lambda: convolutions(nn.BatchNorm2d, "pooled"), 12),
    "BatchNorm, 40 epochs": of_digits(lambda: convolutions(nn.BatchNorm2d, "pooled"), 40),
    # These two were not looked at before the updates were as they are.
    "LSTM": Problem(Recurrent, 30, "adam", 3e-3, data=rows_of_digits, examples=700),
    "grouped convolutions": Problem(grouped_convolutions, 30, data=digits, examples=700),
    "ViT": Problem(
        lambda: VisionTransformer(10, 1, 8, patch_size=2, dim=32, depth=2), 30, "adam", 2e-3,
        data=digits, examples=700,
    ),
    "CIFAR-10 (JPEG), 4,000 images": Problem(
        lambda: convolutions(nn.BatchNorm2d, "flattened", 3, 16), 16,
        data=small_images, examples=4000,
    ),
    "WRN-10-1 Fixup, 30 epochs": Problem(
        lambda: WideResNetFixup(10, 1, 10), 30, batch_size=128, data=small_images, examples=3600
    ),
}  # fmt: skip
UPDATES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "all data": {"curvature_from": "pass", "rest": None},
    "sampled": {},
}
"""Options of the learner; None learns no decays."""
FURTHER = 100
"""First seed of runs that repeat a finding. They have rows of their own, because the seeds below
led to the finding."""


@dataclass(frozen=True)
class Config:
    """A problem and a seed."""

    problem: str
    wrong: float
    seed: int


def run(config: Config) -> Result:
    """Train one after the other, and test."""
    problem = PROBLEMS[config.problem]
    split, held_out, test = with_wrong_labels(
        *problem.data(), problem.examples, 200, config.wrong, config.seed
    )
    results = {}
    problem.warm_up(split)
    for name, options in UPDATES.items():
        loader = Batches(*split, problem.batch_size, shuffle=True, seed=config.seed)
        decays = SMALLEST if options is None else None
        trained = problem.run(split, config.seed, decays, loader=loader, **options or {})
        results[name] = scores_of(trained.model, held_out, test)
        results[name] |= {"seconds": trained.seconds} | trained.record
    return {"results": results, "seconds": sum(result["seconds"] for result in results.values())}


def tasks(options: argparse.Namespace) -> list[Config]:
    """Seed by seed."""
    return [
        Config(problem, wrong, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for problem in options.data
        for wrong in (0.0, 0.4)
    ]


def table(results: list[Result]) -> str:
    """Cost and NLL, with errors over seeds; and the median factor between the decays."""
    rows = [["network", "wrong", "seeds", "cost, all data", "cost, sampled", "NLL, no decay",
             "NLL, all data", "NLL, sampled", "sampled − all", "sampled − no decay",
             "decays differ by"]]  # fmt: skip
    parts = [
        (problem, wrong, [run for run in runs if (run["config"]["seed"] >= FURTHER) == is_further])
        for (problem, wrong), runs in grouped(results, "problem", "wrong").items()
        for is_further in (False, True)
    ]
    means = dict[float, list[float]]()
    for problem, wrong, runs in parts:
        if not runs:
            continue
        seeds = [run["results"] for run in runs]
        numbers = [run["config"]["seed"] for run in runs]
        costs = {
            name: statistics.median(
                seed[name]["seconds"] / seed["plain"]["seconds"] for seed in seeds
            )
            for name in ("all data", "sampled")
        }
        nlls = {name: [seed[name]["nll"] for seed in seeds] for name in UPDATES}
        differences = [
            [a - b for a, b in zip(nlls["sampled"], nlls[other], strict=True)]
            for other in ("all data", "plain")
        ]
        if min(numbers) < FURTHER and len(runs) > 1:
            means.setdefault(wrong, []).append(statistics.fmean(differences[0]))
        factors = [
            math.exp(statistics.median(abs(math.log(a / b)) for a, b in pairs_of_decays(seed)))
            for seed in seeds
        ]
        rows.append([
            problem, f"{wrong:.0%}", f"{len(runs)}, from {min(numbers)}",
            *(f"{cost:.2f}" for cost in costs.values()),
            *map(mean_with_error, nlls.values()),
            *(mean_with_error(values, "{:+.3f}") for values in differences),
            f"{statistics.fmean(factors):.2f}",
        ])  # fmt: skip
    summary = [["wrong", "rows", "sampled − all"]] + [
        [f"{wrong:.0%}", str(len(values)), mean_with_error(values, "{:+.4f}")]
        for wrong, values in means.items()
    ]
    return (
        "Costs are seconds of one thread in plain trainings; the last column is the median factor "
        f"between the decays of the two.\n\n{markdown(rows)}\n\n"
        "Means over the rows with several seeds from 0, with errors over these rows:\n\n"
        + markdown(summary)
    )


def pairs_of_decays(results: Result) -> list[tuple[float, float]]:
    """The weight decays of sampled updates beside those of all data, tensor by tensor."""
    ours, theirs = (results[name]["weight_decay"] for name in ("sampled", "all data"))
    return [(ours[name], theirs[name]) for name in ours]


main = study(
    "sampled_updates", __doc__, run, tasks, table, problems=PROBLEMS,
    default=[name for name in PROBLEMS if "CIFAR" not in name and "WRN" not in name], seeds=5,
    extra={"--first-seed": {"type": int, "default": 0, "help": "first seed; default: 0"}},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
