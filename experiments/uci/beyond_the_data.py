"""Intervals of regression between and beyond the training inputs, beside a Gaussian process's.

Functions of one variable are drawn from a Gaussian process with the length scale 1; 100 inputs lie
in [-6, -2] and [2, 6], and targets have noise of σ = 0.1. So there is a gap of four length scales,
and there are three beyond each end. Each network learns its weight decays and σ with default
options; the Gaussian process of scikit-learn learns its length scale, its scale and its noise by
its own evidence: it is right about these functions, and so what can be reached at best.

Coverage is the share of noisy test targets in the 90 % intervals, by the distance to the nearest
training input. ``python -m experiments.uci.beyond_the_data`` runs the functions that are missing.
"""

import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import Tensor
from torch.nn.functional import gaussian_nll_loss
from torch.utils.data import DataLoader, TensorDataset

from experiments.studies import Result, markdown, mean_with_error, study
from marglik import (
    OnlineTraining,
    PriorLearner,
    laplace_predictive,
    map_predictive,
)
from marglik.models import MLP

NETWORKS = {
    "50 tanh": ((50,), "tanh"),
    "50, 50 tanh": ((50, 50), "tanh"),
    "50, 50 ReLU": ((50, 50), "relu"),
}
PROCESS = "Gaussian process"
SIGMA = 0.1
"""Of the targets' noise."""
EPOCHS = 400
NORMAL_95 = 1.6449
"""Standard deviations to either side of a Gaussian's 90 % interval."""
DISTANCES = {
    "at the data": (0.0, 0.1),
    "up to 1": (0.1, 1.0),
    "1 to 2": (1.0, 2.0),
    "2 to 3": (2.0, 3.0),
}
"""Length scales to the nearest training input: more than the one, at most the other."""


@dataclass(frozen=True)
class Config:
    """A function, by its seed."""

    seed: int


def drawn_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs in order and their targets; columns in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 + 4 * torch.rand(100, 1, dtype=torch.float64, generator=generator)
    x[::2] *= -1
    x_test = torch.linspace(-9, 9, 361, dtype=torch.float64)[:, None]
    both = torch.cat([x, x_test])
    covariance = torch.exp(-0.5 * (both - both.T).square())
    root = torch.linalg.cholesky(covariance + 1e-8 * torch.eye(len(both), dtype=torch.float64))
    values = root @ torch.randn(len(both), 1, dtype=torch.float64, generator=generator)
    values += SIGMA * torch.randn(values.shape, dtype=torch.float64, generator=generator)
    return x, values[: len(x)], x_test, values[len(x) :]


def process_prediction(x: Tensor, y: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (M, 1) of a Gaussian process whose kernel is learned."""
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    process.fit(x.numpy(), y[:, 0].numpy())
    mean, deviation = process.predict(x_test.numpy(), return_std=True)
    return torch.from_numpy(mean)[:, None], torch.from_numpy(deviation)[:, None].square()


def network_predictions(
    name: str, seed: int, x: Tensor, y: Tensor, x_test: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance (M, 1) of the network with its posterior, and without it."""
    (center, scale), (widths, activation) = (y.mean(), y.std()), NETWORKS[name]
    torch.manual_seed(seed)
    model = MLP(1, widths, 1, activation).double()
    loader = DataLoader(TensorDataset(x / x.std(), (y - center) / scale), 25, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    learner = PriorLearner("regression", epochs=EPOCHS)
    OnlineTraining(model, optimizer, loader, learner).run()
    posterior = learner.posterior
    assert posterior is not None
    predictives = {
        name: laplace_predictive(posterior),
        f"{name}, MAP": map_predictive(model, "regression", posterior.sigma_noise),
    }
    predictions = {key: predict(x_test / x.std()) for key, predict in predictives.items()}
    return {
        key: (prediction.mean * scale + center, prediction.total_uncertainty * scale**2)
        for key, prediction in predictions.items()
    }


def run(config: Config) -> Result:
    """Coverage and NLL (nats) by distance, of all methods; the first function's curves, too."""
    x, y, x_test, y_test = drawn_data(config.seed)
    predictions = {PROCESS: process_prediction(x, y, x_test)}
    for name in NETWORKS:
        predictions |= network_predictions(name, config.seed, x, y, x_test)
    distance = (x_test - x.T).abs().amin(1)
    methods: dict[str, Any] = {}
    for method, (mean, variance) in predictions.items():
        deviation = variance.sqrt()
        inside = ((y_test - mean).abs() <= NORMAL_95 * deviation)[:, 0].double()
        nll = gaussian_nll_loss(mean, y_test, variance, full=True, reduction="none")[:, 0]
        bins = {
            name: (distance > low) & (distance <= high) if low else distance <= high
            for name, (low, high) in DISTANCES.items()
        }
        methods[method] = {
            name: {"coverage": inside[where].mean().item(), "nll": nll[where].mean().item()}
            for name, where in bins.items()
        }
        if not config.seed:
            curve = {"mean": mean, "deviation": deviation}
            methods[method]["curve"] = {k: v[:, 0].float().tolist() for k, v in curve.items()}
    return {"methods": methods}


def table(results: list[Result]) -> str:
    """Coverage and NLL by distance, over functions."""

    def values(method: str, distance: str, key: str) -> list[float]:
        return [result["methods"][method][distance][key] for result in results]

    coverages = [["Coverage of 90 % intervals", *DISTANCES]]
    nlls = [["Test NLL (nats)", *DISTANCES]]
    for method in results[0]["methods"]:
        cells = [mean_with_error(values(method, name, "coverage"), "{:.2f}") for name in DISTANCES]
        coverages.append([method, *cells])
        medians = [statistics.median(values(method, name, "nll")) for name in DISTANCES]
        nlls.append([method, *(f"{median:.2f}" for median in medians)])
    return (
        f"Of {len(results)} functions, by the distance to the nearest training input in length "
        "scales: the share of targets in 90 % intervals (mean ± standard error over functions), "
        f"and the NLL (median).\n\n{markdown(coverages)}\n\n{markdown(nlls)}"
    )


def figures(results: list[Result]) -> dict[str, Figure]:
    """The first function: data, means and 90 % intervals."""
    first = next((result for result in results if not result["config"]["seed"]), None)
    if first is None:
        return {}
    x, y, x_test, y_test = drawn_data(0)
    methods = [PROCESS, *NETWORKS]
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, method in zip(
        figure.subplots(2, 2, sharex=True, sharey=True).flat, methods, strict=True
    ):
        curve = first["methods"][method]["curve"]
        mean, width = (torch.tensor(curve[key]) for key in ("mean", "deviation"))
        width = NORMAL_95 * width
        axes.fill_between(x_test[:, 0], mean - width, mean + width, alpha=0.3, label="90 %")
        axes.plot(x_test[:, 0], mean, label="mean")
        axes.plot(x_test[:, 0], y_test[:, 0], ",", color="gray", label="test targets")
        axes.plot(x[:, 0], y[:, 0], "k.", markersize=3, label="training data")
        axes.set(title=method, ylim=(-4, 4))
    figure.axes[0].legend(fontsize="small", ncols=2)
    return {"intervals": figure}


main = study(
    "beyond_the_data",
    __doc__,
    run,
    lambda options: [Config(seed) for seed in range(options.seeds)],
    table,
    seeds=10,
    figures=figures,
)

if __name__ == "__main__":
    sys.exit(main())
