"""Where K-FAC is exact in attention: the query weight of a single example, and what not.

Setting, all of it needed: Gaussian likelihood; *linear* self-attention, o_r = Σ_s (q_r·k_s) v_s
with no softmax and no mask, all layers before and after it linear; W^Q is that of the *last* block,
so that after it positions no longer meet (but for the final scaled sum of the reduce setting).

Then f_r depends on q_r alone, and linearly, f_r = H W_o (Σ_s v_s k_sᵀ) q_r + constant: its Jacobian
b = H W_o Σ_s v_s k_sᵀ is the same for all positions of one example, but another for another
example. For one example the block of W^Q is, in the expand setting, Σ_r bᵀb ⊗ a_r a_rᵀ =
(Σ_r bᵀb) ⊗ (1/R Σ_r a_r a_rᵀ), expand's; in the reduce setting, with f = c Σ_r f_r, its Jacobian
is c b ⊗ Σ_r a_rᵀ, and the block reduce's (that one for any likelihood). For several examples the
sum over n of such products is no product. Softmax, or a mask, makes b depend on r. Keys and values
of different positions meet other queries and other weights, so that their b differ for one example,
too. The output projection and the head are positions of a deep linear network of their own inputs,
and exact for any number of examples, with softmax, too.
"""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import MODES, OTHER, assert_same, factors_of, randomize
from tests.kfac_backend.layers.attention_models import CAUSAL, PADDING, Attending, batch_of, stack
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal


class LinearAttention(nn.Module):
    """x_r + W_o Σ_s w_rs v_s with w = q kᵀ / R, the softmax of q kᵀ, or a triangle of w."""

    def __init__(self, d: int, weights: str):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(d, d) for _ in range(4))
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        w = self.query(x) @ self.key(x).transpose(-1, -2)
        w = w.softmax(-1) if self.weights == "softmax" else w / x.shape[1]
        if self.weights == "causal":
            w = w.tril()
        return x + self.output(w @ self.value(x))


class Blocks(nn.Module):
    """Embedding, two blocks of attention, and a head; outputs per position, or their scaled sum."""

    def __init__(self, pool: bool, weights: str = "linear"):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.first, self.last = LinearAttention(3, "linear"), LinearAttention(3, weights)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(self.last(self.first(self.embed(x))))
        return -0.2 * f.sum(1) if self.pool else f


SETTINGS = [("expand", False), ("reduce", True)]  # mode that is exact, outputs pooled


@cache
def errors(mode: str, pool: bool, N: int, weights: str = "linear", likelihood="regression"):
    """Relative errors of all blocks, by name."""
    model, x = randomize(Blocks(pool, weights), 0.5), normal(N, 4, 2)
    y = torch.zeros_like(model(x))
    if likelihood == "classification":
        y = torch.zeros(y.shape[:-1], dtype=torch.long)
    exact = ggn_blocks(model, lambda run: run(x), likelihood)
    factors = kronecker_factors(model, [(x, y)], likelihood, kfac_approx=mode)
    zero = {n for n, b in exact.items() if float(b.abs().max()) < 1e-12}
    assert zero <= {"first.key.bias", "last.key.bias"}
    return {k: error(factors.to_dense(k), block) for k, block in exact.items() if k not in zero}


@pytest.mark.parametrize(("mode", "pool"), SETTINGS)
def test_query_weight_of_the_last_block_is_exact_for_one_example_only(mode, pool):
    exact = {"last.query.weight", "last.output.weight", "head.weight"}
    one, several = errors(mode, pool, 1), errors(mode, pool, 3)
    for name, value in one.items():
        if name.endswith("weight"):
            assert value < 1e-9 if name in exact else value > 0.1, name
    assert several["last.query.weight"] > 0.1
    assert max(several[name] for name in exact - {"last.query.weight"}) < 1e-9
    assert errors(OTHER[mode], pool, 1)["last.query.weight"] > 0.1
    assert errors(OTHER[mode], pool, 3)["head.weight"] > 0.05


@pytest.mark.parametrize(("mode", "pool"), SETTINGS)
@pytest.mark.parametrize("weights", ["softmax", "causal"])
def test_query_weight_is_not_exact_with_softmax_or_a_mask(mode, pool, weights):
    one = errors(mode, pool, 1, weights)
    assert one["last.query.weight"] > 0.1
    several = errors(mode, pool, 3, weights)
    assert max(several["last.output.weight"], several["head.weight"]) < 1e-9


@pytest.mark.parametrize("zero_attention", [False, True])
def test_reduce_sees_no_curvature_of_the_key_weight(zero_attention):
    # A vector added to all keys of an example changes no softmax, so that Σ_r b_r of the keys is
    # zero, and so are reduce's block of W^K and the exact block of its bias. A key that the module
    # appends breaks that; expand does not sum first.
    model = randomize(Attending(CAUSAL, add_zero_attn=zero_attention))
    batch = batch_of(padding_mask=PADDING)
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    for mode in MODES:
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        keys, bias = slice(16, 32), slice(4, 8)
        block = factors.to_dense("attention.in_proj_weight")[keys, keys]
        assert (block.abs().max() < 1e-20) == (mode == "reduce" and not zero_attention)
        exact_bias = exact["attention.in_proj_bias"][bias, bias]
        assert (exact_bias.abs().max() < 1e-20) != zero_attention
        assert exact["attention.in_proj_weight"][keys, keys].abs().max() > 1e-3


def test_a_stack_that_takes_a_fast_path_without_gradients():
    model, batch = randomize(stack()), batch_of(padding_mask=PADDING)
    expected = factors_of(model, [batch], "reduce")
    with torch.no_grad():
        assert_same(factors_of(model, [batch], "reduce"), expected)
