"""Charts of the page: Plotly figures, each with an accessible name and its data as a table.

Colours are those of the light theme; page.js replaces them by `DARK` in the other. It also adds
fonts and the colours of axes, which follow the page's style sheet.
"""

# plotly makes its classes' attributes when it runs; their types say that each may be anything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.io.json import to_json_plotly

from marglik.prediction.intervals import share_interval
from marglik.report.contents import Predictive, Run
from marglik.report.tables import (
    METRICS,
    NOTHING,
    Row,
    Table,
    duration,
    interval,
    number,
    percentage,
)

__all__ = [
    "DARK",
    "Chart",
    "class_chart",
    "effective_chart",
    "entropy_chart",
    "entropy_shares",
    "evidence_chart",
    "final_weight_decay_chart",
    "loss_chart",
    "reliability_chart",
    "share_chart",
    "shift_charts",
    "time_chart",
    "weight_decay_charts",
]

# Okabe & Ito 2008 ("Color Universal Design"), whose hues stay apart for colour-blind readers;
# lightness is changed so that each has a contrast of at least 3:1 (WCAG 2.2, 1.4.11) with its
# background. Depth is shown by the parts of Plasma that do so.
OF_SERIES = {
    "#0072b2": "#56b4e9",  # blue
    "#c24e00": "#f28e52",  # vermillion
    "#007a5a": "#3cc9a0",  # bluish green
    "#a3497c": "#de9ac4",  # reddish purple
    "#8a6100": "#f0d442",  # yellow
    "#3d4450": "#e3e6eb",  # black
}
MUTED, BACKGROUND = "#6b7280", "#ffffff"
DEPTHS = 64


def _plasma(start: float, end: float) -> list[str]:
    shares = [start + (end - start) * step / DEPTHS for step in range(DEPTHS + 1)]
    return sample_colorscale("Plasma", shares)


OF_DEPTH = dict(zip(_plasma(0.0, 0.62), _plasma(0.42, 1.0), strict=True))
"""Colours of layers, from the input to the output."""
DARK = {**OF_SERIES, MUTED: "#9aa3b2", BACKGROUND: "#16191f", **OF_DEPTH}
"""Colour in the light theme -> colour in the dark theme."""
SERIES = tuple(OF_SERIES)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star-triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot")

HEIGHT, ROW_HEIGHT, MARGIN = 340, 20, 130
"""In pixels: of a chart; of a row of one with rows, and around these."""
MOST_IN_LEGEND = 12
MOST_CLASSES = 30
"""Most classes in a chart; if there are more, it shows those with the most errors."""
LONGEST_NAME = 26
STEPS = [step / 20 for step in range(1, 21)]
"""Where the tables of long curves have rows."""
SHIFT_MEASURES = ("cls/NLL", "reg/NLL", "reg/RMSE", "cal/ECE")
NAMES = {"name", "text", "ticktext", "customdata"}
"""Where names from a run's files stand in a figure."""

Show = Callable[[float | None], str]
Trace = go.Scatter | go.Bar


@dataclass(frozen=True)
class Chart:
    """A chart with its description and data, for readers who cannot see it."""

    title: str
    description: str
    """What it shows: its accessible name."""
    figure: go.Figure
    table: Table
    wide: bool = False
    """Whether it is as wide as the page, or half as wide."""
    highlight: Sequence[str] = ()
    """Names of the traces that a reader can highlight, in order; empty if there are few."""

    @property
    def json(self) -> str:
        """The argument of Plotly.newPlot, safe in HTML; NaN, which JSON lacks, becomes a gap.

        Plotly reads a small HTML (<b>, <a href>) in all its texts, so names are escaped here; it
        reads %{...} in hover templates, in which no name may stand.
        """
        figure = self.figure.to_plotly_json()
        figure["layout"].pop("template", None)  # page.js has the page's own
        return str(to_json_plotly(_escaped(figure), engine="json"))


def _escaped(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _escaped(item, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item, key) for item in value]
    return escape(value, quote=False) if isinstance(value, str) and key in NAMES else value


