"""Gram matrices of an image's lines, for every pair of offsets of a kernel along the width.

For lines p and q the block of the offsets (b, b') is Σ_j p[b + j] q[b' + j]ᵀ over the positions j.
At stride 1 this depends on the lag b' − b alone, except at the border: it is the product of the
whole lines, one of them shifted by the lag, minus the pixels that the window leaves out. The
products at all lags are the lines' correlation. It is computed lag by lag, or, in fewer
multiplications, frequency by frequency from the lines' Fourier transforms. The correlation and the
border's part are summed up separately, batch by batch. The blocks are assembled once, at the end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import is_tall, tall_product
from kfac_backend.layers.patches.window import Window

__all__ = [
    "CorrelationByFrequency",
    "CorrelationByLag",
    "LineCorrelation",
    "Spectra",
    "border_pixels",
    "lags",
    "left_out",
    "num_frequencies",
    "with_zeros",
    "zeros_behind",
]

Lines = Float[Tensor, "*rows W C"]
"""Lines of images; their pixels are those of `Window.content` along the width."""


class LineCorrelation(ABC):
    """Σ over lines of the blocks of all pairs of offsets, at stride 1, without unfolding."""

    def __init__(self, x: Window, same: bool) -> None:
        """Empty sums.

        Args:
            x: the axis of the width.
            same: whether upper and lower lines are the same.
        """
        self._x, self._same = x, same
        self._at_border: dict[tuple[int, int], Tensor] = {}

    def gram(self) -> Float[Tensor, "k2 C k2 C"]:
        """The blocks of all pairs of offsets, from all lines that were added."""
        products = self._products()
        like = products[0]
        gram = like.new_empty(self._x.kernel, len(like), self._x.kernel, len(like))
        for lag in lags(self._x, self._same):
            for b in _offsets(self._x, lag):
                taken = self._at_border.get((b, lag))
                gram[b, :, b + lag] = products[lag] if taken is None else products[lag] - taken
                if self._same and lag:
                    gram[b + lag, :, b] = gram[b, :, b + lag].mT
        return gram

    @abstractmethod
    def _products(self) -> Mapping[int, Float[Tensor, "C C"]]:
        """Σ_j p[j] q[j + lag·dilation]ᵀ over all pixels of all lines, by the lag."""

    def _add_border(self, upper: Lines, lower: Lines) -> None:
        for lag in lags(self._x, self._same):
            for b in _offsets(self._x, lag):
                missing = left_out(self._x, b, lag, upper.device)
                if missing is not None:
                    partners = missing + lag * self._x.dilation
                    left = upper[..., missing, :].flatten(0, -2)
                    right = left if self._same and not lag else lower[..., partners, :]
                    known = self._at_border.get((b, lag))
                    self._at_border[b, lag] = _added(known, left, right.flatten(0, -2))


class CorrelationByLag(LineCorrelation):
    """One product for each lag, without copying a line. Best for few channels or short lines."""

    def __init__(self, x: Window, same: bool) -> None:
        super().__init__(x, same)
        self._sums: dict[int, Tensor] = {}

    def add(self, upper: Lines, lower: Lines) -> None:
        """Add lines, each with `zeros_behind`, which a pixel meets that is shifted over its end.

        So all lines form a single long one, and each lag takes a single product.
        """
        left, right = upper.flatten(0, -2), lower.flatten(0, -2)  # (pixels, C)
        for lag in lags(self._x, self._same):
            shift = lag * self._x.dilation
            start, end = max(0, -shift), len(left) - max(0, shift)
            self._sums[lag] = _added(
                self._sums.get(lag), left[start:end], right[start + shift : end + shift]
            )
        self._add_border(upper, lower)

    def _products(self) -> Mapping[int, Float[Tensor, "C C"]]:
        return self._sums


class Spectra:
    """Discrete Fourier transforms of lines of W pixels, padded with zeros to length n.

    n is at least W plus the largest shift, so that the cyclic correlation does not wrap a line
    around to its own beginning. The terms of the frequencies f and n − f are complex conjugates, so
    n/2 + 1 frequencies are enough. The first and the last are real.
    """

    def __init__(self, lines: Float[Tensor, "H N W C"], x: Window) -> None:
        """Transform N lines at each height."""
        H, N, _, C = lines.shape
        transform = _waves(x, lines.dtype, lines.device).transform
        transformed = transform @ lines.permute(2, 0, 1, 3).flatten(1)
        self._real, self._imaginary = transformed.view(2, -1, H, N, C)

    def real(self, heights: slice) -> Float[Tensor, "F L C"]:
        """The real parts of the lines at some heights."""
        return self._real[:, heights].flatten(1, 2)

    def imaginary(self, heights: slice) -> Float[Tensor, "F−2 L C"]:
        """The imaginary parts, without the first and the last, which are zero."""
        return self._imaginary[1:-1, heights].flatten(1, 2)


class CorrelationByFrequency(LineCorrelation):
    """One complex product for each frequency. Best for many channels.

    Σ_j p[j] q[j + s]ᵀ = 1/n Σ_f conj(p̂_f) q̂_fᵀ exp(2πi f s / n). A complex product takes four
    real ones, or three between the same lines. So with a kernel of k offsets a line of W pixels
    takes 2 (W + k) products of pixels for all lags, where `CorrelationByLag` takes W + k for each
    of the 2k − 1 lags. For three offsets, counting the lags along the height, that is 2.4 times
    less arithmetic. Rounding errors are relative to the largest lag's product, not to each one's.
    """

    def __init__(self, x: Window, same: bool) -> None:
        super().__init__(x, same)
        self._real: Tensor | None = None
        self._imaginary: Tensor | None = None

    def add(self, spectra: Spectra, rows: Lines, upper: slice, lower: slice) -> None:
        """Add lines, as their transforms.

        Args:
            spectra: of all lines.
            rows: all lines (H, N, W, C) themselves, for what the border leaves out.
            upper: the heights of the upper lines.
            lower: the heights of the lower lines, which are as many.
        """
        # p̂ = p + iu and q̂ = q + iv: conj(p̂) q̂ᵀ = (pᵀq + uᵀv) + i (pᵀv − uᵀq).
        p, u = spectra.real(upper), spectra.imaginary(upper)
        q, v = spectra.real(lower), spectra.imaginary(lower)
        self._real = _added(self._real, p, q)  # (F, C, C), of conj(p̂) q̂ᵀ
        self._real[1:-1].baddbmm_(u.mT, v)
        self._imaginary = _added(self._imaginary, p[1:-1], v)
        if not self._same:  # between the same lines it is the other product's transpose
            self._imaginary.baddbmm_(u.mT, q[1:-1], alpha=-1)
        self._add_border(rows[upper], rows[lower])

    def _products(self) -> Mapping[int, Float[Tensor, "C C"]]:
        real, imaginary = self._real, self._imaginary
        assert real is not None and imaginary is not None
        if self._same:
            imaginary = imaginary - imaginary.mT
        # Back from frequencies to lags, once for all batches.
        waves = _waves(self._x, real.dtype, real.device)
        found = torch.addmm(waves.cosines @ real.flatten(1), waves.sines, imaginary.flatten(1))
        by_lag = found.view(-1, *real.shape[1:])
        return dict(zip(lags(self._x, same=False), by_lag, strict=True))


@dataclass(frozen=True)
class _Waves:
    """The matrices of the Fourier transform: to F frequencies, and back to 2k − 1 lags."""

    transform: Float[Tensor, "2F W"]
    cosines: Float[Tensor, "lags F"]
    sines: Float[Tensor, "lags F−2"]


@lru_cache(maxsize=256)
def _waves(x: Window, dtype: torch.dtype, device: torch.device) -> _Waves:
    n = 2 * (num_frequencies(x) - 1)
    angles = 2 * math.pi / n * torch.arange(n // 2 + 1, dtype=torch.float64)
    forth = angles[:, None] * torch.arange(len(x.content), dtype=torch.float64)
    shifts = x.dilation * torch.tensor(lags(x, same=False), dtype=torch.float64)
    back = shifts[:, None] * angles
    counts = torch.full((len(angles),), 2.0, dtype=torch.float64)  # f and n − f
    counts[0] = counts[-1] = 1.0
    return _Waves(
        torch.cat([forth.cos(), -forth.sin()]).to(device, dtype),
        (counts / n * back.cos()).to(device, dtype),
        (-counts / n * back.sin())[:, 1:-1].to(device, dtype),
    )


def num_frequencies(x: Window) -> int:
    """n/2 + 1, with n even and at least a line's pixels and the largest shift."""
    return max(1, -(-(len(x.content) + zeros_behind(x)) // 2)) + 1


def zeros_behind(x: Window) -> int:
    """The number of zeros between lines: the largest shift between two offsets."""
    return x.reach - 1


def with_zeros(lines: Lines, x: Window) -> Lines:
    """The lines with `zeros_behind` each, in one piece of memory."""
    return F.pad(lines, (0, 0, 0, zeros_behind(x))).contiguous()


def lags(x: Window, same: bool) -> range:
    """The lags b' − b that need a product; between the same lines symmetry gives the negative."""
    return range(0 if same else 1 - x.kernel, x.kernel)


def border_pixels(x: Window, same: bool) -> Iterator[int]:
    """For each product at the border, the number of pixels of a line that take part."""
    for lag in lags(x, same):
        for b in _offsets(x, lag):
            missing = left_out(x, b, lag, torch.device("cpu"))
            if missing is not None:
                yield len(missing)


def _offsets(x: Window, lag: int) -> range:
    """The offsets b that have a partner b + lag."""
    return range(max(0, -lag), x.kernel - max(0, lag))


@lru_cache(maxsize=1024)
def left_out(window: Window, offset: int, lag: int, device: torch.device) -> Tensor | None:
    """The entries that an offset does not meet although their products with a shift are not zero.

    The product of the whole lines contains them, so that they must be subtracted. They are numbered
    from the first entry of ``window.content``; None if there are none.
    """
    seen, content = window.seen(offset), window.content
    shift = lag * window.dilation
    missing = [v - content.start for v in content if v not in seen and v + shift in content]
    return torch.tensor(missing, device=device) if missing else None


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Total + leftᵀ right, in place, for matrices or batches of matrices."""
    if total is None:
        return left.mT @ right if left.dim() > 2 else tall_product(left, right)
    if left.dim() > 2:
        return total.baddbmm_(left.mT, right)
    if is_tall(left):
        return total.add_(tall_product(left, right))
    return total.addmm_(left.mT, right)
