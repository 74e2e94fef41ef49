"""The last layer's covariance by its own formula, without a backward pass where none is needed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.testing import assert_close

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


class Changed(nn.Module):
    """A last layer whose output, or input, is changed after it ran."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last, self.change = nn.Linear(3, 6), nn.Linear(6, 3), change

    def forward(self, x):
        h = self.inner(x).tanh()
        f = self.last(h)
        return self.change(f, h, self)


CHANGES = {
    # what happens to the output f -> whether the formula holds
    "nothing": (lambda f, h, model: f, True),
    "a view": (lambda f, h, model: f.view_as(f), True),
    "in place": (lambda f, h, model: f.mul_(2), False),
    "a gate that is open here": (lambda f, h, model: (f + 1e3).relu() - 1e3, False),
    "equal in value alone": (lambda f, h, model: 2 * f - f.detach(), False),
    "a second use": (lambda f, h, model: f + nn.functional.linear(h, model.last.weight), False),
    "its input in place": (lambda f, h, model: (f, h.zero_())[0], True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_formula_is_for_outputs_of_the_layer_alone(change):
    act, is_formula = CHANGES[change]
    model, x = Changed(act).double().eval(), normal(5, 3)
    if change == "its input in place":  # which autograd refuses as well
        plain = Changed(CHANGES["nothing"][0]).double().eval()
        blocks, dense = posterior(plain, x)
        model.load_state_dict(plain.state_dict())
    else:
        blocks, dense = posterior(model, x)
    names = "last.weight", "last.bias"
    covariance = LastLayerCovariance(model, "last", {n: blocks[n] for n in names})
    if change == "its input in place":
        with pytest.raises(NotImplementedError, match="modified in place"):
            covariance(x)
        return
    expected = brute_force(model, x, {n: dense[n] for n in names})
    for _ in range(2):  # the first call, and one that knows where to look
        assert_choices(covariance, x, model(x).detach(), expected)
    assert (covariance._general is None) == is_formula


def test_channels_of_a_last_convolution_that_are_not_the_last_axis():
    """The outputs' last axis is then one of positions, of which the formula knows nothing."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 3, 2)).double().eval(), normal(4, 2, 3, 4).double()
    blocks, dense = posterior(model, x)
    covariance = LastLayerCovariance(model, "0", blocks)
    assert_choices(covariance, x, model(x).detach(), brute_force(model, x, dense))


@pytest.mark.parametrize("way", ["hook", "forward"])
def test_what_a_user_makes_of_the_layer_is_seen(way):
    """Twice the output has four times the covariance, which the formula would not show."""
    model, x = Changed(CHANGES["nothing"][0]).double().eval(), normal(5, 3)
    blocks, _ = posterior(model, x)
    names = "last.weight", "last.bias"
    covariance = LastLayerCovariance(model, "last", {n: blocks[n] for n in names})
    plain = covariance(x)[1]
    if way == "hook":
        model.last.register_forward_hook(lambda layer, args, f: 2 * f)
    else:
        forward = model.last.forward
        model.last.forward = lambda h: 2 * forward(h)
    try:
        assert_close(covariance(x)[1], 4 * plain)
    except NotImplementedError as error:
        assert "last" in str(error)


def test_a_last_layer_that_is_tied_and_not_the_output():
    class Scaled(GPT):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    model = randomised(Scaled(VOCABULARY, 4, 4, 2, 2))
    blocks, _ = posterior(model, tokens())
    name = "token_embedding.weight"
    with pytest.raises(NotImplementedError, match="last layer 'head'.* Use all layers"):
        LastLayerCovariance(model, "head", {name: blocks[name]})(tokens())
