"""Backward passes in bf16, and full float32 everywhere else."""

import pytest
import torch
from torch import nn

from kfac_backend import CurvatureOptions, kronecker_factors
from kfac_backend.precision import backward_arithmetic, full_float32
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import data, images, network, wide_resnet


def bf16_makes_a_difference():
    a = torch.randn(4, 16, 8, 8)
    convolution = nn.Conv2d(16, 16, 3)
    with torch.no_grad(), full_float32():
        full = convolution(a)
    with torch.no_grad(), backward_arithmetic("bf16"):
        return not torch.equal(convolution(a), full)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_backward_passes_change_B_by_a_percent_and_A_not_at_all(mode):
    """And what the user has set makes no difference, though it would."""
    model, (x, y) = wide_resnet(2, torch.float32), images(4, torch.float32)

    def factors(**options):
        return kronecker_factors(model, [(x, y)], "classification", kfac_approx=mode, **options)

    def errors(found):
        return [(found.blocks[n].B - b.B).norm() / b.B.norm() for n, b in full.blocks.items()]

    matmul, conv = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    full, low = factors(), factors(backward_precision="bf16")
    assert (matmul.fp32_precision, conv.fp32_precision) == before
    assert low.loss == full.loss
    assert max(errors(low)) <= 0.02
    if bf16_makes_a_difference():  # else this CPU multiplies float32 in full all the same
        assert max(errors(low)) > 1e-5
    for name, block in full.blocks.items():
        assert block.A is None or torch.equal(low.blocks[name].A, block.A)
    try:
        matmul.fp32_precision = conv.fp32_precision = "bf16"
        assert max(errors(factors())) < 1e-5
        assert matmul.fp32_precision == conv.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_that_the_device_lacks_is_an_error(precision):
    with pytest.raises(ValueError, match=f"backward_precision='{precision}'"):
        kronecker_factors(network(), [data()], "classification", backward_precision=precision)


def test_no_trial_chooses_a_precision():
    """Long passes are in full float32 unless the options say otherwise."""
    assert CurvatureOptions().backward_precision == "float32"
    with pytest.raises(ValueError, match="backward_precision='auto' is not supp.*'tf32', 'bf16'"):
        CurvatureOptions(backward_precision="auto")
