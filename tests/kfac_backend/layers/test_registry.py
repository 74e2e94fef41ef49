"""Rules of a user's own: a layer, a layer made of parts, and what happens when they are wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors, register_rule
from kfac_backend.layers import LayerByParts, LinearPart, WeightSharingRule, registry
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import Model, random_model
from tests.random_numbers import normal
from tests.uses import kfac_blocks


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(registry, "RULES_BY_NAME", dict(registry.RULES_BY_NAME))


class LoRALinear(nn.Module):
    """W x + s B A x with W frozen (Hu et al. 2021)."""

    def __init__(self, d_in, d_out, rank):
        super().__init__()
        self.base = nn.Linear(d_in, d_out).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, d_in))
        self.B = nn.Parameter(torch.randn(d_out, rank))
        self.scale = 0.5

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


class LoRAByParts(LayerByParts):
    def parts(self, layer):
        return {"down": LinearPart(layer, "A"), "up": LinearPart(layer, "B")}

    def forward(self, layer, parts, x):
        return layer.base(x) + layer.scale * parts["up"](parts["down"](x))


def head(m, x):
    return m.out(torch.tanh(m.layer(x)).mean(1))


def with_head(layer):
    return random_model(head, layer=layer, out=nn.Linear(4, 3))


DATA = normal(5, 4, 6), torch.arange(5) % 3


def lora_model():
    return with_head(LoRALinear(6, 4, 2))


@pytest.mark.parametrize("kfac_approx", MODES)
def test_lora_by_parts_is_lora_of_linear_layers(kfac_approx):
    register_rule(LoRALinear)(LoRAByParts)
    model = lora_model()
    factors = kronecker_factors(model, [DATA], "classification", kfac_approx=kfac_approx)
    assert list(factors.blocks) == ["layer.A", "layer.B", "out.weight", "out.bias"]
    down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
    down.weight.data, up.weight.data = model.layer.A.data, model.layer.B.data
    lora = Model(  # the same of nn.Linear layers, which are covered anyway
        lambda m, x: m.base(x) + 0.5 * m.up(m.down(x)), base=model.layer.base, down=down, up=up
    )
    written = Model(head, layer=lora, out=model.out)
    expected = kfac_blocks(written, DATA[0], "classification", kfac_approx)
    for mine, theirs in {"A": "down", "B": "up"}.items():
        assert_close(factors.to_dense(f"layer.{mine}"), expected[f"layer.{theirs}.weight"])
    assert "forward" not in model.layer.__dict__


def without_scale(layer, parts, x):
    return layer.base(x) + parts["up"](parts["down"](x))


def without_derivative(layer, parts, x):
    return layer.base(x) + layer.scale * (x @ layer.A.T @ layer.B.T).detach()


@pytest.mark.parametrize("forward", [without_scale, without_derivative])
def test_parts_that_compute_something_else(forward):
    """Other numbers, or the same with another derivative."""

    @register_rule(LoRALinear)
    class Wrong(LoRAByParts):
        def forward(self, layer, parts, x):
            return forward(layer, parts, x)

    with pytest.raises(NotImplementedError, match="'layer' .*something other than Wrong"):
        kronecker_factors(lora_model(), [DATA], "classification")


class Turned(nn.Module):
    """A linear layer with its weight stored (d_in, d_out)."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out))
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class TurnedRule(WeightSharingRule):
    transposed = True

    def inputs(self, a):
        return a.flatten(1, -2)[None]


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_rule_for_a_layer(kfac_approx):
    register_rule(Turned)(TurnedRule)
    model = with_head(Turned(6, 4))
    factors = kronecker_factors(model, [DATA], "classification", kfac_approx=kfac_approx)
    linear = nn.Linear(6, 4).double()
    linear.weight.data, linear.bias.data = model.layer.weight.data.T.contiguous(), model.layer.bias
    reference = Model(head, layer=linear, out=model.out)
    expected = kfac_blocks(reference, DATA[0], "classification", kfac_approx)
    block = expected["layer.weight"].unflatten(0, (4, 6)).unflatten(-1, (4, 6))
    block = block.permute(1, 0, 3, 2).reshape(24, 24)
    assert_close(factors.to_dense("layer.weight"), block)
    assert_close(factors.to_dense("layer.bias"), expected["layer.bias"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rule: setattr(rule, "transposed", False),
        lambda rule: setattr(rule, "inputs", lambda self, a: 2 * a.flatten(1, -2)[None]),
        lambda rule: setattr(rule, "bias_gradients", lambda self, b: b.flatten(1, -2)[:, :1]),
    ],
    ids=["stored the other way round", "other inputs", "other gradients"],
)
def test_a_wrong_rule_is_found_out(wrong):
    class Wrong(TurnedRule):
        pass

    wrong(Wrong)
    register_rule(Turned)(Wrong)
    model = with_head(Turned(4, 4))
    x, y = DATA
    with pytest.raises(NotImplementedError, match="'layer' .*something other than its class"):
        kronecker_factors(model, [(x[..., :4], y)], "classification")


def test_a_rule_holds_for_derived_classes_and_can_be_replaced():
    class Special(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, input):
            return F.linear(input, self.weight, self.bias)

    assert registry.registered(Special(2, 2)).rule is registry.RULES[nn.Linear]
    register_rule(Special)(TurnedRule)
    assert registry.registered(Special(2, 2)).rule is TurnedRule
    assert not registry.registered(Special(2, 2)).built_in
    assert registry.registered(Other(2, 2)).built_in
