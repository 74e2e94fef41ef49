"""Where a convolution's kernel looks: one axis of an image, as the kernel's offsets meet it."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Window", "pad", "windows"]


@dataclass(frozen=True)
class Window:
    """One axis: offset k of the kernel meets the padded entries k·dilation + stride·(0, ..., R−1).

    Entries are numbered from the first padded one.
    """

    size: int
    """Entries of the image, before padding."""
    kernel: int
    stride: int
    dilation: int
    before: int
    """Padded entries in front."""
    after: int
    """Padded entries behind."""
    padding_mode: str
    """As F.pad calls it: "constant" (zeros), "reflect", "replicate" or "circular"."""

    @property
    def padded(self) -> int:
        """Entries with the padding."""
        return self.before + self.size + self.after

    @property
    def positions(self) -> int:
        """R, how many times the kernel fits."""
        return (self.padded - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def content(self) -> range:
        """The padded entries that are not zero by construction."""
        if self.padding_mode == "constant":
            return range(self.before, self.before + self.size)
        return range(self.padded)

    def seen(self, offset: int) -> range:
        """The padded entries that one offset of the kernel meets, in the order of the positions."""
        start = offset * self.dilation
        return range(start, start + self.stride * self.positions, self.stride)

    def counts(self, like: Tensor) -> Tensor:
        """How often offset k meets entry h of the image, (kernel, size), in the tensor's dtype."""
        return _counts(self, like.dtype, like.device)


def windows(layer: nn.Conv2d, a: Tensor) -> tuple[Window, Window]:
    """The axes of height and width of a layer's input (N, C, H, W)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    axes = []
    for axis in (0, 1):
        if layer.padding == "valid":
            before, after = 0, 0
        elif layer.padding == "same":
            # PyTorch puts the odd one at the end.
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = int(layer.padding[axis])
        axes.append(
            Window(
                a.shape[2 + axis],
                layer.kernel_size[axis],
                layer.stride[axis],
                layer.dilation[axis],
                before,
                after,
                mode,
            )
        )
    return axes[0], axes[1]


def pad(a: Tensor, y: Window, x: Window) -> Tensor:
    """The image (N, C, H, W) as the kernel sees it, padded in the layer's own mode."""
    widths = [x.before, x.after, y.before, y.after]  # F.pad wants the last axis first
    return F.pad(a, widths, mode=y.padding_mode) if any(widths) else a


@lru_cache(maxsize=256)
def _counts(window: Window, dtype: torch.dtype, device: torch.device) -> Tensor:
    source = torch.arange(window.size, dtype=torch.float64)
    widths = (window.before, window.after)
    if window.padding_mode == "constant":
        source = F.pad(source, widths, value=-1.0)
    else:
        source = F.pad(source[None], widths, mode=window.padding_mode)[0]
    counts = torch.zeros(window.kernel, window.size)
    for offset in range(window.kernel):
        met = source[torch.tensor(window.seen(offset))].long()
        counts[offset] = torch.bincount(met[met >= 0], minlength=window.size)
    return counts.to(device, dtype)
