"""A fit of six networks beside laplace-torch's backends and beside the limit.

A fit is the Kronecker factors of all batches of some noise, without eigenvalues. Ours is
`kronecker_factors`, with its proof; "proved" is a later pass over the same model without one. A
peer's is what laplace-torch's ``fit`` calls for each batch, without the sum over batches. The limit
is a forward pass and V backward passes to the inputs only, with frozen weights in channels_last:
V = 9 for the exact GGN of ten classes, V = 1 for one Monte Carlo sample. Parameters that the peers
cannot take, the scalars of Fixup, those of norms and embeddings, are frozen only for them. GPT is
measured by one Monte Carlo sample alone, because it has 256 classes. Its peers get the positions of
its outputs as examples.

All take turns in one process, and processor seconds of one thread are counted. A ratio is the
median of the rounds' ratios: with other work on the machine, seconds of different rounds differ.
``python -m experiments.speed.fits`` takes a quarter of an hour of one core.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
import torchvision
from torch import Tensor, nn

from experiments.models import GPT, VisionTransformer
from experiments.speed.contenders import PEERS, Work, language_limit, limit, network, peer
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
    "vit": (
        lambda: VisionTransformer(10, dim=192, depth=3, heads=3, mlp_ratio=4.0),
        (3, 32, 32),
    ),
    "gpt": (lambda: GPT(context=128, dim=192, depth=3, heads=3, tied=False), (128,)),
}
"""Name -> a new network, and the shape of an example: an image, or a sequence of tokens."""

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
    has_tokens = len(shape) == 1
    x = torch.randn(config.examples, *shape)
    y = torch.randint(10, (config.examples,))
    if has_tokens:
        x, y = (torch.randint(256, (config.examples, *shape)) for _ in range(2))
    data = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
    work: dict[str, Work] = {}
    for fisher, vectors in VECTORS.items():
        if has_tokens and fisher == "exact":
            continue
        model: Any = new()
        model = model.to(memory_format=torch.channels_last)
        if has_tokens:
            work[f"limit, {fisher}"] = language_limit(model, x, config.batch_size)
        else:
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
                    model = FlatOutputs(only_linear(new()))
                    work[f"{name}, {kind}"] = _in_turn(
                        [peer(backend, model, x, y.flatten(), **options) for x, y in data]
                    )
    return work


class FlatOutputs(nn.Module):
    """A network whose outputs (N, ..., C) become (M, C), one row for each position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (M, C)."""
        return self.model(x).flatten(0, -2)


def only_linear(model: nn.Module) -> nn.Module:
    """The model with frozen parameters of norms, embeddings and position embeddings."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.Embedding):
            module.requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("position_embedding"):
            p.requires_grad_(False)
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
        if f"{OURS}, {kind}" not in seconds:
            continue

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
    "vit": Config("vit", 64, 32, 3),
    "gpt": Config("gpt", 64, 16, 3),
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
