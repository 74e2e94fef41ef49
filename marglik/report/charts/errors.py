"""Charts of errors: risk over coverage, by class, and ROC curves; the confusion matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marglik.prediction.intervals import share_interval
from marglik.report.charts.calibration import Series, names_of
from marglik.report.charts.chart import (
    Chart,
    Trace,
    axis,
    error_bars,
    line,
    plain,
    reference_line,
    series_style,
    shorten,
)
from marglik.report.tables import Row, Table, interval, percentage

__all__ = ["Confusion", "class_chart", "class_names", "risk_coverage_chart", "roc_chart"]

MOST_CLASSES = 30
"""Most classes in a chart; if there are more, it shows those with the most errors."""
TABLE_STEPS = 20
ROW_HEIGHT, MARGIN = 22, 130
"""Pixels per class, and around the classes."""
SPREAD = 0.2
"""Distance between the dots of a class, in rows."""


@dataclass(frozen=True)
class Confusion:
    """Counts of labels (rows) by predictions (columns), as a table coloured by them."""

    title: str
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]
    kind: str = "confusion"

    def shares(self, row: int) -> list[float]:
        """Row ``row`` divided by its sum: the share of each prediction among a class's examples."""
        total = max(sum(self.counts[row]), 1)
        return [count / total for count in self.counts[row]]


def class_names(run_classes: Sequence[str] | None, number_of_them: int) -> list[str]:
    """The names of the classes, or their indices if they have none."""
    return [str(i) for i in range(number_of_them)] if run_classes is None else [*run_classes]


def risk_coverage_chart(title: str, series: Sequence[Series]) -> Chart:
    """The error rate among the most confident, over the share of them."""
    curves = [(one, one.content["risk_coverage"]) for one in series]
    says = "coverage %{x:.1%}<br>error rate %{y:.2%}"
    traces = [_curve(one, curve["coverage"], curve["risk"], says) for one, curve in curves]
    rows = []
    for step in range(1, TABLE_STEPS + 1):
        share = step / TABLE_STEPS
        cells = [percentage(_at(curve["coverage"], curve["risk"], share)) for _, curve in curves]
        rows.append(Row(percentage(share, 0), cells))
    return Chart(
        title,
        f"Error rate among the most confident predictions over their share, of {names_of(series)}.",
        traces,
        {
            "xaxis": axis("coverage", range=[0, 1], tickformat=".0%"),
            "yaxis": axis("error rate", rangemode="tozero", tickformat="~%"),
            "hovermode": "closest",
            "showlegend": len(traces) > 1,
        },
        Table(f"Error rate by coverage, {title}", ["Coverage", *(s.name for s in series)], rows),
    )


def _curve(one: Series, x: Sequence[float], y: Sequence[float], says: str) -> Trace:
    """A predictive's line without dots; ``says`` is the hover text."""
    return line(one.name, x, y, series_style(one.style), says, mode="lines")


def roc_chart(title: str, series: Sequence[Series]) -> Chart:
    """Share of out-of-distribution examples that are flagged, over that of our own."""
    curves = [(one, one.content["roc"]) for one in series]
    says = "%{y:.1%} of the others,<br>%{x:.1%} of its own"
    traces = [_curve(one, curve["fpr"], curve["tpr"], says) for one, curve in curves]
    rows = []
    for step in range(1, TABLE_STEPS):
        share = step / TABLE_STEPS
        cells = [percentage(_at(curve["fpr"], curve["tpr"], share), 1) for _, curve in curves]
        rows.append(Row(percentage(share, 0), cells))
    return Chart(
        title,
        f"ROC curve: share of out-of-distribution examples flagged, over that of the test set, of "
        f"{names_of(series)}.",
        [reference_line([0, 1], [0, 1], "chance"), *traces],
        {
            "xaxis": axis("flagged of the test set", range=[0, 1], tickformat=".0%"),
            "yaxis": axis("flagged of the others", range=[0, 1.01], tickformat=".0%"),
            "hovermode": "closest",
            "showlegend": True,
        },
        Table(f"ROC curve, {title}", ["Of the test set", *(s.name for s in series)], rows),
    )


def _at(x: Sequence[float], y: Sequence[float], position: float) -> float:
    """The value of the last point at or before a position."""
    return next((b for a, b in reversed([*zip(x, y, strict=True)]) if a <= position), y[0])


def class_chart(title: str, series: Sequence[Series], classes: Sequence[str]) -> Chart:
    """Accuracy of each class with its interval; of many classes, only those with the most errors.

    Args:
        title: of the chart.
        series: predictives that all have these classes.
        classes: their names.
    """
    counted = [one.content["classes"] for one in series]
    errors = [sum(c["counts"][i] - c["right"][i] for c in counted) for i in range(len(classes))]
    order = list(range(len(classes)))
    if len(order) > MOST_CLASSES:
        order = sorted(sorted(order, key=lambda i: -errors[i])[:MOST_CLASSES])
        title = f"{title}: the {MOST_CLASSES} of {len(classes)} with the most errors"
    traces = []
    for place, (one, content) in enumerate(zip(series, counted, strict=True)):
        offset = SPREAD * (place - (len(series) - 1) / 2)
        traces.append(_dots(one, content, order, classes, offset))
    rows = []
    for i in order:
        cells, small = [], []
        for content in counted:
            share, ends = _accuracy(content, i)
            cells += [percentage(share, 1), f"{content['right'][i]} of {content['counts'][i]}"]
            small += [interval([100 * end for end in ends], 1) if ends else "", ""]
        rows.append(Row(classes[i], cells, small=small))
    return Chart(
        title,
        f"Accuracy by class with its 95 % interval, of {names_of(series)}.",
        traces,
        {
            "xaxis": axis("accuracy", tickformat=".0%", range=[None, 1.01]),
            "yaxis": axis(
                "",
                tickvals=list(range(len(order))),
                ticktext=[plain(shorten(classes[i])) for i in order],
                range=[len(order) - 0.5, -0.5],
            ),
            "hovermode": "closest",
            "showlegend": True,
        },
        Table(
            title,
            ["Class", *(head for _ in series for head in ("accuracy", "right"))],
            rows,
            [("", 1), *((one.name, 2) for one in series)] if len(series) > 1 else (),
        ),
        height=MARGIN + ROW_HEIGHT * len(order),
    )


def _accuracy(content: dict[str, Any], i: int) -> tuple[float | None, tuple[float, float] | None]:
    count, right = content["counts"][i], content["right"][i]
    return (right / count, share_interval(right, count)) if count else (None, None)


def _dots(
    series: Series,
    content: dict[str, Any],
    order: Sequence[int],
    classes: Sequence[str],
    offset: float,
) -> Trace:
    found = [_accuracy(content, i) for i in order]
    style = series_style(series.style)
    said = [plain(f"{classes[i]}: {content['right'][i]} of {content['counts'][i]}") for i in order]
    shares = [share for share, _ in found]
    return {
        "type": "scatter",
        "name": plain(series.name),
        "mode": "markers",
        "x": shares,
        "y": [row + offset for row in range(len(order))],
        "customdata": said,
        "marker": {"size": 8, **style["marker"]},
        "error_x": error_bars(shares, [ends for _, ends in found], style["line"]["color"]),
        "hovertemplate": "%{customdata}<br>%{x:.1%}<extra>%{fullData.name}</extra>",
    }
