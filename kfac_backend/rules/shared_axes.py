"""A mode for each shared axis: axes to be reduced are, before a layer's rule sees the rest."""

from typing import TYPE_CHECKING

from torch import Tensor

from kfac_backend.options import Mode
from kfac_backend.rows import Rows

if TYPE_CHECKING:
    from kfac_backend.rules.matrix import WeightSharingRule

__all__ = ["reduced_axes"]


def reduced_axes(
    rule: "WeightSharingRule", x: Tensor, rows: Rows | None, *, mean: bool
) -> tuple[Tensor, Rows | None, Mode]:
    """An input or output gradient without the axes to be reduced; its rows; the others' mode.

    The first shared axis is that of the rows, if a model told their examples (`rows`). All layers
    are linear: reducing their inputs' axes first is reducing the patches'.

    Args:
        rule: the layer's, with the modes.
        x: the layer's input (M, ...), or gradients with respect to its output (V·M, ...).
        rows: the rows' examples.
        mean: whether to take means over positions (an input) or sums (a gradient).

    Raises:
        ValueError: as many modes as there are not axes.
    """
    if isinstance(rule.mode, str):
        return x, rows, rule.mode
    inner = range(1, x.dim() - 1) if rule.separate_axes else range(1)
    modes = list(rule.mode.values())
    number = len(inner) + (rows is not None)
    if number == 0:  # nothing is shared
        return x, rows, "expand"
    if number != len(modes):
        raise ValueError(
            f"kfac_approx names the axes {', '.join(rule.mode)}, but {rule.layer} shares its "
            f"weight over {number} (shape {tuple(x.shape)}, examples first). Name each axis in "
            "its order, with the rows first where examples_of_rows tells their examples."
        )
    if rows is not None:
        x = rows.reduced(x, mean=mean) if modes.pop(0) == "reduce" else rows.counting(x)
    if not rule.separate_axes:
        return x, None, modes[0]
    axes = [axis for axis, mode in zip(inner, modes, strict=True) if mode == "reduce"]
    if axes:
        x = x.mean(axes) if mean else x.sum(axes)
    return x, None, "expand"
