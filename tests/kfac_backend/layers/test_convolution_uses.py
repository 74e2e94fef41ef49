"""Convolutions of all kinds: rows of an example, weights used twice, frozen halves, covariances."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers import Use
from kfac_backend.layers.registry import RULES
from kfac_backend.layers.rows import Rows
from kfac_backend.layers.transposed_convolution import ConvTransposeRule
from tests.kfac_backend.block_checks import MODES, assert_blocks
from tests.kfac_backend.covariance.posteriors import brute_force, posterior
from tests.kfac_backend.layers.convolution_checks import SIZES, network
from tests.kfac_backend.layers.rule_checks import assert_sums, some_vectors, sums_of
from tests.oracles import kfac_blocks_from_uses, layer_blocks, layer_uses, loss_hessians
from tests.random_numbers import error, normal


@pytest.mark.parametrize(
    ("mode", "by_roots"), [("expand", True), ("reduce", False), ("reduce", True)]
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer_type", SIZES)
def test_rows_of_an_example(layer_type, groups, mode, by_roots):
    """Two examples of one and three images, and an image that does not count."""
    layer = layer_type(2, 4, 2, stride=2, padding=1, groups=groups)
    rows = Rows((5,), torch.tensor([1, 0, 2, 1, 1]), 2, all_count=False, by_roots=by_roots)
    a, vectors = some_vectors(layer, SIZES[layer_type], N=5)
    assert_sums(RULES[layer_type], layer, mode, a, vectors, rows)


@pytest.mark.parametrize("of_pixels", MODES)
@pytest.mark.parametrize("layer_type", SIZES)
def test_a_mode_for_rows_and_one_for_pixels(layer_type, of_pixels):
    layer = layer_type(2, 4, 3, padding=1, groups=2)
    a, vectors = some_vectors(layer, SIZES[layer_type], N=4)
    rows = Rows((4,), torch.tensor([0, 0, 1, 1]), 2, all_count=True)
    rule_type, mode = RULES[layer_type], {"views": "reduce", "pixels": of_pixels}
    found = sums_of(rule_type, layer, mode, a, vectors, rows)
    views = a.unflatten(0, (2, 2)).mean(1), vectors.unflatten(1, (2, 2)).sum(2)
    expected = sums_of(rule_type, layer, of_pixels, *views)
    for name in expected:
        assert_close(found[name], expected[name])


def uses_of_both(model, x, *layers):
    """Of the weight that two layers share."""
    return [layer_uses(model, name, x)[f"{name}.weight", 0][0] for name in layers]


class Twice(nn.Module):
    """Two layers of other options with one weight."""

    def __init__(self, layer_type, first, second):
        super().__init__()
        self.first = layer_type(2, 2, 2, bias=False, **first)
        self.second = layer_type(2, 2, 2, bias=False, **second)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().flatten(2).mean(2)


OPTIONS_OF_BOTH = {  # R of both is the same, as loops without rows want it
    "convolution": ({"padding": 1}, {"dilation": 2, "padding": 1}),
    "transposed": ({"stride": 2}, {"dilation": 2, "output_padding": 1}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer_type", SIZES)
def test_one_weight_in_layers_of_other_options(layer_type, mode):
    """Both uses are one more shared axis; each is unfolded by its own options."""
    kind = "transposed" if RULES[layer_type] is ConvTransposeRule else "convolution"
    model = Twice(layer_type, *OPTIONS_OF_BOTH[kind]).double()
    x = normal(3, 2, *[2] * len(SIZES[layer_type]))
    factors = kronecker_factors(model, [(x, torch.zeros(3, 2))], "regression", kfac_approx=mode)
    uses = {("first.weight", 0): uses_of_both(model, x, "first", "second")}
    hessians = loss_hessians(list(model(x).detach()), "regression")
    assert_blocks(factors, kfac_blocks_from_uses(uses, hessians, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layer_type", "back", "outputs"),
    [
        (nn.Conv1d, nn.ConvTranspose1d, 6),
        (nn.Conv2d, nn.ConvTranspose2d, 12),
        (nn.Conv3d, nn.ConvTranspose3d, 24),
    ],
)
def test_one_weight_in_a_convolution_and_in_a_transposed_one(layer_type, back, outputs, mode):
    """As in an autoencoder: the nearest Kronecker product of both uses' blocks."""
    encoder, decoder = layer_type(2, 3, 2, bias=False), back(3, 2, 2, bias=False)
    decoder.weight = encoder.weight
    model = nn.Sequential(encoder, nn.Tanh(), decoder, nn.Flatten(), nn.Linear(outputs, 2))
    x = normal(3, 2, 3, *[2] * (len(SIZES[back]) - 1))
    model = model.double()
    factors = kronecker_factors(model, [(x, torch.zeros(3, 2))], "regression", kfac_approx=mode)
    uses = {("0.weight", 0): uses_of_both(model, x, "0", "2")}
    hessians = loss_hessians(list(model(x).detach()), "regression")
    assert_blocks(factors, kfac_blocks_from_uses(uses, hessians, mode))


