"""Why does the Laplace predictive lose to the MAP, and what repairs it? Each factor's nats.

The networks have about a thousand parameters, so that the GGN is one dense matrix: an MLP and two
CNNs on digits, with none or 20 % of the labels flipped in all splits, and an MLP on concrete. On
each network at its MAP, three choices vary:

- the covariance: the dense GGN, its blocks, K-FAC and EKFAC with both modes, its diagonal, the last
  layer, or only the directions that the data determine,
- δ: the default, found post hoc, or learned online,
- s and τ: one of them found on held-out data, both, or none.

Rows are paired by network.

The finding (see the table) is that the dense GGN has the loss, too, and K-FAC does not increase it.
Most of the outputs' variance lies in directions about which the data say less than the prior.
Calibrating s removes the loss, mostly because s becomes nearly 0.

``make predictive-study`` runs the missing ones; ``--quick`` runs one seed. Each run is a JSON file
in ``results/predictive_study/`` of the working directory.
"""

import argparse
import json
import math
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from experiments.data import data_file
from experiments.studies import (
    add_study_options,
    mean_with_error,
    save_figure,
    standard_error,
    study_folder,
)
from kfac_backend.correction import corrected_factors
from kfac_backend.factors import kronecker_factors
from kfac_backend.files import write_file
from kfac_backend.options import CurvatureOptions, Likelihood
from marglik.data.tensors import TensorBatches
from marglik.models import MLP
from marglik.posterior.hyperparameters import (
    LARGEST_PRECISION,
    SMALLEST_PRECISION,
    Hyperparameters,
)
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import PriorGroups, weight_decay_to_precision
from marglik.posterior.subset import last_layer
from marglik.prediction.calibration import HeldOut, fit_calibration
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json
from marglik.training.loop import OnlineTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer
from marglik.training.post_hoc import maximize_evidence
from marglik.training.update_schedule import Schedule

__all__ = ["Config", "Dense", "figure", "run", "table"]

TEST = 300
ROUNDS = (100, 1400), (400,)
"""Numbers of examples; the extremes run first with all seeds, so that they can be studied early."""
FLIPPED = 0.2


def cnn(pooling: str) -> nn.Module:
    """A CNN for 8×8 images: two convolutions, and a linear layer on all pixels or their mean."""
    if pooling == "flatten":
        convolutions = nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 10))
    convolutions = nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


@dataclass(frozen=True)
class Problem:
    """A network and its data."""

    title: str
    make_model: Callable[[], nn.Module]
    likelihood: Likelihood = "classification"
    shares_weights: bool = True
    """Whether expand and reduce differ."""


PROBLEMS = {
    "mlp": Problem("digits, MLP", lambda: MLP(64, (12, 12)), shares_weights=False),
    "cnn": Problem("digits, CNN, flattened", lambda: cnn("flatten")),
    "gap": Problem("digits, CNN, average pooling", lambda: cnn("average")),
    "concrete": Problem(
        "concrete, MLP", lambda: MLP(8, (24, 24), 1, "tanh"), "regression", shares_weights=False
    ),
}

STRUCTURES = {
    "full": "full GGN",
    "blocks": "exact blocks, one per tensor",
    "expand": "K-FAC, expand",
    "reduce": "K-FAC, reduce",
    "expand corrected": "EKFAC, expand",
    "reduce corrected": "EKFAC, reduce",
    "diagonal": "diagonal",
    "determined": "full GGN, determined directions",
    "last": "last layer, full GGN",
    "last expand": "last layer, K-FAC",
}
PRECISIONS = {
    "online": "learned online",
    "default": "that of the weight decay",
    "scalar": "post hoc, one",
    "layerwise": "post hoc, layerwise",
    "own": "post hoc, layerwise, each structure's own evidence",
}
CALIBRATIONS = {
    "raw": "s = τ = 1",
    "tau": "τ",
    "s": "s",
    "both": "s and τ",
    "scaled MAP": "MAP, τ",
    "MAP": "MAP",
}


