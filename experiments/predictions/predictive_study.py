"""Why does the Laplace predictive lose to the MAP, and what repairs it? Each factor's nats.

The networks have about a thousand parameters, so that the GGN is one dense matrix: an MLP and two
CNNs on digits, with none or 20 % of the labels flipped in all splits, and an MLP on concrete. On
each network at its MAP, three choices vary:

- the covariance: the dense GGN, its blocks, K-FAC and EKFAC with both modes, its diagonal, the last
  layer, or only the directions that the data determine,
- δ: the default, found post hoc, or learned online,
- s and τ: found on held-out data, or 1.

Rows are paired by network.

The finding (see the table) is that the dense GGN has the loss, too, and K-FAC does not increase it.
Most of the outputs' variance lies in directions about which the data say less than the prior.
Calibrating s removes the loss, mostly because s becomes nearly 0.

``make predictive-study`` runs the missing ones of 63 runs, a quarter of an hour of one core.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from experiments.data import data_file
from experiments.data.uci import UCI
from experiments.studies import markdown, mean_with_error, study
from kfac_backend.curvature import kronecker_factors
from kfac_backend.eigenvalue_correction import corrected_factors
from kfac_backend.options import CurvatureOptions, Likelihood
from marglik.data import TensorBatches
from marglik.models import MLP
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import PriorGroups, weight_decay_to_precision
from marglik.posterior.subset import last_layer
from marglik.prediction.calibration import HeldOut, fit_calibration
from marglik.storage.provenance import environment
from marglik.training.loop import OnlineTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer
from marglik.training.post_hoc import maximize_evidence
from marglik.training.schedule import Schedule

__all__ = ["Config", "Dense", "run", "table"]

TEST = 300
SIZES = (100, 400, 1400)
"""Numbers of examples."""
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
}
CALIBRATIONS = {
    "raw": "s = τ = 1",
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
                delta, sigma = _hyperparameters(precision, posterior, posteriors)
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
        "seconds": time.process_time() - started,
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
    result = {
        "default": whole,
        "scalar": whole,
        "layerwise": structures,
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
    splits = UCI("concrete", split, data_file("uci.tar.gz")).load()
    (x, y), (x_test, y_test) = splits.train, splits.test
    return (x.double(), y.double()), (x_test.double(), y_test.double())


def _train(config: Config, train: Pair, learned: bool) -> Posterior:
    """A network at its MAP, with δ learned online by K-FAC expand's evidence, or the default δ."""
    problem = PROBLEMS[config.problem]
    model = problem.make_model().double()
    loader = TensorBatches(*train, 32, shuffle=True, seed=config.seed)
    epochs = max(40, math.ceil(config.steps / len(loader)))
    regression = problem.likelihood == "regression"
    optimizer, scheduler = build_optimizer(
        model,
        OptimizerConfig(lr=0.02 if regression else 0.05),
        epochs * len(loader),
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
                average=None,
            ),
            scheduler=scheduler,
            curvature_from="pass",
            curvature_loader=TensorBatches(*train, 256),
        )
        .run()
        .laplace
    )


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


def _bounds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [0, *ends[:-1]], ends


def _hyperparameters(
    precision: str, posterior: Posterior, posteriors: Mapping[str, Posterior]
) -> tuple[Tensor, float]:
    """δ and σ by K-FAC expand's evidence for all structures."""
    delta, sigma = posterior.prior_precision, float(posterior.sigma_noise)
    if precision in ("online", "default"):
        return delta, sigma
    own = posteriors["expand"]
    own.prior_precision, own.sigma_noise = delta, sigma
    maximize_evidence(own, "scalar" if precision == "scalar" else "layerwise")
    return own.prior_precision.expand(own.n_layers), float(own.sigma_noise)


# Calibration


