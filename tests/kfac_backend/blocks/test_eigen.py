"""Eigenvalues: clipping, fallbacks, named errors."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend.blocks import eigen
from kfac_backend.blocks.eigen import eigendecompositions
from kfac_backend.layers.gram import Factor


def eigenvalues(matrix, name="m"):
    (found,) = eigendecompositions([(Factor(matrix), name)], vectors=False)
    return found.values, found.clipped


def eigh(matrix, name="m"):
    (found,) = eigendecompositions([(Factor(matrix), name)], vectors=True)
    return found


def test_negative_eigenvalues_are_clipped_and_counted():
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    matrix = Q @ torch.diag(torch.tensor([-1e-9, 0.5, 2.0]).double()) @ Q.T
    values, clipped = eigenvalues(matrix, "fc, B")
    assert clipped == 1
    assert_close(values, torch.tensor([0.0, 0.5, 2.0]).double(), atol=1e-12, rtol=0)
    decomposed = eigh(matrix, "fc, B")
    assert decomposed.clipped == 1 and decomposed.values[0] == 0


def test_not_finite_names_the_layer():
    with pytest.raises(ValueError, match="'stage1.conv.weight, A' is not finite"):
        eigenvalues(torch.full((2, 2), torch.nan), "stage1.conv.weight, A")


def gram(d, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank, d, generator=generator, dtype=torch.float64)
    return rows.T @ rows / rank


def with_spectrum(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double()).Q
    return Q @ torch.diag(values) @ Q.T


def spread(matrix, d, seed=0):
    """The matrix among d rows, most of which are zero."""
    rows = torch.randperm(d, generator=torch.Generator().manual_seed(seed))[: len(matrix)]
    whole = torch.zeros(d, d, dtype=torch.float64)
    whole[rows[:, None], rows] = matrix
    return whole


MATRICES = {
    "regular": gram(120, 200),
    "zero": torch.zeros(9, 9, dtype=torch.float64),
    "identity": torch.eye(9, dtype=torch.float64),
    "of rank one": gram(120, 1),
    "rank-deficient": gram(120, 20),
    "rows that are zero": spread(gram(40, 60), 120),
    "rows that are zero, rank-deficient": spread(gram(80, 7), 120),
    "a diagonal, but for two rows": spread(gram(2, 3), 9) + torch.arange(9).double().diag(),
    "blocks": torch.block_diag(gram(40, 20), torch.zeros(40, 40).double(), gram(40, 90)),
    "clustered": with_spectrum([1.0] * 30 + [1.0 + 1e-9] * 30 + [0.0] * 30),
    "of 40 orders": with_spectrum(torch.logspace(-40, 0, 60).double()),
    "huge": 1e30 * gram(60, 20),
    "tiny": 1e-35 * gram(60, 20),
    "denormal": 1e-308 * gram(60, 20),
    "groups": torch.stack([spread(gram(20, 30, s), 60, 0) for s in range(3)]),
    "groups with other zeros": torch.stack([spread(gram(20, 30, s), 60, s) for s in range(3)]),
}


def assert_decomposes(matrix, digits=1e-6):
    """Against the definition: Q is orthogonal, and Q diag(values) Qᵀ is the matrix."""
    matrix = (matrix + matrix.mT) / 2
    largest = float(matrix.abs().max()) or 1.0
    found = eigh(matrix, "m")
    values, Q = found.values.double(), found.vectors.double()
    assert found.vectors.dtype == matrix.dtype
    assert (values.diff(dim=-1) >= 0).all() and (values >= 0).all()
    d = matrix.shape[-1]
    assert_close(Q.mT @ Q, torch.eye(d).double().expand_as(Q), atol=digits * d, rtol=0)
    again = Q @ torch.diag_embed(values) @ Q.mT
    assert_close(again / largest, matrix.double() / largest, atol=digits * d, rtol=0)
    alone, clipped = eigenvalues(matrix, "m")
    assert alone.dtype == torch.float64 and (alone.diff(dim=-1) >= 0).all()
    assert_close(alone / largest, values / largest, atol=digits * d, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", MATRICES)
def test_any_finite_matrix_decomposes(case, dtype):
    assert_decomposes(MATRICES[case].to(dtype), 1e-6 if dtype == torch.float32 else 1e-14)


def test_work_on_all_cores_leaves_the_number_of_threads():
    def fails(i):
        assert torch.get_num_threads() == 1
        return 1 / i

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert eigen.map_on_cores(fails, [1, 2, 4]) == [1, 0.5, 0.25]
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            eigen.map_on_cores(fails, [1, 0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def never(matrix):
    raise torch.linalg.LinAlgError("did not converge")


def test_falls_back_to_float64(monkeypatch):
    solver, seen = torch.linalg.eigh, []

    def only_float64(matrix):
        seen.append(matrix.dtype)
        return never(matrix) if matrix.dtype == torch.float32 else solver(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", only_float64)
    assert_decomposes(gram(5, 3).float())
    assert seen == [torch.float32, torch.float64]


@pytest.mark.parametrize("failure", ["raises", "NaN"])
@pytest.mark.parametrize("compute", [eigh, eigenvalues])
def test_solvers_that_never_converge_are_named(compute, failure, monkeypatch):
    def of_nan(M):
        return torch.full_like(M[0], torch.nan), torch.zeros_like(M)

    monkeypatch.setattr(torch.linalg, "eigh", never if failure == "raises" else of_nan)
    monkeypatch.setattr(
        torch.linalg, "eigvalsh", never if failure == "raises" else lambda M: of_nan(M)[0]
    )
    with pytest.raises(torch.linalg.LinAlgError, match="'fc.weight, A', .*4, 4.*diagonal_above"):
        compute(gram(4, 2), "fc.weight, A")
    assert_close(compute(torch.eye(4), "fc")[0], torch.ones(4).to(compute(torch.eye(4), "fc")[0]))


@pytest.mark.parametrize("groups", [(), (2,)])
def test_eigenvalues_of_few_long_rows_are_their_squared_singular_values(groups):
    """The inner products of 200 rows are computed in four strips, one half of the matrix alone."""
    x = torch.randn(*groups, 200, 1500, generator=torch.Generator().manual_seed(0))
    (of_rows,) = eigen.eigendecompositions([(Factor(rows=x), "m")], vectors=False)
    squares = torch.linalg.svdvals(x.double()).square().flip(-1)
    assert_close(of_rows.values[..., -200:], squares, rtol=1e-10, atol=0)
    assert not of_rows.values[..., :-200].any()
    # The other half of the products is not computed. Without the halves' symmetry only the
    # diagonal would remain, whose eigenvalues are the rows' squared norms.
    norms = x.double().square().sum(-1).sort(-1).values
    assert (norms - squares).norm() > 0.1 * squares.norm()