def _chart(
    title: str,
    traces: Sequence[Trace],
    axes: tuple[str, str],
    *,
    rows: Sequence[str] = (),
    keys: Sequence[str] = (),
    steps: Sequence[float] = (),
    head: str = "",
    show: Show = lambda value: number(value, 4),
    across: bool = False,
    wide: bool = False,
    highlight: Sequence[str] = (),
    **layout: Any,
) -> Chart:
    """A chart and its table, which has the points' values, with their notes in small print.

    Args:
        title: of the chart.
        traces: what it draws. Those with a name that can be hovered over are in the table.
        axes: titles of the x and y axes.
        rows: names of rows, at y = 0, 1, ... from the top, of a chart with a value per row.
        keys: what to call each point in the table; by default its x.
        steps: where the table has rows instead: the values of the last points at or before.
        head: title of the table's first column; by default that of the x axis.
        show: the text of a value.
        across: whether the table has a row for each trace, instead of a column.
        wide: whether it is as wide as the page.
        highlight: names of the traces that a reader can highlight.
        layout: as for `go.Figure.update_layout`.
    """
    if rows:
        ticks = {"tickvals": [*range(len(rows))], "ticktext": [*map(_shorten, rows)]}
        layout = {"yaxis": ticks | {"range": [len(rows) - 0.5, -0.5]}} | layout
        layout = {"height": MARGIN + ROW_HEIGHT * len(rows)} | layout
    layout = {"height": HEIGHT, "hovermode": "closest", "showlegend": len(traces) > 1} | layout
    x, y = ({"title": {"text": text}} for text in axes)
    figure = go.Figure([*traces], {"xaxis": x, "yaxis": y}).update_layout(**layout)

    # The table: a column for each trace, of (value, note) by place: index of the key, or x.
    listed = [t for t in traces if t.name and t.hoverinfo != "skip" and t.showlegend is not False]
    columns, names = [], [*(keys or rows)]
    for trace in listed:
        values, notes = trace.x if rows else trace.y, trace.customdata or [""] * len(trace.x)
        places = range(len(values)) if names else trace.x
        cells = {at: (show(v), note) for at, v, note in zip(places, values, notes, strict=True)}
        before = {step: [at for at in cells if at <= step] for step in steps}
        columns.append({s: cells[b[-1]] for s, b in before.items() if b} if steps else cells)
    order = range(len(names)) if names else sorted({at for cells in columns for at in cells})
    names = names or [percentage(at, 0) if steps else f"{at:g}" for at in order]
    found = [[cells.get(at, (NOTHING, "")) for at in order] for cells in columns]
    heads = [trace.name for trace in listed]
    if not across:
        found, names, heads = [*zip(*found, strict=True)], heads, names
    lines = [
        Row(header, [text for text, _ in cells], small=[note for _, note in cells])
        for header, cells in zip(heads, found, strict=True)
    ]
    table = Table(title, [head or axes[0].capitalize(), *names], lines)
    shown = ", ".join(trace.name for trace in listed[:MOST_IN_LEGEND])
    over = " over ".join(filter(None, [axes[1], axes[0]]))
    return Chart(title, f"{title}: {over}, of {shown}.", figure, table, wide, highlight)


def _curve(
    of: Run | Predictive,
    x: Sequence[float | None],
    y: Sequence[float | None],
    hover: str = "%{y:.4f}",
    style: int | None = None,
    **options: Any,
) -> go.Scatter:
    """A curve with its values on hover; symbols distinguish series when the colours repeat.

    Args:
        of: what it is of, which has its name, colour and symbol.
        x: positions.
        y: values; gaps where None.
        hover: plotly's template of the value.
        style: position of another colour and symbol.
        options: as for `go.Scatter.update`; ``customdata`` are notes of the points.
    """
    style = of.style if style is None else style
    color, symbol = SERIES[style % len(SERIES)], SYMBOLS[style % len(SYMBOLS)]
    curve = go.Scatter(name=of.label, x=[*x], y=[*y], mode="lines+markers")
    curve.hovertemplate = f"{hover}<extra>%{{fullData.name}}</extra>"
    curve.line = {"color": color, "width": 2}
    curve.marker = {"color": color, "symbol": symbol, "size": 6, "opacity": 1}
    curve.update(**options)
    return curve


