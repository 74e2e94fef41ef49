"""MultiheadAttention against a brute-force reference of its uses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    assert_reference,
    randomize,
)
from tests.kfac_backend.layers.attention_models import (
    CAUSAL,
    PADDING,
    Attending,
    attending,
    batch_of,
    examples_of,
)
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal
from tests.taps import reference_blocks, reference_blocks_of_modes

CASES = {
    # name: (options of the module, inputs beside query and key, widths of query, key, value)
    "packed": ({}, {}, (4, 4, 4)),
    "no bias": ({"bias": False}, {}, (4, 4, 4)),
    "separate projections": ({"kdim": 3, "vdim": 5}, {}, (4, 3, 5)),
    "separate projections, no bias": ({"kdim": 3, "vdim": 3, "bias": False}, {}, (4, 3, 3)),
    "sequence first": ({"batch_first": False}, {}, (4, 4, 4)),
    "zero attention": ({"add_zero_attn": True}, {}, (4, 4, 4)),
    "appended key": ({"add_bias_kv": True}, {}, (4, 4, 4)),
    "causal": ({"attn_mask": CAUSAL}, {}, (4, 4, 4)),
    "added mask": ({"attn_mask": normal(3, 4, seed=5)}, {}, (4, 4, 4)),
    "mask per head": ({}, {"mask": normal(3, 2, 3, 4, seed=6) > 1}, (4, 4, 4)),
    "added mask per head": ({}, {"mask": normal(3, 2, 3, 4, seed=6)}, (4, 4, 4)),
    "key padding": ({}, {"padding_mask": PADDING}, (4, 4, 4)),
    "added key padding": (
        {},
        {"padding_mask": torch.zeros(3, 4).double().masked_fill(PADDING, -torch.inf)},
        (4, 4, 4),
    ),
    "all at once": (
        {"attn_mask": CAUSAL, "add_zero_attn": True, "kdim": 3, "batch_first": False},
        {"padding_mask": PADDING},
        (4, 3, 4),
    ),
}


POOLED = [(case, True) for case in CASES]
PER_POSITION = [(case, False) for case in ("packed", "key padding", "all at once")]


@pytest.mark.parametrize(("case", "pool"), POOLED + PER_POSITION)
def test_blocks_are_those_of_the_definition(case, pool):
    options, more, d = CASES[case]
    model, batch = randomize(Attending(pool, **options)), batch_of(pool, d=d, **more)
    examples = examples_of(model, batch)
    assert_reference(attending, examples, model(batch))
    appended = {"attention.bias_k", "attention.bias_v"} if case == "appended key" else set()
    exact = ggn_blocks(model, lambda run: run(batch), "classification") if appended else {}
    expected = reference_blocks_of_modes(attending, examples, "classification")
    for mode in MODES:
        assert set(expected[mode]) | appended == {name for name, _ in model.named_parameters()}
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        assert_blocks(factors, {name: exact[name] for name in appended})
        assert_blocks(factors, expected[mode])
    for name in ("attention.in_proj_weight", "attention.out_proj.weight"):  # the modes differ
        if name in factors.blocks:
            assert error(*(blocks[name] for blocks in expected.values())) > 0.02


@pytest.mark.parametrize("case", ["packed", "causal", "key padding", "zero attention"])
def test_reduce_sees_no_curvature_of_the_key_weight(case):
    # A vector added to all keys of an example changes no softmax, so that Σ_r b_r of the keys is
    # zero, and so are reduce's block of W^K and the exact block of its bias. A key that the module
    # appends breaks that; expand does not sum first.
    options, more, d = CASES[case]
    model, batch = randomize(Attending(True, **options)), batch_of(True, d=d, **more)
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    for mode in MODES:
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        keys, bias = slice(16, 32), slice(4, 8)
        block = factors.to_dense("attention.in_proj_weight")[keys, keys]
        zero = case != "zero attention"
        assert (block.abs().max() < 1e-20) == (zero and mode == "reduce")
        exact_bias = exact["attention.in_proj_bias"][bias, bias]
        assert (exact_bias.abs().max() < 1e-20) == zero
        assert exact["attention.in_proj_weight"][keys, keys].abs().max() > 1e-3


@settings(max_examples=15, deadline=None)
@given(
    N=st.integers(1, 3),
    R=st.integers(1, 3),
    S=st.integers(1, 4),
    half=st.integers(1, 2),
    kdim=st.integers(1, 3),
    bias=st.booleans(),
    pool=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_any_shape(N, R, S, half, kdim, bias, pool, mode):
    E = 2 * half
    model = randomize(Attending(pool, embed_dim=E, kdim=kdim, vdim=E, bias=bias))
    batch = batch_of(pool, N, R, S, (E, kdim, E))
    examples = examples_of(model, batch)
    assert_reference(attending, examples, model(batch))
    expected = reference_blocks(attending, examples, "classification", mode)
    factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
    assert_blocks(factors, expected)


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
    factors = kronecker_factors(model, [batch], "classification", kfac_approx="expand")
    name, query = "attention.in_proj_weight", slice(0, 16)
    assert error(factors.to_dense(name)[query, query], exact[name][query, query]) < 1e-10


def test_one_query_of_one_example_is_exact_but_for_keys_and_values():
    # One position and one example: exact in any network, in both modes; keys have four positions.
    model, batch = randomize(Attending(True)), batch_of(True, N=1, R=1)
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    name = "attention.in_proj_weight"
    for mode in MODES:
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        assert_blocks(factors, {k: v for k, v in exact.items() if k.startswith("head")})
        found, block = factors.to_dense(name), exact[name]
        query, key = slice(0, 16), slice(16, 32)
        assert error(found[query, query], block[query, query]) < 1e-10
        assert error(found[key, key], block[key, key]) > 0.1
