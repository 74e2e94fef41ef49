"""Held-out labels beside the evidence: the corrections of `DecayPolicy` on networks that memorise.

A part of the training and held-out labels is wrong; test labels are right. "Evidence" is the
default. "Raise" raises a common factor on the decays of weights while held-out labels ask for it,
"both" lowers single decays, too. The test NLL is at the temperature and the share of wrong labels
that fit the held-out labels best. The limit of the factor was chosen on other problems.
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.sampled_updates import Config
from experiments.weight_decay.training import (
    Problem,
    convolutions,
    digits,
    no_norm,
    small_images,
    with_wrong_labels,
)
from kfac_backend.likelihoods import likelihood_of
from marglik.data.batches import Batches
from marglik.prediction.calibration import HeldOut, fit_sharpness

images = partial(
    Problem, epochs=30, lr=0.03, data=small_images, examples=1350, held_out=150, batch_size=64
)


def group_norm(width: int) -> nn.Module:
    """Four groups."""
    return nn.GroupNorm(4, width)


PROBLEMS = {
    "CIFAR-10 (JPEG), convolutions": images(lambda: convolutions(no_norm, "flattened", 3, 16)),
    "CIFAR-10 (JPEG), GroupNorm": images(lambda: convolutions(group_norm, "flattened", 3, 16)),
    "digits, BatchNorm": Problem(
        lambda: convolutions(nn.BatchNorm2d, "flattened"), data=digits, examples=900, held_out=100
    ),
}
SHARES = (0.4, 0.2, 0.0)
WAYS: dict[str, dict[str, Any]] = {
    "evidence": {},
    "raise": {"raise_limit": 1.2},
    "both": {"raise_limit": 1.2, "lowering": True},
}
"""Options of the learner."""


@torch.no_grad()
def scores_of(model: nn.Module, held_out: Any, test: Any) -> dict[str, float]:
    """NLL of right labels and accuracy, at the τ and ε that fit the held-out labels best."""
    likelihood = likelihood_of("classification")
    f = model(held_out[0])
    spread = torch.zeros(len(f), 1, f.shape[-1])
    fit = fit_sharpness(HeldOut(likelihood, f, spread, held_out[1], is_sampled=True), scale=0.0)
    log_p = (model(test[0]).double() / fit.output_temperature).log_softmax(-1)
    return {
        "nll": -log_p.gather(1, test[1][:, None]).mean().item(),
        "accuracy": (log_p.argmax(1) == test[1]).double().mean().item(),
        "label_noise": float(fit.label_noise),
    }


def run(config: Config) -> Result:
    """Train each way, one after the other, and test."""
    problem = PROBLEMS[config.problem]
    split, held_out, test = with_wrong_labels(
        *problem.data(), problem.examples, problem.held_out, config.wrong, config.seed
    )
    results = {}
    for way, options in WAYS.items():
        loader = Batches(*split, problem.batch_size, shuffle=True, seed=config.seed)
        trained = problem.run(split, config.seed, None, loader=loader, held_out=held_out, **options)
        factor = trained.learner.state.measures.log_factor
        results[way] = {"seconds": trained.seconds, "log_factor": factor}
        results[way] |= scores_of(trained.model, held_out, test)
    return {"results": results}


def tasks(options: argparse.Namespace) -> list[Config]:
    """Seed by seed."""
    return [
        Config(problem, wrong, seed)
        for seed in range(options.seeds)
        for wrong in SHARES
        for problem in options.data
    ]


def table(results: list[Result]) -> str:
    """The NLL and accuracy of each way, and differences paired by seed."""
    rows = [
        [
            *("network", "wrong labels", "seeds"),
            *(f"{way}: NLL" for way in WAYS),
            *("raise − evidence", "both − evidence", "accuracy", "factor opened", "seconds"),
        ]
    ]
    runs = grouped(results, "problem", "wrong")
    for problem in PROBLEMS:
        for wrong in sorted(SHARES):
            seeds = [result["results"] for result in runs.get((problem, wrong), [])]
            if not seeds:
                continue
            columns = {way: [seed[way] for seed in seeds] for way in WAYS}
            nlls = {way: [one["nll"] for one in column] for way, column in columns.items()}
            differences = [
                [a - b for a, b in zip(nlls[way], nlls["evidence"], strict=True)]
                for way in ("raise", "both")
            ]
            means = {
                way: {key: sum(one[key] for one in column) / len(column) for key in column[0]}
                for way, column in columns.items()
            }
            seconds = [mean["seconds"] / means["evidence"]["seconds"] for mean in means.values()]
            rows.append([
                problem, f"{wrong:.0%}", str(len(seeds)), *map(mean_with_error, nlls.values()),
                *(mean_with_error(values, "{:+.3f}") for values in differences),
                ", ".join(f"{100 * mean['accuracy']:.1f}" for mean in means.values()),
                f"{sum(one['log_factor'] > 0 for one in columns['raise'])} of {len(seeds)}",
                ", ".join(f"{ratio:.2f}" for ratio in seconds),
            ])  # fmt: skip
    return (
        "NLL of right test labels, accuracy in %, and processor seconds as multiples of the first "
        f"way's.\n\n{markdown(rows)}"
    )


main = study("held_out_labels", __doc__, run, tasks, table, problems=PROBLEMS, seeds=3)

if __name__ == "__main__":
    sys.exit(main())
