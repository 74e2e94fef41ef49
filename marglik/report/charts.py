"""Charts of the page: Plotly figures, each with its description and its data as a table.

Fonts, axes and legends are in the template of page.js. Colours are those of the light theme; in the
dark one the page's style sheet inverts the charts.
"""

# plotly makes its classes' attributes when it runs; their types say that each may be anything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportOptionalIterable=false

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.io.json import to_json_plotly

from marglik.prediction.intervals import share_interval
from marglik.report.contents import Predictive, Run
from marglik.report.tables import METRICS, NOTHING, Row, Table, duration, interval, number
from marglik.report.tables import percentage as percent

__all__ = [
    "Chart",
    "class_chart",
    "effective_chart",
    "entropy_chart",
    "entropy_shares",
    "evidence_chart",
    "final_weight_decay_chart",
    "loss_chart",
    "ranges_chart",
    "reliability_chart",
    "share_chart",
    "shift_charts",
    "time_chart",
    "weight_decay_charts",
]

# Okabe & Ito 2008 ("Color Universal Design"), whose hues stay apart for colour-blind readers;
# lightness is changed for a contrast of 3:1 (WCAG 2.2, 1.4.11) with the background, also when
# inverted. Depth is shown by the part of Plasma that has it.
SERIES = ("#0072b2", "#c24e00", "#007a5a", "#a3497c", "#8a6100", "#3d4450")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star-triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot")
MUTED, BACKGROUND = "#6b7280", "#ffffff"
LOGARITHMIC = {"type": "log", "tickformat": "~g", "dtick": 1}
SHARE = {"range": [0, 1], "tickformat": ".0%"}

HEIGHT, ROW_HEIGHT, MARGIN = 340, 20, 130
"""In pixels: of a chart; of a row of one with rows, and around these."""
MOST_CLASSES = 30
"""Most classes in a chart; if there are more, it shows those with the most errors."""
LONGEST_NAME = 26
MOST_COLUMNS = 21
"""Most columns of a chart's table: of a longer curve it has points that are evenly spaced."""
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
    show: Show = lambda value: number(value, 4),
    wide: bool = False,
    **layout: Any,
) -> Chart:
    """A chart and its table: a row for each trace that can be hovered over, notes in small print.

    Args:
        title: of the chart.
        traces: what it draws.
        axes: titles of the x and y axes.
        rows: names of rows, at y = 0, 1, ... from the top, of a chart with a value per row.
        keys: what to call each point in the table; by default its row, or its x.
        show: the text of a value.
        wide: whether it is as wide as the page.
        layout: as for `go.Figure.update_layout`.
    """
    if rows:
        half = (LONGEST_NAME - 1) // 2
        names = [n if len(n) <= LONGEST_NAME else f"{n[:half]}…{n[-half:]}" for n in rows]
        ticks = {"tickvals": [*range(len(rows))], "ticktext": names}
        layout = {"yaxis": ticks | {"range": [len(rows) - 0.5, -0.5]}} | layout
        layout = {"height": MARGIN + ROW_HEIGHT * len(rows)} | layout
    layout = {"height": HEIGHT, "hovermode": "closest", "showlegend": len(traces) > 1} | layout
    x, y = ({"title": {"text": text}} for text in axes)
    figure = go.Figure([*traces], {"xaxis": x, "yaxis": y})
    figure.update_layout(**layout)

    listed = [trace for trace in traces if trace.hoverinfo != "skip"]
    named, lines = [*(keys or rows)], []
    places = [*range(len(named))] or sorted({at for trace in listed for at in trace.x})
    if not named and len(places) > MOST_COLUMNS:
        last = len(places) - 1
        places = [places[round(i * last / (MOST_COLUMNS - 1))] for i in range(MOST_COLUMNS)]
    for trace in listed:
        values = trace.x if rows else trace.y
        notes = trace.customdata or [""] * len(values)
        of = range(len(values)) if named else trace.x
        cells = {at: (show(v), note) for at, v, note in zip(of, values, notes, strict=True)}
        found = [cells.get(at, (NOTHING, "")) for at in places]
        lines.append(Row(trace.name, [text for text, _ in found], small=[n for _, n in found]))
    head = "" if named else f"{axes[0].capitalize()}:"
    table = Table(title, [head, *(named or [f"{at:g}" for at in places])], lines)
    what = " over ".join(filter(None, [axes[1], axes[0]]))
    shown = ", ".join(trace.name for trace in listed[:12])
    return Chart(title, f"{title}: {what}, of {shown}.", figure, table, wide)


