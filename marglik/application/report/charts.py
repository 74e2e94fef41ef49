"""Create the charts of the page: figures of plotly.js as plain data, each with a table of its data.

page.js has the template of fonts, axes and legends. The colours are for the light theme. The style
sheet of the page inverts the charts for the dark theme.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from marglik.application.records import Range
from marglik.application.report.contents import Predictive, Run
from marglik.application.report.tables import NOTHING, Row, Table, interval, number, percentage
from marglik.prediction.intervals import share_interval
from marglik.prediction.metric_types import METRICS, Coverage, Curve
from marglik.prediction.verdict import MEASURES

# Colour-blind readers can distinguish the hues, from Okabe & Ito 2008 ("Color Universal Design").
# Their lightness was changed for a contrast of 3:1 (WCAG 2.2, 1.4.11) with the background, also
# when inverted. DEPTH is the part of the colour map Plasma with this contrast.
SERIES = ("#0072b2", "#c24e00", "#007a5a", "#a3497c", "#8a6100", "#3d4450")
DEPTH = ("#0d0887", "#41049d", "#6a00a8", "#8f0da4", "#b12a90", "#cc4778", "#dc5e66")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star-triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot")
MUTED = "#6b7280"

HEIGHT, TALL = 340, 500
"""Heights of charts in pixels."""
MOST_COLUMNS = 21
"""Maximum number of columns in the table of a chart. Longer curves have evenly spaced points."""

Trace = dict[str, Any]
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Chart:
    """A chart, with its data as a table for readers who cannot see the chart."""

    title: str
    traces: Sequence[Trace]
    """Traces of plotly.js. "customdata" are notes, the small text in the table."""
    layout: Mapping[str, Any]
    table: Table
    wide: bool = False
    """Whether the chart is as wide as the page, instead of half as wide."""

    @property
    def description(self) -> str:
        """Accessible name of the chart, which describes its content."""
        x, y = (self.layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
        headers = ", ".join(row.header for row in self.table.rows[:12])
        return f"{self.title}: {y} over {x}, of {headers}."

    @property
    def json(self) -> str:
        """Argument of Plotly.newPlot, safe in HTML. NaN, which JSON lacks, becomes a gap.

        Plotly interprets some HTML (<b>, <a href>) in all texts, so names are escaped here. It
        interprets %{...} in hover templates, so these must not contain names.
        """
        named = [trace | {"name": escape(trace["name"], quote=False)} for trace in self.traces]
        figure = _without_nan({"data": named, "layout": self.layout})
        return json.dumps(figure, allow_nan=False).replace("<", r"\u003c")


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _chart(
    title: str,
    traces: Sequence[Trace],
    axes: tuple[str, str],
    *,
    keys: Sequence[str] = (),
    show: Show = lambda value: number(value, 4),
    wide: bool = False,
    **layout: Any,
) -> Chart:
    """Return a chart and its table, with a row for each trace that has hover text.

    ``axes`` are the titles of the x and y axes. ``keys`` are names of the points in the table, by
    default their x. ``show`` returns a value as text.
    """
    for axis, text in zip(("xaxis", "yaxis"), axes, strict=True):
        layout[axis] = {"title": {"text": text}} | layout.get(axis, {})
    layout = {"height": HEIGHT, "hovermode": "closest", "showlegend": len(traces) > 1} | layout

    # The table has a row for each curve and a column for each x, for long curves only for some x.
    listed = [trace for trace in traces if trace.get("hoverinfo") != "skip"]
    places = [*range(len(keys))] or sorted({at for trace in listed for at in trace["x"]})
    if not keys and len(places) > MOST_COLUMNS:
        last = len(places) - 1
        places = [places[round(i * last / (MOST_COLUMNS - 1))] for i in range(MOST_COLUMNS)]
    rows = []
    for trace in listed:
        # Curves may have different x. A cell without a value is a dash.
        notes = trace.get("customdata") or [""] * len(trace["y"])
        xs = range(len(keys)) if keys else trace["x"]
        cells = {at: (show(v), note) for at, v, note in zip(xs, trace["y"], notes, strict=True)}
        values = [cells.get(at, (NOTHING, "")) for at in places]
        rows.append(Row(trace["name"], [text for text, _ in values], small=[n for _, n in values]))
    head = "" if keys else f"{axes[0].capitalize()}:"
    table = Table(title, [head, *(keys or [f"{at:g}" for at in places])], rows)
    return Chart(title, traces, layout, table, wide)


def _curve(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    style: int,
    *,
    color: str | None = None,
    dash: str = "solid",
    size: Any = 6,
    **more: Any,
) -> Trace:
    """Return a curve with the colour and symbol of a style. There are more symbols than colours."""
    color, symbol = color or SERIES[style % len(SERIES)], SYMBOLS[style % len(SYMBOLS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [*x],
        "y": [*y],
        "line": {"color": color, "dash": dash, "width": 1.8},
        "marker": {"color": color, "symbol": symbol, "size": size, "line": {"width": 0}},
        "hovertemplate": "%{y:.4f}<extra>%{fullData.name}</extra>",
    } | more


def _diagonal(name: str) -> Trace:
    """Return a dashed diagonal for reference, without hover text."""
    points = _curve(name, [0, 1], [0, 1], 0, color=MUTED, dash="dash", mode="lines")
    return points | {"hoverinfo": "skip"}


# Comparison with the plain network


def gain_charts(run: Run) -> list[Chart]:
    """Return a chart for each metric of the verdict, with the plain and the learned network.

    Both networks are temperature-scaled if there was held-out data. Whiskers are 95 % intervals
    over the choice of test examples. The verdict has the narrower intervals of paired differences.
    """
    networks = run.results.networks if run.results else {}
    if "plain" not in networks:
        return []
    name, plain = [*networks["plain"].predictives.items()][-1]
    pair = {"plain network": plain, "learned": next(iter(networks.values())).predictives[name]}
    charts = []
    for field in MEASURES:
        intervals = [getattr(one.intervals, field) for one in pair.values()]
        if None in intervals:
            continue
        metric, factor = METRICS[field], 100 if METRICS[field].unit == "%" else 1
        ends = [(factor * low, factor * high) for low, high in intervals]
        values = [factor * getattr(one.metrics, field) for one in pair.values()]
        points = _curve(
            name, [*pair], values, run.style, mode="markers", size=12,
            error_y=_whiskers(values, ends),
            customdata=[f"95 %: {interval(both, 3)}" for both in ends],
        )  # fmt: skip
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        margin = 0.2 * (high - low)  # space above the whiskers for plotly's buttons
        charts.append(
            _chart(
                f"{metric.title}, {metric.better} is better",
                [points],
                ("network", f"{metric.short}{' in %' if factor > 1 else ''} on the test set"),
                keys=[*pair],
                xaxis={"type": "category", "range": [-0.5, 1.5]},
                yaxis={"range": [low - margin / 2, high + margin]},
            )
        )
    return charts


def _whiskers(values: Sequence[float | None], ends: Sequence[tuple[float, float]]) -> Trace:
    """Return the error bars of values, which count as 0 if they are None."""
    pairs = [*zip([value or 0.0 for value in values], ends, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in pairs]
    below = [max(value - low, 0.0) for value, (low, _) in pairs]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}


# Course of a training


def evidence_chart(runs: Sequence[Run]) -> Chart:
    """Return the log marginal likelihood per example at each update, the final one as a star."""
    curves = []
    for run in runs:
        epochs = [update.epoch for update in run.updates]
        values = [update.evidence_per_example for update in run.updates]
        # A star marks the update that gave the final state.
        last = run.results and run.results.evidence.epoch
        is_final = [epoch == last for epoch in epochs]
        sizes = [15 if final else 6 for final in is_final]
        curve = _curve(run.label or "evidence", epochs, values, run.style, size=sizes)
        symbol = curve["marker"]["symbol"]
        curve["marker"]["symbol"] = ["star" if final else symbol for final in is_final]
        curves.append(curve)
    return _over_epochs("Log marginal likelihood", "nats per example", curves)


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Return the training loss per example over epochs, and for a single run the objective."""
    curves = []
    for run in runs:
        epochs = [record.epoch for record in run.epochs]
        names = (
            {"loss": run.label} if run.label else {"loss": "loss", "objective": "with weight decay"}
        )
        for style, (key, name) in enumerate(names.items()):
            look: Any = {"mode": "lines", "dash": DASHES[2 * style]}
            values = [getattr(record, key) for record in run.epochs]
            curves.append(_curve(name, epochs, values, run.style + style, **look))
    positive = all(value > 0 for curve in curves for value in curve["y"])
    axis = {"type": "log", "tickformat": "~g", "dtick": "D2"} if positive else {}
    return _over_epochs("Training loss", "nats per example", curves, yaxis=axis)


