"""What convolutions and transposed convolutions are compared with alike."""

import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import assert_batches_do_not_matter, assert_blocks
from tests.oracles import dense_ggn_blocks, layer_blocks
from tests.positions import CONVOLUTIONS
from tests.random_numbers import normal


class PixelsLast(nn.Module):
    """Outputs per pixel, (N, ..., C), of images (N, C, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


SIZES = {
    nn.Conv1d: (6,),
    nn.Conv2d: (5, 4),
    nn.Conv3d: (2, 3, 2),
    nn.ConvTranspose1d: (4,),
    nn.ConvTranspose2d: (3, 2),
    nn.ConvTranspose3d: (2, 2, 2),
}


def network(layer: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """The layer as the third of a network, and images for it."""
    size = SIZES[type(layer)]
    pointwise = CONVOLUTIONS[len(size) - 1](2, layer.in_channels, 1)
    model = nn.Sequential(
        pointwise, nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
    ).double()
    x = normal(3, 2, *size)
    model(x)
    return model, x


def assert_blocks_of_convolution(model: nn.Sequential, x: Tensor, mode: str) -> None:
    """The blocks of layer 2 are those of loops over positions, however the data is batched."""
    y = torch.arange(len(x)) % 2
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=mode)
    assert_blocks(factors, layer_blocks(model, "2", x, "classification", mode))
    if mode == "reduce":  # a bias has one input, 1
        ggn = dense_ggn_blocks(model, x, "classification")
        assert_blocks(factors, {name: ggn[name] for name in ggn if name.endswith("bias")})
    split = [(x[:1], y[:1]), (x[1:], y[1:])]
    assert_batches_do_not_matter(model, split, "classification", mode, factors)
