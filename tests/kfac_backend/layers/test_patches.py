"""Patch sums and patch Gram matrices, by every way, against unfolded patches in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from kfac_backend.layers import patch_gram
from kfac_backend.layers.patch_gram import PatchGram
from kfac_backend.layers.window import patch_sums, windows
from tests.kfac_backend.layers.test_convolutions import layers

WAYS = ("unfold", "shifts", "frequencies")


def unfolded(layer, a):
    """The patches (N, R, C·k1·k2) of a convolution's input (N, C, H, W), one group."""
    widths = []
    for axis in (1, 0):
        if layer.padding == "valid":
            widths += [0, 0]
        elif layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [layer.padding[axis]] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(a, widths, mode=mode)
    return F.unfold(
        padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride
    ).transpose(1, 2)


def possible(way, layer):
    """Whether the way can take the layer's strides."""
    y, x = layer.stride
    return way == "unfold" or y == x == 1


def gram(layer, images, way, monkeypatch):
    """The Gram matrix of all images' patches, by one way alone."""
    monkeypatch.setattr(patch_gram, "cheapest_method", lambda *a: way)
    total = PatchGram(layer.weight.double(), layer.kernel_size)
    for image in images:
        total.add_images(image, *windows(layer, image))
    return total.total()[0]


def assert_equal(found, expected):
    assert (found - expected).norm() <= 1e-12 * expected.norm()


SEEN_BY_NO_WINDOW = nn.Conv2d(2, 4, (3, 1), padding="same", dilation=(2, 1)), (4, 4)
"""No line of the image is seen by all windows."""


@settings(max_examples=60, deadline=None)
@given(
    drawn=layers((nn.Conv2d,), groups=(1,), kernels=4, sizes=(4, 9)), channels_last=st.booleans()
)
@example(SEEN_BY_NO_WINDOW, False)
def test_any_geometry(drawn, channels_last):
    layer, size = drawn
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(n, 2, *size, dtype=torch.float64, generator=generator) for n in (2, 1)]
    if channels_last:
        images = [image.contiguous(memory_format=torch.channels_last) for image in images]
    patches = torch.cat([unfolded(layer, image) for image in images])  # (N, R, d)

    sums = torch.cat([patch_sums(image, *windows(layer, image)) for image in images])
    assert_equal(sums.flatten(1), patches.sum(1))
    rows = patches.flatten(0, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Patches of some images at a time, or of all.
        monkeypatch.setitem(patch_gram.PATCH_BYTES, "cpu", 1 if channels_last else 2**30)
        for way in WAYS:
            if possible(way, layer):
                assert_equal(gram(layer, images, way, monkeypatch), rows.T @ rows)


@pytest.mark.parametrize("way", ["shifts", "frequencies"])
def test_borders_matter(way, monkeypatch):
    """Negative control: with nothing left out at the border the blocks are wrong."""
    layer = nn.Conv2d(2, 2, 3, padding=1)
    image = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    patches = unfolded(layer, image).flatten(0, 1)
    monkeypatch.setattr(patch_gram, "_border", lambda *a: patch_gram._Border({}, ()))
    wrong = gram(layer, [image], way, monkeypatch)
    assert (wrong - patches.T @ patches).norm() > 0.05 * (patches.T @ patches).norm()


def test_frequencies_round_as_shifts_do(monkeypatch):
    """In float32, with a mean far from zero, as after a ReLU."""
    layer = nn.Conv2d(16, 2, 3, padding=1)
    image = torch.randn(4, 16, 32, 32, dtype=torch.float64).relu() + 1
    exact = unfolded(layer, image).flatten(0, 1)
    exact = exact.T @ exact
    errors = {
        way: (gram(layer, [image.float()], way, monkeypatch) - exact).norm() / exact.norm()
        for way in WAYS
    }
    assert errors["frequencies"] < 1e-6 and errors["frequencies"] < 5 * errors["shifts"], errors
