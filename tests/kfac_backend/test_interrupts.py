"""Errors and Ctrl-C in a pass or a covariance: the model is afterwards what it was."""

import pytest
import torch
from torch import nn

from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.factors import CurvaturePass, kronecker_factors
from kfac_backend.model.calls import call_with
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from tests.interrupts import check_interrupts, everything_of
from tests.kfac_backend.covariance.posteriors import precision_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


X, Y = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 2, 3), torch.tensor([0, 1, 2])


def test_an_interrupted_pass(model):
    check_interrupts(model, lambda: CurvaturePass(model, "classification").add(X, Y), 20)


def test_an_interrupted_covariance(model):
    factors = kronecker_factors(model, [(X, Y)], "classification")
    covariance = OutputCovariance(model, precision_of(factors))
    expected = covariance(X)
    check_interrupts(model, lambda: covariance(X))
    assert all(torch.equal(a, b) for a, b in zip(covariance(X), expected, strict=True))


def test_an_interrupted_call(model):
    other = {"3.weight": torch.zeros(3, 8, dtype=torch.float64)}
    check_interrupts(model, lambda: call_with(model, other, X))


def test_an_interrupted_step_of_kfac_is_forgotten_by_the_next_forward(model):
    """Torch calls no hook when Ctrl-C comes in a forward pass."""
    model = model.train()
    options = PreconditionerOptions(factor_every=1)
    optimizer = KFAC(model, "classification", lr=0.1, options=options)
    nn.functional.cross_entropy(model(X), Y).backward()  # its hooks are proved to see all
    optimizer.step()
    before = everything_of(model)

    def interrupts(*_):
        raise KeyboardInterrupt

    handle = model[2].register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert everything_of(model) != before  # negative control: there was something to forget
    with torch.no_grad():
        model(X)
    assert everything_of(model) == before
    optimizer.preconditioner.detach()
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_pass(model, error):
    class Fails(nn.Module):
        calls, at = 0, 0

        def forward(self, x):
            Fails.calls += 1
            if Fails.calls == Fails.at:
                raise error
            return x

    model.insert(2, Fails())
    before = everything_of(model)
    CurvaturePass(model, "classification").add(X, Y)
    for at in range(1, Fails.calls + 1):
        Fails.calls, Fails.at = 0, at
        try:
            CurvaturePass(model, "classification").add(X, Y)
        except error:
            pass
        assert Fails.calls >= at and everything_of(model) == before


def test_the_harness_sees_what_is_left_behind(model):
    """Negative control: clean-ups in Python."""

    def leaves_a_hook():
        handle = model[0].register_forward_hook(lambda *_: None)
        try:
            call_with(model, {}, X)
        finally:
            handle.remove()

    with pytest.raises(AssertionError, match="_forward_hooks"):
        check_interrupts(model, leaves_a_hook, most=10_000)