def _curve(
    of: Run | Predictive, x: Sequence[Any], y: Sequence[Any], style: int | None = None, **more: Any
) -> go.Scatter:
    """A curve in the colour of what it is of; symbols distinguish series when colours repeat."""
    style = of.style if style is None else style
    color, symbol = SERIES[style % len(SERIES)], SYMBOLS[style % len(SYMBOLS)]
    curve = go.Scatter(name=of.label, x=[*x], y=[*y], mode="lines+markers")
    curve.line.color = color
    curve.marker = {"color": color, "symbol": symbol, "size": 6}
    curve.hovertemplate = "%{y:.4f}<extra>%{fullData.name}</extra>"
    curve.update(**more)
    return curve


def _dots(
    of: Run | Predictive, names: Sequence[str], values: Sequence[Any], hover: str, **more: Any
) -> go.Scatter:
    """A dot per row of a chart with rows."""
    dots = _curve(of, values, range(len(names)), mode="markers", text=[*names], **more)
    dots.hovertemplate = f"%{{text}}<br>{hover}<extra>%{{fullData.name}}</extra>"
    dots.marker.size = 8
    return dots


def _reference(name: str) -> go.Scatter:
    """The dashed diagonal, without hover text."""
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    return go.Scatter(name=name, x=[0, 1], y=[0, 1], mode="lines", hoverinfo="skip", line=line)


def _wilson(share: float | None, count: int) -> tuple[float, float] | None:
    return None if share is None or not count else share_interval(round(share * count), count)


def _whiskers(
    shares: Sequence[float | None], ends: Sequence[tuple[float, float] | None]
) -> dict[str, Any]:
    """Error bars from the lower to the upper ends of the shares' intervals."""
    pairs = [(s or 0.0, e or (s or 0.0,) * 2) for s, e in zip(shares, ends, strict=True)]
    above, below = [max(e[1] - s, 0.0) for s, e in pairs], [max(s - e[0], 0.0) for s, e in pairs]
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return bars | {"thickness": 1, "width": 0}


# How a run went


def evidence_chart(runs: Sequence[Run]) -> Chart:
    """Log marginal likelihood per example at each update; a star is the state that was kept.

    Of a single run also the value before the update's hyperparameter steps.
    """
    curves = []
    for run in runs:
        epochs = [update["epoch"] for update in run.updates]
        if run.alone and run.num_data and all("evidence_before" in u for u in run.updates):
            values = [update["evidence_before"] / run.num_data for update in run.updates]
            curves.append(_curve(run, epochs, values, 1, name="before the update", line_dash="dot"))
        curve = _curve(run, epochs, [update["evidence_per_example"] for update in run.updates])
        if run.alone:
            curve.name = "after the update"
        kept = [epoch == run.results.get("evidence", {}).get("epoch") for epoch in epochs]
        curve.marker.symbol = ["star" if is_kept else curve.marker.symbol for is_kept in kept]
        curve.marker.size = [15 if is_kept else 6 for is_kept in kept]
        curves.append(curve)
    return _over_epochs("Log marginal likelihood", curves)


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training loss per example over epochs; of a single run also the objective."""
    curves, kinds = [], {"loss": "loss", "objective": "loss and weight decay"}
    for run in runs:
        for style, (kind, name) in enumerate(kinds.items()):
            if not style or (run.alone and all(kind in record for record in run.epochs)):
                values = [record[kind] for record in run.epochs]
                curve = _curve(
                    run, [record["epoch"] for record in run.epochs], values, mode="lines"
                )
                if run.alone:
                    curve.update(name=name, line_color=SERIES[style], line_dash=DASHES[2 * style])
                curves.append(curve)
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
    "members": "other members",
    "baseline": "baseline (initial weight decay)",
}
"""Names of the parts of an update in the log, and of what results.json has beside training."""
REST = "everything else"


def _time_parts(run: Run) -> dict[str, float]:
    """Name of a part -> seconds spent on it; `REST` completes the run's total."""
    parts: defaultdict[str, float] = defaultdict(float)
    parts["training steps"] = sum(record["seconds"] for record in run.epochs)
    for seconds_of in [*(u["seconds"] for u in run.updates), run.results.get("seconds_beside", {})]:
        for key, seconds in seconds_of.items():
            parts[PARTS.get(key, key)] += seconds
    rest = run.results.get("seconds", 0.0) - sum(parts.values())
    return parts | {REST: rest} if rest > 0 else parts