@dataclass(frozen=True)
class Config:
    """Configuration of one run: network, number of examples, flipped labels and seed."""

    problem: str = "mlp"
    num_examples: int = 400
    """Number of examples; a fifth of them, and at least 50, are held out."""
    flipped: float = 0.0
    """Share of labels changed to a random other class, in all splits, so that held-out and test
    data have the distribution of the training data."""
    seed: int = 0
    steps: int = 1000
    """Least number of SGD's steps, rounded up to whole epochs; there are at least 40 epochs."""
    weight_decay: float = 5e-4
    samples: int = 50
    """Number of samples of the outputs while s and τ are searched."""
    test_samples: int = 200

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.problem}_{self.num_examples}_{round(100 * self.flipped)}_{self.seed}"


Pair = tuple[Tensor, Tensor]


def run(config: Config) -> dict[str, Any]:
    """Test NLL of every precision, structure and calibration with one seed."""
    torch.set_num_threads(1)
    started = time.process_time()
    likelihood = PROBLEMS[config.problem].likelihood
    train, held_out, test = _data(config)
    cells: dict[str, dict[str, Any]] = {}
    networks: dict[str, Any] = {}
    for learned in (False, True):
        torch.manual_seed(config.seed)
        posterior = _train(config, train, learned)
        dense = Dense.of(posterior.model, train, likelihood)
        posteriors = _posteriors(posterior, config, train)
        x = torch.cat([held_out[0], test[0]])
        f, J = output_jacobians(posterior.model, x)
        for precision, structures in _cells(config, learned).items():
            cells[precision] = {}
            for structure in structures:
                delta, sigma = _hyperparameters(precision, structure, posterior, posteriors, dense)
                if structure in posteriors or structure == "last expand":
                    own = posteriors[structure.removeprefix("last ")]
                    own.prior_precision, own.sigma_noise = delta, sigma
                    layers = "last" if structure.startswith("last") else "all"
                    covariance = own.output_distribution(x, layers)[1]
                else:
                    covariance = dense.covariance(J, delta, sigma, structure)
                M = len(held_out[1])
                cells[precision][structure] = _calibrated(
                    HeldOut(likelihood, f[:M], covariance[:M], held_out[1], sigma),
                    HeldOut(likelihood, f[M:], covariance[M:], test[1], sigma),
                    config,
                ) | {"delta": delta.tolist(), "sigma": sigma}
        networks["online" if learned else "default"] = _network(posterior, train, test)
    return {
        "config": asdict(config),
        "problem": {"title": PROBLEMS[config.problem].title, "likelihood": likelihood},
        "num_parameters": posterior.n_params,
        "num_examples": {
            "train": len(train[1]),
            "held_out": len(held_out[1]),
            "test": len(test[1]),
        },
        "cells": cells,
        "networks": networks,
        "cpu_seconds": time.process_time() - started,
        **environment(torch.device("cpu")),
    }


def _structures(config: Config) -> list[str]:
    shares = PROBLEMS[config.problem].shares_weights
    return [name for name in STRUCTURES if shares or not name.startswith("reduce")]


def _cells(config: Config, learned: bool) -> dict[str, list[str]]:
    """Precision -> structures, for one of the two networks."""
    structures = _structures(config)
    if learned:
        return {"online": structures}
    whole = [name for name in structures if name in ("full", "expand", "reduce")]
    own = ("full", "blocks", "reduce", "diagonal")
    result = {
        "default": whole,
        "scalar": whole,
        "layerwise": structures,
        "own": [name for name in structures if name in own],
    }
    if PROBLEMS[config.problem].likelihood == "regression":
        del result["default"]  # a default σ would be as arbitrary as δ
    return result


# Data and networks


