"""Wrong labels found by one training, beside cleanlab with five folds; and what cleaning brings.

A share of the training labels is wrong: drawn from the other classes ("flipped"), or the next class
("structured": 9 for 8, a cat for a bird). The network with learned weight decays is trained once,
with default options. Ours are scores of the probabilities that this training kept, example by
example: `marglik.suspicious_labels`, and parts of it. "Last loss" is that of the trained network.
cleanlab (Northcutt et al. 2021, arXiv:1911.00068) gets out-of-sample probabilities of five
networks, each trained on four fifths in the same way, with the decays that the first one learned.

Then people drop or relabel what was found, and train again. So does this study, from other initial
parameters, beside a training from these on the labels as they were; decays are learned each time.
Test NLLs are at the temperature that suits 200 held-out examples, whose labels are right.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.studies import Result, grouped, markdown, mean_with_error, study
from experiments.weight_decay.training import (
    Problem,
    Split,
    Trained,
    convolutions,
    digits,
    mlp,
    no_norm,
    scores_of,
    small_images,
)
from marglik import PriorLearner, suspicious_labels
from marglik.models import LeNet

PROBLEMS = {
    "digits, MLP": Problem(lambda: mlp(64, 10, no_norm), 20, data=digits, examples=1000),
    "digits, LeNet": Problem(lambda: LeNet(10, 1, 8), 20, data=digits, examples=1000),
    "CIFAR-10 (JPEG), BatchNorm": Problem(
        lambda: convolutions(nn.BatchNorm2d, "pooled", 3, 16), 15, data=small_images, examples=2000
    ),
}
Noise = Literal["flipped", "structured", "one class"]
NOISES: tuple[tuple[Noise, float], ...] = (("flipped", 0.2), ("structured", 0.2), ("flipped", 0.4))
FOLDS = 5


@dataclass(frozen=True)
class Config:
    """A problem with wrong labels."""

    data: str
    noise: Noise
    share: float
    seed: int


def splits_of(
    problem: Problem, noise: Noise, share: float, seed: int, held_out_too: bool = False
) -> tuple[Split, Tensor, Split, Split]:
    """Training data with wrong labels, their right labels; held-out and test data.

    With ``held_out_too`` the held-out labels are as wrong.
    """
    x, y = problem.data()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    x, y, classes = x[order], y[order], int(y.max()) + 1
    N, end = problem.examples, problem.examples + problem.held_out
    noisy = len(y) if held_out_too else N
    wrong = torch.rand(noisy, generator=generator) < share
    shift = torch.randint(1, classes, (noisy,), generator=generator)
    if noise == "structured":
        shift = torch.ones_like(shift)
    if noise == "one class":
        wrong &= y[:noisy] == 0
    labels = y.clone()
    labels[:noisy] = torch.where(wrong, (y[:noisy] + shift) % classes, y[:noisy])
    test = x[end:][:3000], y[end:][:3000]
    return (x[:N], labels[:N]), y[:N], (x[N:end], labels[N:end]), test


def train(config: Config, data: Split, first: PriorLearner | None = None, seed: int = 0) -> Trained:
    """Train a network with learned decays, or with the course of those of another training."""
    loader = DataLoader(TensorDataset(*data), 50, shuffle=True)
    return PROBLEMS[config.data].run(data, config.seed + seed, first, loader=loader)


@torch.no_grad()
def out_of_sample(data: Split, seed: int, trained_on: Callable[[Split], nn.Module]) -> Tensor:
    """Probabilities (N, C) by networks that were trained on the other folds."""
    x, y = data
    fold = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)) % FOLDS
    probabilities = []
    for k in range(FOLDS):
        with torch.enable_grad():
            model = trained_on((x[fold != k], y[fold != k]))
        probabilities.append(model(x[fold == k]).softmax(-1))
    order = torch.cat([(fold == k).nonzero().flatten() for k in range(FOLDS)])
    return torch.cat(probabilities)[order.argsort()]


def by_cleanlab(y: Tensor, p: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Scores by cleanlab, and the labels that it takes for wrong (N,), given p (N, C)."""
    from cleanlab.filter import (  # pyright: ignore[reportMissingImports]  # an optional package
        find_label_issues,
    )
    from cleanlab.rank import (  # pyright: ignore[reportMissingImports]
        get_label_quality_scores,
    )

    scores = {}
    for method in ("self_confidence", "normalized_margin"):
        quality = get_label_quality_scores(y.numpy(), p.numpy(), method=method)
        scores[f"cleanlab, {method}"] = -torch.from_numpy(quality)
    return scores, torch.from_numpy(find_label_issues(y.numpy(), p.numpy(), n_jobs=1))


def ranked(score: Tensor, wrong: Tensor) -> dict[str, float]:
    """How well a score finds the wrong labels: AUROC, precision at their true number."""
    first = score.argsort(descending=True)[: int(wrong.sum())]
    return {
        "AUROC": float(roc_auc_score(wrong, score)),
        "precision": wrong[first].double().mean().item(),
    }


