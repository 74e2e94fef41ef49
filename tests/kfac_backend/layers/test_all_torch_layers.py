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
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layers.torch_layers import NAMED, RIGHT, around

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


@pytest.mark.parametrize("kfac_approx", MODES)
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
        kronecker_factors(model, [(torch.zeros(1, 3), torch.zeros(1).long())], "classification")
