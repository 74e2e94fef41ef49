"""Linear layers and scalars against loops over positions, and what surrounds them, in float64."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.layers import Bias, Scale
from tests import oracles
from tests.kfac_backend.block_checks import MODES


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
@pytest.mark.parametrize(
    ("shared", "bias", "likelihood"),
    [
        ((), True, "classification"), ((), False, "bernoulli"), ((3,), True, "bernoulli"),
        ((3,), False, "classification"), ((2, 3), True, "regression"),
        ((1, 2, 2), True, "classification"),
    ],
)  # fmt: skip
def test_linear_with_shared_axes(shared, bias, kfac_approx, likelihood):
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
def test_biases_have_the_exact_block_under_reduce_only(kfac_approx):
    """A bias has one input position, 1, so that reduce sums over positions as the GGN does."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    y = model.double()(x).argmax(-1)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    block = oracles.dense_ggn_blocks(model, x, "classification")["0.bias"]
    error = (factors.to_dense("0.bias") - block).norm() / block.norm()
    assert (error < 1e-12) == (kfac_approx == "reduce")
    assert error < 1e-12 or error > 0.1


def test_in_place_activations_change_nothing():
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


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 4), (6, 2, 3, 2, 4)])
def test_scalars_of_any_shape_are_exact(shape, kfac_approx):
    class Scalars(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bias, self.scale = nn.Linear(4, shape[-1]), Bias(), Scale()
            self.out = nn.Linear(1, 3)

        def forward(self, x):
            h = self.fc(x) if len(shape) > 1 else self.fc(x)[:, 0]
            h = self.scale(torch.tanh(self.bias(h)))
            return self.out(h.reshape(len(x), -1).sum(1, keepdim=True))

    torch.manual_seed(0)
    model = Scalars().double()
    x = torch.randn(6, *shape[1:-1], 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    exact = oracles.dense_ggn_blocks(model, x, "classification")
    for name in ("bias.bias", "scale.scale"):
        assert_close(factors.to_dense(name), exact[name], rtol=1e-10, atol=1e-14)
