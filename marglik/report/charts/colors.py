"""Colours of the charts: each a pair "light|dark", of which the page takes the theme's.

The six colours of series follow Okabe & Ito 2008 ("Color Universal Design"), whose hues stay apart
for colour-blind readers; lightness is changed so that each has a contrast of at least 3:1 (WCAG
2.2, 1.4.11) with its background. Depth is shown by the part of matplotlib's plasma that does so.
"""

from matplotlib import colormaps
from matplotlib.colors import to_hex

__all__ = ["BACKGROUNDS", "MUTED", "SERIES", "depth_color", "depth_scale"]

BACKGROUNDS = "#ffffff|#16191f"
"""Background of the charts; the same as in page.css."""

SERIES = (
    "#0072b2|#56b4e9",  # blue
    "#c24e00|#f28e52",  # vermillion
    "#007a5a|#3cc9a0",  # bluish green
    "#a3497c|#de9ac4",  # reddish purple
    "#8a6100|#f0d442",  # yellow
    "#3d4450|#e3e6eb",  # black
)
MUTED = "#6b7280|#9aa3b2"
"""Colour of reference lines."""

LIGHT_PART = (0.0, 0.62)
DARK_PART = (0.42, 1.0)
SCALE_STEPS = 16


def depth_color(share: float) -> str:
    """The colour of a layer at this share of the depth, 0 at the input and 1 at the output."""
    ends = (LIGHT_PART, DARK_PART)
    positions = [start + share * (end - start) for start, end in ends]
    return "|".join(to_hex(colormaps["plasma"](position)) for position in positions)


def depth_scale() -> list[list[float | str]]:
    """`depth_color` as a colour scale of plotly."""
    shares = [step / SCALE_STEPS for step in range(SCALE_STEPS + 1)]
    return [[share, depth_color(share)] for share in shares]