def _dots(
    of: Run | Predictive,
    names: Sequence[str],
    values: Sequence[float | None],
    hover: str,
    offset: float = 0.0,
    **options: Any,
) -> go.Scatter:
    """A dot per row of a chart with rows, ``offset`` rows below its middle."""
    y = [row + offset for row in range(len(names))]
    dots = _curve(of, values, y, f"%{{text}}<br>{hover}", mode="markers", text=[*names])
    dots.update(marker_size=8, **options)
    return dots


def _reference(name: str) -> go.Scatter:
    """The dashed diagonal, without hover text."""
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    return go.Scatter(name=name, x=[0, 1], y=[0, 1], mode="lines", hoverinfo="skip", line=line)


def _wilson(share: float | None, count: int) -> tuple[float, float] | None:
    return None if share is None or not count else share_interval(round(share * count), count)


def _whiskers(shares: Sequence[float | None], counts: Sequence[int], color: str) -> dict[str, Any]:
    """Error bars from the lower to the upper ends of Wilson's intervals of shares."""
    below, above = [], []
    for share, count in zip(shares, counts, strict=True):
        low, high = _wilson(share, count) or (0.0, 0.0)
        below.append(max((share or 0.0) - low, 0.0))
        above.append(max(high - (share or 0.0), 0.0))
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return bars | {"color": color, "thickness": 1, "width": 0}


def _shorten(name: str) -> str:
    """A name of bounded length; the middle of a long one is left out."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


# How a run went


def evidence_chart(runs: Sequence[Run]) -> Chart:
    """Log marginal likelihood per example at each update; a star is the state that was kept.

    Of a single run also the value before the update's hyperparameter steps.
    """
    curves = []
    for run in runs:
        epochs = [update["epoch"] for update in run.updates]
        curve = _curve(run, epochs, [update["evidence_per_example"] for update in run.updates])
        kept = [epoch == run.results.get("evidence", {}).get("epoch") for epoch in epochs]
        plain = curve.marker.symbol
        curve.marker.symbol = ["star" if is_kept else plain for is_kept in kept]
        curve.marker.size = [15 if is_kept else 6 for is_kept in kept]
        if run.alone:
            curve.name = "after the update"
            if run.num_data and all("evidence_before" in update for update in run.updates):
                values = [update["evidence_before"] / run.num_data for update in run.updates]
                # Drawn first, so that the star lies over it.
                curves.append(_curve(run, epochs, values, style=1, line_dash="dot"))
                curves[0].name = "before the update"
        curves.append(curve)
    return _over_epochs("Log marginal likelihood", curves)


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training loss per example over epochs; of a single run also the objective."""
    curves = []
    for run in runs:
        epochs = [record["epoch"] for record in run.epochs]
        losses = [record["loss"] for record in run.epochs]
        name = "loss" if run.alone else run.label
        curves.append(_curve(run, epochs, losses, mode="lines", name=name))
        if run.alone and all("objective" in record for record in run.epochs):
            losses = [record["objective"] for record in run.epochs]
            curves.append(_curve(run, epochs, losses, style=1, mode="lines", line_dash="dot"))
            curves[-1].name = "loss and weight decay"
    chart = _over_epochs("Training loss", curves)
    if all(value > 0 for curve in curves for value in curve.y):
        chart.figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    return chart


def _over_epochs(title: str, curves: Sequence[Trace]) -> Chart:
    axes = ("epoch", "nats per example")
    return _chart(title, curves, axes, xaxis_rangemode="tozero", hovermode="x unified")


PARTS = {
    "pass": "curvature pass",
    "eigenvalues": "eigenvalues",
    "steps": "hyperparameter steps",
    "start": "data and checks",
    "calibration": "calibration",
    "evaluation": "evaluation",
    "baseline": "baseline (initial weight decay)",
}
"""Names of the parts of an update in the log, and of what results.json has beside training."""
REST = "everything else"


def _time_parts(run: Run) -> dict[str, float]:
    """Name of a part -> seconds spent on it; `REST` completes the run's total."""
    parts = {"training steps": sum((record["seconds"] for record in run.epochs), 0.0)}
    for seconds_of in [*(u["seconds"] for u in run.updates), run.results.get("seconds_beside", {})]:
        for key, seconds in seconds_of.items():
            name = PARTS.get(key, key)
            parts[name] = parts.get(name, 0.0) + seconds
    rest = run.results.get("seconds", 0.0) - sum(parts.values())
    return parts | {REST: rest} if rest > 0 else parts


