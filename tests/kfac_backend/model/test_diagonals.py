"""Diagonals of parameters without a rule: the ways to compute them agree with each Jacobian."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from kfac_backend.model import diagonals


class Looking(nn.Module):
    """Looks at a value, which torch can't do while it maps over examples."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5]))

    def forward(self, x):
        sign = 1 if float(x.abs().sum()) > 0 else -1
        return sign * (x * self.scale).tanh()


class Whole(Looking):
    """Takes no single example."""

    def forward(self, x):
        if len(x) < 2:
            raise ValueError("a whole batch")
        return super().forward(x)


MODELS = {
    "_together": lambda: nn.Sequential(weight_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 2)),
    "_alone": Looking,
    "_of_the_batch": Whole,
}


@pytest.mark.parametrize("way", MODELS)
def test_the_diagonal_is_that_of_each_examples_jacobian(way, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[way]().double().eval()
    names = [name for name, _ in model.named_parameters()]
    x, vectors = torch.randn(5, 2).double(), [torch.randn(5, 2).double() for _ in range(3)]
    monkeypatch.setattr(diagonals, "ENTRIES", 60)  # several slices
    used = []
    original = getattr(diagonals, way)
    monkeypatch.setattr(diagonals, way, lambda *args: used.append(way) or original(*args))

    found = diagonals.squared_gradients(model, names, x, model(x).detach(), vectors)

    assert used
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    for name, J in jacobians.items():
        expected = sum(torch.einsum("nc,nc...->n...", v, J).square().sum(0) for v in vectors)
        torch.testing.assert_close(found[name], expected)
