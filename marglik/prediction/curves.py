"""Risk-coverage and ROC curves of a predictive, and its errors by class, as lists to plot.

Each curve is computed from all examples; at most `POINTS` of its points are kept.
"""

from typing import Any

import torch
from torch import Tensor

from marglik.prediction.metric_inputs import as_finite, as_labels, as_probabilities, check_shapes
from marglik.prediction.metrics import risk_by_coverage

__all__ = ["MOST_CLASSES", "POINTS", "errors_by_class", "risk_coverage_curve", "roc_curve"]

POINTS = 101
MOST_CLASSES = 20
"""Largest number of classes for which there is a confusion matrix."""


def risk_coverage_curve(probabilities: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The error rate ("risk") among the most confident predictions, over their share ("coverage").

    Source: Geifman, Uziel & El-Yaniv 2019 (arXiv:1805.08206). "cls/AURC" is its mean over all
    k = 1..N; see `risk_by_coverage` for ties.

    Args:
        probabilities: (N, C).
        labels: (N,).
    """
    confidence, predicted, y = _of_classes(probabilities, labels)
    risk = risk_by_coverage(confidence, predicted == y)
    kept = _some(len(risk))
    return {"coverage": _plain((kept + 1) / len(risk)), "risk": _plain(risk[kept])}


def roc_curve(inside: Tensor, outside: Tensor) -> dict[str, list[float]]:
    """Share of out-of-distribution examples flagged ("tpr") over that of in-distribution ("fpr").

    Arguments and errors are those of `out_of_distribution_metrics`; "ood/AUROC" is its area.
    """
    from sklearn import metrics  # here, since importing scikit-learn takes a second

    check_shapes(inside=(inside, "N"), outside=(outside, "M"))
    sides = as_finite("inside", inside), as_finite("outside", outside)
    is_ood = torch.cat([torch.zeros(len(sides[0])), torch.ones(len(sides[1]))])
    fpr, tpr, _ = metrics.roc_curve(is_ood.numpy(), torch.cat(sides).numpy())
    kept = _some(len(fpr))
    return {"fpr": _plain(torch.tensor(fpr)[kept]), "tpr": _plain(torch.tensor(tpr)[kept])}


def errors_by_class(probabilities: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    """The number of examples ("counts") and of correct predictions ("right") of each class.

    With at most `MOST_CLASSES` classes also the "confusion" matrix, with labels in rows and
    predictions in columns.

    Args:
        probabilities: (N, C).
        labels: (N,).
    """
    _, predicted, y = _of_classes(probabilities, labels)
    C = probabilities.shape[1]
    found: dict[str, list[Any]] = {
        "counts": y.bincount(minlength=C).tolist(),
        "right": y[predicted == y].bincount(minlength=C).tolist(),
    }
    if C <= MOST_CLASSES:
        found["confusion"] = (C * y + predicted).bincount(minlength=C * C).view(C, C).tolist()
    return found


def _of_classes(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Confidences, predictions and labels, (N,) each."""
    check_shapes(probabilities=(probabilities, "NC"), labels=(labels, "N"))
    p = as_probabilities("probabilities", probabilities)
    confidence, predicted = p.max(dim=1)
    return confidence, predicted, as_labels(labels, p.shape[1])


def _some(number: int) -> Tensor:
    """Indices of at most `POINTS` of ``number`` points, evenly spaced, with the first and last."""
    return torch.linspace(0, number - 1, min(number, POINTS), dtype=torch.float64).round().long()


def _plain(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]  # a pixel is 0.003
