"""Plots of a run, from its log alone."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kfac_backend.files import atomic_path

__all__ = ["plot_run", "save_figure"]

LEGEND_ENTRIES = 12


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
    # Without pyplot, whose backend and open figures belong to the user.
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


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)
