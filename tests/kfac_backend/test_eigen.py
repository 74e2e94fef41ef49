"""Eigenvalues: clipping, fallbacks, named errors."""

import pytest
import torch
from torch.testing import assert_close

from kfac_backend import eigen


def test_negative_eigenvalues_are_clipped_and_counted():
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    matrix = Q @ torch.diag(torch.tensor([-1e-9, 0.5, 2.0]).double()) @ Q.T
    values, clipped = eigen.eigenvalues(matrix, "fc, B")
    assert clipped == 1
    assert_close(values, torch.tensor([0.0, 0.5, 2.0]).double(), atol=1e-12, rtol=0)
    decomposed = eigen.eigh(matrix, "fc, B")
    assert decomposed.clipped == 1 and decomposed.values[0] == 0


def test_eigenvalues_are_float64_and_vectors_in_the_matrix_dtype():
    matrix = torch.diag(torch.tensor([1.0, 3.0]))
    assert eigen.eigenvalues(matrix, "m")[0].dtype == torch.float64
    assert eigen.eigh(matrix, "m").vectors.dtype == torch.float32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_finite_names_the_layer(value):
    with pytest.raises(ValueError, match="'stage1.conv.weight, A' is not finite"):
        eigen.eigenvalues(torch.full((2, 2), value), "stage1.conv.weight, A")


def test_falls_back_to_float64_and_then_fails_by_name(monkeypatch):
    solver, seen = torch.linalg.eigh, []

    def only_float64(matrix):
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return solver(matrix)

    matrix = torch.diag(torch.tensor([1.0, 3.0]))
    monkeypatch.setattr(torch.linalg, "eigh", only_float64)
    assert_close(eigen.eigh(matrix, "m").values, torch.tensor([1.0, 3.0]))
    assert seen == [torch.float32, torch.float64]

    def never(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", never)
    with pytest.raises(RuntimeError, match="'fc.weight, A', \\(2, 2\\), did not converge"):
        eigen.eigh(matrix, "fc.weight, A")
