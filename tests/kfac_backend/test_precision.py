"""Backward passes in bf16, and full float32 everywhere else."""

import pytest
import torch
from torch import nn

from kfac_backend import kronecker_factors
from kfac_backend.engine import automatic_precision, driver
from kfac_backend.engine.factor_sums import FactorSums
from kfac_backend.precision import backward_arithmetic, full_float32
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.formulas import by_the_formulas
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
        plain = by_the_formulas(model, x, mode)
        wrong = [(plain[n][0] - b.B).norm() / b.B.norm() for n, b in full.blocks.items()]
        assert max(wrong) > 1e-4 or not bf16_makes_a_difference()
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_that_the_device_lacks_is_an_error(precision):
    with pytest.raises(ValueError, match=f"backward_precision='{precision}'"):
        kronecker_factors(network(), [data()], "classification", backward_precision=precision)


@pytest.mark.parametrize(("relative", "chosen"), [(1e-4, "tf32"), (1e-2, "float32")])
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_auto_takes_the_faster_precision_if_B_bears_it(fisher, relative, chosen, monkeypatch):
    """A device whose gradients are too large by some share in the faster precision."""
    monkeypatch.setattr(automatic_precision, "FASTER", {"cpu": "tf32"})
    monkeypatch.setattr(driver, "LONG_PASS", 6)
    used, backward, gradient = [], driver.backward_arithmetic, FactorSums.gradient

    def arithmetic(precision):
        used.append(precision)
        return backward(precision)

    def rounded(self, tracked, use, b):
        gradient(self, tracked, use, b * (1 + relative) if used[-1] == "tf32" else b)

    monkeypatch.setattr(driver, "backward_arithmetic", arithmetic)
    monkeypatch.setattr(FactorSums, "gradient", rounded)
    model, (x, y) = network().float(), data(24)
    parts = list(zip(x.float().split(6), y.split(6), strict=True))
    generator = torch.Generator().manual_seed(0)
    options = {"kfac_approx": "expand", "fisher": fisher, "generator": generator}
    found = kronecker_factors(model, parts, "classification", **options)
    assert used[0] == "auto" and used[-1] == chosen
    # The trial is not in the sums, and draws no labels from the generator.
    generator.manual_seed(0)
    fixed = kronecker_factors(
        model, parts, "classification", backward_precision="float32", **options
    )
    assert found.num_data == 24
    for name, block in fixed.blocks.items():
        share = (found.blocks[name].B - block.B).norm() / block.B.norm()
        assert share <= (2 * relative if chosen == "tf32" else 1e-6)


def test_exhausted_memory_does_not_choose_the_precision(monkeypatch):
    """The device's size does, where the factors leave no room for a trial."""
    monkeypatch.setattr(automatic_precision, "FASTER", {"cpu": "tf32"})
    monkeypatch.setattr(driver, "LONG_PASS", 6)
    add, used = driver.Driver.add_part, []

    def exhausted(self, x, y, *mask):
        used.append(self.arithmetic.precision)
        if self.arithmetic.precision == "tf32":
            raise torch.OutOfMemoryError
        return add(self, x, y, *mask)

    monkeypatch.setattr(driver.Driver, "add_part", exhausted)
    x, y = data(12)
    parts = list(zip(x.float().split(6), y.split(6), strict=True))
    with pytest.raises(torch.OutOfMemoryError, match="backward_precision='float32' and 'tf32'"):
        kronecker_factors(network().float(), parts, "classification")
    assert used == ["auto", "float32", "tf32"]
    used.clear()
    monkeypatch.setattr(automatic_precision, "total_memory", lambda device: 2**10)
    kronecker_factors(network().float(), parts, "classification")
    assert used == ["auto", "float32"]
