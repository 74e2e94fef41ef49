"""The linearised predictive's covariances on WRN-16-4 Fixup: ours, laplace-torch's, and the limit.

The limit of a batch is a forward pass and C = 10 backward passes to the inputs only, in
channels_last. All is in float32 with CIFAR-10 shapes and all 50 tensors; laplace-torch's are
without Fixup's scalars. The posterior belongs to a network trained for a few epochs, with a
precision per tensor learned at the end (reduce). The images are CIFAR-10 (JPEG) if they exist
(``MARGLIK_DATA``, or ../shared/data), else noise.

Each part is a JSON file in ``results/bench_predictive_DEVICE/`` of the working directory, written
when the part is done:

- batch_32: interleaved seconds of a training step, the limit, and ours with all layers, with the
  last; and the peak memory of each, beside the posterior's eigenvectors.
- jacobians: laplace-torch's Jacobian path at growing batches, each in a process of its own that
  may use 24 GiB.
- stream: 10,000 images.

``make bench`` runs it. Naming parts runs only those; ``--resume`` keeps the parts that are done.
"""

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data import default_source, images
from experiments.options import parse_options, parts_parser, parts_to_measure
from experiments.speed.contenders import limit, network, training_step
from experiments.timing import interleaved, medians, peak_memory, seconds
from marglik import marglik_training
from marglik.data import TensorBatches
from marglik.data.batches import split_batches
from marglik.posterior.laplace_torch import KronLaplace
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "table"]


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int = 32
    num_classes: int = 10
    repetitions: int = 5
    jacobian_batches: tuple[int, ...] = (1, 8)
    num_images: int = 10_000
    train_images: int = 2000
    epochs: int = 4
    """Epochs of Adam before the posterior is made."""
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def run_batch(config: Config) -> dict[str, Any]:
    """Median seconds of a batch, their ratios to the limit and to a training step, and memory."""
    device = torch.device(config.device)
    name, batches = _images(config, device)
    x, laplace = batches[0], _posterior(config)
    y = torch.zeros(len(x), dtype=torch.long, device=device)
    frozen = network(device, num_classes=config.num_classes, channels_last=True)
    model = network(device, num_classes=config.num_classes)
    work = {
        "training step": training_step(model, x, y),
        "limit": limit(frozen, x, config.num_classes),
        "ours": lambda: laplace.output_distribution(x),
        "ours, last layer": lambda: laplace.output_distribution(x, layers="last"),
    }
    measured = interleaved(work, config.repetitions, device)
    median = medians(measured)
    return {
        "config": asdict(config),
        "data": name,
        "median_seconds": median,
        "times_the_limit": {name: value / median["limit"] for name, value in median.items()},
        "peak_mebibytes": {name: peak_memory(work[name], device) / 2**20 for name in work},
        "seconds": measured,
        **environment(device),
    }


def run_jacobians(config: Config) -> dict[str, Any]:
    """laplace-torch's Jacobian path at growing batches, up to the first that does not fit."""
    found = []
    for batch_size in config.jacobian_batches:
        command = [sys.executable, "-m", "experiments.speed.jacobian_path"]
        done = subprocess.run(
            [*command, "--batch_size", str(batch_size)], capture_output=True, text=True
        )
        lines = done.stdout.strip().splitlines()
        failed = {"batch_size": batch_size, "error": f"the process ended with {done.returncode}"}
        found.append(json.loads(lines[-1]) if done.returncode == 0 and lines else failed)
        print(found[-1], flush=True)
        if "error" in found[-1]:
            break
    return {"config": asdict(config), "batches": found, **environment(torch.device("cpu"))}


