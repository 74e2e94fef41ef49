"""The curvature pass and the evidence update on WRN-16-4 Fixup: ours, the peers, and the limit.

The limit of a batch is one forward pass and V backward passes to the inputs only, with frozen
weights in channels_last: V = 9 for the exact GGN of ten classes, V = 1 for one Monte Carlo sample.
All contenders take turns within one run and their medians are compared, so that ratios hold on a
noisy machine. All is in float32 with CIFAR-10 shapes and all 50 tensors; the peers have those that
they can take.

Each part is a JSON file in ``results/bench_curvature_DEVICE/`` of the working directory, written
when the part is done:

- batch_32, batch_128: every contender, and peak memory.
- growth: how the time of a batch grows with its size, and with the network's width, the images'
  size and the number of classes.
- evidence: eigenvalues and 100 steps on 50 precisions, ours against laplace-torch's.
- update: a whole update of the online loop, from its first image to the last step on the
  precisions, ours and with laplace-torch and curvlinops: 10,000 images on a GPU, 640 on a CPU.
- update_50000: our update with all of CIFAR-10's images, on a GPU.
- sizes: how a pass on a GPU depends on batch size, memory format and precision.
- factor_1024 to factor_8192: one factor of a transformer's width; the largest takes some minutes.

``make bench`` runs it in half an hour on two cores. Naming parts runs only those; ``--resume``
keeps the parts that are done.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import torch
from threadpoolctl import threadpool_limits

from experiments.options import parse_options, parts_parser, parts_to_measure
from experiments.speed import curvature_report as report
from experiments.speed.contenders import (
    PEERS,
    Work,
    limit,
    network,
    one_batch_alone,
    ours,
    peer,
    training_step,
)
from experiments.speed.evidence import evidence_work, factor_work, peer_update, update
from experiments.timing import interleaved, medians, peak_memory
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.options import Mode
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

GROWTH = {
    "batch_size": (8, 32, 128, 256),
    "width": (1, 2, 4, 8),
    "image_size": (16, 32, 48),
    "num_classes": (2, 10, 30),
}


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int = 32
    width: int = 4
    image_size: int = 32
    num_classes: int = 10
    factor_size: int = 4096
    num_data: int = 10_000
    repetitions: int = 7
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Batch:
    """A batch of noise, and networks for it."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config, self.device = config, torch.device(config.device)
        size = (config.image_size, config.image_size)
        self.x = torch.randn(config.batch_size, 3, *size, device=self.device)
        self.y = torch.randint(config.num_classes, (config.batch_size,), device=self.device)

    def network(self, channels_last: bool = False) -> torch.nn.Module:
        """A new network of the configuration."""
        return network(self.device, self.config.width, self.config.num_classes, channels_last)

    def limit(self, fisher: str) -> Work:
        """The limit for a kind of Fisher."""
        vectors = self.config.num_classes - 1 if fisher == "exact" else 1
        return limit(self.network(channels_last=True), self.x, vectors)

    def of(self, make: Callable[..., Work], *args: Any, **options: Any) -> Work:
        """A contender on a new network."""
        return make(*args, self.network(), self.x, self.y, **options)


def run_batch(config: Config) -> dict[str, Any]:
    """Seconds of all contenders on one batch, their ratios to the limit, and peak memory."""
    batch = Batch(config)
    x = batch.x.clone(memory_format=torch.channels_last)
    work: dict[str, Work] = {
        "training step": batch.of(training_step),
        "training step, channels_last": training_step(batch.network(True), x, batch.y),
        "limit, exact": batch.limit("exact"),
        "limit, mc": batch.limit("mc"),
    }
    for fisher in ("exact", "mc"):
        for kfac_approx in ("expand", "reduce"):
            options = {"kfac_approx": kfac_approx, "fisher": fisher}
            kind = f"{kfac_approx}, {fisher}"
            work[f"ours, {kind}"] = batch.of(ours, **options)
            work[f"ours alone, {kind}"] = batch.of(one_batch_alone, **options)
            work[f"KfacGGN, {kind}"] = batch.of(peer, KfacGGN, **options)
            for name, backend in PEERS.items():
                if name != "asdl" or kfac_approx == "expand":
                    work[f"{name}, {kind}"] = batch.of(peer, backend, **options)
    fast = "bf16" if batch.device.type == "cpu" else "tf32"
    for kfac_approx in ("expand", "reduce"):
        work[f"ours {fast}, {kfac_approx}, exact"] = batch.of(
            ours, kfac_approx=kfac_approx, backward_precision=fast
        )
    result = _measured(config, work)
    watched = [n for n in work if n.startswith(("training step", "limit,", "ours alone", *PEERS))]
    result["peak_mebibytes"] = {n: peak_memory(work[n], batch.device) / 2**20 for n in watched}
    return result


