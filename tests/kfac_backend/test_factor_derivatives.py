"""The derivative of a function of the factors is that of central differences, for every layer."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.factor_derivatives import BlockDerivative, factor_gradients
from kfac_backend.likelihoods import NegativeBinomial
from tests.kfac_backend.block_checks import MODES, batch_of, targets_of
from tests.kfac_backend.layer_cases import CASES, case
from tests.random_numbers import error, normal

DELTA = 0.7

TOKENS = {
    "Embedding", "Embedding of grids", "Embedding with padding", "language model",
    "language model with padding", "embedded twice, read twice", "padded tokens",
    "padded tokens, one of them padding", "graph network",
}  # fmt: skip
"""Cases whose inputs are integers, or graphs."""
SCALED = {"Conv1d twice", "attention", "experts, inputs first", "counted positions"}
"""Cases with expand's other scaling, in which biases have an input factor."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
    pytest.mark.filterwarnings("ignore:No (K-FAC rule for|hook captures)"),
]


class Moved(nn.Module):
    """A model whose inputs depend on a buffer of two numbers."""

    eta: Tensor

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.register_buffer("eta", torch.tensor([0.1, 0.2], dtype=torch.float64))

    def forward(self, x: Tensor | Mapping) -> Tensor:
        if isinstance(x, Mapping):
            return self.model({key: self.moved(value) for key, value in x.items()})
        return self.model(self.moved(x))

    def moved(self, x: Tensor) -> Tensor:
        return x * (1 + self.eta[0]) + self.eta[1] * x.sin() if x.is_floating_point() else x


def evidence(factors: KroneckerFactors) -> float:
    """−loss − ½ Σ log det(B ⊗ A + δI), from dense blocks."""
    value = -factors.loss
    for block in factors.blocks.values():
        dense = block.to_dense()
        value -= 0.5 * torch.linalg.slogdet(dense + DELTA * torch.eye(len(dense)))[1].item()
    return value


def derivatives(factors: KroneckerFactors) -> dict[str, BlockDerivative]:
    """∂/∂B and ∂/∂A of that log determinant, by autograd through the eigenvalues."""
    found = {}
    for name, block in factors.blocks.items():
        leaves = [F.matrix.clone().requires_grad_() for F in block.factors.values()]
        values = [torch.linalg.eigvalsh(F) for F in leaves]
        of_block = values[0]
        if len(values) == 2:
            of_block = values[0][..., :, None] * values[1][..., None, :]
        value = -0.5 * (of_block.clamp(min=0.0) + DELTA).log().sum()
        found[name] = BlockDerivative(*torch.autograd.grad(value, leaves))
    return found


DIRECTION = torch.tensor([0.6, -0.8], dtype=torch.float64)


def difference(model: Moved, function) -> Tensor:
    """The derivative in a direction of eta, from four values (an error of fourth order)."""
    h, values = 1e-4, []
    for step in (h, -h, 2 * h, -2 * h):
        model.eta += step * DIRECTION
        values.append(function())
        model.eta -= step * DIRECTION
    return torch.tensor((8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h))


def problem(name: str, likelihood: str):
    """A case in float64 whose inputs depend on eta, and its data."""
    model, x = case(name)
    model = Moved(model).double().train(model.training)
    if isinstance(x, Mapping):
        x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
    else:
        x = x.double()
    f = model(x).detach()
    return model, [batch_of(x, targets_of(f, likelihood))]


@pytest.mark.parametrize("name", sorted(CASES.keys() - TOKENS - {"no rule", "autoencoder"}))
def test_gradient_is_that_of_differences(name):
    """In one of the modes: rows of either are paired with G in the same way."""
    likelihood = ("classification", "regression")[len(name) % 2]
    mode, (model, data) = MODES[len(name) // 2 % 2], problem(name, likelihood)
    options = {"kfac_approx": mode, **({"expand_scaling": "examples"} if name in SCALED else {})}
    factors = kronecker_factors(model, data, likelihood, **options)
    of_factors = derivatives(factors)
    (found,) = factor_gradients(factors, model, data, [model.eta], of_factors, of_loss=-1.0)
    curvature = CurvaturePass(model, likelihood, **options)  # which proves the model once
    expected = difference(model, lambda: evidence(curvature.factors_of(data)))
    assert error(found @ DIRECTION, expected) < 1e-6
    assert not model.eta.requires_grad
    # Control: gradients depend on eta, too, so the derivative of B is needed.
    only_A = {
        name: BlockDerivative(torch.zeros_like(of.B), of.A) for name, of in of_factors.items()
    }
    (without,) = factor_gradients(factors, model, data, [model.eta], only_A, of_loss=-1.0)
    assert error(without, found) > 1e-3


@pytest.mark.parametrize("name", ["Conv1d", "scalars of images"])
def test_random_part_of_the_data_is_scaled_and_batches_add_up(name):
    model, [(x, y)] = problem(name, "classification")
    whole = kronecker_factors(model, [(x, y)], "classification")
    parts = [(x[:1], y[:1]), (x[1:], y[1:])]
    of_factors = derivatives(whole)
    (expected,) = factor_gradients(whole, model, [(x, y)], [model.eta], of_factors, -1.0)
    (found,) = factor_gradients(whole, model, parts, [model.eta], of_factors, -1.0)
    assert error(found, expected) < 1e-12
    of_parts = [
        factor_gradients(whole, model, [part], [model.eta], of_factors, -1.0)[0] for part in parts
    ]
    shares = [len(part[1]) / len(y) for part in parts]
    mean = torch.stack([share * of for share, of in zip(shares, of_parts, strict=True)]).sum(0)
    assert error(mean, expected) < 1e-12
    assert error(of_parts[0], expected) > 1e-2


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_draws_are_unbiased(likelihood):
    torch.manual_seed(0)
    model, data = problem("Linear", likelihood)
    factors = kronecker_factors(model, data, likelihood, kfac_approx="reduce")
    of_factors = derivatives(factors)
    options = factors.options.replace(fisher="mc", mc_samples=50)
    (exact,) = factor_gradients(factors, model, data, [model.eta], of_factors)
    draws = [
        factor_gradients(factors, model, data, [model.eta], of_factors, options=options)[0]
        for _ in range(10)
    ]
    mean, spread = torch.stack(draws).mean(0), torch.stack(draws).std(0) / math.sqrt(len(draws))
    assert ((mean - exact).abs() < 4 * spread).all()
    assert (spread < 0.1 * exact.abs()).all()


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_likelihoods_number(fisher):
    """Gradients of the loss are made while hooks listen, which must not hear them."""
    model, r = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), 2.0
    data = [(normal(6, 3), torch.arange(6, dtype=torch.float64)[:, None])]

    def factors_at(r):
        return kronecker_factors(model, data, NegativeBinomial(r=r), fisher=fisher)

    factors, leaf = factors_at(r), torch.tensor(r, dtype=torch.float64)
    likelihood = factors.likelihood.with_parameters({"r": leaf})
    (found,) = factor_gradients(
        replace(factors, likelihood=likelihood), model, data, [leaf], derivatives(factors)
    )
    of_det = [-0.5 * factors_at(r + step).log_det(DELTA) for step in (1e-4, -1e-4)]
    assert_close(found, (of_det[0] - of_det[1]) / 2e-4, rtol=1e-6, atol=0)


def test_two_uses_of_a_tensor_are_refused():
    model, data = problem("autoencoder", "regression")
    factors = kronecker_factors(model, data, "regression")
    with pytest.raises(NotImplementedError, match="encode.weight"):
        factor_gradients(factors, model, data, [model.eta], derivatives(factors))
