"""One call of a model gives its outputs at many weights of a layer, or each weight has its own.

The oracle replaces the weights one after the other.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend.engine import sampled_calls
from kfac_backend.engine.model_calls import call_with
from kfac_backend.engine.sampled_calls import call_with_each

X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SCALES = 1.0, 1.1, -0.9, 40.0


class Own(nn.Module):
    """A network (3,) -> (2,) that ends with any code of the features h, and counts its calls."""

    calls = 0  # of all networks: the call of a network must not change its own attributes

    def __init__(self, code, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last, self.code = nn.Linear(3, 6), nn.Linear(6, 2, bias=bias), code
        self.double().eval()

    def forward(self, x):
        Own.calls += 1
        return self.code(self.inner(x).tanh(), self)


def plain(h, m):
    return m.last(h)


def with_metadata(h, m):
    assert m.last.weight.shape[1] == h.shape[-1] and m.last.weight.dtype == h.dtype
    return m.last(h.to(m.last.weight.device))


def branch_on_features(h, m):
    return m.last(2 * h if h.sum() > 0 else h)


def several_positions(h, m):
    return m.last(torch.stack([h, h.square()], 1))


LINEAR = {
    "plain": (plain, True),
    "no bias": (plain, False),
    "functional": (lambda h, m: F.linear(h, m.last.weight, m.last.bias), True),
    "metadata": (with_metadata, True),
    "branch on features": (branch_on_features, True),
    "several positions": (several_positions, True),
    "sparse features": (
        lambda h, m: m.last(torch.sparse.mm(h.to_sparse(), torch.eye(6).double())),
        True,
    ),
    "features by vmap": (lambda h, m: m.last(torch.vmap(torch.sin)(h)), True),
    "features on which no gradient is recorded": (lambda h, m: m.last(h.detach()), True),
}


def branch(h, m):
    z = m.last(h)
    return z if z.abs().max() < 5 else z / 2


def branch_on_weight(h, m):
    return m.last(h) if m.last.weight.norm() < 5 else m.last(h) / 2


def branch_by_numpy(h, m):
    z = m.last(h)
    return z if np.abs(z.detach().numpy()).max() < 5 else z / 2


def branch_on_list(h, m):
    z = m.last(h)
    return z if max(map(max, z.tolist())) < 5 else z / 2


def clamped_in_place(h, m):
    return m.last(h).clamp_(-1, 1)


def clamped_by_alias(h, m):
    z = m.last(h)
    with torch.no_grad():
        nn.Parameter(z.detach()).data.clamp_(-1, 1)
    return z


def used_twice(h, m):
    m.last(h)
    return m.last(h + 1)


def weight_in_features(h, m):
    return m.last(h + m.last.weight.sum())


def weight_in_features_by_alias(h, m):
    return m.last(h + nn.Parameter(m.last.weight.detach()).sum().detach())


def bias_by_list(h, m):
    return m.last(h * max(m.last.bias.tolist()))


def features_changed_later(h, m):
    h = h.clone()
    z = m.last(h)
    h.mul_(3)
    return z


def not_seen_by_functions(h, m):
    z = m.last(h)
    with torch._C.DisableTorchFunction():
        return z.clamp_(-1, 1)


def drawn(h, m):
    return m.last(F.dropout(h, training=True))


def drawn_by_numpy(h, m):
    return m.last(h * np.random.rand())


def drawn_by_python(h, m):
    return m.last(h * random.random())


def counts(h, m):
    m.steps = getattr(m, "steps", 0) + 1
    return m.last(h * m.steps)


def recurrent(h, m):
    m.former = h + getattr(m, "former", 0 * h)
    return m.last(m.former)


def weight_as_features(h, m):
    return F.linear(m.last.weight @ h.mT @ h, m.last.weight, m.last.bias)


def clamped_by_vmap(h, m):
    return torch.vmap(lambda z: z.clamp(-1, 1))(m.last(h))


REFUSED = {
    code.__name__: code
    for code in (
        branch, branch_on_weight, branch_by_numpy, branch_on_list, clamped_in_place,
        clamped_by_alias, used_twice, weight_in_features, weight_in_features_by_alias,
        bias_by_list, not_seen_by_functions, drawn, drawn_by_numpy, drawn_by_python, counts,
        recurrent, weight_as_features, clamped_by_vmap,
    )
} | {
    "clamped": lambda h, m: m.last(h).clamp(-1, 1),
    "squared": lambda h, m: m.last(h).square(),
    "hook": lambda h, m: m.last(h),
}  # fmt: skip


def seed():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def of_last(model):
    """Values of the last layer's parameters."""
    return {
        name: torch.stack([scale * p.detach() for scale in SCALES])
        for name, p in model.named_parameters()
        if name.startswith("last.")
    }


