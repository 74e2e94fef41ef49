"""Linearised outputs f(x, θ) + J(x) Δ by dense Jacobians, and what has none."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from kfac_backend.covariance.linearised import linearised_outputs
from tests.kfac_backend.covariance.posteriors import SEQUENCES, jacobians, sequences
from tests.kfac_backend.networks import Model


@pytest.mark.parametrize("name", SEQUENCES)
def test_linearised_outputs_equal_the_dense_jacobians(name):
    model, x, _ = sequences(name)
    changes = {
        n: torch.randn(3, *p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(3))
        for n, p in model.named_parameters()
    }
    found = linearised_outputs(model, changes, x)
    J = jacobians(model, x, changes)
    expected = model(x).detach() + sum(
        torch.einsum("...p,sp->s...", J[n], change.flatten(1)) for n, change in changes.items()
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not found.requires_grad
    if name not in ("linear", "one output"):  # negative control: the network itself
        parameters = {n: p.detach() + changes[n][0] for n, p in model.named_parameters()}
        f = functional_call(model, parameters, (x,)).detach()
        assert (found[0] - f).norm() > 1e-2 * f.norm()
    name, change = next(iter(changes.items()))
    some = torch.einsum("...p,sp->s...", J[name], change.flatten(1)) + model(x).detach()
    assert_close(linearised_outputs(model, {name: change}, x), some)


class Twice(torch.autograd.Function):
    """As those of hand-written kernels: it has no forward derivative."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_an_operation_without_a_forward_derivative_is_named():
    model = Model(
        lambda m, x: m.last(Twice.apply(m.first(x))),
        first=nn.Linear(3, 3),
        last=nn.Linear(3, 2),
    )
    changes = {name: torch.zeros(1, *p.shape) for name, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match="Model cannot be linearised.*'probit'"):
        linearised_outputs(model, changes, torch.randn(2, 3))


def test_linearised_outputs_that_depend_on_no_parameter():
    class Constant(nn.Linear):
        def forward(self, x):
            return 2 * x

    model, x = Constant(3, 3), torch.randn(4, 3)
    changes = {n: torch.ones(2, *p.shape) for n, p in model.named_parameters()}
    assert_close(linearised_outputs(model, changes, x), torch.stack([2 * x, 2 * x]))
