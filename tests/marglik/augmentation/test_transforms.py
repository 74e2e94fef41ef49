"""Transforms: what they do at known ranges, and their derivatives in the ranges."""

import math

import pytest
import torch
from torch.testing import assert_close

from marglik.augmentation import Affine, Color, Flip, Noise, TimeShift
from tests.random_numbers import normal

CASES = {
    "affine": (Affine(), (3, 2, 5, 5)),
    "color": (Color(), (3, 3, 4, 4)),
    "grey": (Color("brightness", "contrast"), (3, 1, 4, 4)),
    "flip": (Flip(), (4, 2, 3, 3)),
    "noise": (Noise(), (3, 4)),
    "time": (TimeShift(), (3, 2, 7)),
}


def inputs(name: str):
    transform, shape = CASES[name]
    x = normal(*shape)
    u = 2 * torch.rand(len(x), transform.numbers(x), dtype=torch.float64) - 1
    return transform, x, u


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"flip"}))
def test_range_zero_leaves_inputs_as_they_are(name):
    transform, x, u = inputs(name)
    zero = torch.zeros(len(transform.names), dtype=torch.float64)
    assert_close(transform(x, zero, u), x)
    assert not torch.allclose(transform(x, zero + 0.3, u), x, atol=1e-2)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"flip"}))
def test_derivative_in_the_ranges(name):
    transform, x, u = inputs(name)
    eta = torch.full((len(transform.names),), 0.23, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: transform(x, e, u), eta, eps=1e-6)


def test_quarter_turn_and_move():
    x, one = normal(2, 1, 6, 6), torch.ones(2, 1, dtype=torch.float64)
    quarter = torch.tensor([math.pi / 2], dtype=torch.float64)
    turned = Affine("rotate")(x, quarter, one)
    assert_close(turned, torch.rot90(x, 1, (2, 3)))
    assert_close(Affine("rotate")(x, quarter, -one), torch.rot90(x, -1, (2, 3)))
    moved = Affine("move x")(x, torch.tensor([2 / 6], dtype=torch.float64), one)
    assert_close(moved[..., :-1], x[..., 1:])
    assert_close(moved[..., -1], x[..., -1])  # the border is repeated
    later = TimeShift("shift")(x[:, 0], torch.tensor([2 / 6], dtype=torch.float64), one)
    assert_close(later, moved[:, 0])


def test_colours():
    x, one = normal(2, 3, 2, 2), torch.ones(2, 1, dtype=torch.float64)
    third = torch.tensor([2 * math.pi / 3], dtype=torch.float64)
    assert_close(Color("hue")(x, third, one), x.roll(1, 1))  # a third of the circle
    grey = x.mean(1, keepdim=True).expand_as(x)
    for name in ("hue", "saturation"):
        assert_close(Color(name)(grey, third, one), grey)
    brighter = Color("brightness")(x, third, one)
    assert_close(brighter, x + third)
    contrast = Color("contrast")(x, torch.tensor([math.log(2)], dtype=torch.float64), one)
    assert_close(contrast - contrast.mean((1, 2, 3), keepdim=True),
                 2 * (x - x.mean((1, 2, 3), keepdim=True)))  # fmt: skip


def test_flip_mirrors_every_second_copy():
    transform, x, u = inputs("flip")
    flipped = transform(x, torch.zeros(1), u)
    assert_close(flipped[::2], x[::2])
    assert_close(flipped[1::2], x[1::2].flip(-1))
    assert_close(transform.weights(torch.tensor([0.2]), 4), torch.tensor([1.6, 0.4, 1.6, 0.4]))
    with pytest.raises(ValueError, match="even number of copies, not 3"):
        transform.weights(torch.tensor([0.2]), 3)


def test_noise_has_its_variance():
    noisy = Noise()(torch.zeros(20_000, 2), torch.tensor([0.5]), 2 * torch.rand(20_000, 2) - 1)
    assert_close(noisy.std(0), torch.full((2,), 0.5), rtol=0.02, atol=0.0)


@pytest.mark.parametrize(
    ("transform", "shape", "way_out"),
    [
        (Affine(), (2, 3), "images"),
        (TimeShift(), (2, 1, 3, 3), "signals"),
        (Color("hue"), (2, 1, 3, 3), "Color\\('brightness', 'contrast'\\)"),
    ],
)
def test_wrong_shapes_are_named(transform, shape, way_out):
    x = torch.zeros(shape)
    k = transform.numbers(x)
    with pytest.raises(ValueError, match=way_out):
        transform(x, torch.zeros(len(transform.names)), torch.zeros(2, k))
