"""What is done otherwise with several threads gives the same numbers."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.block import KroneckerBlock, compute_eigenvalues
from kfac_backend.weight_sharing import GramSum, is_tall, tall_product


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("M", [32 * 8, 32 * 8 + 1])
def test_products_of_tall_factors(M):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(M, 8, generator=generator, dtype=torch.float64)
    right = torch.randn(M, 5, generator=generator, dtype=torch.float64)
    assert is_tall(left)
    assert_close(tall_product(left, right), left.mT @ right)
    gram = GramSum()
    gram.add(left[None])
    gram.add(left[None])
    assert_close(gram.total(), 2 * (left.mT @ left)[None])


def test_eigenvalues_of_several_factors_at_once():
    generator = torch.Generator().manual_seed(0)
    roots = [torch.randn(d, d, generator=generator, dtype=torch.float64) for d in (300, 10, 260)]
    B, A, C = (root @ root.mT for root in roots)
    blocks = [KroneckerBlock("weight", B, A), KroneckerBlock("other", C)]
    compute_eigenvalues(blocks)
    for factor, (found, clipped) in zip((B, A), blocks[0].__dict__["_known"], strict=True):
        assert_close(found, torch.linalg.eigvalsh(factor), rtol=1e-8, atol=1e-8)
        assert clipped == 0
    assert_close(blocks[1].eigenvalues(), torch.linalg.eigvalsh(C), rtol=1e-8, atol=1e-8)
