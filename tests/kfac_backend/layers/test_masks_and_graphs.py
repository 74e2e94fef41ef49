"""Positions that do not count, and examples with different numbers of positions."""

import pytest
import torch

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    assert_reference,
    assert_same,
    factors_of,
    parts,
    randomize,
)
from tests.kfac_backend.layers.padded_models import (
    IGNORED,
    MASK,
    Padded,
    batch_of,
    padded,
    real_positions,
)
from tests.oracles import ggn_blocks
from tests.random_numbers import error
from tests.taps import reference_blocks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["counted", "sequence first"])
def test_a_loss_term_for_each_position_that_counts(way, mode):
    model, batch = randomize(Padded("none", way, head=False)), batch_of(per_position=True)
    examples = real_positions(model, batch)
    outputs = [f_n[mask_n] for f_n, mask_n in zip(model(batch), MASK, strict=True)]
    assert_reference(padded, examples, outputs)
    expected = reference_blocks(padded, examples, "classification", mode)
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
    expected = reference_blocks(padded, real_positions(model, batch), "classification", mode)
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


@pytest.mark.parametrize("mode", MODES)
def test_padding_that_is_not_declared_changes_the_blocks(mode):
    blocks = [
        kronecker_factors(
            randomize(Padded("mean", way)), [batch_of()], "classification", kfac_approx=mode
        ).to_dense("first.weight")
        for way in ("counted", "not at all")
    ]
    assert error(*blocks) > 0.1


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
