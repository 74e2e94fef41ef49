"""All of torch.nn: each layer with parameters is right against brute force, or a named error.

One example with one position makes every layer's block exact, whatever it shares.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests import oracles

TOKENS = torch.tensor([[2]])


def noise(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def one(*shape):
    """One example."""
    return noise(1, *shape)


def images(axes, channels=4, size=3):
    return one(channels, *[size] * axes)


RIGHT = {
    "Linear": (lambda: nn.Linear(3, 4), one(3)),
    "LazyLinear": (lambda: nn.LazyLinear(4), one(3)),
    "Embedding": (lambda: nn.Embedding(5, 4), TOKENS),
    "PReLU": (lambda: nn.PReLU(3), one(3)),
    "LayerNorm": (lambda: nn.LayerNorm(5), one(5)),
    "RMSNorm": (lambda: nn.RMSNorm(5), one(5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), images(1)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), images(2)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), one(1, 4)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 5), one(1, 4)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 5), one(1, 4)),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5), 2),
        one(1, 4),
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 5), 2),
        one(1, 4),
    ),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 5), one(1, 4)),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2], div_value=1.0),
        one(4),
    ),
}
for axes in (1, 2, 3):
    for lazy in ("", "Lazy"):
        channels = () if lazy else (4,)
        RIGHT |= {
            f"{lazy}Conv{axes}d": (
                lambda axes=axes, lazy=lazy, channels=channels: getattr(nn, f"{lazy}Conv{axes}d")(
                    *channels, 3, 3
                ),
                images(axes),
            ),
            f"{lazy}ConvTranspose{axes}d": (
                lambda axes=axes, lazy=lazy, channels=channels: getattr(
                    nn, f"{lazy}ConvTranspose{axes}d"
                )(*channels, 3, 2),
                images(axes, size=1),
            ),
            f"{lazy}BatchNorm{axes}d": (
                lambda axes=axes, lazy=lazy, channels=channels: getattr(
                    nn, f"{lazy}BatchNorm{axes}d"
                )(*channels),
                images(axes),
            ),
            f"{lazy}InstanceNorm{axes}d": (
                lambda axes=axes, lazy=lazy, channels=channels: getattr(
                    nn, f"{lazy}InstanceNorm{axes}d"
                )(*channels, affine=True),
                images(axes),
            ),
        }

NAMED = {
    "Bilinear": (lambda: nn.Bilinear(3, 3, 4), one(3)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 4), TOKENS),
    "RNN": (lambda: nn.RNN(3, 4, batch_first=True), one(2, 3)),
    "LSTM": (lambda: nn.LSTM(3, 4, batch_first=True), one(2, 3)),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), one(2, 3)),
    "RNNCell": (lambda: nn.RNNCell(3, 4), one(3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), one(3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), one(3)),
}

if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.15
    NAMED["LinearCrossEntropyLoss"] = (lambda: nn.LinearCrossEntropyLoss(3, 4), one(3))

NO_LAYERS = {
    "Module", "Container", "DataParallel", "Sequential", "ModuleList", "ModuleDict",
    "ParameterList",
    "ParameterDict", "Parameter", "RNNBase", "RNNCellBase", "UninitializedParameter", "Buffer",
}  # fmt: skip

WITHOUT_PARAMETERS = {  # those that need arguments
    "AdaptiveAvgPool1d": (1,), "AdaptiveAvgPool2d": (1,), "AdaptiveAvgPool3d": (1,),
    "AdaptiveMaxPool1d": (1,), "AdaptiveMaxPool2d": (1,), "AdaptiveMaxPool3d": (1,),
    "AvgPool1d": (1,), "AvgPool2d": (1,), "AvgPool3d": (1,), "MaxPool1d": (1,), "MaxPool2d": (1,),
    "MaxPool3d": (1,), "MaxUnpool1d": (1,), "MaxUnpool2d": (1,), "MaxUnpool3d": (1,),
    "LPPool1d": (1, 1), "LPPool2d": (1, 1), "LPPool3d": (1, 1), "ChannelShuffle": (1,),
    "CircularPad1d": (1,), "CircularPad2d": (1,), "CircularPad3d": (1,), "ConstantPad1d": (1, 0),
    "ConstantPad2d": (1, 0), "ConstantPad3d": (1, 0), "CrossMapLRN2d": (1,),
    "Fold": (1, 1), "Unfold": (1,), "FractionalMaxPool2d": (1, 1), "FractionalMaxPool3d": (1, 1),
    "LocalResponseNorm": (1,), "PixelShuffle": (1,), "PixelUnshuffle": (1,),
    "ReflectionPad1d": (1,), "ReflectionPad2d": (1,), "ReflectionPad3d": (1,),
    "ReplicationPad1d": (1,), "ReplicationPad2d": (1,), "ReplicationPad3d": (1,),
    "Threshold": (0, 0), "Unflatten": (1, (1,)), "ZeroPad1d": (1,), "ZeroPad2d": (1,),
    "ZeroPad3d": (1,),
}  # fmt: skip


class Around(nn.Module):
    """The layer, and what makes class logits of whatever it returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)

    def forward(self, x):
        kind = type(self.layer)
        if kind is nn.MultiheadAttention:
            x = self.layer(x, x, x)[0]
        elif kind in (nn.Bilinear, nn.Transformer, nn.TransformerDecoder):
            x = self.layer(x, x)
        elif kind is nn.TransformerDecoderLayer:
            x = self.layer(x, x)
        elif kind is nn.AdaptiveLogSoftmaxWithLoss:
            x = self.layer.log_prob(x)
        elif kind.__name__ == "LinearCrossEntropyLoss":
            x = self.layer(x, torch.zeros(len(x)).long()).view(1, 1)
        else:
            x = self.layer(x)
        while isinstance(x, tuple):
            x = x[0]
        return self.head(torch.tanh(x).flatten(1))


