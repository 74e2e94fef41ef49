"""Norms and PReLU: their blocks are the exact ones, in either mode and for each kind of Fisher."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors
from kfac_backend.layers import gram
from tests.kfac_backend.block_checks import (
    MODES,
    assert_blocks,
    randomize,
    with_statistics,
)
from tests.oracles import (
    dense_ggn_blocks,
    empirical_fisher_blocks,
    ggn_blocks,
    layer_jacobians,
    loss_hessian,
)
from tests.random_numbers import error, normal


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's, over the channels of images (N, C, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RMSNorm2d(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Residual(nn.LayerNorm):
    """Another output than the class's, but the same derivative in weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


CASES = {
    # name: (layer, shape of one example of its input)
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm, positions": (lambda: nn.LayerNorm(4), (3, 4)),
    "LayerNorm over two axes": (lambda: nn.LayerNorm((2, 3)), (2, 3)),
    "LayerNorm over two axes, positions": (lambda: nn.LayerNorm((2, 3), eps=0.1), (3, 2, 3)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "LayerNorm of one entry": (lambda: nn.LayerNorm(1), (3, 1)),
    "LayerNorm over channels": (lambda: LayerNorm2d(3), (3, 2, 4)),
    "LayerNorm over channels, as many as columns": (lambda: LayerNorm2d(3), (3, 2, 3)),
    "LayerNorm in a derived layer": (lambda: Residual(4), (3, 4)),
    "RMSNorm over channels": (lambda: RMSNorm2d(3), (3, 2, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (4,)),
    "RMSNorm with eps": (lambda: nn.RMSNorm(4, eps=0.3), (3, 4)),
    "GroupNorm, no positions": (lambda: nn.GroupNorm(2, 6), (6,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4, eps=0.1), (4, 3)),
    "GroupNorm of images": (lambda: nn.GroupNorm(1, 4), (4, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, eps=0.1, affine=True), (3, 2, 2)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 1, 2)),
    "InstanceNorm1d, running": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        (3, 4),
    ),
    "InstanceNorm2d, running": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (3, 2, 2),
    ),
    "BatchNorm1d, no positions": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3, eps=0.1), (3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 2)),
    "PReLU, one slope": (lambda: nn.PReLU(), (4,)),
    "PReLU, one slope, images": (lambda: nn.PReLU(), (3, 2, 2)),
    "PReLU": (lambda: nn.PReLU(4), (4,)),
    "PReLU, lines": (lambda: nn.PReLU(3), (3, 4)),
}


class Around(nn.Module):
    """The layer ``times`` times, and logits of the whole example or of each of its positions."""

    def __init__(self, layer: nn.Module, d_in: int, positions: bool = False, times: int = 1):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(d_in, 3)
        self.positions, self.times = positions, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x)) + 0.3 * x
        if self.positions:
            return self.head(x + 0.5 * x.roll(1, 1))  # (N, R, C)
        return self.head(x.flatten(1))


