"""Two-dimensional convolutions: every position of the kernel on the image shares the weight.

The plain way, by unfolding every patch. It stays as the oracle of faster ones.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend.rules.rule import WeightSharingRule

__all__ = ["Conv2dRule", "pad_input"]


class Conv2dRule(WeightSharingRule):
    """nn.Conv2d with any stride, padding, dilation, groups and padding mode.

    R = output height × width, d_in = channels per group × kernel height × width, in the order of
    ``weight.flatten(1)``.
    """

    layer_type = nn.Conv2d

    def inputs(self, layer: nn.Conv2d, a: Tensor) -> Tensor:
        """(N, C, H, W) as patches (G, N, R, d_in)."""
        if a.dim() != 4:
            raise ValueError(f"{layer} got shape {tuple(a.shape)}; needs a batch (N, C, H, W).")
        patches = F.unfold(
            pad_input(layer, a), layer.kernel_size, dilation=layer.dilation, stride=layer.stride
        )  # (N, C·k1·k2, R)
        by_group = patches.unflatten(1, (layer.groups, -1))  # (N, G, d_in, R)
        return by_group.permute(1, 0, 3, 2)

    def output_gradients(self, layer: nn.Conv2d, b: Tensor) -> Tensor:
        """(N, C_out, H_out, W_out) as (N, R, C_out)."""
        return b.flatten(2).transpose(1, 2)

    def groups(self, layer: nn.Conv2d) -> int:
        """The convolution's groups, each with its own B ⊗ A."""
        return layer.groups


def pad_input(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """The input as the kernel sees it, padded in the layer's own mode: (N, C, H + ..., W + ...)."""
    widths: list[int] = []
    # F.pad wants the last axis first.
    for axis in (1, 0):
        if layer.padding == "valid":
            before, after = 0, 0
        elif layer.padding == "same":
            # PyTorch puts the odd one at the end.
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = int(layer.padding[axis])
        widths += [before, after]
    if not any(widths):
        return a
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(a, widths, mode=mode)
