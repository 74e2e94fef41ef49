"""Compute the Gram matrix of an image's patches: expand's A up to its scale.

Let P be the padded image and i run over the positions of the kernel. The block of the kernel's
offsets o and o' is Σ_i P[i + o] P[i + o']ᵀ. There are three methods to compute all of these blocks.
`cheapest_method` selects the one with the least arithmetic and copies:

- unfold: each patch is a row of one matrix, and one product gives all blocks. It supports any
  stride, groups and number of axes, and is best for few channels and small images.
- shifts, for two axes at stride 1: the sum over *all* pixels depends only on the lag o' − o, and is
  one product of the image with its shifted copy. Pixels at the border outside of the kernel's range
  are subtracted. Nothing is unfolded.
- frequencies, also for two axes at stride 1: all lags along the width from the lines' Fourier
  transforms, with less than half the multiplications. It is best for many channels.

For 16 images and WRN-16-4 on one x86-64 core, a whole pass (expand, one vector) takes 2.0 times as
long if all is unfolded. Without "frequencies" it takes 1.2 times as long.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import DenseGram, Gram, mirror_upper_half_
from kfac_backend.layers.window import Window, pad, patch_rows
from kfac_backend.precision import at_least_float32

OVERHEAD = {"cpu": 2e6, "cuda": 5e8}
"""Cost of starting a matrix product, in multiplications.

The CPU's value was fitted to timings on one x86-64 core (190 cases: 16 images of 4² to 32² pixels
with 1 to 256 channels, kernels of 3² to 7², with and without padding). The GPU's value was fitted
on an H200 to all methods except "frequencies" (29 cases: 16, 128 and 500 images of 8² to 56² pixels
with 3 to 512 channels).
"""

COPY = {"cpu": 64, "cuda": 0}
"""Cost of copying an entry of a patch, in multiplications.

Without padding, each offset of a kernel misses most of the border, and with few channels each
copied entry has few multiplications. So 128 images of 6 channels with 14² pixels and a kernel of 5²
take 10 ms unfolded. They take 78 ms by "frequencies", of which 55 are copies (one x86-64 core; the
constant fits 16 such cases of 1 to 128 channels). It was not measured on a GPU.
"""

SYMMETRIC = 0.56
"""Share of the multiplications of a Gram matrix that `DenseGram` makes on a CPU."""

PATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Maximum number of bytes that are unfolded at once, but at least one image.

On a CPU they should fit into the cache. On one x86-64 core 32 volumes of 16×8×16×16 with kernels of
3³ take 0.61 s if all are unfolded at once, and 0.34 s with 16 MiB at a time.
"""

Entries = range | tuple[int, ...]


