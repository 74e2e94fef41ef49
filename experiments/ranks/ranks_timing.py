"""A curvature pass and an evidence update on several ranks against one, and the bytes sent.

The ranks are processes of one thread each, joined by gloo. In each round, rank 0 alone passes over
all images while the others wait. Then all pass over their parts and reduce, and the reduction is
timed by itself. Eigenvalues are timed alone and shared out, the eigenvectors of a predictive shared
out. The network is WRN-16-4 Fixup with CIFAR-10 shapes in float32. The proofs of a pass's first
batch are made before. Bytes sent are those that the machine's loopback device counts, which other
programs may use, too; they are written beside those of the formulas in ``docs/scaling.md``.

Run it with ``make ranks-timing`` on an otherwise idle machine: two minutes. It writes
``results/ranks_timing.json`` (of the working directory). With ``--ranks 4`` it is
``results/ranks_timing_four.json``; times mean something only if there is a core for each rank.
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

from experiments.options import add_results
from experiments.speed.contenders import network
from experiments.timing import medians
from kfac_backend.blocks.block import (
    KroneckerBlock,
    compute_eigenvalues,
    decompose_on_ranks,
)
from kfac_backend.curvature import CurvaturePass
from kfac_backend.ranks import Ranks
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "measure"]

WORDS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    ranks: int = 2
    num_images: int = 256
    batch_size: int = 32
    repetitions: int = 3
    kfac_approx: str = "reduce"
    width: int = 4


def measure(config: Config) -> dict[str, Any]:
    """Seconds of each work in each round, their medians, and the bytes that were reduced."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, json.dumps(asdict(config))), config.ranks)
        found = json.loads((Path(folder) / "found.json").read_text())
    median = medians(found["seconds"])
    several = f"{WORDS[config.ranks]} ranks"
    together = median[f"pass, {several}"]
    ring = 2 * (config.ranks - 1) * found["bytes_of_the_formula"]
    return {
        "config": asdict(config),
        "median_seconds": median,
        "speed_up_of_the_pass": median["pass, one rank"] / together,
        "speed_up_of_the_eigenvalues": median["eigenvalues, one rank"]
        / median[f"eigenvalues, {several}"],
        "bytes_of_a_ring": ring,
        "median_bytes_sent": medians(found["bytes_sent"]),
        "communications_share": median["reduction alone"] / together,
        **found,
        **environment(torch.device("cpu")),
    }


def table(found: dict[str, Any]) -> str:
    """The medians as Markdown."""
    lines = ["| work | seconds |", "|---|---|"]
    lines[0] += " MiB sent by all |"
    lines[1] += "---|"
    sent = found["median_bytes_sent"]
    lines += [
        f"| {name} | {value:.3f} | {sent[name] / 2**20:.1f} |"
        for name, value in found["median_seconds"].items()
    ]
    several = WORDS[found["config"]["ranks"]].capitalize()
    lines += [
        "",
        f"{several} ranks of one thread against one: the pass "
        f"{found['speed_up_of_the_pass']:.2f} times as fast, the eigenvalues "
        f"{found['speed_up_of_the_eigenvalues']:.2f} times; "
        f"communication takes {100 * found['communications_share']:.1f} % of the pass. "
        f"{found['bytes_reduced'] / 2**20:.1f} MiB were reduced, the formula says "
        f"{found['bytes_of_the_formula'] / 2**20:.1f}; a ring of {several.lower()} sends "
        f"{found['bytes_of_a_ring'] / 2**20:.1f} MiB of them in all.",
    ]
    return "\n".join(lines)


def _rank(rank: int, folder: str, options: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    store, config = f"file://{folder}/store", Config(**json.loads(options))
    distributed.init_process_group("gloo", store, rank=rank, world_size=config.ranks)
    found = _measured(config, Ranks())
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
    sent: dict[str, list[int]] = {}
    several = f"{WORDS[config.ranks]} ranks"
    blocks: list[KroneckerBlock] = []
    summed: list[Tensor] = []

    def timed(name: str, work: Callable[[], Any], all_ranks: bool) -> Any:
        distributed.barrier()
        start, before = time.perf_counter(), _bytes_on_loopback()
        result = work() if all_ranks or ranks.rank == 0 else None
        distributed.barrier()
        times.setdefault(name, []).append(time.perf_counter() - start)
        sent.setdefault(name, []).append(_bytes_on_loopback() - before)
        return result

    for _ in range(config.repetitions):
        timed("pass, one rank", lambda: factors(alone, batches), all_ranks=False)
        fitted = timed(f"pass, {several}", lambda: factors(together, own), all_ranks=True)
        blocks = list(fitted.blocks.values())
        whole = [F for block in blocks for F in block.whole_factors("A timing") if F is not None]
        factors_of_all = {id(F): F for F in whole}
        summed = [F.clone() for F in factors_of_all.values()]
        timed("reduction alone", lambda t=summed: ranks.sum_(t, "a timing"), all_ranks=True)
        again = list((fitted * 1).blocks.values())  # new blocks, without eigenvalues yet
        timed("eigenvalues, one rank", lambda b=again: compute_eigenvalues(b), all_ranks=False)
        for name, work in (
            ("eigenvalues", compute_eigenvalues),
            ("eigenvectors", decompose_on_ranks),
        ):
            what = f"{name}, {several}"
            timed(what, lambda w=work, b=blocks: w(b, ranks), all_ranks=True)
    costs = [F.shape[:-2].numel() * F.shape[-1] ** 3 for F in summed]
    shares = [0] * ranks.size
    for cost, owner in zip(costs, ranks.owners(costs), strict=True):
        shares[owner] += cost
    # 4 Σ (d_in² + d_out²)
    widths = [F.shape[-1] for b in blocks if b.A is not None for F in (b.A, b.B)]
    formula = sum(4 * width**2 for width in widths)
    return {
        "seconds": times,
        "bytes_reduced": sum(F.nbytes for F in summed),
        "bytes_of_the_formula": formula,
        "bytes_sent": sent,
        "busiest_share": max(shares) / sum(costs),
        "load_before": os.getloadavg()[0],
    }


def _bytes_on_loopback() -> int:
    """Bytes that this machine's processes have sent to each other; 0 if no counter exists."""
    device = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(device.read_text()) if device.exists() else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_results(parser)
    parser.add_argument(
        "--ranks", type=int, choices=WORDS, default=2, help="number of ranks; default: 2"
    )
    options = parser.parse_args(arguments)
    found = measure(Config(ranks=options.ranks))
    options.results.mkdir(parents=True, exist_ok=True)
    name = "ranks_timing" if options.ranks == 2 else f"ranks_timing_{WORDS[options.ranks]}"
    write_json(options.results / f"{name}.json", found)
    print(table(found))


if __name__ == "__main__":
    main()