def each_in_turn(model, parameters, x=X):
    samples = zip(*parameters.values(), strict=True)
    return torch.stack(
        [call_with(model, dict(zip(parameters, s, strict=True)), x) for s in samples]
    )


def calls_of(function, *args):
    before = Own.calls
    return function(*args), Own.calls - before


@pytest.mark.parametrize("name", LINEAR)
def test_one_call_gives_the_outputs_at_all_weights_of_the_last_layer(name):
    model = Own(*LINEAR[name])
    parameters = of_last(model)
    found, calls = calls_of(call_with_each, model, parameters, X)
    assert calls == 1
    assert_close(found, each_in_turn(model, parameters))
    assert found.is_contiguous() and (found[0] - found[1]).norm() > 0.1 * found[0].norm() / 2


@pytest.mark.parametrize("local", ["weight", "bias"])
def test_one_of_the_layers_parameters_may_be_constant(local):
    model = Own(plain)
    parameters = {f"last.{local}": of_last(model)[f"last.{local}"]}
    found, calls = calls_of(call_with_each, model, parameters, X)
    assert calls == 1
    assert_close(found, each_in_turn(model, parameters))


def test_gradients_pass_through_the_features():
    model, x = Own(plain), X.clone().requires_grad_()
    parameters = of_last(model)
    gradients = [
        torch.autograd.grad(f(model, parameters, x).sin().sum(), x)[0]
        for f in (call_with_each, each_in_turn)
    ]
    assert_close(*gradients)
    assert gradients[0].norm() > 0.1


def model_of(name):
    model = Own(REFUSED[name])
    if name == "hook":
        model.last.register_forward_hook(lambda m, args, z: z.clamp(-1, 1))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_depends_on_the_weights_runs_at_each(name, monkeypatch):
    parameters = of_last(model_of(name))
    seed()
    found, calls = calls_of(call_with_each, model_of(name), parameters, X)
    assert calls == len(SCALES)
    seed()
    expected = each_in_turn(model_of(name), parameters)
    assert_close(found, expected)
    # Negative control: one call would give other numbers.
    monkeypatch.setattr(sampled_calls.OneLinear, "gives", lambda layer, output: True)
    monkeypatch.setattr(
        sampled_calls.OneLinear, "outputs", lambda layer, values: product(layer, values)
    )
    seed()
    wrong = call_with_each(model_of(name), parameters, X)
    errors, norms = ((f.flatten(1)).norm(dim=1) for f in (wrong - expected, expected))
    assert (errors > 0.1 * norms).any()


def product(layer, parameters):
    """The product with the features of the first call of the layer."""
    h = layer._inputs[0][0]
    return torch.stack([F.linear(h, W, b) for W, b in zip(*parameters.values(), strict=True)])


def test_features_that_change_later_are_not_used():
    """The layer keeps no copy of its input."""
    model = Own(features_changed_later)
    parameters = of_last(model)
    with torch.no_grad():
        found, calls = calls_of(call_with_each, model, parameters, X)
        assert calls == len(SCALES)
        assert_close(found, each_in_turn(model, parameters))


INSIDE = torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("inside", INSIDE)
def test_a_layer_in_another_mode_of_torch_runs_at_each_weight(inside):
    def code(h, m):
        with inside():
            return m.last(h.float())

    model, x = Own(code), X.clone().requires_grad_()
    model.last.float()
    parameters = of_last(model)
    found, calls = calls_of(call_with_each, model, parameters, x)
    assert calls == len(SCALES)
    expected = each_in_turn(model, parameters, x)
    assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad and found.dtype == expected.dtype


def test_a_layer_within_vmap_runs_at_each_weight():
    model = Own(lambda h, m: torch.vmap(m.last)(h))
    parameters = of_last(model)
    found, calls = calls_of(call_with_each, model, parameters, X)
    assert calls == len(SCALES)
    assert_close(found, each_in_turn(model, parameters))


def test_inference_mode_changes_no_output():
    model = Own(features_changed_later)
    parameters = of_last(model)
    with torch.inference_mode():
        assert_close(call_with_each(model, parameters, X), each_in_turn(model, parameters))


def test_parameters_of_several_layers_are_replaced_at_each_call():
    model = Own(plain)
    parameters = {
        n: torch.stack([s * p.detach() for s in SCALES]) for n, p in model.named_parameters()
    }
    found, calls = calls_of(call_with_each, model, parameters, X)
    assert calls == len(SCALES)
    assert_close(found, each_in_turn(model, parameters))
