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


VALUE_ERRORS = {
    "BatchNorm without running statistics": (
        nn.Sequential(
            nn.BatchNorm1d(3, affine=False, track_running_stats=False), nn.Linear(3, 2)
        ).eval(),
        "keeps no running statistics",
    ),
    "no trainable parameter": (nn.Linear(3, 2).requires_grad_(False), "no trainable parameter"),
    "no parameter at all": (nn.ReLU(), "no trainable parameter"),
    "BatchNorm in train mode": (
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)),
        "model.eval\\(\\)",
    ),
    "0-dimensional parameter": (
        Lambda(lambda m, x: m.fc(x) * m.s, fc=nn.Linear(3, 2), s=nn.Parameter(torch.tensor(1.0))),
        "'s' is 0-dimensional",
    ),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_models_without_a_defined_curvature(case):
    model, message = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        factors(model)


def test_nothing_but_unsupported_layers_left():
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="No trainable parameter of the"),
    ):
        factors(Lambda(lambda m, x: m.fc(x, x), fc=nn.Bilinear(3, 3, 2)), unsupported="freeze")


@pytest.mark.parametrize("option", ["kfac_approx", "fisher", "unsupported"])
def test_unknown_options_list_the_known_ones(option):
    with pytest.raises(ValueError, match=f"{option}='nonsense' is not supported; choose one of '"):
        factors(nn.Linear(3, 2), **{option: "nonsense"})


def test_unknown_likelihood_and_samples():
    with pytest.raises(ValueError, match="likelihood='poisson'"):
        kronecker_factors(nn.Linear(3, 2), [(X, Y)], "poisson")
    with pytest.raises(ValueError, match="mc_samples must be at least 1, not 0"):
        factors(nn.Linear(3, 2), mc_samples=0)


def test_bad_data():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="The data is empty"):
        kronecker_factors(model, [], "classification")
    with pytest.raises(TypeError, match="'fc' .Linear. got an input of dtype torch.uint8.*x.float"):
        factors(Lambda(lambda m, x: m.fc(x), fc=model), (X * 9).byte())
    with pytest.raises(ValueError, match="inputs contain NaN"):
        factors(model, X.clone().index_fill_(0, torch.tensor([1]), torch.nan))
    with pytest.raises(ValueError, match="Label 2 is out of range"):
        factors(model, y=torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="A batch has no examples"):
        factors(model, X[:0], Y[:0])
    with pytest.raises(TypeError, match="expected \\(x, y\\)"):
        kronecker_factors(model, [X[0]], "classification")


def test_inputs_without_a_batch_axis():
    with pytest.raises(ValueError, match="Linear.* got shape \\(3,\\); needs a batch"):
        factors(nn.Linear(3, 2), X[0], Y[:1])
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(0), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="Conv2d.* got shape \\(3, 2, 2\\); needs a batch"):
        factors(model, torch.randn(3, 2, 2), Y[:1])


def test_nan_in_weights_and_overflow_are_told_apart():
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="Parameter '0.weight' contains NaN"):
        factors(model)
    deeper = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), model[0])
    with pytest.raises(ValueError, match="Parameter '2.weight' contains NaN"):
        factors(deeper)
    overflow = Lambda(lambda m, x: m.fc(x) * 1e38 * 1e38, fc=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="activations overflow"):
        factors(overflow)


def test_hooks_are_removed_after_an_error():
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="Label 5 is out of range"):
        factors(model, y=torch.tensor([0, 1, 5, 0]))
    assert not model[0]._forward_hooks
