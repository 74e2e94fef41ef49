"""The linearised predictive's covariances on WRN-16-4 Fixup: ours, laplace-torch's, and the limit.

The limit of a batch is a forward pass and C = 10 backward passes to the inputs only, in
channels_last. All is in float32 with CIFAR-10 shapes and all 50 tensors; laplace-torch's are
without Fixup's scalars. The posterior belongs to a network trained for a few epochs on CIFAR-10
(JPEG), with a precision per tensor learned at the end (reduce).

Each part is a JSON file in ``results/bench_predictive_cpu/``:

- batch_32: interleaved seconds of a training step, the limit, and ours with all layers and with the
  last; and the peak memory of each, beside the posterior's eigenvectors.
- jacobians_1, jacobians_8: laplace-torch's Jacobian path, in a process that may use 24 GiB. Its
  Jacobians (N, C, P) take 3.3 GiB for 32 images, and arrays made from them several times that.

``python -m experiments.speed.bench_predictive`` runs the missing parts.
"""

import resource
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

from experiments.data import images
from experiments.speed.contenders import limit, network, training_step
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, medians, peak_memory
from marglik import marglik_training
from marglik.application.data.splits import split_batches

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A part: "batch" or "jacobians", and a number of images."""

    kind: str
    batch_size: int


PARTS = (Part("batch", 32), Part("jacobians", 1), Part("jacobians", 8))


def run(part: Part) -> Result:
    """Measure a part."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    return run_batch(part.batch_size) if part.kind == "batch" else run_jacobians(part.batch_size)


def run_batch(
    N: int, repetitions: int = 5, epochs: int = 4, num_train: int = 2000
) -> dict[str, Any]:
    """Median seconds of a batch, their ratios to the limit, and memory."""
    splits = images(max_train=num_train).load()
    test: Any = next(iter(split_batches(splits, "test", N)))
    train: Any = split_batches(splits, "train", 64)
    x, y = test
    laplace, *_ = marglik_training(
        network(CPU),
        train,
        optimizer_kwargs={"lr": 1e-3},
        n_epochs=epochs,
        marglik_frequency=epochs,
        n_hypersteps=100,
        prior_prec_init=5.0,
        kfac_approx="reduce",
    )
    laplace.output_distribution(x[:2])  # the eigenvectors, and the proof that hooks see all
    laplace.output_distribution(x[:2], layers="last")
    work = {
        "training step": training_step(network(CPU), x, y),
        "limit": limit(network(CPU, channels_last=True), x, 10),
        "ours": lambda: laplace.output_distribution(x),
        "ours, last layer": lambda: laplace.output_distribution(x, layers="last"),
    }
    measured = interleaved(work, repetitions, CPU)
    median = medians(measured)
    return {
        "data": splits.name,
        "median_seconds": median,
        "times_the_limit": {name: value / median["limit"] for name, value in median.items()},
        "peak_mebibytes": {name: peak_memory(work[name], CPU) / 2**20 for name in work},
        "seconds": measured,
    }


def run_jacobians(N: int, gibibytes: int = 24, repetitions: int = 1) -> dict[str, Any]:
    """Seconds of laplace-torch's mean and covariance for a batch, and the process's peak memory."""
    # Only data is limited: the libraries' mappings are large but take no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (gibibytes << 30, gibibytes << 30))
    model = network(CPU)
    for p in model.parameters():
        p.requires_grad_(p.numel() > 1)  # laplace-torch's backends cannot take Fixup's scalars
    x, y = torch.randn(N, 3, 32, 32), torch.arange(N) % 10
    laplace: Any = Laplace(model, "classification", "all", "kron", backend=CurvlinopsGGN)
    laplace.fit(DataLoader(TensorDataset(x[:4], y[:4]), batch_size=4))
    work = {"covariances": lambda: laplace._glm_predictive_distribution(x)}
    seconds = medians(interleaved(work, repetitions, CPU))["covariances"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return {"batch_size": N, "seconds": seconds, "peak_gibibytes": peak}


def table(results: list[Result]) -> str:
    """The finished parts as Markdown."""
    rows = [["32 images", "seconds", "times the limit", "MiB"]]
    others = [["laplace-torch, batch", "seconds an image", "GiB"]]
    for part in results:
        if "batch_size" in part:
            each, peak = part["seconds"] / part["batch_size"], part["peak_gibibytes"]
            others.append([str(part["batch_size"]), f"{each:.2f}", f"{peak:.1f}"])
            continue
        for name, value in part["median_seconds"].items():
            ratio, memory = part["times_the_limit"][name], part["peak_mebibytes"][name]
            rows.append([name, f"{value:.2f}", f"{ratio:.2f}", f"{memory:.0f}"])
    return f"{markdown(rows)}\n\n{markdown(others)}"


main = study("bench_predictive_cpu", __doc__, run, lambda options: PARTS, table, threads=None)

if __name__ == "__main__":
    sys.exit(main())