def time_chart(runs: Sequence[Run]) -> Chart:
    """A stacked bar per run of the seconds that each part of it took."""
    parts = [_time_parts(run) for run in runs]
    names = list(dict.fromkeys(name for one in parts for name in one))
    bars = []
    for position, name in enumerate(sorted(names, key=lambda name: name == REST)):
        seconds = [one.get(name) for one in parts]
        bar = go.Bar(orientation="h", name=name, x=seconds, y=[*range(len(runs))])
        shares = [one.get(name, 0.0) / max(sum(one.values()), 1e-12) for one in parts]
        bar.customdata = [percentage(share, 1) for share in shares]
        bar.hovertemplate = "%{x:.2f} s, %{customdata}<extra>%{fullData.name}</extra>"
        bar.marker.color = MUTED if name == REST else SERIES[position % len(SERIES)]
        bar.marker.line = {"color": BACKGROUND, "width": 1}
        bar.marker.pattern.shape = "/" if position >= len(SERIES) and name != REST else ""
        bars.append(bar)
    return _chart(
        "Time by part",
        bars,
        ("seconds", ""),
        rows=[run.label for run in runs],
        head="Part",
        show=duration,
        across=True,
        wide=True,
        barmode="stack",
        bargap=0.45,
        yaxis_showticklabels=not runs[0].alone,
        height=210 + 40 * len(runs),
        showlegend=True,
    )


# Layers

LOGARITHMIC = {"type": "log", "tickformat": "~g", "dtick": 1}


def weight_decay_charts(runs: Sequence[Run]) -> list[Chart]:
    """Weight decay of each group over epochs, a chart per run, on the same logarithmic axis.

    Coloured by depth; more groups than fit a legend get a colour bar, and all can be picked out.
    """
    values = [value for run in runs for u in run.updates for value in u["weight_decay"].values()]
    values += [run.initial_weight_decay or 0.0 for run in runs]
    logs = [math.log10(value) for value in values if 0 < value < math.inf] or [-1.0, 1.0]
    margin = 0.05 * (max(logs) - min(logs)) + 0.05
    ends = [min(logs) - margin, max(logs) + margin]
    charts, colors = [], list(OF_DEPTH)
    for run in runs:
        groups, curves = list(run.updates[0]["weight_decay"]), []
        start = [] if run.initial_weight_decay is None else [run.initial_weight_decay]
        epochs = [0] * len(start) + [update["epoch"] for update in run.updates]
        for position, group in enumerate(groups):
            decays = start + [update["weight_decay"].get(group) for update in run.updates]
            curve = _curve(run, epochs, decays, "epoch %{x}: %{y:.3g}", name=group)
            color = colors[round(DEPTHS * position / max(len(groups) - 1, 1))]
            dash = "dot" if group.endswith("bias") else "solid"
            curve.line = {"color": color, "width": 1.6, "dash": dash}
            curve.marker = {"color": color, "size": 4, "opacity": 1}
            curves.append(curve)
        many, of_run = len(groups) > MOST_IN_LEGEND, "" if run.alone else f", {run.label}"
        chart = _chart(
            f"Weight decay over epochs{of_run}",
            [*curves, _depth_bar()] if many else curves,
            ("epoch", "weight decay"),
            keys=[f"epoch {epoch}" for epoch in epochs],
            head="Group",
            show=number,
            across=True,
            wide=run.alone,
            highlight=groups if len(groups) > 1 else (),
            xaxis_rangemode="tozero",
            yaxis={**LOGARITHMIC, "range": ends},
            showlegend=not many,
            height=480,
        )
        charts.append(chart)
    return charts


