"""The tables of `update_step_timing`, from its JSON files alone."""

import json
from pathlib import Path
from typing import Any

__all__ = ["MODES", "write"]

MODES = ("expand", "reduce")
LIMIT = 24 * 1024
"""Mebibytes of the GPU whose largest batch is estimated."""

PAPER = {
    "expand": {128: 0.24, 256: 0.38, 512: 0.75, 1024: 1.36},
    "reduce": {128: 0.17, 256: 0.24, 512: 0.43, 1024: 0.63, 2048: 1.17},
}
"""Seconds of a step on a V100: Eschenhagen et al. 2023, Table 1."""

Sizes = dict[int, dict[str, Any]]
"""Batch size -> its results."""


def write(folder: Path) -> str:
    """Write ``table.md`` from the measured parts; returns the tables."""
    parts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    sizes = {int(n.split("_")[1]): part for n, part in parts.items() if n.startswith("batch_")}
    sizes = dict(sorted(sizes.items()))
    text = []
    if sizes:
        text += [ratio_table(sizes), "", seconds_table(sizes), ""]
        text += [f"{name}: left out ({why})." for name, why in _left_out(sizes).items()]
    if "memory" in parts:
        text += [memory_table(parts["memory"]), ""]
    (folder / "table.md").write_text("\n".join(text))
    return "\n".join(text)


def ratio_table(sizes: Sizes) -> str:
    """Table of times divided by an SGD step's; a column for each batch size."""
    rows = {}
    for part in sizes.values():
        for name in part["times_sgd"]:
            rows.setdefault(name, name)
    lines = [_row(["times an SGD step, batch", *sizes]), _row(["---"] * (len(sizes) + 1))]
    for mode in MODES:
        label = f"marglik, {mode}, factors every 10 and inverses every 50 steps"
        cells = [_cell(part["amortised_times_sgd"], mode) for part in sizes.values()]
        lines.append(_row([label, *cells]))
    for name in rows:
        if name != "SGD":
            lines.append(_row([name, *(_cell(p["times_sgd"], name) for p in sizes.values())]))
    return "\n".join(lines)


def seconds_table(sizes: Sizes) -> str:
    """Table of seconds of a step, ours and the paper's, and the ratios reduce / expand."""
    lines = [_row(["seconds, batch", *sizes]), _row(["---"] * (len(sizes) + 1))]
    for name in ("SGD", "marglik, expand", "marglik, reduce"):
        lines.append(_row([name, *(_cell(p["median_seconds"], name) for p in sizes.values())]))
    for mode in MODES:
        cells = [f"{PAPER[mode][N]:.2f}" if N in PAPER[mode] else "" for N in sizes]
        lines.append(_row([f"the paper (V100), {mode}", *cells]))
    ours = [
        seconds["marglik, reduce"] / seconds["marglik, expand"]
        if {"marglik, reduce", "marglik, expand"} <= seconds.keys()
        else None
        for seconds in (p["median_seconds"] for p in sizes.values())
    ]
    cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ours]
    lines.append(_row(["reduce / expand", *cells]))
    theirs = [
        f"{PAPER['reduce'][N] / PAPER['expand'][N]:.2f}" if N in PAPER["expand"] else ""
        for N in sizes
    ]
    lines.append(_row(["the paper, reduce / expand", *theirs]))
    return "\n".join(lines)


def memory_table(memory: dict[str, Any]) -> str:
    """Table of peak memory, of what an example adds, and of the batch that would fill 24 GiB."""
    sizes = sorted({int(N) for of_name in memory["peak_mebibytes"].values() for N in of_name})
    head = ["peak memory, MiB, batch", *sizes, "an example", "batch at 24 GiB (estimate)"]
    lines = [_row(head), _row(["---"] * len(head))]
    for name, of_name in memory["peak_mebibytes"].items():
        cells = [f"{of_name[str(N)]:.0f}" if str(N) in of_name else "" for N in sizes]
        if len(of_name) == len(sizes) > 1:
            first, last = of_name[str(sizes[0])], of_name[str(sizes[-1])]
            slope = (last - first) / (sizes[-1] - sizes[0])
            cells += [f"{slope:.1f}", f"{(LIMIT - first) / slope + sizes[0]:.0f}"]
        lines.append(_row([name, *cells]))
    lines.append(f"\nFactors: {memory['factors_mebibytes']:.0f} MiB, inverses or roots as much.")
    lines += [f"{name}: left out ({why})." for name, why in memory["left_out"].items()]
    return "\n".join(lines)


def _left_out(sizes: Sizes) -> dict[str, str]:
    return {name: why for part in sizes.values() for name, why in part["left_out"].items()}


def _cell(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.2f}" if name in values else ""


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"
