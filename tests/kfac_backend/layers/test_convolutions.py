"""Convolutions and transposed convolutions: the same properties over one table of cases.

The oracle is loops over positions (`tests.uses`), or autograd, in float64.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend.layers import Rule, Use
from kfac_backend.layers.convolution import ConvolutionRule, ConvTransposeRule
from tests.kfac_backend.block_checks import MODES
from tests.random_numbers import error
from tests.uses import watched

SIZES = {
    nn.Conv1d: (6,),
    nn.Conv2d: (5, 4),
    nn.Conv3d: (2, 3, 2),
    nn.ConvTranspose1d: (4,),
    nn.ConvTranspose2d: (3, 2),
    nn.ConvTranspose3d: (2, 2, 2),
}
TRANSPOSED = [layer_type for layer_type in SIZES if "Transpose" in layer_type.__name__]
RULES = {t: ConvTransposeRule if "Transpose" in t.__name__ else ConvolutionRule for t in SIZES}


def sums_of(rule_type: type[Rule], layer: nn.Module, mode: str, a: Tensor, vectors: Tensor) -> dict:
    """A rule's sums after one batch of inputs (N, ...) with V output gradients (V, N, ...)."""
    rule = rule_type(layer, mode, {name for name, _ in layer.named_parameters()})
    use = Use(a)
    rule.add_input(use)
    for total in rule.A.values():
        total.end()
    for b in vectors:
        rule.add_gradient(use, b)
        for total in rule.B.values():
            total.end()
    groups = {
        n: sums.map(lambda F: F.matrix.view(-1, *F.shape[-2:]))
        for n, sums in rule.block_sums().items()
    }
    return groups  # (G, d, d) each


def sums_by_loops(layer: nn.Module, mode: str, a: Tensor, vectors: Tensor) -> dict:
    """(parameter, group) -> Σ b bᵀ, Σ a aᵀ and the number of its terms."""
    sums: dict = {}
    for n in range(len(a)):
        with watched(dict(layer.named_parameters())) as noted:
            layer(a[n : n + 1])
        for use in noted:
            a_nr, b_nr = use.a, use.rows(vectors[:, n : n + 1])  # (R, d_in) and (V, R, d_out)
            if mode == "reduce":
                a_nr, b_nr = a_nr.mean(0, keepdim=True), b_nr.sum(1, keepdim=True)
            B, A, terms = sums.get(use.key, (0, 0, 0))
            of_b = torch.einsum("vri,vrj->ij", b_nr, b_nr)
            sums[use.key] = B + of_b, A + a_nr.T @ a_nr, terms + len(a_nr)
    return sums


def assert_sums(
    rule_type: type[Rule], layer: nn.Module, mode: str, a: Tensor, vectors: Tensor
) -> None:
    """A rule's sums are those of loops over positions."""
    found = sums_of(rule_type, layer, mode, a, vectors)
    expected = sums_by_loops(layer, mode, a, vectors)
    assert {name for name, _ in expected} == set(found)
    for (name, group), (B, A, terms) in expected.items():
        first, second = found[name].B, found[name].A
        if name == "bias":
            assert second is None
            assert_close(first[group], B, rtol=1e-10, atol=1e-11)
            continue
        if rule_type.transposed:
            first, second = second, first
        assert_close(first[group], B, rtol=1e-10, atol=1e-11)
        assert_close(second[group], A, rtol=1e-10, atol=1e-11)
        assert found[name].num_terms == terms


