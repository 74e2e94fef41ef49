"""Eigenvalues of several factors at once, each on one core."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend import KroneckerBlock
from kfac_backend.blocks.block import compute_eigenvalues


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


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
