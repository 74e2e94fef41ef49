"""Is learning the weight decay worth it? Beside a grid on held-out data, and beside the default.

There are three ways to a weight decay, with the same network, epochs, training and held-out data:
the default (5e-4), the best of seven on held-out data, and one per tensor learned while the network
trains, with our default options. All have the same learning rates, and average the parameters of
the last third of the epochs. The best of seven is chosen twice: by the NLL of the MAP, and by that
of the temperature-scaled MAP.

A fifth of the N training examples is held out. It chooses the grid's weight decay, the temperature
of the scaled MAP, and the temperature and covariance scale of the Laplace predictive. Then each way
trains again on all N, with the temperature and scale found before. Labels are flipped in the
training and the held-out data, never in the test data.

Seconds are CPU time of one thread. Eschenhagen et al. 2023 have no such table.

``make weight-decay-study`` runs digits with five seeds; ``--data`` names other problems.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from experiments.data import data_file, images
from experiments.data.nci1 import NCI1
from experiments.studies import (
    markdown,
    mean_with_error,
    of_each_problem,
    quiet_training,
    standard_error,
    study,
)
from marglik.data import DataSource, Digits
from marglik.data.batches import Splits, split_batches
from marglik.data.images.image_set import ImageSet
from marglik.data.splits import hold_out
from marglik.data.tensors import SplitName
from marglik.models import MLP, GraphNetwork, LeNet
from marglik.posterior.calibration import CalibrationFit
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import HeldOut, calibrate, fit_calibration
from marglik.prediction.evaluation import predict_all
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
)
from marglik.runs.build import build_fabric
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.training_setup import TrainingSetup
from marglik.storage.provenance import environment
from marglik.training.loop import OnlineResult
from marglik.training.optimizers import OptimizerConfig

__all__ = ["PROBLEMS", "WEIGHT_DECAYS", "Config", "run", "summary", "table"]

DEFAULT = 5e-4
WEIGHT_DECAYS = (1.6e-4, DEFAULT, 1.6e-3, 5e-3, 1.6e-2, 5e-2, 1.6e-1)
HELD_OUT = 0.2
GRIDS: tuple[str, str] = ("grid", "grid, scaled")
"""The best of seven by the MAP's held-out NLL, and by that of the MAP with its temperature."""
BATCH_SIZE = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Data and network; optimiser and curvature of our preset for them, if there is one."""

    title: str
    data: Callable[[int], DataSource]
    """Data of a seed, without held-out data."""
    make_model: Callable[[], nn.Module]
    epochs: Mapping[int | None, int]
    """Training examples (None: all) -> epochs. Less data needs more epochs for enough steps."""
    curvature: CurvatureConfig = CurvatureConfig()  # noqa: RUF009
    optimizer: OptimizerConfig = OptimizerConfig(lr=0.05)  # noqa: RUF009
    flipped: tuple[float, ...] = (0.0, 0.2)
    """Shares of flipped labels."""


def _digits(seed: int) -> DataSource:
    return Digits(test_fraction=397 / 1797, seed=seed)


def _cifar10(seed: int) -> DataSource:
    return images("jpeg", max_train=4000, max_test=2000, seed=seed)


DIGITS_EPOCHS: Mapping[int | None, int] = {100: 160, 400: 80, 1400: 40}
PROBLEMS = {
    "digits": Problem(
        "digits, MLP (100, 100)", _digits, lambda: MLP(64, (100, 100)), DIGITS_EPOCHS
    ),
    "digits_lenet": Problem("digits, LeNet", _digits, lambda: LeNet(10, 1, 8), DIGITS_EPOCHS),
    "nci1": Problem(
        "NCI1, GraphNetwork",
        lambda seed: NCI1(data_file("NCI1.tar.gz"), seed=seed),
        lambda: GraphNetwork(37, 2, edge_features=1, dim=32, depth=2),
        {None: 40},
        CurvatureConfig(kfac_approx="reduce"),
        OptimizerConfig(name="adamw", lr=2e-3),
        (0.0,),
    ),
    "cifar10": Problem(
        "CIFAR-10 (JPEG), 4,000 images, LeNet",
        _cifar10,
        lambda: LeNet(10, 3, 32),
        {None: 40},
        CurvatureConfig(kfac_approx="reduce"),
        OptimizerConfig(lr=0.02),
        (0.0,),
    ),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one seed and size of one problem."""

    data: str = "digits"
    seed: int = 0
    size: int | None = 400
    """Number of training examples; None for all."""
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS
    epochs: float = 1.0
    """Factor on the problem's epochs."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.data}_ways_{self.size or 'all'}_{self.seed}"


def run(config: Config) -> dict[str, Any]:
    """Train all rows of one seed and size, for each share of flipped labels."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    problem = PROBLEMS[config.data]
    rows: list[Row] = []
    for flipped in problem.flipped:
        task = Task.of(config, problem, flipped)
        here = {"size": task.num_examples, "flipped": flipped}
        with quiet_training():
            rows += [here | row for row in _ways(task, config)]
    return {
        "config": asdict(config),
        "title": problem.title,
        "rows": rows,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


@dataclass(frozen=True)
class Task:
    """Data and epochs for one size and share of flipped labels."""

    problem: Problem
    everything: Splits
    """N training examples without held-out data."""
    parted: Splits
    """The same N with a fifth held out."""
    epochs: int
    seed: int

    @staticmethod
    def of(config: Config, problem: Problem, flipped: float) -> "Task":
        """The data of a seed, with the same N examples for all shares of flipped labels."""
        splits: Any = problem.data(config.seed).load()  # pyright: ignore[reportAttributeAccessIssue]
        total = split_batches(splits, "train", 1).num_examples
        if config.size is not None and config.size < total:
            rest = 1 - config.size / total
            splits = replace(hold_out(splits, rest, config.seed), validation=None)
        splits = _with_flipped_labels(splits, flipped, config.seed)
        epochs = max(1, round(config.epochs * problem.epochs[config.size]))
        parted = hold_out(splits, HELD_OUT, config.seed)
        return Task(problem, splits, parted, epochs, config.seed)

    @property
    def num_examples(self) -> int:
        """N."""
        return split_batches(self.everything, "train", 1).num_examples

    def train(self, splits: Splits, prior: PriorConfig) -> "Trained":
        """Train once, as `marglik train` does."""
        setup = TrainingSetup(
            splits, 0, self.problem.optimizer, prior, self.problem.curvature, PredictiveConfig(),
            None,
            RunConfig(
                epochs=self.epochs, batch_size=BATCH_SIZE, seed=self.seed, progress=False
            ),
            build_fabric("cpu"),
        )  # fmt: skip
        torch.manual_seed(self.seed)
        model = self.problem.make_model()
        started = time.process_time()
        result = setup.train(model, prior)
        return Trained(result, time.process_time() - started)

    def metrics(self, predict: Predictive, split: SplitName) -> dict[str, float]:
        """NLL (nats) and accuracy on held-out or on test data."""
        batches = split_batches(self.parted, split, BATCH_SIZE)
        found = compute_metrics(*predict_all(predict, batches), "classification")
        return {"nll": found["cls/NLL"], "accuracy": found["cls/accuracy"]}


@dataclass(frozen=True)
class Trained:
    """A network with its posterior, and the CPU time it took."""

    result: OnlineResult
    seconds: float

    @property
    def laplace(self) -> Posterior:
        """Posterior, fitted at the network's parameters."""
        return self.result.laplace

    @property
    def map(self) -> Predictive:
        """The network's own prediction."""
        return map_predictive(self.laplace.model)

    def held_out(self, task: "Task") -> dict[str, float]:
        """Held-out NLL (nats) for each criterion in `GRIDS`."""
        batches = split_batches(task.parted, "validation", BATCH_SIZE)
        prediction, y = predict_all(self.map, batches)
        logits = prediction.mean.log()
        # The τ that the rows report, without a posterior's covariance.
        fit = fit_calibration(HeldOut("classification", logits, torch.zeros_like(logits), y))
        return dict(zip(GRIDS, (fit.nll_map, fit.nll_scaled_map), strict=True))

    def of_the_prior(self) -> Row:
        """Evidence per example (nats), the kept epoch, and weight decays by tensor."""
        names = [name for name, p in self.laplace.model.named_parameters() if p.requires_grad]
        factor = self.laplace.temperature / self.laplace.n_data
        delta = self.laplace.prior_precision.expand(len(names))
        return {
            "evidence": self.result.evidence / self.laplace.n_data,
            "epoch": self.result.epoch,
            "weight_decay": dict(zip(names, (delta * factor).tolist(), strict=True)),
        }


def _with_flipped_labels(splits: Any, share: float, seed: int) -> Any:
    """The data with a random share of the training labels changed to another class, uniformly."""
    is_images = isinstance(splits.train, ImageSet)
    y = (splits.train.labels if is_images else splits.train[1]).clone()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    classes = len(splits.classes)
    y[chosen] += torch.randint(1, classes, (len(chosen),), generator=generator)
    y %= classes
    train = ImageSet(splits.train.images, y) if is_images else (splits.train[0], y)
    return replace(splits, train=train)


def _calibrated(task: Task, trained: Trained) -> CalibrationFit:
    batches = split_batches(task.parted, "validation", BATCH_SIZE)
    generator = torch.Generator().manual_seed(task.seed)
    return calibrate(trained.laplace, batches, generator=generator).fit


def _predictives(task: Task, trained: Trained, fit: CalibrationFit) -> dict[str, Predictive]:
    """Metrics of MAP, scaled MAP and calibrated Laplace, with the calibration's s and τ."""
    tau = fit.map_calibration.output_temperature
    generator = torch.Generator().manual_seed(task.seed)
    return {
        "MAP": trained.map,
        "scaled": map_predictive(trained.laplace.model, output_temperature=tau),
        "Laplace": laplace_predictive(
            trained.laplace, PredictiveConfig(), generator, fit.calibration
        ),
    }


def _ways(task: Task, config: Config) -> list[Row]:
    """Rows of the table: each way chooses on four fifths, and trains on all data."""
    priors = {
        decay: PriorConfig(weight_decay=decay, method="fixed") for decay in config.weight_decays
    }
    fixed = {decay: task.train(task.parted, prior) for decay, prior in priors.items()}
    by_decay = {decay: trained.held_out(task) for decay, trained in fixed.items()}
    held_out = {way: {decay: nll[way] for decay, nll in by_decay.items()} for way in GRIDS}
    chosen = {way: min(nlls, key=nlls.__getitem__) for way, nlls in held_out.items()}
    search = sum(trained.seconds for trained in fixed.values())
    learn = PriorConfig()
    ways = {
        "default": (fixed[DEFAULT], priors[DEFAULT]),
        **{way: (fixed[decay], priors[decay]) for way, decay in chosen.items()},
        "learned": (task.train(task.parted, learn), learn),
    }
    rows: list[Row] = []
    on_all: dict[PriorConfig, Trained] = {}
    for way, (first, prior) in ways.items():
        fit = _calibrated(task, first)
        if prior not in on_all:
            on_all[prior] = task.train(task.everything, prior)
        trained = on_all[prior]
        row = {
            "way": way,
            # Without a temperature only the grid needs the first trainings.
            "seconds": trained.seconds + (search if way in GRIDS else 0.0),
            "calibration": asdict(fit),
            **trained.of_the_prior(),
        }
        for name, predict in _predictives(task, trained, fit).items():
            row[name] = task.metrics(predict, "test")
        rows.append(row)
        if way in GRIDS:
            rows[-1]["held_out"] = {f"{decay:g}": nll for decay, nll in held_out[way].items()}
            rows[-1]["chosen"] = chosen[way]
    return rows


# Tables and figures, from JSON alone

PREDICTIVES = {"MAP": "MAP", "scaled": "scaled MAP", "Laplace": "Laplace, calibrated"}
NLLS = [f"NLL, {name}" for name in PREDICTIVES.values()]
SUMMARY = {
    "default": "default, 5e-4",
    "grid, scaled": "grid, held-out data",
    "learned": "learned, per layer",
}
"""The ways' names in the README's figure."""
WAYS = {
    "default": "default",
    "grid": "grid of seven",
    "grid, scaled": "grid of seven, by the scaled NLL",
    "learned": "learned",
}
COLORS = {
    "default": "tab:gray",
    "grid": "tab:cyan",
    "grid, scaled": "tab:blue",
    "learned": "tab:orange",
}
Condition = tuple[int, float]
"""N and the share of flipped labels."""


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One problem's ways as Markdown: means over seeds ± standard errors, paired differences.

    Args:
        runs: one per seed, of all sizes that it has.
    """
    rows = [
        ["N", "flipped", "seeds", "weight decay", *NLLS, "accuracy, %", "τ", "runs", "CPU time"]
    ]
    minus = [["N", "flipped", "minus", *NLLS, "accuracy, %"]]
    for condition in _conditions(runs):
        own = [run for run in runs if condition in _conditions([run])]
        found = {way: [_row(run, condition, way) for run in own] for way in WAYS}
        for way, name in WAYS.items():
            costs = [
                row["seconds"] / unit["seconds"]
                for row, unit in zip(found[way], found["default"], strict=True)
            ]
            taus = [r["calibration"]["map_calibration"]["output_temperature"] for r in found[way]]
            rows.append(
                [
                    *_title(condition),
                    str(len(own)),
                    name,
                    *(mean_with_error([r[p]["nll"] for r in found[way]]) for p in PREDICTIVES),
                    mean_with_error([100 * r["MAP"]["accuracy"] for r in found[way]], "{:.1f}"),
                    f"{statistics.mean(taus):.2f}",
                    "8" if way in GRIDS else "1",
                    f"{statistics.median(costs):.1f}",
                ]
            )
        for other in ("default", *GRIDS):
            pairs = list(zip(found["learned"], found[other], strict=True))
            nlls = [[a[p]["nll"] - b[p]["nll"] for a, b in pairs] for p in PREDICTIVES]
            accuracy = [100 * (a["MAP"]["accuracy"] - b["MAP"]["accuracy"]) for a, b in pairs]
            minus.append(
                [
                    *_title(condition),
                    WAYS[other],
                    *(mean_with_error(values, "{:+.3f}") for values in nlls),
                    mean_with_error(accuracy, "{:+.1f}"),
                ]
            )
    return "\n\n".join(
        [
            f"## {runs[0]['title']}",
            "Mean ± standard error; NLL in nats; trained on all N. Runs are the trainings that the "
            "MAP takes; the scaled MAP and Laplace take another one with the default or the "
            "learned way. CPU time is that of the MAP's runs, divided by that of a training with "
            "the default.",
            markdown(rows),
            "The learned way minus another, paired by seed (negative: learning is better):",
            markdown(minus),
        ]
    )


def summary(runs: Sequence[dict[str, Any]]) -> Figure:
    """The README's figure: NLL of the scaled MAP for each share of flipped labels, and the costs.

    A cost is the CPU time until a way has its network: all trainings of the grid, the learned way's
    updates; in multiples of the default's one training, paired by seed. Bars are standard errors.
    """
    shares = sorted({share for _, share in _conditions(runs)})
    drawing = Figure(figsize=(1 + 3 * (len(shares) + 1), 3.2), layout="constrained")
    panels = drawing.subplots(1, len(shares) + 1)
    for axes, share in zip(panels, shares, strict=False):
        sizes = [n for n, f in _conditions(runs) if f == share]
        for way, name in SUMMARY.items():
            rows = [
                [
                    _row(run, (n, share), way)["scaled"]["nll"]
                    for run in runs
                    if (n, share) in _conditions([run])
                ]
                for n in sizes
            ]
            means, errors = zip(
                *((statistics.mean(v), standard_error(v)) for v in rows), strict=True
            )
            axes.errorbar(sizes, means, errors, fmt="o-", ms=4, color=COLORS[way], label=name)
        axes.set(xscale="log", xlabel="training digits", ylim=(0, None))
        axes.set_title(f"{_percent(share)} wrong labels" if share else "clean labels", fontsize=11)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test NLL (nats), lower is better")
    panels[-2].legend(fontsize="small", loc="lower left")
    for i, way in enumerate(SUMMARY):
        costs = [
            _row(run, condition, way)["seconds"] / _row(run, condition, "default")["seconds"]
            for run in runs
            for condition in _conditions([run])
        ]
        panels[-1].barh(i, statistics.mean(costs), color=COLORS[way])
        panels[-1].text(statistics.mean(costs), i, f" {statistics.mean(costs):.1f}", va="center")
    panels[-1].set_yticks(
        range(len(SUMMARY)), [name.replace(", ", ",\n") for name in SUMMARY.values()]
    )
    panels[-1].invert_yaxis()
    panels[-1].set(xlim=(0, 9), xlabel="default trainings of CPU time")
    panels[-1].set_title("cost", fontsize=11)
    return drawing


def _conditions(runs: Sequence[dict[str, Any]]) -> list[Condition]:
    return sorted({(row["size"], row["flipped"]) for run in runs for row in run["rows"]})


def _row(run: dict[str, Any], condition: Condition, way: str) -> Row:
    rows = (row for row in run["rows"] if (row["size"], row["flipped"]) == condition)
    return next(row for row in rows if row["way"] == way)


def _title(condition: Condition) -> tuple[str, str]:
    return f"{condition[0]:,}", _percent(condition[1])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _by_seed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One problem's results, with the rows of all sizes of a seed together."""
    seeds: dict[int, dict[str, Any]] = {}
    for result in found:
        of_seed = seeds.setdefault(result["config"]["seed"], result | {"rows": []})
        of_seed["rows"] += result["rows"]
    return list(seeds.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, write tables and the figure; returns the exit status."""

    def tasks(options: argparse.Namespace) -> list[Config]:
        return [
            Config(data, seed, size)
            for data in options.data
            for seed in range(options.seeds)
            for size in PROBLEMS[data].epochs
        ]

    def figures(found: list[dict[str, Any]]) -> dict[str, Figure]:
        digits = [run_ for run_ in found if run_["config"]["data"] == "digits"]
        return {"digits_summary": summary(_by_seed(digits))} if digits else {}

    return study(
        "weight_decay_study",
        __doc__,
        run,
        tasks,
        of_each_problem(lambda found: table(_by_seed(found)), PROBLEMS),
        arguments,
        problems=PROBLEMS,
        default=["digits"],
        seeds=5,
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
