"""Ours beside the usual ways to class probabilities on small data: quality and cost.

The rivals are the MAP with a default and with a chosen weight decay, temperature scaling, a deep
ensemble of five, MC dropout, and laplace-torch with all layers and with the last (all
in `rivals.py`). Ours learns its weight decays while the network trains, and is given uncalibrated
and calibrated. All have the same network, epochs, training and held-out data. Every row is given
raw and with its probabilities tempered on the held-out data. Eschenhagen et al. 2023 have no such
table.

Costs are relative to the MAP's. A training's is CPU time of one thread; a prediction's is the
median of interleaved predictions of one batch.

``make rivals`` runs digits with five seeds; ``--data`` names other problems.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import data_file, images
from experiments.data.nci1 import NCI1
from experiments.predictions import rivals
from experiments.predictions.rivals import Rival, Task
from experiments.studies import markdown, mean_with_error, of_each_problem, study
from experiments.timing import interleaved, medians
from kfac_backend.options import CurvatureOptions, KfacApprox
from marglik.data import DataSource, Digits, ImageSet, Noise
from marglik.data.batches import Batches, ImageBatches, Splits, split_batches
from marglik.data.images.image_set import ImageData, ImageSplits
from marglik.data.images.out_of_distribution import out_of_distribution_images
from marglik.models import GraphNetwork, LeNet
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import PriorGroups, weight_decay_to_precision
from marglik.prediction.calibration import calibrate
from marglik.prediction.evaluation import predict_all
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import compute_metrics, out_of_distribution_metrics
from marglik.prediction.predictive import (
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
)
from marglik.storage.provenance import environment
from marglik.training.loop import OnlineTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer
from marglik.training.schedule import Schedule

__all__ = ["PROBLEMS", "Config", "ours", "run", "table"]

WEIGHT_DECAYS = (5e-5, 2e-4, 5e-4, 2e-3, 5e-3, 2e-2)
REFERENCE = "temperature scaling"
"""The row whose NLL the others are compared with, paired by seed."""
BATCH_SIZE = 32
"""Batch size of predictions; with 128 laplace-torch's Jacobians take thrice as long per image."""


@dataclass(frozen=True)
class Problem:
    """Data, network and epochs; the settings of our preset for them, if there is one."""

    title: str
    data: Callable[[int], DataSource]
    """Data of a seed; each seed splits training, held-out and test data differently."""
    make_model: Callable[[], nn.Module]
    epochs: int
    optimizer: OptimizerConfig
    kfac_approx: KfacApprox
    every: int
    burn_in: int = 5
    batch_size: int = 64
    outside: Callable[[], ImageData] | None = None
    """Out-of-distribution data."""


def _cifar10(seed: int) -> DataSource:
    return images("jpeg", max_train=4000, max_test=2000, validation=0.2, seed=seed)


