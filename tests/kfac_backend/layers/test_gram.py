"""Gram matrices that grow by rows: equal to Σ x xᵀ, whole and symmetric, whatever comes when."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.layers.gram.gram import STRIP, DenseGram
from tests.random_numbers import normal


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("d", [3, STRIP, STRIP + 1, 3 * STRIP - 5])
def test_dense_gram(d, groups):
    """Many rows, few that wait, a total in between, and more rows."""
    gram, right = DenseGram(), torch.zeros(groups, d, d).double()
    for number, M in enumerate((2 * d, 2, 7, d)):
        rows = normal(groups, M, d, seed=number)
        gram.add(rows)
        for g in range(groups):
            for row in rows[g]:
                right[g] += torch.outer(row, row)
        if number in (1, 3):
            total = gram.total()
            assert_close(total, right)
            assert torch.equal(total, total.mT)
