"""The pass over the data: batches, Fisher kinds, parameters without a rule, what it costs."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import CurvatureOptions, kronecker_factors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.fisher import Fisher
from tests.kfac_backend.block_checks import assert_same
from tests.kfac_backend.networks import (
    convolution_flops,
    data,
    images,
    network,
    wide_resnet,
)


@pytest.mark.parametrize(("fisher", "vectors"), [("exact", 9), ("mc", 1), ("empirical", 1)])
def test_backward_passes_reach_inputs_only(fisher, vectors):
    """V passes to the inputs of all convolutions but the first, and no weight gradient."""
    model, (x, y) = wide_resnet(), images(3)
    curvature = CurvaturePass(model, "classification", fisher=fisher)
    curvature.add(x, y)
    forward, _ = convolution_flops(lambda: model(x))
    stem, _ = convolution_flops(lambda: model.conv(x))
    assert convolution_flops(lambda: curvature.add(x, y)) == (forward, vectors * (forward - stem))
    # Negative control: a training step computes the weights' gradients, too.
    loss = nn.functional.cross_entropy(model(x), y)
    assert convolution_flops(loss.backward) == (0, 2 * forward - stem)


def test_inputs_count_where_outputs_depend_on_no_layer():
    """A is of all examples, also of a batch that no vector goes back through."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2).double()

        def forward(self, x):
            f = self.linear(x).sum(1)
            return f if x[0, 0, 0] > 0 else torch.zeros_like(f)

    x, y = torch.rand(9, 4, 3).double(), torch.arange(9) % 2
    x[4:7, :, 0] *= -1  # the second of three batches, of different sizes
    batches = list(zip(x.split([4, 3, 2]), y.split([4, 3, 2]), strict=True))
    factors = kronecker_factors(Gated(), batches, "classification", kfac_approx="reduce")
    means = x.mean(1)
    assert torch.allclose(factors.blocks["linear.weight"].A, means.T @ means / 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors_are_float32_at_least(dtype):
    model, (x, y) = network().to(dtype), data()
    factors = kronecker_factors(model, [(x.to(dtype), y)], "classification")
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for block in factors.blocks.values():
        assert block.B.dtype == expected
        assert block.A is None or block.A.dtype == expected


def test_factors_are_asked_for_once():
    curvature = CurvaturePass(network(), "classification")
    curvature.add(*data())
    curvature.factors()
    with pytest.raises(ValueError, match="since the last call of factors"):
        curvature.factors()


# --- a choice of Fisher of one's own ---


@pytest.fixture
def every_sign(monkeypatch):
    """The root's columns s_c, summed with each of their signs: Σ_σ (Σ_c σ_c s_c)² / 2^C = Λ."""
    monkeypatch.setattr(Fisher, "by_name", dict(Fisher.by_name))

    class EverySign(Fisher):
        name = "every sign"
        patterns = slice(None)

        def columns(self, likelihood, f, y, generator):
            columns = list(likelihood.root(f, y))
            signs = list(product((-1, 1), repeat=len(columns)))
            for pattern in signs[self.patterns]:
                total = sum(sign * s for sign, s in zip(pattern, columns, strict=True))
                yield total / len(signs) ** 0.5

    return EverySign


def test_a_class_is_one_more_choice(every_sign):
    batch = [data()]
    exact = kronecker_factors(network(), batch, "classification")
    found = kronecker_factors(network(), batch, "classification", fisher="every sign")
    assert_same(found, exact)
    assert CurvatureOptions(**found.options.to_json()) == found.options
    every_sign.patterns = slice(1)  # control: the products of different columns stay
    some = kronecker_factors(network(), batch, "classification", fisher="every sign")
    with pytest.raises(AssertionError):
        assert_close(some.blocks["8.weight"].B, exact.blocks["8.weight"].B, rtol=0.1, atol=0)


def test_a_choice_that_there_is_not():
    with pytest.raises(ValueError, match="'every sign'.*'random_signs', 'empirical'"):
        CurvatureOptions(fisher="every sign")
