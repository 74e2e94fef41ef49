"""Blocks with corrected eigenvalues: their algebra, their files, and what cannot be done."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend import KroneckerFactors, corrected_factors, kronecker_factors
from kfac_backend.blocks.block import CorrectedBlock
from tests.kfac_backend.networks import data, network
from tests.random_numbers import normal


@pytest.fixture(scope="module")
def both() -> tuple[KroneckerFactors, KroneckerFactors]:
    """Factors, and the same with corrected eigenvalues."""
    model, batch = network(), data()
    factors = kronecker_factors(model, [batch], "classification")
    return factors, corrected_factors(factors, model, [batch])


def same(first: KroneckerFactors, second: KroneckerFactors) -> None:
    for name in first.blocks:
        assert torch.equal(first.to_dense(name), second.to_dense(name))
        assert type(first.blocks[name]) is type(second.blocks[name])


def test_dense_products_and_eigenvalues(both):
    _, corrected = both
    for block in corrected.blocks.values():
        dense = block.to_dense()
        v = normal(2, block.numel)
        assert_close(block.matvec(v), v @ dense.mT)
        assert_close(block.eigenvalues().sort()[0], torch.linalg.eigvalsh(dense), atol=1e-9, rtol=0)
        eigen = block.decompose()
        inverse = eigen.power_matvec(v, eigen.spectrum(0.3), -1.0)
        expected = torch.linalg.solve(dense + 0.3 * torch.eye(len(dense)).double(), v.mT).mT
        assert_close(inverse, expected)
    assert corrected.num_clipped() == sum(
        b.num_clipped() for b in corrected.blocks.values() if not isinstance(b, CorrectedBlock)
    )


def test_weights_but_no_sums(both):
    factors, corrected = both
    scaled = 0.3 * corrected
    assert scaled.is_corrected
    for name, block in corrected.blocks.items():
        assert_close(scaled.to_dense(name), 0.3 * block.to_dense())
        assert_close(scaled.blocks[name].eigenvalues(), 0.3 * block.eigenvalues())
    for first, second in ((factors, corrected), (corrected, factors), (corrected, corrected)):
        with pytest.raises(ValueError, match="corrected eigenvalues.*correct the sum over all"):
            first + second


def test_damping_is_for_products(both):
    eigen = both[1].blocks["0.weight"].decompose()
    with pytest.raises(ValueError, match="damping=False"):
        eigen.spectrum(0.1, damping=True)
    assert both[0].blocks["0.weight"].decompose().spectrum(0.1, damping=True).min() > 0


def test_files(both, tmp_path):
    _, corrected = both
    corrected.save(tmp_path / "corrected.safetensors")
    loaded = KroneckerFactors.load(tmp_path / "corrected.safetensors")
    same(loaded, corrected)
    assert loaded.is_corrected and loaded.num_data == corrected.num_data
    for name in corrected.blocks:
        assert torch.equal(loaded.eigenvalues()[name], corrected.eigenvalues()[name])
    same(KroneckerFactors.from_state_dict(corrected.state_dict()), corrected)
