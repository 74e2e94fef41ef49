"""Errors and Ctrl-C in a pass or a covariance: the model is afterwards what it was."""

from typing import Any

import pytest
import torch
from torch import nn

from kfac_backend.model.calls import call_with
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from tests.kfac_backend.model.test_calls import LABELS, WAYS
from tests.random_numbers import normal


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What must be the same afterwards: values, objects and their types, flags, hooks, modes."""
    found: dict[Any, Any] = {"grad mode": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        found[name, "mode"] = module.training
        found[name, "forward"] = vars(module).get("forward")
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_with_kwargs", "_always_called")):
                found[name, key] = dict(value)
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                flags = type(tensor), tensor.requires_grad, tensor.grad is None, tensor.dtype
                found[name, local] = id(tensor), *flags
                found[name, local, "values"] = tensor.detach().flatten().tolist()
    return found


@pytest.fixture
def model():
    """Attention by its parts, a layer of each other kind, modes and hooks of the user's own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[3].register_forward_hook(lambda *_: None)
    return model


X = normal(6, 2, 3)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_step_of_kfac_is_forgotten_by_the_next_forward(model, error):
    """Torch calls no hook when Ctrl-C comes in a forward pass, but after an error."""
    model = model.train()
    options = PreconditionerOptions(factor_every=1)
    optimizer = KFAC(model, "classification", lr=0.1, options=options)
    nn.functional.cross_entropy(model(X), LABELS).backward()  # its hooks are proved to see all
    optimizer.step()
    before = everything_of(model)

    def interrupts(*_):
        raise error

    handle = model[2].register_forward_hook(interrupts)
    with pytest.raises(error):
        model(X)
    handle.remove()
    assert (everything_of(model) != before) == (error is KeyboardInterrupt)
    with torch.no_grad():
        model(X)
    assert everything_of(model) == before
    optimizer.preconditioner.detach()
    assert not model._forward_pre_hooks and not model._forward_hooks


class Fails(nn.Module):
    """The identity, which raises an error at one of its calls."""

    calls, at, error = 0, 0, RuntimeError

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return x


USES = {
    **{name: way for name, way in WAYS.items() if name != "optimiser"},  # see above
    "call": lambda model, x: call_with(model, {"4.weight": model[4].weight * 0}, x),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("use", USES)
def test_a_forward_that_fails(model, use, error):
    """At each forward pass of a proof and of what follows it."""
    fails = Fails()
    model.insert(2, fails)
    before = everything_of(model)
    USES[use](model, X)
    for at in range(1, fails.calls + 1):
        fails.calls, fails.at, fails.error = 0, at, error
        try:
            USES[use](model, X)
        except error:
            pass
        assert fails.calls >= at and everything_of(model) == before
