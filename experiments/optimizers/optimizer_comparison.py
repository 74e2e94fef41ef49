"""SGD, AdamW, Muon, SOAP, Shampoo and K-FAC with its defaults, on five small problems.

Each optimiser has six learning rates, half a decade apart, with one seed; the rate with the lowest
training loss in the last steps is trained with five other seeds. Nothing else is tuned: the other
settings are the libraries', but for betas as their authors have them, intervals of ten steps for
SOAP and Shampoo, and no weight decay. K-FAC has all options at their defaults, and in one more row
its default rate without any trial. All have the same steps and schedule, a warm-up of 5 % and a
cosine to 0.

K-FAC's defaults (momentum before preconditioning, damping, intervals, limit, rate) were chosen on
the autoencoder and the vision transformer, with seeds 0 and 1, of which the table has the latter,
too. The other three problems were not looked at with K-FAC before the defaults were fixed. The
paper has no such comparison.

``python -m experiments.optimizers.optimizer_comparison`` runs what is missing.
"""

import argparse
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn

from experiments.data import images
from experiments.data.dart import DART
from experiments.models import GPT, VisionTransformer
from experiments.optimizers.training import (
    Candidate,
    Method,
    Problem,
    Schedule,
    Timing,
    curve,
    seconds_of_steps,
)
from experiments.studies import Result, markdown, mean_with_error, study
from kfac_backend.optimizer import KFAC
from marglik.application.data.splits import Splits
from marglik.data import Digits
from marglik.models import WideResNetFixup

NAME = "optimizer_comparison"


def _autoencoded() -> Splits:
    """Pixels from 0 to 1, which are targets, too."""
    from sklearn.datasets import load_digits  # it takes a second

    pixels, _ = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    parts = [(part, part) for part in x.split([1200, 300, 297])]
    return Splits(parts[0], parts[1], parts[2], "digits")


def _autoencoder() -> nn.Module:
    widths = (64, 100, 50, 6, 50, 100, 64)
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*[layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())][:-1])


def _squares(f: Tensor, y: Tensor) -> Tensor:
    """½ ‖f − y‖², a mean over examples."""
    return 0.5 * (f - y).square().sum(-1).mean()


def _images() -> Splits:
    return images(max_train=6_000, max_test=1_000, validation=0.1).load()


class Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), with a strided 1×1 convolution where it widens."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(d_in), nn.BatchNorm2d(d_out)
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.skip = nn.Identity()
        if stride > 1:
            self.skip = nn.Conv2d(d_in, d_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, d_out, h/stride, w/stride)."""
        h = self.conv1(self.norm1(x).relu())
        return self.skip(x) + self.conv2(self.norm2(h).relu())


def _resnet() -> nn.Module:
    """ResNet-8 of 12, 24 and 48 channels, on images of half the size."""
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(3, 12, 3, padding=1, bias=False),
        Residual(12, 12, 1),
        Residual(12, 24, 2),
        Residual(24, 48, 2),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


PROBLEMS: Mapping[str, Problem] = {
    "autoencoder": Problem(
        "autoencoder of digits", _autoencoded, _autoencoder, "regression", 100, loss=_squares
    ),
    "transformer": Problem(
        "digits, vision transformer", Digits(validation=0.2).load,
        lambda: VisionTransformer(10, 1, 8, patch_size=2, dim=32, depth=2, heads=4),
        "classification", 32,
    ),
    "resnet": Problem(
        "CIFAR-10 (JPEG), ResNet with BatchNorm", _images, _resnet, "classification", 32
    ),
    "gpt": Problem(
        "DART, GPT, nats per byte",
        DART(num_train=6_000, num_test=500, validation=1 / 12).load,
        lambda: GPT(256, context=64, dim=32, depth=2, heads=4), "classification", 8,
    ),
    "wrn": Problem(
        "CIFAR-10 (JPEG), WRN-10-1 Fixup", _images,
        lambda: nn.Sequential(nn.AvgPool2d(2), WideResNetFixup(10, 1, 10)),
        "classification", 32, scalar_lr_factor=0.1,
    ),
}  # fmt: skip

METHODS: Mapping[str, Method] = {
    "sgd": Method("SGD, Nesterov", "nesterov"),
    "adamw": Method("AdamW", "adamw"),
    "muon": Method("Muon, AdamW for the rest", "muon"),
    "soap": Method("SOAP", "soap", betas=(0.95, 0.95)),
    "shampoo": Method("Shampoo, RMSProp grafts", "shampoo", betas=(0.9, 0.99)),
    "kfac": Method("K-FAC", "kfac"),
}


RATES: dict[str, tuple[float, ...]] = dict.fromkeys(
    ("adamw", "muon", "soap", "shampoo"), (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)
)
RATES |= dict.fromkeys(("sgd", "kfac"), (3e-3, 0.01, 0.03, 0.1, 0.3, 1.0))
STEPS = {"autoencoder": 300, "transformer": 200, "resnet": 160, "gpt": 160, "wrn": 100}
DEFAULT_RATE: float = inspect.signature(KFAC).parameters["lr"].default
UNTUNED = f"K-FAC, default rate ({DEFAULT_RATE:g})"
ROWS = (*(method.title for method in METHODS.values()), UNTUNED)
AVERAGED = 10
"""Steps that a point of a curve averages over."""
SEARCHED, SEEDS = 0, (1, 2, 3, 4, 5)
"""The seed that the rates are compared with, and those of the table."""


@dataclass(frozen=True)
class Task:
    """All trainings of one method on one problem."""

    problem: str
    method: str


def tasks(options: argparse.Namespace) -> list[Task | Timing]:
    """The trainings of all methods, and the time of their steps, of the chosen problems."""
    trainings = [Task(p, m) for p in options.data for m in METHODS]
    return [*trainings, *(Timing(NAME, p, tuple(METHODS), block=10) for p in options.data)]


def train(task: Task, splits: Splits, lr: float, seed: int) -> Result:
    """One training: its batches' losses in means over some steps, and the last validation loss."""
    steps = STEPS[task.problem]
    schedule = Schedule(steps, steps // 20)
    result = curve(
        PROBLEMS[task.problem], splits, METHODS[task.method], Candidate(lr), seed, schedule,
        measure_every=AVERAGED, validates=False,
    )  # fmt: skip
    (validation_loss,) = result.get("loss", [math.inf])
    losses = {key: result[key] for key in ("train loss", "diverged")}
    return {"lr": lr, "seed": seed, "validation loss": validation_loss} | losses


def last_loss(curve: Result) -> float:
    """The training loss of the last steps; infinite if the training diverged."""
    return math.inf if curve.get("diverged") else curve["train loss"][-1]


def run_one(task: Task | Timing) -> Result:
    """Search the learning rate with one seed, and train with the best one and the other seeds.

    K-FAC is trained with its default rate, too.
    """
    if isinstance(task, Timing):
        return {"step_seconds": seconds_of_steps(PROBLEMS[task.problem], METHODS, task)}
    splits = PROBLEMS[task.problem].load()
    started = time.process_time()
    search = [train(task, splits, lr, SEARCHED) for lr in RATES[task.method]]
    best = min(search, key=last_loss)["lr"]
    rates = {best, DEFAULT_RATE} if task.method == "kfac" else {best}
    return {
        "search": {str(curve["lr"]): last_loss(curve) for curve in search},
        "lr": best,
        "curves": [train(task, splits, lr, seed) for lr in sorted(rates) for seed in SEEDS],
        "processor_seconds": time.process_time() - started,
    }


def table(results: list[Result]) -> str:
    """Last losses and the time of a step as Markdown, of all that is finished."""
    shown = [p for p in PROBLEMS if _seconds(results, p) or any(_by_row(results, p).values())]
    head = ["", *(PROBLEMS[p].title for p in shown)]

    def of_curves(cell: Callable[[list[Result]], str]) -> str:
        by_problem = [_by_row(results, problem) for problem in shown]
        rows = {title: [cell(own.get(title, [])) for own in by_problem] for title in ROWS}
        return markdown([head, *([title, *cells] for title, cells in rows.items())])

    def trained(curves: list[Result]) -> str:
        return f"{_mean([last_loss(c) for c in curves])} ({curves[0]['lr']:g})" if curves else ""

    def validated(curves: list[Result]) -> str:
        return _mean([c["validation loss"] for c in curves]) if curves else ""

    times = [_seconds(results, problem) for problem in shown]
    of_time = [
        [
            method.title,
            *(f"{t[m] * 1e3:.1f} ({t[m] / t['sgd']:.2f})" if t else "" for t in times),
        ]
        for m, method in METHODS.items()
    ]
    return "\n\n".join(
        [
            f"Training loss (nats), the mean over the last {AVERAGED} steps ± standard error over "
            f"{len(SEEDS)} seeds, and the learning rate.",
            of_curves(trained),
            "Validation loss after the last step.",
            of_curves(validated),
            "Milliseconds of a step (times SGD's): processor time, medians, methods take turns.",
            markdown([head, *of_time]),
        ]
    )


def figure(results: list[Result]) -> Mapping[str, Figure]:
    """Training losses against steps (above) and processor seconds (below), means over seeds."""
    drawn = Figure(figsize=(15, 6), layout="constrained")
    axes = drawn.subplots(2, len(PROBLEMS))
    for column, (problem, own) in enumerate(PROBLEMS.items()):
        above, below = axes[:, column]
        times = _seconds(results, problem)
        below.set_visible(bool(times))
        for title, curves in _by_row(results, problem).items():
            whole = [curve["train loss"] for curve in curves if not curve.get("diverged")]
            if not whole:
                continue
            mean = torch.tensor(whole).mean(0)
            steps = AVERAGED * torch.arange(1, len(mean) + 1)
            style = {"color": f"C{ROWS.index(title)}", "lw": 1.2, "ls": "-", "label": title}
            if title.startswith("K-FAC"):
                style |= {"color": "black", "lw": 2, "ls": "--" if title == UNTUNED else "-"}
            above.plot(steps, mean, **style)
            if times:
                method = next(key for key, m in METHODS.items() if title.startswith(m.title))
                below.plot(steps * times[method], mean, **style)
        above.set(title=own.title.replace(", ", ",\n", 1), xlabel="step")
        below.set(xlabel="processor seconds")
        for axis in (above, below):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
    for axis in axes[:, 0]:
        axis.set_ylabel("training loss")
    drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return {"curves": drawn}


def _by_row(results: list[Result], problem: str) -> dict[str, list[Result]]:
    """Title of a row -> the curves of its seeds."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        config = result["config"]
        if config["problem"] == problem and "method" in config:
            title = METHODS[config["method"]].title
            rows[title] = [c for c in result["curves"] if c["lr"] == result["lr"]]
            if config["method"] == "kfac":
                rows[UNTUNED] = [c for c in result["curves"] if c["lr"] == DEFAULT_RATE]
    return {title: rows[title] for title in ROWS if title in rows}


def _seconds(results: list[Result], problem: str) -> dict[str, float]:
    """Method -> processor seconds of a step; empty if they were not measured."""
    for result in results:
        if "step_seconds" in result and result["config"]["problem"] == problem:
            return {method: s["median"] for method, s in result["step_seconds"].items()}
    return {}


def _mean(losses: Sequence[float]) -> str:
    diverged = sum(loss == math.inf for loss in losses)
    return f"{diverged} diverged" if diverged else mean_with_error(losses)


main = study(NAME, __doc__, run_one, tasks, table, problems=PROBLEMS, figures=figure)

if __name__ == "__main__":
    sys.exit(main())
