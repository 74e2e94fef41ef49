"""All of torch.nn: each layer with parameters is right against brute force, or a named error.

One example with one position makes every layer's block exact, whatever it shares.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests import oracles
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layers.torch_layers import NAMED, RIGHT, around


@pytest.mark.parametrize("name", RIGHT)
def test_right_against_brute_force(name):
    model, x = around(RIGHT, name)
    kfac_approx = MODES[len(name) % 2]  # which are the same where there is one position
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
