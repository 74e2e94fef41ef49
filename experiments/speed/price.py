"""The price of one training: learned weight decays beside none, in processor seconds.

Both networks are trained one after the other in one process and one thread, with the same rates and
the same average: the plain one in a loop of a few lines. A seed is a round. Networks and data are
those of other studies, smallest first, and WRN-16-4 Fixup on images of CIFAR-10 (JPEG).
"""

import argparse
import statistics
import sys

from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay import default_options, sampled_updates
from experiments.weight_decay.default_options import SMALLEST
from experiments.weight_decay.sampled_updates import Config
from experiments.weight_decay.training import Problem, scores_of, small_images, with_wrong_labels
from marglik.data.batches import Batches
from marglik.models import WideResNetFixup

PROBLEMS = {
    **sampled_updates.PROBLEMS,
    **{f"default options: {name}": problem for name, problem in default_options.PROBLEMS.items()},
    "WRN-16-4 Fixup, 5 epochs": Problem(
        lambda: WideResNetFixup(16, 4, 10), 5, batch_size=128, data=small_images, examples=2000
    ),
}
WRONG = 0.4
"""Share of the labels in training and held-out data that are wrong, in every second training."""


def run(config: Config) -> Result:
    """Train a plain network, then one that learns its decays, and test both."""
    problem = PROBLEMS[config.problem]
    split, held_out, test = with_wrong_labels(
        *problem.data(), problem.examples, problem.held_out, config.wrong, config.seed
    )
    problem.warm_up(split)
    results = {}
    for name, decays in (("plain", SMALLEST), ("learned", None)):
        loader = Batches(*split, problem.batch_size, shuffle=True, seed=config.seed)
        trained = problem.run(split, config.seed, decays, loader=loader)
        results[name] = {"seconds": trained.seconds} | scores_of(trained.model, held_out, test)
        updates = trained.record.get("evidence_per_example", [])
    return {"results": results | {"updates": len(updates)}}


def tasks(options: argparse.Namespace) -> list[Config]:
    """Round by round."""
    return [
        Config(problem, wrong, seed)
        for seed in range(options.seeds)
        for problem in options.data
        for wrong in (0.0, WRONG)
    ]


def table(results: list[Result]) -> str:
    """Seconds of a plain training, the cost of learning in these, and both NLLs."""
    rounds = grouped(results, "problem", "wrong")
    rows = [["network", "wrong", "rounds", "plain, s", "cost", "updates", "NLL, plain", "learned"]]
    for problem in PROBLEMS:
        for wrong in (0.0, WRONG):
            if (problem, wrong) not in rounds:
                continue
            pairs = [result["results"] for result in rounds[problem, wrong]]
            plain, learned = ([pair[name] for pair in pairs] for name in ("plain", "learned"))
            ratios = [b["seconds"] / a["seconds"] for a, b in zip(plain, learned, strict=True)]
            rows.append([
                problem, f"{wrong:.0%}", str(len(pairs)),
                f"{statistics.median(training['seconds'] for training in plain):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{statistics.median(pair['updates'] for pair in pairs):g}",
                mean_with_error([training["nll"] for training in plain]),
                mean_with_error([training["nll"] for training in learned]),
            ])  # fmt: skip
    return (
        "Processor seconds of one thread; the cost is the median ratio of a round, in plain "
        "trainings.\n\n" + markdown(rows)
    )


main = study(
    "price", __doc__, run, tasks, table, problems=PROBLEMS,
    default=[name for name in PROBLEMS if "CIFAR" not in name and "WRN" not in name], seeds=3,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
