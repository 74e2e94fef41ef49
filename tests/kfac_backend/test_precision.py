"""Backward passes in bf16, and full float32 everywhere else."""

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from kfac_backend.precision import _fp32_precision
from tests.kfac_backend.networks import data, images, network, wide_resnet
from tests.plain_curvature import plain_factors


def bf16_makes_a_difference():
    a = torch.randn(4, 16, 8, 8)
    convolution = nn.Conv2d(16, 16, 3)
    with torch.no_grad(), _fp32_precision("ieee", "ieee"):
        full = convolution(a)
    with torch.no_grad(), _fp32_precision("bf16", "ieee"):
        return not torch.equal(convolution(a), full)


def test_bf16_backward_passes_change_B_by_a_percent_and_A_not_at_all():
    model, (x, y) = wide_resnet(2, torch.float32), images(4, torch.float32)
    if not bf16_makes_a_difference():
        pytest.skip("this CPU multiplies float32 in full all the same")
    before = torch.backends.mkldnn.conv.fp32_precision
    full, low = (
        kronecker_factors(model, [(x, y)], "classification", backward_precision=precision)
        for precision in ("float32", "bf16")
    )
    assert torch.backends.mkldnn.conv.fp32_precision == before
    assert low.loss == full.loss
    errors = [(low.blocks[n].B - b.B).norm() / b.B.norm() for n, b in full.blocks.items()]
    assert max(errors) > 1e-5
    for name, block in full.blocks.items():
        assert (low.blocks[name].B - block.B).norm() <= 0.02 * block.B.norm(), name
        if block.A is not None:
            assert torch.equal(low.blocks[name].A, block.A)


def test_the_user_s_precision_is_not_used():
    model, (x, y) = wide_resnet(2, torch.float32), images(4, torch.float32)
    reference = kronecker_factors(model, [(x, y)], "classification")
    matmul, conv = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = conv.fp32_precision = "bf16"
        factors = kronecker_factors(model, [(x, y)], "classification")
        assert matmul.fp32_precision == conv.fp32_precision == "bf16"
        control = plain_factors(model, x, "expand")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
    errors = [(factors.blocks[n].B - b.B).norm() / b.B.norm() for n, b in reference.blocks.items()]
    assert max(errors) < 1e-5
    if bf16_makes_a_difference():
        wrong = [(control[n][0] - b.B).norm() / b.B.norm() for n, b in reference.blocks.items()]
        assert max(wrong) > 1e-4


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_that_the_device_lacks_is_an_error(precision):
    with pytest.raises(ValueError, match=f"backward_precision='{precision}'"):
        kronecker_factors(network(), [data()], "classification", backward_precision=precision)
