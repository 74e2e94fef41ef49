"""Predictions of one input, and tiny networks, compared with laplace-torch and curvlinops.

- one_input: a prediction of one input by the last layer or by all layers, as `marglik.Laplace` and
  `laplace_predictive` make it, beside a served module, the network itself and laplace-torch.
- tiny: 100 points. A grid of 100 prior precisions on validation data, 100 steps on the evidence,
  and predictions by networks at 100 samples (``pred_type="nn"``).

Both libraries make the same calls of laplace-torch's interface, with their default losses. All work
takes turns in one process. A ratio is the median of the rounds' ratios, in processor seconds of one
thread. The JSON has the machine's load before and after. ``OMP_NUM_THREADS=1 python -m
experiments.predictions.latency`` takes three minutes of one core.
"""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import laplace
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.speed.contenders import Work
from experiments.speed.fits import resnet18
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios, medians
from marglik import Laplace, Posterior, PredictiveConfig, laplace_predictive
from marglik.models import MLP, LeNet

CPU = torch.device("cpu")
OURS, PEER = "marglik", "laplace-torch"
LIBRARIES: dict[str, Callable[..., Any]] = {OURS: Laplace, PEER: laplace.Laplace}


@dataclass(frozen=True)
class Config:
    """A network with what is measured of it."""

    name: str
    """The kind of work, "one_input" or "tiny", and the network."""
    calls: int
    """Calls in a round."""
    examples: int = 100
    rounds: int = 5


class OwnForward(nn.Module):
    """An MLP in a class of its own, whose code marglik does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 20), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return self.last(self.inner(x).tanh())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "regression": (lambda: MLP(1, (50,), 1, "tanh"), (1,), 0),
    "mlp": (lambda: MLP(4, (20,), 3, "tanh"), (4,), 3),
    "mlp10": (lambda: MLP(10, (20,), 10, "tanh"), (10,), 10),
    "own": (OwnForward, (4,), 3),
    "lenet": (lambda: LeNet(3, 3, 8), (3, 8, 8), 3),
    "resnet18": (resnet18, (3, 32, 32), 10),
}
"""Name -> a new network, the shape of an example, and the number of classes (0: regression)."""
WITH_ALL_LAYERS = "regression", "mlp", "mlp10", "own", "lenet"
"""Networks in which laplace-torch supports each parameter, and needs no gigabytes."""
TINY = "regression", "mlp", "own"
"""Networks of which a grid over all layers takes laplace-torch less than a second."""


def run(config: Config) -> Result:
    """Processor seconds of a call of each contender in each round, and the load before."""
    warnings.filterwarnings("ignore", message="By default `link_approx` is `probit`")
    load = os.getloadavg()
    kind, _, network = config.name.rpartition("_")
    torch.manual_seed(0)
    work = (one_input if kind == "one_input" else tiny)(network, config)
    measured = interleaved(
        {name: partial(_repeat, call, config.calls) for name, call in work.items()},
        config.rounds,
        CPU,
        "processor",
    )
    seconds = {name: [s / config.calls for s in of_work] for name, of_work in measured.items()}
    return {"load": [load[0], os.getloadavg()[0]], "seconds": seconds}


def _repeat(work: Work, calls: int) -> None:
    for _ in range(calls):
        work()


def _problem(name: str, config: Config) -> tuple[nn.Module, str, DataLoader, torch.Tensor]:
    """A new network, its likelihood, its data and one example."""
    new, shape, classes = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(config.examples, *shape)
    y = x.flatten(1)[:, :1].sin() + 0.1 * torch.randn(len(x), 1)
    if classes:
        y = x.flatten(1)[:, :classes].argmax(1)
    model = new().eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss: Any = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    for _ in range(2 if name == "resnet18" else 200):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    data = DataLoader(TensorDataset(x, y), batch_size=50)
    return model, "classification" if classes else "regression", data, x[:1]


def one_input(name: str, config: Config) -> dict[str, Work]:
    """Name -> a prediction of one input."""
    model, likelihood, data, x = _problem(name, config)
    work: dict[str, Work] = {"network": partial(_run, model, x)}
    posterior = Posterior(model, likelihood, kfac_approx="expand")
    posterior.fit(data)
    for layers in ("last", "all") if name in WITH_ALL_LAYERS else ("last",):
        predict = laplace_predictive(posterior, PredictiveConfig(layers=layers))
        work[f"predictive, {layers}"] = partial(predict, x)
        if layers == "last":
            work["served module"] = partial(_run, predict.module(x), x)
        subset = "last_layer" if layers == "last" else "all"
        for library, make in LIBRARIES.items():
            la = make(model, likelihood, subset, "kron")
            la.fit(data)
            work[f"{library}, {layers}"] = partial(la, x, pred_type="glm", link_approx="probit")
    return work


@torch.no_grad()
def _run(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def tiny(name: str, config: Config) -> dict[str, Work]:
    """Name -> a call of laplace-torch's interface."""
    model, likelihood, data, _ = _problem(name, config)
    x = data.dataset.tensors[0]  # pyright: ignore[reportAttributeAccessIssue]
    work: dict[str, Work] = {}
    for subset in ("last_layer", "all") if name in TINY else ("last_layer",):
        for structure in ("kron", "diag", "full"):
            for library, make in LIBRARIES.items():
                la = make(model, likelihood, subset, structure)
                la.fit(data)
                tune = partial(la.optimize_prior_precision, pred_type="glm")
                of = f"{library}, {subset}, {structure}"
                work[f"grid, {of}"] = partial(tune, method="gridsearch", val_loader=data)
                for prior in ("scalar", "layerwise") if subset == "all" else ("scalar",):
                    work[f"evidence {prior}, {of}"] = partial(
                        tune, method="marglik", prior_structure=prior
                    )
                work[f"nn, {of}"] = partial(la, x, pred_type="nn", link_approx="mc")
    return work


