"""The prior's directions, left apart: exact up to rounding, or too wide by what was said."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance import parameter_covariance as module
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.covariance.parameter_covariance import gradient_covariance
from kfac_backend.layers import ExampleGradients
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.covariance.posteriors import brute_force as dense_covariance
from tests.kfac_backend.covariance.posteriors import case, posterior, sequences

G, N, R, C, D_OUT, D_IN = 2, 3, 4, 3, 5, 12


def gradients(R=R):
    torch.manual_seed(0)
    b = torch.randn(G, N, R, C, D_OUT, dtype=torch.float64)
    return ExampleGradients(b, torch.randn(G, N, R, D_IN, dtype=torch.float64))


def block(start):
    """A posterior precision whose first input directions have the prior's eigenvalue alone."""
    torch.manual_seed(1)
    Q_B, Q_A = (
        torch.linalg.qr(torch.randn(G, d, d, dtype=torch.float64))[0] for d in (D_OUT, D_IN)
    )
    beta, alpha = (torch.rand(G, d, dtype=torch.float64).sort(-1).values for d in (D_OUT, D_IN))
    alpha[:, :start] = 0
    eigen = EigenBlock(beta, Q_B, alpha, Q_A)
    return eigen, eigen.spectrum(torch.tensor(0.3, dtype=torch.float64))


def brute_force(gradients, eigen, spectrum):
    total = torch.zeros(N, C, C, dtype=torch.float64)
    for g in range(G):
        Q = torch.kron(eigen.Q_B[g], eigen.Q_A[g])
        inverse = Q @ torch.diag(1 / spectrum[g].flatten()) @ Q.mT
        J = torch.einsum("nrci,nrj->ncij", gradients.b[g], gradients.a[g]).flatten(2)
        total += J @ inverse @ J.mT
    return total


@pytest.mark.parametrize("variance_only", [False, True])
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("start", [0, 1, 6, 7, 12])
@pytest.mark.parametrize("R", [1, R])
def test_every_way_is_exact(monkeypatch, R, start, inputs_first, variance_only):
    """Few directions of the prior and many, none and all; inputs turned first, or gradients."""
    monkeypatch.setattr(module, "_cheapest", lambda R, d_b, d_in, *rest: (rest[0], inputs_first))
    of_layer, (eigen, spectrum) = gradients(R), block(start)
    expected = brute_force(of_layer, eigen, spectrum)
    other = brute_force(of_layer, eigen, spectrum + 1e-3)  # negative control
    if variance_only:
        expected, other = (V.diagonal(dim1=1, dim2=2) for V in (expected, other))
    for product_bytes in (1, 2**20):
        does = gradient_covariance(
            of_layer, eigen, spectrum, product_bytes, variance_only=variance_only
        )
        assert_close(does, expected, rtol=1e-12, atol=1e-12)
        assert (does - other).norm() > 1e-4 * expected.norm()


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("start", [0, 5, 7, 12])
def test_several_examples_at_once_and_inputs_stored_first(monkeypatch, start, inputs_first):
    """As on a GPU, and for a parameter (d_in, d_out)."""
    monkeypatch.setattr(module, "_cheapest", lambda R, d_b, d_in, *rest: (rest[0], inputs_first))
    of_layer, (eigen, spectrum) = gradients(), block(start)
    expected = brute_force(of_layer, eigen, spectrum)
    swapped = EigenBlock(eigen.alpha, eigen.Q_A, eigen.beta, eigen.Q_B)
    does = gradient_covariance(of_layer, swapped, spectrum.mT, transposed=True)
    assert_close(does, expected, rtol=1e-12, atol=1e-12)

    def slices(device, N, size):
        return [slice(n, n + size) for n in range(0, N, size)]

    for room in ("kfac_backend.covariance.eigenbasis", module.__name__):
        monkeypatch.setattr(f"{room}.examples_at_once", slices)
    for product_bytes in (1, 2000, 2**20):
        does = gradient_covariance(of_layer, eigen, spectrum, product_bytes)
        assert_close(does, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "start", "way"),
    [
        ((64, 2560, 2304), 2000, (2000, True)),  # many channels, few positions: WRN's last stage
        ((1024, 640, 576), 500, (500, False)),  # its first one
        ((1024, 640, 576), 0, (0, False)),
        ((64, 2560, 2304), 0, (0, True)),
        ((64, 2560, 2304), 1, (0, True)),  # one direction is not worth it
        ((64, 2560, 2304), 2304, (2304, True)),  # nothing is known
    ],
)
def test_the_cheapest_way(sizes, start, way):
    assert module._cheapest(*sizes, start, 2) == way
    assert module._cheapest(*sizes, start, float("inf")) in [(0, True), (0, False), (start, False)]


