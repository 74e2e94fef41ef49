"""Charts of the page: Plotly figures, each with an accessible name and its data as a table.

Colours are those of the light theme; page.js replaces them by `DARK` in the other. It also adds
fonts and the colours of axes, which follow the page's style sheet.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, cast

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
    head: str,
    *,
    rows: Sequence[str] = (),
    keys: Sequence[str] = (),
    steps: Sequence[float] = (),
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
        head: title of the table's first column.
        rows: names of rows, at y = 0, 1, ... from the top, of a chart with a value per row.
        keys: what to call each point in the table; by default its x.
        steps: where the table has rows instead: the values of the last points at or before.
        show: the text of a value.
        across: whether the table has a row for each trace, instead of a column.
        wide: whether it is as wide as the page.
        highlight: names of the traces that a reader can highlight.
        layout: as for `go.Figure.update_layout`.
    """
    if rows:
        texts = [_shorten(name) for name in rows]
        ticks = {"tickvals": [*range(len(rows))], "ticktext": texts}
        layout = {"yaxis": ticks | {"range": [len(rows) - 0.5, -0.5]}} | layout
        layout = {"height": MARGIN + ROW_HEIGHT * len(rows)} | layout
    layout = {"height": HEIGHT, "hovermode": "closest", "showlegend": len(traces) > 1} | layout
    x, y = ({"title": {"text": text}} for text in axes)
    figure = go.Figure([*traces], {"xaxis": x, "yaxis": y}).update_layout(**layout)
    # The tables are made of the same points.

    listed = [t for t in traces if t.name and t.hoverinfo != "skip" and t.showlegend is not False]
    columns, names = [], [*(keys or rows)]
    for trace in listed:
        values, notes = trace.x if rows else trace.y, trace.customdata or [""] * len(trace.x)
        places = range(len(values)) if names else trace.x
        cells = {at: (show(v), n) for at, v, n in zip(places, values, notes, strict=True)}
        if steps:
            before = {step: [at for at in cells if at <= step] for step in steps}
            cells = {step: cells[found[-1]] for step, found in before.items() if found}
        columns.append(cells)
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
    table = Table(title, [head, *names], lines)
    shown = ", ".join(trace.name for trace in listed[:MOST_IN_LEGEND])
    over = " over ".join(filter(None, [axes[1], axes[0]]))
    return Chart(title, f"{title}: {over}, of {shown}.", figure, table, wide, highlight)


def _curve(
    name: str,
    x: Sequence[float | None],
    y: Sequence[float | None],
    style: int,
    hover: str = "%{y:.4f}",
    **options: Any,
) -> go.Scatter:
    """A curve with its values on hover; symbols distinguish series when the colours repeat.

    Args:
        name: shown in the legend and on hover; any text.
        x: positions.
        y: values; gaps where None.
        style: position of colour and symbol.
        hover: plotly's template of the value.
        options: as for `go.Scatter.update`; ``customdata`` are notes of the points.
    """
    color = SERIES[style % len(SERIES)]
    curve = go.Scatter(
        name=name,
        x=[*x],
        y=[*y],
        mode="lines+markers",
        hovertemplate=f"{hover}<extra>%{{fullData.name}}</extra>",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": SYMBOLS[style % len(SYMBOLS)], "size": 6, "opacity": 1},
    )
    return cast(go.Scatter, curve.update(**options))


def _dots(
    name: str,
    names: Sequence[str],
    values: Sequence[float | None],
    style: int,
    hover: str,
    offset: float = 0.0,
    **options: Any,
) -> go.Scatter:
    """A dot per row of a chart with rows, ``offset`` rows below its middle."""
    y = [row + offset for row in range(len(names))]
    dots = _curve(name, values, y, style, f"%{{text}}<br>{hover}", mode="markers", text=[*names])
    return cast(go.Scatter, dots.update(marker_size=8, **options))


def _reference(name: str) -> go.Scatter:
    """The dashed diagonal, without hover text."""
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    return go.Scatter(name=name, x=[0, 1], y=[0, 1], mode="lines", hoverinfo="skip", line=line)


def _wilson(share: float | None, count: int) -> tuple[float, float] | None:
    return None if share is None or not count else share_interval(round(share * count), count)


