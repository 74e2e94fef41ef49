"""Eigenvalues and eigenvectors of Gram matrices that may be singular, ill-scaled or not finite.

A row without entries off the diagonal belongs to an eigenvector that is a unit vector. There may be
many such rows: the taps of a convolution that see only padding, dead units, all inputs of an
embedding. The solvers get only the other rows, which saves time; with thousands of zero rows
LAPACK's divide and conquer may also fail to converge. Where no solver converges, Jacobi's method
does.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "EigenDecomposition",
    "check_finite_factor",
    "check_gram",
    "check_orthonormal",
    "eigenvalues",
    "eigh",
    "map_on_cores",
]

S = TypeVar("S")
T = TypeVar("T")

JACOBI_BLOCK = 128
"""Largest number of rows in a block of Jacobi's method."""


class EigenDecomposition(NamedTuple):
    """Q diag(values) Qᵀ, batched over leading axes."""

    values: Float[Tensor, "*G d"]
    """Ascending; those that rounding made negative are 0."""
    vectors: Float[Tensor, "*G d d"]
    clipped: int
    """How many were negative."""


def eigenvalues(matrix: Float[Tensor, "*G d d"], name: str) -> tuple[Float[Tensor, "*G d"], int]:
    """Eigenvalues in float64, ascending, clipped at 0, and how many were clipped.

    Eigenvalues alone in float64 cost about as much as eigenvectors in float32.

    Args:
        matrix: symmetric positive semi-definite up to rounding.
        name: its name for errors.

    Raises:
        ValueError: a matrix that is not finite.
    """
    check_finite_factor(matrix, name)
    alone, coupled = _rows_apart(matrix)
    values = matrix.diagonal(dim1=-2, dim2=-1)[..., alone].double()
    if len(coupled):
        of_rest, _ = _solve(_among(matrix, coupled), (torch.float64,), vectors=False)
        values = torch.cat([values, of_rest], -1)
    values = values.sort(-1).values
    return values.clamp(min=0.0), int((values < 0).sum())


def eigh(matrix: Float[Tensor, "*G d d"], name: str) -> EigenDecomposition:
    """Eigenvalues (ascending, clipped at 0) and eigenvectors in the matrix's dtype.

    Falls back to float64, to the CPU, and to Jacobi's method. Arguments and errors are those of
    `eigenvalues`.
    """
    check_finite_factor(matrix, name)
    alone, coupled = _rows_apart(matrix)
    values = matrix.diagonal(dim1=-2, dim2=-1)[..., alone]
    vectors = torch.zeros_like(matrix)
    k = len(alone)
    vectors[..., alone, torch.arange(k, device=matrix.device)] = 1
    if len(coupled):
        of_rest, Q = _solve(_among(matrix, coupled), (matrix.dtype, torch.float64), vectors=True)
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


def check_gram(matrix: Tensor, name: str) -> None:
    """Raise a ValueError unless this can be a Gram matrix up to rounding.

    It must be finite and symmetric, and no eigenvalue may be negative: then a little more than the
    rounding of its entries, added to the diagonal, makes its Cholesky decomposition succeed.
    """
    if not matrix.is_floating_point():
        raise ValueError(f"The curvature factor of '{name}' has dtype {matrix.dtype}.")
    check_finite_factor(matrix, name)
    numbers = torch.finfo(matrix.dtype)
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)  # (*G, 1)
    rounding = (16 * matrix.shape[-1] * numbers.eps * largest).clamp(min=numbers.tiny)
    if ((matrix - matrix.mT).abs() > rounding[..., None]).any():
        raise ValueError(f"The curvature factor of '{name}' is not symmetric.")
    regular = matrix + torch.diag_embed(rounding.expand(matrix.shape[:-1]))
    if torch.linalg.cholesky_ex(regular).info.any():
        raise ValueError(f"The curvature factor of '{name}' has a negative eigenvalue.")


def check_orthonormal(vectors: Tensor, name: str) -> None:
    """Raise a ValueError unless the columns are orthonormal up to rounding."""
    error = (vectors.mT @ vectors).diagonal_scatter(vectors.square().sum(-2) - 1, dim1=-2, dim2=-1)
    if not (error.abs() < torch.finfo(vectors.dtype).eps ** 0.5).all():  # NaN, too
        raise ValueError(f"The eigenvectors of '{name}' are not orthonormal.")


