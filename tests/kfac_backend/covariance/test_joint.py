"""Covariances between inputs against J(X) Σ J(X')ᵀ with a dense J, in value and derivative in X."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend.covariance.output_covariance import OutputCovariance
from tests.kfac_backend import layer_cases
from tests.kfac_backend.covariance.posteriors import jacobians, posterior
from tests.kfac_backend.networks import Model, OwnNorm


class Decides(OwnNorm):
    """Without a rule, and by the value of a tensor, which vmap cannot follow."""

    def forward(self, x):
        return super().forward(x) if bool((x == x).all()) else x


MORE = {
    "followed": lambda: Model(  # one in a weight that is computed, one by broadcasting
        lambda m, x: m.last(
            (nn.functional.linear(m.first(x).sin(), m.weight.diag()) * m.scale.cos()).tanh()
        ),
        first=nn.Linear(6, 5), weight=torch.ones(5), scale=torch.ones(5), last=nn.Linear(5, 3),
    ),
    "decides": lambda: (
        nn.Sequential(nn.Linear(6, 5), Decides(5), nn.Tanh(), nn.Linear(5, 3))
    ),
}  # fmt: skip
LAYERS = ("Linear", "Linear, two shared axes", "scalars of images", "no rule", "Conv1d",
          "LayerNorm twice", "own parameters", "two linear layers", "recurrent",
          "encoder layer twice")  # fmt: skip
"""Of `layer_cases`; torch's attention has a fused kernel that is not differentiable twice."""


def case(name):
    """A model in float64, and sets of two of its inputs (2, 2, ...)."""
    if name in LAYERS:
        model, x = layer_cases.case(name)
    else:
        torch.manual_seed(1)
        model, x = MORE[name](), torch.randn(6, 6)
    return model.double().eval(), x.double()[[0, 1, 1, 2]].unflatten(0, (2, 2))


def brute_force(model, x, dense):
    """J(X) Σ J(X)ᵀ of each set, (T, q·C, q·C)."""
    sets = []
    for x_t in x:
        J = {n: J_n.flatten(0, 1) for n, J_n in jacobians(model, x_t, dense).items()}  # (q·C, P)
        sets.append(sum(J[n] @ torch.linalg.solve(dense[n], J[n].mT) for n in dense))
    return torch.stack(sets)


def blocks_of(covariance, f):
    """The covariances (q, C, C) of the single inputs of each set."""
    q, C = f.shape[1:]
    by_input = covariance.detach().unflatten(2, (q, C)).unflatten(1, (q, C))
    return [torch.stack([of_set[p, :, p] for p in range(q)]) for of_set in by_input]


@pytest.mark.parametrize("name", [*MORE, *LAYERS])
def test_equals_the_dense_jacobian_and_so_do_its_derivatives(name):
    """By central differences: autograd through jacrev of layer_norm is wrong (PyTorch 2.15)."""
    model, x = case(name)
    blocks, dense = posterior(model, x.flatten(0, 1))
    joint = OutputCovariance(model, blocks).joint
    f, covariance = joint(x)
    assert not covariance.requires_grad and not f.requires_grad
    expected = brute_force(model, x, dense)
    assert_close(covariance, expected, rtol=1e-10, atol=1e-12)
    mean, alone = OutputCovariance(model, blocks)(x.flatten(0, 1))
    assert_close(f.flatten(0, 1), mean)
    assert_close(torch.cat(blocks_of(covariance, f)), alone, rtol=1e-10, atol=1e-12)
    # Negative control: inputs one by one have no covariance.
    alone = torch.stack([torch.block_diag(*each) for each in blocks_of(covariance, f)])
    assert (alone - expected).norm() > 1e-2 * expected.norm()

    f, covariance = joint(x.requires_grad_())
    weights, direction = torch.randn_like(covariance.detach()), torch.randn_like(x.detach())

    def derivative(of):
        steps = [of(x.detach() + sign * 1e-5 * direction) for sign in (1, -1)]
        return (steps[0] - steps[1]) / 2e-5

    def along(value):
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        return (gradient * direction).sum()

    of_covariance = derivative(lambda x: (weights * brute_force(model, x, dense)).sum())
    of_mean = derivative(lambda x: model(x.flatten(0, 1)).sum()).detach()
    assert_close(along((weights * covariance).sum()), of_covariance, rtol=1e-6, atol=1e-8)
    assert_close(along(f.sum()), of_mean, rtol=1e-6, atol=1e-8)
    # Negative control: without the covariances of different inputs.
    same = torch.block_diag(*[torch.ones(f.shape[2], f.shape[2])] * f.shape[1])
    alone = along((weights * same * covariance).sum())
    assert (alone - of_covariance).abs() > 1e-3 * of_covariance.abs()


def test_some_outputs():
    model, x = case("decides")
    blocks, _ = posterior(model, x.flatten(0, 1))
    joint = OutputCovariance(model, blocks).joint
    f, covariance = joint(x)
    some, of_some = joint(x, [2, 0])
    chosen = [2, 0, 5, 3]
    assert_close(some, f[..., [2, 0]])
    assert_close(of_some, covariance[:, chosen][:, :, chosen])
    with pytest.raises(ValueError, match="classes has the index 3, but the outputs are 0 to 2"):
        joint(x, [3])


def test_what_it_cannot_do_is_named():
    model, x = case("decides")
    blocks, _ = posterior(model, x.flatten(0, 1))
    joint = OutputCovariance(model, blocks).joint
    with pytest.raises(ValueError, match=r"x has shape \(4, 6\). Pass sets of inputs"):
        joint(x.flatten(0, 1))
    with pytest.raises(NotImplementedError, match="Joint covariances need outputs"):
        joint(x[:, :, None].expand(-1, -1, 3, -1))