def _whiskers(shares: Sequence[float | None], counts: Sequence[int], color: str) -> dict[str, Any]:
    """Error bars from the lower to the upper ends of Wilson's intervals of shares."""
    ends = [_wilson(share, count) for share, count in zip(shares, counts, strict=True)]
    pairs = [*zip(shares, ends, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "arrayminus": [max(s - e[0], 0.0) if s is not None and e else 0.0 for s, e in pairs],
        "array": [max(e[1] - s, 0.0) if s is not None and e else 0.0 for s, e in pairs],
        "color": color,
        "thickness": 1,
        "width": 0,
    }


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
        values = [update["evidence_per_example"] for update in run.updates]
        curve = _curve("after the update" if run.alone else run.label, epochs, values, run.position)
        kept = [epoch == run.results.get("evidence", {}).get("epoch") for epoch in epochs]
        plain = curve.marker.symbol
        curve.marker.symbol = ["star" if is_kept else plain for is_kept in kept]
        curve.marker.size = [15 if is_kept else 6 for is_kept in kept]
        if run.alone and run.num_data and all("evidence_before" in u for u in run.updates):
            before = [update["evidence_before"] / run.num_data for update in run.updates]
            # Drawn first, so that the star lies over it.
            curves.append(_curve("before the update", epochs, before, 1, line_dash="dot"))
        curves.append(curve)
    return _over_epochs("Log marginal likelihood", "at each update", curves, runs)


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training loss per example over epochs; of a single run also the objective."""
    curves = []
    for run in runs:
        epochs = [record["epoch"] for record in run.epochs]
        losses = [record["loss"] for record in run.epochs]
        name = "loss" if run.alone else run.label
        curves.append(_curve(name, epochs, losses, run.position, mode="lines"))
        if run.alone and all("objective" in record for record in run.epochs):
            values = [record["objective"] for record in run.epochs]
            objective = _curve("loss and weight decay", epochs, values, 1, mode="lines")
            curves.append(objective.update(line_dash="dot"))
    chart = _over_epochs("Training loss", "over epochs", curves, runs)
    if all(value > 0 for curve in curves for value in curve.y):
        chart.figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    return chart


def _over_epochs(title: str, when: str, curves: Sequence[Trace], runs: Sequence[Run]) -> Chart:
    return _chart(
        title,
        curves,
        ("epoch", "nats per example"),
        "Epoch",
        xaxis_rangemode="tozero",
        hovermode="x unified",
    )


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
    totals = [max(sum(one.values()), 1e-12) for one in parts]
    names = list(dict.fromkeys(name for one in parts for name in one))
    bars = []
    for position, name in enumerate(sorted(names, key=lambda name: name == REST)):
        bar = go.Bar(
            orientation="h",
            name=name,
            x=[one.get(name) for one in parts],
            y=[*range(len(runs))],
            customdata=[
                percentage(one.get(name, 0) / all_, 1)
                for one, all_ in zip(parts, totals, strict=True)
            ],
            hovertemplate="%{x:.2f} s, %{customdata}<extra>%{fullData.name}</extra>",
            marker_color=MUTED if name == REST else SERIES[position % len(SERIES)],
            marker_line={"color": BACKGROUND, "width": 1},
            marker_pattern_shape="/" if position >= len(SERIES) and name != REST else "",
        )
        bars.append(bar)
    return _chart(
        "Time by part",
        bars,
        ("seconds", ""),
        "Part",
        rows=[run.label for run in runs],
        show=duration,
        across=True,
        barmode="stack",
        bargap=0.45,
        yaxis_showticklabels=not runs[0].alone,
        height=210 + 40 * len(runs),
        showlegend=True,
        wide=True,
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
        groups = list(run.updates[0]["weight_decay"])
        start = [] if run.initial_weight_decay is None else [run.initial_weight_decay]
        epochs = [0] * len(start) + [update["epoch"] for update in run.updates]
        curves = []
        for position, group in enumerate(groups):
            color = colors[round(DEPTHS * position / max(len(groups) - 1, 1))]
            decays = start + [update["weight_decay"].get(group) for update in run.updates]
            curve = _curve(group, epochs, decays, 0, "epoch %{x}: %{y:.3g}", marker_size=4)
            dash = "dot" if group.endswith("bias") else "solid"
            curve.update(line={"color": color, "width": 1.6, "dash": dash}, marker_color=color)
            curves.append(curve)
        many, of_run = len(groups) > MOST_IN_LEGEND, "" if run.alone else f", {run.label}"
        chart = _chart(
            f"Weight decay over epochs{of_run}",
            [*curves, _depth_bar()] if many else curves,
            ("epoch", "weight decay"),
            "Group",
            keys=[f"epoch {epoch}" for epoch in epochs],
            show=number,
            across=True,
            xaxis_rangemode="tozero",
            yaxis={**LOGARITHMIC, "range": ends},
            showlegend=not many,
            height=480,
            wide=run.alone,
            highlight=groups if len(groups) > 1 else (),
        )
        charts.append(chart)
    return charts


def _depth_bar() -> go.Scatter:
    """A trace without points that shows the colours of depth."""
    scale = [[step / DEPTHS, color] for step, color in enumerate(OF_DEPTH) if step % 4 == 0]
    bar = {"orientation": "h", "thickness": 10, "outlinewidth": 0, "y": 1.0, "yanchor": "bottom"}
    bar |= {"tickvals": [0.03, 0.96], "ticktext": ["input", "output"]}
    marker = {"color": [0], "cmin": 0, "cmax": 1, "colorscale": scale, "colorbar": bar}
    marker["showscale"] = True
    options = {"mode": "markers", "showlegend": False, "hoverinfo": "skip", "marker": marker}
    return go.Scatter(x=[None], y=[None], **options)


def final_weight_decay_chart(runs: Sequence[Run]) -> Chart:
    """The final weight decay of each tensor, with runs side by side."""
    names = _layer_names(runs)
    dots = [
        _dots(
            run.label,
            names,
            [_value(run, name, "weight_decay") for name in names],
            run.position,
            "%{x:.3g}",
        )
        for run in runs
    ]
    return _chart(
        "Weight decay at the end",
        dots,
        ("weight decay", ""),
        "Parameter",
        rows=names,
        show=number,
        xaxis=LOGARITHMIC,
        wide=True,
    )


def effective_chart(runs: Sequence[Run]) -> Chart:
    """Effective parameters γ of each tensor against how many it has, on a logarithmic axis."""
    names = _layer_names(runs)
    # Runs may have different networks, whose tensors of one name differ in size: the largest.
    sizes = [
        max(run.layers[name].parameters for run in runs if name in run.layers) for name in names
    ]
    dots, smallest = [], sizes
    for run in runs:
        gammas = [_value(run, name, "effective") for name in names]
        of = [run.layers[name].parameters if name in run.layers else 0 for name in names]
        shares = [
            "" if gamma is None else percentage(gamma / max(size, 1), 1)
            for gamma, size in zip(gammas, of, strict=True)
        ]
        label, hover = "effective parameters" if run.alone else run.label, "γ = %{x:,.1f}"
        dots.append(_dots(label, names, gammas, run.position, hover, customdata=shares))
        smallest = [min(s, g or s) for s, g in zip(smallest, gammas, strict=True)]
    # A line in each row, from the tick at all parameters to the smallest γ.
    x = [end for ends in zip(smallest, sizes, [None] * len(names), strict=True) for end in ends]
    y = [row for row in range(len(names)) for _ in range(3)]
    line: dict[str, Any] = {"color": MUTED, "width": 1}
    links = go.Scatter(x=x, y=y, mode="lines", line=line, opacity=0.5, hoverinfo="skip")
    ticks = _dots("all parameters", names, sizes, 0, "%{x:,} parameters")
    line = {"color": MUTED, "width": 2}
    ticks.marker = {"symbol": "line-ns", "size": 12, "color": MUTED, "line": line}
    return _chart(
        "Effective and all parameters",
        [links.update(showlegend=False), ticks, *dots],
        ("number of parameters", ""),
        "Parameter",
        rows=names,
        show=lambda value: number(value, None if isinstance(value, int) else 1),
        xaxis=LOGARITHMIC,
        wide=True,
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
    found = [one.content["reliability"] for one in series]
    of_intervals = "levels" in found[0]
    layout = {"xaxis": {"range": [0, 1], "dtick": 0.2}, "yaxis": {"range": [0, 1.02], "dtick": 0.2}}
    if of_intervals:
        axes, head = ("nominal level of the interval", "share of targets inside"), "Level"
        keys = [f"{level:.2f}" for level in found[0]["levels"]]
        curves, bars = [*map(_coverage, series)], []
    else:
        axes, head, edges = ("confidence", "accuracy"), "Bin", found[0]["edges"]
        keys = [f"{a:.3f}–{b:.3f}" for a, b in zip(edges[:-1], edges[1:], strict=True)]
        curves, bars = [*map(_bins, series)], [*map(_bin_bars, series)]
        # The bars stand below the curves.
        layout["xaxis"]["anchor"], layout["yaxis"]["domain"] = "y2", [0.3, 1]
        below = {"title": {"text": "share"}, "domain": [0, 0.2], "anchor": "x", "nticks": 3}
        layout["yaxis2"] = below | {"rangemode": "tozero"}
    return _chart(
        title,
        [_reference("calibrated"), *curves, *bars],
        axes,
        head,
        keys=keys,
        show=lambda value: number(value, 3),
        bargap=0.1,
        showlegend=True,
        height=460,
        **layout,
    )


def _bins(one: Predictive) -> go.Scatter:
    """A point for each bin that is not empty.

    Its area grows with the share of its bin; its whiskers are the interval of its accuracy.
    """
    bins = one.content["reliability"]
    confidences, accuracies, counts = bins["confidence"], bins["accuracy"], bins["counts"]
    notes = [
        f"confidence {number(confidence, 3)}, 95 %: {interval(_wilson(accuracy, count), 3)}, "
        f"{count:,} predictions"
        if count
        else ""
        for confidence, accuracy, count in zip(confidences, accuracies, counts, strict=True)
    ]
    hover = "accuracy %{y:.3f}<br>%{customdata}"
    curve = _curve(one.label, confidences, accuracies, one.style, hover, customdata=notes)
    curve.update(mode="markers", error_y=_whiskers(accuracies, counts, curve.marker.color))
    curve.cliponaxis = False  # so that a point at confidence 1 is not cut in half
    curve.marker.size = [4 + 9 * (count / max(sum(counts), 1)) ** 0.5 for count in counts]
    curve.marker.line.width = 0  # plotly would draw a white one for several sizes
    return curve


def _bin_bars(one: Predictive) -> go.Bar:
    bins = one.content["reliability"]
    return go.Bar(
        name=one.label,
        x=_centres(bins["edges"]),
        y=[count / max(sum(bins["counts"]), 1) for count in bins["counts"]],
        yaxis="y2",
        showlegend=False,
        marker_color=SERIES[one.style % len(SERIES)],
        hovertemplate="%{y:.1%} of the predictions<extra>%{fullData.name}</extra>",
    )


def _coverage(one: Predictive) -> go.Scatter:
    found = one.content["reliability"]
    levels, coverage, hover = (
        found["levels"],
        found["coverage"],
        "level %{x:.2f}<br>%{y:.3f} inside",
    )
    curve = _curve(one.label, levels, coverage, one.style, hover)
    if "count" in found:
        counts = [found["count"]] * len(levels)
        notes = [f"95 %: {interval(_wilson(share, counts[0]), 3)}" for share in coverage]
        curve.update(customdata=notes, error_y=_whiskers(coverage, counts, curve.marker.color))
        curve.hovertemplate = curve.hovertemplate.replace("inside", "inside, %{customdata}")
    return curve


def _centres(edges: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]


def share_chart(
    title: str, series: Sequence[Predictive], part: Literal["risk_coverage", "roc"]
) -> Chart:
    """A curve of shares: the error rate among the most confident over their share, or a ROC curve.

    The latter is the share of out-of-distribution examples that are flagged, over that of our own.
    """
    is_roc = part == "roc"
    x, y = ("fpr", "tpr") if is_roc else ("coverage", "risk")
    says = "coverage %{x:.1%}<br>error rate %{y:.2%}"
    if is_roc:
        says = "%{y:.1%} of the others,<br>%{x:.1%} of its own"
    points = [(one, one.content[part][x], one.content[part][y]) for one in series]
    curves = [_curve(one.label, x, y, one.style, says, mode="lines") for one, x, y in points]
    return _chart(
        title,
        [_reference("chance"), *curves] if is_roc else curves,
        ("flagged of the test set", "flagged of the others")
        if is_roc
        else ("coverage", "error rate"),
        "Of the test set" if is_roc else "Coverage",
        steps=STEPS,
        show=percentage,
        xaxis={"range": [0, 1], "tickformat": ".0%"},
        yaxis={"rangemode": "tozero", "tickformat": "~%"},
    )


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
        counts = [content["counts"][i] for i in order]
        pairs = [(content["right"][i], content["counts"][i]) for i in order]
        shares = [right / count if count else None for right, count in pairs]
        notes = [
            f"{right} of {count}"
            + (f", 95 %: {interval(_wilson(right / count, count), 1, 100)}" if count else "")
            for right, count in pairs
        ]
        # The dots of a class stand side by side within its row.
        offset, hover = 0.2 * (place - (len(series) - 1) / 2), "%{x:.1%}, %{customdata}"
        dots = _dots(one.label, names, shares, one.style, hover, offset, customdata=notes)
        dots.error_x = _whiskers(shares, counts, dots.marker.color)
        traces.append(dots)
    return _chart(
        title,
        traces,
        ("accuracy", ""),
        "Class",
        rows=names,
        show=lambda value: percentage(value, 1),
        xaxis={"tickformat": ".0%", "range": [None, 1.01]},
        showlegend=True,
    )


def entropy_chart(one: Predictive, largest: float) -> Chart:
    """Shares of the test set and of other data by predictive entropy, up to a ``largest`` one."""
    ood = (one.run.evaluation.get("ood") or {}).get("name")
    names = {"test": "test set", "ood": f"out of distribution{f': {ood}' if ood else ''}"}
    edges, shares = one.content["entropy"]["edges"], entropy_shares(one)
    ends = [*zip(edges[:-1], edges[1:], strict=True)]
    bars = [
        go.Bar(
            name=names[key],
            x=_centres(edges),
            y=values,
            width=[b - a for a, b in ends],
            hovertemplate="%{x:.2f} nats: %{y:.1%}<extra>%{fullData.name}</extra>",
            opacity=0.65,
            marker_color=SERIES[position],
        )
        for position, (key, values) in enumerate(shares.items())
    ]
    return _chart(
        one.name if one.run.alone else f"{one.name}: {one.run.label}",
        bars,
        ("predictive entropy (nats)", "share of examples"),
        "Entropy",
        keys=[f"{a:.2f}–{b:.2f} nats" for a, b in ends],
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
    curves: dict[tuple[int, str], list[go.Scatter]] = {}  # by measure and kind
    for one in series:
        metrics, found = one.content["metrics"], defaultdict(dict)
        for key, value in metrics.items():
            split, *shift = key.split("/", 3)  # shift/KIND/SEVERITY/MEASURE
            if split == "shift" and shift[-1] in SHIFT_MEASURES:
                found[SHIFT_MEASURES.index(shift[2]), shift[0]][int(shift[1])] = value
        name = one.name if one.run.alone else f"{one.run.label}: {one.name}"
        for (measure, kind), values in found.items():
            of_test = metrics.get(f"test/{SHIFT_MEASURES[measure]}")
            values |= {} if of_test is None else {0: of_test}  # severity 0 is the test set itself
            curve = _curve(name, sorted(values), [values[s] for s in sorted(values)], one.style)
            curve.line.dash = DASHES[one.place % len(DASHES)]
            curves.setdefault((measure, kind), []).append(curve)
    charts = []
    for (measure, kind), traces in sorted(curves.items(), key=lambda item: item[0][0]):
        title = f"{METRICS[SHIFT_MEASURES[measure]].title}: {kind}"
        chart = _chart(
            title,
            traces,
            ("severity (0: test set)", ""),
            "Severity",
            xaxis_dtick=1,
            yaxis_rangemode="tozero",
            hovermode="x unified",
            height=280 + 14 * len(traces),
        )
        charts.append(chart)
    return charts
