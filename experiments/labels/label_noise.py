"""Wrong labels: what a likelihood and a calibration that know of them bring, on clean test labels.

A share of the labels in training and held-out data is changed: to another class ("flipped"), to
the next one ("structured"), or to another one for examples of class 0 alone ("one class", where the
share is that of class 0). Four ways: learned weight decays with default options and likelihood
"classification"; the same with "noisy_classification", which learns the share of wrong labels from
the held-out data; the best of seven fixed decays; and no decay, "MAP". Fixed decays have a rate
that falls to zero as a cosine. 200 held-out examples (100 for vectors) choose the best decay, and
calibrate each way twice: by a temperature, and by a temperature with a share ε of labels that were
drawn at random (`marglik.calibrate` without the posterior's width).

Rules and priors were chosen on digits (MLP, convolutions, GroupNorm; 300 to 1,000 examples), also
as even or odd, and on vectors made at random. Images of CIFAR-10 and vectors of breast cancer were
not looked at before. The four recipes, on digits, are those under which learned decays alone lost
to a grid.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.labels.suspicious_labels import Noise, by_cleanlab, out_of_sample, splits_of
from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.default_options import GRID, SMALLEST, cancer
from experiments.weight_decay.training import (
    Problem,
    Split,
    Trained,
    convolutions,
    digits,
    mlp,
    no_norm,
    scaled_scores,
    small_images,
)
from kfac_backend.likelihoods import Classification
from marglik import suspicious_labels
from marglik.prediction.calibration import HeldOut, fit_sharpness

of_digits = partial(Problem, epochs=25, data=digits, examples=400)


def tiny_images() -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10 (JPEG) at a quarter of their size, (N, 3, 8, 8)."""
    x, y = small_images()
    return F.avg_pool2d(x, 2), y


