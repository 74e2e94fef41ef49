"""A curvature pass and an evidence update on several ranks against one, and the bytes sent.

The ranks are processes of one thread each, joined by gloo. In each round, rank 0 alone passes over
all images while the others wait. Then all pass over their parts and reduce, and the reduction is
timed by itself. Eigenvalues are timed alone and shared out, the eigenvectors of a predictive shared
out. Processor seconds, of the busiest rank, leave out the time in which it waits, and change little
with other work on the machine. The network is WRN-16-4 Fixup with CIFAR-10 shapes in float32. The
proofs of a pass's first batch are made before. Bytes sent are those that the machine's loopback
device counts, which other programs may use, too; they are written beside those of the formulas in
``docs/scaling.md``.

``python -m experiments.speed.ranks_timing`` takes two minutes of an otherwise idle machine with a
core for each rank; ``--data four`` has four ranks.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from experiments.speed.contenders import network
from experiments.studies import Result, markdown, study
from experiments.timing import medians
from kfac_backend.blocks.block import compute_eigenvalues, decompose
from kfac_backend.curvature import CurvaturePass
from kfac_backend.ranks import Ranks

RANKS = {"two": 2, "four": 4}
MEASURED = ("seconds", "processor_seconds", "bytes_sent")


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    name: str = "two"
    num_images: int = 256
    batch_size: int = 32
    repetitions: int = 3
    width: int = 4


def run(config: Config) -> Result:
    """Median seconds of each work, and the bytes that were reduced and sent."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, config), RANKS[config.name])
        measured = json.loads((Path(folder) / "measured.json").read_text())
    median = {f"median_{key}": medians(measured.pop(key)) for key in MEASURED}
    return median | measured


def _rank(rank: int, folder: str, config: Config) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=RANKS[config.name])
    measured = _measured(config, Ranks())
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
    distributed.destroy_process_group()


def _measured(config: Config, ranks: Ranks) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(config.num_images, 3, 32, 32)
    y = torch.randint(10, (config.num_images,))
    batches = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
    model = network(torch.device("cpu"), width=config.width)
    alone = CurvaturePass(model, "classification", process_group=None, kfac_approx="reduce")
    together = CurvaturePass(model, "classification", kfac_approx="reduce")

    def factors(curvature: CurvaturePass, data: Sequence[Any]) -> Any:
        for batch in data:
            curvature.add(*batch)
        return curvature.factors()

    for curvature in (alone, together):
        factors(curvature, batches[:1])  # with the proofs
    own = batches[ranks.rank :: ranks.size]
    times: dict[str, list[float]] = {}
    busiest: dict[str, list[float]] = {}
    sent: dict[str, list[int]] = {}
    summed, blocks, several = [], [], f"{config.name} ranks"

    def timed(name: str, work: Callable[[], Any], all_ranks: bool = True) -> Any:
        distributed.barrier()
        before, start, processor = _bytes_on_loopback(), time.perf_counter(), time.process_time()
        result = work() if all_ranks or ranks.rank == 0 else None
        processor = time.process_time() - processor
        distributed.barrier()
        times.setdefault(name, []).append(time.perf_counter() - start)
        busiest.setdefault(name, []).append(max(ranks.gather(processor)))
        sent.setdefault(name, []).append(_bytes_on_loopback() - before)
        return result

    for _ in range(config.repetitions):
        timed("pass, one rank", lambda: factors(alone, batches), all_ranks=False)
        fitted = timed(f"pass, {several}", lambda: factors(together, own))
        blocks = list(fitted.blocks.values())
        again = list(fitted.gathered(ranks).blocks.values())
        owners = ranks.owners([block.cost for block in again])
        summed = [F.matrix for block in again for F in block.factors.values()]
        owned = [
            (F.matrix.clone(), r)
            for b, r in zip(again, owners, strict=True)
            for F in b.factors.values()
        ]
        timed("reduction alone", lambda t=owned: ranks.reduce_(t))
        timed("eigenvalues, one rank", lambda b=again: compute_eigenvalues(b), all_ranks=False)
        timed(f"eigenvalues, {several}", lambda b=blocks: compute_eigenvalues(b, ranks))
        timed(f"eigenvectors, {several}", lambda b=blocks: decompose(b, ranks))
    # 4 Σ (d_in² + d_out²)
    widths = [F.shape[-1] for b in blocks if b.A is not None for F in (b.A, b.B)]
    return {
        "seconds": times,
        "processor_seconds": busiest,
        "bytes_reduced": sum(F.nbytes for F in summed),
        "bytes_of_the_formula": sum(4 * width**2 for width in widths),
        "bytes_sent": sent,
    }


def _bytes_on_loopback() -> int:
    """Bytes that this machine's processes have sent to each other; 0 if no counter exists."""
    device = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(device.read_text()) if device.exists() else 0


def table(results: list[Result]) -> str:
    """The medians of each number of ranks as Markdown."""
    text = []
    for result in results:
        sent, name = result.get("median_bytes_sent", {}), result["name"]
        columns = {"seconds": {work: f"{s:.3f}" for work, s in result["median_seconds"].items()}}
        if busiest := result.get("median_processor_seconds"):
            columns["of the busiest processor"] = {work: f"{s:.3f}" for work, s in busiest.items()}
        columns["MiB sent by all"] = {work: f"{b / 2**20:.1f}" for work, b in sent.items()}
        rows = [["work", *columns]]
        for work in result["median_seconds"]:
            rows.append([work, *(values.get(work, "") for values in columns.values())])
        reduced, formula = (result[k] / 2**20 for k in ("bytes_reduced", "bytes_of_the_formula"))
        ring = 2 * (RANKS[name] - 1) * formula
        text += [
            f"## {name.capitalize()} ranks of one thread",
            markdown(rows),
            f"{reduced:.1f} MiB were reduced, the formula says {formula:.1f}; a ring sends "
            f"{ring:.1f} MiB of them in all.",
        ]
    return "\n\n".join(text)


main = study(
    "ranks_timing",
    __doc__,
    run,
    lambda options: [Config(name) for name in options.data],
    table,
    problems=RANKS,
    default=["two"],
)

if __name__ == "__main__":
    sys.exit(main())
