"""Positions that do not count, and examples with different numbers of positions."""

import pytest
import torch

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors
from kfac_backend.layers.rows import current_rows, rows_of_sequences
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    assert_same,
    factors_of,
    parts,
    randomize,
)
from tests.kfac_backend.layer_cases import runs
from tests.kfac_backend.layers.padded_models import IGNORED, MASK, Padded, batch_of
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal
from tests.uses import blocks_of_uses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["counted", "sequence first"])
def test_a_loss_term_for_each_position_that_counts(way, mode):
    model, batch = randomize(Padded("none", way, head=False)), batch_of(per_position=True)
    expected = blocks_of_uses(model, runs(model, batch), "classification", mode)
    for batches in ([batch], parts(batch, [2, 1])):
        factors = kronecker_factors(
            model, batches, "classification", kfac_approx=mode, ignore_index=IGNORED
        )
        assert_blocks(factors, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["counted", "rows"])
def test_an_example_without_positions_counts_as_an_example(way, mode):
    model = randomize(Padded("mean", way))
    batch = batch_of(torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)]))
    expected = blocks_of_uses(model, runs(model, batch), "classification", mode)
    factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
    assert_blocks(factors, expected)
    # A batch that has no position at all.
    several = parts(batch, [3, 1])  # the last batch has the one without positions alone
    assert_same(factors_of(model, several, mode), factors)
    without = kronecker_factors(model, several[:1], "classification", kfac_approx=mode)
    first = factors.to_dense("first.weight")
    # Reduce: A is a mean over examples, B a sum. Expand: A is a mean over positions.
    assert_blocks(without, {"first.weight": first * (4 / 3 if mode == "reduce" else 1)})
    bias = ggn_blocks(model, lambda run: run(batch), "classification")["first.bias"]
    if mode == "reduce":
        assert_blocks(factors, {"first.bias": bias})  # exact: no input, so nothing to average


EXACT = {("counted", "mean"), ("rows, means", "mean"), ("rows", "root"), ("index", "root")}


@pytest.mark.parametrize("aggregation", ["sum", "mean", "root"])
@pytest.mark.parametrize("way", ["counted", "rows, means", "rows", "index"])
def test_reduce_is_exact_for_the_aggregation_of_its_scale(way, aggregation):
    # Deep linear, Gaussian likelihood: means for the mean, 1/√R_n for Σ_r / √R_n, and no other.
    model, batch = randomize(Padded(aggregation, way, head=False, linear=True)), batch_of()
    batch["labels"] = torch.zeros_like(model(batch))
    exact = ggn_blocks(model, lambda run: run(batch), "regression")
    factors = kronecker_factors(model, [batch], "regression", kfac_approx="reduce")
    expand = kronecker_factors(model, [batch], "regression", kfac_approx="expand")
    for name in ("first.weight", "second.weight"):
        if (way, aggregation) in EXACT:
            assert_blocks(factors, {name: exact[name]})
        else:
            assert error(factors.to_dense(name), exact[name]) > 0.05
        assert error(expand.to_dense(name), exact[name]) > 0.1
    assert_blocks(factors, {name: b for name, b in exact.items() if name.endswith("bias")})


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_is_declared_for_sequences_holds_for_their_parts(batch_first):
    """As many examples as positions: the axes' sizes do not tell which is which."""
    x, weights = normal(4, 4, 2), normal(4, 4)
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 3])[:, None]
    index = torch.where(mask, torch.arange(4)[:, None], -1)
    turned = [t if batch_first else t.T for t in (index, weights)]
    with counted_positions(mask), rows_of_sequences(x, batch_first):
        assert torch.equal(current_rows().as_given, index)  # a mask is always (N, R)
    with examples_of_rows(turned[0], 4, weights=turned[1]), rows_of_sequences(x, batch_first):
        rows = current_rows()
        assert torch.equal(rows.as_given, index) and rows.by_roots
        assert torch.equal(rows.weights.view(4, 4), weights)
    with rows_of_sequences(x, batch_first, ~mask):
        assert torch.equal(current_rows().as_given, index) and not current_rows().by_roots