def table(results: list[Result]) -> str:
    """One table of one input, in milliseconds, and one of tiny networks, in ratios."""
    head = ["network", "layers", "laplace-torch", "`Laplace`", "`laplace_predictive`"]
    rows = [[*head, "served module", "network"]]
    others = [["network", "weights", "structure", "call", "marglik, ms", "laplace-torch ÷ marglik"]]
    for run in results:
        kind, _, network = run["config"]["name"].rpartition("_")
        milliseconds = {name: 1e3 * value for name, value in medians(run["seconds"]).items()}
        if kind == "one_input":
            for layers in ("last", "all"):
                names = [
                    *(f"{name}, {layers}" for name in (PEER, OURS, "predictive")),
                    *(["served module"] if layers == "last" else [""]),
                    "network",
                ]
                cells = [f"{milliseconds[n]:.2f}" if n in milliseconds else "" for n in names]
                if cells[0]:
                    rows.append([network, layers, *cells])
            continue
        for name in run["seconds"]:
            call, library, subset, structure = name.split(", ")
            if library == OURS:
                peer = f"{call}, {PEER}, {subset}, {structure}"
                ratio = median_ratios(run["seconds"], name)[peer]
                others.append([
                    network, subset.replace("_", " "), structure, call,
                    f"{milliseconds[name]:.1f}", f"{ratio:.2f}",
                ])  # fmt: skip
    loads = [load for run in results for load in run["load"]]
    return (
        f"Medians of {results[0]['config']['rounds']} rounds, processor time of one thread. The "
        f"machine's load was {min(loads):.1f} to {max(loads):.1f}, of two cores.\n\n"
        f"One input, milliseconds:\n\n{markdown(rows)}\n\n"
        f"100 points; the grid has 100 prior precisions:\n\n{markdown(others)}"
    )


CONFIGS = {
    config.name: config
    for config in (
        Config("one_input_mlp", 100),
        Config("one_input_mlp10", 100),
        Config("one_input_own", 100),
        Config("one_input_lenet", 100),
        Config("one_input_resnet18", 10, examples=6),
        Config("tiny_regression", 1),
        Config("tiny_mlp", 1),
        Config("tiny_own", 1),
        Config("tiny_lenet", 1),
    )
}

main = study(
    "latency",
    __doc__,
    run,
    lambda options: [CONFIGS[name] for name in options.data],
    table,
    problems=CONFIGS,
)

if __name__ == "__main__":
    sys.exit(main())