def run(config: Config) -> Result:
    """Train, rank, clean, and train again."""
    problem = PROBLEMS[config.data]
    (x, y), true, held_out, test = splits_of(problem, config.noise, config.share, config.seed)
    wrong, seconds, started = y != true, {}, time.process_time()

    def took(what: str) -> None:
        nonlocal started
        seconds[what], started = time.process_time() - started, time.process_time()

    trained = train(config, (x, y))
    assert trained.result is not None and trained.result.training_probabilities is not None
    p = trained.result.training_probabilities.mean()
    suspicious = suspicious_labels(y, p)
    took("training")
    others = out_of_sample(
        (x, y), config.seed, lambda part: train(config, part, trained.learner).model
    )
    took("folds")

    own = p.gather(1, y[:, None]).squeeze(1)
    with torch.no_grad():
        last_loss = F.cross_entropy(trained.model(x), y, reduction="none")
    scores = {
        "suspicious_labels": suspicious.score[suspicious.index.argsort()],
        "its probability of the label": -own,
        "its margin": p.scatter(1, y[:, None], 0.0).amax(1) - own,
        "last loss": last_loss,
    }
    cleanlab_scores, issues = by_cleanlab(y, others)
    scores |= cleanlab_scores

    index = suspicious.index
    first, above = index[: int(wrong.sum())], index[: suspicious.number]
    relabelled = y.clone()
    relabelled[first] = suspicious.predicted[: len(first)]

    def without(index: Tensor) -> Split:
        stays = torch.ones_like(wrong).scatter(0, index, False)
        return x[stays], y[stays]

    cleaned = {
        "unchanged": (x, y),
        "dropped, true number": without(first),
        "dropped, score above 1": without(above),
        "relabelled, true number": (x, relabelled),
        "dropped, cleanlab's issues": without(issues.nonzero().flatten()),
        "all labels right": (x, true),
    }
    tests = {}
    for way, data in cleaned.items():
        tests[way] = scores_of(train(config, data, seed=1000).model, held_out, test)
        took(way)
    return {
        "found": {name: ranked(score, wrong) for name, score in scores.items()},
        "wrong": int(wrong.sum()),
        "flagged": {
            "score above 1": [suspicious.number, int(wrong[above].sum())],
            "cleanlab's issues": [int(issues.sum()), int(wrong[issues].sum())],
        },
        "agreement": suspicious.agreement,
        "relabelled_right": (relabelled == true)[first].double().mean().item(),
        "tests": tests,
        "seconds": seconds,
    }


def tasks(options: argparse.Namespace) -> list[Config]:
    """A seed of all problems, then the next."""
    return [
        Config(data, noise, share, seed)
        for seed in range(options.seeds)
        for data in options.data
        for noise, share in NOISES
    ]


def table(results: list[Result]) -> str:
    """What was found, what is flagged, and what cleaning brought, for each problem and noise."""
    groups = grouped(results, "data", "noise", "share")
    keys = [(data, *noise) for data in PROBLEMS for noise in NOISES if (data, *noise) in groups]
    scores, ways, flags = (list(results[0][key]) for key in ("found", "tests", "flagged"))
    areas = [["AUROC; precision at the true number", *scores, "seeds"]]
    numbers = [["wrong among those flagged", "wrong labels", *flags, "new labels that are right"]]
    gains = [["test NLL; accuracy (%)", ways[0], *(f"{way} − {ways[0]}" for way in ways[1:])]]
    for key in keys:
        runs, name = groups[key], f"{key[0]}, {key[1]} {100 * key[2]:.0f} %"
        cells = []
        for score in scores:
            area = mean_with_error([run["found"][score]["AUROC"] for run in runs])
            precision = statistics.fmean(run["found"][score]["precision"] for run in runs)
            cells.append(f"{area}; {precision:.3f}")
        areas.append([name, *cells, str(len(runs))])
        cells = []
        for flag in flags:
            flagged, hits = zip(*(run["flagged"][flag] for run in runs), strict=True)
            cells.append(f"{statistics.fmean(hits):.0f} of {statistics.fmean(flagged):.0f}")
        right = mean_with_error([100 * run["relabelled_right"] for run in runs], "{:.0f}")
        wrong = statistics.fmean(run["wrong"] for run in runs)
        numbers.append([name, f"{wrong:.0f}", *cells, f"{right} %"])
        row = [name]
        for way in ways:
            first, form = way == ways[0], "" if way == ways[0] else "+"
            pairs = [(run["tests"][way], run["tests"][ways[0]]) for run in runs]
            nll = [a["nll"] - (not first) * b["nll"] for a, b in pairs]
            hits = [100 * (a["accuracy"] - (not first) * b["accuracy"]) for a, b in pairs]
            loss, accuracy = (f"{{:{form}.{digits}f}}" for digits in (3, 1))
            row.append(f"{mean_with_error(nll, loss)}; {mean_with_error(hits, accuracy)}")
        gains.append(row)
    return "\n\n".join(map(markdown, (areas, numbers, gains)))


main = study("suspicious_labels", __doc__, run, tasks, table, problems=PROBLEMS, seeds=3)

if __name__ == "__main__":
    sys.exit(main())
