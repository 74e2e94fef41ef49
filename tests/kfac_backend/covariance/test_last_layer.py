"""The last layer's covariance by its own formula, without a backward pass where none is needed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from experiments.models import GPT
from kfac_backend.covariance.last_layer import LastLayerCovariance
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import (
    SEQUENCES,
    VOCABULARY,
    assert_choices,
    brute_force,
    of_layer,
    posterior,
    sequences,
    tokens,
)
from tests.marglik.networks import randomised
from tests.random_numbers import normal


@pytest.mark.parametrize("name", SEQUENCES)
def test_equals_the_dense_jacobian(name):
    """All positions, and chosen positions and classes; of sequences."""
    model, x, layer = sequences(name)
    blocks, dense = posterior(model, x, MODES[len(name) % 2])
    blocks = of_layer(blocks, model, layer)
    if name == "gpt":  # the token embedding, whose weight is the same, is known
        untied = randomised(GPT(VOCABULARY, 4, 4, 1, 2, tied=False))
        untied.load_state_dict(model.state_dict())
        expected = brute_force(untied, x, {"head.weight": dense["token_embedding.weight"]})
    else:
        expected = brute_force(model, x, {n: dense[n] for n in blocks})
    for memory in (1, None):
        covariance = LastLayerCovariance(model, layer, blocks, memory=memory)
        assert_choices(covariance, x, model(x).detach(), expected)
    assert (covariance._general is not None) == (name in ("pixels, groups", "scaled"))


@pytest.mark.parametrize("computed", [weight_norm, parametrizations.spectral_norm])
def test_a_last_layer_whose_weight_is_computed_of_constants(computed):
    torch.manual_seed(0)
    layer = computed(nn.Linear(6, 3))
    for name, p in layer.named_parameters():
        p.requires_grad_(name == "bias")
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), layer).double().eval(), normal(5, 3)
    blocks, dense = posterior(model, x)
    covariance = LastLayerCovariance(model, "2", {"2.bias": blocks["2.bias"]})
    assert_choices(
        covariance, x, model(x).detach(), brute_force(model, x, {"2.bias": dense["2.bias"]})
    )
    assert covariance._general is None


def test_a_last_layer_that_is_tied_and_not_the_output():
    class Scaled(GPT):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    model = randomised(Scaled(VOCABULARY, 4, 4, 2, 2))
    blocks, _ = posterior(model, tokens())
    name = "token_embedding.weight"
    with pytest.raises(NotImplementedError, match="last layer 'head'.* Use all layers"):
        LastLayerCovariance(model, "head", {name: blocks[name]})(tokens())
