"""Gram matrices that grow by rows: equal to Σ x xᵀ, whole and symmetric, whatever comes when."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.layers.gram import STRIP, DenseGram
from tests.random_numbers import normal


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("d", [3, STRIP, STRIP + 1, 3 * STRIP - 5])
def test_dense_gram(d, groups):
    """No rows, many rows, few that wait, a total in between, and more rows."""
    gram, right = DenseGram(torch.zeros(1).double(), groups, d), torch.zeros(groups, d, d).double()
    assert_close(gram.total(), right)
    for number, M in enumerate((2 * d, 2, 7, d)):
        rows = normal(groups, M, d, seed=number)
        right += torch.einsum("gmi,gmj->gij", rows, rows)
        gram.add(rows)
        rows.fill_(torch.nan)  # those that wait are copies: a loader may use its memory again
        if number in (1, 3):
            total = gram.total()
            assert_close(total, right)
            assert torch.equal(total, total.mT)
