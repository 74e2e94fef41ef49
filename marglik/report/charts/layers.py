"""Charts of the layers: weight decay over time and at the end, effective parameters."""

import math
from collections.abc import Sequence
from typing import Any

from marglik.report.charts.chart import Chart, Trace, axis, line, plain, series_style, shorten
from marglik.report.charts.colors import MUTED, depth_color, depth_scale
from marglik.report.contents import Run
from marglik.report.tables import Row, Table, number, percentage

__all__ = ["effective_chart", "final_weight_decay_chart", "weight_decay_chart", "weight_decay_ends"]

MOST_IN_LEGEND = 12
ROW_HEIGHT, MARGIN = 19, 130
"""Pixels per layer, and around the layers."""


def weight_decay_chart(run: Run, ends: tuple[float, float]) -> Chart:
    """Weight decay of each group over epochs, on a logarithmic axis.

    Coloured by depth; more groups than fit a legend get a colour bar, and all can be picked out.

    Args:
        run: with updates.
        ends: of the vertical axis, the same for all runs (`weight_decay_ends`).
    """
    groups = list(run.updates[0]["weight_decay"])
    start = [] if run.initial_weight_decay is None else [(0, run.initial_weight_decay)]
    many = len(groups) > MOST_IN_LEGEND
    traces = []
    for position, group in enumerate(groups):
        points = start + [(u["epoch"], u["weight_decay"].get(group)) for u in run.updates]
        color = depth_color(position / max(len(groups) - 1, 1))
        dash = "dot" if group.endswith("bias") else "solid"
        style = {"line": {"color": color, "width": 1.6, "dash": dash}, "marker": {"color": color}}
        x, y = zip(*points, strict=True)
        trace = line(group, x, y, style, "epoch %{x}: %{y:.3g}")
        trace["marker"]["size"] = 4
        traces.append(trace)
    if many:
        traces.append(_depth_bar())
    of_run = "" if run.alone else f", {run.label}"
    columns = [*(x for x, _ in start), *(update["epoch"] for update in run.updates)]
    table = Table(
        f"Weight decay by epoch{of_run}",
        ["Group", *(f"epoch {epoch}" for epoch in columns)],
        [
            Row(group, [number(value) for value in trace["y"]])
            for group, trace in zip(groups, traces, strict=False)
        ],
    )
    return Chart(
        f"Weight decay over epochs{of_run}",
        f"Weight decay of {len(groups)} groups of parameters over epochs, of {run.label}.",
        traces,
        {
            "xaxis": axis("epoch", rangemode="tozero"),
            "yaxis": axis("weight decay", type="log", tickformat="~g", dtick=1, range=list(ends)),
            "hovermode": "closest",
            "showlegend": not many,
        },
        table,
        height=480,
        wide=run.alone,
        highlight=groups if len(groups) > 1 else [],
    )


def weight_decay_ends(runs: Sequence[Run]) -> tuple[float, float]:
    """Logarithms to base 10 between which all weight decays of all runs lie, with a margin."""
    values = [value for run in runs for u in run.updates for value in u["weight_decay"].values()]
    values += [run.initial_weight_decay or 0.0 for run in runs]
    logs = [math.log10(value) for value in values if 0 < value < math.inf]
    margin = 0.05 * (max(logs) - min(logs)) + 0.05 if logs else 1.0
    return min(logs, default=0.0) - margin, max(logs, default=0.0) + margin


def _depth_bar() -> Trace:
    """A trace without points that shows the colour scale."""
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "mode": "markers",
        "showlegend": False,
        "hoverinfo": "skip",
        "marker": {
            "color": [0],
            "cmin": 0,
            "cmax": 1,
            "colorscale": depth_scale(),
            "showscale": True,
            "colorbar": {
                "orientation": "h",
                "thickness": 10,
                "outlinewidth": 0,
                "y": 1.0,
                "yanchor": "bottom",
                "tickvals": [0.03, 0.96],
                "ticktext": ["input", "output"],
            },
        },
    }


def final_weight_decay_chart(runs: Sequence[Run]) -> Chart:
    """The final weight decay of each tensor, with runs side by side."""
    names = _layer_names(runs)
    traces = []
    for run in runs:
        values = [_value(run, name, "weight_decay") for name in names]
        traces.append(_dots(run.label, names, values, run.position, "%{x:.3g}"))
    rows = [
        Row(name, [number(_value(run, name, "weight_decay")) for run in runs]) for name in names
    ]
    return Chart(
        "Weight decay at the end",
        f"Final weight decay of each parameter tensor, of {', '.join(run.label for run in runs)}.",
        traces,
        _rows_layout(names, "weight decay", not runs[0].alone),
        Table("Final weight decay", ["Parameter", *(run.label for run in runs)], rows),
        height=MARGIN + ROW_HEIGHT * len(names),
        wide=True,
    )