class PatchGram(Gram):
    """Sum patch patchᵀ over images, (G, d, d) in the order of `patches`."""

    def __init__(self, weight: Tensor, kernel_size: tuple[int, ...], groups: int = 1) -> None:
        super().__init__(weight, groups, weight.shape[1:].numel())
        self._kernel = kernel_size
        self._unfolded: DenseGram | None = None
        self._correlations: dict[tuple[Window, Window, str], _Correlation] = {}

    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch of images, with the kernel's windows ``axes``."""
        image = at_least_float32(image)
        if len(axes) == 1:  # a line is an image of height 1
            image, axes = image[:, :, None], (Window(1, 1, 1, 1, 0, 0, axes[0].padding_mode), *axes)
        if len(axes) == 2 and self.groups == 1:
            y, x = axes
            method = cheapest_method(len(image), image.shape[1], y, x, image.device.type)
            if method != "unfold":
                # A correlation has its own sums, from which blocks are assembled only once. Images
                # of another size need another one.
                if (y, x, method) not in self._correlations:
                    self._correlations[y, x, method] = _Correlation(y, x, method)
                self._correlations[y, x, method].add(image)
                return
        row = image.shape[1] * image.element_size()
        for window in axes:
            row *= window.positions * window.kernel
        size = max(1, PATCH_BYTES.get(image.device.type, PATCH_BYTES["cuda"]) // row)
        for some in image.split(size):
            self.add(patch_rows(some, self.groups, *axes))

    def add(self, rows: Float[Tensor, "G M kc"], fresh: bool = False) -> None:
        """Add patches with features in the order (*kernel, channels)."""
        if self._unfolded is None:
            self._unfolded = DenseGram(self.like, self.groups, self.size)
        self._unfolded.add(rows, fresh)

    def total(self) -> Float[Tensor, "G d d"]:
        """Return the sum so far, with features in the order (channels, *kernel)."""
        sums = [self._unfolded, *self._correlations.values()]
        totals = [one.total() for one in sums if one is not None]
        if not totals:
            return self.zeros()
        total = sum(totals[1:], totals[0])
        # (*kernel, c, *kernel, c) -> (c, *kernel, c, *kernel): as in ``weight.flatten(1)``
        channels, number = self.size // math.prod(self._kernel), len(self._kernel)
        order = [number, *range(number)]
        apart = total.view(self.groups, *2 * (*self._kernel, channels))
        permuted = apart.permute(0, *(1 + i for i in order), *(2 + number + i for i in order))
        return permuted.reshape(total.shape)


class _Product(NamedTuple):
    """Sum over pixels of P[i, j] P[i + dy, j + dx]ᵀ, at a lag (dy, dx) between offsets.

    With a = None the rows i are all rows whose partner exists. Otherwise they are the rows that
    offset a of the kernel does not cover although it is paired with a + dy. The columns j are
    defined likewise.
    """

    a: int | None
    dy: int
    b: int | None
    dx: int


class _Correlation:
    """Sum over images of their patches' Gram matrix at stride 1, from products of pixels.

    Offset a covers all rows except the set M_a, and likewise for columns. So the block of the
    offsets (a, b) and (a + dy, b + dx) is a sum over (all − M_a) × (all − M_b). Its first term, all
    × all, is common to all blocks at that lag.
    """

    def __init__(self, y: Window, x: Window, method: str) -> None:
        """Begin with empty sums; ``method`` is "shifts" or "frequencies"."""
        self._y, self._x, self._method = y, x, method
        self._sums: dict[_Product, Tensor] = {}
        self._border: dict[int, Tensor] = {}  # see `_Border`
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}  # lag dy -> its sums by frequency

    def add(self, image: Float[Tensor, "N C H W"]) -> None:
        """Add a batch of images."""
        y, x = self._y, self._x
        # Do not pad with zeros, so that no product wastes time on rows of zeros.
        image = image if y.padding_mode == "constant" else pad(image, y, x)
        P = image.permute(2, 0, 3, 1)  # (H, N, W, C)
        # Step 1: all rows and columns, at all lags.
        if self._method == "shifts":
            self._add_shifted(P)
        else:
            self._add_spectra(P)
        # Step 2: the rows and columns that an offset does not cover, copied at once.
        border = _border(y, x)
        if not border.products:
            return
        index = _index(border.pixels, P.device)
        pixels = P.movedim(2, 1).flatten(0, 1).index_select(0, index)  # (pixels, N, C)
        start = 0
        for size, keys in border.products.items():
            end = start + 2 * len(keys) * size
            here, there = pixels[start:end].view(2, len(keys), -1, pixels.shape[-1])
            self._border[size] = _added(self._border.get(size), here, there)
            start = end

    def _add_shifted(self, P: Float[Tensor, "H N W C"]) -> None:
        """Add one product for each lag, without copying a line."""
        # Zeros follow each line. A pixel that is shifted over the end of its line is multiplied by
        # a zero. All lines can therefore form one long line, and a lag of both axes is one shift of
        # it.
        padded = F.pad(P, (0, 0, 0, _zeros_behind(self._x)))
        _, N, width, _ = padded.shape
        pixels = padded.flatten(0, 2)
        for dy, dx in _lags(self._y, self._x):
            shift = dy * self._y.dilation * N * width + dx * self._x.dilation
            here, there = pixels[: max(0, len(pixels) - shift)], pixels[shift:]
            key = _Product(None, dy, None, dx)
            self._sums[key] = _added(self._sums.get(key), here, there)

    def _add_spectra(self, P: Float[Tensor, "H N W C"]) -> None:
        """Add one complex product for each frequency of the lines, and for each lag of the rows.

        Σ_j p[j] q[j + s]ᵀ = 1/n Σ_f conj(p̂_f) q̂_fᵀ exp(2πi f s / n) for lines p and q at that
        lag. Rounding errors are relative to the product of the largest lag, not of each lag.
        """
        # A complex product takes four real ones, or three between the same lines. So with a kernel
        # of k offsets a line of W pixels takes 2 (W + k) products of pixels for all lags. With
        # shifts it takes W + k for each of the 2k − 1 lags.
        H, N, _, C = P.shape
        transform = _waves(self._x, P.dtype, P.device).transform
        real, imaginary = (transform @ P.permute(2, 0, 1, 3).flatten(1)).view(2, -1, H, N, C)
        imaginary = imaginary[1:-1]  # the first and the last are zero
        for dy in range(self._y.kernel):
            shift = dy * self._y.dilation
            # The lines, and their partners dy offsets below, both with the axis of frequencies
            # first. One product (C, lines) @ (lines, C) for each frequency, in one batch. p̂ = p +
            # iu and q̂ = q + iv: conj(p̂) q̂ᵀ = (pᵀq + uᵀv) + i (pᵀv − uᵀq).
            p, u = (z[:, : max(0, H - shift)].flatten(1, 2) for z in (real, imaginary))
            q, v = (z[:, shift:].flatten(1, 2) for z in (real, imaginary))  # (F, lines, C)
            of_real, of_imaginary = self._spectra.get(dy, (None, None))
            of_real = _added(of_real, p, q)
            of_real[1:-1].baddbmm_(u.mT, v)
            of_imaginary = _added(of_imaginary, p[1:-1], v)
            if dy:  # between the same lines it is the transpose of the other product
                of_imaginary.baddbmm_(u.mT, q[1:-1], alpha=-1)
            self._spectra[dy] = of_real, of_imaginary

    def total(self) -> Float[Tensor, "1 d d"]:
        """Return the Gram matrix, with features in the order (height, width, channels)."""
        y, x, sums = self._y, self._x, dict(self._sums)
        # Step 1: the products of uncovered pixels, summed in batches of one size.
        for size, keys in _border(y, x).products.items():
            sums |= zip(keys, self._border[size], strict=True)
        # Step 2: transform frequencies to lags. The transform is linear, so once is enough for all
        # batches.
        for dy, (real, imaginary) in self._spectra.items():
            # Between the same lines only pᵀv was summed, because uᵀq is its transpose.
            imaginary = imaginary if dy else imaginary - imaginary.mT
            waves = _waves(x, real.dtype, real.device)
            by_lag = torch.addmm(waves.cosines @ real.flatten(1), waves.sines, imaginary.flatten(1))
            for dx, of_lag in zip(_lags_of(x), by_lag.view(-1, *real.shape[1:]), strict=True):
                sums[_Product(None, dy, None, dx)] = of_lag
        # Step 3: the block of each pair of offsets, (all − M_a) × (all − M_b). Subtract the
        # uncovered rows and the uncovered columns; pixels in both sets are then subtracted twice.
        like = sums[_Product(None, 0, None, 0)]
        total = like.new_empty(y.kernel, x.kernel, len(like), y.kernel, x.kernel, len(like))
        for dy, dx in _lags(y, x):
            for a, b in product(_paired(y, dy), _paired(x, dx)):
                block = sums[_Product(None, dy, None, dx)]
                for key, sign in (((a, None), -1), ((None, b), -1), ((a, b), 1)):
                    missed = sums.get(_Product(key[0], dy, key[1], dx))
                    block = block if missed is None else block + sign * missed
                total[a, b, :, a + dy, b + dx] = block
        # Only lags to a later offset were computed: the blocks below the diagonal are the
        # transposed ones above.
        gram = total.view(1, y.kernel * x.kernel * len(like), -1)
        mirror_upper_half_(gram)
        return gram


