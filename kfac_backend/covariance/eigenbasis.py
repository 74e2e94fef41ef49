"""Gradients of one parameter in the eigenbasis of its block, from their factors, a part at a time.

With the eigenvectors Q = Q_B ⊗ Q_A of a block, the gradient Σ_r b_nrc a_nrᵀ of output c (or of
backward vector c) is G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ. Those of all examples are never held.
"""

from collections.abc import Iterator
from itertools import product

from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock

__all__ = [
    "LARGEST_PRODUCT",
    "bases",
    "bytes_per_example",
    "dense_in_basis",
    "grouped",
    "products",
    "rotated",
]

LARGEST_PRODUCT = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Bytes of a gradient to make at once: what stays in a CPU's cache, or keeps a GPU busy."""


def bases(
    block: EigenBlock, spectrum: Tensor, transposed: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Eigenvectors (G, d_out, d_out) and (G, d_in, d_in), the spectrum (G, d_out, d_in), a view.

    No eigenvectors for inputs whose factor is diagonal, as an embedding's tokens.

    Args:
        block: a block with two factors.
        spectrum: a number for each of its eigenvectors, as `EigenBlock.spectrum` has them.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    assert block.Q_A is not None
    if not transposed:
        return grouped(block.Q_B), grouped(block.Q_A), grouped(spectrum)
    if block.Q_B.dim() == 3 and block.Q_A.dim() == 2:  # (d_in, 1, 1): d_in groups have one Q_A
        return block.Q_A[None], None, spectrum[:, 0].mT[None]  # of (d_in, 1, d_out)
    return grouped(block.Q_A), grouped(block.Q_B), grouped(spectrum).mT


def products(
    b: Float[Tensor, "G N R C d_out"],
    a: Float[Tensor, "G N R d_in"],
    Q_A: Float[Tensor, "G d_in d_in"] | None,
    product_bytes: int,
) -> Iterator[tuple[int | slice, int, slice, Float[Tensor, "*n rows C d_in"]]]:
    """The examples n, the group, the rows and the entries of one part of G̃ after the other.

    Args:
        b: output gradients, in the basis already.
        a: inputs, not yet in the basis.
        Q_A: the inputs' eigenvectors; None if they are the axes.
        product_bytes: how much may be made at once; one row at least.
    """
    b = b.mT.contiguous()  # (G, N, R, d_out, C)
    (G, N, R, d_out, C), d_in = b.shape, a.shape[-1]
    # Rotate whichever is smaller, the inputs or their products.
    inputs_first = R <= C * d_out
    if inputs_first:
        a = rotated(a, Q_A)
    # On a CPU one matrix product is faster than a batch of few.
    one_by_one = b.device.type == "cpu"
    row = (1 if one_by_one else N) * C * d_in * b.element_size()
    rows = max(1, product_bytes // row)
    examples = range(N) if one_by_one else [slice(None)]
    for n, (start, g) in product(examples, product(range(0, d_out, rows), range(G))):
        some = slice(start, start + rows)
        gradient = b[g, n, :, some].flatten(-2).mT @ a[g, n]  # (C rows, d_in)
        if not inputs_first and Q_A is not None:
            gradient = gradient @ Q_A[g]
        yield n, g, some, gradient.unflatten(-2, (-1, C))


def dense_in_basis(
    gradients: Float[Tensor, "N C P"], block: EigenBlock, spectrum: Tensor
) -> Float[Tensor, "N C *spectrum"]:
    """G̃ of dense gradients, for tensors that are used in several ways."""
    in_basis = block.Q_B.mT @ gradients.to(block.Q_B.dtype).unflatten(-1, spectrum.shape)
    return in_basis if block.Q_A is None else in_basis @ block.Q_A


def rotated(x: Float[Tensor, "G *rows d"], Q: Float[Tensor, "G d d"] | None) -> Tensor:
    """The rows' coordinates in the basis of Q's columns: one large product per group."""
    if Q is None:
        return x
    if len(x) == 1:  # not a batch of one, which takes longer
        return (x[0].flatten(0, -2) @ Q[0]).view(x.shape)
    return (x.flatten(1, -2) @ Q).view(x.shape)


def grouped(matrix: Tensor) -> Tensor:
    """(G, ..., ...), where a single group has no axis of its own; a view."""
    return matrix if matrix.dim() == 3 else matrix[None]


def bytes_per_example(positions: int, outputs: int, d_out: int, d_in: int, itemsize: int) -> int:
    """About what `products` holds for each example, besides a part of G̃."""
    return itemsize * 2 * positions * (d_in + outputs * d_out)