def around(table, name):
    build, x = table[name]
    torch.manual_seed(0)
    model = Around(build()).double().eval()
    with torch.no_grad():
        model(x)
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model, x


def layers_of_torch():
    for name in dir(nn):
        if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module):
            yield name


def test_the_tables_name_all_layers_with_parameters():
    for name in layers_of_torch():
        if name in NO_LAYERS or name in RIGHT or name in NAMED:
            continue
        layer = getattr(nn, name)(*WITHOUT_PARAMETERS.get(name, ()))
        assert not list(layer.parameters()), f"{name} has parameters; add it to a table."
    assert {*RIGHT, *NAMED} <= set(layers_of_torch())


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_against_brute_force(name, kfac_approx):
    model, x = around(RIGHT, name)
    factors = kronecker_factors(
        model, [(x, torch.zeros(1).long())], "classification", kfac_approx=kfac_approx
    )
    expected = oracles.dense_ggn_blocks(model, x, "classification")
    assert list(factors.blocks) == list(expected)
    largest = max(float(block.abs().max()) for block in expected.values())
    assert largest > 1e-6
    for parameter, block in expected.items():
        if "ConvTranspose" in name and parameter == "layer.bias" and kfac_approx == "expand":
            continue  # the bias is shared by several output pixels, the weight by one input pixel
        found = factors.to_dense(parameter)
        if parameter.endswith(("in_proj_weight", "in_proj_bias")):  # three maps, three groups
            thirds = torch.arange(3).repeat_interleave(len(block) // 3)
            block = block * (thirds[:, None] == thirds)
        assert_close(found, block, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", NAMED)
def test_named_error(name):
    model, x = around(NAMED, name)
    message = rf"layer 'layer' \({name}\) has no K-FAC rule|'layer.linear.weight' reached"
    with pytest.raises(NotImplementedError, match=message):
        kronecker_factors(model, [(x, torch.zeros(1).long())], "classification")


def test_a_lazy_layer_without_a_shape():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="'0.weight' has no shape yet"):
        kronecker_factors(model, [(one(3), torch.zeros(1).long())], "classification")
