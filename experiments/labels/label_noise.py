"""Wrong labels: what a likelihood and a calibration that know of them bring, on clean test labels.

A share of the labels in training and held-out data is changed: to another class ("flipped"), to
the next one ("structured"), or to another one for examples of class 0 alone ("one class", where the
share is that of class 0). Three ways, each with default options: learned weight decays with
likelihood "classification"; the same with "noisy_classification", which learns the share of wrong
labels from the held-out data; and the best of three fixed decays with a cosine. 200 held-out
examples (100 for vectors) choose that decay, and calibrate each way twice: by a temperature, and by
a temperature with a share ε of labels that were drawn at random (`marglik.calibrate` without the
posterior's width). "Either" is the learned way of lower held-out NLL, for two trainings.

Rules and priors were chosen on MLP, convolutions and GroupNorm; LeNet and vectors (breast cancer)
were not looked at before.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.studies import markdown, mean_with_error, quiet_training, recorded, slug, study
from experiments.weight_decay.default_options import cancer
from experiments.weight_decay.training import (
    Problem,
    Split,
    Trained,
    convolutions,
    digits,
    mlp,
    no_norm,
    scaled_scores,
)
from kfac_backend.likelihoods import Classification
from marglik import suspicious_labels
from marglik.models import LeNet
from marglik.prediction.calibration import HeldOut, fit_map

of_digits = partial(Problem, data=digits)
PROBLEMS = {
    "digits, MLP": of_digits(lambda: mlp(64, 10, no_norm, hidden=100), 60, examples=800),
    "digits, convolutions": of_digits(lambda: convolutions(no_norm, "flattened"), examples=1000),
    "digits, GroupNorm": of_digits(
        lambda: convolutions(lambda c: nn.GroupNorm(4, c), "pooled"), examples=500
    ),
    "digits, LeNet": of_digits(lambda: LeNet(10, 1, 8), examples=600),
    "vectors, BatchNorm": Problem(
        lambda: mlp(30, 2, nn.BatchNorm1d), data=cancer, examples=300, held_out=100
    ),
}
GRID = (1e-3, 1e-2, 3e-2)
LIKELIHOODS = {"learned": "classification", "noise learned": "noisy_classification"}
Noise = Literal["flipped", "structured", "one class"]
NOISES: tuple[tuple[Noise, float], ...] = (
    ("flipped", 0.2), ("flipped", 0.0), ("flipped", 0.4), ("structured", 0.2), ("one class", 0.4),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A problem with wrong labels."""

    problem: str
    noise: Noise
    share: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{slug(self.problem)}_{slug(self.noise)}_{round(100 * self.share)}_{self.seed}"


def splits_of(config: Config) -> tuple[Split, Tensor, Split, Split]:
    """Training data with wrong labels, their right labels; held-out data, as wrong; test data."""
    problem = PROBLEMS[config.problem]
    x, y = problem.data()
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(y), generator=generator)
    x, y, classes = x[order], y[order], int(y.max()) + 1
    wrong = torch.rand(len(y), generator=generator) < config.share
    shift = torch.randint(1, classes, (len(y),), generator=generator)
    if config.noise == "structured":
        shift = torch.ones_like(shift)
    if config.noise == "one class":
        wrong &= y == 0
    given = torch.where(wrong, (y + shift) % classes, y)
    N, end = problem.examples, problem.examples + problem.held_out
    return (x[:N], given[:N]), y[:N], (x[N:end], given[N:end]), (x[end:], y[end:])


@torch.no_grad()
def scores_of(model: nn.Module, held_out: Split, test: Split) -> dict[str, float]:
    """Test NLL of the true class by a temperature ("scaled"), and by ε beside it; accuracy."""
    f_held_out, f = model(held_out[0]), model(test[0])
    scaled = scaled_scores(f_held_out[None], held_out[1], f[None], test[1])
    with torch.enable_grad():
        spread = torch.zeros_like(f_held_out)[:, None]
        data = HeldOut(Classification(), f_held_out, spread, held_out[1], is_sampled=True)
        fit = fit_map(data)
    p = torch.softmax(f_held_out / fit.output_temperature, -1).gather(1, held_out[1][:, None])
    q = (1 - fit.label_noise) * p + fit.label_noise / f.shape[1]
    return {
        "nll": F.cross_entropy(f / fit.output_temperature, test[1]).item(),
        "scaled_nll": scaled["nll"],
        "accuracy": scaled["accuracy"],
        "held_out_nll": -q.log().mean().item(),
        "label_noise": fit.label_noise,
        "tau": fit.output_temperature,
    }


def found_wrong(trained: Trained, y: Tensor, true: Tensor, label_noise: float) -> dict[str, Any]:
    """Wrong labels by the probability of being wrong, and by the score."""
    assert trained.result is not None and trained.result.training_probabilities is not None
    p = trained.result.training_probabilities.mean()
    found = suspicious_labels(y, p, label_noise)
    assert found.wrong is not None
    wrong = (y != true)[found.index]
    sure = found.wrong >= 0.9
    ranked = bool(wrong.any())
    return {
        "sure": int(sure.sum()),
        "sure_and_wrong": int((sure & wrong).sum()),
        "expected_among_sure": found.wrong[sure].sum().item(),
        "AUROC_probability": float(roc_auc_score(wrong, found.wrong)) if ranked else None,
        "AUROC_score": float(roc_auc_score(wrong, found.score)) if ranked else None,
    }


