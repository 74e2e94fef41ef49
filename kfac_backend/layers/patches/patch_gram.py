"""The Gram matrix of an image's patches: expand's A up to its scale.

With P the padded image and (i, j) over the positions of the kernel, the block of the kernel's
offsets (a, b) and (a', b') is Σ_ij P[a + i, b + j] P[a' + i, b' + j]ᵀ. There are three ways to
compute all of these blocks; `cheapest_way` takes the one with the least arithmetic:

- unfold: each patch is a row of one matrix, and one product gives all blocks. It takes any stride,
  groups and number of axes, and is best for few channels and small images.
- shifts, for two axes at stride 1: the products depend on the lags a' − a and b' − b alone, except
  at the border (`line_gram`). Nothing is unfolded.
- frequencies, likewise: all lags along the width from the lines' Fourier transforms, in less than
  half the multiplications. Best for many channels.

For 16 images of WRN-16-4 on one x86-64 core, all layers' patches take 3.2 times as long if all are
unfolded, and 1.4 times without "frequencies".
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import DenseGram, Gram, mirror_upper_half_
from kfac_backend.layers.patches.line_gram import (
    CorrelationByFrequency,
    CorrelationByLag,
    Spectra,
    border_pixels,
    lags,
    left_out,
    num_frequencies,
    with_zeros,
    zeros_behind,
)
from kfac_backend.layers.patches.window import Window, pad
from kfac_backend.precision import at_least_float32

__all__ = ["PatchGram", "cheapest_way"]

OVERHEAD = {"cpu": 2e6, "cuda": 5e8}
"""The cost of starting a matrix product, in multiplications.

The CPU's value was fitted to timings on one x86-64 core (190 cases: 16 images of 4² to 32² pixels
with 1 to 256 channels, kernels of 3² to 7², with and without padding), the GPU's on an H200 to all
ways but "frequencies" (29 cases: 16, 128 and 500 images of 8² to 56² pixels with 3 to 512
channels).
"""

SYMMETRIC = 0.56
"""The share of the multiplications of a Gram matrix that `DenseGram` makes on a CPU."""

PATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Bytes that are unfolded at once, but at least one image.

On a CPU they should fit into the cache: on one x86-64 core 32 volumes of 16×8×16×16 with kernels of
3³ take 0.61 s if all are unfolded at once, and 0.34 s with 16 MiB at a time.
"""


