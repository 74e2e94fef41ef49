"""Norms, PReLU and own parameters: exact in any mode, diagonal if large, and named errors."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors, register_parameters
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers import gram, registry
from tests.kfac_backend.block_checks import assert_blocks, randomize, with_statistics
from tests.kfac_backend.covariance.posteriors import brute_force, dense_precision, precision_of
from tests.kfac_backend.layer_cases import case
from tests.kfac_backend.networks import Model, random_model
from tests.oracles import dense_ggn_blocks, ggn_blocks
from tests.random_numbers import error, normal


@pytest.mark.parametrize(
    "name", ["LayerNorm", "LayerNorm twice", "BatchNorm2d", "PReLU", "own parameters"]
)
def test_large_parameters_have_the_exact_diagonal(monkeypatch, name):
    """Which covariances take as it is."""
    monkeypatch.setattr(gram, "LARGEST_DENSE", 1)
    model, x = case(name)
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    factors = kronecker_factors(model, [(x, torch.arange(len(x)) % 3)], "classification")
    for parameter, block in exact.items():
        if len(block) == 1 or parameter.startswith("head"):
            continue
        assert factors.blocks[parameter].B.shape == (len(block), 1, 1)
        assert_close(factors.to_dense(parameter), block.diagonal().diag(), rtol=1e-9, atol=1e-12)
        # Control: off the diagonal the block is not zero; of BatchNorm2d it is small, 0.019.
        assert error(factors.to_dense(parameter), block) > 0.015
    f, covariance = OutputCovariance(model, precision_of(factors))(x)
    expected = brute_force(model, x, dense_precision(factors))
    assert_close(covariance, expected, rtol=1e-9, atol=1e-11)


# --- rows whose examples the model tells ---


def on_nodes(layer: nn.Module, index: Tensor, is_declared: bool = True) -> nn.Module:
    """A layer on rows (V, d) of examples with different numbers of them, which are summed."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)[: len(index)]  # (V, d)
        with examples_of_rows(index if is_declared else None, len(x)):
            rows = torch.tanh(m.layer(rows))
        counted = rows * (index >= 0)[:, None]
        return m.head(torch.zeros_like(x[:, 0]).index_add(0, index.clamp(min=0), counted))

    model = random_model(forward, layer=layer, head=nn.Linear(4, 3))
    with_statistics(model)
    return model


LAYERS_ON_ROWS = {
    "LayerNorm": lambda: nn.LayerNorm(4), "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4), "PReLU": lambda: nn.PReLU(4),
    "one slope": lambda: nn.PReLU(),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_ON_ROWS)
def test_rows_of_examples(name):
    index = torch.tensor([2, 0, 2, -1, 2, 0])  # example 1 has no row
    model = on_nodes(LAYERS_ON_ROWS[name](), index)
    x, y = normal(3, 2, 4), torch.tensor([0, 1, 2])
    exact = ggn_blocks(model, lambda run: run(x), "classification")
    expected = {name: block for name, block in exact.items() if name.startswith("layer.")}
    assert_blocks(kronecker_factors(model, [(x, y)], "classification"), expected)
    untold = on_nodes(LAYERS_ON_ROWS[name](), index, is_declared=False)
    with pytest.raises(NotImplementedError, match="got 6 rows in a batch of 3 examples"):
        kronecker_factors(untold, [(x, y)], "classification")


