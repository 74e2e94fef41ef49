"""Is learning the weight decay worth it? Beside a grid on held-out data, and beside the default.

There are three ways to a weight decay, with the same network, epochs, training and held-out data:
the default (5e-4), the best of seven on held-out data, and one per tensor learned while the network
trains. The best of seven is chosen twice: by the NLL of the MAP, and by that of the
temperature-scaled MAP.

A fifth of the N training examples is held out. It chooses the grid's weight decay, the temperature
of the scaled MAP, and the temperature and covariance scale of the Laplace predictive. Then each way
trains again on all N, with the temperature and scale found before. Labels are flipped in the
training and the held-out data, never in the test data.

The variants of learning (``--part variants``) look for a better learned way. Each is one training
on the same four fifths that changes one setting. They are compared by held-out NLL; the test NLL
beside it checks the choice.

Seconds are CPU time of one thread. Eschenhagen et al. 2023 have no such table.

``make weight-decay-study`` runs digits with five seeds, ``--quick`` with two; ``--data`` names
other problems. Each seed of each size is a JSON file in ``results/weight_decay_study/`` of the
working directory. The command resumes and keeps finished files.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import nn

from experiments.data import data_file, images
from experiments.data.nci1 import NCI1
from experiments.studies import (
    add_study_options,
    mean_with_error,
    quiet_training,
    run_missing,
    save_figure,
    standard_error,
    study_folder,
)
from kfac_backend.files import write_file
from marglik.data import DataSource, Digits, ImageData
from marglik.data.batches import Splits, split_batches
from marglik.data.images.image_set import ImageSet
from marglik.data.splits import hold_out
from marglik.data.tensors import SplitName
from marglik.models import MLP, GraphNetwork, LeNet
from marglik.posterior.calibration import CalibrationFit
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import HeldOut, calibrate, fit_calibration
from marglik.prediction.evaluation import compute_metrics, predict_all
from marglik.prediction.evaluation_record import EvaluationConfig
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
)
from marglik.runs.build import build_fabric, build_from_spec
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.training_setup import TrainingSetup
from marglik.storage.provenance import environment
from marglik.training.loop import OnlineResult
from marglik.training.optimizers import OptimizerConfig

__all__ = ["PROBLEMS", "VARIANTS", "WEIGHT_DECAYS", "Config", "figure", "run", "summary", "table"]

DEFAULT = 5e-4
WEIGHT_DECAYS = (1.6e-4, DEFAULT, 1.6e-3, 5e-3, 1.6e-2, 5e-2, 1.6e-1)
HELD_OUT = 0.2
GRIDS: tuple[str, str] = ("grid", "grid, scaled")
"""The best of seven by the MAP's held-out NLL, and by that of the MAP with its temperature."""
UPDATES = 8
"""Updates of the prior in a run, as in the preset for digits."""
BATCH_SIZE = 64

Part = Literal["ways", "variants"]
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
    return build_from_spec(ImageData, images("jpeg", max_train=4000, max_test=2000, seed=seed))


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
class Variant:
    """A variant of learning; ``prior`` and ``curvature`` replace fields of the configuration."""

    prior: Mapping[str, Any] = field(default_factory=dict)
    curvature: Mapping[str, Any] = field(default_factory=dict)
    epochs: float = 1.0
    """Factor on the problem's epochs."""
    updates: int = UPDATES
    burn_in: float = 0.0
    """Share of the epochs before the first update."""


VARIANTS = {
    "base": Variant(),
    "keep the best": Variant({"keep": "best"}),
    "keep the last": Variant({"keep": "last"}),
    "burn-in of half the epochs": Variant(burn_in=0.5),
    "20 updates": Variant(updates=20),
    "4 updates": Variant(updates=4),
    "10 steps per update": Variant({"steps": 10}),
    "MacKay's fixed point": Variant({"method": "mackay"}),
    "T = 0.5": Variant({"temperature": 0.5}),
    "T = 0.2": Variant({"temperature": 0.2}),
    "T = 0.1": Variant({"temperature": 0.1}),
    "twice the epochs": Variant(epochs=2.0),
    "one weight decay for all": Variant({"structure": "scalar"}),
    "weights, biases": Variant({"structure": "kind"}),
    "reduce": Variant(curvature={"kfac_approx": "reduce"}),
    "from 5e-5": Variant({"weight_decay": 5e-5}),
    "from 5e-3": Variant({"weight_decay": 5e-3}),
}
"""Changes of the way "learned" in the table, which is "base"."""


