"""J Σ Jᵀ of all kinds of layers against a dense Jacobian, and a dense Σ of the factors' blocks."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers.gram import gram
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layer_cases import CASES, case
from tests.kfac_backend.layers.padded_models import MASK


def posterior(model: nn.Module, x, **options):
    """Blocks of the posterior precision, and the same densely, by parameter."""
    y = torch.arange(len(MASK) if isinstance(x, Mapping) else len(x)) % 2
    data = [x if isinstance(x, Mapping) else (x, y)]
    factors = kronecker_factors(model, data, "classification", unsupported="diagonal", **options)
    blocks, dense = {}, {}
    for i, (name, block) in enumerate(factors.blocks.items()):
        eigen, delta = block.decompose(), 0.1 + 0.05 * i
        blocks[name] = eigen, eigen.spectrum(delta)
        dense[name] = factors.to_dense(name) + delta * torch.eye(block.numel).double()
    return blocks, dense


def brute_force(model: nn.Module, x, dense: dict[str, Tensor]) -> dict[str, Tensor]:
    """J (precision)⁻¹ Jᵀ (N, C, C) of each parameter."""
    parameters = {name: model.get_parameter(name).detach() for name in dense}
    with sdpa_kernel(SDPBackend.MATH):
        jacobians = jacrev(lambda p: functional_call(model, p, (x,), tie_weights=True))(parameters)
    J = {name: jacobian.flatten(2).detach() for name, jacobian in jacobians.items()}  # (N, C, P)
    return {name: J[name] @ torch.linalg.solve(dense[name], J[name].mT) for name in dense}


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_jacobian(name, kfac_approx):
    model, x = case(name)
    blocks, dense = posterior(model, x, kfac_approx=kfac_approx)
    parts = brute_force(model, x, dense)
    expected = sum(parts.values())
    wrong = {n: (eigen, spectrum.flip(-2, -1)) for n, (eigen, spectrum) in blocks.items()}
    few_bytes = {"expand": {}, "reduce": {"memory": 1}}[kfac_approx]
    some_bytes = {"expand": {}, "reduce": {"memory": 3_000}}[kfac_approx]
    for options in (few_bytes, {"batched": True, **some_bytes}):
        f, covariance = OutputCovariance(model, blocks, **options)(x)
        assert_close(f, model(x).detach())
        assert_close(covariance, expected, rtol=1e-9, atol=1e-11)
    # Negative control: eigenvalues that belong to other eigenvectors.
    difference = OutputCovariance(model, wrong)(x)[1] - expected
    assert difference.norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_parameters_without_a_block_are_constants(name):
    model, x = case(name)
    blocks, dense = posterior(model, x)
    parts = brute_force(model, x, dense)
    for start, batched in ((0, False), (1, True)):
        some = dict(list(blocks.items())[start::2])
        if some:
            covariance = OutputCovariance(model, some, batched=batched)(x)[1]
            expected = sum(parts[name] for name in some)
            assert_close(covariance, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["LayerNorm twice", "BatchNorm2d", "own parameters"])
def test_large_elementwise_parameters(monkeypatch, name):
    monkeypatch.setattr(gram, "LARGEST_DENSE", 1)
    model, x = case(name)
    blocks, dense = posterior(model, x)
    assert any(len(eigen.Q_B) > 1 == eigen.Q_B.shape[-1] for eigen, _ in blocks.values())
    expected = sum(brute_force(model, x, dense).values())
    for batched in (False, True):
        covariance = OutputCovariance(model, blocks, batched=batched)(x)[1]
        assert_close(covariance, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rows", MODES)
@pytest.mark.parametrize("space", MODES)
def test_factors_with_a_mode_for_each_axis(rows, space):
    model, x = case("rows of images")
    mapping = {"layer": {"rows": rows, "space": space}, "head": "expand"}
    blocks, dense = posterior(model, x, kfac_approx=mapping)
    expected = sum(brute_force(model, x, dense).values())
    assert_close(OutputCovariance(model, blocks)(x)[1], expected, rtol=1e-9, atol=1e-11)


def test_a_graph_without_edges_alone():
    model, batch = case("graphs")
    blocks, dense = posterior(model, batch)
    expected = sum(brute_force(model, batch, dense).values())
    alone = {key: value[2:] for key, value in batch.items()}
    assert not alone["edges"].any()
    for batched in (False, True):
        covariance = OutputCovariance(model, blocks, batched=batched)
        assert_close(covariance(alone)[1], expected[2:], rtol=1e-9, atol=1e-11)
        assert_close(covariance(batch)[1], expected, rtol=1e-9, atol=1e-11)
        assert_close(covariance(alone)[1], expected[2:], rtol=1e-9, atol=1e-11)
