"""The spectra of all blocks on logarithmic grids, for log determinants at many prior precisions.

A log determinant and its gradient are sums over all P eigenvalues β_i α_j of smooth functions of
s = log β_i + log α_j: log(1 + eˢ) and its derivative. Optimising the prior precision evaluates them
many times, and P numbers each time would be too many. So each eigenvalue's unit weight is
distributed once to the grid nodes around it, by Lagrange interpolation, and the sum runs over the
nodes instead. The weights of a Kronecker product are the convolution of its factors' weights.
log(1 + eˢ) is analytic where |Im s| < π, so that a step of 1/8 and 16 nodes interpolate it to
1e-14.
"""

from collections.abc import Iterable
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
"""Eigenvalues that are distributed at once, which takes a kilobyte each."""
DIRECT = 2**12
"""Number of eigenvalues up to which a block's products are distributed one by one, without a
convolution."""


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
        """The spectra of blocks, from their factors' eigenvalues alone."""
        blocks = list(blocks)
        compute_eigenvalues(blocks)
        grids = [_of_block(block) for block in blocks]
        M = max(len(weights) for _, weights, _ in grids)
        device = grids[0][1].device
        start = torch.tensor([start for start, _, _ in grids], device=device)
        steps = torch.arange(M, device=device)
        return cls(
            (start[:, None] + steps) * STEP,
            torch.stack([F.pad(weights, (0, M - len(weights))) for _, weights, _ in grids]),
            torch.stack([largest for _, _, largest in grids]),
        )

    def log_det_ratio(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Σ_i log(1 + λ_i · ratio) per block, differentiable in the ratios > 0."""
        logits = self.nodes + ratio.log()[:, None]
        return (self.weights * F.softplus(logits, threshold=40.0)).sum(-1)

    def effective(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Σ_i λ_i · ratio / (1 + λ_i · ratio) per block."""
        return (self.weights * torch.sigmoid(self.nodes + ratio.log()[:, None])).sum(-1)


def _of_block(block: KroneckerBlock) -> tuple[int, Tensor, Tensor]:
    """The first node of a block's grid, its weights, and the largest eigenvalue."""
    B, A = block.factor_eigenvalues()
    if A is None or B.dim() > 1 or block.numel <= DIRECT:
        values = products_of(B, A)
        return *_spread(values), values.max()
    # log β_i + log α_j lies on the sum of both grids: the weights are convolved, in the time of the
    # grids' lengths and not of the d_out · d_in products. conv1d correlates, so one is flipped.
    start_B, weights_B = _spread(B)
    start_A, weights_A = _spread(A)
    product = F.conv1d(
        F.pad(weights_B, (len(weights_A) - 1,) * 2)[None, None], weights_A.flip(0)[None, None]
    )
    return start_B + start_A, product.flatten(), B.max() * A.max()


def _spread(values: Float[Tensor, "n"]) -> tuple[int, Float[Tensor, "m"]]:
    """The first node of a grid, and the weights that eigenvalues distribute to its nodes."""
    values = values[values > SMALLEST * values.max()]
    if not len(values):
        return 0, values.new_zeros(NODES)
    # Where each eigenvalue lies on the grid, and the nodes around it, half of them on either side.
    position = values.log() / STEP
    offsets = torch.arange(1 - NODES // 2, NODES // 2 + 1, device=values.device)
    first, last = int(position.min().floor()), int(position.max().floor())
    start = first + int(offsets[0])
    weights = values.new_zeros(last - first + NODES)
    for part in position.split(CHUNK):
        below = part.floor()
        # Many eigenvalues share a node, so that their weights are added to it by index.
        index = below.long()[:, None] + offsets - start
        weights.index_add_(0, index.flatten(), _lagrange(part - below, offsets).flatten())
    return start, weights


def _lagrange(u: Float[Tensor, "n"], offsets: Float[Tensor, "k"]) -> Float[Tensor, "n k"]:
    """Π_{j≠k} (u − j) / (k − j): the weight of each of the integer nodes k at the point u."""
    # The product of all other distances, from cumulative products on both sides: dividing the whole
    # product by u − k would fail where an eigenvalue lies on a node.
    distance = u[:, None] - offsets
    ones = torch.ones_like(u)[:, None]
    before = torch.cat([ones, distance[:, :-1].cumprod(1)], 1)
    after = torch.cat([ones, distance[:, 1:].flip(1).cumprod(1)], 1).flip(1)
    difference = (offsets[:, None] - offsets).double().fill_diagonal_(1.0)
    return before * after / difference.prod(1)
