"""The Gram matrix of an image's patches: expand's A up to its scale.

With P the padded image and (i, j) over the positions of the kernel, the block of the kernel's
offsets (a, b) and (a', b') is Σ_ij P[a + i, b + j] P[a' + i, b' + j]ᵀ. There are five ways to
compute all of these blocks. `cheapest_way` takes the one with the least arithmetic:

- unfold: each patch is a row of one matrix, and one product gives all blocks. Best for few channels
  and small images.
- pairs: one product of the patches' rows a and a' for each a ≤ a'. The other blocks are symmetric.
- rows, at stride 1 along the height: the products depend on the lag a' − a alone, except at the
  border (`line_gram`). Patches are unfolded along the width only.
- shifts, at stride 1 along both axes: the same along the width. Nothing is unfolded.
- frequencies, at stride 1 along both axes: all lags along the width from the lines' Fourier
  transforms, in less than half the multiplications. Best for many channels.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram.gram import DenseGram, mirror_upper_half_, tall_product
from kfac_backend.layers.gram.line_gram import (
    CorrelationByFrequency,
    CorrelationByLag,
    Spectra,
    border_pixels,
    lags,
    left_out,
    num_frequencies,
    unfold_width,
    unfolded_gram,
    with_zeros,
    zeros_behind,
)
from kfac_backend.layers.gram.window import Window, pad, patches
from kfac_backend.precision import at_least_float32

__all__ = ["ImageGram", "PatchGram", "UnfoldedGram", "cheapest_way"]

OVERHEAD = {"cpu": 2e6, "cuda": 5e8}
"""The cost of starting a matrix product, in multiplications.

The CPU's value was fitted to timings of all five ways on one x86-64 core (190 cases: 16 images of
4² to 32² pixels with 1 to 256 channels, kernels of 3² to 7², with and without padding). All choices
together take 0.6 % longer than the best way of each case; the geometric mean of the ratios is
1.4 % where the best way takes over 2 ms, and 7 % elsewhere. The GPU's value was fitted on an H200
to all ways but "frequencies" (29 cases: 16, 128 and 500 images of 8² to 56² pixels with 3 to 512
channels). There all choices together take 8 % longer than the best.
"""

PATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Bytes that are unfolded at once, but at least one image.

On a CPU they should fit into the cache: on one x86-64 core 32 volumes of 16×8×16×16 with kernels of
3³ take 0.61 s if all are unfolded at once, and 0.34 s with 16 MiB at a time.
"""

Grams = Iterator[tuple[int, int, Float[Tensor, "k2 C k2 C"]]]
"""(a, a', Gram matrix of all patch rows a with the patch rows a'), for all a ≤ a'."""


