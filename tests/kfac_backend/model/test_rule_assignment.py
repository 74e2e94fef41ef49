"""A wrong number is worse than an error: each way out of the hooks' sight has a named one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_backend import kronecker_factors
from tests.oracles import dense_ggn_blocks

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def factors(model, x=X, y=Y, **options):
    return kronecker_factors(model, [(x, y)], "classification", **options)


class Lambda(nn.Module):
    """A function of named children."""

    def __init__(self, function, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class ScaledLinear(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight / self.weight.norm(), self.bias)


class WithExtra(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, input):
        return super().forward(input) * self.gain


def with_unit_norm(layer):
    with torch.no_grad():
        layer.weight /= layer.weight.norm()
    return layer


def with_hook(model):
    model[0].register_forward_hook(lambda layer, args, output: 3 * output)
    return model


def with_patched_forward(layer):
    layer.forward = lambda x: F.linear(x, layer.weight * 2, layer.bias)
    return layer


def under_no_grad(layer, x):
    with torch.no_grad():
        return layer(x)


def shared_in_different_ways():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[1].bias = model[0].bias
    return model


def shared_with_an_unknown_layer():
    model = nn.Sequential(nn.Linear(3, 3), nn.Bilinear(3, 3, 3))
    model[1].bias = model[0].bias
    return Lambda(lambda m, x: m.layers[1](m.layers[0](x), x), layers=model)


NOT_IMPLEMENTED = {
    "LSTM": (Lambda(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 2)), "layer 'rnn' \\(LSTM\\)"),
    "shared in different ways": (
        shared_in_different_ways(),
        "'0.bias' is used in different ways by '0' \\(Linear\\) and '1' \\(LayerNorm\\)",
    ),
    "functional use behind the last layer": (
        Lambda(lambda m, x: m.fc(x) * m.fc.weight.sum(), fc=nn.Linear(3, 2)),
        "'fc.weight' reached the model's output",
    ),
    "subclass that computes something else": (
        nn.Sequential(ScaledLinear(3, 2)),
        "computes something other than its class Linear",
    ),
    "subclass with another derivative only": (
        nn.Sequential(with_unit_norm(ScaledLinear(3, 2))),
        "computes something other than its class Linear",
    ),
    "forward patched on the instance": (
        with_patched_forward(nn.Linear(3, 2)),
        "computes something other",
    ),
    "positions first, as many as examples": (
        Lambda(lambda m, x: m.fc(x[:, None] * torch.ones(4, 4, 1)).mean(0), fc=nn.Linear(3, 2)),
        "the rows of different examples mix",
    ),
    "normalised over the batch": (
        Lambda(
            lambda m, x: m.out(F.batch_norm(m.fc(x), None, None, training=True)),
            fc=nn.Linear(3, 3),
            out=nn.Linear(3, 2),
        ),
        "layer 'fc' \\(Linear\\) the rows of different examples mix",
    ),
    "layer under no_grad": (
        Lambda(lambda m, x: m.out(under_no_grad(m.fc, x)), fc=nn.Linear(3, 3), out=nn.Linear(3, 2)),
        "'fc' \\(Linear\\) runs without gradients",
    ),
}


@pytest.mark.parametrize("case", NOT_IMPLEMENTED)
def test_what_hooks_cannot_see_is_a_named_error(case):
    model, message = NOT_IMPLEMENTED[case]
    with pytest.raises(NotImplementedError, match=message) as raised:
        factors(model)
    assert "requires_grad_(False)" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_with_two_names():
    layer = nn.Linear(3, 2)
    model = nn.ModuleDict({"first": layer, "again": nn.Sequential(layer)})
    model.forward = lambda x: layer(x)
    assert list(factors(model).blocks) == ["first.weight", "first.bias"]
    # torch's functional_call with tied weights would leave plain tensors behind.
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.requires_grad


@pytest.mark.filterwarnings("ignore:Treated as constants")
def test_a_tensor_that_a_layer_without_a_rule_shares():
    model = shared_with_an_unknown_layer().double()
    for unsupported in ("error", "freeze"):  # what has a rule is not frozen
        with pytest.raises(NotImplementedError, match="'layers.0.bias' reached .* by a layer with"):
            factors(model, X.double(), unsupported=unsupported)
    found = factors(model, X.double(), unsupported="diagonal")
    exact = dense_ggn_blocks(model, X, "classification")
    for name in ("layers.0.bias", "layers.1.weight"):
        diagonal = exact[name].diagonal().diag()
        torch.testing.assert_close(found.to_dense(name), diagonal)


@pytest.mark.parametrize("grid", [torch.randn(5, 3), torch.randn(1, 5, 3)])
@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_layer_that_runs_once_for_all_examples(grid, kfac_approx, n):
    layers = {"pos": nn.Linear(3, 3), "out": nn.Linear(3, 2)}
    once = Lambda(
        lambda m, x: m.out(torch.tanh(x[:, None] + m.pos(m.grid))).sum(1), **layers, grid=grid
    )
    each = Lambda(
        lambda m, x: m.out(torch.tanh(x[:, None] + m.pos(m.grid.expand(len(x), 5, 3)))).sum(1),
        **layers,
        grid=grid,
    )
    found = factors(once, X[:n], Y[:n], kfac_approx=kfac_approx)
    expected = factors(each, X[:n], Y[:n], kfac_approx=kfac_approx)
    for name, block in found.blocks.items():
        torch.testing.assert_close(block.to_dense(), expected.to_dense(name))
        assert block.num_terms == expected.blocks[name].num_terms


def test_examples_that_mix_after_a_first_batch_of_one():
    model = Lambda(lambda m, x: m.out(m.fc(x).roll(1, 0)), fc=nn.Linear(3, 3), out=nn.Linear(3, 2))
    factors(model, X[:1], Y[:1])  # one example mixes with none
    with pytest.raises(NotImplementedError, match="layer 'fc' .*rows of different examples mix"):
        kronecker_factors(model, [(X[:1], Y[:1]), (X, Y)], "classification")


def test_random_numbers_are_not_touched():
    model = nn.Linear(3, 2)
    state = torch.random.get_rng_state()
    factors(model)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_error_lists_the_supported_layers():
    model = Lambda(lambda m, x: m.fc(x, x), fc=nn.Bilinear(3, 3, 2))
    with pytest.raises(NotImplementedError, match="Supported: Linear, Conv.*PReLU.*Bias, Scale"):
        factors(model)


@pytest.mark.parametrize("layer", [nn.LSTM(3, 2), nn.GRUCell(3, 2)])
def test_recurrent_layers_name_the_way_out(layer):
    with pytest.raises(NotImplementedError, match="a cell written with nn.Linear works"):
        factors(Lambda(lambda m, x: m.rnn(x)[0], rnn=layer))


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_positions_folded_into_the_batch_axis(kfac_approx):
    model = Lambda(lambda m, x: m.fc(x.flatten(0, 1)).view(4, 3, 2).mean(1), fc=nn.Linear(3, 2))
    unfolded = Lambda(lambda m, x: m.fc(x).mean(1), fc=model.fc)
    x = torch.randn(4, 3, 3)
    with pytest.raises(NotImplementedError, match="12 rows in a batch of 4"):  # for four alone
        factors(model, x, kfac_approx="reduce")
    model = Lambda(
        lambda m, x: m.fc(x.flatten(0, 1)).unflatten(0, (len(x), -1)).mean(1), fc=model.fc
    )
    found = factors(model, x, kfac_approx=kfac_approx)
    expected = factors(unfolded, x, kfac_approx=kfac_approx)
    for name in found.blocks:
        torch.testing.assert_close(found.to_dense(name), expected.to_dense(name))


def test_rows_folded_in_another_order_are_not_guessed():
    model = Lambda(lambda m, x: m.fc(x.mT.flatten(0, 1)).unflatten(0, (3, -1)), fc=nn.Linear(4, 2))
    turned = Lambda(lambda m, x: model(x).mean(0), fc=model.fc)
    turned.forward = lambda x: (
        turned.fc(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (3, -1)).mean(0)
    )
    x = torch.randn(4, 3, 4)
    assert factors(turned, x).blocks  # expand need not know
    with pytest.raises(NotImplementedError, match="12 rows in a batch of 4"):
        factors(turned, x, kfac_approx="reduce")


def test_nothing_but_unsupported_layers_left():
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="No trainable parameter of the"),
    ):
        factors(Lambda(lambda m, x: m.fc(x, x), fc=nn.Bilinear(3, 3, 2)), unsupported="freeze")
