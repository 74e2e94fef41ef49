"""Each rule against the formulas, position by position, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.layers import Bias, Scale
from tests import oracles

MODES = ["expand", "reduce"]

CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "no bias": {"kernel_size": 3, "bias": False},
    "pointwise": {"kernel_size": 1},
    "pointwise, strided": {"kernel_size": 1, "stride": 2, "bias": False},
    "padding": {"kernel_size": 3, "padding": 1},
    "more padding than kernel": {"kernel_size": 2, "padding": 3},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "uneven stride": {"kernel_size": 3, "stride": (1, 3), "padding": (0, 2)},
    "dilation": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "uneven dilation": {"kernel_size": (2, 3), "dilation": (2, 1)},
    "even kernel": {"kernel_size": 2, "stride": 2},
    "even kernel, same": {"kernel_size": 4, "padding": "same"},
    "uneven kernel, same, dilation": {"kernel_size": (2, 3), "padding": "same", "dilation": (3, 2)},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 2, "groups": 4, "bias": False},
    "reflect": {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "replicate", "stride": 2},
    "circular": {"kernel_size": 2, "padding": 1, "padding_mode": "circular", "groups": 2},
    "same, circular": {"kernel_size": 4, "padding": "same", "padding_mode": "circular"},
}


def assert_blocks_match(model, x, likelihood, kfac_approx):
    model, x = model.double(), x.double()
    f = model(x)
    y = f.argmax(-1) if likelihood == "classification" else torch.rand_like(f)
    factors = kronecker_factors(model, [(x, y)], likelihood, kfac_approx=kfac_approx)
    expected = oracles.kfac_blocks(model, x, likelihood, kfac_approx)
    assert expected
    for name, block in expected.items():
        assert_close(factors.to_dense(name), block, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case, kfac_approx):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, **CONVOLUTIONS[case])
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    )
    x = torch.randn(2, 3, 6, 5)
    model(x)
    assert_blocks_match(model, x, "classification", kfac_approx)


@settings(max_examples=15, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2]),
    size=st.tuples(st.integers(5, 7), st.integers(5, 7)),
    kfac_approx=st.sampled_from(MODES),
)
def test_convolution_of_any_shape(kernel, stride, padding, dilation, groups, size, kfac_approx):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 2, kernel, stride, padding, dilation, groups)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 2, *size)
    model(x)
    assert_blocks_match(model, x, "regression", kfac_approx)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [(), (3,), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_linear_with_shared_axes(shared, bias, kfac_approx, likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, bias), nn.Tanh(), nn.Linear(4, 4, bias), nn.Flatten(), nn.LazyLinear(3)
    )
    x = torch.randn(3, *shared, 3)
    model(x)
    assert_blocks_match(model, x, likelihood, kfac_approx)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_outputs_with_several_loss_terms_that_mix_positions(kfac_approx, likelihood):
    class Mix(nn.Module):
        def forward(self, x):
            return torch.tanh(x + 0.5 * x.roll(1, dims=1))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Mix(), nn.Linear(4, 3))
    assert_blocks_match(model, torch.randn(2, 3, 3), likelihood, kfac_approx)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_scalars_have_the_exact_entry(kfac_approx):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), Bias(), nn.ReLU(), Scale(), nn.Conv2d(3, 3, 2), Scale(), Bias(),
        nn.Flatten(), Bias(), nn.LazyLinear(3),
    )  # fmt: skip
    x = torch.randn(4, 2, 5, 4, dtype=torch.float64)
    y = model.double()(x).argmax(-1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    ggn = oracles.dense_ggn_blocks(model, x, "classification")
    scalars = [name for name, p in model.named_parameters() if p.numel() == 1]
    assert len(scalars) == 5
    for name in scalars:
        assert_close(factors.to_dense(name), ggn[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_biases_have_the_exact_block_under_reduce_only(kfac_approx):
    """A bias has one input position, 1, so that reduce sums over positions as the GGN does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    y = model.double()(x).argmax(-1)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    block = oracles.dense_ggn_blocks(model, x, "classification")["0.bias"]
    error = (factors.to_dense("0.bias") - block).norm() / block.norm()
    assert (error < 1e-12) == (kfac_approx == "reduce")
    assert error < 1e-12 or error > 0.1


def test_in_place_activations_change_nothing():
    torch.manual_seed(0)

    def network(inplace):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(inplace), Scale(), nn.ReLU(inplace), nn.Conv2d(3, 3, 2),
            Bias(), nn.ReLU(inplace), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(inplace),
            nn.Linear(4, 3),
        ).double()  # fmt: skip

    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    y = torch.tensor([0, 1, 2])
    for kfac_approx in MODES:
        plain, inplace = (
            kronecker_factors(network(flag), [(x, y)], "classification", kfac_approx=kfac_approx)
            for flag in (False, True)
        )
        for name in plain.blocks:
            assert_close(inplace.to_dense(name), plain.to_dense(name))
        assert_blocks_match(network(True), x, "classification", kfac_approx)