def two_strides() -> nn.Module:
    """Convolutions that halve the image twice."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


PROBLEMS = {
    "digits, MLP": of_digits(lambda: mlp(64, 10, no_norm)),
    "vectors, BatchNorm": Problem(
        lambda: mlp(30, 2, nn.BatchNorm1d), 25, data=cancer, examples=300, held_out=100
    ),
    "digits, convolutions": of_digits(lambda: convolutions(no_norm, "flattened")),
    "CIFAR-10 (JPEG)": Problem(
        lambda: convolutions(nn.BatchNorm2d, "pooled", 3, 8), 15, data=tiny_images, examples=1000
    ),
}  # fmt: skip
RECIPES = {
    "stride 2, SGD at .05": (of_digits(two_strides), "constant", 0.4),
    "one-cycle": (of_digits(lambda: convolutions(no_norm, "flattened")), "one-cycle", 0.4),
    "MLP, Adam, cosine": (
        of_digits(lambda: mlp(64, 10, no_norm), optimizer="adam", lr=3e-3), "cosine", 0.4,
    ),
    "BatchNorm, flattened": (
        of_digits(lambda: convolutions(nn.BatchNorm2d, "flattened")), "constant", 0.2,
    ),
}  # fmt: skip
"""Name -> problem, learning rate where decays are learned, and share of flipped labels."""
SEEDS_OF_RECIPES = 3
LIKELIHOODS = {"learned": "classification", "noise learned": "noisy_classification"}
WAYS = (*LIKELIHOODS, "grid", "MAP")
NOISES: tuple[tuple[Noise, float], ...] = (
    ("flipped", 0.0), ("flipped", 0.2), ("flipped", 0.4), ("structured", 0.2), ("one class", 0.4),
)  # fmt: skip
FOLDS_FOR = "digits, MLP"
"""Where cleanlab is compared."""
BINS = (0.1, 0.5, 0.9, 1.0)
"""Ends of the bins of probabilities of being wrong."""


@dataclass(frozen=True)
class Config:
    """A problem or recipe with all its noises."""

    problem: str
    seed: int


@torch.no_grad()
def scores_of(model: nn.Module, held_out: Split, test: Split) -> dict[str, float]:
    """Test NLL of the true class by a temperature ("scaled"), and by ε beside it; accuracy."""
    f_held_out, f = model(held_out[0]), model(test[0])
    scaled = scaled_scores(f_held_out[None], held_out[1], f[None], test[1])
    spread = torch.zeros_like(f_held_out)[:, None]
    with torch.enable_grad():
        data = HeldOut(Classification(), f_held_out, spread, held_out[1], is_sampled=True)
        fit = fit_sharpness(data, scale=0.0)
    p, p_held_out = (torch.softmax(g / fit.output_temperature, -1) for g in (f, f_held_out))
    q = (1 - fit.label_noise) * p_held_out + fit.label_noise / f.shape[-1]
    return {
        "nll": F.nll_loss(p.log(), test[1]).item(),
        "scaled_nll": scaled["nll"],
        "accuracy": scaled["accuracy"],
        "held_out_nll": F.nll_loss(q.log(), held_out[1]).item(),
        "label_noise": fit.label_noise,
        "tau": fit.output_temperature,
    }


def wrong_labels(p: Tensor, y: Tensor, true: Tensor, scores: dict[str, float]) -> dict[str, Any]:
    """Wrong labels by the probability of being wrong, in bins, and by the score.

    Args:
        p: the network's mean predictions in training (N, C).
        y: the observed labels.
        true: the right ones.
        scores: of the network, with its calibration.
    """
    suspicious = suspicious_labels(y, p, scores["label_noise"], scores["tau"])
    # Without label noise no label has a probability of being wrong.
    probability = suspicious.wrong
    probability = torch.zeros_like(suspicious.score) if probability is None else probability
    wrong, bins = (y != true)[suspicious.index], []
    for low, high in zip(BINS, BINS[1:], strict=False):
        inside = (probability >= low) & (probability <= high if high == 1 else probability < high)
        numbers = inside.sum(), (inside & wrong).sum(), probability[inside].sum()
        bins.append([float(number) for number in numbers])
    scores_of_labels = {"AUROC": probability, "AUROC of the score": suspicious.score}
    return {
        "number": int(wrong.sum()),
        "bins": bins,
        "expected": probability.sum().item(),
        **{
            name: float(roc_auc_score(wrong, score)) if wrong.any() else None
            for name, score in scores_of_labels.items()
        },
    }


def with_cleanlab(problem: Problem, split: Split, true: Tensor, first: Trained, seed: int) -> Any:
    """What cleanlab finds by five folds: AUROC of its scores, and which labels are issues."""
    p = out_of_sample(split, seed, lambda part: problem.run(part, seed, first.learner).model)
    scores, issues = by_cleanlab(split[1], p)
    wrong = split[1] != true
    areas = {name: float(roc_auc_score(wrong, score)) for name, score in scores.items()}
    return {"AUROC": areas, "issues": [int(issues.sum()), int((issues & wrong).sum())]}


def run_noise(config: Config, noise: Noise, share: float) -> dict[str, Any]:
    """Train by all ways under one noise, and test them."""
    problem, rate, _ = RECIPES.get(config.problem) or (PROBLEMS[config.problem], "constant", 0)
    train, true, held_out, test = splits_of(problem, noise, share, config.seed, True)
    ways, suspicious, networks = {}, {}, {}
    for way, likelihood in LIKELIHOODS.items():
        loader = DataLoader(TensorDataset(*train), problem.batch_size, shuffle=True)
        trained = problem.run(
            train, config.seed, None, rate, loader=loader, likelihood=likelihood, held_out=held_out
        )
        networks[way] = trained
        ways[way] = scores_of(trained.model, held_out, test)
        assert trained.result is not None and trained.result.training_probabilities is not None
        p = trained.result.training_probabilities.mean()
        suspicious[way] = wrong_labels(p, train[1], true, ways[way])
        parameters = trained.posterior.likelihood.parameters
        ways[way]["noise_of_posterior"] = float(parameters.get("noise", 0.0))

    of_rate = "one-cycle" if rate == "one-cycle" else "cosine"
    of_decays = {
        decay: scores_of(problem.run(train, config.seed, decay, of_rate).model, held_out, test)
        for decay in (SMALLEST, *GRID)
    }
    best = min(GRID, key=lambda decay: of_decays[decay]["held_out_nll"])
    ways["MAP"], ways["grid"] = of_decays[SMALLEST], of_decays[best] | {"decay": best}
    results = {
        "ways": ways,
        "suspicious": suspicious,
        "wrong": (train[1] != true).double().mean().item(),
    }
    if config.problem == FOLDS_FOR and (noise, share) in (("flipped", 0.2), ("structured", 0.2)):
        results["cleanlab"] = with_cleanlab(problem, train, true, networks["learned"], config.seed)
    return results


def label_of(noise: Noise, share: float) -> str:
    """A noise in words."""
    return f"{noise} {100 * share:.0f} %"


def run(config: Config) -> Result:
    """Train by all ways, under each noise."""
    started = time.process_time()
    noises: Sequence[tuple[Noise, float]] = NOISES
    if config.problem in RECIPES:
        noises = (("flipped", RECIPES[config.problem][2]),)
    results = {label_of(*noise): run_noise(config, *noise) for noise in noises}
    return {"noises": results, "seconds": time.process_time() - started}


def tasks(options: argparse.Namespace) -> list[Config]:
    """A seed of all problems and recipes, then the next."""
    return [
        Config(name, seed)
        for seed in range(options.seeds)
        for name in options.data
        if name in PROBLEMS or seed < SEEDS_OF_RECIPES
    ]


def by_noise(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """(Problem or recipe, noise) -> the results of its seeds."""
    groups = grouped(results, "problem")
    return {
        (name, noise): [run["noises"][noise] for run in groups[name]]
        for name in (*PROBLEMS, *RECIPES)
        if name in groups
        for noise in groups[name][0]["noises"]
    }


def table(results: list[Result]) -> str:
    """NLL and accuracy of each way, then what was found of wrong labels."""
    rows = [["test NLL", "learned, τ alone", "grid, τ alone", *(f"{way}, τ and ε" for way in WAYS),
             "noise learned − learned", "− grid", "seeds"]]  # fmt: skip
    right = [["accuracy (%)", *WAYS, "ε: true, of the posterior"]]
    sure = [["labels wrong with probability", ".1 to .5: number, expected, wrong", ".5 to .9",
             "above .9", "all: expected, wrong", "AUROC", "the score's",
             "cleanlab's; its issues, wrong"]]  # fmt: skip
    for (name, noise), runs in by_noise(results).items():
        row, C = f"{name}, {noise}", 2 if name.startswith("vectors") else 10

        def values(way: str, key: str, runs: list[Result] = runs) -> list[float]:
            return [run["ways"][way][key] for run in runs]

        nll = {way: values(way, "nll") for way in WAYS}
        cells = [mean_with_error(values(way, "scaled_nll")) for way in ("learned", "grid")]
        cells += [mean_with_error(nll[way]) for way in WAYS]
        for way in ("learned", "grid"):
            gains = [a - b for a, b in zip(nll["noise learned"], nll[way], strict=True)]
            cells.append(mean_with_error(gains, "{:+.3f}"))
        rows.append([row, *cells, str(len(runs))])
        true = fmean(run["wrong"] for run in runs) * C / (C - 1)
        learned = fmean(values("noise learned", "noise_of_posterior"))
        hits = [f"{100 * fmean(values(way, 'accuracy')):.1f}" for way in WAYS]
        right.append([row, *hits, f"{true:.2f}, {learned:.2f}"])
        parts = [run["suspicious"]["noise learned"] for run in runs if "suspicious" in run]
        if parts and parts[0]["number"]:
            bins = torch.tensor([part["bins"] for part in parts]).mean(0).tolist()
            mean = {key: fmean(part[key] for part in parts) for key in parts[0] if key != "bins"}
            cells = [f"{n:.0f}, {e:.0f}, {w:.0f}" for n, w, e in bins]
            cells.append(f"{mean['expected']:.0f}, {mean['number']:.0f}")
            cells += [f"{mean[key]:.3f}" for key in ("AUROC", "AUROC of the score")]
            folds = [run["cleanlab"] for run in runs if "cleanlab" in run]
            if folds:
                area = fmean(max(fold["AUROC"].values()) for fold in folds)
                issues, hit = (fmean(fold["issues"][k] for fold in folds) for k in (0, 1))
                cells.append(f"{area:.3f}; {issues:.0f}, {hit:.0f}")
            sure.append([row, *cells, *[""] * (not folds)])
    return "\n\n".join(map(markdown, (rows, right, sure)))


def figures(results: list[Result]) -> dict[str, Figure]:
    """Test NLL by the share of flipped labels, for each problem."""
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    axes = figure.subplots(1, len(PROBLEMS))
    lines = {
        "learned, τ alone": ("learned", "scaled_nll", "tab:gray", "--"),
        "grid, τ and ε": ("grid", "nll", "tab:blue", "-"),
        "learned, τ and ε": ("learned", "nll", "tab:orange", "-"),
        "noise learned, τ and ε": ("noise learned", "nll", "tab:green", "-"),
    }
    groups = by_noise(results)
    shares = {label_of("flipped", share): share for noise, share in NOISES if noise == "flipped"}
    for axis, problem in zip(axes, PROBLEMS, strict=True):
        points = {100 * s: groups[problem, n] for n, s in shares.items() if (problem, n) in groups}
        for label, (way, key, color, style) in lines.items():
            means = [fmean(run["ways"][way][key] for run in runs) for runs in points.values()]
            axis.plot(list(points), means, style, color=color, marker="o", ms=4, label=label)
        axis.set_title(problem, fontsize=9)
        axis.set_xlabel("wrong labels, %")
        axis.set_ylim(0)
    axes[0].set_ylabel("test NLL (nats)")
    axes[0].legend(fontsize=7)
    return {"summary": figure}


main = study(
    "label_noise", __doc__, run, tasks, table, problems=(*PROBLEMS, *RECIPES), seeds=5,
    figures=figures,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
