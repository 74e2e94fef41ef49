"""J Σ Jᵀ of one parameter tensor, from its gradients' factors: no gradient of all examples at once.

In the eigenbasis of the posterior precision Q diag(s) Qᵀ, with Q = Q_B ⊗ Q_A, the gradient of
output c is G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ, and the covariance of outputs c and c' is
Σ_ij G̃_nc,ij G̃_nc',ij / s_ij. With one position it never needs G̃: Σ_i b̃_ci b̃_c'i Σ_j ã_j² / s_ij.
The variances alone, c = c', take no product of all pairs of outputs.
"""

from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.eigenbasis import (
    bases,
    by_group,
    dense_in_basis,
    grouped,
    products,
    rotated,
)
from kfac_backend.layers import ExampleGradients

__all__ = ["dense_covariance", "gradient_covariance"]


def gradient_covariance(
    gradients: ExampleGradients,
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    product_bytes: int = 8 * 2**20,
    *,
    transposed: bool = False,
    variance_only: bool = False,
) -> Float[Tensor, "N C *other"]:
    """The covariance of the outputs that one parameter's uncertainty brings, exact.

    Args:
        gradients: the outputs' gradients in the parameter.
        block: eigenvectors of the parameter's posterior precision.
        spectrum: its eigenvalues > 0, see `EigenBlock.spectrum`.
        product_bytes: how much of a gradient may be made at once; one row at least.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
        variance_only: return the diagonals (N, C).
    """
    b = gradients.b.to(block.Q_B.dtype)
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, C, d_out)
        if block.Q_B.shape[-1] == 1:  # a diagonal, for P groups of one entry or one of P
            b = b.movedim(0, 2).flatten(2)  # (N, C, P)
            return _paired(b / spectrum.flatten(), b, variance_only)
        b = rotated(b, by_group(block.Q_B))
        return _paired(b / grouped(spectrum)[:, None, None, :, 0], b, variance_only).sum(0)
    a = gradients.a.to(block.Q_A.dtype)
    if b.shape[2] > 1:  # positions that no output depends on, such as a causal network's later ones
        reached = b.flatten(3).any(-1).any(0).any(0)  # (R,)
        if not reached.all():
            a, b = a[:, :, reached], b[:, :, reached]
    Q_B, Q_A, spectrum = bases(block, spectrum, transposed)
    _, N, R, C, _ = b.shape
    shape = (N, C) if variance_only else (N, C, C)
    if R == 0:
        return b.new_zeros(shape)
    if R == 1:
        b = rotated(b[:, :, 0], Q_B)
        weights = rotated(a[:, :, 0], Q_A).square() @ spectrum.reciprocal().mT  # (G, N, d_out)
        return _paired(b * weights[:, :, None], b, variance_only).sum(0)
    covariance, inverse_root = b.new_zeros(shape), spectrum.rsqrt()
    for n, g, some, gradient in products(rotated(b, Q_B), a, Q_A, product_bytes):
        gradient = gradient.mul_(inverse_root[g, some, None])
        covariance[n] += _paired(gradient, gradient, variance_only).sum(-2 if variance_only else -3)
    return covariance


def dense_covariance(
    gradients: Float[Tensor, "N C P"],
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    *,
    variance_only: bool = False,
) -> Float[Tensor, "N C *other"]:
    """The same from dense gradients, for tensors that are used in several ways."""
    scaled = (dense_in_basis(gradients, block, spectrum) * spectrum.rsqrt()).flatten(2)
    return _paired(scaled, scaled, variance_only)


def _paired(
    left: Float[Tensor, "*n C d"], right: Float[Tensor, "*n C d"], variance_only: bool
) -> Tensor:
    """The products of all pairs of rows (..., C, C), or of each with its own (..., C)."""
    return (left * right).sum(-1) if variance_only else left @ right.mT