PROBLEMS = {
    "digits": Problem(
        "digits, LeNet",
        lambda seed: Digits(test_fraction=0.5, validation=0.3, seed=seed),
        lambda: LeNet(10, 1, 8),
        epochs=40,
        optimizer=OptimizerConfig(lr=0.05),
        kfac_approx="expand",
        every=5,
        outside=lambda: Noise(num_images=500),
    ),
    "cifar10": Problem(
        "CIFAR-10 (JPEG), 3,200 images, LeNet",
        _cifar10,
        lambda: LeNet(10, 3, 32),
        epochs=30,
        optimizer=OptimizerConfig(lr=0.02),
        kfac_approx="reduce",
        every=5,
        outside=lambda: Noise(num_images=500),
    ),
    "nci1": Problem(
        "NCI1, GraphNetwork",
        lambda seed: NCI1(data_file("NCI1.tar.gz"), validation=0.15, seed=seed),
        lambda: GraphNetwork(37, 2, edge_features=1, dim=32, depth=2),
        epochs=40,
        optimizer=OptimizerConfig(name="adamw", lr=2e-3),
        kfac_approx="reduce",
        every=5,
    ),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one seed of one problem."""

    data: str = "digits"
    seed: int = 0
    epochs: int | None = None
    """Number of epochs; None for the problem's."""
    samples: int = 20
    members: int = 5
    weight_decay: float = 5e-4
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS
    repetitions: int = 15
    """Number of timed predictions of a batch."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.data}_{self.seed}"


def run(config: Config) -> dict[str, Any]:
    """Train and evaluate all rows with one seed."""
    started = time.perf_counter()
    problem, splits, task = _task(config)
    made, failed = _rows(task, problem, config)
    rows = _measured(made, config, problem, splits, task)
    return {
        "config": asdict(config),
        "problem": {
            "title": problem.title,
            "epochs": problem.epochs,
            "batch_size": problem.batch_size,
            "optimizer": asdict(problem.optimizer),
            "kfac_approx": problem.kfac_approx,
            "every": problem.every,
            "burn_in": problem.burn_in,
        },
        "num_examples": {
            split: split_batches(splits, split, BATCH_SIZE).num_examples
            for split in ("train", "validation", "test")
        },
        "rows": rows,
        "failed": failed,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def _task(config: Config) -> tuple[Problem, Splits, Task]:
    """The task that all rows are given."""
    torch.set_num_threads(1)
    problem = PROBLEMS[config.data]
    problem = replace(problem, epochs=config.epochs or problem.epochs)
    source = problem.data(config.seed)
    splits: Splits = source.load()  # pyright: ignore[reportAttributeAccessIssue]
    task = Task(
        problem.make_model,
        lambda seed: split_batches(splits, "train", problem.batch_size, shuffle=True, seed=seed),
        split_batches(splits, "validation", BATCH_SIZE),
        problem.epochs,
        problem.optimizer,
        config.weight_decay,
        config.samples,
        config.seed,
    )
    return problem, splits, task


def _measured(
    made: Mapping[str, Rival], config: Config, problem: Problem, splits: Splits, task: Task
) -> dict[str, dict[str, Any]]:
    """Row -> metrics, raw and tempered, and costs; predictions are timed interleaved."""
    outside = _outside(problem, splits)
    test = split_batches(splits, "test", BATCH_SIZE)
    x, _ = next(iter(test))
    seconds = medians(
        interleaved(
            {name: lambda r=rival: r(x) for name, rival in made.items()},
            config.repetitions,
            torch.device("cpu"),
        )
    )
    rows = {}
    for name, rival in made.items():
        held_out, labels = predict_all(rival, task.held_out)
        tau = rivals.best_temperature(held_out, labels)
        prediction, y = predict_all(rival, test)
        other = None if outside is None else predict_all(rival, outside)[0]
        rows[name] = {
            "metrics": _metrics(prediction, y, other),
            "tempered": _metrics(
                rivals.temper(prediction, tau), y, other and rivals.temper(other, tau)
            ),
            "temperature": tau,
            "held_out": _metrics(held_out, labels),
            "training_seconds": rival.training_seconds,
            "search_seconds": rival.search_seconds,
            "prediction_seconds": seconds[name],
            "chosen": dict(rival.chosen),
        }
    return rows


def ours(task: Task, problem: Problem) -> dict[str, Rival]:
    """Our MAP and Laplace rows, with weight decays per tensor learned while the network trains.

    They start at the task's default weight decay, and the last update is kept, as in `marglik
    train`. Only the calibrated rows' s and τ are chosen on held-out data.
    """
    started = time.process_time()
    torch.manual_seed(task.seed)
    model = task.make_model()
    loader: Any = task.make_loader(task.seed)
    optimizer, scheduler = build_optimizer(model, task.optimizer, task.epochs * len(loader))
    delta = weight_decay_to_precision(task.weight_decay, loader.num_examples)
    options = CurvatureOptions(kfac_approx=problem.kfac_approx)

    def make_posterior(prior_precision: Tensor, sigma_noise: Tensor) -> Posterior:
        return Posterior(model, "classification", options, prior_precision=prior_precision)

    learned = OnlineTraining(
        model,
        optimizer,
        loader,
        "classification",
        Hyperparameters(PriorGroups.from_model(model), delta),
        make_posterior,
        Schedule(task.epochs, problem.every, problem.burn_in, steps=100, average=None),
        curvature_from="pass",
        scheduler=scheduler,
    ).run()
    seconds = time.process_time() - started
    posterior = learned.laplace
    chosen = {"evidence": learned.evidence, "epoch": learned.epoch}
    found = {"marglik, MAP": Rival(map_predictive(model), model, seconds, chosen=chosen)}
    calibrated = {}
    for name, config in {
        "probit": PredictiveConfig("probit"),
        "mc": PredictiveConfig("mc"),
        "probit, last layer": PredictiveConfig("probit", layers="last"),
    }.items():
        generator = torch.Generator().manual_seed(task.seed)
        predict = laplace_predictive(posterior, replace(config, calibration="none"), generator)
        found[f"marglik, {name}"] = Rival(predict, model, seconds, chosen=chosen)
        started = time.process_time()
        fit = calibrate(posterior, task.held_out, config)
        calibrated[f"marglik, {name}, calibrated"] = Rival(
            fit.predict,
            model,
            seconds,
            time.process_time() - started,
            chosen
            | {
                "covariance_scale": fit.calibration.covariance_scale,
                "output_temperature": fit.calibration.output_temperature,
            },
        )
    return found | calibrated


def _rows(task: Task, problem: Problem, config: Config) -> tuple[dict[str, Rival], dict[str, str]]:
    """All rows that could be made, and the reasons why others could not."""
    rivals.map_network(replace(task, epochs=1))  # the first steps of a process take longer
    default = rivals.map_network(task)
    start = rivals.map_network(task, config.weight_decays)
    makers: dict[str, Callable[[], Rival]] = {
        "temperature scaling": lambda: rivals.temperature_scaled(task, start),
        f"deep ensemble of {config.members}": lambda: rivals.deep_ensemble(
            task, start, config.members
        ),
        "MC dropout": lambda: rivals.mc_dropout(task, start),
        "laplace-torch": lambda: rivals.laplace_torch(task, start),
        "laplace-torch, last layer": lambda: rivals.laplace_torch(task, start, "last_layer"),
    }
    made, failed = {"MAP": default, "MAP, chosen weight decay": start}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
            made[name](next(iter(task.held_out))[0])
        # A rival that fails on a problem is a finding; ours must not fail.
        except Exception as error:
            made.pop(name, None)
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{config.name}: {name}: {failed[name]}", file=sys.stderr, flush=True)
    return made | ours(task, problem), failed


def _outside(problem: Problem, splits: Splits) -> Batches | None:
    """Out-of-distribution images, normalised as the data is; None if there are none."""
    if problem.outside is None:
        return None
    assert isinstance(splits, ImageSplits)
    other = out_of_distribution_images(problem.outside(), splits).images
    labelled = ImageSet(other, torch.zeros(len(other), dtype=torch.int64))
    return ImageBatches(labelled, splits.mean, splits.std, BATCH_SIZE)


def _metrics(
    prediction: Prediction, y: Tensor, outside: Prediction | None = None
) -> dict[str, float]:
    found = compute_metrics(prediction, y, "classification")
    if outside is not None:
        found |= out_of_distribution_metrics(prediction.entropy, outside.entropy)
    return found


# Tables and figures, from JSON alone

COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "NLL": ("metrics", "cls/NLL", "{:.3f}"),
    "NLL, tempered": ("tempered", "cls/NLL", "{:.3f}"),
    "accuracy, %": ("metrics", "cls/accuracy", "{:.2f}"),
    "ECE, %": ("metrics", "cal/ECE", "{:.1f}"),
    "ECE, tempered": ("tempered", "cal/ECE", "{:.1f}"),
    "Brier": ("metrics", "cls/Brier", "{:.3f}"),
    "OOD AUROC, %": ("metrics", "ood/AUROC", "{:.1f}"),
}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One problem as Markdown: means over seeds ± standard errors; costs as ratios to the MAP's."""
    first = runs[0]
    columns = [c for c in COLUMNS.items() if c[1][1] in first["rows"]["MAP"]["metrics"]]
    head = [*(name for name, _ in columns), "τ", "training", "with search", "prediction"]
    rows = [["", *head, f"NLL, tempered − {REFERENCE}"]]
    for name in dict.fromkeys(name for run_ in runs for name in run_["rows"]):
        own = [run_["rows"] for run_ in runs if name in run_["rows"]]
        cells = [
            mean_with_error(
                [(1 if form == "{:.3f}" else 100) * r[name][kind][key] for r in own], form
            )
            for _, (kind, key, form) in columns
        ]
        cells.append(f"{statistics.mean(r[name]['temperature'] for r in own):.2f}")
        costs = [_costs(r[name], r["MAP"]) for r in own]
        cells += [f"{statistics.mean(column):.1f}" for column in zip(*costs, strict=True)]
        nll = [[r[row]["tempered"]["cls/NLL"] for row in (name, REFERENCE)] for r in own]
        cells.append(mean_with_error([of_row - other for of_row, other in nll], "{:+.3f}"))
        fewer = "" if len(own) == len(runs) else f" ({len(own)} seeds)"
        rows.append([f"{name}{fewer}", *cells])
    sizes = first["num_examples"]
    lines = [
        f"## {first['problem']['title']}",
        f"{sizes['train']:,} training, {sizes['validation']:,} held-out, {sizes['test']:,} test "
        f"examples; {first['problem']['epochs']} epochs; {len(runs)} seeds, mean ± standard error. "
        "Costs are multiples of one MAP training and of its prediction.",
        markdown(rows),
    ]
    missing = {name: why for run in runs for name, why in run["failed"].items()}
    lines += [f"Left out: {name} ({why})." for name, why in missing.items()]
    return "\n\n".join(lines)


def _costs(row: dict[str, Any], unit: dict[str, Any]) -> tuple[float, float, float]:
    """Training, training with search, and prediction, over the MAP's."""
    own, search, one = (
        row["training_seconds"], row["search_seconds"], unit["training_seconds"]
    )  # fmt: skip
    return own / one, (own + search) / one, row["prediction_seconds"] / unit["prediction_seconds"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing seeds, and write tables; returns the exit status."""
    return study(
        "predictive_rivals",
        __doc__,
        run,
        lambda options: [Config(data, s) for data in options.data for s in range(options.seeds)],
        of_each_problem(table, PROBLEMS),
        arguments,
        problems=PROBLEMS,
        default=["digits"],
        seeds=5,
    )


if __name__ == "__main__":
    sys.exit(main())
