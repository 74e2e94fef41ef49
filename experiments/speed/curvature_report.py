"""The curvature benchmark's table and plot, from its JSON files alone."""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

__all__ = ["table", "write"]

LABELS = {
    "ours": "**marglik**",
    "ours bf16": "marglik, backward in bf16",
    "ours tf32": "marglik, backward in TF32",
    "ours alone": "marglik, factors of each batch",
    "KfacGGN": "laplace-torch + marglik's KfacGGN",
    "curvlinops": "laplace-torch + curvlinops",
    "asdl": "laplace-torch + ASDL",
}
AXES = {
    "batch_size": "batch size",
    "width": "width of the network",
    "image_size": "pixels a side",
    "num_classes": "classes",
}
STYLES = {
    "limit, exact": ("limit", "0.5", ":"),
    "ours, expand, exact": ("marglik, expand", "C0", "-"),
    "ours, reduce, exact": ("marglik, reduce", "C1", "-"),
    "curvlinops, expand, exact": ("curvlinops, expand", "C0", "--"),
    "curvlinops, reduce, exact": ("curvlinops, reduce", "C1", "--"),
}


def table(batch: dict[str, Any]) -> str:
    """A batch's medians as a Markdown table, one row for each contender and mode."""
    seconds, ratios = batch["median_seconds"], batch["times_the_limit"]
    lines = [
        "| | exact GGN | times the limit | 1 MC sample | times the limit |",
        "|---|---|---|---|---|",
    ]
    for name, label in LABELS.items():
        for kfac_approx in ("expand", "reduce"):
            kinds = [f"{name}, {kfac_approx}, {fisher}" for fisher in ("exact", "mc")]
            if not any(kind in seconds for kind in kinds):
                continue
            cells = [
                f"{seconds[kind]:.2f} s | {ratios[kind]:.2f}" if kind in seconds else " | "
                for kind in kinds
            ]
            lines.append(f"| {label}, {kfac_approx} | {' | '.join(cells)} |")
    limits = [
        min(s for n, s in seconds.items() if n.startswith("limit") and n.endswith(fisher))
        for fisher in ("exact", "mc")
    ]
    lines.append(f"| the limit | {limits[0]:.2f} s | 1 | {limits[1]:.2f} s | 1 |")
    return "\n".join(lines)


def write(folder: Path) -> str:
    """Write ``table.md`` and ``growth.png`` from the finished parts; returns the table."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    text = []
    for name in sorted(parts, key=len):
        if name.startswith("batch_"):
            text += [f"{name.removeprefix('batch_')} images\n", table(parts[name]), ""]
            text += [_memory(parts[name]), ""]
    for name in ("update", "update_50000"):
        text += [_update(parts[name]), ""] if name in parts else []
    if "sizes" in parts:
        text += [_sizes(parts["sizes"]), ""]
    if "evidence" in parts:
        text += [_evidence(parts["evidence"]), ""]
    if factors := [part for name, part in parts.items() if name.startswith("factor_")]:
        text += [_factors(sorted(factors, key=lambda part: part["config"]["factor_size"])), ""]
    if "growth" in parts:
        figure = plot_growth(parts["growth"]["growth"])
        figure.savefig(folder / "growth.png", dpi=120)
        plt.close(figure)
    (folder / "table.md").write_text("\n".join(text))
    return "\n".join(text)


def plot_growth(growth: dict[str, list[dict[str, Any]]]) -> Figure:
    """Figure of the milliseconds of a batch over each axis of growth, on logarithmic axes."""
    figure, axes = plt.subplots(
        1, len(growth), figsize=(13, 3.6), sharey=True, layout="constrained"
    )
    for (axis, points), ax in zip(growth.items(), axes, strict=True):
        values = [point[axis] for point in points]
        for name, (label, color, style) in STYLES.items():
            seconds = [point["median_seconds"][name] for point in points]
            ax.loglog(values, seconds, style, color=color, marker="o", ms=3, label=label)
        ax.set_xticks(values, [str(value) for value in values])
        ax.minorticks_off()
        ax.set_xlabel(AXES[axis])
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("seconds a batch, exact GGN")
    ticks = (0.1, 0.3, 1, 3, 10, 30)
    axes[0].set_yticks(ticks, [str(tick) for tick in ticks])
    axes[0].legend(fontsize=8)
    return figure


def _memory(batch: dict[str, Any]) -> str:
    lines = ["| peak memory | MiB |", "|---|---|"]
    lines += [f"| {name} | {value:.0f} |" for name, value in batch["peak_mebibytes"].items()]
    return "\n".join(lines)


def _update(part: dict[str, Any]) -> str:
    """Table of the seconds of whole updates, and of the parts of ours."""
    number, size = part["config"]["num_data"], part["config"]["batch_size"]
    lines = [
        f"| update from {number:,} images, batches of {size} | seconds "
        "| pass | eigenvalues | steps |",
        "|---|---|---|---|---|",
    ]
    for name, value in part["median_seconds"].items():
        own = part["seconds_of_parts"].get(name, [])
        cells = [
            f"{statistics.median(p[key] for p in own):.2f}" if own else ""
            for key in ("pass", "eigenvalues", "steps")
        ]
        lines.append(f"| {name} | {value:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sizes(part: dict[str, Any]) -> str:
    lines = ["| 500 images of a pass | seconds | peak, MiB |", "|---|---|---|"]
    for name, value in part["seconds_of_500_images"].items():
        peak = part["peak_mebibytes"].get(name)
        lines.append(f"| {name} | {value:.3f} | {'' if peak is None else f'{peak:.0f}'} |")
    return "\n".join(lines)


def _evidence(part: dict[str, Any]) -> str:
    seconds = part["median_seconds"]
    lines = ["| eigenvalues and 100 steps | seconds |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in seconds.items()]
    return "\n".join(lines)


def _factors(parts: list[dict[str, Any]]) -> str:
    sizes = [part["config"]["factor_size"] for part in parts]
    lines = [
        f"| seconds for one factor of | {' | '.join(f'{size:,}' for size in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for name in parts[0]["median_seconds"]:
        cells = [f"{part['median_seconds'][name]:.2f}" for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
