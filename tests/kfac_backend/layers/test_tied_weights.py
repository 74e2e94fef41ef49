"""Weights that are used more than once: the uses are one more axis that shares the weight."""

from functools import partial

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import MODES, assert_blocks, randomize
from tests.kfac_backend.layer_cases import language_model, two_layers
from tests.kfac_backend.networks import Model
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal
from tests.uses import blocks_of_uses

IGNORED = -100


TWO_LAYERS = two_layers, normal(3, 3, 3)
LANGUAGE_MODEL = language_model, torch.tensor([[0, 1, 2], [4, 4, 3], [1, 0, 0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("build", "x"), [TWO_LAYERS, LANGUAGE_MODEL])
def test_ignored_loss_terms_have_inputs_but_no_gradients(build, x, mode):
    model = randomize(build())
    model.pool = False
    y = torch.arange(9).view(3, 3) % 3
    y[:, 0] = IGNORED
    y[1] = IGNORED
    ignored = list(y == IGNORED)
    runs = [partial(model, x_n[None]) for x_n in x]
    expected = blocks_of_uses(model, runs, "classification", mode, ignored)
    factors = kronecker_factors(
        model, [(x, y)], "classification", kfac_approx=mode, ignore_index=IGNORED
    )
    assert_blocks(factors, expected)


def masked_head(forward=lambda m, x: m.decoder(m.embed(x))):
    """Holds its output layer's bias under a name of its own, as BERT's does."""
    model = Model(forward, bias=torch.zeros(5), embed=nn.Embedding(5, 3), decoder=nn.Linear(3, 5))
    model.decoder.weight, model.decoder.bias = model.embed.weight, model.bias
    return randomize(model)


def test_a_second_name_of_a_layers_tensor_is_no_use():
    model = masked_head()
    x = torch.tensor([[0, 1, 2], [4, 4, 3]])
    factors = kronecker_factors(model, [(x, x)], "classification")
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    assert list(factors.blocks) == ["bias", "embed.weight"]
    assert_blocks(factors, {"bias": exact["bias"]})
    # Negative control: a second use is an error, and would be another block.
    used = masked_head(lambda m, x: m.decoder(m.embed(x)) + m.bias)
    twice = ggn_blocks(used, lambda run: run(x), "classification")["bias"]
    assert error(exact["bias"], twice) > 0.1
    with pytest.raises(NotImplementedError, match="'bias' differs from .* outside of the forward"):
        kronecker_factors(used, [(x, x)], "classification")
