"""What attention adds: keys that reduce sees no curvature of, weights that are outputs, fast paths.

Where it is exact is measured in `experiments.exactness`.
"""

import pytest
import torch
from torch import Tensor

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    assert_same,
    factors_of,
    randomize,
)
from tests.kfac_backend.layers.attention_models import CAUSAL, PADDING, Attending, Stack, batch_of
from tests.oracles import ggn_blocks
from tests.random_numbers import error


@pytest.mark.parametrize("zero_attention", [False, True])
def test_reduce_sees_no_curvature_of_the_key_weight(zero_attention):
    # A vector added to all keys of an example changes no softmax, so that Σ_r b_r of the keys is
    # zero, and so are reduce's block of W^K and the exact block of its bias. A key that the module
    # appends breaks that; expand does not sum first.
    model = randomize(Attending(True, CAUSAL, add_zero_attn=zero_attention))
    batch = batch_of(True, padding_mask=PADDING)
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    for mode in MODES:
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        keys, bias = slice(16, 32), slice(4, 8)
        block = factors.to_dense("attention.in_proj_weight")[keys, keys]
        assert (block.abs().max() < 1e-20) == (mode == "reduce" and not zero_attention)
        exact_bias = exact["attention.in_proj_bias"][bias, bias]
        assert (exact_bias.abs().max() < 1e-20) != zero_attention
        assert exact["attention.in_proj_weight"][keys, keys].abs().max() > 1e-3


class WeightsToo(Attending):
    """The attention weights are outputs, too."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = (batch["query"], batch["key"], batch["key"])
        x, weights = self.attention(*inputs, average_attn_weights=self.pool)
        weights = weights if self.pool else weights.mean(1)
        return self.head(x.mean(1)) + weights.mean(1)[:, :3]


@pytest.mark.parametrize("average", [True, False])
def test_gradients_that_come_through_the_weights(average):
    # One query of one example: exact, if the weights' part is not lost.
    model, batch = randomize(WeightsToo(average)), batch_of(True, N=1, R=1)
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    factors = factors_of(model, [batch], "expand")
    name, query = "attention.in_proj_weight", slice(0, 16)
    assert error(factors.to_dense(name)[query, query], exact[name][query, query]) < 1e-10


def test_a_stack_that_takes_a_fast_path_without_gradients():
    model, batch = randomize(Stack()), batch_of(True, padding_mask=PADDING)
    expected = factors_of(model, [batch], "reduce")
    with torch.no_grad():
        assert_same(factors_of(model, [batch], "reduce"), expected)
