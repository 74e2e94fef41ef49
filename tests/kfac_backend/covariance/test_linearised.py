"""Linearised outputs f(x, θ) + J(x) Δ by dense Jacobians, their memory, and what has none."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.testing import assert_close

from experiments.timing import peak_memory
from kfac_backend.covariance.linearised import linearised_outputs
from tests.kfac_backend.covariance.posteriors import SEQUENCES, jacobians, sequences


@pytest.mark.parametrize("name", SEQUENCES)
def test_linearised_outputs_equal_the_dense_jacobians(name):
    model, x, _ = sequences(name)
    changes = {
        n: torch.randn(3, *p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(3))
        for n, p in model.named_parameters()
    }
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    found = linearised_outputs(model, changes, x)
    assert before == (
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    )  # fmt: skip
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
    one = {n: change for n, change in changes.items() if n == next(iter(changes))}
    ((n, change),) = one.items()
    some = torch.einsum("...p,sp->s...", J[n], change.flatten(1)) + model(x).detach()
    assert_close(linearised_outputs(model, one, x), some)


@pytest.mark.parametrize("beside", [False, True])
def test_what_cannot_be_differentiated_twice_is_named(beside):
    """Autograd itself passes over it if there is another way."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return Own.apply(self.fc(x)) + (self.fc(x) if beside else 0)

    model = Model()
    changes = {n: torch.zeros(1, *p.shape) for n, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match="Model cannot be linearised.*'probit' and 'mc'"):
        linearised_outputs(model, changes, torch.randn(2, 3))


def test_linearised_outputs_that_depend_on_no_parameter():
    class Constant(nn.Linear):
        def forward(self, x):
            return 2 * x

    model, x = Constant(3, 3), torch.randn(4, 3)
    changes = {n: torch.ones(2, *p.shape) for n, p in model.named_parameters()}
    assert_close(linearised_outputs(model, changes, x), torch.stack([2 * x, 2 * x]))


@pytest.mark.parametrize("name", ["gpt", "pixels, wide"])
def test_memory_of_linearised_outputs(name):
    """What is held besides the result; and no less than needed for one example."""
    model, x, _ = sequences(name)
    x = x.repeat(16, *[1] * (x.dim() - 1))
    changes = {n: torch.randn_like(p)[None] for n, p in model.named_parameters()}
    expected = linearised_outputs(model, changes, x, 2**40)
    result, peaks = 3 * expected.nbytes, {}
    for memory in (2**17, 2**20, 2**40):
        found = linearised_outputs(model, changes, x, memory)
        assert_close(found, expected)
        peaks[memory] = peak_memory(
            lambda m=memory: linearised_outputs(model, changes, x, m), torch.device("cpu")
        )
    # Beyond the graph: the tensors of one pass back through it, and the parameters' gradients.
    assert peaks[2**17] < 2 * 2**17 + result and peaks[2**20] < 2 * 2**20 + result
    assert peaks[2**40] > 2 * peaks[2**17]  # negative control


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("width", [3, 512])
def test_a_backward_without_a_graph_is_named(beside, width):
    """As those of hand-written kernels: autograd takes its gradients for constants."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad.detach()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, x):
            h = self.first(x)
            return self.last(Cut.apply(h) + (h if beside else 0))

    torch.manual_seed(0)
    model = Model()
    changes = {name: torch.randn(1, *p.shape) for name, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match="cannot be linearised"):
        linearised_outputs(model, changes, torch.randn(4, width))
