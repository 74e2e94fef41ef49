"""Growth of time and memory of a batch's factors: exponents, beside those of the limit.

Each axis changes one size. Time and peak memory are fitted by c·size^e, a line through all points
on logarithmic axes, for the limit (a forward pass and the backward passes to the inputs only) and
for ours with expand and reduce. An exponent of ours more than 0.15 above the limit's is marked:
something grows that need not. A smaller exponent is overhead that matters less with size.

Image axes use WRN Fixup with the exact GGN; language axes use GPT with one Monte Carlo sample per
token. Seconds are processor seconds of one thread, medians of interleaved rounds. Memory is the
peak of tensors beyond those that were there before, for at most 30 backward vectors. The limit's
memory includes the factors, which any pass must hold. `bench_curvature` has the other backends
along four of these axes.

Each axis is a JSON file in ``results/growth/`` of the working directory, beside ``table.md`` and
``growth.png``. ``make growth`` takes ten minutes of one core and resumes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from experiments.options import parse_options, parts_parser, parts_to_measure
from experiments.speed.contenders import (
    Work,
    first_vectors,
    language_limit,
    limit,
    network,
    one_batch_alone,
)
from experiments.timing import interleaved, medians, peak_memory
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from marglik.models import GPT
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["AXES", "Config", "exponent", "factor_mebibytes", "measure", "surprises", "table"]

CPU = torch.device("cpu")
MODES = ("expand", "reduce")
KINDS = ("limit", *MODES)
MOST_ABOVE = 0.15
"""Largest exponent above the limit's that is not marked."""
MOST_VECTORS = 30
"""Largest number of backward vectors when memory is measured."""


@dataclass(frozen=True)
class Config:
    """Configuration of one point; an axis changes one of its values."""

    repetitions: int = 3
    seed: int = 0
    # images
    batch_size: int = 16
    width: int = 1
    depth: int = 16
    image_size: int = 16
    num_classes: int = 10
    num_batches: int = 1
    # language
    sequences: int = 8
    sequence_length: int = 64
    features: int = 64
    blocks: int = 2
    vocabulary: int = 256
    diagonal_above: int | None = None


AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "batch_size": ("batch size", (8, 16, 32, 64, 128)),
    "width": ("width, WRN-16-k", (1, 2, 4, 8)),
    "depth": ("depth, WRN-d-1", (10, 16, 28, 40)),
    "image_size": ("pixels a side", (8, 16, 32, 64)),
    "num_classes": ("classes", (5, 20, 80, 320)),
    "num_batches": ("batches of 16", (4, 8, 16, 32)),
    "sequences": ("sequences", (4, 8, 16, 32)),
    "sequence_length": ("tokens a sequence", (32, 64, 128, 256)),
    "features": ("features, GPT", (32, 64, 128, 256)),
    "blocks": ("blocks, GPT", (1, 2, 4, 8)),
    "vocabulary": ("vocabulary, GPT", (256, 512, 1024, 2048)),
    "vocabulary_by_diagonal": ("vocabulary, diagonal_above", (256, 512, 1024, 2048)),
}
LANGUAGE = (
    "sequences", "sequence_length", "features", "blocks", "vocabulary", "vocabulary_by_diagonal",
)  # fmt: skip


def measure(axis: str, config: Config = Config()) -> dict[str, Any]:  # noqa: B008
    """Seconds and peak memory at each value of an axis."""
    torch.set_num_threads(1)
    points = [_point(axis, at(axis, value, config)) for value in AXES[axis][1]]
    return {"axis": axis, "config": asdict(config), "points": points, **environment(CPU)}


def at(axis: str, value: int, config: Config = Config()) -> Config:  # noqa: B008
    """The configuration of one point of an axis."""
    if axis == "vocabulary_by_diagonal":
        return replace(config, vocabulary=value, diagonal_above=255)
    return replace(config, **{axis: value})


def _point(axis: str, config: Config) -> dict[str, Any]:
    timed, watched = _language(config) if axis in LANGUAGE else _images(config)
    seconds = medians(interleaved(timed, config.repetitions, CPU, "processor"))
    mebibytes = {name: peak_memory(work, CPU) / 2**20 for name, work in watched.items()}
    mebibytes["limit"] += factor_mebibytes(watched["expand"])
    field = axis.removesuffix("_by_diagonal")
    return {"value": getattr(config, field), "seconds": seconds, "mebibytes": mebibytes}


def factor_mebibytes(work: Work) -> float:
    """Memory of the returned factors; a B shared by a weight and its bias counts once."""
    found: Any = work()
    factors = [F for b in found.blocks.values() for F in (b.B, b.A) if F is not None]
    return sum(F.nbytes for F in {F.data_ptr(): F for F in factors}.values()) / 2**20


def _images(config: Config) -> tuple[dict[str, Work], dict[str, Work]]:
    torch.manual_seed(config.seed)
    size = (config.image_size, config.image_size)
    x = torch.randn(config.batch_size, 3, *size)
    y = torch.randint(config.num_classes, (config.batch_size,))

    def model(channels_last: bool = False) -> torch.nn.Module:
        return network(CPU, config.width, config.num_classes, channels_last, config.depth)

    def limit_of(vectors: int) -> Work:
        return _times(config.num_batches, limit(model(channels_last=True), x, vectors))

    vectors = config.num_classes - 1
    timed, watched = {"limit": limit_of(vectors)}, {"limit": limit_of(min(vectors, MOST_VECTORS))}
    for mode in MODES:
        options = {"kfac_approx": mode, "fisher": "exact"}
        if config.num_batches == 1:
            timed[mode] = one_batch_alone(model(), x, y, **options)
            watched[mode] = first_vectors(model(), x, y, MOST_VECTORS, **options)
        else:
            timed[mode] = watched[mode] = _all_batches(model(), x, y, config, options)
    return timed, watched


