"""Wide residual network without normalisation layers (WRN with Fixup)."""

import math

from torch import Tensor, nn
from torch.nn.functional import relu

from kfac_backend.layers import Bias, Scale
from kfac_backend.options import check_positive


class FixupBlock(nn.Module):
    """Pre-activation residual block of two 3×3 convolutions, zero at initialisation.

    With h = ReLU(bias1(x)), the block returns ``shortcut + bias4(scale(conv2(bias3(ReLU(bias2(
    conv1(h)))))))``. The shortcut is x itself, or a 1×1 convolution of h if the number of channels
    or the resolution changes.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization" (rules 1 to 3), in the pre-activation
    order of Zagoruyko & Komodakis 2016.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the output.
        stride: stride of ``conv1`` and of the shortcut.
        num_blocks: number L of residual blocks in the whole network.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, num_blocks: int) -> None:
        super().__init__()
        self.bias1 = Bias()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bias2 = Bias()
        self.bias3 = Bias()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.scale = Scale()
        self.bias4 = Bias()
        self.shortcut = (
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            if in_channels != out_channels or stride != 1
            else None
        )
        # Scale by L^(-1/(2m-2)), m = 2 layers in a branch: updates of L branches sum to O(1).
        nn.init.normal_(self.conv1.weight, std=_he_std(self.conv1) * num_blocks**-0.5)
        # Start at zero, so that each block is its shortcut and gradients keep their size.
        nn.init.zeros_(self.conv2.weight)
        if self.shortcut is not None:
            nn.init.normal_(self.shortcut.weight, std=_he_std(self.shortcut))

    def residual(self, activated: Tensor) -> Tensor:
        """Return the residual branch (N, C', H', W') of h = ReLU(bias1(x)), (N, C, H, W)."""
        hidden = self.bias3(relu(self.bias2(self.conv1(activated))))
        return self.bias4(self.scale(self.conv2(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        """Return shortcut + residual branch, (N, C', H', W'), of inputs (N, C, H, W)."""
        activated = relu(self.bias1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        return shortcut + self.residual(activated)


class WideResNetFixup(nn.Module):
    """Wide residual network with Fixup instead of batch normalisation, which returns logits.

    Batch normalisation makes the loss of an example depend on other examples of its batch. The
    curvature is then not a sum over examples. Fixup makes networks of this depth trainable without
    batch normalisation. WRN-16-4 for ten classes has 2,745,306 parameters in 50 tensors. At
    initialisation all logits are zero.

    Sources: Zagoruyko & Komodakis 2016, "Wide Residual Networks"; Zhang, Dauphin & Ma 2019, "Fixup
    Initialization: Residual Learning Without Normalization". With k×k kernels and L blocks:
    conv1 ~ N(0, 2/(k² C_out) / L), shortcut ~ N(0, 2/(k² C_out)), conv2 = 0, fc = 0. The first
    convolution has PyTorch's default initialisation, as in Daxberger et al. 2021.

    Args:
        depth: number of layers, 6 n + 4 for n blocks in each of the three stages (10, 16, 22, 28,
            40, ...).
        widen_factor: factor on the number of channels of the stages, which are 16, 32 and 64.
        num_classes: number C of classes.
        in_channels: number of channels of the images.

    Raises:
        ValueError: ``depth`` is not 6 n + 4, or another argument is below 1.
    """

    def __init__(
        self,
        depth: int = 16,
        widen_factor: int = 4,
        num_classes: int = 10,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 != 0:
            raise ValueError(
                f"depth={depth} is not supported. A wide residual network has 6 n + 4 layers, with "
                "n >= 1 blocks in each of its three stages. Choose 10, 16, 22, 28, 34, 40, ..."
            )
        check_positive("widen_factor", widen_factor)
        check_positive("num_classes", num_classes)
        check_positive("in_channels", in_channels)
        n = (depth - 4) // 6
        widths = [16, 16 * widen_factor, 32 * widen_factor, 64 * widen_factor]
        self.conv = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bias = Bias()
        self.stage1 = _stage(widths[0], widths[1], n, stride=1)
        self.stage2 = _stage(widths[1], widths[2], n, stride=2)
        self.stage3 = _stage(widths[2], widths[3], n, stride=2)
        self.bias_out = Bias()
        self.fc = nn.Linear(widths[3], num_classes)
        # Start with zero logits, so that the first loss is log C for any depth.
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of images (N, in_channels, H, W)."""
        x = self.bias(self.conv(x))  # (N, 16, H, W)
        # Each stage doubles the channels; the second and third halve the resolution.
        x = self.stage3(self.stage2(self.stage1(x)))  # (N, 64 widen_factor, H/4, W/4)
        x = relu(x).mean(dim=(2, 3))  # (N, 64 widen_factor)
        return self.fc(self.bias_out(x))


def _stage(in_channels: int, out_channels: int, n: int, stride: int) -> nn.Sequential:
    """Return a stage of n blocks. The first block changes the channels and the resolution."""
    first = FixupBlock(in_channels, out_channels, stride, num_blocks=3 * n)
    others = [FixupBlock(out_channels, out_channels, 1, num_blocks=3 * n) for _ in range(n - 1)]
    return nn.Sequential(first, *others)


def _he_std(convolution: nn.Conv2d) -> float:
    """Return √(2 / (k² C_out)), the He initialisation that preserves the gradient's variance."""
    return math.sqrt(2 / (math.prod(convolution.kernel_size) * convolution.out_channels))
