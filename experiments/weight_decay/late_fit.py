"""Networks that fit late: learned weight decays with and without the rule, beside none.

Decays that are large because the data determines little keep a network from fitting; where labels
are wrong, large decays early are the gain. `DecayPolicy.late_fit` tells the two apart. The test NLL
is at a temperature that held-out data choose; no decay has the same rates and the same average.
"""

import argparse
import sys
import warnings
from functools import partial
from typing import Any

from torch import nn

from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay import default_options, sampled_updates
from experiments.weight_decay.default_options import SMALLEST, is_worse
from experiments.weight_decay.sampled_updates import Config
from experiments.weight_decay.training import (
    Problem,
    convolutions,
    digits,
    mlp,
    no_norm,
    scores_of,
    with_wrong_labels,
)
from marglik.data.batches import Batches


def group_norm() -> nn.Module:
    """Convolutions with GroupNorm, whose outputs are averaged."""
    return convolutions(lambda width: nn.GroupNorm(4, width), "pooled")


def layer_norm() -> nn.Module:
    """An MLP with LayerNorm."""
    return mlp(64, 10, nn.LayerNorm)


of_digits = partial(Problem, data=digits)
PROBLEMS: dict[str, tuple[Problem, tuple[float, ...]]] = {
    "GroupNorm, batches of 128": (of_digits(group_norm, examples=500, batch_size=128), (0.0, 0.2)),
    "GroupNorm, batches of 50": (of_digits(group_norm, examples=500), (0.0, 0.2)),
    "pooled convolutions": (
        of_digits(lambda: convolutions(no_norm, "pooled"), 25, examples=1000), (0.0,)
    ),
    "LSTM": (sampled_updates.PROBLEMS["LSTM"], (0.0,)),
    "convolutions, 5 epochs": (
        of_digits(lambda: convolutions(no_norm, "flattened"), 5, examples=1000), (0.0,)
    ),
    "convolutions, 25 epochs": (sampled_updates.PROBLEMS["convolutions, 25 epochs"], (0.4, 0.8)),
    "MLP 784-50-10, 18 epochs": (sampled_updates.PROBLEMS["MLP 784-50-10, 18 epochs"], (0.4,)),
    # The rule was not tried on these while it was made.
    "LayerNorm, batches of 128, 15 epochs": (
        of_digits(layer_norm, 15, lr=0.01, examples=400, batch_size=128), (0.0, 0.4)
    ),
    "pooled BatchNorm": (default_options.PROBLEMS["BatchNorm, pooled"], (0.2,)),
    "grouped convolutions, batches of 128": (
        of_digits(sampled_updates.grouped_convolutions, 30, examples=700, batch_size=128),
        (0.0, 0.4),
    ),
}  # fmt: skip
UNDEVELOPED = tuple(PROBLEMS)[-3:]
WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "without": {"late_fit": None},
    "with": {"late_fit": "hold"},
}
"""Options of the learner; None learns no decays."""


def run(config: Config) -> Result:
    """Train one after the other, and test."""
    problem, _ = PROBLEMS[config.problem]
    split, held_out, test = with_wrong_labels(
        *problem.data(), problem.examples, problem.held_out, config.wrong, config.seed
    )
    results = {}
    for way, options in WAYS.items():
        loader = Batches(*split, problem.batch_size, shuffle=True, seed=config.seed)
        decays = SMALLEST if options is None else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained = problem.run(split, config.seed, decays, loader=loader, **options or {})
        results[way] = {"seconds": trained.seconds} | scores_of(trained.model, held_out, test)
        results[way] |= trained.record
        results[way]["warned"] = any("does not fit yet" in str(w.message) for w in caught)
    return {"results": results}


def tasks(options: argparse.Namespace) -> list[Config]:
    """Seed by seed."""
    return [
        Config(problem, wrong, seed)
        for seed in range(options.seeds)
        for problem in options.data
        for wrong in PROBLEMS[problem][1]
    ]


def table(results: list[Result]) -> str:
    """The NLL of each way, and differences paired by seed."""
    rows = [["network", "wrong", "seeds", "no decay", "without the rule", "with it",
             "with − without", "with − no decay", "warned"]]  # fmt: skip
    runs, worse = grouped(results, "problem", "wrong"), []
    for problem, (_, shares) in PROBLEMS.items():
        for wrong in shares:
            seeds = [result["results"] for result in runs.get((problem, wrong), [])]
            if not seeds:
                continue
            nlls = {way: [seed[way]["nll"] for seed in seeds] for way in WAYS}
            differences = [
                [a - b for a, b in zip(nlls["with"], nlls[way], strict=True)]
                for way in ("without", "none")
            ]
            name = f"{problem} *" if problem in UNDEVELOPED else problem
            rows.append([
                name, f"{wrong:.0%}", str(len(seeds)), *map(mean_with_error, nlls.values()),
                *(mean_with_error(values, "{:+.3f}") for values in differences),
                f"{sum(seed['with']['warned'] for seed in seeds)} of {len(seeds)}",
            ])  # fmt: skip
            worse += [
                f"{name} ({wrong:.0%}) than {rival}"
                for rival, values in zip(("without", "no decay"), differences, strict=True)
                if is_worse(values)
            ]
    return (
        "Test NLL. The rule was not tried on networks with a star while it was made.\n\n"
        f"{markdown(rows)}\n\nWith the rule worse by more than two standard errors: "
        f"{', '.join(worse) or 'nowhere'}."
    )


main = study("late_fit", __doc__, run, tasks, table, problems=PROBLEMS, seeds=5)

if __name__ == "__main__":
    sys.exit(main())