def _all_batches(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, config: Config, options: Any
) -> Work:
    curvature = CurvaturePass(model, "classification", **options)

    def work() -> KroneckerFactors:
        for _ in range(config.num_batches):
            curvature.add(x, y)
        return curvature.factors()

    return work


def _language(config: Config) -> tuple[dict[str, Work], dict[str, Work]]:
    torch.manual_seed(config.seed)
    x = torch.randint(config.vocabulary, (config.sequences, config.sequence_length))
    y = torch.randint(config.vocabulary, x.shape)

    def model() -> GPT:
        torch.manual_seed(config.seed)
        return GPT(
            config.vocabulary, config.sequence_length, config.features, config.blocks, tied=False
        )

    work = {"limit": language_limit(model(), x, part=len(x))}
    for mode in MODES:
        options = {"kfac_approx": mode, "diagonal_above": config.diagonal_above}
        work[mode] = one_batch_alone(model(), x, y, fisher="mc", **options)
    return work, work


def _times(number: int, work: Work) -> Work:
    if number == 1:
        return work

    def all_of_them() -> None:
        for _ in range(number):
            work()

    return all_of_them


def exponent(values: Sequence[float], measured: Sequence[float]) -> float:
    """The slope e of the least-squares line through (log value, log measured)."""
    x = torch.tensor(values, dtype=torch.float64).log()
    y = torch.tensor(measured, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def exponents(part: dict[str, Any], what: str) -> dict[str, float]:
    """Exponents of the limit and both modes along one axis; ``what``: "seconds" or "mebibytes"."""
    values = [point["value"] for point in part["points"]]
    return {k: exponent(values, [point[what][k] for point in part["points"]]) for k in KINDS}


def surprises(part: dict[str, Any], what: str) -> list[str]:
    """The modes whose exponent is more than `MOST_ABOVE` above the limit's."""
    found = exponents(part, what)
    return [mode for mode in MODES if found[mode] > found["limit"] + MOST_ABOVE]


def table(parts: dict[str, dict[str, Any]]) -> str:
    """Exponents of each axis in Markdown, and the ratios to the limit at both ends of the axis."""
    lines = [
        "| axis | from, to | time: limit | expand | reduce | memory: limit | expand | reduce "
        "| times the limit, expand | reduce |",
        "|---" * 10 + "|",
    ]
    for axis in (axis for axis in AXES if axis in parts):
        part = parts[axis]
        first, last = part["points"][0], part["points"][-1]
        cells = [AXES[axis][0], f"{first['value']}, {last['value']}"]
        for what in ("seconds", "mebibytes"):
            found, marked = exponents(part, what), surprises(part, what)
            cells += [f"**{found[k]:.2f}** !" if k in marked else f"{found[k]:.2f}" for k in KINDS]
        for mode in MODES:
            ratios = (end["seconds"][mode] / end["seconds"]["limit"] for end in (first, last))
            cells.append(" to ".join(f"{ratio:.2f}" for ratio in ratios))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(parts: dict[str, dict[str, Any]]) -> Figure:
    """Figure of seconds (above) and peak memory (below) on each axis, on logarithmic scales."""
    axes = [axis for axis in AXES if axis in parts]
    columns = math.ceil(len(axes) / 2)
    figure, grid = plt.subplots(4, columns, figsize=(2.6 * columns, 9.5), layout="constrained")
    for number, axis in enumerate(axes):
        row, column = divmod(number, columns)
        points = parts[axis]["points"]
        values = [point["value"] for point in points]
        for offset, what in enumerate(("seconds", "mebibytes")):
            ax, slopes = grid[2 * row + offset][column], exponents(parts[axis], what)
            for kind, color in zip(KINDS, ("0.5", "C0", "C1"), strict=True):
                measured = [point[what][kind] for point in points]
                label = f"{kind} ({slopes[kind]:.2f})"
                ax.loglog(values, measured, color=color, marker="o", ms=3, label=label)
            ax.set_xticks(values, [str(value) for value in values])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.legend(fontsize=6)
            ax.set_title(AXES[axis][0] + (", s" if what == "seconds" else ", MiB"), fontsize=8)
            ax.tick_params(labelsize=7)
    for ax in grid.flat:
        if not ax.lines:
            ax.axis("off")
    return figure


def write(folder: Path) -> str:
    """Write ``table.md`` and ``growth.png`` from the finished axes; returns the table."""
    files = (folder / f"{axis}.json" for axis in AXES)
    parts = {path.stem: json.loads(path.read_text()) for path in files if path.exists()}
    text = table(parts)
    (folder / "table.md").write_text(text)
    figure = plot(parts)
    figure.savefig(folder / "growth.png", dpi=110)
    plt.close(figure)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write."""
    parser = parts_parser(__doc__ or "", AXES, "cpu")
    options = parse_options(parser, AXES, arguments)
    folder = options.results / "growth"
    for name, path in parts_to_measure(options, folder):
        write_json(path, measure(name))
    print(write(folder))
    print(f"Written to {folder}/")


if __name__ == "__main__":
    main()
