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
from jaxtyping import Float, Int
from torch import Tensor

from kfac_backend.blocks.block import KroneckerBlock, compute_eigenvalues, products_of

STEP = 1 / 8
NODES = 16
SMALLEST = 1e-40
"""Eigenvalues below this share of the largest count as zero."""
COARSE = 4
"""Ratio of the steps of a `SampleCorrection` to `STEP`. The correction is exact to about 1e-3."""
LARGEST_DF = 0.5
"""Largest df/M that a `SampleCorrection` assumes: up to 1/2, t(u) increases for any eigenvalues."""
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
    correction: "SampleCorrection | None" = None
    """For a sample that stands for all data."""

    @classmethod
    def of(
        cls, blocks: Iterable[KroneckerBlock], sample: tuple[float, float] | None = None
    ) -> "Spectra":
        """Compute the spectra of blocks, from their factors' eigenvalues alone.

        Args:
            blocks: the blocks.
            sample: (share, V), to correct the blocks of a sample, see `SampleCorrection`: its share
                of all data, and the number of backward vectors.
        """
        blocks = list(blocks)
        compute_eigenvalues(blocks)
        of_factors = [block.factor_eigenvalues() for block in blocks]
        # For groups, B alone and corrected blocks, distribute all P eigenvalues.
        values = [
            (products_of(B, A),) if A is None or B.dim() > 1 else (B, A) for B, A in of_factors
        ]
        of_groups = [
            (b, group, *both)
            for b, (B, A) in enumerate(of_factors)
            if sample and A is not None and B.dim() > 1
            for group, both in enumerate(zip(B, A.expand(*B.shape[:-1], A.shape[-1]), strict=True))
        ]
        vectors = [own for of_block in values for own in of_block]
        grids = _spread_all([*vectors, *(own for *_, B, A in of_groups for own in (B, A))])
        starts, block_weights, pairs = [], [], list[tuple[int, int, _Grid, _Grid]]()
        for b, of_block in enumerate(values):
            start, weights = next(grids)
            if len(of_block) == 2:
                # log β_i + log α_j lies on the sum of both grids, so convolve the weights. This
                # takes the time of the grids' lengths, not of the d_out · d_in products. conv1d
                # correlates, so flip one.
                start_A, of_A = next(grids)
                pairs.append((b, 0, (start, weights), (start_A, of_A)))
                padded = F.pad(weights, (len(of_A) - 1,) * 2)
                start += start_A
                weights = F.conv1d(padded[None, None], of_A.flip(0)[None, None]).flatten()
            starts.append(start)
            block_weights.append(weights)
        pairs += [(b, group, next(grids), next(grids)) for b, group, *_ in of_groups]
        M = max(map(len, block_weights))
        device = block_weights[0].device
        steps = torch.arange(M, device=device)
        return cls(
            (torch.tensor(starts, device=device)[:, None] + steps) * STEP,
            torch.stack([F.pad(weights, (0, M - len(weights))) for weights in block_weights]),
            torch.stack([torch.stack([own.max() for own in part]).prod() for part in values]),
            SampleCorrection.of(blocks, pairs, *sample) if sample else None,
        )

    def log_det_ratio(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return Σ_i log(1 + λ_i · ratio) per block, differentiable in the ratios > 0."""
        logits = self.nodes + ratio.log()[:, None]
        value = (self.weights * F.softplus(logits, threshold=40.0)).sum(-1)
        return value if self.correction is None else value + self.correction.at(ratio)[0]

    def effective(self, ratio: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return Σ_i λ_i · ratio / (1 + λ_i · ratio) per block."""
        value = (self.weights * torch.sigmoid(self.nodes + ratio.log()[:, None])).sum(-1)
        return value if self.correction is None else value + self.correction.at(ratio)[1]


_Grid = tuple[int, Tensor]
"""First node of a grid, and the weights of its nodes."""


@dataclass(frozen=True)
class SampleCorrection:
    """What the log determinants of a sample lack on average, to be those of all data.

    The eigenvalues of a sample are more unequal than those of all data, so its γ is too small. Let
    df(u) = Σ_i a_i eᵘ / (1 + a_i eᵘ) for the eigenvalues a_i of a factor of M rows. A ridge
    regression on M rows has as many degrees of freedom df as one with the true covariance and a
    ridge that is 1 / (1 − df/M) times as large. The same holds for N rows. All data therefore have
    df(u) at t = u + log((1 − df/M) / (1 − df/N)). The integral over t is their log determinant,
    Σ_i log(1 + a_i eᵘ) + M log(1 − df/M) − N log(1 − df/N).
    Source: Atanasov et al. 2024 (arXiv:2405.00592) for the ridge; the integral is ours.

    Each eigenvalue b of a block's other factor contributes at t = log b + log ratio, and the
    corrections of both factors are added. A block with one factor has none, and neither has a block
    whose number of terms is unknown.

    A has a row for each of the block's terms, and B a row for each term and backward vector. Rows
    that depend on each other, such as those of the positions of an image, count like independent
    ones. The correction is then too small. It is also too small for exact vectors of several loss
    terms per example, most of which are zero at a position. Of a weight that is stored inputs
    first, several vectors count for the inputs instead of the gradients, and the correction is too
    large.
    """

    owners: Int[Tensor, "S"]
    """Number of the block of each factor."""
    nodes: Float[Tensor, "S K"]
    weights: Float[Tensor, "S K"]
    """Grid of the other factor's eigenvalues."""
    t: Float[Tensor, "S U"]
    values: Float[Tensor, "S U"]
    slopes: Float[Tensor, "S U"]
    """Correction of Σ_i log(1 + a_i eᵗ), and its derivative in t."""

    @classmethod
    def of(
        cls,
        blocks: Sequence[KroneckerBlock],
        pairs: Sequence[tuple[int, int, _Grid, _Grid]],
        share: float,
        V: float,
    ) -> "SampleCorrection | None":
        """Compute the correction; None if no block has one.

        Args:
            blocks: the blocks of a sample that stands for all data.
            pairs: numbers of a block and of its group, and the grids of their factors B and A.
            share: M/N, the sample's share of all data.
            V: number of backward vectors.
        """
        owners, rows, grids = list[int](), list[float](), list[_Grid]()
        for b, group, of_B, of_A in pairs:
            terms = blocks[b].num_terms
            number = terms[group] if isinstance(terms, tuple) else terms
            if number:
                owners += [b, b]
                rows += [number * V, number]
                grids += [of_B, of_A]
        if not owners:
            return None
        own = _padded(grids)
        nodes, weights = (t.view(-1, 2, t.shape[1]).flip(1).flatten(0, 1) for t in own)
        # Step 1: Σ log(1 + a eᵘ) and df(u), from 12 nats below 1/a of the largest a to 12 nats
        # above 1/a of the smallest. A convolution with the weights sums over the eigenvalues.
        K, margin = own[0].shape[1], int(12 / STEP)
        x = torch.arange(-K - margin, K + margin, device=weights.device).double() * STEP
        u = x[: K + 2 * margin + 1 : COARSE] - own[0][:, :1]
        log_det, df = (
            F.conv1d(f(x)[None, None], own[1][:, None], stride=COARSE)[0]
            for f in (F.softplus, torch.sigmoid)
        )
        # Step 2: subtract them at t from those of all data at t.
        N = df.new_tensor(rows)[:, None]
        M = share * N
        counted = df.minimum(LARGEST_DF * M)
        of_M, of_N = (-counted / M).log1p(), (-counted / N).log1p()
        t = u + of_M - of_N
        before, df_before = _interpolated(u, log_det, df, t)
        values = log_det + M * of_M - N * of_N - before
        return cls(torch.tensor(owners, device=t.device), nodes, weights, t, values, df - df_before)

    def at(self, ratio: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return the corrections of `Spectra.log_det_ratio` and of `Spectra.effective`."""
        t = self.nodes + ratio.log()[self.owners, None]
        log_det, effective = (
            part.new_zeros(len(ratio)).index_add(0, self.owners, (self.weights * part).sum(-1))
            for part in _interpolated(self.t, self.values, self.slopes, t)
        )
        return log_det, effective


def _padded(grids: Sequence[_Grid]) -> tuple[Float[Tensor, "S K"], Float[Tensor, "S K"]]:
    """Return the nodes and weights of several grids."""
    K = max(len(weights) for _, weights in grids)
    weights = torch.stack([F.pad(weights, (0, K - len(weights))) for _, weights in grids])
    starts = torch.tensor([start for start, _ in grids], device=weights.device)
    nodes = starts[:, None] + torch.arange(K, device=weights.device)
    return nodes.double() * STEP, weights


def _interpolated(x: Tensor, values: Tensor, slopes: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cubics through values with slopes at ascending x, and their derivatives, (S, L).

    Below and above all x, the value is constant.
    """
    i = torch.searchsorted(x, at.detach()).clamp(1, x.shape[1] - 1)
    (x0, y0, s0), (x1, y1, s1) = ([f.gather(1, j) for f in (x, values, slopes)] for j in (i - 1, i))
    h, rise = x1 - x0, y1 - y0
    p = ((at - x0) / h).clamp(0, 1)
    q = 1 - p
    value = y0 + p * p * (3 - 2 * p) * rise + h * p * q * (q * s0 - p * s1)
    return value, 6 * p * q * rise / h + q * (q - 2 * p) * s0 + p * (p - 2 * q) * s1


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
