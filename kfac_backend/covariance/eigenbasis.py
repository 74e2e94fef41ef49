"""Gradients of one parameter in the eigenbasis of its block, from their factors, a part at a time.

With the eigenvectors Q = Q_B ⊗ Q_A of a block, the gradient Σ_r b_nrc a_nrᵀ of output c (or of
backward vector c) becomes G̃_nc = Σ_r (Q_Bᵀ b_nrc) (Q_Aᵀ a_nr)ᵀ. The G̃ of all examples are never
held at once.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock

__all__ = [
    "LARGEST_PRODUCT",
    "bases",
    "bytes_per_example",
    "examples_at_once",
    "grouped",
    "products",
    "rotated",
]

LARGEST_PRODUCT = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Bytes of G̃ to compute at once: few enough for a CPU's cache, and enough to keep a GPU busy."""


def bases(
    block: EigenBlock, spectrum: Tensor, transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Eigenvectors (G, d_out, d_out) and (G, d_in, d_in), and the spectrum (G, d_out, d_in).

    They are views. The eigenvectors are None for a diagonal factor, such as that of an embedding's
    tokens.

    Args:
        block: a block with two factors.
        spectrum: a number for each of its eigenvectors, as `EigenBlock.spectrum` returns them.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    assert block.Q_A is not None
    Q_B, Q_A = grouped(block.Q_B), grouped(block.Q_A)
    if Q_B.shape[-1] == 1 and Q_B.shape[0] > Q_A.shape[0]:
        # A diagonal over the rows is stored as groups of one entry, (rows, 1, 1), with one Q_A for
        # all; the spectrum is (rows, 1, ...). Here it is one group with the identity as its basis.
        apart = spectrum[:, 0]
        return (Q_A, None, apart.mT[None]) if transposed else (None, Q_A, apart[None])
    if not transposed:
        return Q_B, Q_A, grouped(spectrum)
    return Q_A, Q_B, grouped(spectrum).mT


def products(
    b: Float[Tensor, "G N R C d_out"], a: Float[Tensor, "G N R d_in"], product_bytes: int
) -> Iterator[tuple[int | slice, int, slice, Float[Tensor, "*n C rows d_in"]]]:
    """G̃ part by part: the examples n, the group, the rows of the part, and its entries.

    Args:
        b: output gradients, in the basis or not.
        a: inputs, in the basis or not.
        product_bytes: bytes to compute at once, but at least one row.
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
    """Indices of examples: one by one on a CPU, where single products are faster than batches.

    Elsewhere slices of ``size`` examples.
    """
    if device.type == "cpu":
        return range(N)
    return [slice(n, n + size) for n in range(0, N, size)]


def rotated(x: Float[Tensor, "G *rows d"], Q: Tensor | None) -> Float[Tensor, "G *rows k"]:
    """X Q per group, the coordinates of rows x; x itself if Q is None."""
    if Q is None:
        return x
    if len(x) == 1:  # a plain product is faster than a batch of one
        return (x[0].flatten(0, -2) @ Q[0]).view(*x.shape[:-1], Q.shape[-1])
    return (x.flatten(1, -2) @ Q).view(*x.shape[:-1], Q.shape[-1])


def grouped(Q: Tensor) -> Tensor:
    """A matrix or a basis with an axis of groups, (G, ..., ...), also for a single group."""
    return Q if Q.dim() == 3 else Q[None]


def bytes_per_example(positions: int, outputs: int, d_out: int, d_in: int, itemsize: int) -> int:
    """About how many bytes `products` needs for each example, besides the part of G̃."""
    return itemsize * 2 * positions * (d_in + outputs * d_out)