def assert_gradients(
    rule_type: type[Rule], layer: nn.Module, a: Tensor, vectors: Tensor, f
) -> None:
    """Each example's gradients are autograd's, where f(a) is the layer's output."""
    parameters = dict(layer.named_parameters())
    rule = rule_type(layer, "expand", set(parameters))
    use = Use(a)
    rows = torch.stack([rule.position_gradients(use, b) for b in vectors], 2)
    gradients = rule.example_gradients(a, rows)
    assert set(gradients) == set(parameters)
    equation = "gnrco,gnri->ncgio" if rule_type.transposed else "gnrco,gnri->ncgoi"
    for name, (b, inputs) in gradients.items():
        found = b.sum(2).movedim(0, 2) if inputs is None else torch.einsum(equation, b, inputs)
        for n in range(len(a)):
            for v, vector in enumerate(vectors):
                (expected,) = torch.autograd.grad(
                    f(a[n : n + 1]), parameters[name], vector[n, None]
                )
                assert_close(found[n, v].reshape(expected.shape), expected, rtol=1e-9, atol=1e-11)


def some_vectors(layer: nn.Module, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs (2, C_in, *size), and two gradients (2, 2, C_out, ...) with respect to the output."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, layer.in_channels, *size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        shape = layer.double()(a).shape
    return a, torch.randn(2, *shape, generator=generator, dtype=torch.float64)


@st.composite
def layers(draw, types=tuple(SIZES), groups=(1, 2), kernels=3, sizes=(2, 4)):
    """A layer of any options, and the size of an image that it takes."""
    layer_type = draw(st.sampled_from(types))
    axes = len(SIZES[layer_type])

    def for_each_axis(least, most):
        return draw(st.tuples(*[st.integers(least, most)] * axes))

    kernel, stride, dilation = for_each_axis(1, kernels), for_each_axis(1, 3), for_each_axis(1, 4)
    groups, bias = draw(st.sampled_from(groups)), draw(st.booleans())
    if layer_type in TRANSPOSED:
        padding, size = for_each_axis(0, 2), for_each_axis(1, 3)
        surplus = tuple(draw(st.integers(0, s - 1)) for s in stride)
        options = zip(size, stride, padding, dilation, kernel, surplus, strict=True)
        assume(all((n - 1) * s - 2 * p + d * (k - 1) + o + 1 >= 1 for n, s, p, d, k, o in options))
        return layer_type(2, 4, kernel, stride, padding, surplus, groups, bias, dilation), size
    size, padding = for_each_axis(*sizes), draw(st.sampled_from(["same", "valid", "numbers"]))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        stride, pads = (1,) * axes, [(r + 1) // 2 for r in reach]
    else:
        padding = for_each_axis(0, 2) if padding == "numbers" else padding
        pads = [0] * axes if padding == "valid" else list(padding)
        assume(all(s + 2 * p > r for s, p, r in zip(size, pads, reach, strict=True)))
    # torch's limit of reflect and circular
    assume(all(p < s for p, s in zip(pads, size, strict=True)))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    return layer_type(2, 4, kernel, stride, padding, dilation, groups, bias, mode), size


@settings(max_examples=80, deadline=None)
@given(layer=layers(), mode=st.sampled_from(MODES))
def test_any_shape(layer, mode):
    layer, size = layer
    rule_type = RULES[type(layer)]
    a, vectors = some_vectors(layer, size)
    assert_sums(rule_type, layer, mode, a, vectors)
    assert_gradients(rule_type, layer, a, vectors, layer)


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
    with pytest.raises(NotImplementedError, match="output_padding .* its stride"):
        ConvTransposeRule.check(nn.ConvTranspose1d(1, 1, 2, dilation=3, output_padding=2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.bfloat16), (2, torch.float16)])
@pytest.mark.parametrize("layer_type", SIZES)
def test_half_precision_is_summed_in_float32(layer_type, groups, mode, dtype):
    layer = layer_type(2, 2, 2, groups=groups)
    a, vectors = (t.to(dtype) for t in some_vectors(layer, SIZES[layer_type]))
    found = sums_of(RULES[layer_type], layer, mode, a, vectors)["weight"]
    expected = sums_of(RULES[layer_type], layer, mode, a.double(), vectors.double())["weight"]
    assert found.A.dtype == found.B.dtype == torch.float32
    assert error(found.A.double(), expected.A) < 1e-5
    assert error(found.B.double(), expected.B) < 1e-5
