"""Corrected eigenvalues against the dense exact blocks, rotated by explicit Kronecker products."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from kfac_backend import (
    KroneckerFactors,
    corrected_factors,
    eigenvalue_correction,
    kronecker_factors,
)
from kfac_backend.blocks.block import CorrectedBlock
from tests import oracles
from tests.kfac_backend.block_checks import MODES, OTHER, basis, batch_of, targets_of
from tests.kfac_backend.layer_cases import CASES, case
from tests.kfac_backend.networks import data, network, random_model
from tests.random_numbers import error, normal

LIKELIHOODS = ("classification", "regression", "bernoulli")
HEAD = nn.Linear(4, 2)


def check(factors: KroneckerFactors, corrected: KroneckerFactors, exact: Mapping[str, Tensor]):
    """Each block against the exact one; returns how far the Kronecker eigenvalues are off."""
    assert list(corrected.blocks) == list(factors.blocks) == list(exact)
    off = []
    for name, block in corrected.blocks.items():
        dense, scale = factors.to_dense(name), float(exact[name].norm()) or 1.0
        if not isinstance(block, CorrectedBlock):  # exact already
            assert block.B is factors.blocks[name].B
            expected = exact[name] if dense.count_nonzero() > len(dense) else exact[name].diag()
            assert_close(block.eigenvalues().sum(), exact[name].trace(), rtol=1e-10, atol=1e-12)
            assert_close(dense if expected.dim() > 1 else dense.diag(), expected)
            continue
        Q = basis(block)
        assert_close(Q.T @ Q, torch.eye(len(Q)).double(), rtol=0, atol=1e-11)
        rotated = Q.T @ dense @ Q
        assert_close(rotated, torch.diag(rotated.diag()), rtol=0, atol=1e-11 * float(dense.norm()))
        expected = (Q.T @ exact[name] @ Q).diag()
        assert_close(block.eigenvalues(), expected, rtol=1e-10, atol=1e-10 * scale)
        assert_close(block.to_dense(), Q @ torch.diag(expected) @ Q.T, rtol=0, atol=1e-10 * scale)
        assert_close(block.eigenvalues().sum(), exact[name].trace(), rtol=1e-10, atol=1e-10 * scale)
        distance = [float((exact[name] - H).norm()) for H in (block.to_dense(), dense)]
        assert distance[0] <= distance[1] + 1e-10 * scale
        off.append(float((rotated.diag() - expected).norm()) / scale)
    return off


def exact_blocks(model: nn.Module, x, likelihood: str, ignored=None) -> dict[str, Tensor]:
    return oracles.ggn_blocks(model, lambda run: run(x), likelihood, ignored)


EXACT = (
    "RMSNorm", "no rule", "PReLU, one slope", "scalars", "LayerNorm in a derived layer",
    "BatchNorm1d, no positions", "SyncBatchNorm",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_the_diagonal_of_the_exact_block(name):
    """In the basis of one of the modes, which is all that they differ in."""
    model, x = case(name)
    kfac_approx = MODES[len(name) // 3 % 2]
    likelihood = LIKELIHOODS[len(name) % 3]
    y = targets_of(model(x).detach(), likelihood)
    batches = [batch_of(x, y)]
    options = {"kfac_approx": kfac_approx, "unsupported": "diagonal"}
    factors = kronecker_factors(model, batches, likelihood, **options)
    exact = exact_blocks(model, batches[0] if isinstance(x, Mapping) else x, likelihood)
    corrected = corrected_factors(factors, model, batches)
    off = check(factors, corrected, exact)
    # Negative control: the Kronecker eigenvalues are others. But of regression all blocks are
    # exact where each layer sees one position and the head is linear.
    assert (max(off) > 1e-5) == (name not in EXACT)
    if name in ("Conv1d", "ConvTranspose1d", "language model", "attention", "graph network"):
        options["kfac_approx"] = OTHER[kfac_approx]
        others = kronecker_factors(model, batches, likelihood, **options)
        others = corrected_factors(others, model, batches).eigenvalues()
        pairs = [
            (values.sort()[0], others[n].sort()[0]) for n, values in corrected.eigenvalues().items()
        ]
        assert any((a - b).norm() > 1e-3 * a.norm() for a, b in pairs)


def several_terms():
    """Logits at each of three positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, normal(5, 3, 2)


