"""A curvature pass and an evidence update on two ranks against one, and what communication takes.

Two processes of one thread each, joined by gloo. In each round, taking turns: rank 0 alone passes
over all images while rank 1 waits; both pass over half of them, and reduce; then eigenvalues, alone
and shared out; and the reduction by itself. WRN-16-4 Fixup, CIFAR-10 shapes, float32. The proofs of
a pass's first batch are made before. Written to ``results/ranks_timing.json`` (of the working
directory), with the bytes that travelled beside what the formulas of `simulate_ranks` say.

Run it with ``make ranks-timing`` on an otherwise idle machine: two minutes.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

from experiments.contenders import network
from experiments.options import add_results
from experiments.simulate_ranks import Layer, bytes_of_factors
from experiments.timing import medians
from kfac_backend.blocks.block import KroneckerBlock, compute_eigenvalues
from kfac_backend.distributed import Ranks
from kfac_backend.factors import CurvaturePass
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "measure"]

RANKS = 2


@dataclass(frozen=True)
class Config:
    """What is measured, and how often."""

    num_images: int = 256
    batch_size: int = 32
    repetitions: int = 3
    kfac_approx: str = "reduce"
    width: int = 4


def measure(config: Config) -> dict[str, Any]:
    """Seconds of each work in each round, their medians, and the bytes that were reduced."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, json.dumps(asdict(config))), RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    median = medians(found["seconds"])
    together = median["pass, two ranks"]
    return {
        "config": asdict(config),
        "median_seconds": median,
        "speed_up_of_the_pass": median["pass, one rank"] / together,
        "speed_up_of_the_eigenvalues": median["eigenvalues, one rank"]
        / median["eigenvalues, two ranks"],
        "communications_share": median["reduction alone"] / together,
        **found,
        **environment(torch.device("cpu")),
    }


def table(found: dict[str, Any]) -> str:
    """The medians as Markdown."""
    lines = ["| work | seconds |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in found["median_seconds"].items()]
    lines += [
        "",
        f"Two ranks of one thread against one: the pass {found['speed_up_of_the_pass']:.2f} times "
        f"as fast, the eigenvalues {found['speed_up_of_the_eigenvalues']:.2f} times; "
        f"communication takes {100 * found['communications_share']:.1f} % of the pass. "
        f"{found['bytes_reduced'] / 2**20:.1f} MiB were reduced, the formula says "
        f"{found['bytes_of_the_formula'] / 2**20:.1f}.",
    ]
    return "\n".join(lines)


def _rank(rank: int, folder: str, options: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    found = _measured(Config(**json.loads(options)), Ranks())
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def _measured(config: Config, ranks: Ranks) -> dict[str, Any]:
    device = torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(config.num_images, 3, 32, 32)
    y = torch.randint(10, (config.num_images,))
    batches = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
    model = network(device, width=config.width)
    options: dict[str, Any] = {"kfac_approx": config.kfac_approx}
    alone = CurvaturePass(model, "classification", process_group=None, **options)
    together = CurvaturePass(model, "classification", **options)

    def factors(curvature: CurvaturePass, data: Sequence[Any]) -> Any:
        for batch in data:
            curvature.add(*batch)
        return curvature.factors()

    for curvature in (alone, together):
        factors(curvature, batches[:1])  # with the proofs
    own = batches[ranks.rank :: ranks.size]
    times: dict[str, list[float]] = {}
    blocks: list[KroneckerBlock] = []
    summed: list[Tensor] = []

    def timed(name: str, work: Callable[[], Any], all_ranks: bool) -> Any:
        distributed.barrier()
        start = time.perf_counter()
        result = work() if all_ranks or ranks.rank == 0 else None
        distributed.barrier()
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(config.repetitions):
        timed("pass, one rank", lambda: factors(alone, batches), all_ranks=False)
        fitted = timed("pass, two ranks", lambda: factors(together, own), all_ranks=True)
        blocks = list(fitted.blocks.values())
        whole = [F for block in blocks for F in block.whole_factors("A timing") if F is not None]
        factors_of_all = {id(F): F for F in whole}
        summed = [F.clone() for F in factors_of_all.values()]
        timed("reduction alone", lambda t=summed: ranks.sum_(t, "a timing"), all_ranks=True)
        again = list((fitted * 1).blocks.values())  # which do not know their eigenvalues yet
        timed("eigenvalues, one rank", lambda b=again: compute_eigenvalues(b), all_ranks=False)
        timed(
            "eigenvalues, two ranks", lambda b=blocks: compute_eigenvalues(b, ranks), all_ranks=True
        )
    costs = [F.shape[:-2].numel() * F.shape[-1] ** 3 for F in summed]
    owners = ranks.owners(costs)
    of_first = sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == 0)
    layers = [Layer(b.A.shape[-1], b.B.shape[-1]) for b in blocks if b.A is not None]
    return {
        "seconds": times,
        "bytes_reduced": sum(F.nbytes for F in summed),
        "bytes_of_the_formula": bytes_of_factors(layers),
        "busiest_share": max(of_first, sum(costs) - of_first) / sum(costs),
        "load_before": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_results(parser)
    options = parser.parse_args(arguments)
    found = measure(Config())
    options.results.mkdir(parents=True, exist_ok=True)
    write_json(options.results / "ranks_timing.json", found)
    print(table(found))


if __name__ == "__main__":
    main()