@pytest.mark.parametrize(
    "layer",
    [nn.PReLU(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm((4, 4))],
    ids=lambda layer: type(layer).__name__,
)
def test_parameters_of_an_axis_of_rows_are_a_named_error(layer):
    """As many rows as features, so that all shapes would fit."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with counted_positions(torch.ones(x.shape[:2], dtype=torch.bool)):
            x = torch.tanh(m.layer(x))
        return m.head(x.mean(1))

    model = random_model(forward, layer=layer, head=nn.Linear(4, 3))
    x, y = normal(4, 4, 4), torch.tensor([0, 1, 2, 0])
    message = (
        rf"{type(layer).__name__}\(.* has separate parameters .* the first 2 .*counted_positions"
    )
    with pytest.raises(NotImplementedError, match=message):
        kronecker_factors(model, [(x, y)], "classification")


# --- own parameters, declared by register_parameters ---


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    known = {cls: dict(views) for cls, views in registry.PARAMETERS.items()}
    monkeypatch.setattr(registry, "PARAMETERS", known)


@pytest.mark.parametrize("view", [(), (2, 1, 3)])
def test_a_view_that_does_not_begin_with_one(view):
    with pytest.raises(ValueError, match="'scale' must begin with 1, which becomes N"):
        register_parameters(scale=view)


class Uses(Model):
    """Has one own parameter, used as a function says."""


def using(use, shape=(1, 2, 3)) -> nn.Module:
    return randomize(
        Uses(
            lambda m, x: m.head(torch.tanh(use(x, m.p)).mean(1)),
            p=torch.ones(shape),
            head=nn.Linear(3, 2),
        )
    )


ELEMENTWISE = {
    "added": lambda x, p: x + p,
    "without its first axis": lambda x, p: x * p.squeeze(0),
    "twice": lambda x, p: x * p + p.sin(),
    "some of it": lambda x, p: x + p[:, :1],
    "normalised within": lambda x, p: x * p.softmax(-1) / p.norm(dim=(1, 2), keepdim=True),
}
NOT_ELEMENTWISE = {
    "summed": lambda x, p: x + p.sum(0),
    "averaged": lambda x, p: x + p.mean(0),
    "the first": lambda x, p: x + p[0],
    "repeated": lambda x, p: x + p.repeat(len(x), 1, 1),
    "reshaped": lambda x, p: x + p.view(2, 3),
    "normalised": lambda x, p: x * p / p.norm(),
    "softmax over the first axis": lambda x, p: x * p.softmax(0),
    "unpacked": lambda x, p: x + next(iter([row for (row,) in [p]])),
    "with another derivative": lambda x, p: x + p.detach() + 2 * (p - p.detach()) * (len(p) == 1),
}


@pytest.mark.parametrize("use", ELEMENTWISE)
def test_elementwise_uses(use):
    register_parameters("p")(Uses)
    model, x = using(ELEMENTWISE[use]), normal(4, 2, 3)
    exact = {"p": dense_ggn_blocks(model, x, "classification")["p"]}
    y = torch.tensor([0, 1, 1, 0])
    for batches in ([(x, y)], [(x[:1], y[:1]), (x[1:], y[1:])]):
        assert_blocks(kronecker_factors(model, batches, "classification"), exact)


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("use", NOT_ELEMENTWISE)
def test_other_uses_are_a_named_error(use, first):
    register_parameters("p")(Uses)
    model, x, y = using(NOT_ELEMENTWISE[use]), normal(4, 2, 3), torch.arange(4) % 2
    batches = [(x[:first], y[:first]), (x, y)]  # one example mixes with none
    with pytest.raises(NotImplementedError, match="one copy per example of 'p'.*elementwise"):
        kronecker_factors(model, batches, "classification")


def test_shapes_that_need_a_view_or_do_not_fit_theirs():
    x, y = normal(4, 2, 3), torch.arange(4) % 2
    model = using(lambda x, p: x * p, (3,))
    register_parameters("p")(Uses)
    with pytest.raises(NotImplementedError, match=r"'p' of Uses has shape \(3,\).*p=\(1, ...\)"):
        kronecker_factors(model, [(x, y)], "classification")
    for view in ((1, 1, 4), (1, -1, -1)):
        register_parameters(p=view)(Uses)
        with pytest.raises(ValueError, match="'p' of Uses has shape .3,., which does not fit"):
            kronecker_factors(model, [(x, y)], "classification")
    register_parameters(p=(1, -1))(Uses)  # (N, d) is not broadcast to (N, R, d)
    with pytest.raises(NotImplementedError, match="pass register_parameters the broadcast"):
        kronecker_factors(model, [(x, y)], "classification")
