"""K-FAC of transformers, expand against reduce, after Eschenhagen et al. 2023 (section 4).

In the paper (nanoGPT with GPT-2's shape on DART, on an A100) reduce takes 6.68 ± .04 minutes, 70 %
of expand's 9.55 ± .13.

Two models, each with two shapes: for a CPU a small one, for a GPU the real one. GPT on bytes of
DART, for several sequence lengths R and batch sizes N: nanoGPT's smallest shape (6 blocks of 384
features, 6 heads), or GPT-2's (12 blocks of 768, 12 heads). The vision transformer on noise:
CIFAR's shape (32² pixels in patches of 4, 6 blocks of 192 features), or ViT-S/16 (224² pixels in
patches of 16, 12 blocks of 384 features, 1,000 classes).

Two things are measured in float32, each in both modes: the factors alone (a forward pass, and a
backward pass to the inputs with one Monte Carlo sample for each loss term), which is what the paper
compares, and a step of training with new factors and a new preconditioner, beside a plain step of
AdamW. All take turns; a ratio is the median over rounds.

``make gpt-timing`` writes ``results/MODEL_timing_DEVICE.json``. For ``--threads 1 --clock
processor`` see `update_step_timing`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data.dart import DART, IGNORED
from experiments.options import add_results
from experiments.timing import CLOCKS, interleaved, median_ratios, medians
from kfac_backend.curvature import CurvaturePass
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import Mode
from marglik.models import GPT, VisionTransformer
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

PAPER = {"expand": 9.55, "reduce": 6.68}
"""Minutes."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A network, and the batches that it is measured on."""

    sizes: tuple[tuple[int, int], ...]
    """Sizes (R, N) of the batches: positions and examples."""
    dim: int
    depth: int
    heads: int
    image_size: int = 0
    num_classes: int = 0


SHAPES = {
    "gpt": {
        "cpu": Shape(((64, 16), (128, 16), (256, 16), (256, 4)), dim=384, depth=6, heads=6),
        "cuda": Shape(((256, 32), (512, 16), (1024, 8)), dim=768, depth=12, heads=12),
    },
    "vit": {
        "cpu": Shape(((64, 32), (64, 128)), 192, 6, 3, image_size=32, num_classes=10),
        "cuda": Shape(((196, 32), (196, 128)), 384, 12, 6, image_size=224, num_classes=1000),
    },
}


@dataclass(frozen=True)
class Config:
    """The model, the text, and the number of measurements."""

    model: str = "gpt"
    shape: Shape = SHAPES["gpt"]["cpu"]
    repetitions: int = 3
    threads: int = 2
    clock: str = "wall"
    data: str = "../shared/data/dart-v1.1.1-full-dev.json.gz"
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def run(config: Config) -> dict[str, Any]:
    """Seconds at each size, and the ratios of the modes."""
    torch.set_num_threads(config.threads)
    sizes = [run_size(config, R, N) for R, N in config.shape.sizes]
    return {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in _model(config, config.shape.sizes[0][0]).parameters()),
        "paper_minutes": PAPER if config.model == "gpt" else {},
        "sizes": sizes,
        **environment(torch.device(config.device)),
    }


def run_size(config: Config, R: int, N: int) -> dict[str, Any]:
    """Seconds of all contenders on one batch of N sequences of length R."""
    device = torch.device(config.device)
    x, y = (tensor.to(device) for tensor in _batch(config, R, N))
    work = {"AdamW": adamw(_model(config, R), x, y)}
    for mode in ("expand", "reduce"):
        work[f"factors, {mode}"] = factors(_model(config, R), x, y, mode)
        work[f"K-FAC step, {mode}"] = kfac_step(_model(config, R), x, y, mode)
    measured = interleaved(work, config.repetitions, device, config.clock)
    return {
        "R": R,
        "N": N,
        "times_adamw": median_ratios(measured, "AdamW"),
        "reduce_over_expand": {
            kind: median_ratios(measured, f"{kind}, expand")[f"{kind}, reduce"]
            for kind in ("factors", "K-FAC step")
        },
        "median_seconds": medians(measured),
        "seconds": measured,
    }


