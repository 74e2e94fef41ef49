"""Table 1 of Eschenhagen et al. 2023: seconds of one K-FAC step on WRN-16-4, by batch size.

The paper (V100, batch 128, 256, 512, 1024, 2048; factors and inverses in each step, one Monte Carlo
sample): expand .24, .38, .75, 1.36 s, out of memory; reduce .17, .24, .43, .63, 1.17 s.

Here the network is WRN-16-4 Fixup on noise of CIFAR-10's shape, in float32 with contiguous images.
The contenders (`steps.py`) are a step of plain SGD, our K-FAC steps in both modes and the peers'.
Further kinds of steps give the cost of factors every 10 and inverses every 50 steps. All contenders
of a batch size take turns in one run. A ratio is the median over rounds of a contender's seconds
divided by those of the SGD step of the same round.

``make update-step-timing`` measures the missing batch sizes, an hour on an idle machine.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from experiments.speed.contenders import network
from experiments.speed.steps import OURS, PARTS, PEERS, Contender, sgd
from experiments.studies import markdown, study
from experiments.timing import interleaved, median_ratios, medians
from marglik.storage.provenance import environment

__all__ = ["Config", "amortised", "main", "run", "table"]

BATCHES = {"cpu": (128, 512), "cuda": (128, 256, 512, 1024, 2048)}
CONTENDERS: dict[str, Contender] = {"SGD": sgd, **OURS, **PARTS, **PEERS}
MODES = ("expand", "reduce")
PAPER = {
    "expand": {128: 0.24, 256: 0.38, 512: 0.75, 1024: 1.36},
    "reduce": {128: 0.17, 256: 0.24, 512: 0.43, 1024: 0.63, 2048: 1.17},
}
"""Seconds of a step on a V100."""


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int
    device: str = "cpu"
    repetitions: int = 5
    width: int = 4

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"batch_{self.batch_size}"


def run(config: Config) -> dict[str, Any]:
    """Seconds of a step of each contender, and their ratios to the SGD step."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    device, N = torch.device(config.device), config.batch_size
    torch.manual_seed(0)
    x = torch.randn(N, 3, 32, 32, device=device)
    y = torch.randint(10, (N,), device=device)
    work, left_out = {}, {}
    for name, contender in CONTENDERS.items():
        step = contender(network(device, config.width), x, y)
        try:
            step()  # warms up, too
            work[name] = step
        except Exception as error:  # a peer may not take this model, or run out of memory
            if name not in PEERS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
    measured = interleaved(work, config.repetitions, device, warm_up=False)
    ratios = median_ratios(measured, "SGD")
    return {
        "config": asdict(config),
        "times_sgd": ratios,
        "amortised_times_sgd": {mode: amortised(ratios, mode) for mode in MODES},
        "median_seconds": medians(measured),
        "seconds": measured,
        "left_out": left_out,
        **environment(device),
    }


def amortised(ratios: Mapping[str, float], mode: str) -> float:
    """Mean ratio over the 50 steps from one inverse to the next; factors are new in every tenth."""
    total = 45 * ratios["old inverses"]
    total += 4 * ratios[f"new factors, {mode}"] + ratios[f"new inverses, {mode}"]
    return total / 50


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Times divided by an SGD step's, and seconds beside the paper's; a column for each batch."""
    sizes = {part["config"]["batch_size"]: part for part in found}
    sizes = dict(sorted(sizes.items()))
    names = list(dict.fromkeys(name for part in found for name in part["times_sgd"]))

    def row(label: str, kind: str, name: str) -> list[str]:
        values = [part[kind] for part in sizes.values()]
        return [label, *(f"{of[name]:.2f}" if name in of else "" for of in values)]

    batches = [f"{N}" for N in sizes]
    every = "factors every 10 and inverses every 50 steps"
    rows = [["times an SGD step, batch", *batches]]
    rows += [row(f"marglik, {mode}, {every}", "amortised_times_sgd", mode) for mode in MODES]
    rows += [row(name, "times_sgd", name) for name in names if name != "SGD"]
    seconds = [["seconds, batch", *batches]]
    seconds += [row(name, "median_seconds", name) for name in ("SGD", *names[1:3])]
    for mode, of_paper in PAPER.items():
        cells = [f"{of_paper[N]:.2f}" if N in of_paper else "" for N in sizes]
        seconds.append([f"the paper (V100), {mode}", *cells])
    left_out = {name: why for part in sizes.values() for name, why in part["left_out"].items()}
    missing = [f"{name}: left out ({why})." for name, why in left_out.items()]
    return "\n\n".join([markdown(rows), markdown(seconds), *missing])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the table; returns the exit status."""
    return study(
        "update_step_timing_{device}",
        __doc__,
        run,
        lambda options: [Config(size, options.device) for size in BATCHES[options.device]],
        table,
        arguments,
        extra={"--device": {"choices": BATCHES, "default": "cpu"}},
    )


if __name__ == "__main__":
    sys.exit(main())
