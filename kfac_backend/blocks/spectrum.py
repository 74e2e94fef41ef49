"""Spectra of all blocks on logarithmic grids, for log determinants at many prior precisions.

A log determinant and its gradient are sums over all P eigenvalues β_i α_j of smooth functions of s
= log β_i + log α_j: log(1 + eˢ) and its derivative. Optimising the prior precision evaluates them
many times, and P terms each time would be too many. So each eigenvalue's unit weight is distributed
once to the grid nodes around it, by Lagrange interpolation, and the sum runs over the nodes
instead. The weights of a Kronecker product are the convolution of its factors' weights. log(1 + eˢ)
is analytic for |Im s| < π, so a step of 1/8 and 16 nodes interpolate it to 1e-14.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import KroneckerBlock, compute_eigenvalues, products_of

STEP = 1 / 8
NODES = 16
SMALLEST = 1e-40
"""Eigenvalues below this share of the largest count as zero."""
CHUNK = 2**16
"""Maximum number of eigenvalues that are distributed at once, which take a kilobyte each."""


@dataclass(frozen=True)
class Spectra:
    """Σ_i g(log λ_i) ≈ Σ_m weights[b, m] · g(nodes[b, m]) for each block b, in float64.

    Zero eigenvalues have no weight. Sums of log(1 + λ/δ) and of its derivatives have a relative
    error of about 1e-13.
    """

    nodes: Float[Tensor, "B M"]
    weights: Float[Tensor, "B M"]
    largest: Float[Tensor, "B"]
    """The largest eigenvalue of each block."""

    @classmethod
    def of(cls, blocks: Iterable[KroneckerBlock]) -> "Spectra":
        """Compute the spectra of blocks, from their factors' eigenvalues alone."""
        blocks = list(blocks)
        compute_eigenvalues(blocks)
        of_factors = (block.factor_eigenvalues() for block in blocks)
        # For groups, B alone and corrected blocks, distribute all P eigenvalues.
        values = [
            (products_of(B, A),) if A is None or B.dim() > 1 else (B, A) for B, A in of_factors
        ]
        grids = _spread_all([own for of_block in values for own in of_block])
        starts, block_weights = [], []
        for of_block in values:
            start, weights = next(grids)
            if len(of_block) == 2:
                # log β_i + log α_j lies on the sum of both grids, so convolve the weights. This
                # takes the time of the grids' lengths, not of the d_out · d_in products. conv1d
                # correlates, so flip one.
                start_A, of_A = next(grids)
                padded = F.pad(weights, (len(of_A) - 1,) * 2)
                start += start_A
                weights = F.conv1d(padded[None, None], of_A.flip(0)[None, None]).flatten()
            starts.append(start)
            block_weights.append(weights)
        M = max(map(len, block_weights))
        device = block_weights[0].device
        steps = torch.arange(M, device=device)
        return cls(
            (torch.tensor(starts, device=device)[:, None] + steps) * STEP,
            torch.stack([F.pad(weights, (0, M - len(weights))) for weights in block_weights]),
            torch.stack([torch.stack([own.max() for own in part]).prod() for part in values]),
        )

    def log_det_ratio(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return Σ_i log(1 + λ_i · ratio) per block, differentiable in the ratios > 0."""
        logits = self.nodes + ratio.log()[:, None]
        return (self.weights * F.softplus(logits, threshold=40.0)).sum(-1)

    def effective(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return Σ_i λ_i · ratio / (1 + λ_i · ratio) per block."""
        return (self.weights * torch.sigmoid(self.nodes + ratio.log()[:, None])).sum(-1)


def _spread_all(
    vectors: Iterable[Float[Tensor, "n"]],
) -> Iterator[tuple[int, Float[Tensor, "m"]]]:
    """Apply `_spread` to many small vectors at once, and to large ones one after the other."""
    together, number = [], 0
    for values in vectors:
        if together and number + len(values) > CHUNK:
            yield from _spread(together)
            together, number = [], 0
        together.append(values)
        number += len(values)
    yield from _spread(together)


def _spread(vectors: Sequence[Float[Tensor, "n"]]) -> list[tuple[int, Float[Tensor, "m"]]]:
    """Return the first grid node of each vector of eigenvalues, and the weights of its nodes."""
    numbers = torch.arange(len(vectors), device=vectors[0].device)
    sizes = torch.tensor([len(values) for values in vectors], device=numbers.device)
    owners, values = numbers.repeat_interleave(sizes), torch.cat(tuple(vectors))
    largest = values.new_zeros(len(vectors)).scatter_reduce(0, owners, values, "amax")
    is_seen = values > SMALLEST * largest[owners]
    owners, values = owners[is_seen], values[is_seen]
    # Position of each eigenvalue on the grid, with half of its nodes on either side.
    position = values.log() / STEP
    below = position.floor()
    offsets = torch.arange(1 - NODES // 2, NODES // 2 + 1, device=numbers.device)
    zeros = torch.zeros(len(vectors), device=numbers.device, dtype=torch.double)
    ends = [
        zeros.scatter_reduce(0, owners, below, reduce, include_self=False).long()
        for reduce in ("amin", "amax")
    ]
    first = ends[0] + offsets[0]
    lengths = ends[1] - ends[0] + NODES
    M = int(lengths.max())
    weights = values.new_zeros(len(vectors) * M)
    in_row = numbers * M - first  # offset of a node's index in all weights
    for part, low, of_part in zip(
        *(x.split(CHUNK) for x in (position, below, owners)), strict=True
    ):
        # Many eigenvalues share a node, so add their weights to it by index.
        index = (low.long() + in_row[of_part])[:, None] + offsets
        weights.index_add_(0, index.flatten(), _lagrange(part - low, offsets).flatten())
    rows = weights.view(len(vectors), M)
    return [
        (start, row[:length])
        for start, length, row in zip(first.tolist(), lengths.tolist(), rows, strict=True)
    ]


def _lagrange(u: Float[Tensor, "n"], offsets: Float[Tensor, "k"]) -> Float[Tensor, "n k"]:
    """Return Π_{j≠k} (u − j) / (k − j): the weight of each integer node k at the point u."""
    # The product of all other distances, from cumulative products on both sides: dividing the whole
    # product by u − k would fail if an eigenvalue lies on a node.
    distance = u[:, None] - offsets
    ones = torch.ones_like(u)[:, None]
    before = torch.cat([ones, distance[:, :-1].cumprod(1)], 1)
    after = torch.cat([ones, distance[:, 1:].flip(1).cumprod(1)], 1).flip(1)
    difference = (offsets[:, None] - offsets).double().fill_diagonal_(1.0)
    return before * after / difference.prod(1)
