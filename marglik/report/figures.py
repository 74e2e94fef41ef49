"""Figures as PNG: functions of plain data, from a run's log and its evaluation alone.

All return a `matplotlib.figure.Figure` and leave pyplot alone, whose backend and open figures
belong to the user.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kfac_backend.files import write_file

__all__ = [
    "as_png",
    "effective_parameters_plot",
    "entropy_histogram",
    "plot_run",
    "reliability_diagram",
    "save_figure",
    "shift_curves",
    "shift_plot",
]

LEGEND_ENTRIES = 12
MEASURES = {"cls/NLL": "NLL (nats per example)", "cal/ECE": "expected calibration error"}
"""Labels of the measures of `shift_plot`; other measures are labelled with their key."""


def plot_run(
    records: list[dict[str, Any]], initial_weight_decay: float, num_data: int, title: str = ""
) -> Figure:
    """Two panels over epochs: weight decay per group (log scale); evidence and loss per example.

    Args:
        records: a run's epochs and updates, as `run_log.read_log` returns them.
        initial_weight_decay: where all groups start.
        num_data: N, by which the evidence is divided.
        title: of the figure.
    """
    updates = [record for record in records if record["kind"] == "update"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    _plot_weight_decays(figure, left, updates, initial_weight_decay)
    right.plot(
        [r["epoch"] for r in epochs],
        [-r["loss"] for r in epochs],
        color="tab:gray",
        lw=1,
        label="training log-likelihood",
    )
    right.plot(
        [r["epoch"] for r in updates],
        [r["evidence"] / num_data for r in updates],
        "o-",
        color="tab:blue",
        ms=4,
        label="log marginal likelihood",
    )
    right.set(xlabel="epoch", ylabel="nats per example", title="Evidence")
    right.legend(loc="best")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    return figure


def _plot_weight_decays(
    figure: Figure, axes: Axes, updates: list[dict[str, Any]], initial: float
) -> None:
    axes.axhline(initial, color="black", ls="--", lw=1, label="initial")
    names = list(updates[0]["weight_decay"]) if updates else []
    for position, name in enumerate(names):
        axes.plot(
            [0, *(update["epoch"] for update in updates)],
            [initial, *(update["weight_decay"][name] for update in updates)],
            color=colormaps["viridis"](position / max(len(names) - 1, 1)),
            marker="." if len(updates) < 30 else None,
            lw=1.2,
            label=name if len(names) <= LEGEND_ENTRIES else None,
        )
    axes.set(xlabel="epoch", ylabel="weight decay", title="Learned weight decay", yscale="log")
    if len(names) > LEGEND_ENTRIES:
        scale = ScalarMappable(Normalize(1, len(names)), "viridis")
        label = "parameter tensor, from input to output"
        bar = figure.colorbar(scale, ax=axes, label=label)
        bar.set_ticks([1, len(names)], labels=[names[0], names[-1]], fontsize="small")
    axes.legend(fontsize="small", loc="best")


def reliability_diagram(reliability: Mapping[str, Any], title: str = "") -> Figure:
    """Accuracy over confidence, or coverage over level; a calibrated predictive is on the diagonal.

    Args:
        reliability: of classes: "confidence" and "accuracy" per bin, None where a bin is empty; of
            regression: nominal "levels" and the "coverage" of their central intervals. Or several
            of one kind by label.
        title: of the figure.

    Raises:
        ValueError: none, or both kinds in one diagram.
    """
    is_one = "accuracy" in reliability or "coverage" in reliability
    several: Mapping[str, Mapping[str, Any]] = {"": reliability} if is_one else reliability
    kinds = {"coverage" in one for one in several.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"A reliability diagram needs predictives of one kind, not {list(several)}: either "
            'all with "confidence" and "accuracy", or all with "levels" and "coverage".'
        )
    of_intervals = kinds.pop()
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", ls="--", lw=1, label="calibrated")
    promised, kept = ("levels", "coverage") if of_intervals else ("confidence", "accuracy")
    for label, one in several.items():
        pairs = zip(one[promised], one[kept], strict=True)
        x, y = _columns([pair for pair in pairs if None not in pair])
        axes.plot(x, y, "o-", ms=4, lw=1.2, label=label)
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
        title=title,
        xlabel="nominal level of the interval" if of_intervals else "confidence",
        ylabel="share of targets inside" if of_intervals else "accuracy",
    )
    axes.grid(alpha=0.3)
    if any(several):
        axes.legend(fontsize="small")
    return figure


def entropy_histogram(entropy: Mapping[str, Any], title: str = "") -> Figure:
    """Share of examples by predictive entropy (nats), of the test set and of other data.

    Args:
        entropy: bin "edges" (n + 1), counts (n) of "test" and, if there is such data, of "ood".
        title: of the figure.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    labels = {"test": "test set", "ood": "out of distribution"}
    for (key, label), color in zip(labels.items(), ("tab:blue", "tab:orange"), strict=True):
        if key in entropy:
            total = max(sum(entropy[key]), 1)
            shares = [count / total for count in entropy[key]]
            axes.stairs(shares, entropy["edges"], fill=True, alpha=0.5, color=color, label=label)
    axes.set(xlabel="predictive entropy (nats)", ylabel="share of examples", title=title)
    axes.legend()
    return figure


