"""The same factors on CPU and GPU, in any memory format, and under autocast."""

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import corrected_factors, kronecker_factors
from kfac_backend.blocks.eigen import Factor, eigendecompositions
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.layers import patch_gram
from kfac_backend.layers.window import windows
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from tests.kfac_backend import networks
from tests.kfac_backend.block_checks import MODES, batch_of
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.layer_cases import CASES, case
from tests.kfac_backend.layers.padded_models import MASK

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def network():
    return networks.network().float()


def data():
    x, y = networks.data()
    return x.float(), y


def assert_same(factors, reference, tolerance):
    for name, block in reference.blocks.items():
        dense, expected = factors.to_dense(name).cpu(), block.to_dense()
        assert (dense - expected).norm() <= tolerance * expected.norm(), name


TOLERANCES = {"float32": 1e-5, "channels last": 1e-4, "autocast": 0.05}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("what", "kfac_approx"),
    [*product(("float32", "channels last"), MODES), ("autocast", "expand")],
)
def test_factors_agree_with_float64_on_the_cpu(what, kfac_approx, device):
    """Autocast costs the precision of bfloat16 and no more."""
    x, y = data()
    reference = kronecker_factors(
        network().double(), [(x.double(), y)], "classification", kfac_approx=kfac_approx
    )
    model = network().to(device)
    # Batches come from the host; the pass moves them.
    if what == "channels last":
        model = model.to(memory_format=torch.channels_last)
        x = x.to(device, memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16, enabled=what == "autocast"):
        factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    for block in factors.blocks.values():
        assert block.B.device.type == device and block.B.dtype == torch.float32
    assert_same(factors.to(dtype=torch.float64), reference, TOLERANCES[what])
    if what == "float32":
        assert_close(factors.log_det(1.0).cpu(), reference.log_det(1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_laplace_fits_and_predicts_on_the_device(device):
    model, (x, y) = network().to(device), data()
    la = Laplace(model, "classification", "all", "kron", backend=KfacGGN)
    la.fit(DataLoader(TensorDataset(x, y), 4))
    assert torch.isfinite(la.log_marginal_likelihood())
    assert la(x.to(device)).device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_output_covariances_agree_with_float64_on_the_cpu(device):
    x, y = data()

    def covariance(model, x):
        factors = kronecker_factors(model, [(x, y)], "classification")
        return OutputCovariance(model, precision_of(factors))(x)[1]

    reference = covariance(network().double(), x.double())
    found = covariance(network().to(device), x)  # from the host
    assert found.device.type == device
    assert (found.cpu() - reference).norm() <= 1e-5 * reference.norm()
    with torch.autocast(device, dtype=torch.bfloat16):
        rough = covariance(network().to(device), x)
    assert rough.dtype == torch.float32
    assert (rough.cpu() - reference).norm() <= 0.05 * reference.norm()


@pytest.mark.gpu
def test_tf32_is_off_during_the_pass_and_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32")
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    x, y = data()
    reference = kronecker_factors(network().double(), [(x.double(), y)], "classification")
    factors = kronecker_factors(network().cuda(), [(x, y)], "classification")
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert_same(factors.to(dtype=torch.float64), reference, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_layer_agrees_with_the_cpu(name, kfac_approx):
    """Factors, corrected eigenvalues and covariances of outputs, in float64."""
    options = {"kfac_approx": kfac_approx, "unsupported": "diagonal"}

    def everything(device):
        model, x = case(name)
        y = torch.arange(len(MASK) if isinstance(x, Mapping) else len(x)) % 2
        batch = batch_of(x, y)
        model = model.to(device)
        factors = kronecker_factors(model, [batch], "classification", **options)
        corrected = corrected_factors(factors, model, [batch])
        f, covariance = OutputCovariance(model, precision_of(factors, 0.5))(x)
        assert covariance.device.type == device
        # Eigenvectors have a sign, and a basis where eigenvalues are the same: blocks have none.
        # Corrected ones depend on it there; their traces do not.
        dense = {name: factors.to_dense(name).cpu() for name in factors.blocks}
        traces = [block.eigenvalues().sum().cpu() for block in corrected.blocks.values()]
        return [*dense.values(), *traces, factors.log_det(1.0).cpu(), f.cpu(), covariance.cpu()]

    for found, expected in zip(everything("cuda"), everything("cpu"), strict=True):
        assert_close(found, expected, rtol=1e-8, atol=1e-12 + 1e-10 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["unfold", "shifts", "frequencies"])
def test_patches_have_the_same_gram_matrix_by_every_way(way, monkeypatch):
    layer = nn.Conv2d(6, 4, 3, padding=1).double()
    images = torch.randn(5, 6, 9, 8, dtype=torch.float64)

    def total(device, way):
        monkeypatch.setattr(patch_gram, "cheapest_method", lambda *a: way)
        gram = patch_gram.PatchGram(layer.weight.to(device), (3, 3))
        for some in images.to(device).split(3):
            gram.add_images(some, *windows(layer, some))
        return gram.total().cpu()

    assert_close(total("cuda", way), total("cpu", "unfold"), rtol=1e-11, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("damping_on", ["factors", "product"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_steps_of_the_optimiser_agree_with_the_cpu(fisher, damping_on):
    def trained(device):
        model, (x, y) = network().double().to(device), data()
        x, y = x.double().to(device), y.to(device)
        options = PreconditionerOptions(damping=0.05, damping_on=damping_on)
        optimizer = KFAC(model, "classification", 0.05, options=options, fisher=fisher)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for found, expected in zip(trained("cuda"), trained("cpu"), strict=True):
        assert_close(found, expected, rtol=1e-5, atol=1e-7)  # the limit on steps is of float32


@pytest.mark.gpu
def test_the_optimiser_resumes_to_the_bit_and_under_a_grad_scaler():
    def steps(model, optimizer, scaler, number):
        x, y = (tensor.cuda() for tensor in data())
        for _ in range(number):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def new():
        model = network().cuda()
        options = PreconditionerOptions(damping=0.05, factor_every=2, update_every=4)
        optimizer = KFAC(model, "classification", 0.05, options=options)
        return model, optimizer, torch.amp.GradScaler("cuda", init_scale=256.0)

    whole = new()
    torch.manual_seed(0)
    steps(*whole, 9)
    first = new()
    torch.manual_seed(0)
    steps(*first, 5)
    second = new()
    for part, state in zip(second, [part.state_dict() for part in first], strict=True):
        part.load_state_dict(state)
    steps(*second, 4)
    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.isfinite(p).all()
        assert_close(p, q, rtol=1e-5, atol=1e-6)  # convolutions' gradients are summed in any order


@pytest.mark.gpu
def test_sampled_labels_come_from_the_gpus_generator():
    x, y = data()

    def sampled(seed):
        model = network().cuda().double()
        torch.manual_seed(seed)
        return kronecker_factors(model, [(x.double(), y)], "classification", fisher="mc")

    first, again, other = sampled(0), sampled(0), sampled(1)
    assert_same(first, again.to("cpu"), 1e-12)
    with pytest.raises(AssertionError):
        assert_same(first, other.to("cpu"), 1e-3)


@pytest.mark.gpu
def test_eigenvalues_that_the_gpu_does_not_find_come_from_the_cpu(monkeypatch):
    matrix = torch.randn(6, 6, device="cuda", dtype=torch.float64)
    matrix = matrix @ matrix.mT
    expected = torch.linalg.eigvalsh(matrix)
    solvers = {name: getattr(torch.linalg, name) for name in ("eigh", "eigvalsh")}

    def fails_there(solve):
        def solver(M):
            if M.is_cuda:
                raise torch.linalg.LinAlgError("does not converge")
            return solve(M)

        return solver

    for name, solve in solvers.items():
        monkeypatch.setattr(torch.linalg, name, fails_there(solve))
    ((found, _, _),) = eigendecompositions([Factor(matrix, "weight")], vectors=False)
    assert found.is_cuda
    assert_close(found, expected)
    ((values, Q, _),) = eigendecompositions([Factor(matrix, "weight")], vectors=True)
    assert values.is_cuda and Q.is_cuda
    assert_close(Q @ values.diag() @ Q.mT, matrix)