def time_chart(runs: Sequence[Run]) -> Chart:
    """A stacked bar per run of the seconds that each part of it took."""
    parts = [_time_parts(run) for run in runs]
    names = dict.fromkeys(name for one in parts for name in one)
    bars = []
    for position, name in enumerate(sorted(names, key=lambda name: name == REST)):
        bar = go.Bar(orientation="h", name=name, x=[one.get(name) for one in parts])
        bar.y = [*range(len(runs))]
        bar.customdata = [percent(one.get(name, 0.0) / sum(one.values()), 1) for one in parts]
        bar.hovertemplate = "%{x:.2f} s, %{customdata}<extra>%{fullData.name}</extra>"
        bar.marker.color = MUTED if name == REST else SERIES[position % len(SERIES)]
        bar.marker.line = {"color": BACKGROUND, "width": 1}
        bar.marker.pattern.shape = "/" if position >= len(SERIES) and name != REST else ""
        bars.append(bar)
    return _chart(
        "Seconds spent",
        bars,
        ("seconds", ""),
        rows=[run.label or "this run" for run in runs],
        show=duration,
        wide=True,
        barmode="stack",
        bargap=0.45,
        height=210 + 40 * len(runs),
    )


# Layers


def weight_decay_charts(runs: Sequence[Run]) -> list[Chart]:
    """Weight decay of each group over epochs, a chart per run, on the same logarithmic axis.

    Coloured by depth, from the input (dark) to the output; a double click on a name of the legend
    shows that group alone.
    """
    values = [value for run in runs for u in run.updates for value in u["weight_decay"].values()]
    initial = [next((row["initial"] for row in run.layers.values()), None) for run in runs]
    values += [value or 0.0 for value in initial]
    logs = [math.log10(value) for value in values if 0 < value < math.inf] or [-1.0, 1.0]
    margin = 0.05 * (max(logs) - min(logs)) + 0.05
    charts = []
    for run, first in zip(runs, initial, strict=True):
        groups = list(run.updates[0]["weight_decay"])
        start = [] if first is None else [first]
        epochs = [0] * len(start) + [update["epoch"] for update in run.updates]
        depths = [0.62 * position / max(len(groups) - 1, 1) for position in range(len(groups))]
        curves = []
        for group, color in zip(groups, sample_colorscale("Plasma", depths), strict=True):
            decays = start + [update["weight_decay"].get(group) for update in run.updates]
            dash = "dot" if group.endswith("bias") else "solid"
            curve = _curve(run, epochs, decays, name=group, marker_color=color, marker_size=4)
            curve.line = {"color": color, "width": 1.6, "dash": dash}
            curve.hovertemplate = "epoch %{x}: %{y:.3g}<extra>%{fullData.name}</extra>"
            curves.append(curve)
        chart = _chart(
            f"Weight decay over epochs{'' if run.alone else f', {run.label}'}",
            curves,
            ("epoch", "weight decay"),
            show=number,
            wide=run.alone,
            xaxis_rangemode="tozero",
            yaxis={**LOGARITHMIC, "range": [min(logs) - margin, max(logs) + margin]},
            height=520,
        )
        charts.append(chart)
    return charts


