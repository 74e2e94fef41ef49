"""Ours beside the usual ways to class probabilities on small data: quality and cost.

All have the same network, epochs, training and held-out data. The rivals, each a function that
returns a `Rival`:

- `trained`: the MAP, with a default or a chosen weight decay; most others start from it.
- `tempered`: outputs divided by τ (Guo et al. 2017, arXiv:1706.04599).
- `deep_ensemble`: five networks (Lakshminarayanan et al. 2017, arXiv:1612.01474).
- `mc_dropout`: dropout that stays on (Gal & Ghahramani 2016, arXiv:1506.02142).
- `laplace_torch`: laplace-torch as it comes, all layers or the last.

Ours learns its weight decays while the network trains, and is given uncalibrated and calibrated.
Every row is given raw, and with its probabilities tempered on the held-out data. Eschenhagen et al.
2023 have no such table. Costs are relative to the MAP's: a training's is CPU time of one thread, a
prediction's the median of interleaved predictions of one batch.

``make rivals`` runs digits with five seeds; ``--data`` names other problems.
"""

import copy
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.data import data_file, images
from experiments.data.nci1 import NCI1
from experiments.studies import markdown, mean_with_error, of_each_problem, study
from experiments.timing import interleaved, medians
from kfac_backend.options import CurvatureOptions, KfacApprox
from marglik.data import Digits, ImageSet, Noise
from marglik.data.batches import Batches, ImageBatches, Splits, split_batches
from marglik.data.images.image_set import ImageSplits
from marglik.data.images.out_of_distribution import out_of_distribution_images
from marglik.data.tensors import SplitName
from marglik.eval_mode import in_eval_mode
from marglik.models import GraphNetwork, LeNet
from marglik.prediction.calibration import calibrate
from marglik.prediction.links import Prediction, predict_from_outputs
from marglik.prediction.metrics import compute_metrics, out_of_distribution_metrics
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
    predict_all,
)
from marglik.storage.provenance import environment
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer
from marglik.training.schedule import Schedule

__all__ = [
    "PROBLEMS", "Config", "Problem", "Rival", "Task", "best_temperature", "deep_ensemble",
    "laplace_torch", "mc_dropout", "run", "table", "temper", "tempered", "trained",
]  # fmt: skip

REFERENCE = "temperature scaling"
"""The row whose NLL the others are compared with, paired by seed."""
BATCH_SIZE = 32
"""Batch size of predictions; with 128 laplace-torch's Jacobians take thrice as long per image."""


@dataclass(frozen=True)
class Problem:
    """Data, network and epochs; the settings of our preset for them, if there is one."""

    title: str
    data: Callable[[int], Any]
    """Data of a seed; each seed splits training, held-out and test data differently."""
    make_model: Callable[[], nn.Module]
    epochs: int
    optimizer: OptimizerConfig
    kfac_approx: KfacApprox
    every: int = 5
    burn_in: int = 5
    batch_size: int = 64
    outside: bool = True
    """Whether noise is out-of-distribution data."""


