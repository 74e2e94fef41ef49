"""Cost of many classes: 10, 100 and 1,000 with the exact GGN, a sampled vocabulary of 50,257.

- exact: WRN-16-1 Fixup on noise of 16×16 pixels, C − 1 backward passes a batch. It measures the
  time divided by the limit's (a forward pass and C − 1 backward passes to the inputs).
- vocabulary: a GPT of two blocks of 64 features with one sample per token. Its output layer's B
  would take 9.4 GiB as a matrix; here its diagonal is kept (`CurvatureOptions`).
- variances: the predictive's output variances beside whole covariances, for the network of "exact"
  and for its last layer alone.

Peak memory is that of a batch's tensors beyond those that were there before, with the factors.
Seconds are processor seconds of one thread, medians of interleaved rounds.

Each part is a JSON file in ``results/large_classes/`` of the working directory, beside
``table.md``. ``make large-classes`` takes six minutes of one core and resumes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.options import parse_options, parts_parser, parts_to_measure
from experiments.speed.contenders import (
    first_vectors,
    language_limit,
    limit,
    network,
    training_step,
)
from experiments.timing import interleaved, median_ratios, medians, peak_memory
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.options import Mode
from marglik import KronLaplace
from marglik.models import GPT
from marglik.posterior.subset import Layers
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "confident", "run_exact", "run_variances", "run_vocabulary", "table"]

CPU = torch.device("cpu")
WAYS = ("covariances", "variances")


@dataclass(frozen=True)
class Config:
    """Sizes of the measurements."""

    classes: tuple[int, ...] = (10, 100, 1000)
    largest_probability: float = 0.8
    batch_size: int = 16
    image_size: int = 16
    vocabulary: int = 50257
    sequences: int = 8
    positions: int = 128
    dim: int = 64
    depth: int = 2
    predicted: int = 8
    repetitions: int = 3
    seed: int = 0


def run_exact(config: Config) -> list[dict[str, Any]]:
    """Run the part "exact" for each number of classes."""
    return [exact_case(config, C, mode) for C in config.classes for mode in ("expand", "reduce")]


def exact_case(config: Config, C: int, mode: Mode) -> dict[str, Any]:
    """One number of classes: seconds and memory."""
    torch.manual_seed(config.seed)
    x = torch.randn(config.batch_size, 3, config.image_size, config.image_size)
    y = torch.randint(C, (config.batch_size,))

    def model() -> nn.Module:
        return confident(network(CPU, 1, C), x, config.largest_probability)

    options: dict[str, Any] = {"kfac_approx": mode, "fisher": "exact"}
    curvature = CurvaturePass(model(), "classification", **options)

    def batch() -> KroneckerFactors:
        curvature.add(x, y)
        return curvature.factors()

    work: dict[str, Callable[[], object]] = {"limit": limit(model(), x, C - 1), "pass": batch}
    # A round of 1,000 classes takes a minute; its ratios hardly vary.
    measured = interleaved(work, 1 if C >= 1000 else config.repetitions, CPU, "processor")
    peak = peak_memory(first_vectors(model(), x, y, 30, **options), CPU)
    factor_bytes = sum(
        F.nbytes
        for block in batch().blocks.values()
        for F in (block.B, block.A)
        if isinstance(F, Tensor)
    )
    return {
        "classes": C,
        "mode": mode,
        "largest_probability": _largest_probability(model(), x),
        "limit_seconds": medians(measured)["limit"],
        "times_limit": median_ratios(measured, "limit")["pass"],
        "peak_mebibytes": peak / 2**20,
        "factor_mebibytes": factor_bytes / 2**20,
    }


def run_vocabulary(config: Config) -> list[dict[str, Any]]:
    """A language model's batch: seconds and memory of each option, beside a training step's."""
    return [
        _run_vocabulary(config, tied, mode, {"diagonal_above": 8192})
        for tied in (True, False)
        for mode in ("expand", "reduce")
    ]


def _run_vocabulary(
    config: Config, tied: bool, mode: Mode, options: dict[str, Any]
) -> dict[str, Any]:
    C = config.vocabulary
    torch.manual_seed(config.seed)
    x = torch.randint(C, (config.sequences, config.positions))
    y = torch.randint(C, x.shape)

    def model() -> GPT:
        torch.manual_seed(config.seed)
        return GPT(C, config.positions, config.dim, config.depth, tied=tied)

    curvature = CurvaturePass(model(), "classification", kfac_approx=mode, fisher="mc", **options)

    def batch() -> KroneckerFactors:
        curvature.add(x, y)
        return curvature.factors()

    step_model = _Flat(model())
    work = {
        "limit": language_limit(model(), x, part=1),  # in a cache, as the pass does it
        "training step": training_step(step_model, x, y.flatten()),
        "pass": batch,
    }
    first = peak_memory(batch, CPU)
    measured = interleaved(work, config.repetitions, CPU, "processor")
    outputs = 4 * config.positions * C
    return {
        "tied": tied,
        "mode": mode,
        "options": options,
        "times_limit": median_ratios(measured, "limit")["pass"],
        "times_step": median_ratios(measured, "training step")["pass"],
        "limit_seconds": medians(measured)["limit"],
        "outputs_of_one_mebibytes": outputs / 2**20,
        "peak_first_mebibytes": first / 2**20,
        "peak_mebibytes": peak_memory(batch, CPU) / 2**20,
        "peak_step_mebibytes": peak_memory(work["training step"], CPU) / 2**20,
    }


def run_variances(config: Config) -> list[dict[str, Any]]:
    """Seconds and memory of the outputs' covariances, and of only their variances."""
    return [_variances(config, C, layers) for C in config.classes for layers in ("all", "last")]


