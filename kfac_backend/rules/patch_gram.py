"""The Gram matrix of an image's patches, without unfolding them: expand's A up to its scale.

With P the padded image and (i, j) over the R positions of the kernel, the block of the kernel's
offsets (a, b) and (a', b') is Σ_ij P[a + i, b + j] P[a' + i, b' + j]ᵀ. At stride 1 it depends only
on the lag (a' − a, b' − b), but for what the window leaves out at the border. So one axis at a time:
take the product of the whole image with itself, shifted by the lag, and subtract the border's.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.rules.window import Window, pad
from kfac_backend.weight_sharing import GramSum

__all__ = ["PatchGram"]

FEWEST_CHANNELS_TO_SHIFT = 32

Lines = Float[Tensor, "L W C"]
"""Rows of images, one below the other."""


class PatchGram(GramSum):
    """Σ of patch patchᵀ over images that were added.

    Summed up as (k1, k2, C, k1, k2, C), blocks a ≤ a' only; `total` puts it into the order of
    ``weight.flatten(1)``, (1, C·k1·k2, C·k1·k2).
    """

    def __init__(self, channels: int, kernel_size: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = (*kernel_size, channels)

    def add_images(self, image: Float[Tensor, "N C H W"], y: Window, x: Window) -> None:
        """Add all patches of a batch."""
        first = self._total is None
        if self._total is None:
            self._total = image.new_empty(*self._shape, *self._shape)
        for a, a2, gram in _row_pairs(image, y, x):
            block = self._total[a, :, :, a2]
            block.copy_(gram) if first else block.add_(gram)

    def total(self) -> Tensor | None:
        """The whole symmetric matrix, features in the order (C, k1, k2)."""
        if self._total is None:
            return None
        k1, k2, C = self._shape
        for a in range(k1):
            for a2 in range(a):
                self._total[a, :, :, a2] = self._total[a2, :, :, a].permute(2, 3, 0, 1)
        return self._total.permute(2, 0, 1, 5, 3, 4).reshape(1, C * k1 * k2, C * k1 * k2)


def _row_pairs(
    image: Float[Tensor, "N C H W"], y: Window, x: Window
) -> Iterator[tuple[int, int, Float[Tensor, "k2 C k2 C"]]]:
    """(a, a', Gram matrix of all patch rows a with the patch rows a' below), for all a ≤ a'."""
    if y.stride == 1 and y.kernel > 1:
        yield from _by_lag(image, y, x)
        return
    P = _channels_last(image, y, x)  # (N, Hp, Wp, C)
    patch_rows = [
        _unfold_width(P[:, y.seen(a)[0] : y.seen(a)[-1] + 1 : y.stride].flatten(0, 1), x)
        for a in range(y.kernel)
    ]
    for a in range(y.kernel):
        for a2 in range(a, y.kernel):
            gram = patch_rows[a].mT @ patch_rows[a2]
            yield a, a2, gram.view(x.kernel, -1, x.kernel, image.shape[1])


def _by_lag(
    image: Float[Tensor, "N C H W"], y: Window, x: Window
) -> Iterator[tuple[int, int, Tensor]]:
    """The same at stride 1 along the height: one product of all lines per lag."""
    P = _channels_last(image, y, x)  # (N, Hp, Wp, C)
    lines = P.flatten(0, 1)
    for lag in range(y.kernel):
        shift = lag * y.dilation
        # Shifted over the end of an image a line meets zeros, see _channels_last.
        whole = _line_gram(lines[: len(lines) - shift], lines[shift:], x, same=lag == 0)
        for a in range(y.kernel - lag):
            gram, left_out = whole, _left_out(y, a, lag, P.device)
            if left_out is not None:
                upper, lower = P[:, left_out].flatten(0, 1), P[:, left_out + shift].flatten(0, 1)
                gram = whole - _line_gram(upper, lower, x, same=lag == 0)
            yield a, a + lag, gram


def _line_gram(upper: Lines, lower: Lines, x: Window, same: bool) -> Float[Tensor, "k2 C k2 C"]:
    """Σ over lines and positions of what offset b meets in one times what b' meets in the other."""
    C = upper.shape[-1]
    if x.stride == 1 and x.kernel > 1 and C >= FEWEST_CHANNELS_TO_SHIFT:
        return _line_gram_by_lag(upper, lower, x, same)
    left = _unfold_width(upper, x)
    right = left if same else _unfold_width(lower, x)
    return (left.mT @ right).view(x.kernel, C, x.kernel, C)


def _line_gram_by_lag(
    upper: Lines, lower: Lines, x: Window, same: bool
) -> Float[Tensor, "k2 C k2 C"]:
    """The same at stride 1 along the width: one product of all pixels per lag."""
    C = upper.shape[-1]
    left, right = upper.flatten(0, 1), lower.flatten(0, 1)  # (L·W, C)
    M = len(left)
    gram = upper.new_empty(x.kernel, C, x.kernel, C)
    for lag in range(0 if same else 1 - x.kernel, x.kernel):
        shift = lag * x.dilation
        start, end = max(0, -shift), M - max(0, shift)
        # Shifted over the end of a line a pixel meets zeros, see _channels_last.
        whole = left[start:end].mT @ right[start + shift : end + shift]
        for b in range(max(0, -lag), x.kernel - max(0, lag)):
            block, left_out = whole, _left_out(x, b, lag, upper.device)
            if left_out is not None:
                strip, partner = upper[:, left_out], lower[:, left_out + shift]
                block = whole - strip.flatten(0, 1).mT @ partner.flatten(0, 1)
            gram[b, :, b + lag] = block
            if same and lag:
                gram[b + lag, :, b] = block.mT
    return gram


@lru_cache(maxsize=1024)
def _left_out(window: Window, offset: int, lag: int, device: torch.device) -> Tensor | None:
    """The entries that the offset does not meet, though they and their partners may not be zero."""
    seen, content = window.seen(offset), window.content
    shift = lag * window.dilation
    left_out = [v for v in content if v not in seen and v + shift in content]
    return torch.tensor(left_out, device=device) if left_out else None


def _channels_last(
    image: Float[Tensor, "N C H W"], y: Window, x: Window
) -> Float[Tensor, "N Hp Wp C"]:
    """The padded image, channels last, with zeros behind each line and image for every shift."""
    widths = [0, 0]  # F.pad wants the last axis first
    for window in (x, y):
        reach = window.dilation * (window.kernel - 1) if window.stride == 1 else 0
        missing = max(0, reach - (window.padded - len(window.content)))
        if window.padding_mode == "constant":
            widths += [window.before, window.after + missing]
        else:
            widths += [0, missing]
    if y.padding_mode != "constant":
        image = pad(image, y, x)
    rows = image.permute(0, 2, 3, 1)
    return (F.pad(rows, widths) if any(widths) else rows).contiguous()


def _unfold_width(lines: Lines, x: Window) -> Float[Tensor, "M k2C"]:
    """One row per line and position, (b, channel) in the columns."""
    of_line, of_pixel, of_channel = lines.stride()
    patches = lines.as_strided(
        (len(lines), x.positions, x.kernel, lines.shape[-1]),
        (of_line, of_pixel * x.stride, of_pixel * x.dilation, of_channel),
        lines.storage_offset(),
    )
    return patches.reshape(len(lines) * x.positions, -1)
