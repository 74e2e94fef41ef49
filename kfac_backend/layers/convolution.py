"""Convolutions: every position of the kernel on the image shares the weight."""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram.gram import Gram
from kfac_backend.layers.gram.patch_gram import ImageGram, PatchGram, UnfoldedGram
from kfac_backend.layers.gram.window import Window, patch_sums, patches, windows
from kfac_backend.layers.uses import Use
from kfac_backend.layers.weight_sharing import WeightSharingRule
from kfac_backend.precision import at_least_float32

__all__ = ["Conv1dRule", "Conv2dRule", "Conv3dRule", "ImageRule", "new_patch_gram", "one_high"]

SHAPES = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}
"""A batch of images, by their number of axes."""

Axes = tuple[Window, ...]


class ImageRule(WeightSharingRule):
    """A layer with a kernel on images (N, C, ...), whose pixels are one shared axis."""

    features = 1
    separate_axes = False

    @property
    def groups(self) -> int:
        """The layer's groups, each with a block of its own."""
        return self.layer.groups

    def add_input(self, use: Use) -> None:
        """Add one use's input, which must have a batch axis."""
        self._check_shape(use.a)
        super().add_input(use)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """The gradients with features last; summed over positions if the weight is frozen."""
        self._check_shape(use.a)
        return super().position_gradients(use, b)

    def _check_shape(self, a: Tensor) -> None:
        axes = len(self.layer.kernel_size)
        if a.dim() != axes + 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch {SHAPES[axes]}. For one "
                "example add the axis: x[None]."
            )


class ConvolutionRule(ImageRule):
    """A convolution with any stride, padding, dilation, groups and padding mode.

    R is the number of output pixels, d_in = channels per group × kernel, in the order of
    ``weight.flatten(1)``. Means of patches are box sums (`patch_sums`). Their Gram matrix is
    computed in the cheapest of several ways (`new_patch_gram`).
    """

    def image(self, a: Tensor) -> tuple[Tensor, Axes]:
        """The layer's input, and how the kernel meets its axes."""
        return a, windows(self.layer, a)

    def inputs(self, a: Tensor) -> Tensor:
        """(N, C, ...) as patches (G, N, R, d_in)."""
        image, axes = self.image(a)
        return patches(image, self.groups, *axes)

    def mean_inputs(self, a: Tensor) -> tuple[Tensor, int]:
        """Mean patches (G, N, d_in), and R."""
        image, axes = self.image(a)
        R = _num_positions(axes)
        means = patch_sums(at_least_float32(image), *axes) / R  # (N, C, *kernel)
        return means.flatten(1).unflatten(1, (self.groups, -1)).movedim(1, 0), R

    def new_input_gram(self) -> Gram:
        """The Gram matrix of patches for expand, of their means for reduce."""
        if self.by_example:
            return super().new_input_gram()
        return new_patch_gram(self.layer.in_channels, self.layer.kernel_size, self.groups)

    def add_input_gram(self, a: Tensor) -> int:
        """Add all patches to A; returns R."""
        image, axes = self.image(a)
        assert isinstance(self.A.gram, ImageGram)
        self.A.gram.add_images(at_least_float32(image), *axes)
        return _num_positions(axes)


class Conv1dRule(ConvolutionRule):
    """nn.Conv1d, as a convolution of images of height 1."""

    def image(self, a: Tensor) -> tuple[Tensor, Axes]:
        """(N, C, L) as (N, C, 1, L)."""
        return one_high(a, *windows(self.layer, a))


class Conv2dRule(ConvolutionRule):
    """nn.Conv2d; with groups, expand unfolds patches, some examples at a time."""


class Conv3dRule(ConvolutionRule):
    """nn.Conv3d; expand unfolds patches, some examples at a time."""


def new_patch_gram(channels: int, kernel_size: Sequence[int], groups: int) -> ImageGram:
    """An empty Gram matrix of patches, to which ``add_images(image, *axes)`` adds.

    It chooses among several ways for one axis (see `one_high`) or two without groups, and unfolds
    patches otherwise.
    """
    if groups > 1 or len(kernel_size) > 2:
        return UnfoldedGram(groups)
    return PatchGram(channels, (1, *kernel_size)[-2:])


def one_high(a: Float[Tensor, "N C L"], x: Window) -> tuple[Float[Tensor, "N C 1 L"], Axes]:
    """Lines as images of height 1, for a kernel of that height."""
    return a[:, :, None], (Window(1, 1, 1, 1, 0, 0, x.padding_mode), x)


def _num_positions(axes: Axes) -> int:
    """R, over all axes."""
    return math.prod(window.positions for window in axes)