@recorded
@quiet_training()
def run(config: Config) -> dict[str, Any]:
    """Train by all ways, and test them."""
    problem, started = PROBLEMS[config.problem], time.process_time()
    train, true, held_out, test = splits_of(config)
    ways, suspicious = {}, {}
    for way, likelihood in LIKELIHOODS.items():
        loader = DataLoader(TensorDataset(*train), problem.batch_size, shuffle=True)
        trained = problem.run(
            train, config.seed, None, loader=loader, likelihood=likelihood, held_out=held_out
        )
        ways[way] = scores_of(trained.model, held_out, test)
        suspicious[way] = found_wrong(trained, train[1], true, ways[way]["label_noise"])
        parameters = trained.posterior.likelihood.parameters
        ways[way]["noise_of_training"] = float(parameters.get("noise", 0.0))
    fixed = [
        scores_of(problem.run(train, config.seed, decay, "cosine").model, held_out, test)
        for decay in GRID
    ]
    ways["grid"] = min(fixed, key=lambda scores: scores["held_out_nll"])
    ways["either"] = min(
        (ways[way] for way in LIKELIHOODS), key=lambda scores: scores["held_out_nll"]
    )
    return {
        "ways": ways,
        "suspicious": suspicious,
        "wrong": (train[1] != true).double().mean().item(),
        "seconds": time.process_time() - started,
    }


def tasks(options: argparse.Namespace) -> list[Config]:
    """A seed of all problems and noises, then the next."""
    return [
        Config(problem, noise, share, seed)
        for seed in range(options.seeds)
        for noise, share in NOISES
        for problem in options.data
    ]


def table(found: list[dict[str, Any]]) -> str:
    """NLL and accuracy of each way, then what was found of wrong labels."""
    runs = defaultdict(list)
    for one in found:
        config = one["config"]
        runs[config["problem"], config["noise"], config["share"]].append(one)
    keys = [(name, *noise) for noise in NOISES for name in PROBLEMS if (name, *noise) in runs]
    ways = ("learned", "noise learned", "either", "grid")
    head = ["test NLL; accuracy (%)", "learned, τ alone", "grid, τ alone"]
    rows = [[*head, *(f"{way}, τ and ε" for way in ways), "ε: true, training", "seeds"]]
    sure = [["labels wrong with probability ≥ .9", "number", "are wrong", "expected",
             "AUROC: probability", "score"]]  # fmt: skip
    for key in keys:
        of, name = runs[key], f"{key[0]}, {key[1]} {100 * key[2]:.0f} %"
        cells = [
            mean_with_error([one["ways"][way]["scaled_nll"] for one in of])
            for way in ("learned", "grid")
        ]
        for way in ways:
            nll = mean_with_error([one["ways"][way]["nll"] for one in of])
            accuracy = statistics.fmean(100 * one["ways"][way]["accuracy"] for one in of)
            cells.append(f"{nll}; {accuracy:.1f}")
        classes = 2 if key[0].startswith("vectors") else 10
        true = statistics.fmean(one["wrong"] for one in of) * classes / (classes - 1)
        noise = statistics.fmean(one["ways"]["noise learned"]["noise_of_training"] for one in of)
        rows.append([name, *cells, f"{true:.2f}, {noise:.2f}", str(len(of))])
        parts = [one["suspicious"]["noise learned"] for one in of]
        number = sum(part["sure"] for part in parts)
        if number:
            areas = [
                f"{statistics.fmean(part[f'AUROC_{by}'] for part in parts):.3f}"
                for by in ("probability", "score")
            ]
            share, expected = (
                f"{sum(part[what] for part in parts) / number:.0%}"
                for what in ("sure_and_wrong", "expected_among_sure")
            )
            sure.append([name, f"{number / len(of):.0f}", share, expected, *areas])
    return "\n\n".join([markdown(rows), markdown(sure)])


def figures(found: list[dict[str, Any]]) -> dict[str, Figure]:
    """Test NLL by the share of flipped labels, for each problem."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.subplots(1, len(PROBLEMS))
    shown = {
        "learned, τ alone": ("learned", "scaled_nll", "tab:gray", "--"),
        "grid, τ and ε": ("grid", "nll", "tab:blue", "-"),
        "learned, τ and ε": ("learned", "nll", "tab:orange", "-"),
        "noise learned, τ and ε": ("noise learned", "nll", "tab:green", "-"),
    }
    for axis, problem in zip(axes, PROBLEMS, strict=True):
        for label, (way, what, color, style) in shown.items():
            points = defaultdict(list)
            for one in found:
                config = one["config"]
                if config["problem"] == problem and config["noise"] == "flipped":
                    points[config["share"]].append(one["ways"][way][what])
            shares = sorted(points)
            means = [statistics.fmean(points[share]) for share in shares]
            percents = [100 * share for share in shares]
            axis.plot(percents, means, style, color=color, marker="o", markersize=4, label=label)
        axis.set_title(problem, fontsize=9)
        axis.set_xlabel("wrong labels, %")
        axis.set_ylim(0)
    axes[0].set_ylabel("test NLL (nats)")
    axes[0].legend(fontsize=7)
    return {"summary": figure}


main = study("label_noise", __doc__, run, tasks, table, problems=PROBLEMS, seeds=5, figures=figures)

if __name__ == "__main__":
    sys.exit(main())
