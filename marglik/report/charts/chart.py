"""A chart of the page: plotly's JSON, its accessible name, and its data as a table.

Traces are plain mappings, since their colours are pairs "light|dark" (`colors`), of which the page
takes the theme's; page.js adds fonts and the colours of axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from marglik.report.charts.colors import MUTED, SERIES
from marglik.report.tables import Table

__all__ = [
    "Chart",
    "Trace",
    "axis",
    "error_bars",
    "line",
    "plain",
    "reference_line",
    "series_style",
    "shorten",
]

Trace = dict[str, Any]

HEIGHT = 340
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star-triangle-down")
LONGEST_NAME = 26


@dataclass(frozen=True)
class Chart:
    """A chart with its description and data, for readers who cannot see it."""

    title: str
    description: str
    """A description of what it shows, its accessible name."""
    traces: list[Trace]
    layout: dict[str, Any]
    table: Table
    height: int = HEIGHT
    """In pixels."""
    wide: bool = False
    """Whether it is as wide as the page, or half as wide."""
    highlight: Sequence[str] = field(default_factory=list)
    """Names of the traces that a reader can highlight, in order; empty if there are few."""
    kind: str = "chart"

    @property
    def figure(self) -> dict[str, Any]:
        """The argument of Plotly.newPlot; NaN, which JSON lacks, becomes null, drawn as a gap."""
        return _finite({"data": self.traces, "layout": self.layout})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(text: str) -> str:
    """Text escaped for plotly, so that names from a run's files are not read as markup.

    Plotly reads a small HTML (<b>, <a href>) in all its texts, and %{...} in hover templates, in
    which no name may stand: they go into ``name`` and ``customdata``.
    """
    return escape(text, quote=False)


def shorten(name: str) -> str:
    """A name of bounded length; the middle of a long one is left out."""
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def series_style(position: int) -> Trace:
    """Colour and symbol of a series; symbols distinguish series when the colours repeat."""
    color = SERIES[position % len(SERIES)]
    symbol = SYMBOLS[position % len(SYMBOLS)]
    return {"line": {"color": color, "width": 2}, "marker": {"color": color, "symbol": symbol}}


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    style: Trace,
    hover: str = "%{y:.4f}",
    mode: str = "lines+markers",
) -> Trace:
    """A curve with its values on hover.

    Args:
        name: shown in the legend and on hover; any text.
        x: positions.
        y: values; gaps where None.
        style: as `series_style` returns it.
        hover: plotly's template of the value.
        mode: of scatter traces.
    """
    return {
        "type": "scatter",
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "mode": mode,
        "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>",
        "line": style["line"],
        "marker": {"size": 6, "opacity": 1, **style["marker"]},
    }


def error_bars(
    values: Sequence[float | None], intervals: Sequence[Sequence[float] | None], color: str
) -> Trace:
    """Whiskers from the lower to the upper ends of intervals; none where a value or one is None."""
    pairs = [
        (0.0, 0.0) if value is None or ends is None else (value - ends[0], ends[1] - value)
        for value, ends in zip(values, intervals, strict=True)
    ]
    return {
        "type": "data",
        "symmetric": False,
        "arrayminus": [max(below, 0.0) for below, _ in pairs],
        "array": [max(above, 0.0) for _, above in pairs],
        "color": color,
        "thickness": 1,
        "width": 0,
    }


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with its title; plotly makes room for the tick labels."""
    return {"title": {"text": title}, "automargin": True, **options}


def reference_line(x: Sequence[float], y: Sequence[float], name: str) -> Trace:
    """A dashed reference line, without hover text."""
    return {
        "type": "scatter",
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "mode": "lines",
        "hoverinfo": "skip",
        "line": {"color": MUTED, "width": 1.5, "dash": "dash"},
    }
