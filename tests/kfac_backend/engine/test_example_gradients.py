"""Gradients of single examples in parameters without a rule agree with the Jacobian."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from kfac_backend.engine.operations.example_gradients import gradients_of_examples
from tests.kfac_backend.networks import Model


def looking(m, x):
    """Looks at a value, which torch can't do while it maps over examples."""
    sign = 1 if float(x.abs().sum()) > 0 else -1
    return sign * (x * m.scale).tanh()


def whole(m, x):
    """Takes no single example."""
    if len(x) < 2:
        raise ValueError("a whole batch")
    return looking(m, x)


SCALE = torch.tensor([1.5, -0.5])
MODELS = {
    "mapped": lambda: nn.Sequential(weight_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 2)),
    "example by example": lambda: Model(looking, scale=SCALE),
    "by the whole batch": lambda: Model(whole, scale=SCALE),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("way", MODELS)
def test_gradients_are_those_of_each_examples_jacobian(way, differentiable):
    torch.manual_seed(0)
    model = MODELS[way]().double().eval()
    names = [name for name, _ in model.named_parameters()]
    x, v = torch.randn(5, 2).double(), torch.randn(5, 3, 2).double()
    with torch.set_grad_enabled(differentiable):
        parts = list(
            gradients_of_examples(
                model, names, x, model(x).detach(), v.__getitem__, 3,
                entries=12, differentiable=differentiable,
            )
        )  # fmt: skip
    assert len(parts) > 1
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    for name, J in jacobians.items():
        found = torch.cat([by_name[name] for _, by_name in parts])
        torch.testing.assert_close(found, torch.einsum("nvc,nc...->nv...", v, J))