class PatchGram(Gram):
    """Σ of patch patchᵀ over images that were added, (G, d, d) in the order of `patches`.

    Args:
        kernel_size: of each axis.
        groups: G, of channels.
    """

    def __init__(self, kernel_size: tuple[int, ...], groups: int = 1) -> None:
        self._kernel, self._groups = kernel_size, groups
        self._unfolded = DenseGram()
        self._correlations: dict[tuple[Window, Window, str], _ImageCorrelation] = {}

    def add_images(self, image: Float[Tensor, "N C *sizes"], *axes: Window) -> None:
        """Add all patches of a batch of images, whose axes the kernel meets as ``axes`` say."""
        image = at_least_float32(image)
        if len(axes) == 1:  # a line is an image of height 1
            image, axes = image[:, :, None], (Window(1, 1, 1, 1, 0, 0, axes[0].padding_mode), *axes)
        if len(axes) == 2 and self._groups == 1:
            y, x = axes
            way = cheapest_way(len(image), image.shape[1], y, x, image.device.type)
            if way != "unfold":
                # A correlation holds sums of its own, from which blocks are assembled only once.
                # Images of another size need another one.
                if (y, x, way) not in self._correlations:
                    self._correlations[y, x, way] = _ImageCorrelation(y, x, way)
                self._correlations[y, x, way].add(image)
                return
        row = image.shape[1] * image.element_size()
        for window in axes:
            row *= window.positions * window.kernel
        size = max(1, PATCH_BYTES.get(image.device.type, PATCH_BYTES["cuda"]) // row)
        for some in image.split(size):
            self.add(_patch_rows(some, self._groups, axes))

    def add(self, rows: Float[Tensor, "G M kc"]) -> None:
        """Add patches, whose features are in the order (*kernel, channels)."""
        self._unfolded.add(rows)

    def total(self) -> Float[Tensor, "G d d"] | None:
        """The sum so far, features in the order (channels, *kernel); None before any image."""
        total = self._unfolded.total()
        for correlation in self._correlations.values():
            blocks = correlation.total()
            total = blocks if total is None else total + blocks
        if total is None:
            return None
        # (*kernel, c, *kernel, c) -> (c, *kernel, c, *kernel): as in ``weight.flatten(1)``
        G, d, _ = total.shape
        channels, number = d // math.prod(self._kernel), len(self._kernel)
        order = [number, *range(number)]
        apart = total.view(G, *2 * (*self._kernel, channels))
        found = apart.permute(0, *(1 + i for i in order), *(2 + number + i for i in order))
        return found.reshape(G, d, d)


class _ImageCorrelation:
    """The sum over images of their patches' Gram matrix at stride 1, from products of image rows.

    The product of the patches' rows a and a' depends on the lag a' − a alone, except for the image
    rows that the window leaves out at the border, which are summed up separately and subtracted.
    The same holds along the width, see `line_gram`.

    Args:
        y: the axis of the height.
        x: the axis of the width.
        way: "shifts" or "frequencies".
    """

    def __init__(self, y: Window, x: Window, way: str) -> None:
        self._y, self._x, self._way = y, x, way
        correlation = CorrelationByLag if way == "shifts" else CorrelationByFrequency
        self._whole = [correlation(x, same=lag == 0) for lag in range(y.kernel)]
        self._at_border: dict[tuple[int, int], CorrelationByLag] = {}

    def add(self, image: Float[Tensor, "N C H W"]) -> None:
        """Add a batch of images."""
        y, x = self._y, self._x
        # Rows first and without padding of zeros, which is a view: the pairs of rows at one lag are
        # then two slices of it, and no product wastes time on rows of zeros.
        image = image if y.padding_mode == "constant" else pad(image, y, x)
        P = image.permute(2, 0, 3, 1)  # (H, N, W, C)
        padded = with_zeros(P, x) if self._way == "shifts" else None
        spectra = None if padded is not None else Spectra(P, x)
        # Step 1, for each lag along the height: all pairs of rows at that distance, whether the
        # window meets both or not.
        for lag, whole in enumerate(self._whole):
            shift = lag * y.dilation
            upper, lower = slice(0, max(0, len(P) - shift)), slice(shift, None)
            if isinstance(whole, CorrelationByLag):
                assert padded is not None
                whole.add(padded[upper], padded[lower])
            else:
                assert spectra is not None
                whole.add(spectra, P, upper, lower)
            # Step 2: pairs that offset a of the kernel does not meet, subtracted at the end.
            for a in range(y.kernel - lag):
                missing = left_out(y, a, lag, image.device)
                if missing is not None:
                    of_border = self._at_border.setdefault(
                        (a, lag), CorrelationByLag(x, same=lag == 0)
                    )
                    of_border.add(with_zeros(P[missing], x), with_zeros(P[missing + shift], x))

    def total(self) -> Float[Tensor, "1 d d"]:
        """The Gram matrix, features in the order (height, width, channels)."""
        k = self._y.kernel
        grams = [correlation.gram() for correlation in self._whole]  # (k2, C, k2, C) for each lag
        size = grams[0].shape[:2].numel()
        total = grams[0].new_zeros(k, size, k, size)
        for lag, whole in enumerate(grams):
            for a in range(k - lag):
                taken = self._at_border.get((a, lag))
                gram = whole if taken is None else whole - taken.gram()
                total[a, :, a + lag] = gram.view(size, size)
        # Only lags ≥ 0 were computed: the blocks below the diagonal are the transposed ones above.
        found = total.view(1, k * size, k * size)
        mirror_upper_half_(found)
        return found


@lru_cache(maxsize=1024)
def cheapest_way(examples: int, channels: int, y: Window, x: Window, device: str) -> str:
    """The way with the fewest multiplications, counting OVERHEAD for each product."""
    features = y.kernel * x.kernel * channels
    overhead = OVERHEAD.get(device, OVERHEAD["cuda"])
    symmetric = SYMMETRIC if device == "cpu" else 1.0
    positions = examples * y.positions * x.positions
    cost = {"unfold": symmetric * positions * features**2 + overhead}
    if y.stride == x.stride == 1 and None is y.most_positions is x.most_positions:
        # (number of lines, whether both are the same) of each product of lines
        heights = [max(0, len(y.content) - lag * y.dilation) for lag in range(y.kernel)]
        lines = [(examples * number, lag == 0) for lag, number in enumerate(heights)]
        for lag in range(y.kernel):
            for a in range(y.kernel - lag):
                missing = left_out(y, a, lag, torch.device("cpu"))
                lines += [] if missing is None else [(examples * len(missing), lag == 0)]
        pixels, frequencies = len(x.content), num_frequencies(x)
        # the rows of each product, whose factors have a column for each channel
        border = [L * n for L, same in lines for n in border_pixels(x, same)]
        rows = {
            "shifts": border
            + [L * (pixels + zeros_behind(x)) for L, same in lines for _ in lags(x, same)]
        }
        if device == "cpu":  # on an H200 it is faster only from 256 channels on
            transform = 2 * frequencies * pixels * examples * len(y.content) // channels
            products = [L * ((3 if same else 4) * frequencies) for L, same in lines]
            rows["frequencies"] = [*border, transform, *products]
        for way, numbers in rows.items():
            cost[way] = sum(number * channels**2 + overhead for number in numbers)
    return min(cost, key=lambda way: cost[way])


def _patch_rows(
    image: Float[Tensor, "N C *sizes"], groups: int, axes: tuple[Window, ...]
) -> Float[Tensor, "G M kc"]:
    """The patches of all positions, features in the order (*kernel, channels)."""
    # With channels last a patch is copied in long runs, which takes a third of the time.
    P = pad(image, *axes).movedim(1, -1).contiguous()  # (N, *sizes, C)
    N, C = len(P), P.shape[-1] // groups
    of_image, *of_axes, of_channel = P.stride()
    patches = P.as_strided(
        (groups, N, *(w.positions for w in axes), *(w.kernel for w in axes), C),
        (
            C * of_channel,
            of_image,
            *(step * w.stride for step, w in zip(of_axes, axes, strict=True)),
            *(step * w.dilation for step, w in zip(of_axes, axes, strict=True)),
            of_channel,
        ),
    )
    rows = N * math.prod(w.positions for w in axes)
    return patches.reshape(groups, rows, C * math.prod(w.kernel for w in axes))