def test_float32_where_gradients_cancel_over_positions(monkeypatch):
    """As below a softmax or a norm: like inputs, gradients that sum to zero over the positions."""
    R, d_in, d_out = 64, 96, 8
    b = torch.randn(1, 2, R, 2, d_out)
    b -= b.mean(2, keepdim=True)
    a = 1 + 1e-3 * torch.randn(1, 2, R, d_in)
    Q_B, Q_A = (torch.linalg.qr(torch.randn(1, d, d, dtype=torch.float64))[0] for d in (8, 96))
    alpha = torch.zeros(1, d_in, dtype=torch.float64)
    alpha[:, -4:] = 1.0
    eigen = EigenBlock(torch.ones(1, d_out, dtype=torch.float64), Q_B, alpha, Q_A)
    spectrum = eigen.spectrum(torch.tensor(0.01, dtype=torch.float64))
    expected = gradient_covariance(ExampleGradients(b.double(), a.double()), eigen, spectrum)
    single = EigenBlock(*(part.float() for part in (eigen.beta, Q_B, alpha, Q_A)))
    assert module._prior_like(Q_A, spectrum, 0.0)[1] == d_in - 4

    def error():
        does = gradient_covariance(ExampleGradients(b, a), single, spectrum.float())
        return (does - expected).norm() / expected.norm()

    for inputs_first in (False, True):
        monkeypatch.setattr(module, "_cheapest", lambda *sizes, i=inputs_first: (sizes[3], i))
        assert error() < 1e-4
    # Negative control: sums of products in float32.
    monkeypatch.setattr(torch.Tensor, "double", lambda self: self)
    assert error() > 1e-2


def bounds(V, result):
    """The smallest and the largest generalised eigenvalue of the result, V being positive."""
    L = torch.linalg.cholesky(V)
    within = torch.linalg.solve_triangular(L, result, upper=False)
    within = torch.linalg.solve_triangular(L, within.mT, upper=False)
    values = torch.linalg.eigvalsh((within + within.mT) / 2)
    return values.min(), values.max()


@pytest.mark.parametrize("tolerance", [1e-6, 0.5, 1e6])
@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("name", ["mlp", "all layers", "tokens"])
def test_is_too_wide_by_no_more_than_was_said(name, kfac_approx, tolerance):
    model, x = case(name)
    blocks, dense = posterior(model, x, kfac_approx)
    V = dense_covariance(model, x, dense)
    f, result = OutputCovariance(model, blocks, tolerance=tolerance)(x)
    smallest, largest = bounds(V, result)
    assert smallest > 1 - 1e-9
    assert largest < 1 + tolerance + 1e-9
    assert_close(f, model(x).detach())
    if tolerance == 1e6 and name != "all layers":  # the prior's: something is left out, indeed
        assert largest > 1.01
    same = OutputCovariance(model, blocks, tolerance=tolerance)(x, variance_only=True)[1]
    assert_close(same, result.diagonal(dim1=1, dim2=2))


def test_of_sequences():
    model, x, _ = sequences("gpt")
    blocks, dense = posterior(model, x)
    V = dense_covariance(model, x, dense)
    smallest, largest = bounds(V, OutputCovariance(model, blocks, tolerance=0.5)(x)[1])
    assert smallest > 1 - 1e-9
    assert 1.0001 < largest < 1.5


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_other_tolerances_are_named(tolerance):
    model, x = case("mlp")
    blocks, _ = posterior(model, x)
    with pytest.raises(ValueError, match="must be 0 .exact. or a share"):
        OutputCovariance(model, blocks, tolerance=tolerance)
