"""Tables of the page as plain data: numbers as text, metrics with their meaning, the summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from marglik.report.contents import Predictive, Run, predictives

NOTHING = "–"
"""Text for a missing value."""


@dataclass(frozen=True)
class Row:
    """A row; one without cells is a heading of the rows below it."""

    header: str
    cells: Sequence[str] = ()
    best: frozenset[int] = frozenset()
    """Positions of the cells to mark as best."""
    detail: str = ""
    """Small print under the header."""
    small: Sequence[str] = ()
    """Small print under the cells; none under those where it is empty."""
    differs: bool = False
    """Whether to highlight the row."""


@dataclass(frozen=True)
class Table:
    """A table with a header row and a header column."""

    caption: str
    """Its accessible name."""
    columns: Sequence[str]
    """Titles of the columns, that of the header column first."""
    rows: Sequence[Row]
    has_words: bool = False
    """Whether cells are text, which is aligned left."""
    summary: str = ""
    """If it can be folded: what is seen of it then."""
    open: bool = True
    """Whether it is unfolded at first."""


def number(value: float | None, decimals: int | None = None) -> str:
    """A number as text, with four significant digits or ``decimals``; integers in full."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        text = str(value).replace("inf", "∞").replace("nan", "NaN")
    elif decimals is not None:
        text = f"{value:,.{decimals}f}"
    elif isinstance(value, int) or 1e4 <= abs(value) < 1e9:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
    return text.replace("-", "\N{MINUS SIGN}")


def percentage(share: float | None, decimals: int = 2) -> str:
    """A share in 0..1 as a percentage."""
    return number(None) if share is None else f"{number(100 * share, decimals)} %"


def interval(ends: Sequence[float] | None, decimals: int | None, scale: float = 1) -> str:
    """An interval times ``scale`` as text; empty for None."""
    return "" if ends is None else "\N{EN DASH}".join(number(scale * e, decimals) for e in ends)


