"""The same factors on CPU and GPU, in any memory format, and under autocast."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.laplace.interface import KfacGGN
from kfac_backend.layers import Bias, Scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ["expand", "reduce"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Bias(), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2),
        Scale(), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, 8, 8, generator=generator)
    return x, torch.randint(4, (6,), generator=generator)


def assert_same(factors, reference, tolerance):
    for name, block in reference.blocks.items():
        dense, expected = factors.to_dense(name).cpu(), block.to_dense()
        assert (dense - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kfac_approx", MODES)
def test_factors_agree_with_float64_on_the_cpu(kfac_approx, device):
    x, y = data()
    reference = kronecker_factors(
        network().double(), [(x.double(), y)], "classification", kfac_approx=kfac_approx
    )
    model = network().to(device)
    # Batches come from the host; the pass moves them.
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert all(block.B.device.type == device for block in factors.blocks.values())
    assert_same(factors.to(dtype=torch.float64), reference, 1e-5)
    assert_close(factors.log_det(1.0).cpu(), reference.log_det(1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kfac_approx", MODES)
def test_channels_last_changes_nothing(kfac_approx, device):
    x, y = data()
    reference = kronecker_factors(network(), [(x, y)], "classification", kfac_approx=kfac_approx)
    model = network().to(device).to(memory_format=torch.channels_last)
    x = x.to(device).to(memory_format=torch.channels_last)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert_same(factors, reference, 1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_costs_the_precision_of_bfloat16_and_no_more(device):
    x, y = data()
    reference = kronecker_factors(network(), [(x, y)], "classification")
    with torch.autocast(device, dtype=torch.bfloat16):
        factors = kronecker_factors(network().to(device), [(x, y)], "classification")
    assert all(block.B.dtype == torch.float32 for block in factors.blocks.values())
    assert_same(factors, reference, 0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_laplace_fits_and_predicts_on_the_device(device):
    model, (x, y) = network().to(device), data()
    la = Laplace(model, "classification", "all", "kron", backend=KfacGGN)
    la.fit(DataLoader(TensorDataset(x, y), 4))
    assert torch.isfinite(la.log_marginal_likelihood())
    assert la(x.to(device)).device.type == device


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_output_covariances_agree_with_float64_on_the_cpu(device, batched):
    x, y = data()

    def covariance(model, x):
        factors = kronecker_factors(model, [(x, y)], "classification")
        eigen = {name: block.decompose() for name, block in factors.blocks.items()}
        blocks = {name: (block, block.spectrum(1.0)) for name, block in eigen.items()}
        return OutputCovariance(model, blocks, batched=batched)(x)[1]

    reference = covariance(network().double(), x.double())
    found = covariance(network().to(device), x)  # from the host
    assert found.device.type == device
    assert (found.cpu() - reference).norm() <= 1e-5 * reference.norm()
    with torch.autocast(device, dtype=torch.bfloat16):
        rough = covariance(network().to(device), x)
    assert rough.dtype == torch.float32
    assert (rough.cpu() - reference).norm() <= 0.05 * reference.norm()


@pytest.mark.gpu
def test_tf32_is_off_during_the_pass_and_restored():
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    x, y = data()
    reference = kronecker_factors(network().double(), [(x.double(), y)], "classification")
    factors = kronecker_factors(network().cuda(), [(x, y)], "classification")
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert_same(factors.to(dtype=torch.float64), reference, 1e-5)
