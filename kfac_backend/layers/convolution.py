"""Rules of convolutions, whose weight all positions of the kernel share.

Input pixels share the weight of a transposed convolution.
"""

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
"""Shape of a batch by the number of image axes."""


class ImageRule(WeightSharingRule):
    """Rule of layers with a kernel on images (N, C, ...). The pixels are one shared axis."""

    features = 1

    def make_sums(self) -> None:
        """Create A and B as for any weight, with one block per group of the layer."""
        self.groups = self.layer.groups
        super().make_sums()

    def gram(self, of_rows: bool) -> Gram:
        """Return an empty factor over patches: all patches for expand, their sums for reduce."""
        if of_rows or self.mode == "reduce":
            return super().gram(of_rows)
        return PatchGram(self.layer.weight, self.layer.kernel_size, self.groups)

    def add_input(self, use: Use) -> None:
        """Add one use's input, which must have a batch axis."""
        self._check_shape(use.a)
        super().add_input(use)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Return the gradients with features last; a frozen weight's are summed over positions."""
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
    """Rule of nn.Conv1d, 2d and 3d with any stride, padding, dilation, groups and padding mode.

    R is the number of output pixels, d_in = channels per group × kernel, in the order of
    ``weight.flatten(1)``. Sums of patches are box sums (`patch_sums`). `PatchGram` computes their
    Gram matrix by the cheapest of several methods.
    """

    def inputs(self, a: Tensor) -> Tensor:
        """Return (N, C, ...) as patches (G, N, R, d_in)."""
        return patches(a, self.groups, *windows(self.layer, a))

    def input_sums(self, a: Tensor) -> tuple[Tensor, int]:
        """Return sums of patches (G, N, d_in), without making patches, and R."""
        axes = windows(self.layer, a)
        sums = _by_group(patch_sums(at_least_float32(a), *axes), self.groups)
        return sums, math.prod(window.positions for window in axes)

    def add_input_rows(self, a: Tensor) -> int:
        """Add all patches to A; return R."""
        axes = windows(self.layer, a)
        self.A["weight"].gram.add_images(a, *axes)
        return math.prod(window.positions for window in axes)


def _by_group(sums: Float[Tensor, "N C *kernel"], groups: int) -> Float[Tensor, "G N d"]:
    """Return per-channel sums of patches as sums of each group."""
    return sums.flatten(1).unflatten(1, (groups, -1)).movedim(1, 0)


class ConvTransposeRule(ImageRule):
    """Rule of nn.ConvTranspose1d, 2d and 3d with any options.

    The layer multiplies each input pixel q by the weight (C_in, C_out/G, *kernel), and adds the
    result to the output at q·stride − padding + k·dilation. The weight's positions are the R input
    pixels, d_in = C_in/G. A position's output gradient is the patch of the output's gradient that
    the position writes to, d_out = C_out/G × kernel in the order of ``weight.flatten(1)``. It is
    zero where padding crops the output. The weight is stored as (d_in, d_out), so its block is A ⊗
    B. The bias's positions are the output's pixels.
    """

    transposed = True
    same_gradients = False

    @classmethod
    def check(cls, layer: Any) -> None:
        """Refuse an output padding for which the kernel also fits outside of the input."""
        if any(p >= s for p, s in zip(layer.output_padding, layer.stride, strict=True)):
            raise NotImplementedError(
                f"{layer} has an output_padding that is not smaller than its stride. Use a smaller "
                "one, or freeze the layer (requires_grad_(False))."
            )

    def make_sums(self) -> None:
        """Create A and B of the weight, and B of the bias."""
        super().make_sums()
        # Maps the size of an input image to the size of its output. `example_gradients` gets
        # gradients with their pixels in one axis, without this size.
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def inputs(self, a: Tensor) -> Tensor:
        """Return the pixels (G, N, R, d_in) of (N, C_in, ...)."""
        return a.flatten(2).unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2)

    def weight_gradients(self, b: Tensor) -> Float[Tensor, "G M R d_out"]:
        """Return patches of output gradients (M, C_out, ...) that the input's pixels write to."""
        return patches(b, self.groups, *self.axes(b))

    def axes(self, b: Tensor) -> tuple[Window, ...]:
        """Return the kernel's windows on output gradients, as in a convolution of these."""
        layer = self.layer
        of_axes = zip(
            b.shape[2:], layer.kernel_size, layer.stride, layer.dilation, layer.padding, strict=True
        )
        return tuple(Window(*axis, axis[-1], "constant") for axis in of_axes)

    def add_gradient_rows(self, b: Tensor) -> None:
        """Add the patches of output gradients."""
        self.B["weight"].gram.add_images(b, *self.axes(b))

    def weight_gradient_sums(self, b: Tensor) -> Float[Tensor, "G M d_out"]:
        """Return the sums of all patches, without unfolding them."""
        return _by_group(patch_sums(at_least_float32(b), *self.axes(b)), self.groups)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R_out C_out"]:
        """Return the gradients at the output's pixels, for the weight and the bias."""
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
        """Return Σ a ⊗ patch over input pixels (weight) and Σ b over output pixels (bias)."""
        gradients = {}
        if "weight" in self.names:
            # Treat the outputs as examples, so that the pixels form an image again. Its patches are
            # those that each input pixel writes to.
            images = b.permute(0, 2, 3, 1).flatten(0, 1)  # (N·C, C_out, R_out)
            images = images.unflatten(2, self._sizes[tuple(a.shape[2:])])
            by_output = self.weight_gradients(images).unflatten(1, (len(a), -1))
            gradients["weight"] = ExampleGradients(by_output.transpose(2, 3), self.inputs(a))
        if "bias" in self.names:
            gradients["bias"] = ExampleGradients(b[None])
        return gradients