@pytest.mark.parametrize("likelihood", [*LIKELIHOODS, oracles.NOISY])
def test_empirical_fisher(likelihood):
    model, x = several_terms()
    y = targets_of(model(x).detach(), likelihood)
    factors = kronecker_factors(model, [(x, y)], likelihood, fisher="empirical")
    exact = oracles.empirical_fisher_blocks(model, x, y, likelihood)
    assert max(check(factors, corrected_factors(factors, model, [(x, y)]), exact)) > 1e-3


def test_monte_carlo_fisher_draws_labels_anew():
    model, (x, y) = network(), data()
    options = {"fisher": "mc", "mc_samples": 150}
    factors = kronecker_factors(model, [(x, y)], "classification", **options)
    generator = torch.Generator().manual_seed(0)
    found = corrected_factors(
        factors, model, [(x, y)], generator=generator, mc_samples=150
    ).eigenvalues()["8.weight"]
    again = corrected_factors(
        factors, model, [(x, y)], generator=generator.manual_seed(0), mc_samples=150
    )
    assert torch.equal(found, again.eigenvalues()["8.weight"])
    Q = basis(again.blocks["8.weight"])
    expected = (Q.T @ exact_blocks(model, x, "classification")["8.weight"] @ Q).diag()
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("product", [1, 300])
def test_little_memory_changes_nothing(product, monkeypatch):
    model, (x, y) = network(), data()
    factors = kronecker_factors(model, [(x, y)], "classification")
    expected = corrected_factors(factors, model, [(x, y)])
    monkeypatch.setattr(eigenvalue_correction, "HELD", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(eigenvalue_correction, "AT_ONCE", {"cpu": product, "cuda": product})
    monkeypatch.setattr(eigenvalue_correction, "LARGEST_PRODUCT", {"cpu": product, "cuda": product})
    batches = [(x[part], y[part]) for part in (slice(5), slice(5, 7))]
    found = corrected_factors(factors, model, batches)
    for name, block in expected.blocks.items():
        assert_close(found.blocks[name].eigenvalues(), block.eigenvalues())


def test_what_does_not_fit_is_said():
    model, (x, y) = network(), data()
    factors = kronecker_factors(model, [(x, y)], "classification")
    with pytest.raises(ValueError, match="read 6 examples, but .* from 7.*read twice"):
        corrected_factors(factors, model, [(x[:6], y[:6])])
    with pytest.raises(ValueError, match="read 0 examples, but the factors are computed from 7"):
        corrected_factors(factors, model, iter([]))
    with pytest.raises(ValueError, match="read 7 examples, but the factors are computed from 14"):
        corrected_factors(2 * factors, model, [(x, y)])
    with pytest.raises(ValueError, match="fisher='exact', but the correction.*fisher='empirical'"):
        corrected_factors(factors, model, [(x, y)], fisher="empirical")
    with pytest.raises(ValueError, match="It belongs to another model"):
        corrected_factors(factors, nn.Linear(2, 3), [(x, y)])


def test_a_weight_that_a_function_uses():
    """The proof finds only with the first batch that it is a layer's."""
    layer = random_model(
        lambda m, x: m.fc(m.first(x).tanh()), first=nn.Linear(3, 4, False), fc=HEAD
    )
    used = random_model(lambda m, x: m.fc(F.linear(x, m.weight).tanh()), fc=HEAD)
    used.weight = nn.Parameter(layer.first.weight.detach().clone())
    x, y = normal(6, 3), torch.arange(6) % 2
    blocks = {}
    for name, model in (("first.weight", layer), ("weight", used)):
        factors = kronecker_factors(model, [(x, y)], "classification")
        corrected = corrected_factors(factors, model, [(x, y)])
        blocks[name] = corrected.to_dense(name)
        assert error(blocks[name], factors.to_dense(name)) > 1e-3
    assert_close(*blocks.values())
