"""Several ranks share out the eigenvectors of a predictive, and predict the same to the bit."""

from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from marglik import PredictiveConfig

USE = "tests.marglik.prediction.predictives_on_ranks:predicted"


@pytest.mark.parametrize("method", ["probit", "linearised"])
def test_each_factor_is_decomposed_once(worlds, method):
    config = PredictiveConfig(method, networks=3)
    ((of_one, alone),) = worlds.all(1, USE, config, True)
    ranks = worlds.all(2, USE, config, True)
    solved = Counter(name for names, _ in ranks for name in names)
    assert max(solved.values()) == 1
    assert all(len(names) < len(of_one) for names, _ in ranks)
    for _, found in ranks:
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, ranks[0][1][name]), name
            if ", " not in name:  # eigenvectors have a sign, and more where eigenvalues repeat
                assert_close(tensor, alone[name], rtol=1e-8, atol=1e-10)


def test_without_sharing_each_rank_decomposes_all(worlds):
    """Negative control."""
    first, second = worlds.all(2, USE, PredictiveConfig(), False)
    assert first[0] == second[0] and len(first[0]) > 10
