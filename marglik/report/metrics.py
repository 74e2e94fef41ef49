"""The meaning of each metric, and the table of all predictives of all runs side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marglik.report.contents import Run
from marglik.report.tables import Row, Table, duration, interval, number, percentage

__all__ = ["METRICS", "Metric", "Predictive", "predictives", "summary_table"]


@dataclass(frozen=True)
class Metric:
    """The title and unit of a metric, and which values are better."""

    title: str
    unit: str = ""
    better: Literal["lower", "higher"] | float | None = None
    """A number is the best value itself; None means unknown."""
    is_share: bool = False
    """Whether it is shown as a percentage."""

    @property
    def direction(self) -> str:
        """Which values are better, in words."""
        if self.better is None or isinstance(self.better, str):
            return f"{self.better} is better" if self.better else ""
        return f"best at {percentage(self.better, 0)}"

    def show(self, value: float | None) -> str:
        """A value as text, without its unit."""
        if self.is_share and value is not None and math.isfinite(value):
            return number(100 * value, 2)
        return number(value, 4 if value is not None and abs(value) < 1e4 else None)

    def show_interval(self, ends: Sequence[float] | None) -> str:
        """An interval as text, in the digits of `show`."""
        if ends is None or not self.is_share:
            return interval(ends, 4)
        return interval([100 * end for end in ends], 2)

    def loss(self, value: float) -> float:
        """A number that is smallest for the best value."""
        if self.better == "higher":
            return -value
        return value if self.better == "lower" else abs(value - float(self.better or 0.0))


METRICS = {
    "cls/NLL": Metric("Negative log-likelihood", "nats per example", "lower"),
    "cls/accuracy": Metric("Accuracy", "%", "higher", is_share=True),
    "cls/Brier": Metric("Brier score", "", "lower"),
    "cls/AURC": Metric("Area under the risk–coverage curve", "", "lower"),
    "cal/ECE": Metric("Expected calibration error", "%", "lower", is_share=True),
    "cal/ECE_adaptive": Metric(
        "Expected calibration error, bins of equal counts", "%", "lower", is_share=True
    ),
    "reg/NLL": Metric("Negative log-likelihood", "nats per example", "lower"),
    "reg/RMSE": Metric("Root mean squared error", "unit of the target", "lower"),
    "cal/coverage50": Metric("Coverage of the 50 % interval", "%", 0.5, is_share=True),
    "cal/coverage90": Metric("Coverage of the 90 % interval", "%", 0.9, is_share=True),
    "cal/coverage95": Metric("Coverage of the 95 % interval", "%", 0.95, is_share=True),
    "AUROC": Metric("Area under the ROC curve", "", "higher"),
    "AUPR": Metric("Area under the precision–recall curve", "", "higher"),
    "FPR95": Metric("False positives at 95 % true positives", "%", "lower", is_share=True),
}
"""Part of a key after "test/", "validation/", "ood/" or "shift/KIND/SEVERITY/" -> metric."""

SPLITS = {
    "test": "Test set",
    "validation": "Validation set",
    "ood": "Out of distribution",
}


@dataclass(frozen=True)
class Predictive:
    """A predictive of a run, with its metrics."""

    run: Run
    name: str
    metrics: Mapping[str, float]
    seconds: float | None = None
    """Time to predict the test set."""
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name of a metric -> its interval, for some of them."""


def predictives(runs: Sequence[Run]) -> list[Predictive]:
    """The predictives in evaluation.json, and those in results.json that it does not have.

    `marglik train` evaluates the learned network and, on request, the baseline ("initial, ...");
    `marglik evaluate` only evaluates the learned one.
    """
    found = []
    for run in runs:
        evaluated = run.evaluation["predictives"] if run.evaluation else {}
        found += [
            Predictive(run, name, one["metrics"], one.get("seconds"), one.get("intervals", {}))
            for name, one in evaluated.items()
        ]
        found += [
            Predictive(run, name, metrics, None, _of_results(run, "intervals").get(name, {}))
            for name, metrics in _of_results(run, "metrics").items()
            if not (evaluated and name.startswith(("learned, ", "fixed, ")))
        ]
    return found


def _of_results(run: Run, key: str) -> dict[str, Any]:
    return (run.results or {}).get(key, {})


def summary_table(runs: Sequence[Run]) -> Table:
    """Metrics in rows, predictives of all runs in columns; the best for each data set is marked."""
    columns = predictives(runs)
    keys = list(dict.fromkeys(key for one in columns for key in one.metrics))
    rows: list[Row] = []
    for split, title in SPLITS.items():
        of_split = [key for key in keys if key.split("/", 1)[0] == split]
        if of_split:
            rows.append(Row(title))
            rows += [_row(key, split, columns) for key in of_split]
    if any(one.seconds is not None for one in columns):
        rows.append(Row("Cost"))
        times = [duration(one.seconds) for one in columns]
        rows.append(Row("Time to predict the test set", times))
    groups = [("", 1)] + [
        (run.label, count) for run in runs if (count := sum(one.run is run for one in columns))
    ]
    return Table(
        "Metrics of every predictive",
        ["Metric", *(one.name for one in columns)],
        rows,
        groups if len(runs) > 1 else (),
    )


def _row(key: str, split: str, columns: Sequence[Predictive]) -> Row:
    name = key.removeprefix(f"{split}/")
    metric = METRICS.get(name, Metric(name))
    values = [one.metrics.get(key) for one in columns]
    shown = [metric.show(value) for value in values]
    small = [metric.show_interval(one.intervals.get(key)) for one in columns]
    data = [one.run.data for one in columns]
    best = _best(metric, values, data) if metric.better is not None else frozenset()
    unit = metric.unit
    if all(one.run.num_positions for one in columns):
        unit = unit.replace("per example", "per position")
    detail = ", ".join(filter(None, [unit, metric.direction]))
    return Row(metric.title, shown, best, detail, small=small)


def _best(
    metric: Metric, values: Sequence[float | None], data: Sequence[str | None]
) -> frozenset[int]:
    """Indices of the best values for each data set, unless all of its values are the same."""
    best: set[int] = set()
    for name in set(data):
        losses = {
            i: metric.loss(value)
            for i, (value, of) in enumerate(zip(values, data, strict=True))
            if of == name and value is not None and math.isfinite(value)
        }
        if losses:
            smallest = min(losses.values())
            of_data = {i for i, loss in losses.items() if loss == smallest}
            best |= of_data if len(of_data) < len(losses) else set()
    return frozenset(best)
