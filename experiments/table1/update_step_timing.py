"""Table 1 of Eschenhagen et al. 2023: seconds of one K-FAC step on WRN-16-4, by batch size.

The paper (V100, batch 128, 256, 512, 1024, 2048; factors and inverses in each step, one Monte Carlo
sample): expand .24, .38, .75, 1.36 s, out of memory; reduce .17, .24, .43, .63, 1.17 s.

Here the network is WRN-16-4 Fixup on noise of CIFAR-10's shape, in float32 with contiguous images.
The contenders (`contenders.py`) are a step of plain SGD, our K-FAC steps in both modes and the
peers'. Further kinds of steps give the cost of factors every 10 and inverses every 50 steps. All
contenders of a batch size take turns in one run. A ratio is the median over rounds of a contender's
seconds divided by those of the SGD step of the same round.

``results/update_step_timing_DEVICE/`` gets one JSON file for each batch size, and ``memory.json``
with the peak memory of tensors, each contender in a process of its own.

Run it with ``make update-step-timing``. On a busy machine use ``--threads 1 --clock processor``:
processor seconds of one thread depend less on other work. ``--batches 128 256 512 1024 2048`` are
the paper's sizes, the default on a GPU.
"""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from experiments.options import add_results
from experiments.processes import as_they_finish
from experiments.speed.contenders import Work, network
from experiments.table1 import report
from experiments.table1.contenders import OURS, PARTS, PEERS, Contender, sgd
from experiments.timing import CLOCKS, interleaved, median_ratios, medians, peak_memory
from kfac_backend.optimizer import KfacPreconditioner
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

BATCHES = {"cpu": (32, 64, 128, 256, 512), "cuda": (128, 256, 512, 1024, 2048)}
MEMORY_BATCHES = {"cpu": (32, 64), "cuda": (128, 2048)}
"""Two sizes, because memory grows linearly with the batch."""

CONTENDERS: dict[str, Contender] = {"SGD": sgd, **OURS, **PARTS, **PEERS}


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int = 128
    repetitions: int = 5
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    threads: int = 2
    """Threads of a CPU."""
    clock: str = "wall"
    """Clock of the seconds, "wall" or "processor"; see `timing.CLOCKS`."""
    factor_every: int = 10
    """Steps between new factors in the amortised step; see `amortised`."""
    update_every: int = 50
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class MemoryTask:
    """One contender's peak memory at one batch size."""

    contender: str
    config: Config

    @property
    def name(self) -> str:
        """Name in log lines."""
        return f"{self.contender}, batch {self.config.batch_size}"


def run(config: Config) -> dict[str, Any]:
    """Seconds of a step of each contender, and their ratios to the SGD step."""
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    work, left_out = {}, {}
    for name in config.contenders:
        step = make(name, config)
        try:
            step()  # warms up, too
        except Exception as error:  # a peer may not take this model, or run out of memory
            if name not in PEERS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
        else:
            work[name] = step
    measured = interleaved(work, config.repetitions, device, config.clock, warm_up=False)
    ratios = median_ratios(measured, "SGD")
    modes = report.MODES if set(PARTS) <= set(ratios) else ()
    return {
        "config": asdict(config),
        "times_sgd": ratios,
        "amortised_times_sgd": {mode: amortised(ratios, mode, config) for mode in modes},
        "median_seconds": medians(measured),
        "seconds": measured,
        "left_out": left_out,
        **environment(device),
    }


def amortised(ratios: dict[str, float], mode: str, config: Config) -> float:
    """Mean ratio over the steps from one inverse to the next; the first step has new factors."""
    steps, factors = config.update_every, config.update_every // config.factor_every
    total = (steps - factors) * ratios["old inverses"]
    total += (factors - 1) * ratios[f"new factors, {mode}"] + ratios[f"new inverses, {mode}"]
    return total / steps


def run_memory(config: Config) -> dict[str, Any]:
    """Peak memory of each contender at two batch sizes, and the memory of factors and inverses."""
    names = [name for name in config.contenders if name not in PARTS]
    tasks = [
        MemoryTask(name, replace(config, batch_size=size))
        for name in names
        for size in MEMORY_BATCHES[torch.device(config.device).type]
    ]
    mebibytes: dict[str, dict[str, float]] = {name: {} for name in names}
    left_out = {}
    for task, result in as_they_finish(peak_bytes, tasks, jobs=1):
        if isinstance(result, Exception):
            left_out[task.name] = f"{type(result).__name__}: {result}"
        else:
            mebibytes[task.contender][str(task.config.batch_size)] = result / 2**20
    device = torch.device(config.device)
    return {
        "config": asdict(config),
        "peak_mebibytes": mebibytes,
        "factors_mebibytes": factor_bytes(device) / 2**20,
        "left_out": left_out,
        **environment(device),
    }


def peak_bytes(task: MemoryTask) -> int:
    """Peak memory of tensors in the first two steps, beyond the model and the batch."""
    step = make(task.contender, task.config)

    def two_steps() -> None:  # the second has the state that the first left
        step()
        step()

    return peak_memory(two_steps, torch.device(task.config.device))


def factor_bytes(device: torch.device) -> int:
    """Memory of one copy of all factors in float32; the same for expand and reduce."""
    model = network(device)
    names = KfacPreconditioner(model, "classification").names
    total = 0
    for name, p in model.named_parameters():
        if name in names:
            rows, columns = (len(p), p[0].numel()) if p.dim() > 1 else (p.numel(), 0)
            total += 4 * (rows**2 + columns**2)
    return total


def make(name: str, config: Config) -> Work:
    """A contender's step on a new network."""
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    x = torch.randn(config.batch_size, 3, 32, 32, device=device)
    y = torch.randint(10, (config.batch_size,), device=device)
    return CONTENDERS[name](network(device), x, y)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure what is missing, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--batches", type=int, nargs="+",
        help="batch sizes; default: the paper's on a GPU, smaller ones on a CPU",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=Config.repetitions)
    parser.add_argument(
        "--threads", type=int, default=Config.threads, help="number of threads on a CPU"
    )
    parser.add_argument("--clock", choices=CLOCKS, default=Config.clock)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME",
        help="contenders to time; SGD is always added; default: all of "
        + ", ".join(repr(name) for name in CONTENDERS),
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--resume", action="store_true", help="keep the parts that have results")
    parser.add_argument(
        "--device", default=Config.device, help=f"where to measure; default: {Config.device}"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    config = Config(
        repetitions=options.repetitions,
        contenders=tuple(name for name in CONTENDERS if name in {"SGD", *options.contenders}),
        threads=options.threads,
        clock=options.clock,
        device=options.device,
    )
    folder = options.results / f"update_step_timing_{torch.device(options.device).type}"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = options.batches or BATCHES[torch.device(options.device).type]
    work = {f"batch_{size}": (run, replace(config, batch_size=size)) for size in sizes}
    if not options.no_memory:
        work["memory"] = (run_memory, config)
    for name, (function, of_part) in work.items():
        path = folder / f"{name}.json"
        if options.resume and path.exists():
            print(f"{name}: kept", flush=True)
        else:
            print(f"{name}: measuring", flush=True)
            write_json(path, function(of_part))
    print(report.write(folder))
    print(f"Written to {folder}/")


if __name__ == "__main__":
    main()
