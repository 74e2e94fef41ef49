"""The posterior's precision H/(σ²T) + P₀ as an operator: Kronecker, dense, diagonal or low-rank.

Predictives, the evidence and samples use only an operator's methods, so a structure needs no other
code. P counts the parameters that have a posterior, in ``parameters()`` order. Vectors are rows
(..., P).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.extras import extra

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

__all__ = ["Precision"]


class Precision(ABC):
    """Symmetric, positive definite matrix H/(σ²T) + P₀, (P, P)."""

    size: int
    """P."""
    example: Tensor
    """Tensor with the dtype and device of draws."""

    @abstractmethod
    def matvec(self, v: Float[Tensor, "*rows P"]) -> Float[Tensor, "*rows P"]:
        """Return (H/(σ²T) + P₀) v."""

    @abstractmethod
    def solve(self, v: Float[Tensor, "*rows P"]) -> Float[Tensor, "*rows P"]:
        """Return Σ v, with the covariance Σ = (H/(σ²T) + P₀)⁻¹; differentiable in v."""

    @abstractmethod
    def logdet(self) -> Float[Tensor, ""]:
        """Return log det(H/(σ²T) + P₀), float64."""

    @abstractmethod
    def sample(
        self, n_samples: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "S P"]:
        """Return draws of N(0, Σ), in the operator's dtype."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "P"]:
        """Return the diagonal of H/(σ²T) + P₀."""

    @abstractmethod
    def variances(self) -> Float[Tensor, "P"]:
        """Return the diagonal of Σ."""

    def to_dense(self) -> Float[Tensor, "P P"]:
        """Return the matrix itself."""
        return self.matvec(torch.eye(self.size).to(self.example))

    def covariance(self) -> Float[Tensor, "P P"]:
        """Return Σ."""
        return self.solve(torch.eye(self.size).to(self.example))

    def linear_operator(self, inverse: bool = False) -> "LinearOperator":
        """Return the matrix, or its inverse Σ, as an operator (P, P) for SciPy's solvers."""
        with extra("statistics"):
            from scipy.sparse.linalg import LinearOperator

        function = self.solve if inverse else self.matvec

        def product(v: "np.ndarray") -> "np.ndarray":
            return function(torch.from_numpy(v.reshape(-1)).to(self.example)).cpu().numpy()

        dtype = torch.empty(0, dtype=self.example.dtype).numpy().dtype
        shape = (self.size, self.size)
        # SciPy's types know the base class alone.
        return LinearOperator(shape, product, product, dtype=dtype)  # pyright: ignore[reportCallIssue]

    def square_form(
        self, J: Float[Tensor, "*N C P"], diagonal: bool = False
    ) -> Float[Tensor, "..."]:
        """Return J Σ Jᵀ (..., C, C), the output covariance for Jacobians J, or its diagonal."""
        solved = self.solve(J)
        return (solved * J).sum(-1) if diagonal else solved @ J.mT

    def _noise(self, rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
        like = self.example
        return torch.randn(rows, columns, device=like.device, dtype=like.dtype, generator=generator)


class KroneckerPrecision(Precision):
    """Blocks Q diag(spectrum) Qᵀ with Q = Q_B ⊗ Q_A, one for each parameter tensor.

    Args:
        blocks: maps a parameter's name to eigenvectors, and eigenvalues of the block with its
            prior.
        constants: maps a parameter's name to (first, last + 1) of entries that draws leave at 0.
    """

    def __init__(
        self,
        blocks: Mapping[str, tuple[EigenBlock, Tensor]],
        constants: Mapping[str, tuple[int, int]] = {},  # noqa: B006  # never written
    ) -> None:
        self.blocks, self.constants = blocks, constants
        self.size = sum(eigen.numel for eigen, _ in blocks.values())  # including constants
        self.example = next(iter(blocks.values()))[1]

    def power(self, v: Tensor, exponent: float) -> Tensor:
        """Return (H/(σ²T) + P₀)^exponent v."""
        parts = v.split([eigen.numel for eigen, _ in self.blocks.values()], -1)
        blocks = zip(parts, self.blocks.values(), strict=True)
        return torch.cat([e.power_matvec(part, s, exponent) for part, (e, s) in blocks], -1)

    def matvec(self, v: Tensor) -> Tensor:
        """Return the product by eigenvectors."""
        return self.power(v, 1.0)

    def solve(self, v: Tensor) -> Tensor:
        """Return the solution by eigenvectors."""
        return self.power(v, -1.0)

    def logdet(self) -> Tensor:
        """Return Σ of the logarithms of all eigenvalues."""
        return torch.stack([eigen.log_det(s) for eigen, s in self.blocks.values()]).sum()

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return (H/(σ²T) + P₀)^(−½) ε."""
        changes = self.power(self._noise(n_samples, self.size, generator), -0.5)
        first = 0
        for name, (eigen, _) in self.blocks.items():
            start, end = self.constants.get(name, (0, 0))
            changes[:, first + start : first + end] = 0
            first += eigen.numel
        return changes

    def diagonal(self) -> Tensor:
        """Return the diagonal, block by block."""
        return torch.cat([eigen.diagonal(s) for eigen, s in self.blocks.values()])

    def variances(self) -> Tensor:
        """Return the variances, block by block."""
        return torch.cat([eigen.diagonal(s, -1.0) for eigen, s in self.blocks.values()])

    def to_matrix(self, exponent: float = 1.0) -> Tensor:
        """Return a power of the matrix, (P, P). The name is laplace-torch's."""
        return self.power(torch.eye(self.size).to(self.example), exponent)


class DensePrecision(Precision):
    """Whole matrix.

    Args:
        H: H/(σ²T), (P, P).
        delta: δ of each parameter, (P,).
        example: a tensor with the dtype and on the device of draws.
    """

    def __init__(self, H: Tensor, delta: Tensor, example: Tensor) -> None:
        self._matrix = H + torch.diag(delta)
        self.size, self.example = len(delta), example

    @cached_property
    @torch.inference_mode(False)  # cached for calls with autograd
    def _inverse(self) -> Tensor:
        return torch.linalg.inv(self._matrix)

    def matvec(self, v: Tensor) -> Tensor:
        """Return the product with the matrix."""
        return v @ self._matrix.to(v)

    def solve(self, v: Tensor) -> Tensor:
        """Return the product with the inverse."""
        return v @ self._inverse.to(v)

    def logdet(self) -> Tensor:
        """Return the log determinant by LU decomposition."""
        return torch.linalg.slogdet(self._matrix)[1]

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return L ε with L Lᵀ = Σ."""
        root = torch.linalg.cholesky(self._inverse).to(self.example)
        return self._noise(n_samples, self.size, generator) @ root.mT

    def diagonal(self) -> Tensor:
        """Return the matrix's diagonal."""
        return self._matrix.diagonal()

    def variances(self) -> Tensor:
        """Return the inverse's diagonal."""
        return self._inverse.diagonal()


class DiagonalPrecision(Precision):
    """Diagonal matrix; arguments as in `DensePrecision`, with H (P,)."""

    def __init__(self, H: Tensor, delta: Tensor, example: Tensor) -> None:
        self._diagonal = H + delta
        self.size, self.example = len(delta), example

    def matvec(self, v: Tensor) -> Tensor:
        """Return the product, entry by entry."""
        return v * self._diagonal.to(v)

    def solve(self, v: Tensor) -> Tensor:
        """Return the quotient, entry by entry."""
        return v / self._diagonal.to(v)

    def logdet(self) -> Tensor:
        """Return Σ of the logarithms."""
        return self._diagonal.log().sum()

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return ε divided by the roots."""
        noise = self._noise(n_samples, self.size, generator)
        return noise * self._diagonal.rsqrt().to(noise)

    def diagonal(self) -> Tensor:
        """Return the diagonal itself."""
        return self._diagonal

    def variances(self) -> Tensor:
        """Return one over the diagonal."""
        return 1 / self._diagonal


class LowRankPrecision(Precision):
    """Rᵀ R + P₀, by Woodbury's identity with (K, K) systems.

    Args:
        R: rows (K, P) with Rᵀ R = H/(σ²T).
        delta: δ of each parameter, (P,).
        example: a tensor with the dtype and on the device of draws.
    """

    def __init__(self, R: Tensor, delta: Tensor, example: Tensor) -> None:
        self._R, self._delta = R, delta
        self.size, self.example = len(delta), example

    @cached_property
    @torch.inference_mode(False)  # as above
    def _inner(self) -> Tensor:
        """I + R P₀⁻¹ Rᵀ, (K, K)."""
        return torch.eye(len(self._R)).to(self._R) + (self._R / self._delta) @ self._R.mT

    def matvec(self, v: Tensor) -> Tensor:
        """Return the product, in O(K P)."""
        R = self._R.to(v)
        return (v @ R.mT) @ R + v * self._delta.to(v)

    def solve(self, v: Tensor) -> Tensor:
        """Return P₀⁻¹ v − P₀⁻¹ Rᵀ (I + R P₀⁻¹ Rᵀ)⁻¹ R P₀⁻¹ v."""
        rows = v.double() / self._delta
        right = torch.linalg.solve(self._inner, self._R / self._delta)
        return (rows - (rows @ self._R.mT) @ right).to(v)

    def logdet(self) -> Tensor:
        """Return the log determinant by the determinant lemma."""
        return torch.linalg.slogdet(self._inner)[1] + self._delta.log().sum()

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return Σ x for vectors x whose covariance is the precision."""
        of_prior = self._noise(n_samples, self.size, generator)
        of_rows = self._noise(n_samples, len(self._R), generator)
        return self.solve(
            of_prior * self._delta.sqrt().to(of_prior) + of_rows @ self._R.to(of_rows)
        )

    def diagonal(self) -> Tensor:
        """Return the diagonal, in O(K P)."""
        return self._R.square().sum(0) + self._delta

    def variances(self) -> Tensor:
        """Return the variances, in O(K² P)."""
        scaled = self._R / self._delta
        return 1 / self._delta - (scaled * torch.linalg.solve(self._inner, scaled)).sum(0)


def log_prob(
    precision: Precision, difference: Float[Tensor, "*S P"], normalized: bool = True
) -> Float[Tensor, "*S"]:
    """Return log N(θ; θ*, Σ) (nats) at differences θ − θ*, optionally without its normaliser."""
    square = (difference * precision.matvec(difference)).sum(-1)
    normaliser = precision.logdet() - precision.size * math.log(2 * math.pi)
    return 0.5 * (normaliser - square) if normalized else -0.5 * square