def run_stream(config: Config) -> dict[str, Any]:
    """Seconds and peak memory for many images, in batches."""
    device = torch.device(config.device)
    laplace = _posterior(config)
    name, batches = _images(config, device)
    before, resident = _peak_resident(), []

    def work() -> None:
        for x in batches:
            laplace.output_distribution(x)
            resident.append(_peak_resident())

    processor = time.process_time()
    elapsed = seconds(work, device)
    processor = time.process_time() - processor
    num_images = sum(len(x) for x in batches)
    return {
        "config": asdict(config),
        "data": name,
        "num_images": num_images,
        "total_seconds": elapsed,
        "processor_seconds": processor,
        "milliseconds_per_image": 1000 * elapsed / num_images,
        "resident_mebibytes_before": before / 2**20,
        "resident_mebibytes_after_a_tenth": resident[len(batches) // 10] / 2**20,
        "resident_mebibytes_at_most": _peak_resident() / 2**20,
        **environment(device),
    }


def table(folder: Path) -> str:
    """The finished parts as Markdown."""
    lines = [
        "| 32 images | seconds | times the limit | MiB |",
        "|---|---|---|---|",
    ]
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if "batch_32" in parts:
        part = parts["batch_32"]
        for name, value in part["median_seconds"].items():
            ratio, memory = part["times_the_limit"][name], part["peak_mebibytes"][name]
            lines.append(f"| {name} | {value:.2f} | {ratio:.2f} | {memory:.0f} |")
    if "jacobians" in parts:
        lines += ["", "| laplace-torch, batch | seconds an image | GiB |", "|---|---|---|"]
        for entry in parts["jacobians"]["batches"]:
            size = entry["batch_size"]
            each = f"{entry['seconds'] / size:.2f}" if "seconds" in entry else entry["error"]
            memory = entry.get("peak_gibibytes", float("nan"))
            lines.append(f"| {size} | {each} | {memory:.1f} |")
    if "stream" in parts:
        part = parts["stream"]
        lines += [
            "",
            f"{part['num_images']} images of {part['data']}: {part['total_seconds']:.0f} s, of "
            f"which {part['processor_seconds']:.0f} s on the processor; "
            f"{part['resident_mebibytes_after_a_tenth']:.0f} MiB resident after a tenth of them, "
            f"{part['resident_mebibytes_at_most']:.0f} MiB at the most.",
        ]
    return "\n".join(lines)


PARTS = {"batch_32": run_batch, "jacobians": run_jacobians, "stream": run_stream}


def _posterior(config: Config) -> KronLaplace:
    """Posterior of a network that was trained for a few epochs."""
    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    model = network(device, num_classes=config.num_classes)
    laplace, *_ = marglik_training(
        model,
        _train_loader(config, device),
        optimizer_kwargs={"lr": 1e-3},
        n_epochs=config.epochs,
        marglik_frequency=config.epochs,
        n_hypersteps=100,
        prior_prec_init=5.0,
        kfac_approx="reduce",
    )
    _, (x, *_) = _images(config, device)
    laplace.output_distribution(x[:2])  # the eigenvectors, and the proof that hooks see all
    laplace.output_distribution(x[:2], layers="last")
    return laplace


def _train_loader(config: Config, device: torch.device) -> Any:
    """Batches of the training images."""
    if default_source() != "jpeg":
        x = torch.randn(config.train_images, 3, 32, 32, device=device)
        y = torch.randint(config.num_classes, (len(x),), device=device)
        return TensorBatches(x, y, 64, shuffle=True, seed=config.seed)
    splits = images("jpeg", max_train=config.train_images).load()
    return split_batches(splits, "train", 64, device=device)


def _images(config: Config, device: torch.device) -> tuple[str, list[Tensor]]:
    if default_source() != "jpeg":
        x = torch.randn(config.num_images, 3, 32, 32, device=device)
        return "noise", list(x.split(config.batch_size))
    splits = images("jpeg").load()
    batches = split_batches(splits, "test", config.batch_size, device=device)
    number = -(-config.num_images // config.batch_size)
    return splits.name, [x for x, _ in batches if isinstance(x, Tensor)][:number]


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure what is missing, print and write."""
    options = parse_options(parts_parser(__doc__ or "", PARTS, Config.device), PARTS, arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder = options.results / f"bench_predictive_{options.device}"
    for name, path in parts_to_measure(options, folder):
        write_json(path, PARTS[name](replace(Config(), device=options.device)))
    (folder / "table.md").write_text(table(folder) + "\n")
    print(table(folder))
    print(f"Written to {folder}/")


if __name__ == "__main__":
    main()
