"""Embedding: a linear layer whose inputs are one-hot vectors."""

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    OTHER,
    assert_blocks,
    randomize,
)
from tests.oracles import ggn_blocks
from tests.random_numbers import error


class Tokens(nn.Module):
    """Embedding, nonlinearity or not, Linear; outputs per token, or their scaled sum."""

    def __init__(self, pool: bool, linear: bool = False, vocabulary: int = 5, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 3, **options), nn.Linear(3, 2)
        self.pool, self.linear = pool, linear

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        f = self.head(x if self.linear else x.tanh())
        return -0.5 * f.flatten(1, -2).sum(1) if self.pool else f


def tokens_of(*shape: int, vocabulary: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("mode", "pool"), [("expand", False), ("reduce", True)])
def test_exact_in_its_setting(mode, pool):
    model, tokens = randomize(Tokens(pool, linear=True)), tokens_of(4, 3)
    y = torch.zeros_like(model(tokens))
    exact = ggn_blocks(model, lambda run: run(tokens), "regression")
    assert_blocks(kronecker_factors(model, [(tokens, y)], "regression", kfac_approx=mode), exact)
    other = kronecker_factors(model, [(tokens, y)], "regression", kfac_approx=OTHER[mode])
    assert error(other.to_dense("embed.weight"), exact["embed.weight"]) > 0.1


def test_tokens_in_floating_point():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(
        TypeError, match=r"Embedding\) .*torch.float32; it needs integers.*\.long\(\)"
    ):
        kronecker_factors(model, [(torch.ones(3, 2), torch.tensor([0, 1, 1]))], "classification")