PROBLEMS = {
    "digits": Problem(
        "digits, LeNet",
        lambda seed: Digits(test_fraction=0.5, validation=0.3, seed=seed),
        lambda: LeNet(10, 1, 8),
        40,
        OptimizerConfig(lr=0.05),
        "expand",
    ),
    "cifar10": Problem(
        "CIFAR-10 (JPEG), 3,200 images, LeNet",
        lambda seed: images("jpeg", max_train=4000, max_test=2000, validation=0.2, seed=seed),
        lambda: LeNet(10, 3, 32),
        30,
        OptimizerConfig(lr=0.02),
        "reduce",
    ),
    "nci1": Problem(
        "NCI1, GraphNetwork",
        lambda seed: NCI1(data_file("NCI1.tar.gz"), validation=0.15, seed=seed),
        lambda: GraphNetwork(37, 2, edge_features=1, dim=32, depth=2),
        40,
        OptimizerConfig(name="adamw", lr=2e-3),
        "reduce",
        outside=False,
    ),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one seed of one problem."""

    data: str = "digits"
    seed: int = 0
    samples: int = 20
    """Masks of MC dropout."""
    members: int = 5
    weight_decay: float = 5e-4
    weight_decays: tuple[float, ...] = (5e-5, 2e-4, 5e-4, 2e-3, 5e-3, 2e-2)
    dropout: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4)
    repetitions: int = 15
    """Number of timed predictions of a batch."""

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.data}_{self.seed}"


@dataclass(frozen=True)
class Task:
    """What every row is given: network, data, and held-out data for all choices."""

    problem: Problem
    splits: Splits
    config: Config

    def batches(self, split: SplitName, seed: int | None = None) -> Batches:
        """Batches of predictions or, in the random order of a seed, of training."""
        if seed is None:
            return split_batches(self.splits, split, BATCH_SIZE)
        return split_batches(self.splits, split, self.problem.batch_size, shuffle=True, seed=seed)


@dataclass(frozen=True)
class Rival:
    """A predictive, the choices made for it on held-out data, and its cost in CPU seconds."""

    predict: Predictive
    model: nn.Module
    training_seconds: float
    """Seconds of the training with the chosen hyperparameters, including that of its start."""
    search_seconds: float = 0.0
    """Seconds of all other candidates, including the held-out evaluations."""
    chosen: Mapping[str, float] = field(default_factory=dict)
    likelihood: str = "classification"

    def __call__(self, x: Any) -> Prediction:
        """The prediction for a batch of inputs."""
        return self.predict(x)


def run(config: Config) -> dict[str, Any]:
    """Train and evaluate all rows with one seed."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    problem = PROBLEMS[config.data]
    task = Task(problem, problem.data(config.seed).load(), config)
    made, failed = _rows(task)
    sizes = {s: task.batches(s).num_examples for s in ("train", "validation", "test")}
    return {
        "config": asdict(config),
        "problem": {"title": problem.title, "epochs": problem.epochs},
        "num_examples": sizes,
        "rows": _measured(made, task),
        "failed": failed,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def _rows(task: Task) -> tuple[dict[str, Rival], dict[str, str]]:
    """All rows that could be made, and the reasons why others could not."""
    config = task.config
    trained(replace(task, problem=replace(task.problem, epochs=1)))  # a process's first steps
    start = trained(task, config.weight_decays)
    makers: dict[str, Callable[[], Rival]] = {
        "temperature scaling": lambda: tempered(start, task),
        f"deep ensemble of {config.members}": lambda: deep_ensemble(task, start),
        "MC dropout": lambda: mc_dropout(task, start),
        "laplace-torch": lambda: laplace_torch(task, start),
        "laplace-torch, last layer": lambda: laplace_torch(task, start, "last_layer"),
    }
    made, failed = {"MAP": trained(task), "MAP, chosen weight decay": start}, {}
    for name, make in makers.items():
        try:
            rival = make()
            rival(next(iter(task.batches("validation")))[0])
            made[name] = rival
        # A rival that fails on a problem is a finding; ours must not fail.
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{config.name}: {name}: {failed[name]}", file=sys.stderr, flush=True)
    return made | ours(task), failed


def _measured(made: Mapping[str, Rival], task: Task) -> dict[str, dict[str, Any]]:
    """Row -> metrics, raw and tempered, and costs; predictions are timed interleaved."""
    outside = _outside(task)
    x, _ = next(iter(task.batches("test")))
    work = {name: lambda r=rival: r(x) for name, rival in made.items()}
    seconds = medians(interleaved(work, task.config.repetitions, torch.device("cpu")))
    rows = {}
    for name, rival in made.items():
        held_out, labels = predict_all(rival, task.batches("validation"))
        tau = best_temperature(held_out, labels)
        prediction, y = predict_all(rival, task.batches("test"))
        other = None if outside is None else predict_all(rival, outside)[0]
        rows[name] = {
            "metrics": _metrics(prediction, y, other),
            "tempered": _metrics(temper(prediction, tau), y, other and temper(other, tau)),
            "temperature": tau,
            "held_out": _metrics(held_out, labels),
            "training_seconds": rival.training_seconds,
            "search_seconds": rival.search_seconds,
            "prediction_seconds": seconds[name],
            "chosen": dict(rival.chosen),
        }
    return rows


def _outside(task: Task) -> Batches | None:
    """Noise, normalised as the data is; None if the data are no images."""
    splits = task.splits
    if not task.problem.outside or not isinstance(splits, ImageSplits):
        return None
    other = out_of_distribution_images(Noise(num_images=500), splits).images
    labelled = ImageSet(other, torch.zeros(len(other), dtype=torch.int64))
    return ImageBatches(labelled, splits.mean, splits.std, BATCH_SIZE)


def _metrics(
    prediction: Prediction, y: Tensor, outside: Prediction | None = None
) -> dict[str, float]:
    found = compute_metrics(prediction, y, "classification")
    if outside is not None:
        found |= out_of_distribution_metrics(prediction.entropy, outside.entropy)
    return found


# The rows


def ours(task: Task) -> dict[str, Rival]:
    """Our MAP and Laplace rows, with weight decays per tensor learned while the network trains.

    They start at the default weight decay. Only the calibrated rows' s and τ are chosen on held-out
    data.
    """
    problem, config = task.problem, task.config
    started = time.process_time()
    torch.manual_seed(config.seed)
    model = problem.make_model()
    loader: Any = task.batches("train", config.seed)
    optimizer, scheduler = build_optimizer(model, problem.optimizer, problem.epochs * len(loader))
    learner = PriorLearner(
        "classification",
        CurvatureOptions(kfac_approx=problem.kfac_approx),
        weight_decay=config.weight_decay,
        schedule=Schedule(problem.epochs, problem.every, problem.burn_in, 100, average=None),
        curvature_from="pass",
    )
    learned = OnlineTraining(model, optimizer, loader, learner, scheduler=scheduler).run()
    seconds = time.process_time() - started
    posterior = learned.laplace
    chosen = {"evidence": learned.evidence, "epoch": learned.epoch}
    found = {"marglik, MAP": Rival(map_predictive(model), model, seconds, chosen=chosen)}
    calibrated = {}
    for name, predictive in {
        "probit": PredictiveConfig("probit"),
        "mc": PredictiveConfig("mc"),
        "probit, last layer": PredictiveConfig("probit", layers="last"),
    }.items():
        generator = torch.Generator().manual_seed(config.seed)
        predict = laplace_predictive(posterior, replace(predictive, calibration="none"), generator)
        found[f"marglik, {name}"] = Rival(predict, model, seconds, chosen=chosen)
        started = time.process_time()
        fit = calibrate(posterior, task.batches("validation"), predictive)
        of_fit = asdict(fit.calibration)
        calibrated[f"marglik, {name}, calibrated"] = Rival(
            fit.predict,
            model,
            seconds,
            time.process_time() - started,
            chosen | {key: of_fit[key] for key in ("covariance_scale", "output_temperature")},
        )
    return found | calibrated


def trained(task: Task, weight_decays: Sequence[float] | None = None) -> Rival:
    """One network at its MAP, with the default weight decay, or the best of several."""
    if weight_decays is None:
        return _network(task, task.config.weight_decay, task.config.seed)
    return _best(task, [lambda w=w: _network(task, w, task.config.seed) for w in weight_decays])


def best_temperature(prediction: Prediction, targets: Tensor) -> float:
    """τ at which the probabilities ∝ p^(1/τ) have the lowest NLL, which is convex in 1/τ.

    For one network p^(1/τ) is the softmax of its logits over τ.
    """
    log_p = _log(prediction.mean.double())
    found: Any = minimize_scalar(
        lambda log_tau: cross_entropy(log_p / math.exp(log_tau), targets).item(),
        # Held-out data without a single error would give τ = 0.
        bounds=(math.log(0.02), math.log(50)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return math.exp(found.x)


def temper(prediction: Prediction, temperature: float) -> Prediction:
    """The class probabilities raised to 1/τ, and normalised; their uncertainty is not divided."""
    mean = torch.softmax(_log(prediction.mean) / temperature, -1)
    return _undivided(mean)


def tempered(start: Rival, task: Task) -> Rival:
    """Temperature scaling of a trained network, with τ chosen on the held-out data."""
    started = time.process_time()
    tau = best_temperature(*predict_all(start, task.batches("validation")))
    search = start.search_seconds + time.process_time() - started
    chosen = {**start.chosen, "temperature": tau}

    def predict(x: Any) -> Prediction:
        return temper(start(x), tau)

    return replace(start, predict=predict, search_seconds=search, chosen=chosen)


def deep_ensemble(task: Task, start: Rival) -> Rival:
    """The mean of the probabilities of networks that differ in their seeds.

    ``start`` is the first of them; the others have its weight decay.
    """
    seeds = [task.config.seed + 1000 * i for i in range(1, task.config.members)]
    members = [start, *(_network(task, start.chosen["weight_decay"], seed) for seed in seeds)]

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        outputs = torch.stack([member.model.eval()(x) for member in members])
        return predict_from_outputs(outputs, "classification")

    seconds = sum(member.training_seconds for member in members)
    return replace(start, predict=predict, training_seconds=seconds)


def with_dropout(model: nn.Module, p: float) -> nn.Module:
    """The network with dropout before every linear and convolutional layer but the first.

    Changes it in place. Source of the places: Gal & Ghahramani 2016, sec. 3 (every weight layer;
    the first is left out, so that no input is hidden).
    """
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    for parent, name, layer in found[1:]:
        setattr(parent, name, nn.Sequential(nn.Dropout(p), layer))
    return model


def mc_dropout(task: Task, start: Rival) -> Rival:
    """Dropout that stays on: the mean over random masks. p is chosen, the weight decay ``start``'s.

    The masks follow a seed, and so, unlike with the other rivals, the batches.
    """
    config, make_model = task.config, task.problem.make_model

    def fit(p: float) -> Rival:
        problem = replace(task.problem, make_model=lambda: with_dropout(make_model(), p))
        variant = replace(task, problem=problem)
        network = _network(variant, start.chosen["weight_decay"], config.seed)
        model = network.model
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]

        @torch.no_grad()
        def predict(x: Any) -> Prediction:
            for layer in layers:
                layer.train()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                outputs = torch.stack([model(x) for _ in range(config.samples)])
            return predict_from_outputs(outputs, "classification")

        chosen = {**network.chosen, "dropout": p}
        return replace(network, predict=in_eval_mode(model, predict), chosen=chosen)

    best = _best(task, [lambda p=p: fit(p) for p in config.dropout])
    return replace(best, search_seconds=best.search_seconds + start.search_seconds)


def laplace_torch(
    task: Task, start: Rival, subset_of_weights: Literal["all", "last_layer"] = "all"
) -> Rival:
    """laplace-torch as it comes: Kronecker factors by its own backend, its prior, link probit.

    It has one prior precision by its marginal likelihood, post hoc.
    """
    from kfac_backend.laplace_torch.kron import laplace as package  # which takes seconds

    started = time.process_time()
    model = copy.deepcopy(start.model)
    with warnings.catch_warnings():
        # The link is given with each call.
        warnings.filterwarnings("ignore", "By default `link_approx`")
        laplace: Any = package.Laplace(model, "classification", subset_of_weights, "kron")
        laplace.fit(task.batches("train", task.config.seed))
        laplace.optimize_prior_precision(method="marglik")
    return Rival(
        in_eval_mode(model, lambda x: _undivided(laplace(x, link_approx="probit").detach())),
        model,
        start.training_seconds + time.process_time() - started,
        start.search_seconds,
        {**start.chosen, "prior_precision": float(laplace.prior_precision.mean())},
    )


def _network(task: Task, weight_decay: float, seed: int) -> Rival:
    """Train a network from scratch; the seed is for its start, its order of data, its dropout."""
    problem = task.problem
    started = time.process_time()
    torch.manual_seed(seed)
    model, loader = problem.make_model(), task.batches("train", seed)
    optimizer, scheduler = build_optimizer(model, problem.optimizer, problem.epochs * len(loader))
    model.train()
    for _ in range(problem.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            # Coupled, also for Adam: that is the MAP.
            decay = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
            (cross_entropy(model(x), y) + 0.5 * weight_decay * decay).backward()
            optimizer.step()
            scheduler.step()
    seconds = time.process_time() - started
    return Rival(map_predictive(model), model, seconds, chosen={"weight_decay": weight_decay})


def _best(task: Task, candidates: Sequence[Callable[[], Rival]]) -> Rival:
    """The candidate with the lowest held-out NLL; its search has the others' seconds."""
    started = time.process_time()
    best, lowest = None, math.inf
    for make in candidates:
        rival = make()
        prediction, y = predict_all(rival, task.batches("validation"))
        if not prediction.mean.isfinite().all():
            continue  # diverged
        nll = compute_metrics(prediction, y, "classification")["cls/NLL"]
        if nll < lowest:
            best, lowest = rival, nll
    if best is None:
        raise FloatingPointError("Every candidate diverged; lower the learning rate.")
    return replace(best, search_seconds=time.process_time() - started - best.training_seconds)


def _undivided(mean: Tensor) -> Prediction:
    """Class probabilities whose whole uncertainty counts as aleatoric."""
    entropy = torch.special.entr(mean).sum(-1)
    return Prediction(mean, entropy, torch.zeros_like(entropy))


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


# The table, from JSON alone

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
    own, search = row["training_seconds"], row["search_seconds"]
    one, prediction = unit["training_seconds"], unit["prediction_seconds"]
    return own / one, (own + search) / one, row["prediction_seconds"] / prediction


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing seeds, and write the table; returns the exit status."""
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
