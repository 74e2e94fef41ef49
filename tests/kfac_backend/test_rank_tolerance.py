"""Columns of the loss Hessian's root that are left out, and the account of them."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.loss import loss_hessian_root
from tests.kfac_backend.networks import data, network
from tests.oracles import kfac_blocks_from_uses, layer_uses


def confident():
    """A network whose predictions are close to certain, for most examples."""
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(40)
    return model


def test_leading_columns_are_those_of_each_example():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    model, (x, y) = model.double(), data(20)
    with torch.no_grad():
        model[-1].weight.mul_(8)
    columns = torch.stack(list(loss_hessian_root(model(x).detach(), "classification")), -1)
    energies = columns.square().sum(1)  # (N, C - 1)
    first_is_enough = energies[:, 1] <= 0.2 * energies.sum(1)
    assert first_is_enough.any() and not first_is_enough.all()
    columns[first_is_enough, :, 1] = 0.0

    factors = kronecker_factors(model, [(x, y)], "classification", rank_tolerance=0.2)
    hessians = [[of_example @ of_example.mT] for of_example in columns]
    for name in ("0", "3"):
        blocks = kfac_blocks_from_uses(layer_uses(model, name, x), hessians, "expand")
        for parameter, block in blocks.items():
            assert_close(factors.to_dense(parameter), block)
    missing = energies[first_is_enough, 1].sum() / energies.sum()
    assert factors.left_out_share == pytest.approx(missing.item())


@pytest.mark.parametrize("batched", [False, True])
def test_predictions_that_are_certain_to_rounding(batched):
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([300.0, 0.0, 0.0]))
    x, y = data()
    factors = kronecker_factors(
        model, [(x.float(), y)], "classification", rank_tolerance=0.1, batched=batched
    )
    assert factors.left_out_share == 0.0
    assert factors.blocks["1.weight"].B.shape == (3, 3) and not factors.blocks["1.weight"].B.any()


def test_what_was_left_out_is_in_the_factors_and_their_file(tmp_path):
    model, (x, y) = confident(), data(20)
    exact = kronecker_factors(model, [(x, y)], "classification")
    assert exact.left_out_share == exact.options.rank_tolerance == 0.0
    factors = kronecker_factors(model, [(x, y)], "classification", rank_tolerance=0.3)
    assert 0 < factors.left_out_share <= 0.3
    p = torch.softmax(model(x).detach(), -1)
    assert factors.trace == pytest.approx((1 - p.square().sum(-1)).sum().item(), rel=1e-10)
    factors.save(tmp_path / "factors.safetensors")
    loaded = KroneckerFactors.load(tmp_path / "factors.safetensors")
    assert loaded.left_out_share == factors.left_out_share
    both = factors + factors
    assert both.left_out_share == pytest.approx(factors.left_out_share)
    with pytest.raises(ValueError, match="rank_tolerance 0.3 and 0.0"):
        factors + exact


def test_fewer_columns_are_fewer_backward_passes():
    model, (x, y) = confident(), data(3)
    passes = []
    for tolerance in (0.0, 0.9):
        curvature = CurvaturePass(model, "classification", rank_tolerance=tolerance)
        curvature.add(x, y)
        vectors = []
        handle = model[-1].register_forward_hook(
            lambda layer, args, output, vectors=vectors: (
                output.register_hook(vectors.append) and None
            )
        )
        curvature.add(x, y)
        handle.remove()
        passes.append(len(vectors))
    assert passes == [2, 1]


@pytest.mark.parametrize("tolerance", [-0.1, 1.0])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(ValueError, match=f"rank_tolerance must be in \\[0, 1\\), not {tolerance}"):
        CurvaturePass(network(), "classification", rank_tolerance=tolerance)


@pytest.mark.parametrize(
    ("likelihood", "fisher"), [("regression", "exact"), ("classification", "mc")]
)
def test_a_tolerance_where_all_vectors_are_alike(likelihood, fisher):
    with pytest.raises(ValueError, match="rank_tolerance=0.1 needs likelihood 'classification'"):
        CurvaturePass(network(), likelihood, fisher=fisher, rank_tolerance=0.1)
