"""Convolutions and transposed ones of one to three dimensions against index-by-index positions."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    OTHER,
    assert_blocks,
    randomize,
)
from tests.random_numbers import error, normal
from tests.sharing_convolutions import layer_blocks

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Pixels(nn.Module):
    """One layer; a loss term for each pixel, or one of their mean."""

    def __init__(self, layer: nn.Module, pool: bool):
        super().__init__()
        self.layer, self.pool = layer, pool

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x).tanh()
        return f.flatten(2).mean(-1) if self.pool else f.movedim(1, -1)


@st.composite
def layers(draw):
    """A layer of two input channels, and the size of an image that it takes."""
    dimensions = draw(st.integers(1, 3))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    size, kernel, stride, dilation = numbers(2, 4), numbers(1, 3), numbers(1, 3), numbers(1, 2)
    padding, groups, bias = numbers(0, 2), draw(st.sampled_from([1, 2])), draw(st.booleans())
    if draw(st.booleans()):
        limits = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        extra = tuple(min(e, limit) for e, limit in zip(numbers(0, 2), limits, strict=True))
        layer_class, more = TRANSPOSED[dimensions], (extra, groups, bias, dilation)
        out = [
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1
            for n, s, p, d, k, e in zip(size, stride, padding, dilation, kernel, extra, strict=True)
        ]
    else:
        mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        padding = tuple(min(p, n - 1) for p, n in zip(padding, size, strict=True))
        layer_class, more = CONVOLUTIONS[dimensions], (dilation, groups, bias, mode)
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, s, p, d, k in zip(size, stride, padding, dilation, kernel, strict=True)
        ]
    assume(min(out) > 0 and math.prod(out) <= 40)
    return layer_class(2, 2, kernel, stride, padding, *more), size


@settings(max_examples=40, deadline=None)
@given(layer_and_size=layers(), pool=st.booleans(), mode=st.sampled_from(MODES))
def test_any_convolution(layer_and_size, pool, mode):
    layer, size = layer_and_size
    model, x = randomize(Pixels(layer, pool)), normal(2, 2, *size)
    y = torch.zeros(model(x).shape[:-1], dtype=torch.long)
    expected = layer_blocks(model, "layer", x, "classification", mode)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=mode)
    assert_blocks(factors, expected)


def test_modes_differ():
    for layer_class in (nn.Conv1d, nn.ConvTranspose1d):
        model, x = randomize(Pixels(layer_class(2, 2, 2, 2), True)), normal(2, 2, 4)
        for mode in MODES:
            found = layer_blocks(model, "layer", x, "classification", mode)["layer.weight"]
            other = layer_blocks(model, "layer", x, "classification", OTHER[mode])["layer.weight"]
            assert error(found, other) > 0.1
