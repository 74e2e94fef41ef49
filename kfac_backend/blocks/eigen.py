"""Compute eigenvalues and eigenvectors of many Gram matrices, also of degenerate ones.

The matrices may be singular, ill-scaled or not finite. Only `eigendecompositions` calls a solver.
It gives the solver as little as possible:

- For a matrix that M rows made, with M at most 3/4 of its size, the M×M inner products of these
  rows. Their eigenvalues are the matrix's own, except for zeros, at (M / d)³ of the cost.
- Otherwise only the rows and columns with an entry off the diagonal. Each other row belongs to an
  eigenvector that is a unit vector. There may be many such rows: the taps of a convolution that
  cover only padding, dead units, all inputs of an embedding. Leaving them out saves time. With
  thousands of zero rows LAPACK's divide and conquer may also fail to converge.

The remaining matrices of equal size go to the solver in one batched call.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.layers.gram import STRIP, Factor

S = TypeVar("S")
T = TypeVar("T")

LARGEST_BATCHED = 256
"""Maximum size of matrices that are stacked for one call. A larger matrix gets a CPU core of its
own, and would gain nothing from a batch on a GPU."""


class EigenDecomposition(NamedTuple):
    """Q diag(values) Qᵀ, batched over leading axes."""

    values: Float[Tensor, "*G d"]
    """Ascending. Eigenvalues that rounding made negative are 0."""
    vectors: Float[Tensor, "*G d d"]
    """Empty unless requested."""
    clipped: Int[Tensor, ""]
    """Number of negative eigenvalues."""


def eigendecompositions(
    factors: Sequence[tuple[Factor, str]], *, vectors: bool
) -> list[EigenDecomposition]:
    """Return eigenvalues of each factor (ascending, clipped at 0), and eigenvectors on request.

    Each factor comes with its name for errors.

    Without vectors the computation is in float64, which costs about as much as eigenvectors in
    float32. With vectors it is in the matrix's dtype. It falls back to float64, and to the CPU.

    Raises:
        ValueError: a matrix is not finite.
        LinAlgError: no solver converges.
    """
    if not factors:
        return []
    names = [name for _, name in factors]
    of_rows = [not vectors and factor.rows is not None for factor, _ in factors]
    entries = [
        factor.entries if has_rows else factor.matrix
        for (factor, _), has_rows in zip(factors, of_rows, strict=True)
    ]
    check_finite(entries, names)
    # Step 1: select the rows of each factor for the solver; None stands for its inner products.
    splits = [
        None if has_rows else split_uncoupled(values)
        for values, has_rows in zip(entries, of_rows, strict=True)
    ]
    sizes = [
        values.shape[-2] if split is None else len(split[1])
        for values, split in zip(entries, splits, strict=True)
    ]
    # Step 2: group the factors. The largest come first, because as the last ones they would leave
    # the other cores idle.
    groups: dict[object, list[int]] = {}
    for i in sorted(range(len(factors)), key=lambda i: -sizes[i]):
        values = entries[i]
        key = (sizes[i], values.dtype, values.device) if sizes[i] <= LARGEST_BATCHED else i
        groups.setdefault(key, []).append(i)

    def solve(group: list[int]) -> list[tuple[Tensor, Tensor]]:
        reduced = [_reduced(entries[i], splits[i]) for i in group]
        return _solve_group(reduced, [names[i] for i in group], vectors)

    # Step 3: on a CPU solve several large ones at once. Small ones are not worth the threads.
    on_cores = entries[0].device.type == "cpu" and max(sizes) >= LARGEST_BATCHED
    on_each = map_on_cores if on_cores and len(groups) > 1 else map
    solved: dict[int, tuple[Tensor, Tensor]] = {}
    for group, results in zip(groups.values(), on_each(solve, groups.values()), strict=True):
        solved |= zip(group, results, strict=True)
    # Step 4: add the rows that the solver did not get.
    return [
        _whole(values, split, *solved[i], vectors)
        for i, (values, split) in enumerate(zip(entries, splits, strict=True))
    ]


def check_finite(entries: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise a ValueError that names a factor, unless all entries of all factors are finite."""
    # A sum is the fastest test of all entries. A sum of finite entries may overflow: then test
    # each.
    if torch.stack([values.sum().double() for values in entries]).isfinite().all():
        return
    finite = torch.stack([torch.isfinite(values).all() for values in entries]).tolist()
    if not all(finite):
        raise ValueError(
            f"The curvature factor of '{names[finite.index(False)]}' is not finite. Likely causes: "
            "exploding activations or gradients, or a learning rate that was too large before the "
            "pass."
        )


def split_uncoupled(matrix: Float[Tensor, "*G d d"]) -> tuple[Tensor, Tensor]:
    """Return indices of rows without entries off the diagonal in all matrices, and of others."""
    entries = matrix != 0
    entries.diagonal(dim1=-2, dim2=-1).fill_(False)
    coupled = (entries.any(-1) | entries.any(-2)).reshape(-1, matrix.shape[-1]).any(0)
    return (~coupled).nonzero()[:, 0], coupled.nonzero()[:, 0]


