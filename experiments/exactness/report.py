"""The table and the figures of `modes`, from its JSON file alone."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from experiments.studies import save_figure
from kfac_backend.files import write_file

__all__ = ["EXACT", "blocks_figure", "exact_modes", "report", "write_report"]

EXACT = 1e-10
"""Relative errors below this with every seed count as exact."""
SETTINGS = {
    "expand": "one loss term per position",
    "reduce": "one loss term per example",
}
COLORMAP = "RdBu_r"  # diverging, and readable for the colour-blind
MODES = {"expand": "K-FAC-expand", "reduce": "K-FAC-reduce"}


def write_report(found: dict[str, Any], folder: Path) -> str:
    """Write table.md and a figure for each setting into the folder; returns the table."""
    text = report(found)
    write_file(folder / "table.md", (text + "\n").encode())
    for setting, layers in found["matrices"].items():
        save_figure(blocks_figure(layers, setting), folder / f"{setting}_setting.png")
    return text


def exact_modes(errors: Mapping[str, Sequence[float]]) -> str:
    """Which modes are exact, of {mode: error with each seed}: "expand", "both", ..., "none"."""
    exact = [mode for mode in MODES if max(errors[mode]) < EXACT]
    return "both" if len(exact) == len(MODES) else (exact or ["none"])[0]


def report(found: dict[str, Any]) -> str:
    """The relative errors of all networks as a Markdown table, a row for each layer."""
    seeds = found["config"]["seeds"]
    lines = [
        "# Where K-FAC is exact",
        "",
        "Relative errors ‖B ⊗ A − GGN‖ / ‖GGN‖ (Frobenius) of the blocks of weights; Gaussian "
        f"likelihood, float64; median (range) over {seeds} networks and batches. Errors "
        f"below {EXACT:.0e} with every seed count as exact and are bold; the largest is printed. A "
        f"layer with one position is the same in both modes. torch {found['versions']['torch']}.",
        "",
        f"| network | layer | {' | | | '.join(SETTINGS.values())} | | |",
        "|---|---|" + "---|---|---|" * len(SETTINGS),
        "| | | " + " | ".join(["expand | reduce | exact"] * len(SETTINGS)) + " |",
    ]
    for network, entries in groupby(found["errors"], lambda entry: entry["network"]):
        by_setting = {entry["setting"]: entry["layers"] for entry in entries}
        for number, layer in enumerate(next(iter(by_setting.values()))):
            cells = [network if number == 0 else "", layer]
            for setting in SETTINGS:
                errors = by_setting.get(setting, {}).get(layer)
                cells += ["", "", ""] if errors is None else _cells(errors)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def blocks_figure(layers: Mapping[str, Any], setting: str) -> Figure:
    """A row for each layer: exact block, expand, its error, reduce, its error.

    Entries are divided by the largest of the exact block, so that all rows share one scale.

    Args:
        layers: layer -> its "exact" block (P, P), and the factors "B" and "A" of each mode.
        setting: "expand" or "reduce".
    """
    drawn = {name: _drawn(layer) for name, layer in layers.items()}
    largest = max(np.abs(m).max() for panels in drawn.values() for m in panels.values())
    norm = Normalize(-largest, largest)
    titles = next(iter(drawn.values()))
    figure = Figure(
        figsize=(2.0 * len(titles) + 1.0, 2.15 * len(drawn) + 0.7), layout="constrained"
    )
    figure.suptitle(
        f"{setting.capitalize()} setting, {SETTINGS[setting]}: GGN blocks of a deep linear network"
    )
    grid = figure.subplots(len(drawn), len(titles), squeeze=False)
    for row, (name, panels) in zip(grid, drawn.items(), strict=True):
        d_in, size = len(layers[name]["expand"]["A"]), len(layers[name]["exact"])
        for axes, (title, matrix) in zip(row, panels.items(), strict=True):
            axes.imshow(matrix, cmap=COLORMAP, norm=norm, interpolation="nearest")
            _mark_blocks(axes, size, d_in)
            if row[0] is grid[0, 0]:
                axes.set_title(title, fontsize="medium")
            if title.startswith("|"):
                error = np.linalg.norm(matrix) / np.linalg.norm(panels["exact block"])
                axes.set_xlabel(f"relative error {_percent(float(error))}")
        row[0].set_ylabel(f"{name}, W: {size // d_in} × {d_in}")
    figure.colorbar(
        ScalarMappable(norm, COLORMAP),
        ax=grid,
        label="entry, relative to the largest of the row's exact block",
        aspect=40,
    )
    return figure


def _drawn(layer: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Panels of a layer: title -> matrix."""
    exact = np.array(layer["exact"])
    unit = np.abs(exact).max()
    panels = {"exact block": exact / unit}
    for mode, title in MODES.items():
        dense = np.kron(np.array(layer[mode]["B"]), np.array(layer[mode]["A"]))
        panels[title] = dense / unit
        panels[f"|{mode} − exact|"] = np.abs(dense - exact) / unit
    return panels


def _mark_blocks(axes: Axes, size: int, d_in: int) -> None:
    """Draw thin lines between the d_out × d_out parts, each of which is a multiple of A."""
    axes.set(xticks=[], yticks=[])
    for line in range(d_in, size, d_in):
        axes.axhline(line - 0.5, color="0.75", lw=0.6)
        axes.axvline(line - 0.5, color="0.75", lw=0.6)


def _cells(errors: Mapping[str, Sequence[float]]) -> list[str]:
    return [*(_error(errors[mode]) for mode in MODES), exact_modes(errors)]


def _error(values: Sequence[float]) -> str:
    """Median and range in percent; the largest error if it is exact."""
    if max(values) < EXACT:
        return f"**{max(values):.0e}**"
    middle, *ends = (
        f"{100 * v:.0f}" for v in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} %" if ends == [middle, middle] else f"{middle} % ({' – '.join(ends)})"


def _percent(error: float) -> str:
    return f"{error:.0e}" if error < EXACT else f"{100 * error:.0f} %"