def _depth_bar() -> go.Scatter:
    """A trace without points that shows the colours of depth."""
    scale = [[step / DEPTHS, color] for step, color in enumerate(OF_DEPTH) if step % 4 == 0]
    bar = {"orientation": "h", "thickness": 10, "outlinewidth": 0, "y": 1.0, "yanchor": "bottom"}
    bar |= {"tickvals": [0.03, 0.96], "ticktext": ["input", "output"]}
    marker = {"color": [0], "cmin": 0, "cmax": 1, "colorscale": scale, "colorbar": bar}
    trace = go.Scatter(x=[None], y=[None], mode="markers", showlegend=False, hoverinfo="skip")
    trace.marker = marker | {"showscale": True}
    return trace


def final_weight_decay_chart(runs: Sequence[Run]) -> Chart:
    """The final weight decay of each tensor, with runs side by side."""
    names, dots = _layer_names(runs), []
    for run in runs:
        values = [_value(run, name, "weight_decay") for name in names]
        dots.append(_dots(run, names, values, "%{x:.3g}"))
    return _chart(
        "Weight decay at the end",
        dots,
        ("weight decay", ""),
        rows=names,
        head="Parameter",
        show=number,
        wide=True,
        xaxis=LOGARITHMIC,
    )


def effective_chart(runs: Sequence[Run]) -> Chart:
    """Effective parameters γ of each tensor against how many it has, on a logarithmic axis."""
    names = _layer_names(runs)
    # Of runs with different networks, the larger tensor of a name.
    sizes = [max(r.layers[name].parameters for r in runs if name in r.layers) for name in names]
    line: dict[str, Any] = {"color": MUTED, "width": 2}
    ticks = _dots(runs[0], names, sizes, "%{x:,} parameters", name="all parameters")
    ticks.marker = {"symbol": "line-ns", "size": 12, "color": MUTED, "line": line}
    dots, smallest = [], sizes
    for run in runs:
        gammas = [_value(run, name, "effective") for name in names]
        of = [run.layers[name].parameters if name in run.layers else 0 for name in names]
        pairs = [*zip(gammas, of, strict=True)]
        shares = ["" if g is None else percentage(g / max(size, 1), 1) for g, size in pairs]
        dots.append(_dots(run, names, gammas, "γ = %{x:,.1f}", customdata=shares))
        dots[-1].name = "effective parameters" if run.alone else run.label
        smallest = [min(end, gamma or end) for end, gamma in zip(smallest, gammas, strict=True)]
    # A line in each row, from the tick at all parameters to the smallest γ.
    x = [end for ends in zip(smallest, sizes, [None] * len(names), strict=True) for end in ends]
    y = [row for row in range(len(names)) for _ in range(3)]
    links = go.Scatter(x=x, y=y, mode="lines", hoverinfo="skip", showlegend=False, opacity=0.5)
    links.line = {"color": MUTED, "width": 1}
    return _chart(
        "Effective and all parameters",
        [links, ticks, *dots],
        ("number of parameters", ""),
        rows=names,
        head="Parameter",
        show=lambda value: number(value, None if isinstance(value, int) else 1),
        wide=True,
        xaxis=LOGARITHMIC,
    )


def _layer_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.layers))


def _value(run: Run, name: str, attribute: str) -> float | None:
    value = getattr(run.layers.get(name), attribute, None)
    return value if value is not None and math.isfinite(value) else None


# Predictives


def reliability_chart(title: str, series: Sequence[Predictive]) -> Chart:
    """Accuracy over confidence, or coverage over level, with the diagonal of perfect calibration.

    Args:
        title: of the chart.
        series: predictives of one kind, classes or intervals, and with the same bins or levels.
    """
    found = series[0].content["reliability"]
    x, y = {"range": [0, 1], "dtick": 0.2}, {"range": [0, 1.02], "dtick": 0.2}
    layout: dict[str, Any] = {"xaxis": x, "yaxis": y, "showlegend": True, "height": 460}
    if "levels" in found:
        axes = ("nominal level of the interval", "share of targets inside")
        keys = [f"{level:.2f}" for level in found["levels"]]
        traces = [_coverage(one) for one in series]
    else:
        axes, keys = ("confidence", "accuracy"), _spans(found["edges"], 3)
        traces = [*map(_bins, series), *map(_bin_bars, series)]
        # The bars stand below the curves.
        below = {"title": {"text": "share"}, "domain": [0, 0.2], "anchor": "x", "nticks": 3}
        layout["yaxis2"] = below | {"rangemode": "tozero"}
        layout["xaxis"], layout["yaxis"] = x | {"anchor": "y2"}, y | {"domain": [0.3, 1]}
        layout["bargap"] = 0.1
    traces.insert(0, _reference("calibrated"))
    return _chart(title, traces, axes, keys=keys, show=lambda value: number(value, 3), **layout)


