"""Create the tables of the page as plain data, with numbers as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from marglik.application.records import PredictiveRecord
from marglik.application.report.contents import Predictive, Run, predictives
from marglik.prediction.metric_types import METRICS, Difference, Metric, Metrics

NOTHING = "–"
"""Text for a missing value."""


@dataclass(frozen=True)
class Row:
    """A row of a table. A row without cells is a heading of the rows below."""

    header: str
    cells: Sequence[str] = ()
    best: frozenset[int] = frozenset()
    """Indices of the cells to mark as best."""
    detail: str = ""
    """Small text under the header."""
    small: Sequence[str] = ()
    """Small text under each cell; empty if there is none."""
    differs: bool = False
    """Whether to highlight the row."""


@dataclass(frozen=True)
class Table:
    """A table with a header row and a header column."""

    caption: str
    """Accessible name of the table."""
    columns: Sequence[str]
    """Titles of the columns, beginning with the header column."""
    rows: Sequence[Row]
    has_words: bool = False
    """Whether cells are words, which are aligned left."""
    summary: str = ""
    """Text that replaces the folded table; empty if it cannot be folded."""
    open: bool = True
    """Whether the table is unfolded at first."""


def number(value: float | None, decimals: int | None = None) -> str:
    """Return a number as text: integers in full, others with ``decimals`` or four digits."""
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
    """Return a share in 0..1 as a percentage."""
    return number(None) if share is None else f"{number(100 * share, decimals)} %"


def interval(ends: Sequence[float] | None, decimals: int | None, scale: float = 1) -> str:
    """Return an interval times ``scale`` as text; empty for None."""
    return "" if ends is None else "\N{EN DASH}".join(number(scale * e, decimals) for e in ends)


def duration(seconds: float | None) -> str:
    """Return a duration as text, in milliseconds, seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    if seconds < 120:
        short = seconds < 1
        return f"{number(1000 * seconds, 0)} ms" if short else f"{number(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def metric_text(metric: Metric, value: float | None) -> str:
    """Return the value of a metric as text, without its unit."""
    if metric.unit == "%" and value is not None:
        return number(100 * value, 2)
    return number(value, metric.decimals if value is not None and abs(value) < 1e4 else None)


def _detail(metric: Metric) -> str:
    """Return unit and direction in words."""
    if isinstance(metric.better, float):
        return f"{metric.unit}, best at {percentage(metric.better, 0)}"
    direction = f"{metric.better} is better" if metric.better else ""
    return ", ".join(part for part in (metric.unit, direction) if part)


def _loss(metric: Metric, value: float) -> float:
    """Return a number that is lowest for the best value."""
    if isinstance(metric.better, float):
        return abs(value - metric.better)
    return -value if metric.better == "higher" else value


SECONDS = {
    "seconds": "Time to predict the test set",
    "seconds_of_training": "Time to train the ensemble",
}
DIFFERENCES = ("nll", "accuracy", "brier")


def evaluated_and_rivals(runs: Sequence[Run]) -> list[Predictive]:
    """Return the predictives in evaluation.json, and others in results.json.

    `marglik train` evaluates the learned network and perhaps a plain network ("plain, ...").
    `marglik evaluate` evaluates only the learned network.
    """
    columns, evaluated = [], predictives(runs)
    for run in runs:
        own = [one for one in evaluated if one.run is run]
        rivals = {} if run.results is None else run.results.scores
        columns += own + [
            Predictive(run, name, PredictiveRecord(scores.metrics, scores.intervals))
            for name, scores in rivals.items()
            if not (own and name.startswith(("learned, ", "fixed, ")))
        ]
    return columns


def summary_table(runs: Sequence[Run]) -> Table:
    """Return a table of metrics by predictive of all runs. It marks the best per data set."""
    columns = evaluated_and_rivals(runs)
    names = {name for one in columns for name, _ in one.record.metrics.items()}
    rows: list[Row] = []
    for title, is_outside in (("Test set", False), ("Out of distribution", True)):
        own = [n for n, m in METRICS.items() if n in names and m.out_of_distribution == is_outside]
        rows += [Row(title)] if own else []
        rows += [_row(name, columns) for name in own]
    for field, title in SECONDS.items():
        seconds = [getattr(one.record, field) for one in columns]
        if any(value is not None for value in seconds):
            rows.append(Row(title, [*map(duration, seconds)]))
    titles = [one.run.titled(one.name) for one in columns]
    return Table("Metrics of every predictive", ["Metric", *titles], rows)


def _row(name: str, columns: Sequence[Predictive]) -> Row:
    metric = METRICS[name]
    if all(one.run.evaluation and one.run.evaluation.num_positions for one in columns):
        metric = replace(metric, unit=metric.unit.replace("per example", "per position"))
    values = [getattr(one.record.metrics, name) for one in columns]
    ends = [getattr(one.record.intervals, name) for one in columns]
    # Mark the best of the runs on the same data, unless all are equal.
    best: set[int] = set()
    for data in {one.run.data for one in columns} if metric.better is not None else ():
        losses = {
            i: _loss(metric, value)
            for i, (value, one) in enumerate(zip(values, columns, strict=True))
            if one.run.data == data and value is not None and math.isfinite(value)
        }
        smallest = {i for i, loss in losses.items() if loss == min(losses.values())}
        best |= smallest if len(smallest) < len(losses) else set()
    decimals, scale = (2, 100) if metric.unit == "%" else (metric.decimals, 1)
    small = [interval(one, decimals, scale) for one in ends]
    cells = [metric_text(metric, value) for value in values]
    return Row(metric.title, cells, frozenset(best), _detail(metric), small)


def differences_table(title: str, by_predictive: Mapping[str, Metrics[Difference]]) -> list[Table]:
    """Return a table of differences with their intervals by predictive; [] if there are none."""
    rows_of = {name: dict(one.items()) for name, one in by_predictive.items()}
    names = [name for name in DIFFERENCES if any(name in one for one in rows_of.values())]
    rows = []
    for predictive, differences in rows_of.items():
        cells, small = [], []
        for name in names:
            value, *ends = differences.get(name, (None,))
            sign = "+" if value and value > 0 else ""
            cells.append(f"{sign}{metric_text(METRICS[name], value)}")
            small.append(" to ".join(metric_text(METRICS[name], end) for end in ends))
        rows.append(Row(predictive, cells, small=small))
    units = [f"{METRICS[name].title} ({METRICS[name].unit})".replace(" ()", "") for name in names]
    units = [unit.replace("(%)", "(percentage points)") for unit in units]
    return [Table(title, ["Predictive", *units], rows, summary=title)] if names else []
