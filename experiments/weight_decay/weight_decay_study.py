"""Is learning the weight decay worth it? One run beside what people do instead, with its cost.

Ways to class probabilities, all with the same network, data and epochs:

- default: a weight decay of 5e-4, and a cosine of the learning rate to zero;
- grid: the best of seven fixed decays, with that cosine;
- grid, averaged: the same, with our constant learning rate and averaged parameters;
- learned: a decay for each tensor, learned by the loop with its default options, which use the
  held-out data to correct decays;
- ensemble of five, with the grid's decay or with the course that the learned ones took
  (Lakshminarayanan et al. 2017, arXiv:1612.01474);
- dropout that stays on, with the best of five probabilities and the grid's decay (Gal & Ghahramani
  2016, arXiv:1506.02142);
- SWAG, around the grid's network (Maddox et al. 2019, arXiv:1902.02476);
- IVON, with the best of six pairs of decay and rate (Shen et al. 2024, arXiv:2402.17641; package
  ivon-opt);
- Laplace around the learned network: K-FAC's posterior by probit, as it is or calibrated by the
  held-out data, and the last layer's, calibrated;
- laplace-torch as it comes around the grid's network: its own Kronecker factors, one prior
  precision by the marginal likelihood, probit.

Held-out data choose, by the NLL at the best temperature, and give that temperature (Guo et al.
2017). Labels are wrong in training and held-out data, never in the test data. Five predictors of
one run are drawn with twenty samples. A cost is CPU time, in trainings with the default.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.data.nci1 import NCI1
from experiments.models import GraphNetwork
from experiments.studies import Result, grouped, markdown, mean_with_error, standard_error, study
from experiments.weight_decay.training import (
    Batches,
    Problem,
    Split,
    Trained,
    convolutions,
    digits,
    mlp,
    no_norm,
    scaled_scores,
    small_images,
    with_wrong_labels,
)
from marglik.models import LeNet
from marglik.posterior.posterior import Layers
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive

DEFAULT = 5e-4
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DROPOUT = (0.05, 0.1, 0.2, 0.3, 0.5)
IVON = tuple((decay, lr) for decay in (1e-4, 1e-3, 1e-2) for lr in (0.05, 0.2))
MEMBERS, SAMPLES = 5, 20


def molecules() -> tuple[Any, Tensor]:
    """4,070 molecules of NCI1, two classes."""
    return NCI1(test=0.01).load().train


PROBLEMS = {
    "digits, MLP": Problem(lambda: mlp(64, 10, no_norm, hidden=100), 60, data=digits),
    "digits, convolutions": Problem(lambda: convolutions(no_norm, "flattened"), data=digits),
    "digits, LeNet": Problem(lambda: LeNet(10, 1, 8), data=digits),
    "CIFAR-10 (JPEG), convolutions": Problem(
        lambda: convolutions(no_norm, "flattened", 3, 16), 20, lr=0.02,
        data=small_images, held_out=1000,
    ),
    "NCI1, GraphNetwork": Problem(
        lambda: GraphNetwork(37, 2, edge_features=1, dim=32, depth=2), 30, "adam", 2e-3,
        data=molecules, held_out=500,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One problem, its number of training examples, and the share of wrong labels."""

    problem: str
    examples: int
    wrong: float
    seed: int
    everything: bool = False
    """Whether all rivals are tried, or only the default and the grids."""


@dataclass
class Way:
    """The outputs of one way on held-out and test data, (S, N, C) of S networks, and its cost."""

    held_out: Tensor
    test: Tensor
    seconds: float
    trainings: int = 1
    chosen: Any = None