def _bins(one: Predictive) -> go.Scatter:
    """A point for each bin that is not empty.

    Its area grows with the share of its bin; its whiskers are the interval of its accuracy.
    """
    bins = one.content["reliability"]
    confidences, accuracies, counts = bins["confidence"], bins["accuracy"], bins["counts"]
    notes = []
    for confidence, accuracy, count in zip(confidences, accuracies, counts, strict=True):
        ends = interval(_wilson(accuracy, count), 3)
        said = f"confidence {number(confidence, 3)}, 95 %: {ends}, {count:,} predictions"
        notes.append(said if count else "")
    curve = _curve(one, confidences, accuracies, "accuracy %{y:.3f}<br>%{customdata}")
    curve.update(mode="markers", customdata=notes)
    curve.error_y = _whiskers(accuracies, counts, curve.marker.color)
    curve.cliponaxis = False  # so that a point at confidence 1 is not cut in half
    curve.marker.size = [4 + 9 * (count / max(sum(counts), 1)) ** 0.5 for count in counts]
    curve.marker.line.width = 0  # plotly would draw a white one for several sizes
    return curve


def _bin_bars(one: Predictive) -> go.Bar:
    bins = one.content["reliability"]
    shares = [count / max(sum(bins["counts"]), 1) for count in bins["counts"]]
    bars = go.Bar(name=one.label, x=_centres(bins["edges"]), y=shares, yaxis="y2")
    bars.hovertemplate = "%{y:.1%} of the predictions<extra>%{fullData.name}</extra>"
    bars.marker.color = SERIES[one.style % len(SERIES)]
    bars.showlegend = False
    return bars


def _coverage(one: Predictive) -> go.Scatter:
    found = one.content["reliability"]
    levels, coverage = found["levels"], found["coverage"]
    if "count" not in found:
        return _curve(one, levels, coverage, "level %{x:.2f}<br>%{y:.3f} inside")
    curve = _curve(one, levels, coverage, "level %{x:.2f}<br>%{y:.3f} inside, %{customdata}")
    ends = [_wilson(share, found["count"]) for share in coverage]
    curve.customdata = [f"95 %: {interval(pair, 3)}" for pair in ends]
    curve.error_y = _whiskers(coverage, [found["count"]] * len(levels), curve.marker.color)
    return curve


