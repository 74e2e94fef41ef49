"""The prior's directions, left apart: exact up to rounding, or too wide by what was said."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance import gradient_covariance as module
from kfac_backend.covariance.gradient_covariance import gradient_covariance
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers import ExampleGradients
from tests.kfac_backend.covariance import test_output_covariance as flat
from tests.kfac_backend.covariance import test_positions as sequences

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
@pytest.mark.parametrize("start", [0, 1, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("R", [1, R])
def test_every_way_is_exact(monkeypatch, R, start, inputs_first, variance_only):
    """Few directions of the prior and many, none and all; inputs turned first, or gradients."""
    monkeypatch.setattr(module, "_cheapest", lambda *sizes: (sizes[-1], inputs_first))
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


@pytest.mark.parametrize("sizes", [(64, 2560, 2304), (1024, 640, 576), (4, 3, 12), (300, 2, 50)])
def test_leaving_directions_apart_never_costs_more(sizes):
    """The count of multiplications against all that there are, for each number of directions."""
    R, d_b, d_in = sizes

    def cost(start, inputs_first):
        turned = d_in * min(d_in, 2 * (d_in - start))
        if not inputs_first:
            return R * d_in * d_b + d_b * turned
        return R * turned + R * (d_in - start) * d_b + (R * R * (d_in + d_b) if start else 0)

    all_of_them = min(cost(0, True), cost(0, False))
    costs = []
    for start in range(d_in + 1):
        kept, inputs_first = module._cheapest(*sizes, start)
        assert kept in (0, start)
        costs.append(cost(kept, inputs_first))
    assert costs[0] == all_of_them
    assert all(b <= a for a, b in zip(costs, costs[1:], strict=False))


def bounds(V, result):
    """The smallest and the largest generalised eigenvalue of the result, V being positive."""
    L = torch.linalg.cholesky(V)
    within = torch.linalg.solve_triangular(L, result, upper=False)
    within = torch.linalg.solve_triangular(L, within.mT, upper=False)
    values = torch.linalg.eigvalsh((within + within.mT) / 2)
    return values.min(), values.max()


@pytest.mark.parametrize("tolerance", [1e-6, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["mlp", "all layers", "tokens"])
def test_is_too_wide_by_no_more_than_was_said(name, kfac_approx, tolerance):
    model, x = flat.case(name)
    blocks, dense = flat.posterior(model, x, kfac_approx)
    V = flat.brute_force(model, x, dense)
    f, result = OutputCovariance(model, blocks, tolerance=tolerance)(x)
    smallest, largest = bounds(V, result)
    assert smallest > 1 - 1e-9
    assert largest < 1 + tolerance + 1e-9
    assert_close(f, model(x).detach())
    if (
        tolerance == 1e6 and name != "all layers"
    ):  # the prior's covariance: something is left out, indeed
        assert largest > 1.01
    same = OutputCovariance(model, blocks, tolerance=tolerance)(x, variance_only=True)[1]
    assert_close(same, result.diagonal(dim1=1, dim2=2))


def test_of_sequences():
    model, x, blocks, dense = sequences.case("gpt")
    V = sequences.brute_force(model, x, dense)
    smallest, largest = bounds(V, OutputCovariance(model, blocks, tolerance=0.5)(x)[1])
    assert smallest > 1 - 1e-9
    assert 1.0001 < largest < 1.5


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_other_tolerances_are_named(tolerance):
    model, x = flat.case("mlp")
    blocks, _ = flat.posterior(model, x)
    with pytest.raises(ValueError, match="must be 0 .exact. or a share"):
        OutputCovariance(model, blocks, tolerance=tolerance)