@pytest.mark.parametrize(
    ("layer_type", "options"),
    [
        (nn.Conv1d, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (nn.Conv1d, {"kernel_size": 2, "groups": 2, "dilation": 2}),
        (nn.Conv3d, {"kernel_size": 2, "padding": (1, 0, 1)}),
        (nn.ConvTranspose1d, {"kernel_size": 3, "stride": 2, "output_padding": 1}),
        (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (nn.ConvTranspose2d, {"kernel_size": 2, "groups": 2, "stride": 2, "padding": 1}),
        (nn.ConvTranspose2d, {"kernel_size": 2, "stride": 2, "dilation": 4, "output_padding": 3}),
        (nn.ConvTranspose3d, {"kernel_size": 2}),
    ],
)
def test_covariance_of_outputs_is_that_of_the_dense_jacobian(layer_type, options):
    model, x = network(layer_type(4, 2, **options))
    blocks, dense = posterior(model, x)
    expected = brute_force(model, x, dense)
    for way in ({"memory": 1}, {"batched": True}):
        covariance = OutputCovariance(model, blocks, **way)
        assert_close(covariance(x)[1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("half", ["2.weight", "2.bias"])
@pytest.mark.parametrize("layer_type", SIZES)
def test_half_frozen_layer(layer_type, half):
    model, x = network(layer_type(4, 2, 2, stride=2, padding=1))
    expected = [layer_blocks(model, "2", x, "classification", mode)[half] for mode in MODES]
    assert error(*expected) > 0.02  # the modes differ
    for name, p in model[2].named_parameters(prefix="2"):
        p.requires_grad_(name == half)
    for mode, block in zip(MODES, expected, strict=True):
        blocks, dense = posterior(model, x, mode)
        assert [name for name in blocks if name.startswith("2.")] == [half]
        data = [(x, torch.arange(3) % 2)]
        factors = kronecker_factors(model, data, "classification", kfac_approx=mode)
        assert_blocks(factors, {half: block})
        assert_close(OutputCovariance(model, blocks)(x)[1], brute_force(model, x, dense))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.bfloat16), (2, torch.float16)])
@pytest.mark.parametrize("layer_type", SIZES)
def test_half_precision_is_summed_in_float32(layer_type, groups, mode, dtype):
    layer = layer_type(2, 2, 2, groups=groups)
    a, vectors = some_vectors(layer, SIZES[layer_type])
    a, vectors = a.to(dtype), vectors.to(dtype)
    found = sums_of(RULES[layer_type], layer, mode, a, vectors)["weight"]
    expected = sums_of(RULES[layer_type], layer, mode, a.double(), vectors.double())["weight"]
    assert found.A.dtype == found.B.dtype == torch.float32
    assert error(found.A.double(), expected.A) < 1e-5
    assert error(found.B.double(), expected.B) < 1e-5


SHAPES = {1: r"\(N, C, L\)", 2: r"\(N, C, H, W\)", 3: r"\(N, C, D, H, W\)"}


@pytest.mark.parametrize("names", [{"weight", "bias"}, {"bias"}])
@pytest.mark.parametrize("layer_type", SIZES)
def test_an_image_without_a_batch_axis_is_named(layer_type, names):
    rule, size = RULES[layer_type](layer_type(2, 2, 2), "reduce", names), SIZES[layer_type]
    needed = SHAPES[len(size)]
    with pytest.raises(ValueError, match=rf"Conv.* got shape \(2, .*; needs a batch {needed}"):
        rule.add_input(Use(torch.zeros(2, *size)))