def _centres(edges: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _spans(edges: Sequence[float], decimals: int) -> list[str]:
    return [interval(pair, decimals) for pair in zip(edges[:-1], edges[1:], strict=True)]


def share_chart(
    title: str, series: Sequence[Predictive], part: Literal["risk_coverage", "roc"]
) -> Chart:
    """A curve of shares: the error rate among the most confident over their share, or a ROC curve.

    The latter is the share of out-of-distribution examples that are flagged, over that of our own.
    """
    keys, axes = ("coverage", "risk"), ("coverage", "error rate")
    says, traces = "coverage %{x:.1%}<br>error rate %{y:.2%}", []
    if part == "roc":
        keys, axes = ("fpr", "tpr"), ("flagged of the test set", "flagged of the others")
        says, traces = "%{y:.1%} of the others,<br>%{x:.1%} of its own", [_reference("chance")]
    for one in series:
        x, y = (one.content[part][key] for key in keys)
        traces.append(_curve(one, x, y, says, mode="lines"))
    x, y = {"range": [0, 1], "tickformat": ".0%"}, {"rangemode": "tozero", "tickformat": "~%"}
    return _chart(title, traces, axes, steps=STEPS, show=percentage, xaxis=x, yaxis=y)


def class_chart(title: str, series: Sequence[Predictive], classes: Sequence[str]) -> Chart:
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
    names, traces = [classes[i] for i in order], []
    for place, (one, content) in enumerate(zip(series, counted, strict=True)):
        pairs = [(content["right"][i], content["counts"][i]) for i in order]
        shares = [right / count if count else None for right, count in pairs]
        ends = [
            interval(_wilson(s, count), 1, 100) for s, (_, count) in zip(shares, pairs, strict=True)
        ]
        # The dots of a class stand side by side within its row.
        offset = 0.2 * (place - (len(series) - 1) / 2)
        dots = _dots(one, names, shares, "%{x:.1%}, %{customdata}", offset)
        said = zip(pairs, ends, strict=True)
        dots.customdata = [f"{right} of {count}, 95 %: {e}" for (right, count), e in said]
        dots.error_x = _whiskers(shares, [count for _, count in pairs], dots.marker.color)
        traces.append(dots)
    return _chart(
        title,
        traces,
        ("accuracy", ""),
        rows=names,
        head="Class",
        show=lambda value: percentage(value, 1),
        xaxis={"tickformat": ".0%", "range": [None, 1.01]},
        showlegend=True,
    )


def entropy_chart(one: Predictive, largest: float) -> Chart:
    """Shares of the test set and of other data by predictive entropy, up to a ``largest`` one."""
    ood = (one.run.evaluation.get("ood") or {}).get("name")
    names = {"test": "test set", "ood": f"out of distribution{f': {ood}' if ood else ''}"}
    edges, bars = one.content["entropy"]["edges"], []
    for position, (key, shares) in enumerate(entropy_shares(one).items()):
        bar = go.Bar(name=names[key], x=_centres(edges), y=shares, opacity=0.65)
        bar.hovertemplate = "%{x:.2f} nats: %{y:.1%}<extra>%{fullData.name}</extra>"
        bar.width = [b - a for a, b in zip(edges[:-1], edges[1:], strict=True)]
        bar.marker.color = SERIES[position]
        bars.append(bar)
    return _chart(
        one.name if one.run.alone else f"{one.name}: {one.run.label}",
        bars,
        ("predictive entropy (nats)", "share of examples"),
        keys=_spans(edges, 2),
        show=lambda value: percentage(value, 1),
        barmode="overlay",
        bargap=0,
        xaxis_range=[edges[0], edges[-1]],
        yaxis={"range": [0, largest], "tickformat": ".0%"},
        hovermode="x",
        showlegend=True,
    )


def entropy_shares(one: Predictive) -> dict[str, list[float]]:
    """Counts of "test" and, if there, of "ood" as shares of their sums."""
    entropy = {key: one.content["entropy"].get(key) for key in ("test", "ood")}
    return {key: [n / max(sum(of), 1) for n in of] for key, of in entropy.items() if of}


def shift_charts(series: Sequence[Predictive]) -> list[Chart]:
    """A chart for each measure and kind of shift, with a curve per predictive that has it."""
    curves = defaultdict(list)  # of (index of the measure, kind of shift)
    for one in series:
        metrics, found = one.content["metrics"], defaultdict(dict)
        for key, value in metrics.items():
            split, *shift = key.split("/", 3)  # shift/KIND/SEVERITY/MEASURE
            if split == "shift" and shift[-1] in SHIFT_MEASURES:
                found[SHIFT_MEASURES.index(shift[2]), shift[0]][int(shift[1])] = value
        for (measure, kind), values in found.items():
            of_test = metrics.get(f"test/{SHIFT_MEASURES[measure]}")
            values |= {} if of_test is None else {0: of_test}  # severity 0 is the test set itself
            curve = _curve(one, sorted(values), [values[s] for s in sorted(values)])
            curve.name = one.name if one.run.alone else f"{one.run.label}: {one.name}"
            curve.line.dash = DASHES[one.place % len(DASHES)]
            curves[measure, kind].append(curve)
    charts = []
    for (measure, kind), traces in sorted(curves.items(), key=lambda item: item[0][0]):
        chart = _chart(
            f"{METRICS[SHIFT_MEASURES[measure]].title}: {kind}",
            traces,
            ("severity (0: test set)", ""),
            xaxis_dtick=1,
            yaxis_rangemode="tozero",
            hovermode="x unified",
            height=280 + 14 * len(traces),
        )
        charts.append(chart)
    return charts
