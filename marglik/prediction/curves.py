"""What the report plots: reliability, coverage, risk-coverage and ROC curves, errors by class.

Each is computed from all examples, and returned as plain lists. Risk-coverage curves have at most
`POINTS` points, ROC curves as many, at the same shares for all predictives. Inputs are those that
`marglik.prediction.metrics` has checked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "MOST_CLASSES",
    "POINTS",
    "calibration_error",
    "coverage_curve",
    "errors_by_class",
    "inside_intervals",
    "reliability",
    "risk_by_coverage",
    "risk_coverage_curve",
    "roc_curve",
]

LEVELS = tuple(k / 20 for k in range(1, 20))
"""0.05, 0.10, ..., 0.95."""
BINS = 15
POINTS = 101
MOST_CLASSES = 20
"""Largest number of classes for which there is a confusion matrix."""


def reliability(confidence: Tensor, correct: Tensor, num_bins: int = BINS) -> dict[str, list[Any]]:
    """Confidence and accuracy in M bins of the confidence, of equal width on [0, 1].

    Bins are open below and closed above, as in Guo et al. 2017 (arXiv:1706.04599, sec. 2), so that
    a confidence of exactly 1 counts in the last bin. torchmetrics puts it in a bin of its own (its
    issue 3510), and does not return the bins that a diagram needs.

    Args:
        confidence: (N,) probabilities of the predictions.
        correct: (N,) bool, whether each prediction is right.
        num_bins: M.

    Returns:
        "edges", M + 1 ascending ones; "counts", "confidence" (means) and "accuracy" of the bins,
        the latter two None where a bin is empty.
    """
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    index = torch.bucketize(confidence.double(), edges[1:-1])  # (N,)
    counts = index.bincount(minlength=num_bins).tolist()

    def means(values: Tensor) -> list[float | None]:
        sums = index.bincount(weights=values.double(), minlength=num_bins).tolist()
        return [s / n if n else None for s, n in zip(sums, counts, strict=True)]

    return {
        "edges": edges.tolist(),
        "counts": counts,
        "confidence": means(confidence),
        "accuracy": means(correct),
    }


def calibration_error(bins: dict[str, list[Any]]) -> float:
    """Expected calibration error Σ_m (n_m / N) |accuracy_m − confidence_m|, in 0..1.

    Source: Guo et al. 2017 (arXiv:1706.04599), eq. 3; empty bins are ignored.

    Args:
        bins: as `reliability` returns them.
    """
    columns = zip(bins["counts"], bins["confidence"], bins["accuracy"], strict=True)
    return sum(n * abs(a - c) for n, c, a in columns if n) / sum(bins["counts"])


def inside_intervals(
    mean: Tensor, variance: Tensor, targets: Tensor, levels: Sequence[float]
) -> Tensor:
    """Whether each target lies within the central interval of each level, (levels, N, C) bool.

    The interval of level q is mean ± Φ⁻¹((1 + q)/2) √variance, both ends included.
    """
    distance = (targets - mean).abs() / variance.sqrt()  # (N, C), in σ
    q = torch.tensor(list(levels), dtype=torch.float64)
    return distance <= torch.special.ndtri((1 + q) / 2)[:, None, None]


def coverage_curve(
    mean: Tensor, variance: Tensor, targets: Tensor, levels: Sequence[float] = LEVELS
) -> dict[str, Any]:
    """Share of targets within the central interval of each level; equal to it if calibrated.

    Args:
        mean: (N, C) means of the Gaussian predictive.
        variance: (N, C) variances of the predictive, including the noise.
        targets: (N, C).
        levels: numbers between 0 and 1.

    Returns:
        "levels", and in the same order "coverage", the shares of all N·C targets; "count" is N·C.
    """
    shares = inside_intervals(mean, variance, targets, levels).double().mean(dim=(1, 2))
    return {"levels": list(levels), "coverage": shares.tolist(), "count": targets.numel()}


def risk_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Error rate among the k most confident predictions, k = 1..N: (N,), whose mean is the AURC.

    Examples with equal confidence all count with their mean error: the average over their orders.
    Source: Geifman, Uziel & El-Yaniv 2019 (arXiv:1805.08206).

    Args:
        confidence: (N,).
        correct: (N,) bool.
    """
    _, group, sizes = confidence.unique(return_inverse=True, return_counts=True)
    errors = group.bincount(weights=(~correct).double()) / sizes  # per group, least confident first
    errors = errors.repeat_interleave(sizes).flip(0)  # (N,), most confident first
    return errors.cumsum(0) / torch.arange(1, len(errors) + 1)


def risk_coverage_curve(probabilities: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The error rate ("risk") among the most confident predictions, over their share ("coverage").

    Args:
        probabilities: (N, C).
        labels: (N,).
    """
    confidence, predicted = probabilities.max(dim=1)
    risk = risk_by_coverage(confidence, predicted == labels)
    kept = _some(len(risk))
    return {"coverage": _plain((kept + 1) / len(risk)), "risk": _plain(risk[kept])}


def roc_curve(inside: Tensor, outside: Tensor) -> dict[str, list[float]]:
    """Share of out-of-distribution examples flagged ("tpr") over that of in-distribution ("fpr").

    Args:
        inside: (N,) scores of examples from the training distribution.
        outside: (M,) scores of examples from elsewhere.
    """
    from sklearn import metrics  # here, since importing scikit-learn takes a second

    is_ood = [0] * len(inside) + [1] * len(outside)
    fpr, tpr, _ = metrics.roc_curve(is_ood, torch.cat([inside, outside]).numpy())
    shares = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    at = torch.searchsorted(torch.from_numpy(fpr), shares, right=True) - 1
    return {"fpr": _plain(shares), "tpr": _plain(torch.from_numpy(tpr)[at])}


def errors_by_class(probabilities: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    """The number of examples ("counts") and of correct predictions ("right") of each class.

    With at most `MOST_CLASSES` classes also the "confusion" matrix, with labels in rows and
    predictions in columns.

    Args:
        probabilities: (N, C).
        labels: (N,).
    """
    C, predicted = probabilities.shape[1], probabilities.argmax(dim=1)
    found: dict[str, list[Any]] = {
        "counts": labels.bincount(minlength=C).tolist(),
        "right": labels[predicted == labels].bincount(minlength=C).tolist(),
    }
    if C <= MOST_CLASSES:
        found["confusion"] = (C * labels + predicted).bincount(minlength=C * C).view(C, C).tolist()
    return found


def _some(number: int) -> Tensor:
    """Indices of at most `POINTS` of ``number`` points, evenly spaced, with the first and last."""
    return torch.linspace(0, number - 1, min(number, POINTS), dtype=torch.float64).round().long()


def _plain(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]  # a pixel is 0.003
