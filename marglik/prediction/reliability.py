"""Reliability diagrams of classifiers, coverage curves of regression."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from marglik.prediction.metric_inputs import as_gaussian, as_probabilities, check_shapes

__all__ = ["LEVELS", "Reliability", "coverage_curve", "inside_intervals", "reliability"]

LEVELS = tuple(k / 20 for k in range(1, 20))
"""0.05, 0.10, ..., 0.95."""


@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy in M bins of the confidence; plain numbers, ready to plot."""

    edges: tuple[float, ...]
    """M + 1 ascending edges; bin m is (edges[m], edges[m + 1]], the first includes both ends."""
    counts: tuple[int, ...]
    """Predictions per bin."""
    confidence: tuple[float | None, ...]
    """Mean confidence per bin, None for an empty bin."""
    accuracy: tuple[float | None, ...]
    """Share of correct predictions per bin, None for an empty bin."""

    @property
    def ece(self) -> float:
        """Expected calibration error Σ_m (n_m / N) |accuracy_m − confidence_m|, in 0..1.

        Source: Guo et al. 2017 (arXiv:1706.04599), eq. 3; empty bins are ignored.
        """
        gaps = (
            n * abs(a - c)
            for n, c, a in zip(self.counts, self.confidence, self.accuracy, strict=True)
            if c is not None and a is not None
        )
        return sum(gaps) / sum(self.counts)

    def to_json(self) -> dict[str, list[Any]]:
        """The four fields as lists; empty bins are None, which JSON writes as null."""
        return {name: list(values) for name, values in asdict(self).items()}


def reliability(
    confidence: Tensor, correct: Tensor, num_bins: int = 15, adaptive: bool = False
) -> Reliability:
    """Compare confidences with accuracies, bin by bin.

    Bins are open below and closed above, as in Guo et al. 2017 (arXiv:1706.04599, sec. 2), so that
    a confidence of exactly 1 counts in the last bin.

    Args:
        confidence: (N,) probabilities of the predictions, any float dtype and device.
        correct: (N,) bool, whether each prediction is right.
        num_bins: M.
        adaptive: False for bins of equal width on [0, 1]. True for bins of equal mass (Nguyen &
            O'Connor 2015, arXiv:1508.05154): without ties their sizes differ by at most one.
            Equal confidences always share a bin, so that the order of the data decides nothing;
            a tie across a bin's upper edge makes that bin larger, and those after it smaller or
            empty.

    Raises:
        TypeError: confidences that are not floats, ``correct`` that is not bool.
        ValueError: wrong shapes, no predictions, confidences outside [0, 1], no bin.
    """
    check_shapes(confidence=(confidence, "N"), correct=(correct, "N"))
    if correct.dtype != torch.bool:
        raise TypeError(
            f"correct has dtype {correct.dtype}; expected bool. Pass predictions == labels."
        )
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}; the usual choice is 15.")
    c, right = as_probabilities("confidence", confidence), correct.cpu().double()
    edges = _edges_of_equal_mass(c, num_bins) if adaptive else _edges_of_equal_width(num_bins)
    # Not torchmetrics: it puts a confidence of 1 in a bin of its own (its issue 3510), has no bins
    # of equal mass, and does not return the bins that a diagram needs.
    index = torch.bucketize(c, edges[1:-1])  # (N,)
    counts = index.bincount(minlength=num_bins).tolist()
    sums = [index.bincount(weights=x, minlength=num_bins).tolist() for x in (c, right)]
    means = (
        tuple(s / n if n else None for s, n in zip(per_bin, counts, strict=True))
        for per_bin in sums
    )
    return Reliability(tuple(edges.tolist()), tuple(counts), *means)


def _edges_of_equal_width(num_bins: int) -> Tensor:
    return torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)


def _edges_of_equal_mass(confidence: Tensor, num_bins: int) -> Tensor:
    """The smallest confidence, then those of ranks ⌈N m / M⌉, counted from 1."""
    ranks = (torch.arange(1, num_bins + 1) * len(confidence) + num_bins - 1) // num_bins
    ordered = confidence.sort().values
    return torch.cat([ordered[:1], ordered[ranks - 1]])


def coverage_curve(
    mean: Tensor, variance: Tensor, targets: Tensor, levels: Sequence[float] = LEVELS
) -> dict[str, Any]:
    """Share of targets within the central interval of each level; equal to it if calibrated.

    The interval of level q is mean ± Φ⁻¹((1 + q)/2) √variance, both ends included.

    Args:
        mean: (N, C) means of the Gaussian predictive.
        variance: (N, C) variances of the predictive, including the noise.
        targets: (N, C).
        levels: numbers between 0 and 1.

    Returns:
        "levels", and in the same order "coverage", the shares of all N·C targets; "count" is N·C.

    Raises:
        ValueError: what `as_gaussian` refuses, or levels outside (0, 1).
    """
    shares = inside_intervals(mean, variance, targets, levels).double().mean(dim=(1, 2))
    return {
        "levels": [float(level) for level in levels],
        "coverage": shares.tolist(),
        "count": targets.numel(),
    }


def inside_intervals(
    mean: Tensor, variance: Tensor, targets: Tensor, levels: Sequence[float]
) -> Tensor:
    """Whether each target lies within the central interval of each level, (levels, N, C) bool.

    Arguments and errors are those of `coverage_curve`.
    """
    predictive, y = as_gaussian(mean, variance, targets)
    wrong = [level for level in levels if not 0 < level < 1]
    if wrong:
        raise ValueError(
            f"levels include {wrong[0]}; expected numbers between 0 and 1, such as 0.95 for 95 %."
        )
    distance = ((y - predictive.mean) / predictive.stddev).abs()  # (N, C), in σ
    q = torch.tensor(list(levels), dtype=torch.float64)
    widths = torch.special.ndtri((1 + q) / 2)
    return distance <= widths[:, None, None]
