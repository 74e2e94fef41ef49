"""Averages of a training that may stop at any epoch: early stopping, four rates, ten problems.

"Before" is the rule of version 0.1.0: weight decays are updated in the first two thirds of the
announced epochs, and the average is the mean over the steps of the last third; until a sixth of the
steps are in it, the last step's parameters are validated. "After" updates until the end, and
averages all steps by polynomial decay, with η = 4, 5 and 6; "unknown" is the same without announced
epochs. Each training is one trajectory, from which stopping with any patience follows.

The settling rate falls to 0.6 of its value after half of the steps.

Scores are on test data at the temperature that the held-out data choose. The held-out loss that is
monitored is at its own best temperature ("scaled") or as it is ("raw").
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from experiments.data.archives import unpacked
from experiments.data.dart import FILE, ORIGIN
from experiments.data.nci1 import NCI1
from experiments.data.uci import UCI
from experiments.studies import Result, grouped, markdown, mean_with_error, standard_error, study
from experiments.weight_decay.training import (
    CURVATURE,
    Batches,
    convolutions,
    digits,
    mlp,
    no_norm,
    small_images,
)
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from marglik import PriorLearner
from marglik.training.average import renew_batch_norm
from marglik.training.options import Schedule
from marglik.training.problem import batch_norms

EPOCHS = 30
HELD_OUT = 200
PATIENCES = (5, 8, None)
ETAS = (4, 5, 6)
GRID = (5e-4, 5e-3, 5e-2)
"""Weight decays of a plain training, one for all tensors."""
LATE = EPOCHS - round(EPOCHS / 3)
SAMPLED = "eta 4, statistics of two batches"


# Data: inputs and labels, or targets (N, 1) of regression


def breast_cancer() -> tuple[Tensor, Tensor]:
    """Measurements of cells (569, 30), standardised, benign or malignant."""
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(y)


def teacher() -> tuple[Tensor, Tensor]:
    """Random vectors (3,000, 20), in the five classes of a random network."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 20, generator=generator)
    W, V = (torch.randn(*shape, generator=generator) for shape in ((20, 10), (10, 5)))
    return x, ((x @ W).tanh() @ V).argmax(1)


def atoms() -> tuple[Tensor, Tensor]:
    """How many atoms of each kind, and bonds, a molecule of NCI1 has, (3,288, 38); its activity."""
    graphs, labels = NCI1().load().train
    x = torch.zeros(len(labels), graphs.nodes.shape[1])
    x = x.index_add_(0, graphs.node_graph, graphs.nodes)
    x = torch.cat([x, graphs.edge_counts[:, None].float()], 1).sqrt()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-3), labels


SOURCES = ("e2e", "webnlg", "WikiSQL_decl_sents")
"""Collections of DART's sentences."""


def sentences() -> list[tuple[str, str]]:
    """DART's sentences of these collections, with the collection."""
    entries = json.loads(unpacked(None, FILE, ORIGIN))
    pairs = [(a["text"], a["source"]) for entry in entries for a in entry["annotations"][:1]]
    return [(text, source) for text, source in pairs if source in SOURCES]


def letters() -> tuple[Tensor, Tensor]:
    """The first 64 letters of DART's sentences, (2,596, 64) in 64 kinds; their collection."""
    pairs = sentences()
    codes = [[ord(c) % 64 for c in text[:64].ljust(64)] for text, _ in pairs]
    return torch.tensor(codes), torch.tensor([SOURCES.index(source) for _, source in pairs])


def texts() -> tuple[Tensor, Tensor]:
    """Three letters in a row of DART's sentences, hashed (2,596, 256); their collection."""
    pairs = sentences()
    x = torch.zeros(len(pairs), 256)
    for row, (text, _) in zip(x, pairs, strict=True):
        for i in range(len(text) - 2):
            row[crc32(text[i : i + 3].encode()) % 256] += 1
    return F.normalize(x) * 16, torch.tensor([SOURCES.index(source) for _, source in pairs])


