"""Weights that are used more than once: the uses are one more axis that shares the weight."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    randomize,
)
from tests.kfac_backend.layers.tied_models import LanguageModel, Pooled, TwoLayers
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal
from tests.uses import blocks_of_uses

IGNORED = -100


def setting(build: type[Pooled], pool: bool) -> tuple[Pooled, Tensor, Tensor]:
    """Model, inputs and labels."""
    model = randomize(build())
    model.pool = pool
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, (3, 3), generator=generator)
    x = tokens if issubclass(build, LanguageModel) else normal(3, 3, 3)
    f = model(x)
    return model, x, torch.randint(f.shape[-1], f.shape[:-1], generator=generator)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [TwoLayers, LanguageModel])
def test_ignored_loss_terms_have_inputs_but_no_gradients(build, mode):
    model, x, y = setting(build, pool=False)
    y[:, 0] = IGNORED
    y[1] = IGNORED
    ignored = list(y == IGNORED)
    runs = [partial(model, x_n[None]) for x_n in x]
    expected = blocks_of_uses(model, runs, "classification", mode, ignored)
    factors = kronecker_factors(
        model, [(x, y)], "classification", kfac_approx=mode, ignore_index=IGNORED
    )
    assert_blocks(factors, expected)


class MaskedHead(nn.Module):
    """Holds its output layer's bias under a name of its own, as BERT's does."""

    def __init__(self, adds_it: bool = False):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.embed, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.decoder.weight, self.decoder.bias = self.embed.weight, self.bias
        self.adds_it = adds_it

    def forward(self, tokens: Tensor) -> Tensor:
        f = self.decoder(self.embed(tokens))
        return f + self.bias if self.adds_it else f


def test_a_second_name_of_a_layers_tensor_is_no_use():
    model = randomize(MaskedHead())
    x = torch.tensor([[0, 1, 2], [4, 4, 3]])
    factors = kronecker_factors(model, [(x, x)], "classification")
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    assert list(factors.blocks) == ["bias", "embed.weight"]
    assert_blocks(factors, {"bias": exact["bias"]})
    # Negative control: a second use is an error, and would be another block.
    used = randomize(MaskedHead(adds_it=True))
    twice = ggn_blocks(used, lambda run: run(x), "classification")["bias"]
    assert error(exact["bias"], twice) > 0.1
    with pytest.raises(NotImplementedError, match="'bias' reached the model's output outside of"):
        kronecker_factors(used, [(x, x)], "classification")
