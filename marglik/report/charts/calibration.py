"""Charts of the predictives: reliability, entropy, and metrics under a shift."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marglik.prediction.intervals import share_interval
from marglik.report.charts.chart import (
    Chart,
    Trace,
    axis,
    error_bars,
    line,
    plain,
    reference_line,
    series_style,
)
from marglik.report.charts.colors import SERIES
from marglik.report.metrics import METRICS
from marglik.report.tables import Row, Table, interval, number, percentage

__all__ = ["Series", "entropy_chart", "names_of", "reliability_chart", "shift_charts"]

SHIFT_MEASURES = ("cls/NLL", "reg/NLL", "reg/RMSE", "cal/ECE")
DASHES = ("solid", "dash", "dot", "dashdot")


class Series(NamedTuple):
    """A predictive as one of several curves."""

    style: int
    """Position of its colour and symbol."""
    name: str
    content: Mapping[str, Any]
    """Its entry in evaluation.json."""
    dash: int = 0
    """Position of its dash."""


def reliability_chart(title: str, series: Sequence[Series]) -> Chart:
    """Accuracy over confidence, or coverage over level, with the diagonal of perfect calibration.

    Args:
        title: of the chart.
        series: predictives of one kind: classes or intervals.
    """
    of_intervals = "levels" in series[0].content["reliability"]
    curves = _intervals(series) if of_intervals else _bins(series)
    xaxis = "nominal level of the interval" if of_intervals else "confidence"
    yaxis = "share of targets inside" if of_intervals else "accuracy"
    layout = {
        "xaxis": axis(xaxis, range=[0, 1], dtick=0.2),
        "yaxis": axis(yaxis, range=[0, 1.02], dtick=0.2),
        "hovermode": "closest",
        "showlegend": True,
    }
    if not of_intervals:
        layout["xaxis"] |= {"anchor": "y2"}
        layout["yaxis"] |= {"domain": [0.3, 1]}
        layout["yaxis2"] = axis("share", domain=[0, 0.2], anchor="x", rangemode="tozero", nticks=3)
        layout |= {"barmode": "group", "bargap": 0.1}
    return Chart(
        title,
        f"Reliability diagram: {yaxis} against {xaxis} of {names_of(series)}.",
        [reference_line([0, 1], [0, 1], "calibrated"), *curves],
        layout,
        _interval_table(series) if of_intervals else _bin_table(series),
        height=460,
    )


def _bins(series: Sequence[Series]) -> list[Trace]:
    """The points of each predictive's bins that are not empty, with the bins' shares below them.

    The area of a point grows with the share of its bin; its whiskers are the interval of its
    accuracy.
    """
    curves, bars = [], []
    for position, name, content, _ in series:
        bins = content["reliability"]
        total = max(sum(bins["counts"]), 1)
        points = [
            (confidence, accuracy, count)
            for confidence, accuracy, count in zip(
                bins["confidence"], bins["accuracy"], bins["counts"], strict=True
            )
            if confidence is not None and accuracy is not None
        ]
        hover = "confidence %{x:.3f}<br>accuracy %{y:.3f}, %{customdata}"
        x, y = [p[0] for p in points], [p[1] for p in points]
        ends = [_interval(p[1], p[2]) for p in points]
        style = series_style(position)
        curve = line(name, x, y, style, hover, mode="markers")
        curve["error_y"] = error_bars(y, ends, style["line"]["color"])
        curve["cliponaxis"] = False  # so that a point at confidence 1 is not cut in half
        curve["customdata"] = [
            f"95 %: {interval(e, 3)}<br>{p[2]:,} predictions"
            for p, e in zip(points, ends, strict=True)
        ]
        curve["marker"]["size"] = [4 + 9 * (p[2] / total) ** 0.5 for p in points]
        curve["marker"]["line"] = {"width": 0}  # plotly would draw a white one for several sizes
        curves.append(curve)
        bars.append(
            {
                "type": "bar",
                "name": plain(name),
                "x": _centres(bins["edges"]),
                "y": [count / total for count in bins["counts"]],
                "yaxis": "y2",
                "showlegend": False,
                "marker": {"color": SERIES[position % len(SERIES)]},
                "hovertemplate": "%{y:.1%} of the predictions<extra>%{fullData.name}</extra>",
            }
        )
    return curves + bars


def _interval(share: float, count: int) -> tuple[float, float]:
    return share_interval(round(share * count), count)


def _intervals(series: Sequence[Series]) -> list[Trace]:
    curves = []
    for one in series:
        r, style = one.content["reliability"], series_style(one.style)
        hover = "level %{x:.2f}<br>%{y:.3f} inside"
        curve = line(one.name, r["levels"], r["coverage"], style, hover)
        if count := r.get("count"):
            ends = [_interval(share, count) for share in r["coverage"]]
            curve["error_y"] = error_bars(r["coverage"], ends, style["line"]["color"])
            curve["hovertemplate"] = curve["hovertemplate"].replace(
                "inside", "inside, 95 %: %{customdata}"
            )
            curve["customdata"] = [interval(e, 3) for e in ends]
        curves.append(curve)
    return curves


def _bin_table(series: Sequence[Series]) -> Table:
    edges = series[0].content["reliability"]["edges"]
    rows = []
    for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        cells, small = [], []
        for one in series:
            bins = one.content["reliability"]
            accuracy, count = bins["accuracy"][i], bins["counts"][i]
            cells += [number(bins["confidence"][i], 3), number(accuracy, 3), number(count)]
            ends = None if accuracy is None else _interval(accuracy, count)
            small += ["", interval(ends, 3), ""]
        rows.append(Row(f"{low:.3f}–{high:.3f}", cells, small=small))
    titles = ("confidence", "accuracy", "count")
    return Table(
        "Reliability",
        ["Bin", *(title for _ in series for title in titles)],
        rows,
        [("", 1), *((one.name, 3) for one in series)],
    )


def _interval_table(series: Sequence[Series]) -> Table:
    levels = series[0].content["reliability"]["levels"]
    rows = [
        Row(
            f"{level:.2f}", [number(one.content["reliability"]["coverage"][i], 3) for one in series]
        )
        for i, level in enumerate(levels)
    ]
    return Table("Coverage of intervals", ["Level", *(one.name for one in series)], rows)


def entropy_chart(
    title: str, entropy: Mapping[str, Any], ood_name: str, largest_share: float
) -> Chart:
    """Shares of the test set and of other data by predictive entropy.

    Args:
        title: of the chart.
        entropy: bin "edges", counts of "test" and perhaps "ood".
        ood_name: what to call the other data.
        largest_share: end of the vertical axis, the same for all charts.
    """
    names = {"test": "test set", "ood": ood_name}
    edges, shares = entropy["edges"], entropy_shares(entropy)
    centres = _centres(edges)
    spans = [f"{a:.2f}–{b:.2f} nats" for a, b in zip(edges[:-1], edges[1:], strict=True)]
    traces = [
        {
            "type": "bar",
            "name": plain(names[key]),
            "x": centres,
            "y": values,
            "width": [b - a for a, b in zip(edges[:-1], edges[1:], strict=True)],
            "customdata": spans,
            "opacity": 0.65,
            "marker": {"color": SERIES[position]},
            "hovertemplate": "%{customdata}: %{y:.1%}<extra>%{fullData.name}</extra>",
        }
        for position, (key, values) in enumerate(shares.items())
    ]
    rows = [
        Row(span, [percentage(values[i], 1) for values in shares.values()])
        for i, span in enumerate(spans)
    ]
    return Chart(
        title,
        f"Histogram of the predictive entropy of {', '.join(names[key] for key in shares)}.",
        traces,
        {
            "barmode": "overlay",
            "bargap": 0,
            "xaxis": axis("predictive entropy (nats)", range=[edges[0], edges[-1]]),
            "yaxis": axis("share of examples", range=[0, largest_share], tickformat=".0%"),
            "hovermode": "x",
            "showlegend": True,
        },
        Table(f"Entropy, {title}", ["Entropy", *(names[key] for key in shares)], rows),
    )


def entropy_shares(entropy: Mapping[str, Any]) -> dict[str, list[float]]:
    """Counts of "test" and, if there, of "ood" as shares of their sums."""
    return {
        key: [count / max(sum(entropy[key]), 1) for count in entropy[key]]
        for key in ("test", "ood")
        if key in entropy
    }


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


def shift_charts(series: Sequence[Series]) -> list[Chart]:
    """A chart for each measure and kind of shift, with a curve per predictive.

    Args:
        series: predictives of all runs; those without the shift of a chart are left out of it.
    """
    charts = []
    for measure in SHIFT_MEASURES:
        curves = [shift_curves(one.content["metrics"], measure) for one in series]
        for kind in dict.fromkeys(kind for of_one in curves for kind in of_one):
            shifted = [
                (one, _with_test_set(one, measure, of_one[kind]))
                for one, of_one in zip(series, curves, strict=True)
                if kind in of_one
            ]
            charts.append(_shift_chart(f"{METRICS[measure].title}: {kind}", shifted))
    return charts


def _with_test_set(
    series: Series, measure: str, points: Sequence[tuple[int, float]]
) -> dict[int, float]:
    """Severity -> value; severity 0 is the test set itself."""
    start = series.content["metrics"].get(f"test/{measure}")
    return ({} if start is None else {0: start}) | dict(points)


def _shift_chart(title: str, shifted: Sequence[tuple[Series, dict[int, float]]]) -> Chart:
    series, columns = zip(*shifted, strict=True)
    traces = []
    for one, column in shifted:
        style = series_style(one.style)
        style["line"]["dash"] = DASHES[one.dash % len(DASHES)]
        traces.append(line(one.name, list(column), list(column.values()), style))
    severities = sorted({severity for column in columns for severity in column})
    rows = [Row(str(s), [number(column.get(s), 4) for column in columns]) for s in severities]
    return Chart(
        title,
        f"{title} over severity, of {names_of(series)}.",
        traces,
        {
            "xaxis": axis("severity (0: test set)", dtick=1),
            "yaxis": axis("", rangemode="tozero"),
            "hovermode": "x unified",
            "showlegend": len(traces) > 1,
        },
        Table(title, ["Severity", *(one.name for one in series)], rows),
        height=280 + 14 * len(series),
    )


def _centres(edges: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]


def names_of(series: Sequence[Series]) -> str:
    """The names of series, as a list in words."""
    return ", ".join(one.name for one in series)
