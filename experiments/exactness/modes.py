"""Where K-FAC is exact, after figures 1 and 2 of Eschenhagen et al. 2023 (arXiv:2311.00636).

The figures show a deep linear network with weight sharing and a Gaussian likelihood, in the paper's
two settings: a loss term at each position (expand), or one for each example, whose output is the
mean over positions (reduce). Each layer has the exact block of the GGN, its approximations by
K-FAC-expand and -reduce, and their errors. The paper's claim (propositions 1 to 4) is that each
mode is exact in its setting.

The table also has the relative errors ‖B ⊗ A − GGN‖ / ‖GGN‖ (Frobenius) of further networks:
convolutions, self-attention, and GraphNetworks on graphs of different sizes. Exact blocks are Jᵀ J
with the Jacobian from `torch.func.jacrev`, in float64; the approximations are
`kfac_backend.kronecker_factors`.

``python -m experiments.exactness.modes`` takes half a minute.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from experiments.exactness.networks import Config, cases
from experiments.studies import Result, markdown, study
from kfac_backend import kronecker_factors

EXACT = 1e-10
"""Relative errors below this with every seed count as exact."""
SETTINGS = {"expand": "one loss term per position", "reduce": "one loss term per example"}
MODES = {"expand": "K-FAC-expand", "reduce": "K-FAC-reduce"}


def run(config: Config) -> Result:
    """All errors by network and setting, {layer: {mode: one per seed}}; matrices for figures."""
    errors: list[dict[str, Any]] = []
    matrices: dict[str, Any] = {}
    for case in cases(config):
        layers: dict[str, dict[str, list[float]]] = {}
        for seed in range(config.seeds):
            torch.manual_seed(seed)
            model, batch = case.build()
            exact = exact_blocks(model, batch if isinstance(batch, Mapping) else batch[0])
            shown: dict[str, Result] = {n: {"exact": F.tolist()} for n, F in exact.items()}
            for mode in MODES:
                factors = kronecker_factors(model, [batch], "regression", kfac_approx=mode)
                for name, block in exact.items():
                    error = (factors.to_dense(name) - block).norm() / block.norm()
                    of_layer = layers.setdefault(_layer(name), {mode: [] for mode in MODES})
                    of_layer[mode].append(error.item())
                    B, A = factors.blocks[name].B, factors.blocks[name].A
                    assert A is not None
                    shown[name][mode] = {"B": B.tolist(), "A": A.tolist()}
            if case.setting not in matrices:  # the first network with the first seed
                matrices[case.setting] = {_layer(name): layer for name, layer in shown.items()}
        errors.append({"network": case.network, "setting": case.setting, "layers": layers})
    return {"errors": errors, "matrices": matrices}


def exact_blocks(model: nn.Module, x: Any) -> dict[str, Tensor]:
    """Σ_n J_nᵀ J_n of each parameter (P, P), the block of the GGN for unit noise."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = jacrev(lambda values: functional_call(model, values, (x,)))(parameters)
    blocks = {}
    for name, p in parameters.items():
        J = jacobians[name].reshape(-1, p.numel())  # (N·T·C, P)
        blocks[name] = J.mT @ J
    return blocks


def _layer(name: str) -> str:
    """A weight's name in the table: "block 2, query" for "block 2.query.weight"."""
    return name.removesuffix(".weight").replace(".", ", ")


# The table and the figures, from JSON alone


def exact_modes(errors: Mapping[str, Sequence[float]]) -> str:
    """Which modes are exact, of {mode: error with each seed}: "expand", "both", ..., "none"."""
    exact = [mode for mode in MODES if max(errors[mode]) < EXACT]
    return "both" if len(exact) == len(MODES) else (exact or ["none"])[0]


def table(results: list[Result]) -> str:
    """The relative errors of all networks as Markdown, a row for each layer."""
    (result,) = results
    head = [f"{setting} setting: {mode}" for setting in SETTINGS for mode in (*MODES, "exact")]
    rows = [["network", "layer", *head]]
    for network, entries in groupby(result["errors"], lambda entry: entry["network"]):
        by_setting = {entry["setting"]: entry["layers"] for entry in entries}
        for number, layer in enumerate(next(iter(by_setting.values()))):
            row = [network if number == 0 else "", layer]
            for setting in SETTINGS:
                errors = by_setting.get(setting, {}).get(layer)
                row += ["", "", ""] if errors is None else _cells(errors)
            rows.append(row)
    return (
        "# Where K-FAC is exact\n\nRelative errors ‖B ⊗ A − GGN‖ / ‖GGN‖ (Frobenius) of the blocks "
        "of weights; Gaussian likelihood, float64; median (range) over "
        f"{result['config']['seeds']} networks and batches. Errors below {EXACT:.0e} with every "
        "seed count as exact and are bold; the largest is printed. A layer with one position is "
        f"the same in both modes. torch {result['versions']['torch']}.\n\n{markdown(rows)}"
    )


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


def figures(results: list[Result]) -> dict[str, Figure]:
    """A figure for each setting."""
    matrices = results[0]["matrices"]
    return {f"{s}_setting": blocks_figure(layers, s) for s, layers in matrices.items()}


def blocks_figure(layers: Mapping[str, Any], setting: str) -> Figure:
    """A row for each layer: exact block, expand, its error, reduce, its error.

    Entries are divided by the largest of the exact block, so that all rows share one scale.

    Args:
        layers: layer -> its "exact" block (P, P), and the factors "B" and "A" of each mode.
        setting: "expand" or "reduce".
    """
    drawn = {name: _panels(layer) for name, layer in layers.items()}
    largest = max(np.abs(m).max() for panels in drawn.values() for m in panels.values())
    norm, colors = Normalize(-largest, largest), "RdBu_r"  # readable for the colour-blind
    titles = next(iter(drawn.values()))
    size = (2.0 * len(titles) + 1.0, 2.15 * len(drawn) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(
        f"{setting.capitalize()} setting, {SETTINGS[setting]}: GGN blocks of a deep linear network"
    )
    grid = figure.subplots(len(drawn), len(titles), squeeze=False)
    for row, (name, panels) in zip(grid, drawn.items(), strict=True):
        d_in, P = len(layers[name]["expand"]["A"]), len(layers[name]["exact"])
        for axes, (title, matrix) in zip(row, panels.items(), strict=True):
            axes.imshow(matrix, cmap=colors, norm=norm, interpolation="nearest")
            _mark_blocks(axes, P, d_in)
            if row[0] is grid[0, 0]:
                axes.set_title(title, fontsize="medium")
            if title.startswith("|"):
                error = float(np.linalg.norm(matrix) / np.linalg.norm(panels["exact block"]))
                shown = f"{error:.0e}" if error < EXACT else f"{100 * error:.0f} %"
                axes.set_xlabel(f"relative error {shown}")
        row[0].set_ylabel(f"{name}, W: {P // d_in} × {d_in}")
    label = "entry, relative to the largest of the row's exact block"
    figure.colorbar(ScalarMappable(norm, colors), ax=grid, label=label, aspect=40)
    return figure


def _panels(layer: Mapping[str, Any]) -> dict[str, np.ndarray]:
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


main = study("exactness", __doc__, run, lambda options: [Config()], table, figures=figures)

if __name__ == "__main__":
    sys.exit(main())
