"""The option expand_scaling="examples", the paper's other scaling of expand.

`test_every_layer` compares each layer's block with the definition, and `test_exactness` has a
network for which this scaling is exact.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from kfac_backend import KfacGGN, KroneckerFactors, corrected_factors, kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.optimizer import KfacPreconditioner
from tests.kfac_backend.block_checks import assert_blocks, basis, parts, randomize
from tests.kfac_backend.covariance.posteriors import brute_force, posterior
from tests.kfac_backend.layer_cases import runs
from tests.kfac_backend.layers.padded_models import IGNORED, Padded, batch_of
from tests.kfac_backend.networks import random_model
from tests.oracles import dense_ggn_blocks
from tests.random_numbers import error, normal
from tests.uses import blocks_of_uses, kfac_blocks

SCALED = {"kfac_approx": "expand", "expand_scaling": "examples"}


def tokens():
    """A network that averages the logits of four positions, and its data."""
    model = random_model(
        lambda m, x: m.last(m.first(x).tanh()).mean(1), first=nn.Linear(3, 4), last=nn.Linear(4, 3)
    )
    return model, normal(6, 4, 3), torch.arange(6) % 3


@pytest.mark.parametrize("way", ["counted", "rows"])
def test_examples_of_several_lengths_in_one_pass_or_added_up(way, tmp_path):
    """R is the mean number of positions that count, over all the data."""
    model, batch = randomize(Padded("none", way, head=False)), batch_of(per_position=True)
    options = {**SCALED, "ignore_index": IGNORED}
    expected = blocks_of_uses(
        model, runs(model, batch), "classification", "expand", scaling="examples"
    )
    several = parts(batch, [2, 1])
    factors = kronecker_factors(model, several, "classification", **options)
    assert_blocks(factors, expected)
    one, other = (kronecker_factors(model, [b], "classification", **options) for b in several)
    assert_blocks(one + other, expected)
    factors.save(tmp_path / "factors")
    assert_blocks(KroneckerFactors.load(tmp_path / "factors"), expected)
    default = kronecker_factors(model, several, "classification", **options | DEFAULT)
    assert error(default.to_dense("first.weight"), expected["first.weight"]) > 0.1
    with pytest.raises(ValueError, match="expand_scaling 'examples' and 'positions'"):
        factors + default


DEFAULT = {"expand_scaling": "positions"}


def test_frozen_weights_and_layers_in_reduce_mode_change_nothing():
    model, x, y = tokens()
    expected = kfac_blocks(model, x, "classification", "expand", "examples")
    model.first.weight.requires_grad_(False)
    factors = kronecker_factors(model, [(x, y)], "classification", **SCALED)
    assert_blocks(factors, {name: expected[name] for name in factors.blocks})
    modes = {"kfac_approx": {"first": "reduce", "*": "expand"}, "expand_scaling": "examples"}
    factors = kronecker_factors(model, [(x, y)], "classification", **modes)
    reduce = kfac_blocks(model, x, "classification", "reduce")
    assert_blocks(factors, {"first.bias": reduce["first.bias"]})
    assert_blocks(factors, {"last.weight": expected["last.weight"]})


def step(model, x, y, damping=0.1, **options):
    """Gradients before and after a step of the preconditioner."""
    preconditioner = KfacPreconditioner(
        model, "classification", fisher="exact", damping=damping, factor_every=1, update_every=1,
        kl_clip=None, **options,
    )  # fmt: skip
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    preconditioner.step()
    return before, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("damping_on", ["factors", "product"])
def test_steps_of_training(damping_on):
    """A bias is damped as with the default scaling, of which the product with R takes the place."""
    model, x, y = tokens()
    blocks = kfac_blocks(model, x, "classification", "expand", "examples")
    before, after = step(model, x, y, damping_on=damping_on, **SCALED)
    for name, g in before.items():
        if name.endswith("bias") or damping_on == "product":
            damped = blocks[name] / len(y) + 0.1 * torch.eye(g.numel()).double()
            assert_close(after[name].flatten(), torch.linalg.solve(damped, g.flatten()))
    default = step(model, x, y, kfac_approx="expand", damping_on=damping_on)[1]
    assert error(default["first.bias"], after["first.bias"]) > 0.05
    # Without shared positions both scalings are the same.
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    scaled, default = (
        step(plain, x[:, 0], y, kfac_approx="expand", expand_scaling=scaling)[1]
        for scaling in ("examples", "positions")
    )
    for name, g in default.items():
        assert_close(scaled[name], g)


def test_predictives_corrected_eigenvalues_and_laplace_torch():
    model, x, y = tokens()
    data, blocks = [(x, y)], kfac_blocks(model, x, "classification", "expand", "examples")
    factors = kronecker_factors(model, data, "classification", **SCALED)
    precision, dense = posterior(model, x, **SCALED)
    variance = OutputCovariance(model, precision)(x)[1]
    assert_close(variance, brute_force(model, x, dense))
    # The basis stays, and the eigenvalues are those of the exact block in it.
    exact = dense_ggn_blocks(model, x, "classification")
    for name, block in corrected_factors(factors, model, data).blocks.items():
        Q = basis(block)
        assert_close(block.eigenvalues(), (Q.mT @ exact[name] @ Q).diagonal())
    backend = KfacGGN(model, "classification", **SCALED)
    krons = [backend.kron(x[part], y[part], 6)[1] for part in (slice(2), slice(2, None))]
    assert_close((krons[0] + krons[1]).to_matrix(), torch.block_diag(*blocks.values()))