def duration(seconds: float | None) -> str:
    """Seconds as text, in milliseconds, seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    if seconds < 120:
        short = seconds < 1
        return f"{number(1000 * seconds, 0)} ms" if short else f"{number(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class Metric(NamedTuple):
    """What a metric is called, and which of its values are better."""

    title: str
    unit: str = ""
    """Shares are shown as percentages: their unit is "%"."""
    better: Literal["lower", "higher"] | float | None = None
    """A number is the best value itself; None means unknown."""
    decimals: int | None = 4
    """None for numbers in a unit of the data's own, which may be large or small."""

    @property
    def detail(self) -> str:
        """Unit and direction in words."""
        if isinstance(self.better, float):
            return f"{self.unit}, best at {percentage(self.better, 0)}"
        direction = f"{self.better} is better" if self.better else ""
        return ", ".join(part for part in (self.unit, direction) if part)

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown."""
        return 100 if self.unit == "%" else 1

    def show(self, value: float | None) -> str:
        """A value as text, without its unit."""
        if self.unit == "%" and value is not None:
            return number(100 * value, 2)
        return number(value, self.decimals if value is not None and abs(value) < 1e4 else None)

    def loss(self, value: float) -> float:
        """A number that is smallest for the best value."""
        if isinstance(self.better, float):
            return abs(value - self.better)
        return -value if self.better == "higher" else value


METRICS = {
    "cls/NLL": Metric("Negative log-likelihood", "nats per example", "lower"),
    "cls/NLL_recorded_labels": Metric("... if test labels are as wrong", "nats", "lower"),
    "cls/NLL_true_class": Metric("... of the true class", "nats", "lower"),
    "cls/accuracy": Metric("Accuracy", "%", "higher"),
    "cls/Brier": Metric("Brier score", "", "lower"),
    "cls/AURC": Metric("Area under the risk–coverage curve", "", "lower"),
    "cal/ECE": Metric("Expected calibration error", "%", "lower"),
    "reg/NLL": Metric("Negative log-likelihood", "nats per example", "lower"),
    "reg/RMSE": Metric("Root mean squared error", "unit of the target", "lower", None),
    "cal/coverage50": Metric("Coverage of the 50 % interval", "%", 0.5),
    "cal/coverage90": Metric("Coverage of the 90 % interval", "%", 0.9),
    "cal/coverage95": Metric("Coverage of the 95 % interval", "%", 0.95),
    "AUROC": Metric("Area under the ROC curve", "", "higher"),
    "AUROC_epistemic": Metric("Area under the ROC curve, by the epistemic part", "", "higher"),
    "AUPR": Metric("Area under the precision–recall curve", "", "higher"),
    "FPR95": Metric("False positives at 95 % true positives", "%", "lower"),
}
"""Part of a key after "test/" or "ood/" -> metric."""
SPLITS = {"test": "Test set", "ood": "Out of distribution"}
SECONDS = {
    "seconds": "Time to predict the test set",
    "seconds_of_training": "Time to train its members",
}
DIFFERENCES = ("test/cls/NLL", "test/cls/accuracy", "test/cls/Brier", "test/reg/NLL")


def of_evaluation_and_results(runs: Sequence[Run]) -> list[Predictive]:
    """The predictives in evaluation.json, and those in results.json that it does not have.

    `marglik train` evaluates the learned network and perhaps a plain one ("plain, ..."), `marglik
    evaluate` the learned one alone.
    """
    found, evaluated = [], predictives(runs)
    for run in runs:
        of_run = [one for one in evaluated if one.run is run]
        intervals = run.results.get("intervals", {})
        found += of_run + [
            Predictive(run, name, {"metrics": metrics, "intervals": intervals.get(name)})
            for name, metrics in run.results.get("metrics", {}).items()
            if not (of_run and name.startswith(("learned, ", "fixed, ")))
        ]
    return found


def summary_table(runs: Sequence[Run]) -> Table:
    """Metrics in rows, predictives of all runs in columns; the best for each data set is marked."""
    columns = of_evaluation_and_results(runs)
    keys = list(dict.fromkeys(key for one in columns for key in one.content["metrics"]))
    rows: list[Row] = []
    for split, title in SPLITS.items():
        of_split = [key for key in keys if key.split("/", 1)[0] == split]
        rows += [Row(title)] if of_split else []
        rows += [_row(key, key.removeprefix(f"{split}/"), columns) for key in of_split]
    for key, title in SECONDS.items():
        seconds = [one.content.get(key) for one in columns]
        if any(value is not None for value in seconds):
            rows.append(Row(title, [*map(duration, seconds)]))
    titles = [one.run.titled(one.name) for one in columns]
    return Table("Metrics of every predictive", ["Metric", *titles], rows)


def _row(key: str, name: str, columns: Sequence[Predictive]) -> Row:
    metric = METRICS.get(name, Metric(name))
    if all(one.run.evaluation.get("num_positions") for one in columns):
        metric = metric._replace(unit=metric.unit.replace("per example", "per position"))
    values = [one.content["metrics"].get(key) for one in columns]
    ends = [(one.content.get("intervals") or {}).get(key) for one in columns]
    # The best among the runs on the same data, unless all are the same.
    best: set[int] = set()
    for data in {one.run.data for one in columns} if metric.better is not None else ():
        losses = {
            i: metric.loss(value)
            for i, (value, one) in enumerate(zip(values, columns, strict=True))
            if one.run.data == data and value is not None and math.isfinite(value)
        }
        smallest = {i for i, loss in losses.items() if loss == min(losses.values())}
        best |= smallest if len(smallest) < len(losses) else set()
    decimals = 2 if metric.unit == "%" else metric.decimals
    small = [interval(one, decimals, metric.scale) for one in ends]
    return Row(metric.title, [*map(metric.show, values)], frozenset(best), metric.detail, small)


def differences_table(
    title: str, found: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[Table]:
    """A table of differences (value, lower end, upper end) by predictive; none if none is known."""
    metrics = {
        key: METRICS[key.removeprefix("test/")]
        for key in DIFFERENCES
        if any(key in one for one in found.values())
    }
    rows = []
    for name, differences in found.items():
        cells, small = [], []
        for key, metric in metrics.items():
            value, *ends = differences.get(key, (None,))
            cells.append(f"{'+' if value and value > 0 else ''}{metric.show(value)}")
            small.append(" to ".join(map(metric.show, ends)))
        rows.append(Row(name, cells, small=small))
    units = [f"{metric.title} ({metric.unit})".replace(" ()", "") for metric in metrics.values()]
    units = [unit.replace("(%)", "(percentage points)") for unit in units]
    return [Table(title, ["Predictive", *units], rows, summary=title)] if metrics else []