def effective_chart(runs: Sequence[Run]) -> Chart:
    """Effective parameters γ of each tensor against how many it has, on a logarithmic axis."""
    names = _layer_names(runs)
    dots = []
    for run in runs:
        values = [_value(run, name, "effective") for name in names]
        name = run.label if not run.alone else "effective parameters"
        dots.append(_dots(name, names, values, run.position, "γ = %{x:,.1f}"))
    return Chart(
        "Effective and all parameters",
        "Effective number of parameters of each tensor beside the number of its parameters, of "
        f"{', '.join(run.label for run in runs)}.",
        [*_parameter_ticks(runs, names), *dots],
        _rows_layout(names, "number of parameters", True),
        _effective_table(runs, names),
        height=MARGIN + ROW_HEIGHT * len(names),
        wide=True,
    )


def _parameter_ticks(runs: Sequence[Run], names: Sequence[str]) -> list[Trace]:
    """Ticks at the numbers of parameters, and lines from there to the smallest γ of the row."""
    ticks = [(row, size) for row, name in enumerate(names) for size in _sizes(runs, name)]
    x, y = [], []
    for row, name in enumerate(names):
        gammas = [_value(run, name, "effective") for run in runs]
        ends = [*_sizes(runs, name), *(gamma for gamma in gammas if gamma)]
        x += [min(ends), max(ends), None]
        y += [row, row, None]
    links = {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"color": MUTED, "width": 1},
        "opacity": 0.5,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    sizes = {
        "type": "scatter",
        "name": "all parameters",
        "mode": "markers",
        "x": [size for _, size in ticks],
        "y": [row for row, _ in ticks],
        "customdata": [plain(names[row]) for row, _ in ticks],
        "marker": {
            "symbol": "line-ns",
            "size": 12,
            "color": MUTED,
            "line": {"color": MUTED, "width": 2},
        },
        "hovertemplate": "%{customdata}<br>%{x:,} parameters<extra></extra>",
    }
    return [links, sizes]


def _effective_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    rows = []
    for name in names:
        cells = [" / ".join(number(size) for size in _sizes(runs, name))]
        for run in runs:
            gamma = _value(run, name, "effective")
            share = None if gamma is None else gamma / max(run.layers[name].parameters, 1)
            cells += [number(gamma, 1), percentage(share, 1)]
        rows.append(Row(name, cells))
    return Table(
        "Effective and all parameters",
        ["Parameter", "all", *(title for _ in runs for title in ("effective", "share"))],
        rows,
        [("", 2), *((run.label, 2) for run in runs)] if not runs[0].alone else (),
    )


def _dots(
    name: str, names: Sequence[str], values: Sequence[float | None], position: int, hover: str
) -> Trace:
    """A dot per row; zeros are left out of the logarithmic axis, but are in the table."""
    style = series_style(position)
    shown = [value if value is not None and value > 0 else None for value in values]
    return {
        "type": "scatter",
        "name": plain(name),
        "mode": "markers",
        "x": shown,
        "y": list(range(len(names))),
        "customdata": [plain(one) for one in names],
        "marker": {"size": 8, **style["marker"]},
        "hovertemplate": f"%{{customdata}}<br>{hover}<extra>%{{fullData.name}}</extra>",
    }


def _rows_layout(names: Sequence[str], title: str, showlegend: bool) -> dict[str, Any]:
    return {
        "xaxis": axis(title, type="log", tickformat="~g", dtick=1),
        "yaxis": axis(
            "",
            tickvals=list(range(len(names))),
            ticktext=[plain(shorten(name)) for name in names],
            range=[len(names) - 0.5, -0.5],
        ),
        "hovermode": "closest",
        "showlegend": showlegend,
    }


def _layer_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.layers))


def _sizes(runs: Sequence[Run], name: str) -> list[int]:
    """The numbers of parameters of a tensor in all runs, which may have different networks."""
    return list(dict.fromkeys(run.layers[name].parameters for run in runs if name in run.layers))


def _value(run: Run, name: str, attribute: str) -> float | None:
    value = getattr(run.layers.get(name), attribute, None)
    return value if value is not None and math.isfinite(value) else None