def _calibrated(held_out: HeldOut, test: HeldOut, config: Config) -> dict[str, Any]:
    """Test NLL of each calibration, with the s and τ (for regression σ) that were found."""
    C = held_out.f.shape[1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(config.test_samples, C, generator=generator, dtype=torch.float64)
    test_loss = test.loss("mc", noise)
    fit = fit_calibration(held_out, "mc", config.samples)
    sharpness = test.sigma_noise

    def pair(calibration: Any) -> tuple[float, float]:
        return (
            calibration.covariance_scale,
            calibration.sigma_noise or calibration.output_temperature,
        )

    chosen = {
        "raw": (1.0, sharpness),
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


# Tables, from JSON alone

Cell = tuple[str, str, str]
"""Precision, structure, calibration."""
Run = dict[str, Any]
Difference = tuple[str, Cell, Cell] | tuple[str, Cell, Cell, str]
"""Name, two cells whose test NLL is subtracted, and the problem if it is one alone."""

REGIMES: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda c: c["problem"] != "concrete",
    "N = 100": lambda c: c["problem"] != "concrete" and c["num_examples"] == 100,
    "N = 400": lambda c: c["problem"] != "concrete" and c["num_examples"] == 400,
    "N = 1,400": lambda c: c["problem"] != "concrete" and c["num_examples"] == 1400,
    "clean": lambda c: c["problem"] != "concrete" and not c["flipped"],
    "flipped": lambda c: c["problem"] != "concrete" and c["flipped"] > 0,
    "concrete": lambda c: c["problem"] == "concrete",
}


def table(runs: Sequence[Run]) -> str:
    """All tables as Markdown; differences of test NLL in nats, paired, ± standard error."""
    seeds = len({r["config"]["seed"] for r in runs})
    parts = [
        f"{len(runs)} runs, {seeds} seeds. Test NLL in nats; negative differences are gains. Means "
        "over seeds, of each seed's mean over the runs of a column, ± standard error over seeds. "
        "The columns but the last are digits; concrete has σ in place of τ.",
    ]
    for calibration in ("raw", "both"):
        title = CALIBRATIONS[calibration]
        parts += [f"## The structure, {title}", _differences(runs, _of_structures(calibration))]
        parts += [f"## The precision, {title}", _differences(runs, _of_precisions(calibration))]
    for precision in ("layerwise", "online"):
        for structure in ("full", "expand"):
            parts.append(f"## s and τ: {STRUCTURES[structure]}, δ {PRECISIONS[precision]}")
            parts.append(_differences(runs, _of_calibrations(precision, structure)))
        parts.append(f"## Variance: δ {PRECISIONS[precision]}")
        parts.append(
            _by_regime(
                runs,
                {
                    "undetermined variance, %, full GGN": lambda r, p=precision: (
                        100 * _undetermined(r, p)
                    ),
                    "s > 0, %, full GGN": lambda r, p=precision: (
                        100.0 * (r["cells"][p]["full"]["chosen"]["both"][0] > 0)
                    ),
                },
                "{:.0f}",
            )
        )
    return "\n\n".join(parts)


def _of_structures(calibration: str) -> list[Difference]:
    """From the dense posterior to the others, with the same δ and σ."""

    def between(name: str, first: str, second: str, *problem: str) -> Any:
        return name, *(("layerwise", key, calibration) for key in (first, second)), *problem

    return [
        between("determined directions alone − full GGN", "determined", "full"),
        between("exact blocks − full GGN", "blocks", "full"),
        between("K-FAC expand − exact blocks", "expand", "blocks"),
        between("K-FAC expand − full GGN", "expand", "full"),
        between("eigenvalue correction of expand", "expand corrected", "expand"),
        between("eigenvalue correction of reduce", "reduce corrected", "reduce"),
        between("reduce − expand, flattened", "reduce", "expand", "cnn"),
        between("reduce − expand, average pooling", "reduce", "expand", "gap"),
        between("diagonal − full GGN", "diagonal", "full"),
        between("last layer − full GGN", "last", "full"),
        between("last layer: K-FAC − full GGN", "last expand", "last"),
    ]


def _of_precisions(calibration: str) -> list[Difference]:
    names = {"default": "default δ", "scalar": "one δ", "online": "learned online"}
    found: list[Difference] = [
        (
            f"{name} − layerwise, {STRUCTURES[structure]}",
            (key, structure, calibration),
            ("layerwise", structure, calibration),
        )
        for structure in ("full", "expand")
        for key, name in names.items()
    ]
    own = "scaled MAP" if calibration == "both" else "MAP"
    return [
        *found,
        ("learned online, MAP alone", ("online", "full", own), ("layerwise", "full", own)),
    ]


def _of_calibrations(precision: str, structure: str) -> list[Difference]:
    def between(name: str, first: str, second: str) -> Difference:
        return name, (precision, structure, first), (precision, structure, second)

    return [
        between("Laplace − MAP", "raw", "MAP"),
        between("s and τ − Laplace", "both", "raw"),
        between("MAP with τ − MAP", "scaled MAP", "MAP"),
        between("s and τ − MAP with τ", "both", "scaled MAP"),
    ]


def _differences(runs: Sequence[Run], differences: Sequence[Difference]) -> str:
    def value(run_: Run, first: Cell, second: Cell, *problem: str) -> float | None:
        a, b = _nll(run_, first), _nll(run_, second)
        if a is None or b is None or run_["config"]["problem"] not in (problem or PROBLEMS):
            return None
        return a - b

    rows = {name: (lambda r, cells=cells: value(r, *cells)) for name, *cells in differences}
    return _by_regime(runs, rows, "{:+.3f}")


def _by_regime(
    runs: Sequence[Run], rows: Mapping[str, Callable[[Run], float | None]], form: str
) -> str:
    """A row per value, a column per regime: means over seeds of each seed's mean over its runs."""
    lines = [["", *REGIMES]]
    for name, value in rows.items():
        cells = []
        for is_in in REGIMES.values():
            found: dict[int, list[float]] = {}
            for run_ in runs:
                if is_in(run_["config"]) and (v := value(run_)) is not None:
                    found.setdefault(run_["config"]["seed"], []).append(v)
            means = [statistics.mean(values) for values in found.values()]
            cells.append(mean_with_error(means, form) if means else "")
        lines.append([name, *cells])
    return markdown(lines)


def _nll(run_: Run, cell: Cell) -> float | None:
    precision, structure, calibration = cell
    found = run_["cells"].get(precision, {}).get(structure)
    return None if found is None else found["nll"][calibration]


def _undetermined(run_: Run, precision: str) -> float:
    """Share of the test outputs' variance in directions about which the prior says more."""
    found = run_["cells"][precision]
    return 1 - found["determined"]["variance"] / found["full"]["variance"]


def configs(seeds: int) -> list[Config]:
    """All runs; regression has no labels to flip."""
    return [
        Config(problem, number, flipped, seed)
        for seed in range(seeds)
        for problem, made in PROBLEMS.items()
        for number in SIZES
        for flipped in ((0.0, FLIPPED) if made.likelihood == "classification" else (0.0,))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing ones, and report."""
    return study(
        "predictive_study", __doc__, run, lambda o: configs(o.seeds), table, arguments, seeds=3
    )


if __name__ == "__main__":
    sys.exit(main())
