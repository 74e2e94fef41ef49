"""Products of lines of images, for every pair of offsets of a kernel along the width.

For lines p and q the block of the offsets (b, b') is Σ_j p[b + j] q[b' + j]ᵀ over the positions j.
At stride 1 it is the product of the whole lines, one shifted by the lag b' − b, minus what the
window leaves out at the border.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram.gram import tall_product
from kfac_backend.layers.gram.window import Window

__all__ = ["left_out", "line_gram", "line_products", "unfold_width"]

Lines = Float[Tensor, "L W C"]
"""Rows of images, one below the other."""


def line_gram(
    upper: Lines, lower: Lines, x: Window, same: bool, by_lag: bool
) -> Float[Tensor, "k2 C k2 C"]:
    """Σ over lines of the blocks of all pairs of offsets (b in the upper line, b' in the lower).

    Args:
        upper: lines.
        lower: as many lines.
        x: the axis of the width.
        same: whether both are the same lines.
        by_lag: by shifted products of pixels, for stride 1; else by unfolding.
    """
    if by_lag:
        return _by_lag(upper, lower, x, same)
    C = upper.shape[-1]
    left = unfold_width(upper, x)
    right = left if same else unfold_width(lower, x)
    return tall_product(left, right).view(x.kernel, C, x.kernel, C)


def line_products(x: Window, stored: int, same: bool) -> Iterator[int]:
    """Pixels of a line in each of the products by lag; ``stored`` is the length of a line."""
    for lag in _lags(x, same):
        yield stored
        for b in _offsets(x, lag):
            missing = left_out(x, b, lag, torch.device("cpu"))
            if missing is not None:
                yield len(missing)


def _by_lag(upper: Lines, lower: Lines, x: Window, same: bool) -> Float[Tensor, "k2 C k2 C"]:
    C = upper.shape[-1]
    left, right = upper.flatten(0, 1), lower.flatten(0, 1)  # (L·W, C)
    M = len(left)
    gram = upper.new_empty(x.kernel, C, x.kernel, C)
    for lag in _lags(x, same):
        shift = lag * x.dilation
        start, end = max(0, -shift), M - max(0, shift)
        # Shifted over the end of a line a pixel meets zeros: lines are padded for that.
        whole = tall_product(left[start:end], right[start + shift : end + shift])
        for b in _offsets(x, lag):
            block, missing = whole, left_out(x, b, lag, upper.device)
            if missing is not None:
                strip, partner = upper[:, missing], lower[:, missing + shift]
                block = whole - strip.flatten(0, 1).mT @ partner.flatten(0, 1)
            gram[b, :, b + lag] = block
            if same and lag:
                gram[b + lag, :, b] = block.mT
    return gram


def _lags(x: Window, same: bool) -> range:
    """The lags b' − b that need a product; between the same lines negative ones follow."""
    return range(0 if same else 1 - x.kernel, x.kernel)


def _offsets(x: Window, lag: int) -> range:
    """The offsets b that have a partner b + lag."""
    return range(max(0, -lag), x.kernel - max(0, lag))


@lru_cache(maxsize=1024)
def left_out(window: Window, offset: int, lag: int, device: torch.device) -> Tensor | None:
    """The entries that the offset does not meet, though they and their partners may not be zero."""
    seen, content = window.seen(offset), window.content
    shift = lag * window.dilation
    missing = [v for v in content if v not in seen and v + shift in content]
    return torch.tensor(missing, device=device) if missing else None


def unfold_width(lines: Lines, x: Window) -> Float[Tensor, "M k2C"]:
    """One row per line and position, (b, channel) in the columns."""
    of_line, of_pixel, of_channel = lines.stride()
    patches = lines.as_strided(
        (len(lines), x.positions, x.kernel, lines.shape[-1]),
        (of_line, of_pixel * x.stride, of_pixel * x.dilation, of_channel),
        lines.storage_offset(),
    )
    return patches.reshape(len(lines) * x.positions, x.kernel * lines.shape[-1])