def ranges_chart(run: Run, ranges: Mapping[str, Mapping[str, float]]) -> Chart:
    """Each range of a learned augmentation over epochs, as a share of its largest value."""
    updates = [update for update in run.updates if "ranges" in update]
    curves = []
    for position, (name, of_range) in enumerate(ranges.items()):
        largest, start = of_range["largest"], of_range["initial"]
        values = [start / largest] + [update["ranges"][name] / largest for update in updates]
        epochs = [0, *(update["epoch"] for update in updates)]
        curve = _curve(run, epochs, values, name=name, marker_size=4)
        color = SERIES[position % len(SERIES)]
        dash = DASHES[position // len(SERIES) % len(DASHES)]
        curve.update(line={"color": color, "width": 1.6, "dash": dash}, marker_color=color)
        curve.hovertemplate = "epoch %{x}: %{y:.3g}<extra>%{fullData.name}</extra>"
        curves.append(curve)
    title = f"Ranges over epochs{'' if run.alone else f', {run.label}'}"
    return _chart(
        title, curves, ("epoch", "share of the largest"), show=number, wide=run.alone,
        xaxis_rangemode="tozero", yaxis_range=[-0.02, 1.02],
    )  # fmt: skip


def final_weight_decay_chart(runs: Sequence[Run]) -> Chart:
    """The final weight decay of each tensor, with runs side by side."""
    return _layer_chart("Weight decay at the end", "weight decay", runs, "learned")


def effective_chart(runs: Sequence[Run]) -> Chart:
    """Effective parameters γ of each tensor, beside how many it has, on a logarithmic axis."""
    title = "Effective and all parameters"
    return _layer_chart(title, "number of parameters", runs, "effective_parameters")


def _layer_chart(title: str, axis: str, runs: Sequence[Run], key: str) -> Chart:
    """A row for each tensor, with a dot per run."""
    names, traces = list(dict.fromkeys(name for run in runs for name in run.layers)), []
    layers = [[run.layers.get(name, {"parameters": 0}) for name in names] for run in runs]
    if key == "effective_parameters":
        # Of runs with different networks, the larger tensor of a name.
        sizes = [max(layer["parameters"] for layer in of) for of in zip(*layers, strict=True)]
        all_of = _dots(runs[0], names, sizes, "%{x:,} parameters", name="all parameters")
        line = {"color": MUTED, "width": 2}
        all_of.marker = {"symbol": "line-ns", "size": 12, "color": MUTED, "line": line}
        traces.append(all_of)
    for run, of in zip(runs, layers, strict=True):
        values = [layer.get(key) for layer in of]
        values = [v if v is not None and math.isfinite(v) else None for v in values]
        dots = _dots(run, names, values, "%{x:.3g}")
        if key == "effective_parameters":
            dots.name = "effective parameters" if run.alone else run.label
            pairs = zip(values, of, strict=True)
            shares = [None if v is None else v / max(layer["parameters"], 1) for v, layer in pairs]
            dots.customdata = ["" if share is None else percent(share, 1) for share in shares]
        traces.append(dots)
    return _chart(title, traces, (axis, ""), rows=names, show=number, wide=True, xaxis=LOGARITHMIC)


# Predictives


def reliability_chart(title: str, series: Sequence[Predictive]) -> Chart:
    """Accuracy over confidence, or coverage over level, with the diagonal of perfect calibration.

    Args:
        title: of the chart.
        series: predictives of one kind, classes or intervals, and with the same bins or levels.
    """
    found = series[0].content["reliability"]
    if "levels" in found:
        axes, of_one = ("nominal level of the interval", "share of targets inside"), _coverage
        keys = [f"{level:.2f}" for level in found["levels"]]
    else:
        axes, of_one, keys = ("confidence", "accuracy"), _bins, _spans(found["edges"], 3)
    return _chart(
        title,
        [_reference("calibrated"), *map(of_one, series)],
        axes,
        keys=keys,
        show=lambda value: number(value, 3),
        xaxis={"range": [0, 1], "dtick": 0.2},
        yaxis={"range": [0, 1.02], "dtick": 0.2},
        height=460,
    )


def _bins(one: Predictive) -> go.Scatter:
    """A point for each bin that is not empty.

    Its area grows with the share of its bin; its whiskers are the interval of its accuracy.
    """
    bins = one.content["reliability"]
    confidences, accuracies, counts = bins["confidence"], bins["accuracy"], bins["counts"]
    ends = [_wilson(a, n) for a, n in zip(accuracies, counts, strict=True)]
    notes = [
        f"confidence {number(c, 3)}, 95 %: {interval(e, 3)}, {n:,} predictions" if n else ""
        for c, e, n in zip(confidences, ends, counts, strict=True)
    ]
    curve = _curve(one, confidences, accuracies, mode="markers", customdata=notes)
    curve.hovertemplate = "accuracy %{y:.3f}<br>%{customdata}<extra>%{fullData.name}</extra>"
    curve.error_y = _whiskers(accuracies, ends)
    curve.cliponaxis = False  # so that a point at confidence 1 is not cut in half
    curve.marker.size = [4 + 9 * (count / max(sum(counts), 1)) ** 0.5 for count in counts]
    curve.marker.line.width = 0  # plotly would draw a white one for several sizes
    return curve


def _coverage(one: Predictive) -> go.Scatter:
    found = one.content["reliability"]
    ends = [_wilson(share, found["count"]) for share in found["coverage"]]
    notes = [f"95 %: {interval(pair, 3)}" for pair in ends]
    curve = _curve(one, found["levels"], found["coverage"], customdata=notes)
    curve.hovertemplate = "level %{x:.2f}<br>%{y:.3f} inside, %{customdata}"
    curve.error_y = _whiskers(found["coverage"], ends)
    return curve


def _centres(edges: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in pairwise(edges)]


def _spans(edges: Sequence[float], decimals: int) -> list[str]:
    return [interval(pair, decimals) for pair in pairwise(edges)]


def share_chart(
    title: str, series: Sequence[Predictive], part: Literal["risk_coverage", "roc"]
) -> Chart:
    """A curve of shares: the error rate among the most confident over their share, or a ROC curve.

    The latter is the share of out-of-distribution examples that are flagged, over that of our own.
    """
    keys, axes = ("coverage", "risk"), ("coverage", "error rate")
    hover, traces = "coverage %{x:.1%}<br>error rate %{y:.2%}", []
    if part == "roc":
        keys, axes = ("fpr", "tpr"), ("flagged of the test set", "flagged of the others")
        hover, traces = "%{y:.1%} of the others,<br>%{x:.1%} of its own", [_reference("chance")]
    for one in series:
        x, y = (one.content[part][key] for key in keys)
        traces.append(_curve(one, x, y, mode="lines", hovertemplate=hover))
    y = {"rangemode": "tozero", "tickformat": "~%"}
    return _chart(title, traces, axes, show=percent, xaxis=SHARE, yaxis=y)


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
    traces = []
    for place, (one, content) in enumerate(zip(series, counted, strict=True)):
        pairs = [(content["right"][i], content["counts"][i]) for i in order]
        shares = [right / count if count else None for right, count in pairs]
        ends = [_wilson(s, count) for s, (_, count) in zip(shares, pairs, strict=True)]
        dots = _dots(one, [classes[i] for i in order], shares, "%{x:.1%}, %{customdata}")
        # The dots of a class stand side by side within its row.
        dots.y = [row + 0.2 * (place - (len(series) - 1) / 2) for row in range(len(order))]
        dots.customdata = [
            f"{right} of {count}, 95 %: {interval(e, 1, 100)}"
            for (right, count), e in zip(pairs, ends, strict=True)
        ]
        dots.error_x = _whiskers(shares, ends)
        traces.append(dots)
    return _chart(
        title,
        traces,
        ("accuracy", ""),
        rows=[classes[i] for i in order],
        show=lambda value: percent(value, 1),
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
        bar.update(marker_color=SERIES[position], width=[b - a for a, b in pairwise(edges)])
        bars.append(bar)
    return _chart(
        one.name if one.run.alone else f"{one.name}: {one.run.label}",
        bars,
        ("predictive entropy (nats)", "share of examples"),
        keys=_spans(edges, 2),
        show=lambda value: percent(value, 1),
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
    return [
        _chart(
            f"{METRICS[SHIFT_MEASURES[measure]].title}: {kind}",
            traces,
            ("severity (0: test set)", ""),
            xaxis_dtick=1,
            yaxis_rangemode="tozero",
            hovermode="x unified",
            height=280 + 14 * len(traces),
        )
        for (measure, kind), traces in sorted(curves.items(), key=lambda item: item[0][0])
    ]
