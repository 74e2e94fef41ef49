"""Conv1d, Conv2d, Conv3d against loops over positions and autograd, in float64."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kfac_backend.layers.convolution import ConvolutionRule
from kfac_backend.layers.gram import patch_gram
from kfac_backend.layers.gram.patch_gram import PatchGram
from kfac_backend.layers.gram.window import windows
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layers.convolution_checks import (
    SIZES,
    assert_blocks_of_convolution,
    network,
)
from tests.kfac_backend.layers.rule_checks import assert_gradients, assert_sums, some_vectors
from tests.random_numbers import normal

RULES = dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionRule)

LINES = {
    "no bias": {"kernel_size": 3, "bias": False},
    "pointwise, strided": {"kernel_size": 1, "stride": 2},
    "more padding than kernel": {"kernel_size": 2, "padding": 3},
    "stride beyond the kernel": {"kernel_size": 2, "stride": 3},
    "even kernel, same": {"kernel_size": 4, "padding": "same"},
    "same, dilation": {"kernel_size": 2, "padding": "same", "dilation": 3},
    "depthwise": {"kernel_size": 2, "groups": 4, "bias": False},
    "replicate": {"kernel_size": 3, "padding": 2, "padding_mode": "replicate", "stride": 2},
    "same, circular": {"kernel_size": 4, "padding": "same", "padding_mode": "circular"},
}
IMAGES = {
    "plain": {"kernel_size": 3},
    "uneven stride": {"kernel_size": 3, "stride": (1, 3), "padding": (0, 2)},
    "uneven dilation": {"kernel_size": (2, 3), "dilation": (2, 1)},
    "patches side by side": {"kernel_size": 2, "stride": 2},
    "uneven kernel, same, dilation": {"kernel_size": (2, 3), "padding": "same", "dilation": (3, 2)},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "reflect": {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
}
VOLUMES = {
    "uneven": {"kernel_size": (1, 2, 3), "stride": (2, 1, 2), "padding": (1, 0, 2)},
    "same, dilation": {"kernel_size": (2, 1, 2), "padding": "same", "dilation": (3, 1, 2)},
    "groups": {"kernel_size": 2, "groups": 2, "stride": 2, "bias": False},
    "circular": {"kernel_size": 2, "padding": 1, "padding_mode": "circular", "groups": 2},
}
KINDS = zip(RULES, (LINES, IMAGES, VOLUMES), strict=True)
CASES = {
    f"{layer_type.__name__}, {case}": (layer_type, options)
    for layer_type, cases in KINDS
    for case, options in cases.items()
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_loops_over_positions(case, mode):
    layer_type, options = CASES[case]
    assert_blocks_of_convolution(*network(layer_type(4, 4, **options)), mode)


@st.composite
def layers(draw):
    """A convolution of any options, and the size of an image that it takes."""
    layer_type = draw(st.sampled_from([nn.Conv1d, nn.Conv2d, nn.Conv2d, nn.Conv3d]))
    axes = len(SIZES[layer_type])

    def for_each_axis(least, most):
        return draw(st.tuples(*[st.integers(least, most)] * axes))

    kernel, dilation, size = for_each_axis(1, 3), for_each_axis(1, 3), for_each_axis(2, 4)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    stride, padding = (1,) * axes, draw(st.sampled_from(["same", "valid", "numbers"]))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        pads = [(r + 1) // 2 for r in reach]
    else:
        stride = for_each_axis(1, 3)
        padding = for_each_axis(0, 2) if padding == "numbers" else padding
        pads = [0] * axes if padding == "valid" else list(padding)
        assume(all(s + 2 * p > r for s, p, r in zip(size, pads, reach, strict=True)))
    assume(
        all(p < s for p, s in zip(pads, size, strict=True))
    )  # torch's limit of reflect, circular
    groups, bias = draw(st.sampled_from([1, 2])), draw(st.booleans())
    return layer_type(2, 4, kernel, stride, padding, dilation, groups, bias, mode), size


@settings(max_examples=40, deadline=None)
@given(layer=layers(), mode=st.sampled_from(MODES))
def test_any_shape(layer, mode):
    layer, size = layer
    rule_type = RULES[type(layer)]
    a, vectors = some_vectors(layer, size)
    assert_sums(rule_type, layer, mode, a, vectors)
    assert_gradients(rule_type, layer, a, vectors, layer)


@pytest.mark.parametrize("groups", [1, 2])
def test_unfolds_some_images_at_a_time(monkeypatch, groups):
    layer, images = nn.Conv3d(2, 2, 2, padding=1, groups=groups), normal(5, 2, 3, 2, 3)

    def gram(patch_bytes):
        monkeypatch.setitem(patch_gram.PATCH_BYTES, "cpu", patch_bytes)
        added, total = [], PatchGram(layer.kernel_size, groups)
        monkeypatch.setattr(total, "add", lambda rows: added.append(rows.shape[1]))
        total.add_images(images, *windows(layer, images))
        monkeypatch.undo()
        monkeypatch.setitem(patch_gram.PATCH_BYTES, "cpu", patch_bytes)
        total.add_images(images, *windows(layer, images))
        return added, total.total()

    R = 4 * 3 * 4
    one_by_one, some, all_at_once = gram(1), gram(2 * R * 16 * 8 + 1), gram(2**30)
    assert one_by_one[0] == [R] * 5
    assert some[0] == [2 * R, 2 * R, R]
    assert all_at_once[0] == [5 * R]
    assert_close(one_by_one[1], all_at_once[1])
    assert_close(some[1], all_at_once[1])