class ImageGram(DenseGram):
    """The Gram matrix of images' patches, in the order of ``weight.flatten(1)``."""

    @abstractmethod
    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch of images, whose axes the kernel meets as ``axes`` say."""


class PatchGram(ImageGram):
    """Σ of patch patchᵀ over images that were added.

    The sum is kept as (k1, k2, C, k1, k2, C), which the products give, and only the blocks a ≤ a'
    are filled. `total` puts it into the order of ``weight.flatten(1)``, (1, C·k1·k2, C·k1·k2).
    """

    def __init__(self, channels: int, kernel_size: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = (*kernel_size, channels)
        self._correlation: ImageCorrelation | None = None

    def add_images(self, image: Float[Tensor, "N C H W"], *axes: Window) -> None:
        """Add all patches of a batch."""
        y, x = axes
        way = cheapest_way(len(image), image.shape[1], y, x, image.device.type)
        if way in UNFOLDING:
            self._add_blocks(UNFOLDING[way](image, y, x))
            return
        # A correlation holds sums of its own, from which blocks are assembled only once. Images of
        # another size need another one.
        if self._correlation is None or not self._correlation.takes(y, x, way):
            self._end_correlation()
            self._correlation = ImageCorrelation(y, x, way)
        self._correlation.add(image)

    def total(self) -> Tensor | None:
        """The whole symmetric matrix, features in the order (C, k1, k2)."""
        self._end_correlation()
        if self._total is None:
            return None
        k1, k2, C = self._shape
        for a in range(k1):
            for a2 in range(a):
                self._total[a, :, :, a2] = self._total[a2, :, :, a].permute(2, 3, 0, 1)
        total = self._total.permute(2, 0, 1, 5, 3, 4).reshape(1, C * k1 * k2, C * k1 * k2)
        mirror_upper_half_(total)
        return total

    def _end_correlation(self) -> None:
        if self._correlation is not None:
            self._add_blocks(self._correlation.blocks())
            self._correlation = None

    def _add_blocks(self, blocks: Grams) -> None:
        for a, a2, gram in blocks:
            if self._total is None:
                self._total = gram.new_zeros(*self._shape, *self._shape)
            self._total[a, :, :, a2] += gram


class ImageCorrelation:
    """The sum over images of their patches' Gram matrix at stride 1, from products of image rows.

    The product of the patches' rows a and a' depends on the lag a' − a alone, except for the image
    rows that the window leaves out at the border, which are summed up separately and subtracted.
    The same holds along the width, see `line_gram`.
    """

    def __init__(self, y: Window, x: Window, way: str) -> None:
        """Empty sums.

        Args:
            y: the axis of the height.
            x: the axis of the width.
            way: "shifts" or "frequencies".
        """
        self._y, self._x, self._way = y, x, way
        correlation = CorrelationByLag if way == "shifts" else CorrelationByFrequency
        self._whole = [correlation(x, same=lag == 0) for lag in range(y.kernel)]
        self._at_border: dict[tuple[int, int], CorrelationByLag] = {}

    def takes(self, y: Window, x: Window, way: str) -> bool:
        """Whether these sums are for images of these axes, and computed in this way."""
        return (self._y, self._x, self._way) == (y, x, way)

    def add(self, image: Float[Tensor, "N C H W"]) -> None:
        """Add a batch of images."""
        y, x = self._y, self._x
        P = _rows_first(image, y, x)
        padded = with_zeros(P, x) if self._way == "shifts" else None
        spectra = None if padded is not None else Spectra(P, x)
        for lag, whole in enumerate(self._whole):
            shift = lag * y.dilation
            upper, lower = slice(0, max(0, len(P) - shift)), slice(shift, None)
            if isinstance(whole, CorrelationByLag):
                assert padded is not None
                whole.add(padded[upper], padded[lower])
            else:
                assert spectra is not None
                whole.add(spectra, P, upper, lower)
            for a in range(y.kernel - lag):
                missing = left_out(y, a, lag, image.device)
                if missing is not None:
                    of_border = self._at_border.setdefault(
                        (a, lag), CorrelationByLag(x, same=lag == 0)
                    )
                    of_border.add(with_zeros(P[missing], x), with_zeros(P[missing + shift], x))

    def blocks(self) -> Grams:
        """All pairs of patch rows, from all images that were added."""
        for lag, correlation in enumerate(self._whole):
            whole = correlation.gram()
            for a in range(self._y.kernel - lag):
                taken = self._at_border.get((a, lag))
                yield a, a + lag, whole if taken is None else whole - taken.gram()


class UnfoldedGram(ImageGram):
    """Σ of patch patchᵀ over images that were added, (G, d, d) in the order of `patches`."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._groups = groups

    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch, some images at a time."""
        image = at_least_float32(image)
        row = image.shape[1] * image.element_size()
        for window in axes:
            row *= window.positions * window.kernel
        size = max(1, PATCH_BYTES.get(image.device.type, PATCH_BYTES["cuda"]) // row)
        for some in image.split(size):
            self.add(patches(some, self._groups, *axes).flatten(1, 2))


def _unfold(image: Float[Tensor, "N C H W"], y: Window, x: Window) -> Grams:
    patch_rows = list(_patch_rows(image, y, x))
    patches = patch_rows[0] if y.kernel == 1 else torch.cat(patch_rows, dim=1)
    gram = tall_product(patches, patches)
    gram = gram.view(y.kernel, x.kernel, -1, y.kernel, x.kernel, image.shape[1])
    for a in range(y.kernel):
        for a2 in range(a, y.kernel):
            yield a, a2, gram[a, :, :, a2]


def _pairs(image: Float[Tensor, "N C H W"], y: Window, x: Window) -> Grams:
    patch_rows = list(_patch_rows(image, y, x))
    for a in range(y.kernel):
        for a2 in range(a, y.kernel):
            gram = tall_product(patch_rows[a], patch_rows[a2])
            yield a, a2, gram.view(x.kernel, -1, x.kernel, image.shape[1])


def _rows(image: Float[Tensor, "N C H W"], y: Window, x: Window) -> Grams:
    P = _rows_first(image, y, x)
    if x.padding_mode == "constant":
        P = F.pad(P, (0, 0, x.before, x.after)).contiguous()
    for lag in range(y.kernel):
        shift, same = lag * y.dilation, lag == 0
        upper, lower = P[: max(0, len(P) - shift)].flatten(0, 1), P[shift:].flatten(0, 1)
        whole = unfolded_gram(upper, lower, x, same)
        for a in range(y.kernel - lag):
            gram, missing = whole, left_out(y, a, lag, P.device)
            if missing is not None:
                upper, lower = P[missing].flatten(0, 1), P[missing + shift].flatten(0, 1)
                gram = whole - unfolded_gram(upper, lower, x, same)
            yield a, a + lag, gram


UNFOLDING = {"unfold": _unfold, "pairs": _pairs, "rows": _rows}
"""The ways that compute the blocks of each batch; `ImageCorrelation` has the other two."""

WAYS = (*UNFOLDING, "shifts", "frequencies")


@lru_cache(maxsize=1024)
def cheapest_way(examples: int, channels: int, y: Window, x: Window, device: str) -> str:
    """The way with the fewest multiplications, counting OVERHEAD for each product."""
    width = x.kernel * channels
    positions = examples * y.positions * x.positions
    pairs = y.kernel * (y.kernel + 1) // 2
    products = {  # (rows, columns) of the factors of each product
        "unfold": [(positions, y.kernel * width)],
        "pairs": [(positions, width)] * pairs,
    }
    if y.stride == 1:
        # (number of lines, whether both are the same) of each product of lines
        heights = [max(0, len(y.content) - lag * y.dilation) for lag in range(y.kernel)]
        lines = [(examples * number, lag == 0) for lag, number in enumerate(heights)]
        for lag in range(y.kernel):
            for a in range(y.kernel - lag):
                missing = left_out(y, a, lag, torch.device("cpu"))
                lines += [] if missing is None else [(examples * len(missing), lag == 0)]
        products["rows"] = [(L * x.positions, width) for L, _ in lines]
        if x.stride == 1:
            pixels, frequencies = len(x.content), num_frequencies(x)
            border = [(L * n, channels) for L, same in lines for n in border_pixels(x, same)]
            products["shifts"] = border + [
                (L * (pixels + zeros_behind(x)), channels)
                for L, same in lines
                for _ in lags(x, same)
            ]
            if device == "cpu":  # on an H200 it is faster only from 256 channels on
                transform = 2 * frequencies * pixels * examples * len(y.content) // channels
                products["frequencies"] = [
                    *border,
                    (transform, channels),
                    *[(L * ((3 if same else 4) * frequencies), channels) for L, same in lines],
                ]
    overhead = OVERHEAD.get(device, OVERHEAD["cuda"])
    cost = {
        way: sum(rows * columns**2 + overhead for rows, columns in factors)
        for way, factors in products.items()
    }
    return min(cost, key=lambda way: cost[way])


def _rows_first(image: Float[Tensor, "N C H W"], y: Window, x: Window) -> Float[Tensor, "H N W C"]:
    """The image with its rows first and no padding of zeros, (y.content × x.content).

    It is a view if zeros are padded. The pairs of rows at one lag are two slices of it, and no
    product wastes time on rows of zeros.
    """
    image = image if y.padding_mode == "constant" else pad(image, y, x)
    return image.permute(2, 0, 3, 1)


def _channels_last(
    image: Float[Tensor, "N C H W"], y: Window, x: Window
) -> Float[Tensor, "N Hp Wp C"]:
    """The padded image, channels last."""
    return pad(image, y, x).permute(0, 2, 3, 1).contiguous()


def _patch_rows(
    image: Float[Tensor, "N C H W"], y: Window, x: Window
) -> Iterator[Float[Tensor, "M k2C"]]:
    """Row a of every patch, for each a."""
    P = _channels_last(image, y, x)  # (N, Hp, Wp, C)
    for a in range(y.kernel):
        seen = y.seen(a)
        yield unfold_width(P[:, seen[0] : seen[-1] + 1 : y.stride].flatten(0, 1), x)