def uci(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression set."""
    splits = UCI(name).load()
    return tuple(torch.cat(parts) for parts in zip(splits.train, splits.test, strict=True))  # pyright: ignore


def wine() -> tuple[Tensor, Tensor]:
    """Measurements of red wines (1,599, 11); below the mean grade, about, or above."""
    x, y = uci("wine-quality-red")
    return x, (y[:, 0] > -0.2).long() + (y[:, 0] > 1)


def protein() -> tuple[Tensor, Tensor]:
    """Properties of folded proteins (5,000, 9); the fifth of their sizes."""
    x, y = (part[:5000] for part in uci("protein-tertiary-structure"))
    edges = y[:, 0].quantile(torch.tensor([0.2, 0.4, 0.6, 0.8]))
    return x, torch.bucketize(y[:, 0], edges)


# Problems


@dataclass(frozen=True)
class Problem:
    """A network, its data, and how it is trained."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    examples: int
    wrong: float = 0.0
    """Share of the training and held-out labels that are changed to another class."""
    optimizer: str = "SGD"
    lr: float = 0.05

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Without a weight decay."""
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), self.lr, momentum=0.9, nesterov=True)
        return getattr(torch.optim, self.optimizer)(model.parameters(), self.lr, weight_decay=0.0)


def group_norm(width: int) -> nn.Module:
    """Of four groups."""
    return nn.GroupNorm(4, width)


CHOOSE = {
    "digits, MLP, 20 %": Problem(lambda: mlp(64, 10, no_norm), digits, 400, 0.2),
    "digits, GroupNorm": Problem(lambda: convolutions(group_norm, "pooled"), digits, 300),
    "teacher, LayerNorm, 40 %": Problem(lambda: mlp(20, 5, nn.LayerNorm), teacher, 600, 0.4),
    "NCI1, atoms, Adam": Problem(
        lambda: mlp(38, 2, no_norm), atoms, 600, 0.0, optimizer="Adam", lr=3e-3
    ),
    "breast cancer, BatchNorm": Problem(lambda: mlp(30, 2, nn.BatchNorm1d), breast_cancer, 200),
}
REPORT = {
    "digits, BatchNorm, 40 %": Problem(
        lambda: convolutions(nn.BatchNorm2d, "flattened"), digits, 300, 0.4
    ),
    "CIFAR-10, convolutions, 20 %": Problem(
        lambda: convolutions(no_norm, "flattened", 3, 16), small_images, 500, 0.2
    ),
    "DART's texts, AdamW, 40 %": Problem(
        lambda: mlp(256, 3, no_norm), texts, 500, 0.4, optimizer="AdamW", lr=3e-3
    ),
    "energy, regression, Adam": Problem(
        lambda: mlp(8, 1, no_norm), partial(uci, "energy"), 400, optimizer="Adam", lr=1e-2
    ),
    "wine, 20 %": Problem(lambda: mlp(11, 3, no_norm), wine, 600, 0.2),
}
PROBLEMS = CHOOSE | REPORT
RATES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "settling": lambda optimizer, steps: LambdaLR(
        optimizer, lambda step: 1.0 if 2 * step < steps else 0.6
    ),
    "constant": lambda optimizer, steps: LambdaLR(optimizer, lambda _: 1.0),
    "cosine": CosineAnnealingLR,
    "one-cycle": lambda optimizer, steps: OneCycleLR(
        optimizer, 2 * optimizer.param_groups[0]["lr"], total_steps=steps + 1
    ),
}


@cache
def data_of(name: str) -> tuple[Tensor, Tensor]:
    """A problem's data, read once."""
    return PROBLEMS[name].data()


def split(name: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Training, held-out and at most 600 test data."""
    problem, (x, y) = PROBLEMS[name], data_of(name)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    x, y, N = x[order], y[order].clone(), problem.examples
    if problem.wrong:
        classes = int(y.max()) + 1
        chosen = torch.rand(N + HELD_OUT, generator=generator) < problem.wrong
        other = torch.randint(1, classes, (N + HELD_OUT,), generator=generator)
        labels = y[: N + HELD_OUT]
        y[: N + HELD_OUT] = torch.where(chosen, (labels + other) % classes, labels)
    ends = (0, N, N + HELD_OUT, min(len(y), N + HELD_OUT + 600))
    return [(x[a:b], y[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


# Scores of outputs


TEMPERATURES = torch.logspace(-1, 1.5, 51)


def held_out_loss(f: Tensor, y: Tensor) -> tuple[float, float, float]:
    """The held-out loss, scaled and raw, and the scale.

    The scale is a temperature; in regression it is σ, and "raw" is the mean squared error.
    """
    if y.is_floating_point():
        mse = (f - y).square().mean().item()
        return 0.5 * math.log(2 * math.pi * mse) + 0.5, mse, mse**0.5
    log_p = torch.log_softmax(f / TEMPERATURES[:, None, None], -1)  # (T, N, C)
    losses = -log_p.gather(2, y.expand(len(log_p), -1)[..., None]).mean((1, 2))
    best = losses.argmin()
    return losses[best].item(), F.cross_entropy(f, y).item(), TEMPERATURES[best].item()


def test_score(f: Tensor, y: Tensor, scale: float) -> tuple[float, float]:
    """The test loss at a scale, and the accuracy, or RMSE."""
    if y.is_floating_point():
        mse = (f - y).square().mean().item()
        return 0.5 * math.log(2 * math.pi * scale**2) + 0.5 * mse / scale**2, mse**0.5
    accuracy = (f.argmax(1) == y).float().mean().item()
    return F.cross_entropy(f / scale, y).item(), accuracy


# Trajectories


class RestsAtTheEnd(Schedule):
    """Updates in the first two thirds of the epochs, as in version 0.1.0."""

    def is_due(self, epoch: int) -> bool:
        """Whether the k-th update follows this epoch, the first to reach k/U of these."""
        return epoch <= LATE and epoch * self.updates // LATE > (epoch - 1) * self.updates // LATE


class Averages:
    """All averages of a trajectory, as vectors: of each η, and the mean over the last third."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps, self.late_steps = model, 0, 0
        self.of_eta: dict[int, Tensor] = {}
        self.late = torch.zeros(0)

    @torch.no_grad()
    def add(self, is_late: bool) -> None:
        """Include the present parameters."""
        theta = parameters_to_vector(self.model.parameters())
        self.steps += 1
        for eta in ETAS:
            mean = self.of_eta.setdefault(eta, theta.clone())
            mean.lerp_(theta, (eta + 1) / (self.steps + eta))
        if is_late:
            self.late_steps += 1
            self.late = self.late if self.late_steps > 1 else theta.clone()
            self.late.lerp_(theta, 1 / self.late_steps)


@contextmanager
def parameters(model: nn.Module, theta: Tensor | None) -> Iterator[None]:
    """A context in which the network has these parameters; random numbers go on as before."""
    before, random = deepcopy(model.state_dict()), torch.get_rng_state()
    if theta is not None:  # a copy: the parameters become views of the vector
        vector_to_parameters(theta.clone(), model.parameters())
    yield
    model.load_state_dict(before)
    torch.set_rng_state(random)


@torch.no_grad()
def evaluate(
    curve: list[tuple[float, ...]],
    model: nn.Module,
    theta: Tensor | None,
    data: list[tuple[Tensor, Tensor]],
    loader: Any,
    is_last: bool,
) -> None:
    """Add the scores of a network with these parameters, None for its own and its statistics.

    Those on test data only if early stopping could keep this network.

    Args:
        curve: held-out loss, scaled and raw; test loss, and accuracy or RMSE.
        model: the network.
        theta: its parameters.
        data: held-out and test data.
        loader: for BatchNorm's statistics.
        is_last: whether this is the last epoch.
    """
    (x, y), (x_test, y_test) = data
    with parameters(model, theta):
        if theta is not None and batch_norms(model):
            renew_batch_norm(model, loader, TargetOptions(), Ranks(None))
        model.eval()
        scaled, raw, scale = held_out_loss(model(x), y)
        is_best = not curve or any(
            value < min(values) for value, *values in zip((scaled, raw), *curve, strict=False)
        )
        test = (math.nan, math.nan)
        if is_best or is_last:
            test = test_score(model(x_test), y_test, scale)
        curve.append((scaled, raw, *test))


def trajectory(name: str, seed: int, rate: str, arm: str) -> dict[str, Any]:
    """Train once: the scores of all candidates at each epoch."""
    problem, (train, *data) = PROBLEMS[name], split(name, seed)
    torch.manual_seed(seed)
    model = problem.make()
    loader = Batches(*train, 50)
    optimizer = problem.optimizer_of(model)
    scheduler = RATES[rate](optimizer, EPOCHS * len(loader))
    is_regression = train[1].is_floating_point()
    likelihood = "regression" if is_regression else "classification"
    averages, has_norm = Averages(model), bool(batch_norms(model))
    learner, decay = None, float(arm) if arm[0].isdigit() else 0.0
    if not decay:
        schedule = (RestsAtTheEnd if arm == "before" else Schedule)(EPOCHS)
        learner = PriorLearner(likelihood, CURVATURE, schedule=schedule)
        learner.start(model, optimizer, loader, None if arm == "unknown" else EPOCHS)
    curves: dict[str, list[tuple[float, ...]]] = {}
    seconds, started = 0.0, time.process_time()
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            f = model(x)
            loss = 0.5 * (f - y).square().mean() if is_regression else F.cross_entropy(f, y)
            if decay:
                loss = loss + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            scheduler.step()
            averages.add(epoch > LATE)
        seconds += time.process_time() - started
        vectors: dict[str, Tensor | None] = {f"eta {eta}": averages.of_eta[eta] for eta in ETAS}
        if arm == "before":
            is_taken = averages.late_steps >= averages.steps / 6
            vectors = {"before": averages.late if is_taken else None}
        elif arm != "after":
            vectors = {"eta 4": averages.of_eta[4]}
        if decay and epoch < EPOCHS:
            vectors = {}
        for word, theta in vectors.items():
            evaluate(curves.setdefault(word, []), model, theta, data, loader, epoch == EPOCHS)
        if arm == "after" and has_norm:
            sample = list(islice(iter(loader), 2))  # of the batches of an epoch
            curve = curves.setdefault(SAMPLED, [])
            evaluate(curve, model, averages.of_eta[4], data, sample, epoch == EPOCHS)
        started = time.process_time()
    if learner is not None:
        learner.detach()
    return {"curves": curves, "seconds": seconds}


def stopped(curve: list[tuple[float, ...]], patience: int | None, monitor: int = 0) -> int:
    """The epoch, from 0, of the network that early stopping keeps; the last without a patience."""
    if patience is None:
        return len(curve) - 1
    best = 0
    for epoch, values in enumerate(curve):
        if values[monitor] < curve[best][monitor]:
            best = epoch
        if epoch - best >= patience:
            break
    return best


@dataclass(frozen=True)
class Config:
    """A problem and a seed, with all rates and rules."""

    problem: str
    seed: int


def arms_of(rate: str) -> list[str]:
    """The trainings at a rate, by their rule or their fixed weight decay."""
    return ["before", "after", *(["unknown", *map(str, GRID)] if rate == "settling" else [])]


def scores(config: Config, rate: str, arm: str) -> dict[str, Any]:
    """Train once: the scores by candidate, patience and monitor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = trajectory(config.problem, config.seed, rate, arm)
    ends: dict[str, Any] = {}
    for name, curve in out["curves"].items():
        for patience in PATIENCES if len(curve) > 1 else (None,):
            for monitor, word in ((0, "scaled"), (1, "raw")):
                if patience is None and monitor:
                    continue
                epoch = stopped(curve, patience, monitor)
                scaled, _, test, accuracy = curve[epoch]
                values = (test, accuracy, scaled, epoch + 1)
                ends[f"{name}, {patience}, {word}"] = [round(v, 5) for v in values]
    return {"ends": ends, "seconds": round(out["seconds"], 2)}


def run(config: Config) -> Result:
    """Train one after the other: the scores by rate and rule."""
    return {
        "results": {
            f"{rate}, {arm}": scores(config, rate, arm) for rate in RATES for arm in arms_of(rate)
        }
    }


def tasks(options: argparse.Namespace) -> list[Config]:
    """Seed by seed."""
    return [Config(problem, seed) for seed in range(options.seeds) for problem in options.data]


# Tables


Pairs = dict[tuple[str, str], list[float]]
"""(Problem, rate) -> a difference of test losses of each seed."""


def differences(results: list[Result], one: tuple[str, str], other: tuple[str, str]) -> Pairs:
    """Test losses of an arm's candidate minus those of another, for all problems and rates.

    Args:
        results: of all runs.
        one: the arm, and the end of its trajectory, as in the JSON.
        other: that it is compared with.
    """
    pairs: Pairs = {}
    for result in results:
        for rate in RATES:
            ends = [
                result["results"].get(f"{rate}, {arm}", {"ends": {}})["ends"].get(end)
                for arm, end in (one, other)
            ]
            if ends[0] and ends[1]:
                key = (result["config"]["problem"], rate)
                pairs.setdefault(key, []).append(ends[0][0] - ends[1][0])
    return pairs


FULL = ("before", "before, None, scaled")
"""The full training by the rule of 0.1.0."""


def is_worse(values: list[float]) -> bool:
    """Whether differences are above zero by more than two standard errors."""
    return len(values) > 1 and sum(values) / len(values) > 2 * standard_error(values)


def summary(results: list[Result], one: tuple[str, str], other: tuple[str, str]) -> list[str]:
    """The mean over runs on the problems to choose by, and on the others; cells that are worse."""
    pairs = differences(results, one, other)
    cells = []
    for group in (CHOOSE, REPORT):
        values = [v for (problem, _), of_cell in pairs.items() if problem in group for v in of_cell]
        cells.append(mean_with_error(values, "{:+.3f}") if values else "")
    several = [of_cell for of_cell in pairs.values() if len(of_cell) > 1]
    return [*cells, f"{sum(map(is_worse, several))} of {len(several)}"]


def table(results: list[Result]) -> str:
    """Differences of test losses: of all averages and patiences; of each problem and rate."""
    head = ["test loss of", "minus that of", "five problems to choose η by", "five others",
            "worse by two standard errors"]  # fmt: skip
    rows = [head]
    for patience in (None, 5, 8):
        for arm, names in (("before", ("before",)), ("after", [f"eta {eta}" for eta in ETAS])):
            for name in names:
                one = arm, f"{name}, {patience}, scaled"
                if one != FULL:
                    stop = f"patience {patience}" if patience else "no early stopping"
                    rows.append([f"{name}, {stop}", "before, no early stopping",
                                 *summary(results, one, FULL)])  # fmt: skip
    after = ("after", "eta 4, 8, scaled")
    rows += [
        [f"eta 4, patience 8, {word}", "the same by the scaled loss of all data, announced epochs",
         *summary(results, one, after)]
        for word, one in (
            ("by the raw loss", ("after", "eta 4, 8, raw")),
            ("BatchNorm's statistics of two batches", ("after", f"{SAMPLED}, 8, scaled")),
            ("unknown end", ("unknown", "eta 4, 8, scaled")),
        )
    ]  # fmt: skip
    cells = [["problem", "rate", "seeds", "before", "η = 4 minus it", "..., patience 5",
              "..., patience 8", "before, patience 8, minus it"]]  # fmt: skip
    for problem, runs in grouped(results, "problem").items():
        for rate in RATES:
            full = [run["results"][f"{rate}, before"]["ends"][FULL[1]][0] for run in runs]
            cells.append([problem, rate, str(len(runs)), mean_with_error(full)])
            for one in (
                *(("after", f"eta 4, {patience}, scaled") for patience in (None, 5, 8)),
                ("before", "before, 8, scaled"),
            ):
                values = differences(runs, one, FULL)[problem, rate]
                star = " *" if is_worse(values) else ""
                cells[-1].append(f"{mean_with_error(values, '{:+.3f}')}{star}")
    return (
        f"{markdown(rows)}\n\nEach problem and rate; worse by more than two standard errors with a "
        f"star:\n\n{markdown(cells)}\n\n{constant_or_settling(results)}\n\n{behind(results)}"
    )


def constant_or_settling(results: list[Result]) -> str:
    """Test losses and accuracies at the constant rate minus those at the settling rate."""
    rows = [["problem", "seeds", "test loss, no early stopping", "accuracy, points",
             "test loss, patience 8", "accuracy, points"]]  # fmt: skip
    for problem, runs in (grouped(results, "problem") | {"all": results}).items():
        rows.append([problem, str(len(runs))])
        for patience in (None, 8):
            end = f"eta 4, {patience}, scaled"
            ends = [
                [run["results"][f"{rate}, after"]["ends"][end] for rate in ("constant", "settling")]
                for run in runs
            ]
            losses = [one[0] - other[0] for one, other in ends]
            star = " *" if is_worse(losses) or is_worse([-loss for loss in losses]) else ""
            rows[-1].append(f"{mean_with_error(losses, '{:+.3f}')}{star}")
            # The second number of a regression is its RMSE.
            points = [
                100 * (pair[0][1] - pair[1][1])
                for pair, run in zip(ends, runs, strict=True)
                if "regression" not in run["config"]["problem"]
            ]
            rows[-1].append(mean_with_error(points, "{:+.1f}") if points else "")
    return (
        "The constant rate minus the settling rate; a star where they differ by more than two "
        f"standard errors:\n\n{markdown(rows)}"
    )


HARM = 0.02
"""Nats by which learning is worse than the best of the fixed decays, by their held-out loss."""


def behind(results: list[Result]) -> str:
    """How often learning is behind the best of the fixed decays, at the settling rate."""
    count = 0
    for result in results:
        ends = {
            arm: result["results"][f"settling, {arm}"]["ends"]["eta 4, None, scaled"]
            for arm in ("after", *map(str, GRID))
        }
        best = min((ends[str(decay)] for decay in GRID), key=lambda end: end[2])
        count += ends["after"][0] > best[0] + HARM
    return (
        f"Without early stopping and at the settling rate, learning is {HARM} nats or more behind "
        f"the best of three fixed decays in {count} of {len(results)} runs."
    )


main = study("any_loop", __doc__, run, tasks, table, problems=PROBLEMS, seeds=5)

if __name__ == "__main__":
    sys.exit(main())