def run_growth(config: Config) -> dict[str, Any]:
    """Seconds of a batch at each value of each axis of `GROWTH`; other values as configured."""
    growth: dict[str, list[dict[str, Any]]] = {axis: [] for axis in GROWTH}
    for axis, values in GROWTH.items():
        for value in values:
            batch = Batch(replace(config, **{axis: value}))
            work = {"limit, exact": batch.limit("exact")}
            for kfac_approx in ("expand", "reduce"):
                kind = f"{kfac_approx}, exact"
                options = {"kfac_approx": kfac_approx, "fisher": "exact"}
                work[f"ours, {kind}"] = batch.of(ours, **options)
                work[f"curvlinops, {kind}"] = batch.of(peer, PEERS["curvlinops"], **options)
            measured = _measured(batch.config, work)
            growth[axis].append({axis: value, "median_seconds": measured["median_seconds"]})
    return {"config": asdict(config), "growth": growth, **environment(torch.device(config.device))}


def run_evidence(config: Config) -> dict[str, Any]:
    """Seconds of eigenvalues and 100 hyperparameter steps, ours and laplace-torch's."""
    device = torch.device(config.device)
    work = {}
    for kfac_approx in ("expand", "reduce"):
        mine, theirs = evidence_work(network(device), kfac_approx)
        work[f"ours, {kfac_approx}"], work[f"laplace-torch, {kfac_approx}"] = mine, theirs
    return _measured(config, work)


def run_update(config: Config) -> dict[str, Any]:
    """Seconds of updates, and of the parts of ours; peers up to 10,000 images."""
    device = torch.device(config.device)
    if device.type == "cpu":
        config = replace(config, num_data=640, batch_size=32)
    number = config.num_data // config.batch_size
    made = [Batch(replace(config, seed=i)) for i in range(number)]
    batches = [(batch.x, batch.y) for batch in made]
    first = made[0]
    parts: dict[str, list[dict[str, float]]] = {}
    work: dict[str, Work] = {}

    def add_ours(name: str, channels_last: bool, **options: Any) -> None:
        model = first.network(channels_last)
        # Proofs and the device's preparations belong only to the first update of a training.
        parts[f"{name}, first batches"] = [update(model, batches[:2], **options)]
        parts[name] = []
        work[name] = lambda: parts[name].append(update(model, batches, **options))

    def add_peer(name: str, kfac_approx: Mode) -> None:
        model = first.network()
        peer_update(model, batches[:2], kfac_approx)
        work[name] = lambda: peer_update(model, batches, kfac_approx)

    for kfac_approx in get_args(Mode):
        add_ours(f"ours, {kfac_approx}", False, kfac_approx=kfac_approx)
        if device.type == "cuda":
            options = {"backward_precision": "tf32"}
            name = f"ours, TF32, channels_last, {kfac_approx}"
            add_ours(name, True, kfac_approx=kfac_approx, backend_kwargs=options)
        if config.num_data <= 10_000:
            add_peer(f"curvlinops, {kfac_approx}", kfac_approx)
    return _measured(config, work) | {"seconds_of_parts": parts}


