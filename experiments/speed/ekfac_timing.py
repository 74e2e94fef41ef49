"""EKFAC at the sizes of influence functions: factors, eigenvectors and corrected eigenvalues.

kronfluence (github.com/pomonam/kronfluence) gives seconds of its tasks on an A100, in float32:
ResNet-9 on 50,000 images of CIFAR-10's shape takes 23 for the factors, 0.9 for the eigenvectors and
35 for the corrected eigenvalues; GPT-2 on 4,656 sequences of 512 tokens 180, 8 and 275. Here the
networks have the same layers, the data are noise, and one label is drawn for each loss term. As
there, only weights of convolutions, of linear layers, and of the transformer's blocks have factors.

    python -m experiments.speed.ekfac_timing --data resnet9_cuda gpt2_cuda

Each size is one run, without repetitions. On a CPU, seconds are processor seconds of one thread.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.models import GPT
from experiments.studies import Result, markdown, study
from experiments.timing import peak_memory, seconds
from kfac_backend import CurvatureOptions, corrected_factors, kronecker_factors

PARTS = ("factors", "eigenvectors", "corrected eigenvalues")
PUBLISHED = {"resnet9": (23.0, 0.9, 35.0), "gpt2": (180.0, 8.0, 275.0)}
"""Seconds of kronfluence's on an A100, float32."""


@dataclass(frozen=True)
class Size:
    """A network, and the examples of its data and of a batch."""

    network: str
    examples: int
    batch_size: int
    tokens: int = 0
    dim: int = 0
    depth: int = 0
    vocabulary: int = 0


SIZES = {
    "resnet9_cpu": Size("resnet9", 256, 64),
    "resnet9_cuda": Size("resnet9", 50_000, 512),
    "gpt2_cuda": Size("gpt2", 4_656, 8, tokens=512, dim=768, depth=12, vocabulary=50_257),
}


@dataclass(frozen=True)
class Config:
    """A size on a device."""

    name: str
    size: Size

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device(self.name.partition("_")[2])


def run(config: Config) -> Result:
    """Seconds of each part, and the peak memory of one batch."""
    model, data = network(config.size).to(config.device).eval(), batches(config)
    options = CurvatureOptions(kfac_approx="expand", fisher="mc")
    fits: list[Any] = []

    def factors() -> None:
        fits.append(kronecker_factors(model, data, "classification", options))

    def eigenvectors() -> None:
        for block in fits[0].blocks.values():
            block.decompose()

    def correction() -> None:
        corrected_factors(fits[0], model, data)

    work = dict(zip(PARTS, (factors, eigenvectors, correction), strict=True))
    clock = "wall" if config.device.type == "cuda" else "processor"
    taken = {part: seconds(do, config.device, clock) for part, do in work.items()}
    # The correction decomposes, too, and kronfluence counts that apart.
    taken[PARTS[2]] -= taken[PARTS[1]]

    def of_a_batch() -> None:
        kronecker_factors(model, data[:1], "classification", options)

    return {"seconds": taken, "peak_mebibytes": peak_memory(of_a_batch, config.device) / 2**20}


def network(size: Size) -> nn.Module:
    """The network, with parameters that kronfluence leaves out frozen."""
    torch.manual_seed(0)
    if size.network == "resnet9":
        model = resnet9(size.dim or 64)
        layers = (nn.Conv2d, nn.Linear)
        weights = {id(m.weight) for m in model.modules() if isinstance(m, layers)}
    else:
        model = GPT(size.vocabulary, size.tokens, size.dim, size.depth, heads=size.dim // 64)
        blocks = (m for n, m in model.named_modules() if "blocks" in n and isinstance(m, nn.Linear))
        weights = {id(p) for m in blocks for p in m.parameters()}
    for p in model.parameters():
        p.requires_grad_(id(p) in weights)
    return model


class Residual(nn.Sequential):
    """x plus what the layers make of it."""

    def forward(self, input: Tensor) -> Tensor:  # as torch's class names it
        """X + f(x)."""
        return input + super().forward(input)


def resnet9(width: int = 64) -> nn.Sequential:
    """The small residual network of kronfluence's task on CIFAR-10, whose width is 64."""

    def block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> Any:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        block(3, width),
        block(width, 2 * width, kernel=5, stride=2, padding=2),
        Residual(block(2 * width, 2 * width), block(2 * width, 2 * width)),
        block(2 * width, 4 * width),
        nn.MaxPool2d(2),
        Residual(block(4 * width, 4 * width), block(4 * width, 4 * width)),
        block(4 * width, 2 * width, padding=0),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10, bias=False),
    )


def batches(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Noise of the data's shapes, on the device."""
    size, generator = config.size, torch.Generator().manual_seed(0)
    N = size.examples
    if size.network == "resnet9":
        x, y = torch.randn(N, 3, 32, 32, generator=generator), torch.randint(10, (N,))
    else:
        x = torch.randint(size.vocabulary, (N, size.tokens), generator=generator)
        y = x.roll(-1, 1)
    x, y = x.to(config.device), y.to(config.device)
    return list(zip(x.split(size.batch_size), y.split(size.batch_size), strict=True))


def table(results: list[Result]) -> str:
    """A row for each size, with kronfluence's beside those of its own size."""
    rows = [["seconds", "examples", *PARTS, "peak of a batch, MiB"]]
    for result in results:
        size = result["config"]["size"]
        taken = [f"{result['seconds'][part]:.1f}" for part in PARTS]
        peak = f"{result['peak_mebibytes']:.0f}"
        rows.append([result["config"]["name"], str(size["examples"]), *taken, peak])
        if result["config"]["name"].endswith("cuda"):
            published = [f"{value:g}" for value in PUBLISHED[size["network"]]]
            rows.append(["... kronfluence, A100", str(size["examples"]), *published, ""])
    return markdown(rows)


main = study(
    "ekfac_timing",
    __doc__,
    run,
    lambda options: [Config(name, SIZES[name]) for name in options.data],
    table,
    problems=SIZES,
    default=["resnet9_cpu"],
)

if __name__ == "__main__":
    sys.exit(main())