def _rows_apart(matrix: Float[Tensor, "*G d d"]) -> tuple[Tensor, Tensor]:
    """Indices of the rows without entries off the diagonal in all matrices, and of the others."""
    entries = matrix != 0
    entries.diagonal(dim1=-2, dim2=-1).fill_(False)
    coupled = (entries.any(-1) | entries.any(-2)).reshape(-1, matrix.shape[-1]).any(0)
    return (~coupled).nonzero()[:, 0], coupled.nonzero()[:, 0]


def _among(matrix: Tensor, rows: Tensor) -> Tensor:
    """The submatrix of these rows and columns; the matrix itself, not a copy, for all rows."""
    return matrix if len(rows) == matrix.shape[-1] else matrix[..., rows[:, None], rows]


def _solve(matrix: Tensor, dtypes: tuple[torch.dtype, ...], vectors: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors (empty unless asked for), by what converges first.

    The order is: the matrix's device in each dtype, then the CPU, then one matrix after the other
    of a batch, then Jacobi's method. The solvers read only one triangle, so that rounding cannot
    make their input unsymmetric.
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
    if matrix.dim() > 2:
        parts = zip(*(_solve(M.double(), dtypes[-1:], vectors) for M in matrix), strict=True)
        values, Q = (torch.stack(part) for part in parts)
        return values, Q
    values, Q = _jacobi(matrix.to("cpu", torch.float64))
    return values.to(matrix.device), Q.to(matrix.device)


def _jacobi(matrix: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "d d"]]:
    """Eigenvalues, ascending, and eigenvectors by Jacobi's method, which always converges.

    The rows form m blocks. Each step takes the pair of blocks with the largest sum of squares off
    the diagonal, and diagonalises their submatrix. That removes a share of at least 2/m² of all
    squares off the diagonal, and later far more. It is slow: minutes where LAPACK takes half a
    minute. Source: Golub & Van Loan 2013, "Matrix computations", section 8.5.
    """
    d = len(matrix)
    largest = matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)  # squares must be finite
    M = matrix.tril() / largest
    M = M + M.tril(-1).mT
    if d == 2:  # rotate by half the angle whose tangent is 2b / (a − c)
        half, middle = (M[0, 0] - M[1, 1]) / 2, (M[0, 0] + M[1, 1]) / 2
        radius, angle = torch.hypot(half, M[0, 1]), torch.atan2(M[0, 1], half) / 2
        x, y = angle.cos(), angle.sin()
        values = torch.stack([middle - radius, middle + radius])
        return values * largest, torch.stack([-y, x, x, y]).view(2, 2)
    block_of = torch.arange(d) // max(1, min(JACOBI_BLOCK, d // 4))
    m = int(block_of[-1]) + 1

    def off_diagonal(rows: Tensor) -> Tensor:
        """Squares off the diagonal of these rows, summed over the blocks of columns: (rows, m)."""
        squares = M[rows].square()
        squares[torch.arange(len(rows)), rows] = 0
        return squares.new_zeros(len(rows), m).index_add_(1, block_of, squares)

    Q = torch.eye(d, dtype=M.dtype)
    enough = (4 * torch.finfo(M.dtype).eps * M.norm()).square()
    every = torch.arange(d)
    W = M.new_zeros(m, m).index_add_(0, block_of, off_diagonal(every))
    for _ in range(100 * m * m):  # a limit, since rounding could keep the rest above the bound
        if W.sum() <= enough:
            break
        within = W.diagonal()
        p, q = divmod(int((2 * W + within + within[:, None]).fill_diagonal_(-1).argmax()), m)
        rows = every[(block_of == p) | (block_of == q)]
        values, R = _solve(M[rows[:, None], rows], (M.dtype,), vectors=True)
        rotated = R.mT @ M[rows]
        rotated[:, rows] = torch.diag(values)
        M[rows], M[:, rows] = rotated, rotated.mT
        Q[:, rows] = Q[:, rows] @ R
        W[[p, q]] = 0
        W.index_add_(0, block_of[rows], off_diagonal(rows))
        W[:, [p, q]] = W[[p, q]].mT
    values, order = M.diagonal().sort()
    return values * largest, Q[:, order]


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
