"""The figures of `marglik_cifar10`, from its JSON files alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["curves_figure", "weight_decay_figure"]

COLORS = {"expand": "tab:blue", "reduce": "tab:orange", "fixed": "tab:gray"}
STYLES = {False: "--", True: "-"}

Runs = Mapping[Any, Sequence[dict[str, Any]]]
"""Settings (with approach and augment) -> results of their seeds."""


def curves_figure(runs: Runs, title: str = "") -> Figure:
    """Two panels over epochs: evidence per example at the updates; NLL of the MAP elsewhere.

    The NLL is on held-out images, or on the test set if a run holds none out.

    A line is the mean over seeds, and its band the range.
    """
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    for setting, found in runs.items():
        updates = [
            [(u["epoch"], u["evidence_per_example"]) for u in r["curves"]["updates"]] for r in found
        ]
        _band(left, updates, setting)
        looks = [r["curves"]["monitor"] for r in found]
        _band(
            right,
            [next((c for k, c in look.items() if k.endswith("NLL")), []) for look in looks],
            setting,
        )
    left.set(xlabel="epoch", ylabel="nats per example", title="Log marginal likelihood")
    right.set(xlabel="epoch", ylabel="nats per example", title="NLL of the MAP, held out")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:  # a fixed weight decay has no update
            axes.legend(fontsize="small")
    return figure


def weight_decay_figure(runs: Runs, title: str = "") -> Figure:
    """Figure of each parameter tensor's weight decay at the kept update; one dot per seed."""
    first = next(iter(runs.values()))[0]
    names = list(_kept(first)["weight_decay"])
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(f"Learned weight decay\n{title}")
    initial = first["settings"]["prior"]["weight_decay"]
    for panel, augment in zip(axes, (False, True), strict=True):
        panel.axvline(initial, color="black", ls="--", lw=1, label="initial")
        for setting, found in runs.items():
            if setting.augment != augment:
                continue
            for number, result in enumerate(found):
                learned = _kept(result)["weight_decay"]
                shift = 0.12 if setting.approach == "expand" else -0.12
                panel.plot(
                    [learned[name] for name in names],
                    [row + shift for row in range(len(names))],
                    "o",
                    ms=4,
                    alpha=0.7,
                    color=COLORS[setting.approach],
                    label=setting.approach if number == 0 else None,
                )
        panel.set(
            xscale="log",
            xlabel="weight decay",
            title="with augmentation" if augment else "without augmentation",
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    axes[0].set_yticks(range(len(names)), names, fontsize="small")
    axes[0].invert_yaxis()
    return figure


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    """The update whose parameters the network keeps."""
    updates = result["curves"]["updates"]
    return next(u for u in updates if u["epoch"] == result["kept_epoch"])


def _band(axes: Axes, curves: Sequence[Sequence[Sequence[float]]], setting: Any) -> None:
    """Mean and range of the seeds' curves, lists of (epoch, value), over their common length."""
    length = min(len(curve) for curve in curves)
    if not length:
        return
    epochs = [point[0] for point in curves[0][:length]]
    columns = [[curve[i][1] for curve in curves] for i in range(length)]
    color = COLORS[setting.approach]
    label = f"{setting.approach}, {'augmented' if setting.augment else 'plain'}"
    means = [sum(column) / len(column) for column in columns]
    axes.plot(epochs, means, STYLES[setting.augment], color=color, lw=1.4, label=label)
    axes.fill_between(
        epochs,
        [min(column) for column in columns],
        [max(column) for column in columns],
        color=color,
        alpha=0.15,
        lw=0,
    )
