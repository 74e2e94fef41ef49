"""Gradients of one parameter in the eigenbasis of its block, from their factors, a part at a time.

With the eigenvectors Q = Q_B ⊗ Q_A of a block, the gradient Σ_r b_nrc a_nrᵀ of output c (or of
backward vector c) is G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ. Those of all examples are never held.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.blocks.sketch import Basis, Frame

__all__ = [
    "LARGEST_PRODUCT",
    "Bases",
    "bases",
    "by_group",
    "bytes_per_example",
    "dense_in_basis",
    "examples_at_once",
    "grouped",
    "products",
    "rotated",
]

Bases = Tensor | list[Frame]
"""Of each group: eigenvectors (G, d, d), or a frame."""

LARGEST_PRODUCT = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Bytes of a gradient to make at once: what stays in a CPU's cache, or keeps a GPU busy."""


def bases(
    block: EigenBlock, spectrum: Tensor, transposed: bool
) -> tuple[Bases | None, Bases | None, Tensor]:
    """Eigenvectors (G, d_out, d_out) and (G, d_in, d_in), the spectrum (G, d_out, d_in), a view.

    No eigenvectors for a factor that is diagonal, as that of an embedding's tokens.

    Args:
        block: a block with two factors.
        spectrum: a number for each of its eigenvectors, as `EigenBlock.spectrum` has them.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    assert block.Q_A is not None
    Q_B, Q_A = by_group(block.Q_B), by_group(block.Q_A)
    if isinstance(Q_B, Tensor) and Q_B.shape[-1] == 1 and len(Q_B) > len(Q_A):
        # (rows, 1, 1): the rows are groups of one entry with one Q_A, the spectrum (rows, 1, ...).
        apart = spectrum[:, 0]
        return (Q_A, None, apart.mT[None]) if transposed else (None, Q_A, apart[None])
    if not transposed:
        return Q_B, Q_A, grouped(spectrum)
    return Q_A, Q_B, grouped(spectrum).mT


def products(
    b: Float[Tensor, "G N R C d_out"], a: Float[Tensor, "G N R d_in"], product_bytes: int
) -> Iterator[tuple[int | slice, int, slice, Float[Tensor, "*n C rows d_in"]]]:
    """The examples n, the group, the rows and the entries of one part of G̃ after the other.

    Args:
        b: output gradients.
        a: inputs.
        product_bytes: how much may be made at once; one row at least.
    """
    (G, N, _, C, d_out), d_in = b.shape, a.shape[-1]
    examples = examples_at_once(b.device, N, N)
    row = -(-N // max(1, len(examples))) * C * d_in * b.element_size()
    rows = max(1, product_bytes // row)
    for n, (start, g) in product(examples, product(range(0, d_out, rows), range(G))):
        some = slice(start, start + rows)
        gradient = b[g, n, ..., some].flatten(-2).mT @ a[g, n]  # (C rows, d_in)
        yield n, g, some, gradient.unflatten(-2, (C, -1))


def examples_at_once(device: torch.device, N: int, size: int) -> Sequence[int | slice]:
    """One after the other on a CPU, where a matrix product is faster than a batch; else so many."""
    if device.type == "cpu":
        return range(N)
    return [slice(n, n + size) for n in range(0, N, size)]


def dense_in_basis(
    gradients: Float[Tensor, "N C P"], block: EigenBlock, spectrum: Tensor
) -> Float[Tensor, "N C *spectrum"]:
    """G̃ of dense gradients, for tensors that are used in several ways."""
    Q_B, Q_A = block.Q_B, block.Q_A
    assert isinstance(Q_B, Tensor) and not isinstance(Q_A, Frame)  # such tensors have no sketch
    in_basis = Q_B.mT @ gradients.to(Q_B.dtype).unflatten(-1, spectrum.shape)
    return in_basis if Q_A is None else in_basis @ Q_A


def rotated(x: Float[Tensor, "G *rows d"], Q: Bases | None) -> Float[Tensor, "G *rows k"]:
    """The rows' coordinates along Q's columns: one large product per group."""
    if Q is None:
        return x
    if not isinstance(Q, Tensor):
        return torch.stack([q.coordinates(rows) for q, rows in zip(Q, x, strict=True)])
    if len(x) == 1:  # not a batch of one, which takes longer
        return (x[0].flatten(0, -2) @ Q[0]).view(*x.shape[:-1], Q.shape[-1])
    return (x.flatten(1, -2) @ Q).view(*x.shape[:-1], Q.shape[-1])


def by_group(Q: Basis) -> Bases:
    """The basis of each group, where a single group has no axis of its own; a view."""
    return [Q] if isinstance(Q, Frame) else grouped(Q)


def grouped(matrix: Tensor) -> Tensor:
    """(G, ..., ...), where a single group has no axis of its own; a view."""
    return matrix if matrix.dim() == 3 else matrix[None]


def bytes_per_example(positions: int, outputs: int, d_out: int, d_in: int, itemsize: int) -> int:
    """About what `products` holds for each example, besides a part of G̃."""
    return itemsize * 2 * positions * (d_in + outputs * d_out)