def run_sizes(config: Config) -> dict[str, Any]:
    """Seconds of 500 images of a pass, and peak memory, for several kinds of batches."""
    device = torch.device(config.device)
    seconds_of_500: dict[str, float] = {}
    peak: dict[str, float] = {}
    for N, last, precision, kfac_approx in product(
        (128, 500, 1000), (False, True), ("float32", "tf32"), get_args(Mode)
    ):
        batch = Batch(replace(config, batch_size=N))
        x = batch.x.clone(memory_format=torch.channels_last) if last else batch.x
        options = {"kfac_approx": kfac_approx, "backward_precision": precision}
        work = ours(batch.network(channels_last=last), x, batch.y, **options)
        name = (
            f"{N} images, {'channels_last' if last else 'contiguous'}, {precision}, {kfac_approx}"
        )
        measured = interleaved({name: work}, config.repetitions, device)
        seconds_of_500[name] = medians(measured)[name] * 500 / N
        peak[name] = peak_memory(work, device) / 2**20
    return {
        "config": asdict(config),
        "seconds_of_500_images": seconds_of_500,
        "peak_mebibytes": peak,
        **environment(device),
    }


def run_factor(config: Config) -> dict[str, Any]:
    """Seconds of the work on one factor, on one core, as several factors run at once.

    In one process the threads of SciPy's BLAS would also block torch's.
    """
    device, threads = torch.device(config.device), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            return _measured(config, factor_work(config.factor_size, device))
    finally:
        torch.set_num_threads(threads)


PARTS: dict[str, tuple[Callable[[Config], dict[str, Any]], dict[str, int]]] = {
    "batch_32": (run_batch, {}),
    "batch_128": (run_batch, {"batch_size": 128, "repetitions": 3}),
    "growth": (run_growth, {"repetitions": 2}),
    "evidence": (run_evidence, {}),
    "update": (run_update, {"batch_size": 1000, "repetitions": 1}),
    "update_50000": (run_update, {"batch_size": 1000, "repetitions": 1, "num_data": 50_000}),
    "sizes": (run_sizes, {"repetitions": 3}),
    "factor_1024": (run_factor, {"factor_size": 1024}),
    "factor_4096": (run_factor, {"factor_size": 4096, "repetitions": 3}),
    "factor_8192": (run_factor, {"factor_size": 8192, "repetitions": 1}),
}
"""Name of a part -> its function, and changes of the configuration."""

ON_GPU = ("update_50000", "sizes")
"""Parts that are left out on a CPU."""


def _measured(config: Config, work: dict[str, Work]) -> dict[str, Any]:
    device = torch.device(config.device)
    measured = interleaved(work, config.repetitions, device, warm_up=config.repetitions > 1)
    median = medians(measured)
    limits = {
        fisher: min(s for n, s in median.items() if n.startswith("limit") and n.endswith(fisher))
        for fisher in ("exact", "mc")
        if f"limit, {fisher}" in median
    }
    ratios = {
        name: value / limits[fisher]
        for name, value in median.items()
        if (fisher := name.rsplit(", ")[-1]) in limits and not name.startswith("limit")
    }
    return {
        "config": asdict(config),
        "median_seconds": median,
        "times_the_limit": ratios,
        "seconds": measured,
        **environment(device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure what is missing, print and write."""
    parser = parts_parser(__doc__ or "", PARTS, Config.device)
    parser.add_argument(
        "--repetitions", type=int, help="number of repetitions; default: each part's own"
    )
    options = parse_options(parser, PARTS, arguments)
    if torch.device(options.device).type == "cpu":
        options.parts = [part for part in options.parts if part not in ON_GPU]
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="laplace")
    folder = options.results / f"bench_curvature_{options.device}"
    for name, path in parts_to_measure(options, folder):
        run, differs = PARTS[name]
        if options.repetitions:
            differs = differs | {"repetitions": options.repetitions}
        write_json(path, run(replace(Config(device=options.device), **differs)))
    print(report.write(folder))
    print(f"Written to {folder}/")


if __name__ == "__main__":
    main()
