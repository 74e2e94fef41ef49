"""Two-dimensional convolutions: every position of the kernel on the image shares the weight."""

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend.rules.patch_gram import PatchGram
from kfac_backend.rules.patch_sums import patch_sums
from kfac_backend.rules.rule import WeightSharingRule
from kfac_backend.rules.window import pad, windows
from kfac_backend.weight_sharing import GramSum, at_least_float32

__all__ = ["Conv2dRule"]


class Conv2dRule(WeightSharingRule):
    """nn.Conv2d with any stride, padding, dilation, groups and padding mode.

    R = output height × width, d_in = channels per group × kernel height × width, in the order of
    ``weight.flatten(1)``. Patches are unfolded for grouped convolutions only: their means are box
    sums (`patch_sums`), their Gram matrix comes from shifted images (`patch_gram`).
    """

    layer_type = nn.Conv2d
    features = 1

    def inputs(self, a: Tensor) -> Tensor:
        """(N, C, H, W) as patches (G, N, R, d_in)."""
        y, x = self._windows(a)
        patches = F.unfold(
            pad(a, y, x),
            (y.kernel, x.kernel),
            dilation=(y.dilation, x.dilation),
            stride=(y.stride, x.stride),
        )  # (N, C·k1·k2, R)
        by_group = patches.unflatten(1, (self.groups, -1))  # (N, G, d_in, R)
        return by_group.permute(1, 0, 3, 2)

    def mean_inputs(self, a: Tensor) -> Tensor:
        """Mean patches (G, N, d_in)."""
        y, x = self._windows(a)
        sums = patch_sums(at_least_float32(a), y, x)  # (N, C, k1, k2)
        means = sums / (y.positions * x.positions)
        return means.flatten(1).unflatten(1, (self.groups, -1)).movedim(1, 0)

    @property
    def groups(self) -> int:
        """The convolution's groups, each with its own B ⊗ A."""
        return self.layer.groups

    def new_input_gram(self) -> GramSum:
        """By shifted images under expand, unless there are groups."""
        if self.kfac_approx == "expand" and self.groups == 1:
            return PatchGram(self.layer.in_channels, self.layer.kernel_size)
        return super().new_input_gram()

    def add_input_gram(self, a: Tensor) -> int:
        """Add all patches to A; returns R."""
        y, x = self._windows(a)
        if isinstance(self.A, PatchGram):
            self.A.add_images(at_least_float32(a), y, x)
        else:
            super().add_input_gram(a)
        return y.positions * x.positions

    def _windows(self, a: Tensor):
        if a.dim() != 4:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch (N, C, H, W)."
            )
        return windows(self.layer, a)