@dataclass(frozen=True)
class Config:
    """Configuration of one seed and size of one problem, with the ways or the variants."""

    data: str = "digits"
    seed: int = 0
    part: Part = "ways"
    size: int | None = 400
    """Number of training examples; None for all."""
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS
    variants: tuple[str, ...] = tuple(VARIANTS)
    epochs: float = 1.0
    """Factor on the problem's epochs."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.data}_{self.part}_{self.size or 'all'}_{self.seed}"


def run(config: Config) -> dict[str, Any]:
    """Train all rows of one seed and size, for each share of flipped labels."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    problem = PROBLEMS[config.data]
    rows: list[Row] = []
    measure = _ways if config.part == "ways" else _variants
    for flipped in problem.flipped:
        task = Task.of(config, problem, flipped)
        here = {"size": task.num_examples, "flipped": flipped}
        with quiet_training():
            rows += [here | row for row in measure(task, config)]
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

    def learned(self, variant: Variant) -> PriorConfig:
        """The prior's options in a run of this length."""
        epochs = round(self.epochs * variant.epochs)
        every = max(1, epochs // variant.updates)
        return PriorConfig(
            weight_decay=variant.prior.get("weight_decay", DEFAULT),
            every=every,
            burn_in=round(variant.burn_in * epochs),
            **{key: value for key, value in variant.prior.items() if key != "weight_decay"},
        )

    def train(
        self,
        splits: Splits,
        prior: PriorConfig,
        variant: Variant = Variant(),  # noqa: B008
    ) -> "Trained":
        """Train once, as `marglik train` does."""
        fabric = build_fabric("cpu")
        epochs = round(self.epochs * variant.epochs)
        setup = TrainingSetup(
            splits, 0, self.problem.optimizer, prior,
            replace(self.problem.curvature, **variant.curvature), PredictiveConfig(),
            EvaluationConfig(), None,
            RunConfig(epochs=epochs, batch_size=BATCH_SIZE, seed=self.seed, progress=False), fabric,
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
    """Rows of the table: each way, trained on four fifths and on all data."""
    fixed = {
        decay: task.train(task.parted, PriorConfig(weight_decay=decay, method="fixed"))
        for decay in config.weight_decays
    }
    by_decay = {decay: trained.held_out(task) for decay, trained in fixed.items()}
    held_out = {way: {decay: nll[way] for decay, nll in by_decay.items()} for way in GRIDS}
    chosen = {way: min(nlls, key=nlls.__getitem__) for way, nlls in held_out.items()}
    search = sum(trained.seconds for trained in fixed.values())
    learn = task.learned(Variant())
    ways = {
        "default": (fixed[DEFAULT], PriorConfig(weight_decay=DEFAULT, method="fixed")),
        **{
            way: (fixed[decay], PriorConfig(weight_decay=decay, method="fixed"))
            for way, decay in chosen.items()
        },
        "learned": (task.train(task.parted, learn), learn),
    }
    rows: list[Row] = []
    on_all: dict[PriorConfig, Trained] = {}
    for way, (first, prior) in ways.items():
        fit = _calibrated(task, first)
        searched = search if way in GRIDS else first.seconds
        if prior not in on_all:
            on_all[prior] = task.train(task.everything, prior)
        again = on_all[prior]
        for data, trained, seconds in (
            ("four fifths", first, searched),
            # Without a temperature only the grid needs the first trainings.
            ("all", again, again.seconds + (search if way in GRIDS else 0.0)),
        ):
            row = {
                "way": way,
                "trained_on": data,
                "seconds": seconds,
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


def _variants(task: Task, config: Config) -> list[Row]:
    """A row for each variant, and one for the default, which learns nothing."""
    rows: list[Row] = []
    for name in ("default", *config.variants):
        variant = Variant() if name == "default" else VARIANTS[name]
        prior = task.learned(variant)
        if name == "default":
            prior = PriorConfig(method="fixed")
        trained = task.train(task.parted, prior, variant)
        fit = _calibrated(task, trained)
        row = {
            "way": name,
            "seconds": trained.seconds,
            "calibration": asdict(fit),
            **trained.of_the_prior(),
        }
        held_out = {"MAP": fit.nll_map, "scaled": fit.nll_scaled_map, "Laplace": fit.nll}
        for kind, predict in _predictives(task, trained, fit).items():
            row[kind] = task.metrics(predict, "test") | {"held_out": held_out[kind]}
        rows.append(row)
    return rows


# Tables and figures, from JSON alone

PREDICTIVES = {"MAP": "MAP", "scaled": "scaled MAP", "Laplace": "Laplace, calibrated"}
NLLS = " | ".join(f"NLL, {name}" for name in PREDICTIVES.values())
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
RUNS: dict[str, dict[str, int]] = {
    "four fifths": dict.fromkeys(GRIDS, 7),
    "all": dict.fromkeys(GRIDS, 8),
}
"""Number of trainings of the ways that take more than one."""
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
    lines = [
        f"## {runs[0]['title']}",
        "",
        "Mean ± standard error; NLL in nats. Runs are the trainings that the MAP takes; the scaled "
        "MAP and Laplace take a second one if the default or the learned way trains on all. CPU "
        "time is that of the MAP's runs, divided by that of a training with the default on all.",
    ]
    for data in ("all", "four fifths"):
        lines += [
            "",
            f"Trained on {'all N' if data == 'all' else 'the four fifths that are not held out'}:",
            "",
            f"| N | flipped | seeds | weight decay | {NLLS} | accuracy, % | τ | runs | CPU time |",
            "|---" * 11 + "|",
        ]
        for condition in _conditions(runs):
            own = _having(runs, condition)
            unit = [_row(run, condition, "default", "all")["seconds"] for run in own]
            for way, name in WAYS.items():
                rows = [_row(run, condition, way, data) for run in own]
                cells = [mean_with_error([r[p]["nll"] for r in rows]) for p in PREDICTIVES]
                cells.append(mean_with_error([100 * r["MAP"]["accuracy"] for r in rows], "{:.1f}"))
                cells.append(f"{statistics.mean(_tau(r) for r in rows):.2f}")
                cells.append(str(RUNS[data].get(way, 1)))
                costs = [r["seconds"] / u for r, u in zip(rows, unit, strict=True)]
                cells.append(f"{statistics.median(costs):.1f}")
                head = f"{_title(condition)} | {len(own)} | {name}"
                lines.append(f"| {head} | {' | '.join(cells)} |")
    lines += [
        "",
        "The learned way minus another, paired by seed (negative: learning is better), on all N:",
        "",
        f"| N | flipped | minus | {NLLS} | accuracy, % |",
        "|---" * 7 + "|",
    ]
    for condition in _conditions(runs):
        for other in ("default", *GRIDS):
            pairs = [
                [_row(run, condition, way, "all") for way in ("learned", other)]
                for run in _having(runs, condition)
            ]
            cells = [
                mean_with_error([a[p]["nll"] - b[p]["nll"] for a, b in pairs], SIGNED)
                for p in PREDICTIVES
            ]
            accuracy = [100 * (a["MAP"]["accuracy"] - b["MAP"]["accuracy"]) for a, b in pairs]
            cells.append(mean_with_error(accuracy, "{:+.1f}"))
            lines.append(f"| {_title(condition)} | {WAYS[other]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def variants_table(runs: Sequence[dict[str, Any]]) -> str:
    """One problem's variants as Markdown; differences from the first that learns."""
    base = runs[0]["config"]["variants"][0]
    conditions = _conditions(runs)
    runs = [run for run in runs if _conditions([run]) == conditions]
    lines = [
        f"## {runs[0]['title']}: variants of learning",
        "",
        f"{_seeds(runs)}; trained on four fifths. The scaled MAP's NLL minus that of "
        f'"{base}", paired: held-out / test; over all columns with its standard error over seeds.',
        "",
        f"| | {' | '.join(f'N = {n:,}, {_percent(f)} flipped' for n, f in conditions)} "
        "| all, held-out | all, test | MAP, test | Laplace, test | τ | epoch kept |",
        "|---" * (len(conditions) + 7) + "|",
    ]
    for name in ("default", *runs[0]["config"]["variants"]):
        by_seed = [[(_row(r, c, name), _row(r, c, base)) for c in conditions] for r in runs]

        def difference(
            kind: str, of: str, by_seed: list[list[tuple[Row, Row]]] = by_seed
        ) -> list[list[float]]:
            """Seeds × conditions."""
            return [[a[kind][of] - b[kind][of] for a, b in pairs] for pairs in by_seed]

        columns = [difference("scaled", of) for of in ("held_out", "nll")]
        cells = [
            " / ".join(f"{statistics.mean(seed[i] for seed in found):+.3f}" for found in columns)
            for i in range(len(conditions))
        ]
        columns += [difference(kind, "nll") for kind in ("MAP", "Laplace")]
        cells += [
            mean_with_error([statistics.mean(seed) for seed in found], SIGNED) for found in columns
        ]
        own = [row for pairs in by_seed for row, _ in pairs]
        cells.append(f"{statistics.mean(_tau(row) for row in own):.2f}")
        cells.append(f"{statistics.mean(row['epoch'] for row in own):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(runs: Sequence[dict[str, Any]]) -> Figure:
    """NLL over N for each share of flipped labels; bars are standard errors over seeds."""
    shares = sorted({share for _, share in _conditions(runs)})
    drawing = Figure(figsize=(1 + 4 * len(shares), 3.6), layout="constrained")
    panels = drawing.subplots(1, len(shares), squeeze=False)[0]
    drawing.suptitle(f"{runs[0]['title']}, trained on all")
    for axes, share in zip(panels, shares, strict=True):
        sizes = [n for n, f in _conditions(runs) if f == share]
        for way, name in WAYS.items():
            for kind, line in (("MAP", ":"), ("scaled", "-")):
                values = [
                    [
                        _row(run, (n, share), way, "all")[kind]["nll"]
                        for run in _having(runs, (n, share))
                    ]
                    for n in sizes
                ]
                axes.errorbar(
                    sizes,
                    [statistics.mean(v) for v in values],
                    yerr=[standard_error(v) for v in values],
                    fmt=f"o{line}",
                    ms=4,
                    color=COLORS[way],
                    label=f"{name}, {PREDICTIVES[kind]}",
                )
        axes.set(xscale="log", xlabel="N", title=f"{_percent(share)} of the labels flipped")
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test NLL (nats)")
    panels[0].legend(fontsize="x-small")
    return drawing


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
                    _row(run, (n, share), way, "all")["scaled"]["nll"]
                    for run in _having(runs, (n, share))
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
            _row(run, condition, way, "all")["seconds"]
            / _row(run, condition, "default", "all")["seconds"]
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


SIGNED = "{:+.3f}"


def _conditions(runs: Sequence[dict[str, Any]]) -> list[Condition]:
    return sorted({(row["size"], row["flipped"]) for run in runs for row in run["rows"]})


def _having(runs: Sequence[dict[str, Any]], condition: Condition) -> list[dict[str, Any]]:
    return [run for run in runs if condition in _conditions([run])]


def _row(run: dict[str, Any], condition: Condition, way: str, trained_on: str | None = None) -> Row:
    (found,) = (
        row
        for row in run["rows"]
        if (row["size"], row["flipped"]) == condition
        and row["way"] == way
        and row.get("trained_on") == trained_on
    )
    return found


def _tau(row: Row) -> float:
    return row["calibration"]["map_calibration"]["output_temperature"]


def _seeds(runs: Sequence[Any]) -> str:
    return f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"


def _title(condition: Condition) -> str:
    return f"{condition[0]:,} | {_percent(condition[1])}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def report(folder: Path) -> str:
    """Write table.md and a figure for each problem that has results; returns the tables."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        config = result["config"]
        of_seed = found[config["data"], config["part"]].setdefault(config["seed"], result)
        if of_seed is not result:
            of_seed["rows"] += result["rows"]
    tables = []
    for name in PROBLEMS:
        if runs := list(found[name, "ways"].values()):
            tables.append(table(runs))
            if len({size for size, _ in _conditions(runs)}) > 1:
                save_figure(figure(runs), folder / f"{name}.png")
                save_figure(summary(runs), folder / f"{name}_summary.png")
        if runs := list(found[name, "variants"].values()):
            tables.append(variants_table(runs))
    text = "\n\n".join(tables)
    write_file(folder / "table.md", (text + "\n").encode())
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing tasks, write tables and figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument(
        "--data",
        nargs="*",
        choices=list(PROBLEMS),
        default=["digits"],
        help="problems; default: digits",
    )
    parser.add_argument(
        "--part", choices=["ways", "variants"], default="ways", help="default: ways"
    )
    parser.add_argument(
        "--sizes", nargs="*", type=int, help="training-set sizes, of the problem's; default: all"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds; default: 5")
    parser.add_argument("--quick", action="store_true", help="run only two seeds")
    add_study_options(parser)
    options = parser.parse_args(arguments)
    folder = study_folder(parser, options, "weight_decay_study")
    seeds = 2 if options.quick else options.seeds
    tasks = [
        Config(data, seed, options.part, size)
        for data in options.data
        for seed in range(seeds)
        for size in PROBLEMS[data].epochs
        if options.sizes is None or size in options.sizes
    ]
    return run_missing(run, tasks, folder, report, options)


if __name__ == "__main__":
    sys.exit(main())