def setting(name: str, **options) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and labels of four examples."""
    build, shape = CASES[name]
    model = Around(build(), shape[-1] if "positions" in options else torch.Size(shape).numel())
    vars(model).update(options)
    model = randomize(model)
    with_statistics(model)
    x = normal(4, *shape, seed=3)
    return model, x, torch.arange(model(x)[..., 0].numel()).view(model(x).shape[:-1]) % 3


def of_layer(blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: block for name, block in blocks.items() if name.startswith("layer.")}


@pytest.mark.parametrize("name", CASES)
def test_exact_in_both_modes_and_for_the_empirical_fisher(name):
    model, x, y = setting(name)
    expected = of_layer(dense_ggn_blocks(model, x, "classification"))
    assert len(expected) == len(list(model.layer.parameters()))
    assert all(block.norm() > 1e-3 for block in expected.values()) or name.endswith("one entry")
    # Whichever way the batches are cut.
    split = [(x[:1], y[:1]), (x[1:], y[1:])]
    for data, options in (
        ([(x, y)], {"kfac_approx": "expand"}),
        (split, {"kfac_approx": "reduce"}),
    ):
        factors = kronecker_factors(model, data, "classification", **options)
        assert_blocks(factors, expected)
        assert all(factors.blocks[name].A is None for name in expected)
    expected = of_layer(empirical_fisher_blocks(model, x, y, "classification"))
    assert_blocks(kronecker_factors(model, split, "classification", fisher="empirical"), expected)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
@pytest.mark.parametrize(
    "name", ["LayerNorm, positions", "GroupNorm", "BatchNorm1d", "PReLU, lines"]
)
def test_several_loss_terms(name, likelihood):
    model, x, y = setting(name, positions=True)
    y = y if likelihood == "classification" else normal(*model(x).shape).sigmoid()
    expected = of_layer(ggn_blocks(model, lambda run: run(x), likelihood))
    fisher = of_layer(empirical_fisher_blocks(model, x, y, likelihood))
    for mode in MODES:
        factors = kronecker_factors(model, [(x, y)], likelihood, kfac_approx=mode)
        assert_blocks(factors, expected)
    assert_blocks(kronecker_factors(model, [(x, y)], likelihood, fisher="empirical"), fisher)


def test_positions_as_examples_would_be_another_block():
    """Negative control: what expand does to a linear layer, done to a norm."""
    model, x, y = setting("LayerNorm, positions")
    _, b = layer_jacobians(model, "layer", x)  # (N, 1, C, R, d)
    z = nn.functional.layer_norm(x, (4,))
    by_position = torch.zeros(4, 4).double()
    for n in range(len(x)):
        Lambda = loss_hessian(model(x)[n], "classification")
        for r in range(3):
            J = b[n, 0, :, r] * z[n, r]  # (C, d)
            by_position += J.T @ Lambda @ J
    exact = dense_ggn_blocks(model, x, "classification")["layer.weight"]
    assert error(by_position, exact) > 0.1


@settings(max_examples=20, deadline=None)
@given(
    positions=st.lists(st.integers(1, 3), max_size=2),
    normalised=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    layer=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
)
def test_norms_of_any_shape(positions, normalised, layer):
    shape = (*positions, *normalised)
    model = randomize(Around(layer(normalised, eps=0.1), torch.Size(shape).numel()))
    x = normal(2, *shape, seed=1)
    expected = of_layer(ggn_blocks(model, lambda run: run(x), "classification"))
    y = torch.tensor([0, 2])
    assert_blocks(kronecker_factors(model, [(x, y)], "classification"), expected)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", ["LayerNorm, positions", "BatchNorm2d", "PReLU, lines"])
def test_large_parameters_have_the_exact_diagonal(monkeypatch, name, times):
    monkeypatch.setattr(gram, "LARGEST_DENSE", 2)
    model, x, y = setting(name, times=times)
    exact = of_layer(ggn_blocks(model, lambda run: run(x), "classification"))
    factors = kronecker_factors(model, [(x, y)], "classification")
    for parameter, block in exact.items():
        assert factors.blocks[parameter].B.shape == (len(block), 1, 1)
        assert_close(factors.to_dense(parameter), block.diagonal().diag(), rtol=1e-9, atol=1e-12)
        assert error(factors.to_dense(parameter), block) > 0.05  # off the diagonal it is not zero


class TwoNorms(Around):
    """As a layer that runs twice, but of two layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = torch.tanh(layer(x)) + 0.3 * x
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    "name",
    [
        "LayerNorm over two axes, positions", "RMSNorm with eps", "GroupNorm",
        "InstanceNorm1d, running", "BatchNorm1d, no positions", "PReLU, one slope",
    ],
)  # fmt: skip
def test_uses_add_up_before_the_outer_product(name):
    model, x, y = setting(name, times=2)
    expected = of_layer(ggn_blocks(model, lambda run: run(x), "classification"))
    for mode in MODES:
        factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=mode)
        assert_blocks(factors, expected)
    # Negative control: the sum of what each use adds alone lacks the terms between them.
    twice = TwoNorms(nn.ModuleList([model.layer, copy.deepcopy(model.layer)]), 1)
    twice.head = model.head
    assert_close(twice(x), model(x))
    apart = kronecker_factors(twice, [(x, y)], "classification")
    for parameter, block in expected.items():
        local = parameter.removeprefix("layer.")
        both = apart.to_dense(f"layer.0.{local}") + apart.to_dense(f"layer.1.{local}")
        assert error(both, block) > 0.05