def _data(config: Config) -> tuple[Pair, Pair, Pair]:
    """Training, held-out and test data in float64."""
    generator = torch.Generator().manual_seed(config.seed)
    if PROBLEMS[config.problem].likelihood == "regression":
        (x, y), (x_test, y_test) = _concrete(config.seed)
    else:
        from sklearn.datasets import load_digits  # it takes a second

        digits: Any = load_digits()
        order = torch.randperm(len(digits.target), generator=generator)
        x = torch.from_numpy(digits.images)[:, None][order]
        x = (x - x.mean()) / x.std()
        y = torch.from_numpy(digits.target)[order]
        other = torch.randint(1, 10, y.shape, generator=generator)
        flips = torch.rand(y.shape, generator=generator) < config.flipped
        y = torch.where(flips, (y + other) % 10, y)
        x, x_test, y, y_test = x[TEST:], x[:TEST], y[TEST:], y[:TEST]
    n = min(config.num_examples, len(y))
    out = max(50, n // 5)
    return (x[out:n], y[out:n]), (x[:out], y[:out]), (x_test, y_test)


def _concrete(split: int) -> tuple[Pair, Pair]:
    """Training and test part of a published split, standardised by the training part."""
    with tarfile.open(data_file("uci.tar.gz")) as files:

        def read(name: str) -> np.ndarray:
            return np.loadtxt(files.extractfile(f"uci/concrete/{name}.txt"))  # pyright: ignore

        data, features = read("data"), read("index_features").astype(int)
        target = read("index_target").astype(int).reshape(-1)
        rows = [read(f"index_{part}_{split}").astype(int) for part in ("train", "test")]
    mean, std = data[rows[0]].mean(0), data[rows[0]].std(0)
    data = torch.from_numpy((data - mean) / std)
    train, test = ((data[r][:, features], data[r][:, target]) for r in rows)
    return train, test


def _train(config: Config, train: Pair, learned: bool) -> Posterior:
    """A network at its MAP, with δ learned online by K-FAC expand's evidence, or the default δ."""
    problem = PROBLEMS[config.problem]
    model = problem.make_model().double()
    loader = TensorBatches(*train, 32, shuffle=True, seed=config.seed)
    epochs = max(40, math.ceil(config.steps / len(loader)))
    regression = problem.likelihood == "regression"
    optimizer, scheduler = build_optimizer(
        model, OptimizerConfig(lr=0.02 if regression else 0.05), epochs * len(loader)
    )
    options = CurvatureOptions(kfac_approx="expand")
    hyperparameters = Hyperparameters(
        PriorGroups.from_model(model),
        weight_decay_to_precision(config.weight_decay, len(train[1])),
        learn_sigma_noise=learned and regression,
    )
    return (
        OnlineTraining(
            model,
            optimizer,
            loader,
            problem.likelihood,
            hyperparameters,
            lambda delta, sigma: Posterior(
                model, problem.likelihood, options, prior_precision=delta, sigma_noise=sigma
            ),
            Schedule(
                epochs,
                every=max(1, epochs // 10) if learned else epochs,
                burn_in=epochs // 10,
                steps=100 if learned else 0,
                keep="last",
            ),
            scheduler=scheduler,
            curvature_loader=TensorBatches(*train, 256),
        )
        .run()
        .laplace
    )


def _network(posterior: Posterior, train: Pair, test: Pair) -> dict[str, float]:
    """The network's RMSE or accuracy on training and test data."""
    model = posterior.model
    result = {}
    for split, (x, y) in {"train": train, "test": test}.items():
        with torch.no_grad():
            f = model(x)
        if posterior.likelihood == "regression":
            result[f"{split} RMSE"] = (f - y).square().mean().sqrt().item()
        else:
            result[f"{split} accuracy"] = (f.argmax(-1) == y).double().mean().item()
    return result


# Posteriors


def _posteriors(posterior: Posterior, config: Config, train: Pair) -> dict[str, Posterior]:
    """Structure -> K-FAC posterior at the network's parameters."""
    loader = TensorBatches(*train, 256)
    result = {}
    for structure in _structures(config):
        mode, _, correction = structure.partition(" ")
        if mode not in ("expand", "reduce"):
            continue
        options = CurvatureOptions(kfac_approx=mode)  # pyright: ignore[reportArgumentType]
        factors = kronecker_factors(posterior.model, loader, posterior.likelihood, options)
        if correction:
            factors = corrected_factors(factors, posterior.model, loader)
        own = Posterior(posterior.model, posterior.likelihood, options)
        own.restore(factors)
        result[structure] = own
    return result


@torch.no_grad()
def output_jacobians(model: nn.Module, x: Tensor) -> Pair:
    """Outputs f (N, C) and Jacobians J (N, C, P), by reverse mode, example by example."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def f(values: dict[str, Tensor], x_n: Tensor) -> Tensor:
        return functional_call(model, values, (x_n[None],))[0]

    parts = vmap(jacrev(f), (None, 0))(parameters, x)
    return model(x), torch.cat([part.flatten(2) for part in parts.values()], -1)


@dataclass(frozen=True)
class Dense:
    """The GGN of all parameters as one matrix, and the posterior that it makes."""

    ggn: Tensor
    """GGN H = Σ_n J_nᵀ Λ_n J_n at σ = 1, (P, P)."""
    sizes: list[int]
    """Number of parameters of each tensor."""
    squared_norms: Tensor
    """Squared norm ‖θ‖² of each tensor."""
    loss: float
    """Loss Σ ℓ over the data (nats) at σ = 1."""
    num_targets: int
    """Number of targets, for regression's normaliser."""
    last: slice
    """Slice of the last layer's parameters."""
    likelihood: Likelihood

    @staticmethod
    def of(model: nn.Module, train: Pair, likelihood: Likelihood) -> "Dense":
        """At the network's parameters."""
        x, y = train
        parameters = dict(model.named_parameters())
        sizes = [p.numel() for p in parameters.values()]
        ggn = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
        loss = 0.0
        for x_b, y_b in zip(x.split(200), y.split(200), strict=True):
            f, J = output_jacobians(model, x_b)
            if likelihood == "regression":
                loss += 0.5 * (f - y_b).square().sum().item()
            else:
                loss += nn.functional.cross_entropy(f, y_b, reduction="sum").item()
                # Λ = diag(p) − ppᵀ = R Rᵀ with R = (I − p 1ᵀ) diag(√p).
                p = f.softmax(-1)
                J = p.sqrt()[..., None] * (J - (p[..., None] * J).sum(1, keepdim=True))
            ggn += J.flatten(0, 1).T @ J.flatten(0, 1)
        name = last_layer(model, x[:2])
        inside = [i for i, key in enumerate(parameters) if key.startswith(f"{name}.")]
        begin = sum(sizes[: inside[0]])
        return Dense(
            ggn,
            sizes,
            torch.stack([p.detach().square().sum() for p in parameters.values()]),
            loss,
            y.numel(),
            slice(begin, begin + sum(sizes[i] for i in inside)),
            likelihood,
        )

    def _diagonal(self, delta: Tensor) -> Tensor:
        """Prior precision δ of each parameter."""
        delta = delta.double().expand(len(self.sizes))
        return delta.repeat_interleave(torch.tensor(self.sizes))

    def masked(self, structure: str) -> Tensor:
        """The GGN; entries that the structure leaves out are zero."""
        if structure == "diagonal":
            return torch.diag(self.ggn.diagonal())
        if structure == "blocks":
            return torch.block_diag(*(self.ggn[s, s] for s in map(slice, *_bounds(self.sizes))))
        return self.ggn

    def covariance(self, J: Tensor, delta: Tensor, sigma: float, structure: str = "full") -> Tensor:
        """Covariance J (H/σ² + P₀)⁻¹ Jᵀ of each example's outputs, (N, C, C).

        Args:
            J: (N, C, P).
            delta: one for each tensor, or one for all.
            sigma: noise of regression.
            structure: "full", "blocks", "diagonal", "last", or "determined": directions about
                which the data say more than the prior, eigenvectors of P₀^-½ H P₀^-½ / σ² with an
                eigenvalue of at least 1; the others have no variance.
        """
        H, prior = self.masked(structure) / sigma**2, self._diagonal(delta)
        if structure == "last":
            H, prior, J = H[self.last, self.last], prior[self.last], J[..., self.last]
        if structure == "diagonal":
            return (J / (H.diagonal() + prior)) @ J.mT
        if structure == "determined":
            root = prior.sqrt()
            values, vectors = torch.linalg.eigh(H / root / root[:, None])
            J = (J / root) @ vectors[:, values >= 1]
            return (J / (values[values >= 1] + 1)) @ J.mT
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(H + prior.diag()))
        return (J.flatten(0, 1) @ covariance).view_as(J) @ J.mT

    def best_precision(
        self, delta: Tensor, sigma: float, structure: str = "full"
    ) -> tuple[Tensor, float]:
        """δ per tensor, and σ of regression, with the highest Laplace evidence, from a start."""
        from scipy.optimize import minimize  # imported here, since it takes long

        H, regression = self.masked(structure), self.likelihood == "regression"
        start = delta.double().expand(len(self.sizes)).log().tolist()
        bounds = [(math.log(SMALLEST_PRECISION), math.log(LARGEST_PRECISION))] * len(start)
        if regression:
            start.append(math.log(sigma))
            bounds.append((math.log(1e-6), math.log(1e6)))
        sizes = torch.tensor(self.sizes, dtype=torch.float64)

        def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
            v = torch.tensor(values, dtype=torch.float64)
            delta = v[: len(self.sizes)].exp()
            log_sigma = v[-1].item() if regression else 0.0
            squared = math.exp(2 * log_sigma)
            prior = self._diagonal(delta)
            if structure == "diagonal":
                precision = H.diagonal() / squared + prior
                log_det, variances = precision.log().sum(), 1 / precision
            else:
                root, fails = torch.linalg.cholesky_ex(H / squared + prior.diag())
                if (
                    fails
                ):  # a step so long that δ is lost in rounding: the search takes a shorter one
                    return 1e12, np.zeros(len(values))
                log_det = 2 * root.diagonal().log().sum()
                variances = torch.cholesky_inverse(root).diagonal()
            # tr(Σ_gg) δ_g, the share of each tensor that the prior determines.
            shares = torch.stack([p.sum() for p in variances.split(self.sizes)]) * delta
            scatter = delta * self.squared_norms
            value = 0.5 * (log_det - prior.log().sum() + scatter.sum()) + self.loss / squared
            gradient = 0.5 * (shares - sizes + scatter)
            if regression:
                value = value + self.num_targets * log_sigma
                of_sigma = self.num_targets - 2 * self.loss / squared - (sizes - shares).sum()
                gradient = torch.cat([gradient, of_sigma[None]])
            return value.item(), gradient.numpy()

        found = minimize(
            objective, start, jac=True, method="L-BFGS-B", bounds=bounds,
            options={"maxiter": 60, "ftol": 1e-8},
        )  # fmt: skip
        values = torch.tensor(found.x, dtype=torch.float64).exp()
        return values[: len(self.sizes)], values[-1].item() if regression else 1.0


def _bounds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [0, *ends[:-1]], ends


def _hyperparameters(
    precision: str,
    structure: str,
    posterior: Posterior,
    posteriors: Mapping[str, Posterior],
    dense: Dense,
) -> tuple[Tensor, float]:
    """δ and σ by K-FAC expand's evidence for all structures; "own" uses each structure's."""
    delta, sigma = posterior.prior_precision, float(posterior.sigma_noise)
    if precision in ("online", "default"):
        return delta, sigma
    own = posteriors[structure if precision == "own" and structure in posteriors else "expand"]
    own.prior_precision, own.sigma_noise = delta, sigma
    maximize_evidence(own, "scalar" if precision == "scalar" else "layerwise")
    delta, sigma = own.prior_precision.expand(own.n_layers), float(own.sigma_noise)
    if precision == "own" and structure in ("full", "blocks", "diagonal"):
        return dense.best_precision(delta, sigma, structure)
    return delta, sigma


# Calibration


def _calibrated(held_out: HeldOut, test: HeldOut, config: Config) -> dict[str, Any]:
    """Test NLL of each calibration, with the s and τ (for regression σ) that were found."""
    C = held_out.f.shape[1]
    few, many = (
        torch.randn(n, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for n in (config.samples, config.test_samples)
    )
    loss, test_loss = held_out.loss("mc", few), test.loss("mc", many)
    fit = fit_calibration(held_out, "mc", config.samples)
    sharpness = test.sigma_noise

    def pair(calibration: Any) -> tuple[float, float]:
        return (
            calibration.covariance_scale,
            calibration.sigma_noise or calibration.output_temperature,
        )

    prior = 2 * len(held_out.f)

    def of_tau(log_tau: float) -> float:
        tau = sharpness * math.exp(log_tau)
        return loss(torch.tensor(1.0), torch.tensor(tau)).item() + log_tau**2 / prior

    def of_s(log_s: float) -> float:
        return loss(torch.tensor(math.exp(log_s)), torch.tensor(sharpness)).item()

    log_tau, _ = _minimize(of_tau, -3, 3)
    log_s, least = _minimize(of_s, -12, 4)
    s = 0.0 if loss(None, torch.tensor(sharpness)).item() <= least else math.exp(log_s)
    chosen = {
        "raw": (1.0, sharpness),
        "tau": (1.0, sharpness * math.exp(log_tau)),
        "s": (s, sharpness),
        "both": pair(fit.calibration),
        "scaled MAP": pair(fit.map_calibration),
        "MAP": (0.0, sharpness),
    }
    assert test.covariance is not None
    variance = test.covariance.diagonal(dim1=1, dim2=2).mean().item()
    return {
        "nll": {
            name: test_loss(torch.tensor(s) if s else None, torch.tensor(tau)).item()
            for name, (s, tau) in chosen.items()
        },
        "chosen": chosen,
        "variance": variance,
    }


def _minimize(f: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Argument and value of a function's minimum, by a grid and then Brent's method."""
    from scipy.optimize import minimize_scalar

    grid = np.linspace(low, high, 9)
    values = [f(v) for v in grid]
    best = int(np.argmin(values))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found: Any = minimize_scalar(f, bounds=around, method="bounded", options={"xatol": 0.02})
    return min((found.x, found.fun), (grid[best], values[best]), key=lambda p: p[1])


# Tables and figure, from JSON alone

Cell = tuple[str, str, str]
"""Precision, structure, calibration."""
Run = dict[str, Any]


@dataclass(frozen=True)
class Factor:
    """Effect of one choice on the test NLL: the first cell's minus the second's."""

    name: str
    first: Cell
    second: Cell
    problems: tuple[str, ...] = ("mlp", "cnn", "gap", "concrete")


def _factors_of_structure(calibration: str) -> list[Factor]:
    """Effects of the structure, from the dense posterior to the others; with the same δ and σ."""

    def factor(name: str, first: str, second: str, *problems: str) -> Factor:
        cells = [("layerwise", structure, calibration) for structure in (first, second)]
        return Factor(name, cells[0], cells[1], problems or Factor.problems)

    shared = "cnn", "gap"
    return [
        factor("determined directions alone − full GGN", "determined", "full"),
        factor("exact blocks − full GGN", "blocks", "full"),
        factor("Kronecker: expand − exact blocks", "expand", "blocks"),
        factor("both: expand − full GGN", "expand", "full"),
        factor("eigenvalue correction of expand", "expand corrected", "expand"),
        factor("eigenvalue correction of reduce", "reduce corrected", "reduce", *shared),
        factor("reduce − expand, flattened", "reduce", "expand", "cnn"),
        factor("reduce − expand, average pooling", "reduce", "expand", "gap"),
        factor("..., corrected, flattened", "reduce corrected", "expand corrected", "cnn"),
        factor("..., corrected, average pooling", "reduce corrected", "expand corrected", "gap"),
        factor("diagonal − full GGN", "diagonal", "full"),
        factor("last layer − full GGN", "last", "full"),
        factor("last layer: K-FAC − full GGN", "last expand", "last"),
    ]


def _factors_of_precision(calibration: str) -> list[Factor]:
    result = [
        Factor(f"{name}, {STRUCTURES[structure]}", *cells)
        for structure in ("full", "expand")
        for name, *cells in (
            (
                "default δ − layerwise",
                ("default", structure, calibration),
                ("layerwise", structure, calibration),
            ),
            (
                "one δ − layerwise",
                ("scalar", structure, calibration),
                ("layerwise", structure, calibration),
            ),
            (
                "its own evidence − K-FAC's",
                ("own", structure, calibration),
                ("layerwise", structure, calibration),
            ),
            (
                "learned online − layerwise",
                ("online", structure, calibration),
                ("layerwise", structure, calibration),
            ),
        )
        if not (structure == "expand" and name.startswith("its own"))
    ]
    own_map = "scaled MAP" if calibration == "both" else "MAP"
    cells = ("online", "full", own_map), ("layerwise", "full", own_map)
    return [*result, Factor("learned online, MAP alone", *cells)]


def _factors_of_calibration(precision: str, structure: str) -> list[Factor]:
    def factor(name: str, first: str, second: str) -> Factor:
        return Factor(name, (precision, structure, first), (precision, structure, second))

    return [
        factor("Laplace − MAP", "raw", "MAP"),
        factor("τ alone", "tau", "raw"),
        factor("s alone", "s", "raw"),
        factor("s and τ", "both", "raw"),
        factor("MAP with τ − MAP", "scaled MAP", "MAP"),
        factor("s and τ − MAP with τ", "both", "scaled MAP"),
    ]


REGIMES: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda c: c["problem"] != "concrete",
    "N = 100": lambda c: c["problem"] != "concrete" and c["num_examples"] == 100,
    "N = 400": lambda c: c["problem"] != "concrete" and c["num_examples"] == 400,
    "N = 1,400": lambda c: c["problem"] != "concrete" and c["num_examples"] == 1400,
    "clean": lambda c: c["problem"] != "concrete" and not c["flipped"],
    "flipped": lambda c: c["problem"] != "concrete" and c["flipped"] > 0,
    "concrete": lambda c: c["problem"] == "concrete",
}


def _of_seeds(
    runs: Sequence[Run], regime: str, value: Callable[[Run], float | None]
) -> list[float]:
    """Mean over a seed's runs of a regime, for each seed; runs without a value are left out."""
    found: dict[int, list[float]] = {}
    for run_ in runs:
        if REGIMES[regime](run_["config"]):
            v = value(run_)
            if v is not None:
                found.setdefault(run_["config"]["seed"], []).append(v)
    return [statistics.mean(values) for values in found.values()]


def _nll(run_: Run, cell: Cell) -> float | None:
    precision, structure, calibration = cell
    found = run_["cells"].get(precision, {}).get(structure)
    return None if found is None else found["nll"][calibration]


def _difference(factor: Factor) -> Callable[[Run], float | None]:
    def value(run_: Run) -> float | None:
        first, second = _nll(run_, factor.first), _nll(run_, factor.second)
        if first is None or second is None or run_["config"]["problem"] not in factor.problems:
            return None
        return first - second

    return value


def _mean(values: Sequence[float], sign: bool = True) -> str:
    return mean_with_error(values, "{:+.3f}" if sign else "{:.3f}") if values else ""


def _lines(head: str, rows: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [f"| {head} | {' | '.join(REGIMES)} |", "|---" * (len(REGIMES) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def _factor_lines(runs: Sequence[Run], head: str, factors: Sequence[Factor]) -> list[str]:
    rows = {
        factor.name: [_mean(_of_seeds(runs, regime, _difference(factor))) for regime in REGIMES]
        for factor in factors
    }
    return _lines(head, rows)


def table(runs: Sequence[Run]) -> str:
    """All tables as Markdown; differences of test NLL in nats, paired, ± standard error."""
    seeds = len({r["config"]["seed"] for r in runs})
    lines = [
        f"{len(runs)} runs, {seeds} seeds. Test NLL in nats; negative differences are gains. Means "
        "over seeds, of each seed's mean over the runs of a column, ± standard error over seeds. "
        "The columns but the last are digits; concrete has σ in place of τ.",
    ]
    for title, calibration in (("s = τ = 1", "raw"), ("s and τ by held-out data", "both")):
        lines += ["", f"## The structure, {title}", ""]
        lines += _factor_lines(runs, "post hoc, layerwise", _factors_of_structure(calibration))
        lines += ["", f"## The precision, {title}", ""]
        lines += _factor_lines(runs, "δ", _factors_of_precision(calibration))
    for precision in ("layerwise", "online"):
        for structure in ("full", "expand"):
            lines += ["", f"## s and τ: {STRUCTURES[structure]}, δ {PRECISIONS[precision]}", ""]
            lines += _factor_lines(runs, "", _factors_of_calibration(precision, structure))
    for precision in ("layerwise", "online"):
        lines += ["", f"## s and τ − MAP with τ: δ {PRECISIONS[precision]}", ""]
        lines += _factor_lines(
            runs,
            "",
            [
                Factor(name, (precision, key, "both"), (precision, key, "scaled MAP"))
                for key, name in STRUCTURES.items()
            ],
        )
        rows = {
            f"s > 0, %, {STRUCTURES[key]}": [
                _percent(_of_seeds(runs, regime, _positive_scale(precision, key)))
                for regime in REGIMES
            ]
            for key in ("full", "expand", "reduce", "last")
        }
        rows["median s, full GGN"] = [
            _median_scale(runs, regime, precision, "full") for regime in REGIMES
        ]
        rows["undetermined variance, %, full GGN"] = [
            _percent(_of_seeds(runs, regime, _undetermined(precision))) for regime in REGIMES
        ]
        lines += ["", *_lines("", rows)]
        lines += ["", f"## Test NLL, digits: δ {PRECISIONS[precision]}", ""]
        lines += [
            f"| | {' | '.join(CALIBRATIONS.values())} |",
            "|---" * (len(CALIBRATIONS) + 1) + "|",
        ]
        for key, name in STRUCTURES.items():
            cells = [
                _mean(_of_seeds(runs, "all", lambda r, c=(precision, key, c): _nll(r, c)), False)
                for c in CALIBRATIONS
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.0f}" if values else ""


def _positive_scale(precision: str, structure: str) -> Callable[[Run], float | None]:
    def value(run_: Run) -> float | None:
        found = run_["cells"].get(precision, {}).get(structure)
        return None if found is None else float(found["chosen"]["both"][0] > 0)

    return value


def _median_scale(runs: Sequence[Run], regime: str, precision: str, structure: str) -> str:
    scales = [
        run_["cells"][precision][structure]["chosen"]["both"][0]
        for run_ in runs
        if REGIMES[regime](run_["config"])
    ]
    return f"{statistics.median(scales):.2g}" if scales else ""


def _undetermined(precision: str) -> Callable[[Run], float | None]:
    """Share of the test outputs' variance in directions about which the prior says more."""

    def value(run_: Run) -> float | None:
        found = run_["cells"][precision]
        return 1 - found["determined"]["variance"] / found["full"]["variance"]

    return value


def figure(runs: Sequence[Run]) -> Figure:
    """Figure. Left: effects of the structures, raw. Right: effect of s beside τ, by regime."""
    drawing = Figure(figsize=(12, 5), layout="constrained")
    left, right = drawing.subplots(1, 2)
    factors = [
        Factor(
            "Laplace, full GGN − MAP", ("layerwise", "full", "raw"), ("layerwise", "full", "MAP")
        ),
        *_factors_of_structure("raw"),
        *_factors_of_precision("raw"),
    ]
    for axes, made in (
        (left, factors),
        (
            right,
            [
                Factor(name, ("layerwise", key, "both"), ("layerwise", key, "scaled MAP"))
                for key, name in STRUCTURES.items()
            ],
        ),
    ):
        regimes = ("clean", "flipped") if axes is left else ("N = 100", "N = 400", "N = 1,400")
        for k, regime in enumerate(regimes):
            points = [
                (i, values)
                for i, factor in enumerate(made)
                if (values := _of_seeds(runs, regime, _difference(factor)))
            ]
            axes.errorbar(
                [statistics.mean(v) for _, v in points],
                [i + 0.16 * (k - (len(regimes) - 1) / 2) for i, _ in points],
                xerr=[standard_error(v) if len(v) > 1 else 0.0 for _, v in points],
                fmt="o",
                ms=4,
                label=regime,
            )
        axes.axvline(0, color="gray", lw=0.8)
        axes.set_yticks(range(len(made)), [factor.name for factor in made], fontsize="small")
        axes.invert_yaxis()
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    left.set(xlabel="nats added to the test NLL, s = τ = 1")
    right.set(xlabel="nats: s and τ, minus MAP with τ")
    return drawing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing ones, write table and figure; returns the exit status."""
    parser = argparse.ArgumentParser(description="What each part of a Laplace predictive costs.")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; default: 3")
    parser.add_argument(
        "--quick", action="store_true", help="run only one seed, with 100 and 1,400 examples"
    )
    add_study_options(parser, jobs=False)
    options = parser.parse_args(arguments)
    folder = study_folder(parser, options, "predictive_study")
    seeds, rounds = (1, ROUNDS[:1]) if options.quick else (options.seeds, ROUNDS)
    # All in one process, as a run takes seconds, which is as long as importing torch.
    for config in [] if options.report else configs(seeds, rounds):
        path = folder / f"{config.name}.json"
        if not path.exists():
            found = run(config)
            write_json(path, found)
            print(f"{config.name}: {found['cpu_seconds']:.0f} s", flush=True)
    print(report(folder))
    print(f"Written to {folder}/")
    return 0


def configs(seeds: int, rounds: Sequence[Sequence[int]]) -> list[Config]:
    """All runs; regression has no labels to flip."""
    return [
        Config(problem, number, flipped, seed)
        for numbers in rounds
        for seed in range(seeds)
        for problem, made in PROBLEMS.items()
        for number in numbers
        for flipped in ((0.0, FLIPPED) if made.likelihood == "classification" else (0.0,))
    ]


def report(folder: Path) -> str:
    """Write table.md and a figure from the existing results; returns the tables."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    text = table(runs)
    write_file(folder / "table.md", (text + "\n").encode())
    save_figure(figure(runs), folder / "factors.png")
    return text


if __name__ == "__main__":
    sys.exit(main())