def _variances(config: Config, C: int, layers: Layers) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    slow = C >= 1000 and layers == "all"  # a minute an example
    N = 1 if slow else config.predicted
    x = torch.randn(N, 3, config.image_size, config.image_size)
    model = confident(network(CPU, 1, C), x, config.largest_probability)
    options = {"fisher": "mc"}  # the time of the fit is not what is measured
    posterior = KronLaplace(model, "classification", backend_kwargs=options)
    posterior.fit([(x, torch.arange(N) % C)])

    def of(variance_only: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: posterior.output_distribution(x, layers, variance_only=variance_only)

    work = {"covariances": of(False), "variances": of(True)}
    (_, covariance), (_, variance) = (run() for run in work.values())  # with the proof
    measured = interleaved(work, 1 if slow else config.repetitions, CPU, "processor", not slow)
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    return {
        "classes": C,
        "layers": layers,
        "examples": N,
        "seconds": medians(measured),
        "times_covariances": median_ratios(measured, "covariances")["variances"],
        "largest_difference": float(((variance - diagonal).abs() / diagonal).max()),
        # A thousand backward passes would be a gigabyte of the profiler's trace.
        "peak_mebibytes": {name: peak_memory(run, CPU) / 2**20 for name, run in work.items()}
        if C <= 100 or layers == "last"
        else None,
    }


class _Flat(nn.Module):
    """Logits (N·R, C)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).flatten(0, 1)


def confident(model: nn.Module, x: Tensor, largest: float) -> nn.Module:
    """The model with its last weight scaled to a given mean largest probability."""
    last: Any = model.get_submodule("fc")
    torch.manual_seed(1)
    nn.init.normal_(last.weight)
    nn.init.zeros_(last.bias)
    weight, low, high = last.weight.detach().clone(), 0.0, 1e4
    for _ in range(40):
        scale = (low + high) / 2
        last.weight.data = weight * scale
        low, high = (scale, high) if _largest_probability(model, x) < largest else (low, scale)
    return model


def _largest_probability(model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float(model(x).softmax(-1).amax(-1).mean())


PARTS: dict[str, Callable[[Config], list[dict[str, Any]]]] = {
    "exact": run_exact,
    "vocabulary": run_vocabulary,
    "variances": run_variances,
}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A table of each part in Markdown."""
    lines = [
        "| classes | mode | times the limit | peak, MiB | of it factors |",
        "|---" * 5 + "|",
    ]
    for case in found.get("exact", []):
        lines.append(
            f"| {case['classes']:,} | {case['mode']} | {case['times_limit']:.2f} "
            f"| {case['peak_mebibytes']:.0f} | {case['factor_mebibytes']:.0f} |"
        )
    lines += [
        "",
        "| vocabulary 50,257 | mode | factors of the head | times the limit "
        "| times a training step | peak, MiB | first batch, MiB | training step, MiB |",
        "|---" * 8 + "|",
    ]
    for case in found.get("vocabulary", []):
        lines.append(
            f"| {'tied' if case['tied'] else 'untied'} | {case['mode']} | diagonal "
            f"| {case['times_limit']:.2f} | {case['times_step']:.2f} "
            f"| {case['peak_mebibytes']:.0f} | {case['peak_first_mebibytes']:.0f} "
            f"| {case['peak_step_mebibytes']:.0f} |"
        )
    lines += [
        "",
        "| outputs | layers | covariances, ms an example | variances, ms an example "
        "| variances / covariances | peak, MiB |",
        "|---" * 6 + "|",
    ]
    for case in found.get("variances", []):
        both = [f"{case['seconds'][k] / case['examples'] * 1e3:.3g}" for k in WAYS]
        peaks = case["peak_mebibytes"]
        memory = "" if peaks is None else " and ".join(f"{peaks[k]:.1f}" for k in WAYS)
        lines.append(
            f"| {case['classes']:,} | {case['layers']} | {' | '.join(both)} "
            f"| {case['times_covariances']:.2f} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write."""
    parser = parts_parser(__doc__ or "", PARTS, "cpu")
    options = parse_options(parser, PARTS, arguments)
    torch.set_num_threads(1)
    config, folder = Config(), options.results / "large_classes"
    for name, path in parts_to_measure(options, folder):
        write_json(
            path, {"config": asdict(config), "cases": PARTS[name](config), **environment(CPU)}
        )
    files = {name: folder / f"{name}.json" for name in PARTS}
    found = {
        name: json.loads(path.read_text())["cases"] for name, path in files.items() if path.exists()
    }
    text = table(found)
    (folder / "table.md").write_text(text)
    print(text)
    print(f"Written to {folder}/")


if __name__ == "__main__":
    main()
