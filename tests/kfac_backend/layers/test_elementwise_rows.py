"""Norms and PReLU on rows whose examples the model tells: still the exact blocks, or an error."""

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors
from tests.kfac_backend.block_checks import (
    assert_blocks,
    randomize,
)
from tests.kfac_backend.layers.test_elementwise import of_layer, with_statistics
from tests.oracles import dense_ggn_blocks
from tests.random_numbers import normal
from tests.sharing_oracles import ggn_blocks


class Nodes(nn.Module):
    """A layer on rows (V, d) of examples with different numbers of them, which are summed."""

    def __init__(self, layer: nn.Module, index: Tensor, declared: bool = True):
        super().__init__()
        self.layer, self.head, self.index = layer, nn.Linear(4, 3), index
        self.declared = declared

    def forward(self, x: Tensor) -> Tensor:
        N, index = len(x), self.index
        rows = x.flatten(0, 1)[: len(index)]  # (V, d)
        with examples_of_rows(index if self.declared else None, N):
            rows = torch.tanh(self.layer(rows))
        counted = rows * (index >= 0)[:, None]
        return self.head(torch.zeros_like(x[:, 0]).index_add(0, index.clamp(min=0), counted))


LAYERS_ON_ROWS = {
    "LayerNorm": lambda: nn.LayerNorm(4), "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4), "PReLU": lambda: nn.PReLU(4),
    "one slope": lambda: nn.PReLU(),
}  # fmt: skip


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", LAYERS_ON_ROWS)
def test_rows_of_examples(name, batched):
    index = torch.tensor([2, 0, 2, -1, 2, 0])  # example 1 has no row
    model = randomize(Nodes(LAYERS_ON_ROWS[name](), index))
    with_statistics(model)
    x, y = normal(3, 2, 4), torch.tensor([0, 1, 2])
    factors = kronecker_factors(model, [(x, y)], "classification", batched=batched)
    assert_blocks(factors, of_layer(ggn_blocks(model, lambda run: run(x), "classification")))
    model.declared = False
    with pytest.raises(NotImplementedError, match="got 6 rows in a batch of 3 examples"):
        kronecker_factors(model, [(x, y)], "classification")


class Masked(nn.Module):
    """A layer on (N, R, d), whose first two axes are rows."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with counted_positions(torch.ones(x.shape[:2], dtype=torch.bool)):
            x = torch.tanh(self.layer(x))
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    "layer",
    [nn.PReLU(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm((4, 4))],
    ids=lambda layer: type(layer).__name__,
)
def test_parameters_of_an_axis_of_rows_are_a_named_error(layer):
    # As many rows as features, so that all shapes would fit.
    model, x, y = randomize(Masked(layer)), normal(4, 4, 4), torch.tensor([0, 1, 2, 0])
    message = rf"{type(layer).__name__}\(.* of its own .*counted_positions.* the first 2"
    with pytest.raises(NotImplementedError, match=message):
        kronecker_factors(model, [(x, y)], "classification")


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU()])
def test_rows_of_two_axes(layer):
    model, x, y = randomize(Masked(layer)), normal(4, 4, 4), torch.tensor([0, 1, 2, 0])
    factors = kronecker_factors(model, [(x, y)], "classification")
    assert_blocks(factors, of_layer(dense_ggn_blocks(model, x, "classification")))
