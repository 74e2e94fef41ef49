"""A fit of four networks beside laplace-torch's backends and beside the limit.

A fit is the Kronecker factors of all batches of some noise, without eigenvalues. Ours is
`kronecker_factors`, with its proof; "proved" is a later pass over the same model without one. A
peer's is what laplace-torch's ``fit`` calls for each batch, without the sum over batches. The limit
is a forward pass and V backward passes to the inputs only, with frozen weights in channels_last:
V = 9 for the exact GGN of ten classes, V = 1 for one Monte Carlo sample. Parameters that the peers
cannot take, the scalars of Fixup and those of BatchNorm, are frozen only for them.

All take turns in one process, and processor seconds of one thread are counted. A ratio is the
median of the rounds' ratios: with other work on the machine, seconds of different rounds differ.
``python -m experiments.speed.fits`` takes ten minutes of one core.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
import torchvision
from torch import nn

from experiments.speed.contenders import PEERS, Work, limit, network, peer
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios
from kfac_backend import kronecker_factors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.options import Mode
from marglik.models import MLP, LeNet

CPU = torch.device("cpu")
MODES: tuple[Mode, ...] = get_args(Mode)
VECTORS = {"exact": 9, "mc": 1}
"""Kind of Fisher -> backward passes of a batch at ten classes."""


def resnet18() -> nn.Module:
    """ResNet-18 of torchvision in eval mode, with the usual stem for 32×32 pixels."""
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return model.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: LeNet(10, 1, 28), (1, 28, 28)),
    "mlp": (lambda: MLP(784, (256, 256), 10), (1, 28, 28)),
    "wrn_16_4": (lambda: network(CPU), (3, 32, 32)),
    "resnet18": (resnet18, (3, 32, 32)),
}
"""Name -> a new network, and the shape of an example."""

OURS, PROVED = "marglik", "marglik proved"


@dataclass(frozen=True)
class Config:
    """A network, and how much it sees."""

    name: str
    examples: int
    batch_size: int
    repetitions: int


def run(config: Config) -> Result:
    """Processor seconds of each contender in each round."""
    work = contenders(config)
    return {"seconds": interleaved(work, config.repetitions, CPU, "processor", warm_up=False)}


def contenders(config: Config) -> dict[str, Work]:
    """Name, such as "marglik, expand, exact" or "limit, mc" -> a pass over all batches."""
    new, shape = NETWORKS[config.name]
    torch.manual_seed(0)
    x = torch.randn(config.examples, *shape)
    y = torch.randint(10, (config.examples,))
    data = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
    work: dict[str, Work] = {}
    for fisher, vectors in VECTORS.items():
        model: Any = new()
        model = model.to(memory_format=torch.channels_last)
        work[f"limit, {fisher}"] = _in_turn([limit(model, x, vectors) for x, _ in data])
        for mode in MODES:
            kind = f"{mode}, {fisher}"
            options: dict[str, Any] = {"kfac_approx": mode, "fisher": fisher}
            fit = partial(kronecker_factors, new(), data, "classification", **options)
            work[f"{OURS}, {kind}"] = fit
            proved = CurvaturePass(new(), "classification", **options)
            proved.add(x[:4], y[:4])
            work[f"{PROVED}, {kind}"] = partial(proved.factors_of, data, repeat_proof=False)
            for name, backend in PEERS.items():
                if name != "asdl" or mode == "expand":
                    model = without_batch_norm(new())
                    work[f"{name}, {kind}"] = _in_turn(
                        [peer(backend, model, x, y, **options) for x, y in data]
                    )
    return work


def without_batch_norm(model: nn.Module) -> nn.Module:
    """The model with frozen parameters of BatchNorm."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


def _in_turn(batches: Sequence[Work]) -> Work:
    """One batch after the other; a peer's sum over batches takes too little time to count."""

    def work() -> None:
        for batch in batches:
            batch()

    return work


def table(results: list[Result]) -> str:
    """Our fit's ratios to the limit, and the peers' ratios to our fit."""
    names = {name.split(", ")[0] for run in results for name in run["seconds"]}
    peers = sorted(names - {OURS, PROVED, "limit"})
    rows = [["network", "examples", "rounds", "Fisher", "mode", "fit", "proved", *peers]]
    for run, fisher, mode in product(results, VECTORS, MODES):
        config, seconds, kind = run["config"], run["seconds"], f"{mode}, {fisher}"

        def ratio(name: str, to: str, seconds: dict[str, list[float]] = seconds) -> str:
            return f"{median_ratios(seconds, to)[name]:.2f}" if name in seconds else ""

        rows.append([
            run["name"], str(config["examples"]), str(config["repetitions"]), fisher, mode,
            *(ratio(f"{ours}, {kind}", f"limit, {fisher}") for ours in (OURS, PROVED)),
            *(ratio(f"{name}, {kind}", f"{OURS}, {kind}") for name in peers),
        ])  # fmt: skip
    return (
        "Medians of ratios within a round, in processor seconds of one thread on a loaded machine: "
        "a fit of marglik, with its proof and proved before, in times of the limit; the peers in "
        "times of a fit of marglik.\n\n" + markdown(rows)
    )


CONFIGS = {
    "lenet": Config("lenet", 1000, 128, 3),
    "mlp": Config("mlp", 2000, 128, 5),
    "wrn_16_4": Config("wrn_16_4", 32, 32, 3),
    "resnet18": Config("resnet18", 16, 16, 3),
}

main = study(
    "fits",
    __doc__,
    run,
    lambda options: [CONFIGS[name] for name in options.data],
    table,
    problems=CONFIGS,
)

if __name__ == "__main__":
    sys.exit(main())