@pytest.mark.parametrize("name", ["LayerNorm, positions", "PReLU, one slope, images"])
def test_mc_fisher_is_right_on_average(name):
    model, x, y = setting(name)
    exact = of_layer(ggn_blocks(model, lambda run: run(x), "classification"))
    generator = torch.Generator().manual_seed(0)
    options = {"fisher": "mc", "generator": generator}
    many = kronecker_factors(model, [(x, y)], "classification", mc_samples=2000, **options)
    few = kronecker_factors(model, [(x, y)], "classification", mc_samples=4, **options)
    for parameter, block in exact.items():
        assert error(many.to_dense(parameter), block) < 0.06
        assert error(many.to_dense(parameter), block) < error(few.to_dense(parameter), block)


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_stay(training):
    model, x, y = setting("InstanceNorm1d, running")
    model.train(training)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    factors = kronecker_factors(model, [(x, y)], "classification")
    # torch 2.9 itself writes the mean of N equal rows back in eval mode: another last bit.
    by_torch = torch.__version__.startswith("2.9.") and not training
    for name, buffer in model.named_buffers():
        assert_close(buffer, before[name], rtol=1e-15 if by_torch else 0, atol=0)
    assert model.layer.training == training
    assert_blocks(factors, of_layer(ggn_blocks(model, lambda run: run(x), "classification")))


def test_batch_norm_that_mixes_examples_is_an_error():
    model, x, y = setting("BatchNorm1d")
    with pytest.raises(ValueError, match="'layer' .BatchNorm1d. is in train mode.*model.eval"):
        kronecker_factors(model.train(), [(x, y)], "classification")


# --- rows whose examples the model tells ---


class Nodes(nn.Module):
    """A layer on rows (V, d) of examples with different numbers of them, which are summed."""

    def __init__(self, layer: nn.Module, index: Tensor, declared: bool = True):
        super().__init__()
        self.layer, self.head, self.index = layer, nn.Linear(4, 3), index
        self.declared = declared

    def forward(self, x: Tensor) -> Tensor:
        N, index = len(x), self.index
        rows = x.flatten(0, 1)[: len(index)]  # (V, d)
        with examples_of_rows(index if self.declared else None, N):
            rows = torch.tanh(self.layer(rows))
        counted = rows * (index >= 0)[:, None]
        return self.head(torch.zeros_like(x[:, 0]).index_add(0, index.clamp(min=0), counted))


LAYERS_ON_ROWS = {
    "LayerNorm": lambda: nn.LayerNorm(4), "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4), "PReLU": lambda: nn.PReLU(4),
    "one slope": lambda: nn.PReLU(),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_ON_ROWS)
def test_rows_of_examples(name):
    index = torch.tensor([2, 0, 2, -1, 2, 0])  # example 1 has no row
    model = randomize(Nodes(LAYERS_ON_ROWS[name](), index))
    with_statistics(model)
    x, y = normal(3, 2, 4), torch.tensor([0, 1, 2])
    expected = of_layer(ggn_blocks(model, lambda run: run(x), "classification"))
    assert_blocks(kronecker_factors(model, [(x, y)], "classification"), expected)
    model.declared = False
    with pytest.raises(NotImplementedError, match="got 6 rows in a batch of 3 examples"):
        kronecker_factors(model, [(x, y)], "classification")


class Masked(nn.Module):
    """A layer on (N, R, d), whose first two axes are rows."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with counted_positions(torch.ones(x.shape[:2], dtype=torch.bool)):
            x = torch.tanh(self.layer(x))
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    "layer",
    [nn.PReLU(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm((4, 4))],
    ids=lambda layer: type(layer).__name__,
)
def test_parameters_of_an_axis_of_rows_are_a_named_error(layer):
    # As many rows as features, so that all shapes would fit.
    model, x, y = randomize(Masked(layer)), normal(4, 4, 4), torch.tensor([0, 1, 2, 0])
    message = (
        rf"{type(layer).__name__}\(.* has separate parameters .*counted_positions.* the first 2"
    )
    with pytest.raises(NotImplementedError, match=message):
        kronecker_factors(model, [(x, y)], "classification")


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU()])
def test_rows_of_two_axes(layer):
    model, x, y = randomize(Masked(layer)), normal(4, 4, 4), torch.tensor([0, 1, 2, 0])
    factors = kronecker_factors(model, [(x, y)], "classification")
    assert_blocks(factors, of_layer(dense_ggn_blocks(model, x, "classification")))