def _reduced(entries: Tensor, split: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the matrix to solve: the inner products of rows, or the coupled rows of a matrix.

    Only the lower half of the inner products is computed, which the solver reads. It is detached.
    """
    if split is None:
        x, M = entries.detach().double(), entries.shape[-2]
        products = x.new_zeros(*x.shape[:-1], M)
        size = max(STRIP, -(-M // 8)) if x.is_cpu else max(1, M)
        for end in range(size, M + size, size):
            strip = slice(end - size, end)
            products[..., strip, :end] = x[..., strip, :] @ x[..., :end, :].mT
        return products
    _, coupled = split
    # The matrix itself, not a copy, for all rows.
    whole = len(coupled) == entries.shape[-1]
    return entries if whole else entries[..., coupled[:, None], coupled]


def _whole(
    entries: Tensor,
    split: tuple[Tensor, Tensor] | None,
    of_rest: Tensor,
    Q: Tensor,
    vectors: bool,
) -> EigenDecomposition:
    """Return the decomposition of a factor, of rows or a matrix, from the solver's result."""
    if split is None:
        zeros = of_rest.new_zeros(*of_rest.shape[:-1], entries.shape[-1] - of_rest.shape[-1])
        values = torch.cat([zeros, of_rest.clamp(min=0.0)], -1)
        return EigenDecomposition(values, Q, (of_rest < 0).sum())
    matrix, (alone, coupled) = entries, split
    values = torch.cat([matrix.diagonal(dim1=-2, dim2=-1)[..., alone].to(of_rest), of_rest], -1)
    values, order = values.sort(-1)
    clipped, values = (values < 0).sum(), values.clamp(min=0.0)
    if not vectors:
        return EigenDecomposition(values, Q, clipped)
    # The rows without coupling get unit vectors, in the first columns of Q. The solver's vectors
    # fill the other columns, in the other rows. Sorting by the eigenvalues mixes the columns. Store
    # Q row by row, as in a file, because products of the other layout round differently.
    whole, k = torch.zeros_like(matrix, memory_format=torch.contiguous_format), len(alone)
    whole[..., alone, torch.arange(k, device=matrix.device)] = 1
    whole[..., coupled, k:] = Q.to(matrix.dtype)
    if k:
        whole = whole.gather(-1, order[..., None, :].expand_as(whole))
    return EigenDecomposition(values.to(matrix.dtype), whole, clipped)


def _solve_group(
    matrices: list[Tensor], names: list[str], vectors: bool
) -> list[tuple[Tensor, Tensor]]:
    """Solve matrices of one size, in one call if there are several."""
    n = matrices[0].shape[-1]
    if len(matrices) > 1 and n:
        stacked = torch.cat([M.reshape(-1, n, n) for M in matrices])
        solution = _attempt(stacked if vectors else stacked.double(), vectors)
        if solution is not None:
            counts = [M.shape[:-2].numel() for M in matrices]
            return [
                (values.view(M.shape[:-1]), Q.view(M.shape) if vectors else Q)
                for M, values, Q in zip(
                    matrices,
                    solution[0].split(counts),
                    solution[1].split(counts) if vectors else [solution[1]] * len(counts),
                    strict=True,
                )
            ]
    # If one fails, the others must not use its less precise or slower solver.
    return [_solve(M, name, vectors) for M, name in zip(matrices, names, strict=True)]


def _solve(matrix: Tensor, name: str, vectors: bool) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues and eigenvectors (or none) from the first converging solver.

    The order is the matrix's device in each dtype, then the CPU in each.
    """
    if not matrix.shape[-1]:
        dtype = matrix.dtype if vectors else torch.float64
        return matrix.new_empty(matrix.shape[:-1], dtype=dtype), matrix
    for device in dict.fromkeys((matrix.device, torch.device("cpu"))):
        for dtype in dict.fromkeys((matrix.dtype, torch.float64) if vectors else (torch.float64,)):
            if (solution := _attempt(matrix.to(device, dtype), vectors)) is not None:
                values, Q = solution
                return values.to(matrix.device), Q.to(matrix.device)
    raise torch.linalg.LinAlgError(
        f"No solver converges for the curvature factor of '{name}', of shape "
        f"{tuple(matrix.shape)}, with finite entries up to {float(matrix.abs().max()):.3g}. Freeze "
        "the layer (requires_grad_(False)), or keep only the factor's diagonal (diagonal_above)."
    )


def _attempt(M: Tensor, vectors: bool) -> tuple[Tensor, Tensor] | None:
    """Return eigenvalues and eigenvectors by torch, which reads one triangle; None if it fails."""
    try:
        values, Q = torch.linalg.eigh(M) if vectors else (torch.linalg.eigvalsh(M), M.new_empty(0))
    except torch.linalg.LinAlgError:
        return None
    return (values, Q) if torch.isfinite(values).all() and torch.isfinite(Q).all() else None


def map_on_cores(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return [function(item) for each item], in parallel on torch's threads.

    Each item runs on one core. Use it for LAPACK, whose routines gain little from a second thread.
    It saves a sixth of the time of the eigenvalues of a 2304×2304 matrix. If another process uses
    the same cores, a second thread even slows them down, because threads wait for each other: the
    inverse of such a matrix took 2.9 s with two threads and 0.07 s with one.
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
