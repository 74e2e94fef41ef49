"""Seconds of one batch's curvature on WRN-16-4 Fixup, CIFAR-10 shapes: ours, peers, and the limit.

The limit is one forward pass and V backward passes to the inputs only, with frozen weights in
channels_last: V = 9 for the exact GGN of ten classes, V = 1 for one Monte Carlo sample. Repetitions
are interleaved and their medians compared, so that ratios hold on a noisy machine. laplace-torch's
curvlinops backend cannot take Fixup's scalars; they are frozen for it alone.

Run it with ``make bench``; writes ``results/bench_curvature_DEVICE_BATCH.json``.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from laplace.curvature import CurvlinopsGGN
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.curvature_pass import CurvaturePass
from marglik.models import WideResNetFixup
from marglik.run_log import environment, write_json

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Config:
    """What is measured."""

    batch_size: int = 32
    repetitions: int = 5
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def run(config: Config) -> dict[str, Any]:
    """Medians of all contenders in seconds, and their ratios to the limit of their Fisher kind."""
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    x = torch.randn(config.batch_size, 3, 32, 32, device=device)
    y = torch.randint(10, (config.batch_size,), device=device)
    contenders = {
        "training step": _training_step(_network(device), x, y),
        "training step, channels_last": _training_step(
            _network(device, torch.channels_last), x.to(memory_format=torch.channels_last), y
        ),
        "limit, exact": _limit(_network(device, torch.channels_last), x, vectors=9),
        "limit, mc": _limit(_network(device, torch.channels_last), x, vectors=1),
    }
    for kfac_approx in ("expand", "reduce"):
        for fisher in ("exact", "mc"):
            kind = f"{kfac_approx}, {fisher}"
            contenders[f"ours, {kind}"] = _ours(_network(device), x, y, kfac_approx, fisher)
            contenders[f"curvlinops, {kind}"] = _curvlinops(
                _network(device), x, y, kfac_approx, fisher
            )

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in tqdm(range(config.repetitions + 1), desc="Repetitions", disable=None):
        for name, measure in contenders.items():
            elapsed = _time(measure, device)
            if repetition > 0:  # the first one warms up
                seconds[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "config": asdict(config),
        "median_seconds": medians,
        "times_the_limit": {
            name: medians[name] / medians[f"limit, {name.rsplit(', ')[-1]}"]
            for name in medians
            if name.startswith(("ours", "curvlinops"))
        },
        "seconds": seconds,
        **environment(device),
    }


def markdown(results: dict[str, Any]) -> str:
    """The medians as a Markdown table."""
    lines = ["| | seconds a batch | times the limit |", "|---|---|---|"]
    for name, seconds in results["median_seconds"].items():
        ratio = results["times_the_limit"].get(name)
        lines.append(f"| {name} | {seconds:.3f} | {f'{ratio:.2f}' if ratio else ''} |")
    return "\n".join(lines)


def _network(
    device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
) -> nn.Module:
    torch.manual_seed(0)
    model = WideResNetFixup()
    with torch.no_grad():
        for p in model.parameters():  # zero branches would make gradients zero
            p.add_(0.02 * torch.randn_like(p))
    return model.to(device).to(memory_format=memory_format).eval()  # pyright: ignore


def _training_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _limit(model: nn.Module, x: Tensor, vectors: int) -> Callable[[], object]:
    model.requires_grad_(False)
    x = x.to(memory_format=torch.channels_last).requires_grad_()

    def passes() -> None:
        f = model(x)
        vector = torch.randn_like(f)
        for _ in range(vectors):
            torch.autograd.grad(f, x, vector, retain_graph=True)

    return passes


def _ours(
    model: nn.Module, x: Tensor, y: Tensor, kfac_approx: Any, fisher: Any
) -> Callable[[], object]:
    # One pass for all repetitions: that the model is covered is verified once, not per batch.
    curvature = CurvaturePass(model, "classification", kfac_approx=kfac_approx, fisher=fisher)

    def batch() -> None:
        curvature.reset()
        curvature.add(x, y)
        curvature.factors()

    return batch


def _curvlinops(
    model: nn.Module, x: Tensor, y: Tensor, kfac_approx: str, fisher: str
) -> Callable[[], object]:
    for p in model.parameters():
        p.requires_grad_(p.numel() > 1)
    backend = CurvlinopsGGN(model, "classification", stochastic=fisher == "mc")
    return lambda: backend.kron(x, y, N=len(x), kfac_approx=kfac_approx)  # pyright: ignore


def _time(measure: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    measure()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    config = Config(**vars(parser.parse_args()))
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = run(config)
    path = RESULTS / f"bench_curvature_{config.device}_{config.batch_size}.json"
    write_json(path, results)
    print(markdown(results))
    print(f"\nWritten to experiments/results/{path.name}")


if __name__ == "__main__":
    main()