@lru_cache(maxsize=1024)
def cheapest_method(examples: int, channels: int, y: Window, x: Window, device: str) -> str:
    """Return the method with the fewest multiplications, including OVERHEAD and COPY."""
    features = y.kernel * x.kernel * channels
    overhead = OVERHEAD.get(device, OVERHEAD["cuda"])
    symmetric = SYMMETRIC if device == "cpu" else 1.0
    positions = examples * y.positions * x.positions
    copy = COPY.get(device, COPY["cuda"])
    cost = {"unfold": positions * features * (symmetric * features + copy) + overhead}
    if y.stride == x.stride == 1:
        # The pixels of each product, whose factors have a column per channel.
        heights = [max(0, len(y.content) - dy * y.dilation) for dy in range(y.kernel)]
        border = [size * len(keys) for size, keys in _border(y, x).products.items()]
        pixels, frequencies = len(x.content), _num_frequencies(x)
        sums = {"shifts": [heights[dy] * (pixels + _zeros_behind(x)) for dy, _ in _lags(y, x)]}
        if device == "cpu":  # on an H200 it is faster only from 256 channels on
            transform = 2 * frequencies * pixels * len(y.content) // channels
            products = [(4 if dy else 3) * frequencies * H for dy, H in enumerate(heights)]
            sums["frequencies"] = [transform, *products]
        for method, whole in sums.items():
            cost[method] = sum(n * examples * channels**2 + overhead for n in [*border, *whole])
            # Both sides of each product are picked one by one, at twice the cost of patches in
            # order.
            cost[method] += sum(border) * examples * channels * 4 * copy
    return min(cost, key=lambda method: cost[method])