def adamw(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """A plain training step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(x), y).backward()
        optimizer.step()

    return step


def factors(model: nn.Module, x: Tensor, y: Tensor, mode: Mode) -> Work:
    """Only the factors of a batch."""
    curvature = CurvaturePass(model, "classification", kfac_approx=mode, fisher="mc")

    def one_batch() -> None:
        curvature.add(x, y)
        curvature.factors()

    return one_batch


def kfac_step(model: nn.Module, x: Tensor, y: Tensor, mode: Mode) -> Work:
    """A step with new factors and a new preconditioner, in front of AdamW."""
    options = PreconditionerOptions(
        factor_every=1, update_every=1, ema_decay=0.0, norm_control="none"
    )
    preconditioner = KfacPreconditioner(
        model, "classification", options, kfac_approx=mode, fisher="mc"
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(x), y).backward()
        preconditioner.step()
        optimizer.step()

    return step


def table(result: dict[str, Any]) -> str:
    """Table with a row for each size, and the paper's ratio below."""
    lines = [
        "| R | N | AdamW step, s | factors, expand | factors, reduce | K-FAC step, expand "
        "| K-FAC step, reduce | reduce / expand, factors | ..., step |",
        "|---" * 9 + "|",
    ]
    for size in result["sizes"]:
        times, modes = size["times_adamw"], size["reduce_over_expand"]
        lines.append(
            f"| {size['R']} | {size['N']} | {size['median_seconds']['AdamW']:.2f} "
            f"| {times['factors, expand']:.2f} | {times['factors, reduce']:.2f} "
            f"| {times['K-FAC step, expand']:.2f} | {times['K-FAC step, reduce']:.2f} "
            f"| {modes['factors']:.2f} | {modes['K-FAC step']:.2f} |"
        )
    if paper := result["paper_minutes"]:
        lines.append(f"| the paper | | | | | | | {paper['reduce'] / paper['expand']:.2f} | |")
    return "\n".join(lines)


def _loss(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, -2), y.flatten(), ignore_index=IGNORED)


def _model(config: Config, R: int) -> nn.Module:
    torch.manual_seed(config.seed)
    shape = config.shape
    if config.model == "gpt":
        model = GPT(context=R, dim=shape.dim, depth=shape.depth, heads=shape.heads)
        return model.to(config.device)
    model = VisionTransformer(
        shape.num_classes,
        image_size=shape.image_size,
        patch_size=round(shape.image_size / R**0.5),
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        mlp_ratio=4.0,
    )
    return model.to(config.device)


def _batch(config: Config, R: int, N: int) -> tuple[Tensor, Tensor]:
    shape = config.shape
    if config.model == "vit":
        generator = torch.Generator().manual_seed(config.seed)
        x = torch.randn(N, 3, shape.image_size, shape.image_size, generator=generator)
        return x, torch.randint(shape.num_classes, (N,), generator=generator)
    train = DART(config.data, R, num_train=N, num_test=1, seed=config.seed).load().train
    x, y = train
    assert isinstance(x, Tensor)
    # Labels behind a text's end would be ignored; for the timing all positions count.
    return x, torch.where(y == IGNORED, x, y)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--model", choices=SHAPES, default=Config.model, help="network to measure; default: gpt"
    )
    parser.add_argument("--repetitions", type=int, default=Config.repetitions)
    parser.add_argument(
        "--threads", type=int, default=Config.threads, help="number of threads on a CPU"
    )
    parser.add_argument("--clock", choices=CLOCKS, default=Config.clock)
    parser.add_argument("--data", default=Config.data, help="DART's compressed JSON file")
    parser.add_argument(
        "--device", default=Config.device, help=f"where to measure; default: {Config.device}"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device).type
    config = Config(
        model=options.model,
        shape=SHAPES[options.model][device],
        repetitions=options.repetitions,
        threads=options.threads,
        clock=options.clock,
        data=options.data,
        device=options.device,
    )
    result = run(config)
    path = options.results / f"{options.model}_timing_{device}.json"
    write_json(path, result)
    print(table(result))
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
