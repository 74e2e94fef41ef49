"""Forward passes of ours leave inputs and models as they were, and nothing keeps a network."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from kfac_backend import corrected_factors, kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.engine.model_calls import call_with, in_channels_last
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.networks import Model, OwnNorm
from tests.random_numbers import normal

INPUTS = {"tensor": normal(6, 5), "mapping": {"a": normal(6, 5), "b": normal(6, 5).flip(0)}}
LABELS = torch.arange(6) % 3


def normalising(in_place, norm=nn.LayerNorm):
    """A network that normalises its inputs first: in place, or (the reference) not."""

    def forward(m, x):
        normalised = [
            t.sub_(0.5).div_(0.25) if in_place else (t - 0.5) / 0.25
            for t in (x.values() if isinstance(x, dict) else [x])
        ]
        return m.net(torch.stack(normalised).sum(0)) * m.scale

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), norm(4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    return Model(forward, net=net, scale=1.0).double()


def factors(model, x, **options):
    return kronecker_factors(model, [(x, LABELS)], "classification", **options)


def dense(found):
    return [block.to_dense() for block in found.blocks.values()]


def kfac_steps(model, x):
    """Losses of three steps of K-FAC."""
    options = PreconditionerOptions(factor_every=1, update_every=1)
    optimizer, seen = KFAC(model, "classification", 0.1, options=options), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(copy.deepcopy(x)), LABELS)
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return seen


WAYS = {
    "factors": lambda model, x: dense(factors(model, x)),
    "diagonal": lambda model, x: dense(factors(model, x, unsupported="diagonal")),
    "corrected": lambda model, x: dense(corrected_factors(factors(model, x), model, [(x, LABELS)])),
    "covariance": lambda model, x: list(
        OutputCovariance(model, precision_of(factors(model, x)))(x)
    ),
    "joint": lambda model, x: list(
        OutputCovariance(model, precision_of(factors(model, x))).joint(x[None])
    ),
    "optimiser": kfac_steps,
}


def norm_of(way):
    return OwnNorm if way == "diagonal" else nn.LayerNorm


@pytest.mark.parametrize(
    ("way", "kind"), [*((way, "tensor") for way in WAYS), ("factors", "mapping")]
)
def test_a_model_may_change_its_inputs_in_place(way, kind):
    found = []
    for in_place in (True, False):
        x = copy.deepcopy(INPUTS[kind])
        found.append(WAYS[way](normalising(in_place, norm_of(way)), x))
        assert_close(x, INPUTS[kind], rtol=0, atol=0)
    assert_close(*found)


def fails(model, x):
    with pytest.raises(ValueError, match="Label 7"):
        kronecker_factors(model, [(x, LABELS + 7)], "classification")


def no_backward(model, x):
    """A forward pass of training that no backward pass follows holds a graph, with hooks."""
    KFAC(model, "classification")
    return weakref.ref(model(x))


USES = {**WAYS, "followed": WAYS["factors"], "fails": fails, "no backward": no_backward}


@pytest.mark.parametrize("use", USES)
def test_a_network_is_freed_with_its_last_user(use):
    model = normalising(False, norm_of(use))
    if use == "followed":  # a parameter that is followed operation by operation
        model.scale = nn.Parameter(torch.ones(3).double())
    gone = [weakref.ref(model), weakref.ref(model.net[0].weight)]
    found = USES[use](model, INPUTS["tensor"])
    if use == "no backward":
        gone.append(found)
    del model
    gc.collect()
    assert [of_model() for of_model in gone] == [None] * len(gone)


# --- errors and Ctrl-C ---


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
    F.cross_entropy(model(X), LABELS).backward()  # its hooks are proved to see all
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


INTERRUPTED = {
    **{name: way for name, way in WAYS.items() if name != "optimiser"},  # see above
    "call": lambda model, x: call_with(model, {"4.weight": model[4].weight * 0}, x),
}


@pytest.mark.parametrize("use", INTERRUPTED)
def test_a_forward_that_fails(model, use):
    """At each forward pass of a proof and of what follows it."""
    fails = Fails()
    model.insert(2, fails)
    before = everything_of(model)
    INTERRUPTED[use](model, X)
    for at in range(1, fails.calls + 1):
        error = (RuntimeError, KeyboardInterrupt)[at % 2]
        fails.calls, fails.at, fails.error = 0, at, error
        try:
            INTERRUPTED[use](model, X)
        except error:
            pass
        assert fails.calls >= at and everything_of(model) == before


@pytest.mark.parametrize(("channels", "kernel"), [(1, 3), (2, 1), (2, 3)])
def test_convolutions_run_in_channels_last(channels, kernel):
    """Also for one channel, whose entries have the same order in both formats."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(channels, 3, kernel).double(), torch.randn(2, channels, 5, 5).double()
    f = call_with(model, in_channels_last(model), x)
    assert f.is_contiguous(memory_format=torch.channels_last)
    assert not model(x).is_contiguous(memory_format=torch.channels_last)  # negative control
    assert_close(f, model(x), check_stride=False)
