"""ConvTranspose1d, 2d, 3d against loops over positions, the dense GGN and autograd, in float64."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.layers import Use
from kfac_backend.layers.transposed_convolution import ConvTransposeRule
from kfac_backend.layers.uses import PositionSums
from tests import oracles
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layers.convolution_checks import (
    SIZES,
    PixelsLast,
    assert_blocks_of_convolution,
    network,
)
from tests.kfac_backend.layers.rule_checks import (
    assert_gradients,
    assert_sums,
    some_vectors,
    sums_of,
)
from tests.positions import CONVOLUTIONS, TRANSPOSED
from tests.random_numbers import error, normal

OPTIONS = {
    "plain": {"kernel_size": 2},
    "kernel = stride": {"kernel_size": 2, "stride": 2},
    "stride beyond the kernel": {"kernel_size": 2, "stride": 3},
    "cropped": {"kernel_size": 3, "stride": 2, "padding": 1},
    "cropped more than a kernel": {"kernel_size": 2, "stride": 3, "padding": 2},
    "output padding": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "pixels beyond all patches": {"kernel_size": 1, "stride": 3, "output_padding": 2},
    "output padding of two strides": {"kernel_size": 2, "dilation": 3, "output_padding": 2},
    "output padding beyond the stride": {
        "kernel_size": 2, "stride": 2, "dilation": 4, "output_padding": 3, "padding": 1,
    },
    "groups": {"kernel_size": 2, "groups": 2, "stride": 2, "padding": 1},
    "groups, output padding": {
        "kernel_size": 2, "groups": 2, "dilation": 3, "output_padding": 1, "bias": False,
    },
}  # fmt: skip
UNEVEN = [
    (1, {"kernel_size": (2, 3), "stride": (3, 1), "padding": (0, 1), "output_padding": (2, 0)}),
    (1, {"kernel_size": (3, 1), "dilation": (2, 3), "output_padding": (1, 2)}),
    (2, {"kernel_size": (1, 2, 3), "stride": (1, 3, 2), "padding": (0, 1, 2), "groups": 2}),
]
OF_MORE_AXES = ["cropped", "groups, output padding"]
CASES = {f"1d, {case}": (TRANSPOSED[0], options) for case, options in OPTIONS.items()}
CASES |= {
    f"{n}d, {case}": (TRANSPOSED[n - 1], OPTIONS[case]) for n in (2, 3) for case in OF_MORE_AXES
}
CASES |= {f"uneven {i}": (TRANSPOSED[axis], options) for i, (axis, options) in enumerate(UNEVEN)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_loops_over_positions(case, mode):
    layer_type, options = CASES[case]
    assert_blocks_of_convolution(*network(layer_type(4, 4, **options)), mode)


@st.composite
def layers(draw):
    """A transposed convolution of any options, and the size of an image that it takes."""
    layer_type = draw(st.sampled_from(TRANSPOSED))
    axes = len(SIZES[layer_type])

    def for_each_axis(least, most):
        return draw(st.tuples(*[st.integers(least, most)] * axes))

    kernel, stride, dilation = for_each_axis(1, 3), for_each_axis(1, 3), for_each_axis(1, 4)
    padding, size = for_each_axis(0, 2), for_each_axis(1, 3)
    surplus = tuple(
        draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    options = zip(size, stride, padding, dilation, kernel, surplus, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + o + 1 >= 1 for n, s, p, d, k, o in options))
    groups, bias = draw(st.sampled_from([1, 2])), draw(st.booleans())
    layer = layer_type(2, 4, kernel, stride, padding, surplus, groups, bias, dilation)
    return layer, size


@settings(max_examples=40, deadline=None)
@given(layer=layers(), mode=st.sampled_from(MODES))
def test_any_shape(layer, mode):
    layer, size = layer
    a, vectors = some_vectors(layer, size)
    assert_sums(ConvTransposeRule, layer, mode, a, vectors)
    assert_gradients(ConvTransposeRule, layer, a, vectors, layer)


class Mean(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


@pytest.mark.parametrize(
    ("mode", "options", "end"),
    [
        ("expand", {"kernel_size": 3}, PixelsLast()),  # patches that overlap
        ("reduce", {"kernel_size": 3, "padding": 1}, Mean()),
    ],
    ids=["overlapping patches", "cropped patches"],
)
@pytest.mark.parametrize("layer_type", TRANSPOSED[:2])
def test_exact_only_where_all_positions_are_alike(layer_type, mode, options, end):
    """Negative controls of the cases in which a mode is exact, see `exact_models`."""
    layer = layer_type(3, 2, stride=2, **options)
    model, x = (
        nn.Sequential(CONVOLUTIONS[TRANSPOSED.index(layer_type)](2, 3, 1), layer, end).double(),
        normal(2, 2, 3, 2),
    )
    x = x if layer_type is nn.ConvTranspose2d else x[..., 0]
    data = [(x, torch.zeros_like(model(x)))]
    factors = kronecker_factors(model, data, "regression", kfac_approx=mode)
    exact = oracles.dense_ggn_blocks(model, x, "regression")["1.weight"]
    assert error(factors.to_dense("1.weight"), exact) > 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer_type", TRANSPOSED)
def test_output_size_in_place_of_output_padding(layer_type, mode):
    plain = layer_type(2, 4, 2, stride=3)
    padded = layer_type(2, 4, 2, stride=3, output_padding=2)
    a, vectors = some_vectors(padded, SIZES[layer_type])
    found = sums_of(ConvTransposeRule, plain, mode, a, vectors)
    expected = sums_of(ConvTransposeRule, padded, mode, a, vectors)
    for name in expected:
        assert_close(found[name], expected[name])
    plain, output_size = plain.double(), list(vectors.shape[3:])
    assert_gradients(ConvTransposeRule, plain, a, vectors, lambda a: plain(a, output_size))


def test_an_output_size_that_says_nothing_of_the_inputs_is_named():
    layer = nn.ConvTranspose1d(1, 1, 2, dilation=3, output_padding=2).double()
    a = torch.zeros(1, 1, 4, dtype=torch.float64)
    rule = ConvTransposeRule(layer, "expand", {"weight"})
    rule.add_input(Use(a))
    with pytest.raises(NotImplementedError, match="at least the stride, call it without output_s"):
        rule.add_gradient(Use(a), layer(a, [7]).detach(), PositionSums())
