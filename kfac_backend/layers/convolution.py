"""Convolutions: all positions of the kernel share the weight; if transposed, all input pixels."""

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import Gram
from kfac_backend.layers.patch_gram import PatchGram
from kfac_backend.layers.rule import ExampleGradients, Use
from kfac_backend.layers.weight_sharing import WeightSharingRule
from kfac_backend.layers.window import Window, patch_sums, patches, windows
from kfac_backend.precision import at_least_float32

SHAPES = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}
"""A batch of images, by their number of axes."""


class ImageRule(WeightSharingRule):
    """A layer with a kernel on images (N, C, ...), whose pixels are one shared axis."""

    features = 1

    def make_sums(self) -> None:
        """As of any weight; the layer's groups have a block each."""
        self.groups = self.layer.groups
        super().make_sums()

    def gram(self, of_rows: bool) -> Gram:
        """The weight's columns are patches: all of them for expand, their sums for reduce."""
        if of_rows or self.mode == "reduce":
            return super().gram(of_rows)
        return PatchGram(self.layer.weight, self.layer.kernel_size, self.groups)

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
                f"{self.layer} got shape {tuple(a.shape)}, but needs a batch {SHAPES[axes]}. For "
                "one example add the axis: x[None]."
            )


class ConvolutionRule(ImageRule):
    """nn.Conv1d, 2d and 3d with any stride, padding, dilation, groups and padding mode.

    R is the number of output pixels, d_in = channels per group × kernel, in the order of
    ``weight.flatten(1)``. Sums of patches are box sums (`patch_sums`). Their Gram matrix is
    computed in the cheapest of several ways (`PatchGram`).
    """

    def inputs(self, a: Tensor) -> Tensor:
        """(N, C, ...) as patches (G, N, R, d_in)."""
        return patches(a, self.groups, *windows(self.layer, a))

    def input_sums(self, a: Tensor) -> tuple[Tensor, int]:
        """Sums of patches (G, N, d_in) without a patch, and R."""
        axes = windows(self.layer, a)
        sums = _by_group(patch_sums(at_least_float32(a), *axes), self.groups)
        return sums, math.prod(window.positions for window in axes)

    def add_input_rows(self, a: Tensor) -> int:
        """Add all patches to A; returns R."""
        axes = windows(self.layer, a)
        self.A["weight"].gram.add_images(a, *axes)
        return math.prod(window.positions for window in axes)


def _by_group(sums: Float[Tensor, "N C *kernel"], groups: int) -> Float[Tensor, "G N d"]:
    """Sums of patches, channel by channel, as those of each group."""
    return sums.flatten(1).unflatten(1, (groups, -1)).movedim(1, 0)


class ConvTransposeRule(ImageRule):
    """nn.ConvTranspose1d, 2d and 3d with any stride, padding, output padding, dilation and groups.

    Each input pixel q is multiplied by the weight (C_in, C_out/G, *kernel), and the result is added
    to the output at q·stride − padding + k·dilation. The weight's positions are the R input pixels,
    d_in = C_in/G. The output gradient of a position is the patch of the output's gradient that it
    writes to, d_out = C_out/G × kernel in the order of ``weight.flatten(1)``, and zero where
    padding crops the output. The weight is stored inputs first, so its block is A ⊗ B. The bias's
    positions are the output's pixels.
    """

    transposed = True
    same_gradients = False

    @classmethod
    def check(cls, layer: Any) -> None:
        """Refuse padding by which the kernel also fits where there is no input pixel."""
        if any(p >= s for p, s in zip(layer.output_padding, layer.stride, strict=True)):
            raise NotImplementedError(
                f"{layer} has an output_padding that is not smaller than its stride. Use a smaller "
                "one, or freeze the layer (requires_grad_(False))."
            )

    def make_sums(self) -> None:
        """A and B of the weight; of the bias B alone."""
        super().make_sums()
        # Size of an input image -> size of its output. Gradients come to `example_gradients`
        # without it, with their pixels in one axis.
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def inputs(self, a: Tensor) -> Tensor:
        """The pixels (G, N, R, d_in) of (N, C_in, ...)."""
        return a.flatten(2).unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2)

    def weight_gradients(self, b: Tensor) -> Float[Tensor, "G M R d_out"]:
        """The patches of output gradients (M, C_out, ...) that the input's pixels write to."""
        return patches(b, self.groups, *self.axes(b))

    def axes(self, b: Tensor) -> tuple[Window, ...]:
        """How the kernel meets the axes of output gradients, as if they were convolved."""
        layer = self.layer
        of_axes = zip(
            b.shape[2:], layer.kernel_size, layer.stride, layer.dilation, layer.padding, strict=True
        )
        return tuple(Window(*axis, axis[-1], "constant") for axis in of_axes)

    def add_gradient_rows(self, b: Tensor) -> None:
        """Add the patches of output gradients."""
        self.B["weight"].gram.add_images(b, *self.axes(b))

    def weight_gradient_sums(self, b: Tensor) -> Float[Tensor, "G M d_out"]:
        """The sums of all patches, without unfolding them."""
        return _by_group(patch_sums(at_least_float32(b), *self.axes(b)), self.groups)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R_out C_out"]:
        """The gradients at the output's pixels, from which those of both parameters follow."""
        inputs, outputs = tuple(use.a.shape[2:]), tuple(b.shape[2:])
        if self._sizes.setdefault(inputs, outputs) != outputs:
            raise NotImplementedError(
                f"{self.layer} returns outputs of sizes {self._sizes[inputs]} and {outputs} from "
                f"inputs of size {inputs}. Covariances support one output_size. Use separate "
                "layers."
            )
        return super().position_gradients(use, b)

    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R_out C C_out"]
    ) -> dict[str, ExampleGradients]:
        """Σ a ⊗ patch over input pixels for the weight, Σ b over output pixels for the bias."""
        gradients = {}
        if "weight" in self.names:
            # The outputs become examples, so that the pixels can be read as an image again, and its
            # patches are those that each input pixel writes to.
            images = b.permute(0, 2, 3, 1).flatten(0, 1)  # (N·C, C_out, R_out)
            images = images.unflatten(2, self._sizes[tuple(a.shape[2:])])
            by_output = self.weight_gradients(images).unflatten(1, (len(a), -1))
            gradients["weight"] = ExampleGradients(by_output.transpose(2, 3), self.inputs(a))
        if "bias" in self.names:
            gradients["bias"] = ExampleGradients(b[None])
        return gradients
