"""Tables of the page as plain data, and numbers formatted as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["NOTHING", "Row", "Table", "duration", "interval", "number", "percentage"]

NOTHING = "–"
"""Text for a missing value."""
MINUS = "\N{MINUS SIGN}"


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
    groups: Sequence[tuple[str, int]] = ()
    """Titles above groups of columns, with the number of columns that each spans."""
    text_columns: frozenset[int] = frozenset()
    """Positions of the cells with text, which are aligned left."""
    kind: str = "table"

    @property
    def starts(self) -> set[int]:
        """Positions of the cells that begin a group."""
        ends = accumulate(span for _, span in self.groups)
        return {end - 1 for end, _ in zip(ends, self.groups[1:], strict=False)}


def number(value: float | None, decimals: int | None = None) -> str:
    """A number as text, with four significant digits or ``decimals``; integers in full."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else (f"{MINUS}∞" if value < 0 else "∞")
    if decimals is not None:
        text = f"{value:,.{decimals}f}"
    elif isinstance(value, int):
        text = f"{value:,}"
    elif value == 0 or 1e-3 <= abs(value) < 1e4:
        text = f"{value:.4g}"
    elif 1e4 <= abs(value) < 1e9:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", MINUS)


def percentage(share: float | None, decimals: int = 2) -> str:
    """A share in 0..1 as a percentage."""
    if share is None or not math.isfinite(share):
        return number(share)
    return f"{number(100 * share, decimals)} %"


def interval(ends: Sequence[float] | None, decimals: int) -> str:
    """An interval as text; empty for None."""
    return "" if ends is None else "\N{EN DASH}".join(number(end, decimals) for end in ends)


def duration(seconds: float | None) -> str:
    """Seconds as text, in milliseconds, seconds, minutes or hours."""
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 1:
        return f"{number(1000 * seconds, 0)} ms"
    if seconds < 120:
        return f"{number(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
