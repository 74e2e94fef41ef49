"""Eigenvalues and eigenvectors of Gram matrices that may be singular, ill-scaled or not finite.

A row without entries off the diagonal belongs to an eigenvector that is a unit vector. There may be
many such rows: the taps of a convolution that see only padding, dead units, all inputs of an
embedding. The solvers get only the other rows, which saves time; with thousands of zero rows
LAPACK's divide and conquer may also fail to converge.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

S = TypeVar("S")
T = TypeVar("T")


class EigenDecomposition(NamedTuple):
    """Q diag(values) Qᵀ, batched over leading axes."""

    values: Float[Tensor, "*G d"]
    """Ascending; those that rounding made negative are 0."""
    vectors: Float[Tensor, "*G d d"]
    clipped: int
    """How many were negative."""


def eigenvalues(
    matrix: Float[Tensor, "*G d d"], name: str, rows: Float[Tensor, "*G M d"] | None = None
) -> tuple[Float[Tensor, "*G d"], int]:
    """Eigenvalues in float64, ascending, clipped at 0, and how many were clipped.

    Eigenvalues alone in float64 cost about as much as eigenvectors in float32.

    Args:
        matrix: symmetric positive semi-definite up to rounding.
        name: the factor's, for errors.
        rows: x_m with matrix = Σ_m x_m x_mᵀ, if M is far below d. The M×M inner products have the
            same eigenvalues but for zeros, and cost (M / d)³ as much.

    Raises:
        ValueError: a matrix that is not finite.
        LinAlgError: no solver converges.
    """
    check_finite_factor(matrix, name)
    if rows is not None:
        x = rows.double()
        values, _ = _solve(x @ x.mT, (torch.float64,), name, vectors=False)
        zeros = values.new_zeros(*values.shape[:-1], matrix.shape[-1] - values.shape[-1])
        return torch.cat([zeros, values.clamp(min=0.0)], -1), int((values < 0).sum())
    # Rows without coupling have their diagonal entry as eigenvalue; a solver gets the others.
    alone, coupled = split_uncoupled(matrix)
    values = matrix.diagonal(dim1=-2, dim2=-1)[..., alone].double()
    if len(coupled):
        of_rest, _ = _solve(_among(matrix, coupled), (torch.float64,), name, vectors=False)
        values = torch.cat([values, of_rest], -1)
    values = values.sort(-1).values
    return values.clamp(min=0.0), int((values < 0).sum())


def eigh(matrix: Float[Tensor, "*G d d"], name: str) -> EigenDecomposition:
    """Eigenvalues (ascending, clipped at 0) and eigenvectors in the matrix's dtype.

    Falls back to float64, and to the CPU. Arguments and errors are those of `eigenvalues`.
    """
    check_finite_factor(matrix, name)
    # The rows without coupling get unit vectors, in the first columns of Q; the solver's vectors
    # fill the other columns, in the other rows. Sorting by the eigenvalues mixes the columns.
    alone, coupled = split_uncoupled(matrix)
    values = matrix.diagonal(dim1=-2, dim2=-1)[..., alone]
    # In rows, as a file has them: products of the other layout are rounded differently.
    vectors = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
    k = len(alone)
    vectors[..., alone, torch.arange(k, device=matrix.device)] = 1
    if len(coupled):
        dtypes = (matrix.dtype, torch.float64)
        of_rest, Q = _solve(_among(matrix, coupled), dtypes, name, vectors=True)
        values = torch.cat([values.to(of_rest), of_rest], -1)
        vectors[..., coupled, k:] = Q.to(matrix.dtype)
    values, order = values.sort(-1)
    if k:
        vectors = vectors.gather(-1, order[..., None, :].expand_as(vectors))
    return EigenDecomposition(
        values.clamp(min=0.0).to(matrix.dtype), vectors, int((values < 0).sum())
    )


def check_finite_factor(matrix: Tensor, name: str) -> None:
    """Raise a ValueError that names the factor, unless all its entries are finite."""
    if not torch.isfinite(matrix).all():
        raise ValueError(
            f"The curvature factor of '{name}' is not finite. Likely causes: exploding activations "
            "or gradients, or too large a learning rate before the pass."
        )


def split_uncoupled(matrix: Float[Tensor, "*G d d"]) -> tuple[Tensor, Tensor]:
    """Indices of the rows without entries off the diagonal in all matrices, and of the others."""
    entries = matrix != 0
    entries.diagonal(dim1=-2, dim2=-1).fill_(False)
    coupled = (entries.any(-1) | entries.any(-2)).reshape(-1, matrix.shape[-1]).any(0)
    return (~coupled).nonzero()[:, 0], coupled.nonzero()[:, 0]


def _among(matrix: Tensor, rows: Tensor) -> Tensor:
    """The submatrix of these rows and columns; the matrix itself, not a copy, for all rows."""
    return matrix if len(rows) == matrix.shape[-1] else matrix[..., rows[:, None], rows]


def _solve(
    matrix: Tensor, dtypes: tuple[torch.dtype, ...], name: str, *, vectors: bool
) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors (empty unless asked for), by what converges first.

    The order is the matrix's device in each dtype, then the CPU in each. The solvers read only one
    triangle, so that rounding cannot make their input unsymmetric.
    """
    for device in dict.fromkeys((matrix.device, torch.device("cpu"))):
        for dtype in dict.fromkeys(dtypes):
            M = matrix.to(device, dtype)
            try:
                if vectors:
                    values, Q = torch.linalg.eigh(M)
                else:
                    values, Q = torch.linalg.eigvalsh(M), M.new_empty(0)
            except torch.linalg.LinAlgError:
                continue
            if torch.isfinite(values).all() and torch.isfinite(Q).all():
                return values.to(matrix.device), Q.to(matrix.device)
    raise torch.linalg.LinAlgError(
        f"No solver converges for the curvature factor of '{name}', {tuple(matrix.shape)} with "
        f"finite entries up to {float(matrix.abs().max()):.3g}. Freeze the layer "
        "(requires_grad_(False)), or keep only the factor's diagonal (diagonal_above)."
    )


def map_on_cores(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """[function(item) for each item], with as many at once as torch has threads, each on one core.

    Use it for LAPACK, whose routines gain little from a second thread: it saves a sixth of the time
    of the eigenvalues of a 2304×2304 matrix. If another process uses the same cores they even lose,
    because threads wait for each other: the inverse of such a matrix took 2.9 s with two threads
    and 0.07 s with one.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return [function(item) for item in items]

    def on_one_core(item: S) -> T:
        torch.set_num_threads(1)
        return function(item)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(on_one_core, items))
    finally:
        torch.set_num_threads(threads)