def _lags(y: Window, x: Window) -> Iterator[tuple[int, int]]:
    """Return the lags (dy, dx) that need a product; symmetry gives their negatives."""
    for dy in range(y.kernel):
        yield from ((dy, dx) for dx in (_lags_of(x) if dy else range(x.kernel)))


def _lags_of(window: Window) -> range:
    """Return all lags between two offsets along one axis."""
    return range(1 - window.kernel, window.kernel)


def _paired(window: Window, lag: int) -> range:
    """Return the offsets that have a partner at a lag."""
    return range(max(0, -lag), window.kernel - max(0, lag))


class _Border(NamedTuple):
    """Products of uncovered pixels, grouped by their number of pixels."""

    products: dict[int, list[_Product]]
    """Maps the number of pixels of a product to the products."""
    pixels: tuple[int, ...]
    """Pixel indices, line by line: for each size the first factors' pixels, then the second
    factors'."""


@lru_cache(maxsize=256)
def _border(y: Window, x: Window) -> _Border:
    products: dict[int, list[_Product]] = {}
    pixels: dict[_Product, tuple[list[int], list[int]]] = {}
    width = len(x.content)
    for dy, dx in _lags(y, x):
        shift = dy * y.dilation * width + dx * x.dilation
        for (a, rows), (b, columns) in product(_missed(y, dy), _missed(x, dx)):
            here = [i * width + j for i in rows for j in columns]
            if here and not a is b is None:
                key = _Product(a, dy, b, dx)
                products.setdefault(len(here), []).append(key)
                pixels[key] = here, [p + shift for p in here]
    ordered = [pixels[k][i] for keys in products.values() for i in (0, 1) for k in keys]
    return _Border(products, tuple(chain.from_iterable(ordered)))


def _missed(window: Window, lag: int) -> list[tuple[int | None, Entries]]:
    """Return (None, all entries with a partner at that lag), and (offset, uncovered ones of them).

    Entries are numbered from the first one of ``window.content``.
    """
    shift, size = lag * window.dilation, len(window.content)
    partnered = range(max(0, -shift), max(0, size - max(0, shift)))
    by_offset: list[tuple[int | None, Entries]] = [(None, partnered)]
    for offset in _paired(window, lag):
        entries = window.entries_at(offset)
        missed = tuple(v for v in partnered if v + window.content.start not in entries)
        by_offset += [(offset, missed)] if missed else []
    return by_offset


@lru_cache(maxsize=1024)
def _index(entries: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(entries, device=device)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add leftᵀ right to the total in place, for matrices or batches of matrices."""
    if total is None:
        return left.mT @ right
    if left.dim() > 2:
        return total.baddbmm_(left.mT, right)
    return total.addmm_(left.mT, right)


@dataclass(frozen=True)
class _Waves:
    """Matrices of a line's Fourier transform: to F frequencies, and back to 2k − 1 lags."""

    transform: Float[Tensor, "2F W"]
    cosines: Float[Tensor, "lags F"]
    sines: Float[Tensor, "lags F−2"]


@lru_cache(maxsize=256)
def _waves(x: Window, dtype: torch.dtype, device: torch.device) -> _Waves:
    # The transform of W pixels, padded with zeros to length n, which is at least W plus the largest
    # shift. So the cyclic correlation does not wrap a line around to its own beginning. The terms
    # of the frequencies f and n − f are complex conjugates, so n/2 + 1 frequencies are enough. The
    # first and the last are real.
    n = 2 * (_num_frequencies(x) - 1)
    angles = 2 * math.pi / n * torch.arange(n // 2 + 1, dtype=torch.float64)
    forth = angles[:, None] * torch.arange(len(x.content), dtype=torch.float64)
    shifts = x.dilation * torch.tensor(_lags_of(x), dtype=torch.float64)
    back = shifts[:, None] * angles
    counts = torch.full((len(angles),), 2.0, dtype=torch.float64)  # f and n − f
    counts[0] = counts[-1] = 1.0
    return _Waves(
        torch.cat([forth.cos(), -forth.sin()]).to(device, dtype),
        (counts / n * back.cos()).to(device, dtype),
        (-counts / n * back.sin())[:, 1:-1].to(device, dtype),
    )


def _num_frequencies(x: Window) -> int:
    """Return n/2 + 1, with n even and at least a line's pixels plus the largest shift."""
    return max(1, -(-(len(x.content) + _zeros_behind(x)) // 2)) + 1


def _zeros_behind(x: Window) -> int:
    """Return the number of zeros between lines: the largest shift between two offsets."""
    return x.reach - 1