class Comparison:
    """All ways of one configuration."""

    def __init__(self, config: Config) -> None:
        self.problem, self.seed = PROBLEMS[config.problem], config.seed
        self.train_split, self.held_out, self.test = splits_of(config)

    def outputs(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Of one network on held-out and test data, (1, N, C) each."""
        with torch.no_grad():
            return model.eval()(self.held_out[0])[None], model(self.test[0])[None]

    def way(self, trained: Trained) -> Way:
        """That of one network."""
        return Way(*self.outputs(trained.model), trained.seconds)

    def best(self, candidates: dict[Any, Way]) -> Way:
        """The candidate with the lowest scaled NLL on held-out data, with the cost of all."""
        chosen = min(candidates, key=lambda c: self.scores(candidates[c])["held_out_nll"])
        way = candidates[chosen]
        seconds = sum(candidate.seconds for candidate in candidates.values())
        return Way(way.held_out, way.test, seconds, len(candidates), chosen)

    def scores(self, way: Way) -> dict[str, float]:
        """NLL and accuracy at the temperature that the held-out data choose."""
        return scaled_scores(way.held_out, self.held_out[1], way.test, self.test[1])

    def fixed(self, decay: Any, rate: str = "cosine", seed: int | None = None) -> Trained:
        """A training with fixed decays, or with learned ones for None."""
        seed = self.seed if seed is None else seed
        held_out = self.held_out if decay is None else None
        return self.problem.run(self.train_split, seed, decays=decay, rate=rate, held_out=held_out)

    def ensemble(self, first: Way, decay: Any, rate: str) -> Way:
        """The first network and four others with its decay, or with the course of its decays."""
        others = [
            self.way(self.fixed(decay, rate, self.seed + 1000 * i)) for i in range(1, MEMBERS)
        ]
        outputs = [(way.held_out, way.test) for way in (first, *others)]
        seconds = first.seconds + sum(way.seconds for way in others)
        return Way(*together(outputs), seconds, first.trainings + len(others))

    def dropout(self, decay: float, p: float) -> Way:
        """A network with dropout before each linear map but the first, which stays on."""
        problem = replace(self.problem, make=lambda: with_dropout(self.problem.make(), p))
        trained = problem.run(self.train_split, self.seed, decays=decay, rate="cosine")
        trained.model.eval()
        for module in trained.model.modules():
            module.training = isinstance(module, nn.Dropout)
        with torch.no_grad():
            held_out, test = (
                torch.stack([trained.model(x) for _ in range(SAMPLES)])
                for x in (self.held_out[0], self.test[0])
            )
        return Way(held_out, test, trained.seconds)

    def swag(self, decay: float) -> Way:
        """Twenty networks of the Gaussian of the last third of the epochs (SWAG, algorithm 1)."""
        epochs = self.problem.epochs
        seen: list[Tensor] = []

        def keep(epoch: int, model: nn.Module) -> None:
            if epoch > epochs - epochs // 3:
                seen.append(nn.utils.parameters_to_vector(model.parameters()).detach())

        trained = self.problem.run(
            self.train_split, self.seed, decays=decay, rate="constant", after_epoch=keep
        )
        started = time.process_time()
        theta = torch.stack(seen)
        mean, variance = theta.mean(0), theta.var(0, unbiased=False)
        deviations = (theta - mean)[-20:]
        outputs: list[tuple[Tensor, Tensor]] = []
        for _ in range(SAMPLES):
            low_rank = torch.randn(len(deviations)) @ deviations / (len(deviations) - 1) ** 0.5
            sample = mean + (variance.sqrt() * torch.randn_like(mean) + low_rank) / 2**0.5
            nn.utils.vector_to_parameters(sample, trained.model.parameters())
            outputs.append(self.outputs(trained.model))
        return Way(*together(outputs), trained.seconds + time.process_time() - started)

    def laplace(self, learned: Trained, layers: Layers, calibrated: bool = True) -> Way:
        """The posterior's predictive by probit, as log probabilities."""
        started = time.process_time()
        config = PredictiveConfig("probit", layers=layers)
        if calibrated:
            predict = calibrate(learned.posterior, [self.held_out], config).predict
        else:
            predict = laplace_predictive(learned.posterior, replace(config, calibration="none"))
        seconds = learned.seconds + time.process_time() - started
        return self.predicted(lambda x: predict(x).mean, seconds)

    def laplace_torch(self, decay: float) -> Way:
        """laplace-torch's defaults."""
        from laplace import Laplace  # which takes seconds

        trained = self.fixed(decay)
        started = time.process_time()
        loader = DataLoader(TensorDataset(*self.train_split), self.problem.batch_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            laplace: Any = Laplace(trained.model, "classification", "all", "kron")
            laplace.fit(loader)
            laplace.optimize_prior_precision(method="marglik")
        seconds = trained.seconds + time.process_time() - started
        return self.predicted(lambda x: laplace(x, link_approx="probit"), seconds)

    def predicted(self, predict: Callable[[Any], Tensor], seconds: float) -> Way:
        """The logarithms of class probabilities, which are logits of themselves."""
        with torch.no_grad():
            held_out, test = (
                torch.cat([predict(x[which]) for which in torch.arange(len(y)).split(100)])
                for x, y in (self.held_out, self.test)
            )
        tiny = torch.finfo(test.dtype).tiny
        return Way(held_out.clamp(min=tiny).log()[None], test.clamp(min=tiny).log()[None], seconds)

    def ivon(self, decay: float, lr: float) -> Way:
        """Twenty networks of IVON's Gaussian."""
        from ivon import IVON as Ivon  # pyright: ignore[reportMissingImports]

        torch.manual_seed(self.seed)
        started = time.process_time()
        model = self.problem.make()
        loader = Batches(*self.train_split, self.problem.batch_size)
        optimizer = Ivon(
            model.parameters(), lr, ess=len(self.train_split[1]), hess_init=0.5, weight_decay=decay
        )
        steps = self.problem.epochs * len(loader)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(self.problem.epochs):
            for x, y in loader:
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                rate.step()
        outputs: list[tuple[Tensor, Tensor]] = []
        for _ in range(SAMPLES):
            with optimizer.sampled_params():
                outputs.append(self.outputs(model))
        return Way(*together(outputs), time.process_time() - started)


def together(outputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The outputs of all networks on held-out and on test data, (S, N, C) each."""
    held_out, test = zip(*outputs, strict=True)
    return torch.cat(held_out), torch.cat(test)


def with_dropout(model: nn.Module, p: float) -> nn.Module:
    """The network with dropout before every linear map and convolution but the first.

    The places are those of Gal & Ghahramani 2016, sec. 3; the first would hide inputs.
    """
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    for parent, name, layer in layers[1:]:
        setattr(parent, name, nn.Sequential(nn.Dropout(p), layer))
    return model


def splits_of(config: Config) -> tuple[Split, Split, Split]:
    """Training, held-out and test data; with wrong labels in the first two."""
    problem = PROBLEMS[config.problem]
    x, y = problem.data()
    return with_wrong_labels(x, y, config.examples, problem.held_out, config.wrong, config.seed)


def run(config: Config) -> Result:
    """Try all ways, and test them."""
    comparison = Comparison(config)
    comparison.problem.warm_up(comparison.train_split)
    default = comparison.way(comparison.fixed(DEFAULT))
    cosine = {decay: comparison.way(comparison.fixed(decay)) for decay in GRID}
    unit = statistics.median(way.seconds for way in cosine.values())
    ways = {"default": default, "grid": comparison.best(cosine)}
    constant = {decay: comparison.way(comparison.fixed(decay, "constant")) for decay in GRID}
    ways["grid, averaged"] = comparison.best(constant)
    learned = comparison.fixed(None, "constant")
    ways["learned"] = comparison.way(learned)
    if config.everything:
        grid = ways["grid"]
        ways["ensemble, grid's decay"] = comparison.ensemble(grid, grid.chosen, "cosine")
        ways["ensemble, learned decays"] = comparison.ensemble(
            ways["learned"], learned.learner, "constant"
        )
        ways["dropout"] = comparison.best({p: comparison.dropout(grid.chosen, p) for p in DROPOUT})
        ways["SWAG"] = comparison.swag(ways["grid, averaged"].chosen)
        ways["IVON"] = comparison.best({pair: comparison.ivon(*pair) for pair in IVON})
        ways["Laplace, uncalibrated"] = comparison.laplace(learned, "all", calibrated=False)
        ways["Laplace"] = comparison.laplace(learned, "all")
        ways["Laplace, last layer"] = comparison.laplace(learned, "last")
        after_search = ["dropout", "SWAG"]
        if isinstance(comparison.test[0], Tensor):  # of no graphs
            ways["laplace-torch"] = comparison.laplace_torch(grid.chosen)
            after_search.append("laplace-torch")
        for name in after_search:  # for the decay
            search = ways["grid, averaged"] if name == "SWAG" else grid
            ways[name].seconds += search.seconds
            ways[name].trainings += search.trainings
    return {
        "ways": {
            name: comparison.scores(way)
            | {
                "cost": way.seconds / unit,
                "trainings": way.trainings,
                "chosen": way.chosen,
            }
            for name, way in ways.items()
        },
        "decays": learned.record["weight_decay"],
        "seconds": sum(way.seconds for way in ways.values()),
    }


def tasks(options: argparse.Namespace) -> list[Config]:
    """All rivals on four problems, and the wrong labels of several sizes."""
    everything = [
        ("digits, MLP", 800, 0.0),
        ("digits, MLP", 800, 0.2),
        ("digits, LeNet", 600, 0.0),
        ("CIFAR-10 (JPEG), convolutions", 1000, 0.0),
        ("NCI1, GraphNetwork", 1500, 0.0),
    ]
    wrong = [
        ("digits, MLP", 400, 0.2),
        ("digits, MLP", 400, 0.4),
        ("digits, MLP", 800, 0.4),
        ("digits, convolutions", 400, 0.2),
        ("digits, convolutions", 400, 0.4),
        ("digits, convolutions", 1000, 0.0),
        ("digits, convolutions", 1000, 0.2),
        ("digits, convolutions", 1000, 0.4),
        ("CIFAR-10 (JPEG), convolutions", 1000, 0.2),
        ("CIFAR-10 (JPEG), convolutions", 4000, 0.2),
        ("CIFAR-10 (JPEG), convolutions", 4000, 0.4),
    ]
    return [
        Config(*which, seed, everything=which in everything)
        for seed in range(options.seeds)
        for which in (*everything, *wrong)
        if which[0] in options.data
    ]


def table(results: list[Result]) -> str:
    """A row for each way of each problem, and what learning has less, paired by seed."""
    groups = grouped(results, "problem", "examples", "wrong")
    rows = [
        ["problem", "N", "wrong", "seeds", "way", "NLL", "scaled NLL", "accuracy, %", "trainings",
         "CPU time", "learned − it, NLL", "accuracy"],
    ]  # fmt: skip
    for problem, examples, wrong in sorted(groups):
        runs = [result["ways"] for result in groups[problem, examples, wrong]]
        for way in runs[0]:
            own = [run[way] for run in runs]
            # Newer than some results.
            raw = [scores["raw_nll"] for scores in own if "raw_nll" in scores]
            minus = [run["learned"]["nll"] - run[way]["nll"] for run in runs]
            accuracy = [100 * (run["learned"]["accuracy"] - run[way]["accuracy"]) for run in runs]
            rows.append(
                [
                    problem, f"{examples:,}", f"{wrong:.0%}", str(len(runs)), way,
                    f"{statistics.fmean(raw):.3f}" if raw else "",
                    mean_with_error([scores["nll"] for scores in own]),
                    mean_with_error([100 * scores["accuracy"] for scores in own], "{:.1f}"),
                    f"{statistics.fmean(scores['trainings'] for scores in own):.0f}",
                    f"{statistics.median(scores['cost'] for scores in own):.1f}",
                    "" if way == "learned" else mean_with_error(minus, "{:+.3f}"),
                    "" if way == "learned" else mean_with_error(accuracy, "{:+.1f}"),
                ]
            )  # fmt: skip
    return markdown(rows)


COLORS = {"default": "tab:gray", "grid": "tab:blue", "learned": "tab:orange"}
SHOWN = {"digits, MLP": 800, "digits, convolutions": 1000}


def figures(results: list[Result]) -> dict[str, Figure]:
    """The README's: NLL by the share of wrong labels, and the cost, of two networks."""
    figure = Figure(figsize=(8.5, 2.9), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    groups = grouped(results, "problem", "examples")
    for axis, (problem, examples) in zip(axes, SHOWN.items(), strict=False):
        runs = groups[problem, examples]
        shares = sorted({run["config"]["wrong"] for run in runs})
        for i, way in enumerate(COLORS):
            values = [
                [run["ways"][way]["nll"] for run in runs if run["config"]["wrong"] == share]
                for share in shares
            ]
            axis.bar(
                [j + 0.27 * (i - 1) for j in range(len(shares))],
                [statistics.fmean(v) for v in values],
                0.25, yerr=[standard_error(v) for v in values], color=COLORS[way], label=way,
            )  # fmt: skip
        axis.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
        axis.set_xlabel("wrong labels")
        axis.set_title(f"{problem}, {examples:,}", fontsize=9)
    axes[0].set_ylabel("test NLL (nats)")
    costs = [
        statistics.median(run["ways"][way]["cost"] for run in results if way in run["ways"])
        for way in COLORS
    ]
    bars = axes[2].barh(range(3), costs, color=list(COLORS.values()))
    axes[2].bar_label(bars, [f"{cost:.1f}" for cost in costs], padding=2, fontsize=8)
    axes[2].set_yticks(range(3), ["default", "grid of seven", "learned"])
    axes[2].invert_yaxis()
    axes[2].set_xlabel("CPU time, in trainings")
    axes[2].spines[["top", "right"]].set_visible(False)
    return {"summary": figure}


main = study(
    "weight_decay_study", __doc__, run, tasks, table, problems=PROBLEMS, seeds=5, figures=figures
)

if __name__ == "__main__":
    sys.exit(main())