def weight_decay_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart per run of the weight decays of groups over epochs, on a logarithmic axis.

    Colours show depth, from the input (dark) to the output. A double click on a name in the legend
    shows only this group.
    """
    # Use the same axis for all runs, so that they can be compared by eye.
    curves = {id(run): _weight_decays(run) for run in runs}
    values = [value for group in curves.values() for curve in group for value in curve["y"]]
    logs = [math.log10(value) for value in values if value and 0 < value < math.inf] or [-1.0, 1.0]
    margin = 0.05 * (max(logs) - min(logs)) + 0.05
    axis = {"type": "log", "tickformat": "~g", "dtick": 1}
    axis["range"] = [min(logs) - margin, max(logs) + margin]
    return [
        _over_epochs(
            run.titled("Weight decay over epochs"), "weight decay", curves[id(run)],
            show=number, wide=not run.label, yaxis=axis, height=TALL,
        )
        for run in runs
    ]  # fmt: skip


def _weight_decays(run: Run) -> list[Trace]:
    groups = [*run.updates[0].weight_decay]
    tensors = run.results.weight_decay if run.results else {}
    start = [tensor.initial for tensor in tensors.values()][:1]
    epochs = [0] * len(start) + [update.epoch for update in run.updates]
    return [
        _curve(
            group,
            epochs,
            start + [update.weight_decay.get(group) for update in run.updates],
            run.style,
            color=DEPTH[round((len(DEPTH) - 1) * position / max(len(groups) - 1, 1))],
            dash="dot" if group.endswith("bias") else "solid",
            size=4,
            hovertemplate="epoch %{x}: %{y:.3g}<extra>%{fullData.name}</extra>",
        )
        for position, group in enumerate(groups)
    ]


def ranges_chart(run: Run, ranges: Mapping[str, Range]) -> Chart:
    """Return each learned augmentation range over epochs, as a share of its largest value."""
    updates = [(update.epoch, update.ranges) for update in run.updates if update.ranges]
    epochs, curves = [0, *(epoch for epoch, _ in updates)], []
    for style, (name, one) in enumerate(ranges.items()):
        values = [one.initial, *(values[name] for _, values in updates)]
        dash = DASHES[style // len(SERIES) % len(DASHES)]
        shares = [value / one.largest for value in values]
        curves.append(_curve(name, epochs, shares, style, dash=dash, size=4))
    title, axis = run.titled("Ranges over epochs"), {"range": [-0.02, 1.02]}
    return _over_epochs(title, "share of the largest range", curves, wide=not run.label, yaxis=axis)


def _over_epochs(title: str, y: str, curves: Sequence[Trace], **more: Any) -> Chart:
    more = {"xaxis": {"rangemode": "tozero"}, "hovermode": "x unified"} | more
    if len(curves) > 8:  # a hover text with all curves would hide the chart
        more["hovermode"] = "closest"
    return _chart(title, curves, ("epoch", y), **more)


# Predictives


def reliability_chart(title: str, series: Sequence[Predictive]) -> Chart:
    """Return accuracy over confidence, or coverage over level, with the ideal diagonal.

    All predictives have the same bins or levels. Whiskers are 95 % intervals. The size of a point
    shows the share of predictions in its bin.
    """
    axes, traces, keys = ("confidence", "accuracy"), [_diagonal("calibrated")], []
    for one in series:
        data = one.record.reliability
        if data is None:
            continue
        if isinstance(data, Coverage):
            x, y, look = data.levels, data.coverage, {}
            axes, keys = ("nominal level", "share of targets inside"), [f"{p:.2f}" for p in x]
            counts = [data.count] * len(x)
        else:
            x, y, counts = data.confidence, data.accuracy, data.counts
            keys = [interval(pair, 3) for pair in pairwise(data.edges)]
            sizes = [4 + 9 * (n / max(sum(counts), 1)) ** 0.5 for n in counts]
            look: Any = {"mode": "markers", "size": sizes, "cliponaxis": False}
        # Each share has Wilson's interval. An empty bin has no interval and no whisker.
        bins = zip([share or 0.0 for share in y], counts, strict=True)
        ends = [share_interval(round(share * n), n) if n else (share, share) for share, n in bins]
        look["error_y"] = _whiskers(y, ends) | {"thickness": 1, "width": 0}
        look["customdata"] = [
            f"95 %: {interval(pair, 3)}, {n:,} predictions" if n else ""
            for pair, n in zip(ends, counts, strict=True)
        ]
        hover = f"{axes[0]} %{{x:.3f}}<br>%{{y:.3f}}, %{{customdata}}"
        look["hovertemplate"] = f"{hover}<extra>%{{fullData.name}}</extra>"
        traces.append(_curve(one.label, x, y, one.style, **look))
    return _chart(
        title,
        traces,
        axes,
        keys=keys,
        show=lambda value: number(value, 3),
        xaxis={"range": [0, 1], "dtick": 0.2},
        yaxis={"range": [0, 1.02], "dtick": 0.2},
        height=460,
    )


def risk_coverage_chart(title: str, series: Sequence[Predictive]) -> Chart:
    """Return the error rate of the most confident predictions over their share."""
    curves = [(one, one.record.risk_coverage) for one in series]
    hover = "coverage %{x:.1%}<br>error rate %{y:.2%}"
    return _share_chart(title, curves, ("coverage", "error rate"), hover, [])


def roc_chart(title: str, series: Sequence[Predictive]) -> Chart:
    """Return the share of flagged out-of-distribution data over the share of flagged test data."""
    curves = [(one, one.record.roc) for one in series]
    hover = "%{y:.1%} of out-of-distribution data,<br>%{x:.1%} of test data"
    axes = ("flagged test examples", "flagged out-of-distribution examples")
    return _share_chart(title, curves, axes, hover, [_diagonal("chance")])


def _share_chart(
    title: str,
    curves: Sequence[tuple[Predictive, Curve | None]],
    axes: tuple[str, str],
    hover: str,
    references: Sequence[Trace],
) -> Chart:
    traces = [
        *references,
        *(
            _curve(one.label, curve.x, curve.y, one.style, mode="lines", hovertemplate=hover)
            for one, curve in curves
            if curve is not None
        ),
    ]
    axis: Any = {"range": [0, 1], "tickformat": ".0%"}
    y_axis = {"rangemode": "tozero", "tickformat": "~%"}
    return _chart(title, traces, axes, show=percentage, xaxis=axis, yaxis=y_axis)
