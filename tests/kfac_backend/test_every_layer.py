"""Each kind of layer: its blocks are those of the definition, whichever way they are computed.

Over the same cases, `test_eigenvalue_correction` and `covariance.test_output_covariance` have
oracles of their own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.conv import _ConvTransposeNd
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.engine.batches import examples
from kfac_backend.optimizer.training_pass import TrainingPass
from kfac_backend.options import CurvatureOptions
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    assert_same,
    batch_of,
    factors_of,
    targets_of,
)
from tests.kfac_backend.layer_cases import CASES, case, runs
from tests.oracles import empirical_fisher_blocks, ggn_blocks, kfac_blocks_from_uses, loss_hessians
from tests.random_numbers import error
from tests.uses import uses_of

ALIKE = {
    "Linear", "scalars", "InstanceNorm2d, running", "BatchNorm1d, no positions", "PReLU, one slope",
    "LayerNorm, as many channels as columns", "LayerNorm in a derived layer",
    "RMSNorm over channels",
    "LayerNorm", "LayerNorm twice", "RMSNorm", "BatchNorm2d", "GroupNorm", "InstanceNorm1d",
    "SyncBatchNorm", "adaptive softmax",
    "PReLU", "PReLU twice", "own parameters", "two norms, one weight", "no rule",
    "Bilinear of what one layer computes",
}  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
    pytest.mark.filterwarnings("ignore:No (K-FAC rule for|hook captures)"),
]


LIKELIHOODS = ("classification", "regression", "bernoulli")


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_those_of_the_definition(name):
    model, x = case(name)
    f = model(x).detach()
    ragged = getattr(model, "ragged", ())
    uses, outputs = uses_of(runs(model, x), dict(model.named_parameters()), ragged)
    assert_close(torch.cat(outputs), f.flatten(0, -2), rtol=1e-12, atol=1e-12)

    def check(likelihood, fisher, y, hessians, exact):
        """What is no linear use (norms, scalars, own parameters) has the exact block."""
        for mode in MODES:
            options = {"kfac_approx": mode, "fisher": fisher, "unsupported": "diagonal"}
            factors = kronecker_factors(model, [batch_of(x, y)], likelihood, **options)
            if name == "no rule":
                exact["layer.weight"] = exact["layer.weight"].diag().diag()
            expected = exact | kfac_blocks_from_uses(uses, hessians, mode)
            assert fisher == "empirical" or set(expected) == set(factors.blocks)
            assert_blocks(factors, expected)

    likelihood = LIKELIHOODS[len(name) % 3]
    exact = ggn_blocks(model, lambda run: run(x), likelihood)
    hessians = loss_hessians(outputs, likelihood)
    check(likelihood, "exact", targets_of(f, likelihood), hessians, exact)
    # The Hessian's place is taken by the label's own gradient, of each loss term apart.
    y, C = targets_of(f), f.shape[-1]
    terms = [f_n.softmax(-1) - F.one_hot(y_n, C) for f_n, y_n in zip(f, y, strict=True)]
    hessians = [[torch.outer(g, g) for g in g_n.reshape(-1, C)] for g_n in terms]
    is_tensor = isinstance(x, torch.Tensor)
    exact = empirical_fisher_blocks(model, x, y, "classification") if is_tensor else {}
    check("classification", "empirical", y, hessians, exact)
    # The paper's other scaling of expand, which changes no exact block.
    for module in model.modules():
        if isinstance(module, _ConvTransposeNd) and module.bias is not None:
            with pytest.raises(NotImplementedError, match="bias of ConvTranspose.*without a bias"):
                scaled_by_examples(model, batch_of(x, y))
            module.bias.requires_grad_(False)
    factors = scaled_by_examples(model, batch_of(x, y))
    expected = exact | kfac_blocks_from_uses(uses, hessians, "expand", "examples")
    assert_blocks(factors, {name: b for name, b in expected.items() if name in factors.blocks})


def scaled_by_examples(model, batch):
    options = {"kfac_approx": "expand", "fisher": "empirical", "unsupported": "diagonal"}
    return kronecker_factors(model, [batch], "classification", expand_scaling="examples", **options)


@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_blocks(name):
    model, x = case(name)
    f = model(x).detach()
    y = targets_of(f)

    def factors(mode, *parts):
        data = [batch_of(examples(x, part), y[part]) for part in parts]
        return kronecker_factors(
            model, data, "classification", kfac_approx=mode, unsupported="diagonal"
        )

    all_of_it = slice(None)
    wholes = {mode: factors(mode, all_of_it) for mode in MODES}
    blocks = {mode: {n: of.to_dense(n) for n in of.blocks} for mode, of in wholes.items()}
    # Negative control: the other mode has other blocks, unless the layer's block is exact in both
    # modes and the head sees one position.
    pairs = [[of[n] for of in blocks.values()] for n in blocks["expand"]]
    assert any(error(*pair) > 1e-3 for pair in pairs) != (name in ALIKE)
    # The rest in one of the modes: the ways do not ask which.
    mode = MODES[len(name) % 2]
    dense = blocks[mode]
    assert any(block.any() for block in dense.values())
    assert_blocks(factors(mode, slice(1), slice(1, None)), dense)  # in two batches
    # In a step of training, whose loss is a mean; parameters without a hook have none there.
    options = CurvatureOptions(kfac_approx=mode, fisher="exact")
    curvature = TrainingPass(model, "classification", options, torch.Generator())
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for parameter, block in curvature.mean_blocks().items():
        expected = dense[parameter] / wholes[mode].num_loss_terms
        assert_close(block.to_dense(), expected, rtol=1e-9, atol=1e-12, msg=parameter)
    curvature.detach()
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())  # none is lent
    model.zero_grad()
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    for parameter, p in model.named_parameters():
        if p.grad is not None:
            assert_close(gradients[parameter], p.grad, rtol=1e-9, atol=1e-12, msg=parameter)
    # What is frozen has no block, and changes no other.
    frozen = list(dense)[:: 2 if len(dense) > 1 else 1][: len(dense) - 1]
    for parameter in frozen:
        model.get_parameter(parameter).requires_grad_(False)
    left = factors(mode, all_of_it)
    assert not set(frozen) & set(left.blocks)
    assert_blocks(left, {n: dense[n] for n in left.blocks})


def test_a_stack_that_takes_a_fast_path_without_gradients():
    model, batch = case("stack of encoder layers")
    expected = factors_of(model, [batch], "reduce")
    with torch.no_grad():
        assert_same(factors_of(model, [batch], "reduce"), expected)
