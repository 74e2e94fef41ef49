"""J Σ Jᵀ of one parameter tensor, from its gradients' factors: no gradient of all examples at once.

In the eigenbasis of the posterior precision Q diag(s) Qᵀ, with Q = Q_B ⊗ Q_A, the gradient of
output c is G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ, and the covariance of outputs c and c' is
Σ_ij G̃_nc,ij G̃_nc',ij / s_ij. With one position it never needs G̃: Σ_i b̃_ci b̃_c'i Σ_j ã_j² / s_ij.
"""

from itertools import product

from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.layers import ExampleGradients

__all__ = ["LARGEST_PRODUCT", "bytes_per_example", "dense_covariance", "gradient_covariance"]

LARGEST_PRODUCT = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Bytes of a gradient to make at once: what stays in a CPU's cache, or keeps a GPU busy."""


def gradient_covariance(
    gradients: ExampleGradients,
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    product_bytes: int = 8 * 2**20,
    *,
    transposed: bool = False,
) -> Float[Tensor, "N C C"]:
    """The covariance of the outputs that one parameter's uncertainty brings, exact.

    Args:
        gradients: the outputs' gradients in the parameter.
        block: eigenvectors of the parameter's posterior precision.
        spectrum: its eigenvalues > 0, see `EigenBlock.spectrum`.
        product_bytes: how much of a gradient may be made at once; one row at least.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    b = gradients.b.to(block.Q_B.dtype)
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, C, d_out)
        if block.Q_B.shape[-1] == 1:  # a diagonal, for P groups of one entry or one of P
            b = b.movedim(0, 2).flatten(2)  # (N, C, P)
            return b / spectrum.flatten() @ b.mT
        b = _rotated(b, _grouped(block.Q_B))
        return (b / _grouped(spectrum)[:, None, None, :, 0] @ b.mT).sum(0)
    a = gradients.a.to(block.Q_A.dtype)
    if b.shape[2] > 1:  # positions that no output depends on, such as a causal network's later ones
        reached = b.flatten(3).any(-1).any(0).any(0)  # (R,)
        if not reached.all():
            a, b = a[:, :, reached], b[:, :, reached]
    Q_B, Q_A, spectrum = _bases(block, spectrum, transposed)
    (G, N, R, C, d_out), d_in = b.shape, a.shape[-1]
    if R == 0:
        return b.new_zeros(N, C, C)
    if R == 1:
        b = _rotated(b[:, :, 0], Q_B)
        weights = _rotated(a[:, :, 0], Q_A).square() @ spectrum.reciprocal().mT  # (G, N, d_out)
        return (b * weights[:, :, None] @ b.mT).sum(0)
    b = _rotated(b, Q_B).mT.contiguous()  # (G, N, R, d_out, C)
    # Rotate whichever is smaller, the inputs or their products.
    inputs_first = R <= C * d_out
    if inputs_first:
        a = _rotated(a, Q_A)
    # On a CPU one matrix product is faster than a batch of few.
    one_by_one = b.device.type == "cpu"
    row = (1 if one_by_one else N) * C * d_in * b.element_size()
    inverse_root, rows = spectrum.rsqrt(), max(1, product_bytes // row)
    covariance = b.new_zeros(N, C, C)
    examples = range(N) if one_by_one else [slice(None)]
    for n, (start, g) in product(examples, product(range(0, d_out, rows), range(G))):
        some = slice(start, start + rows)
        gradient = b[g, n, :, some].flatten(-2).mT @ a[g, n]  # (C rows, d_in)
        if not inputs_first and Q_A is not None:
            gradient = gradient @ Q_A[g]
        gradient = gradient.unflatten(-2, (-1, C)).mul_(inverse_root[g, some, None])
        covariance[n] += (gradient @ gradient.mT).sum(-3)
    return covariance


def dense_covariance(
    gradients: Float[Tensor, "N C P"], block: EigenBlock, spectrum: Float[Tensor, "*G rows columns"]
) -> Float[Tensor, "N C C"]:
    """The same from dense gradients, for tensors that are used in several ways."""
    rotated = gradients.to(block.Q_B.dtype).unflatten(-1, spectrum.shape)
    rotated = block.Q_B.mT @ rotated
    if block.Q_A is not None:
        rotated = rotated @ block.Q_A
    scaled = (rotated * spectrum.rsqrt()).flatten(2)
    return scaled @ scaled.mT


def bytes_per_example(positions: int, outputs: int, d_out: int, d_in: int, itemsize: int) -> int:
    """About what `gradient_covariance` holds for each example, besides products."""
    return itemsize * 2 * positions * (d_in + outputs * d_out)


def _bases(
    block: EigenBlock, spectrum: Tensor, transposed: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Eigenvectors (G, d_out, d_out) and (G, d_in, d_in), the spectrum (G, d_out, d_in).

    No eigenvectors for inputs whose factor is diagonal, as an embedding's tokens.
    """
    assert block.Q_A is not None
    if not transposed:
        return _grouped(block.Q_B), _grouped(block.Q_A), _grouped(spectrum)
    if block.Q_B.dim() == 3 and block.Q_A.dim() == 2:  # (d_in, 1, 1): d_in groups have one Q_A
        return block.Q_A[None], None, spectrum[:, 0].mT[None]  # of (d_in, 1, d_out)
    return _grouped(block.Q_A), _grouped(block.Q_B), _grouped(spectrum).mT


def _rotated(x: Float[Tensor, "G *rows d"], Q: Float[Tensor, "G d d"] | None) -> Tensor:
    """The rows' coordinates in the basis of Q's columns: one large product per group."""
    return x if Q is None else (x.flatten(1, -2) @ Q).view(x.shape)


def _grouped(matrix: Tensor) -> Tensor:
    """(G, ..., ...), where a single group has no axis of its own."""
    return matrix if matrix.dim() == 3 else matrix[None]
