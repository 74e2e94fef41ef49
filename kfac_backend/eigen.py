"""Eigenvalues and eigenvectors of Gram matrices that may be singular, ill-scaled or not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["EigenDecomposition", "eigenvalues", "eigh"]


class EigenDecomposition(NamedTuple):
    """Q diag(values) Qᵀ, batched over leading axes."""

    values: Float[Tensor, "*G d"]
    """Ascending; those that rounding made negative are 0."""
    vectors: Float[Tensor, "*G d d"]
    clipped: int
    """How many were negative."""


def eigenvalues(matrix: Float[Tensor, "*G d d"], name: str) -> tuple[Float[Tensor, "*G d"], int]:
    """Eigenvalues in float64, ascending, clipped at 0, and how many were clipped.

    Without eigenvectors, in float64, this costs about what the vectors cost in float32.

    Args:
        matrix: symmetric positive semi-definite up to rounding.
        name: what to call it in an error.

    Raises:
        ValueError: a matrix that is not finite.
        RuntimeError: no solver converged.
    """
    values = _with_fallbacks(torch.linalg.eigvalsh, matrix, (torch.float64,), name)
    return values.clamp(min=0.0), int((values < 0).sum())


def eigh(matrix: Float[Tensor, "*G d d"], name: str) -> EigenDecomposition:
    """Eigenvalues (ascending, clipped at 0) and eigenvectors in the matrix's dtype.

    Falls back to float64, and to the CPU, where the solver does not converge.

    Args:
        matrix: symmetric positive semi-definite up to rounding.
        name: what to call it in an error.

    Raises:
        ValueError: a matrix that is not finite.
        RuntimeError: no solver converged.
    """
    values, vectors = _with_fallbacks(
        torch.linalg.eigh, matrix, (matrix.dtype, torch.float64), name
    )
    dtype = matrix.dtype
    return EigenDecomposition(
        values.clamp(min=0.0).to(dtype), vectors.to(dtype), int((values < 0).sum())
    )


def _with_fallbacks(
    solver: Callable[[Tensor], Any], matrix: Tensor, dtypes: tuple[torch.dtype, ...], name: str
) -> Any:
    if not torch.isfinite(matrix).all():
        raise ValueError(
            f"The curvature factor of '{name}' is not finite. Likely causes: exploding activations "
            "or gradients, or too large a learning rate before the pass."
        )
    if matrix.shape[-1] == 1 and solver is torch.linalg.eigvalsh:
        return matrix[..., 0].double()  # diagonal blocks come as many matrices of size one
    if matrix.shape[-1] == 1:
        return matrix[..., 0], torch.ones_like(matrix)
    # The solvers read one triangle alone: what they see is symmetric.
    for device in dict.fromkeys((matrix.device, torch.device("cpu"))):
        for dtype in dict.fromkeys(dtypes):
            try:
                result = solver(matrix.to(device, dtype))
            except torch.linalg.LinAlgError:
                continue
            if isinstance(result, Tensor):
                return result.to(matrix.device)
            return tuple(part.to(matrix.device) for part in result)
    raise RuntimeError(
        f"The eigendecomposition of the curvature factor of '{name}', {tuple(matrix.shape)}, did "
        "not converge in float64 either."
    )
