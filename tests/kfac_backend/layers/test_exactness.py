"""The paper's propositions: where each mode is exact, and that the other mode is not."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests import oracles
from tests.kfac_backend.block_checks import OTHER
from tests.kfac_backend.networks import Model


def pixels_last():
    """Outputs per pixel, (N, ..., C), of images (N, C, ...)."""
    return Model(lambda m, x: x.movedim(1, -1))


def linear_layers(depth, bias=False):
    return [nn.Linear(4, 4, bias) for _ in range(depth)] + [nn.Linear(4, 2, bias)]


def summed(depth, c):
    """C Σ_r f_r over all axes between batch and features."""
    scaled_sum = Model(lambda m, x: c * x.flatten(1, -2).sum(1))
    return [*linear_layers(depth, bias=True), scaled_sum]


def pooled_convolution():
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    return [convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]


def pooled_circular_convolutions():
    return [
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]


def pointwise_convolutions():
    return [nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False), pixels_last()]


def graph_convolution():
    """Nodes of a ring as positions, Ĉ X Wᵀ: neighbours are averaged before the weight."""
    ring = sum(torch.eye(6, dtype=torch.float64).roll(shift, 0) for shift in (-1, 0, 1)) / 3
    return [Model(lambda m, x: ring @ x), nn.Linear(4, 2, bias=False)]


SINGLE, DEEP = 0, 2
CASES = {
    # name: (mode that is exact, network, input shape)
    "single layer, expand setting": ("expand", lambda: linear_layers(SINGLE), (5, 3, 4)),
    "deep, expand setting": ("expand", lambda: linear_layers(DEEP), (5, 3, 4)),
    "two shared axes, expand setting": ("expand", lambda: linear_layers(DEEP), (5, 3, 2, 4)),
    "graph convolution of one graph": ("expand", graph_convolution, (1, 6, 4)),
    "single layer, sum": ("reduce", lambda: summed(SINGLE, 1.0), (5, 3, 4)),
    "deep, mean": ("reduce", lambda: summed(DEEP, 1 / 3), (5, 3, 4)),
    "deep, scaled sum": ("reduce", lambda: summed(DEEP, -2.5), (5, 3, 4)),
    "two shared axes, sum": ("reduce", lambda: summed(DEEP, 0.7), (5, 3, 2, 4)),
    "convolution, average pooling": ("reduce", pooled_convolution, (5, 3, 6, 5)),
    "circular convolutions, pooled": ("reduce", pooled_circular_convolutions, (5, 3, 4, 5)),
    "pointwise convolutions, an output per pixel": ("expand", pointwise_convolutions, (5, 3, 3, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_mode_is_exact_in_its_setting_and_the_other_is_not(case):
    exact_mode, layers, shape = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).double()
    x = torch.randn(shape, dtype=torch.float64)
    y = torch.zeros_like(model(x))
    ggn = oracles.dense_ggn_blocks(model, x, "regression")

    exact = kronecker_factors(model, [(x, y)], "regression", kfac_approx=exact_mode)
    for name, block in ggn.items():
        assert_close(exact.to_dense(name), block, rtol=1e-10, atol=1e-12)

    other = kronecker_factors(model, [(x, y)], "regression", kfac_approx=OTHER[exact_mode])
    shares_weights = {
        name: max(exact.blocks[name].num_terms, other.blocks[name].num_terms) > len(x)
        for name in ggn
        if name.endswith("weight")
    }
    assert any(shares_weights.values())
    for name, shared in shares_weights.items():
        difference = (other.to_dense(name) - ggn[name]).norm() / ggn[name].norm()
        # A layer with a single position, as after the pooling, is the same in both modes.
        assert difference > 0.1 if shared else difference < 1e-10


def mixing_network():
    """Each term takes the mean of R inputs, which are equal here: N = 5, R = 3."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 2), Model(lambda m, x: x.mean(1, True).expand_as(x))]
    x = torch.randn(5, 1, 4, dtype=torch.float64).expand(5, 3, 4)
    return nn.Sequential(*layers).double(), x, torch.zeros(5, 3, 2, dtype=torch.float64)


def test_scaling_expand_by_examples_is_exact_where_terms_mix_equal_inputs():
    """The scaling 1/N instead of 1/(N R), of the paper's appendix on expand; also of biases."""
    model, x, y = mixing_network()
    options = {"kfac_approx": "expand", "expand_scaling": "examples"}
    factors = kronecker_factors(model, [(x, y)], "regression", **options)
    default = kronecker_factors(model, [(x, y)], "regression", kfac_approx="expand")
    for name, block in oracles.dense_ggn_blocks(model, x, "regression").items():
        assert_close(factors.to_dense(name), block, rtol=1e-10, atol=1e-12)
        assert (default.to_dense(name) - block).norm() > 0.5 * block.norm()
    # Control: with a term for each position alone, the default is exact, and this one is not.
    factors = kronecker_factors(model[:2], [(x, y)], "regression", **options)
    default = kronecker_factors(model[:2], [(x, y)], "regression", kfac_approx="expand")
    for name, block in oracles.dense_ggn_blocks(model[:2], x, "regression").items():
        assert_close(default.to_dense(name), block, rtol=1e-10, atol=1e-12)
        assert (factors.to_dense(name) - block).norm() > 0.5 * block.norm()
