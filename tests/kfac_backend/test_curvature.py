"""The pass over the data: batches, Fisher kinds, parameters without a rule, what it costs."""

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from kfac_backend.curvature import CurvaturePass
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.formulas import by_the_formulas
from tests.kfac_backend.networks import (
    convolution_flops,
    data,
    images,
    network,
    wide_resnet,
)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"), [(torch.float64, 1, 1e-12), (torch.float32, 2, 1e-4)]
)
def test_wide_resnet_is_that_of_the_formulas(kfac_approx, dtype, width, tolerance):
    """Of a network too large for brute force, by the formulas that loops prove."""
    model, (x, y) = wide_resnet(width, dtype), images(2, dtype)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    plain = by_the_formulas(model, x, kfac_approx)
    assert set(plain) == set(factors.blocks) and len(plain) == (50 if width == 2 else 49)
    for name, (B, A) in plain.items():
        block = factors.blocks[name]
        assert (block.B - B).norm() <= tolerance * B.norm(), name
        if A is not None:
            assert block.A is not None
            assert (block.A - A).norm() <= tolerance * A.norm(), name


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


def test_layers_that_take_no_part_have_a_zero_block():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    with pytest.warns(UserWarning, match="'unused' \\(Linear\\)"):
        factors = kronecker_factors(
            model, [(torch.randn(2, 3), torch.tensor([0, 1]))], "classification"
        )
    assert factors.blocks["unused.weight"].numel == 6
    assert not factors.blocks["unused.weight"].eigenvalues().any()
    assert factors.blocks["used.weight"].eigenvalues().any()


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