def effective_parameters_plot(
    effective: Mapping[str, float], parameters: Mapping[str, int], title: str = ""
) -> Figure:
    """Effective parameters γ of each tensor against how many it has (log scale).

    Args:
        effective: tensor name -> γ, the number of directions that the data determines.
        parameters: tensor name -> number of its entries; the order of the plot, from the top.
        title: of the figure.
    """
    names = list(parameters)
    figure = Figure(figsize=(7, 1.2 + 0.22 * len(names)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(names))
    gamma = [effective[name] for name in names]
    axes.hlines(rows, gamma, list(parameters.values()), color="tab:gray", lw=1)
    axes.plot(list(parameters.values()), rows, "|", color="black", label="parameters")
    axes.plot(gamma, rows, "o", color="tab:blue", ms=4, label="effective parameters")
    axes.set(xscale="log", xlabel="number of parameters", title=title)
    axes.set_yticks(list(rows), labels=names, fontsize="small")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def shift_curves(metrics: Mapping[str, float], measure: str) -> dict[str, list[tuple[int, float]]]:
    """Kind of shift -> (severity, value) in the order of severity, from "shift/KIND/SEVERITY/...".

    Args:
        metrics: of one predictive; other keys are ignored.
        measure: such as "cls/NLL".
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for key, value in metrics.items():
        parts = key.split("/", 3)
        if len(parts) == 4 and parts[0] == "shift" and parts[3] == measure:
            curves.setdefault(parts[1], []).append((int(parts[2]), value))
    return {kind: sorted(points) for kind, points in curves.items()}


def shift_plot(
    metrics: Mapping[str, float],
    measures: Sequence[str] = ("cls/NLL", "cal/ECE"),
    title: str = "",
) -> Figure:
    """A panel per measure over the severity of a shift, with a line per kind of shift.

    Severity 0 is the test set itself, where its metric is there.

    Args:
        metrics: of one predictive: "shift/KIND/SEVERITY/MEASURE" and "test/MEASURE".
        measures: what to draw.
        title: of the figure.

    Raises:
        ValueError: no metric of a shift.
    """
    by_measure = {measure: shift_curves(metrics, measure) for measure in measures}
    if not any(by_measure.values()):
        raise ValueError(
            f"No metric of a shift for {', '.join(measures)}: keys such as "
            f"'shift/noise/1/{measures[0]}' are needed, there are {sorted(metrics)}."
        )
    figure = Figure(figsize=(4.8 * len(measures), 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, (measure, curves) in zip(panels, by_measure.items(), strict=True):
        unshifted = metrics.get(f"test/{measure}")
        for kind, points in curves.items():
            start = [] if unshifted is None else [(0, unshifted)]
            x, y = _columns(start + points)
            axes.plot(x, y, "o-", ms=4, label=kind)
        axes.set(xlabel="severity", ylabel=MEASURES.get(measure, measure))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    write_file(path, as_png(figure))


def as_png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()
