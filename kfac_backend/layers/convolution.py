"""Convolutions: every position of the kernel on the image shares the weight."""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram.gram import Gram
from kfac_backend.layers.gram.patch_gram import PatchGram
from kfac_backend.layers.gram.window import Window, patch_sums, patches, windows
from kfac_backend.layers.uses import Use
from kfac_backend.layers.weight_sharing import WeightSharingRule
from kfac_backend.precision import at_least_float32

__all__ = ["ConvolutionRule", "ImageRule"]

SHAPES = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}
"""A batch of images, by their number of axes."""


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
    """nn.Conv1d, 2d and 3d with any stride, padding, dilation, groups and padding mode.

    R is the number of output pixels, d_in = channels per group × kernel, in the order of
    ``weight.flatten(1)``. Means of patches are box sums (`patch_sums`). Their Gram matrix is
    computed in the cheapest of several ways (`PatchGram`).
    """

    def inputs(self, a: Tensor) -> Tensor:
        """(N, C, ...) as patches (G, N, R, d_in)."""
        return patches(a, self.groups, *windows(self.layer, a))

    def mean_inputs(self, a: Tensor) -> tuple[Tensor, int]:
        """Mean patches (G, N, d_in), and R."""
        axes = windows(self.layer, a)
        R = _num_positions(axes)
        means = patch_sums(at_least_float32(a), *axes) / R  # (N, C, *kernel)
        return means.flatten(1).unflatten(1, (self.groups, -1)).movedim(1, 0), R

    def new_input_gram(self) -> Gram:
        """The Gram matrix of patches for expand, of their means for reduce."""
        if self.by_example:
            return super().new_input_gram()
        return PatchGram(self.layer.kernel_size, self.groups)

    def add_input_gram(self, a: Tensor) -> int:
        """Add all patches to A; returns R."""
        axes = windows(self.layer, a)
        assert isinstance(self.A.gram, PatchGram)
        self.A.gram.add_images(a, *axes)
        return _num_positions(axes)


def _num_positions(axes: Sequence[Window]) -> int:
    """R, over all axes."""
    return math.prod(window.positions for window in axes)
