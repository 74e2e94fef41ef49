"""The paper's propositions: where each mode is exact, and that the other mode is not."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests import oracles
from tests.kfac_backend.block_checks import MODES, OTHER
from tests.kfac_backend.layers.exact_models import CASES


@pytest.mark.parametrize("case", CASES)
def test_mode_is_exact_in_its_setting_and_the_other_is_not(case):
    exact_mode, layers, shape = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).double()
    x = torch.randn(shape, dtype=torch.float64)
    y = torch.zeros_like(model(x))
    ggn = oracles.dense_ggn_blocks(model, x, "regression")

    exact = kronecker_factors(model, [(x, y)], "regression", kfac_approx=exact_mode)
    for name, block in ggn.items():
        assert_close(exact.to_dense(name), block, rtol=1e-10, atol=1e-12)

    other = kronecker_factors(model, [(x, y)], "regression", kfac_approx=OTHER[exact_mode])
    shares_weights = {
        name: max(exact.blocks[name].num_terms, other.blocks[name].num_terms) > len(x)
        for name in ggn
        if name.endswith("weight")
    }
    assert any(shares_weights.values())
    for name, shared in shares_weights.items():
        difference = (other.to_dense(name) - ggn[name]).norm() / ggn[name].norm()
        # A layer with a single position, as after the pooling, is the same in both modes.
        assert difference > 0.1 if shared else difference < 1e-10


@pytest.mark.parametrize("kfac_approx", MODES)
def test_single_example_with_cross_entropy_is_exact(kfac_approx):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(2, 4, dtype=torch.float64)

    def relative_error(x):
        y = torch.zeros(len(x), dtype=torch.long)
        factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
        ggn = oracles.dense_ggn_blocks(model, x, "classification")
        return {
            name: float((factors.to_dense(name) - block).norm() / block.norm())
            for name, block in ggn.items()
        }

    assert max(relative_error(x[:1]).values()) < 1e-12
    # Negative control: with two examples only the biases' blocks are exact.
    errors = relative_error(x)
    assert min(errors["0.weight"], errors["2.weight"]) > 0.1
    assert max(errors["0.bias"], errors["2.bias"]) < 1e-12
