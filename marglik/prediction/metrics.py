"""Metrics of predictions: accuracy, likelihood, calibration, out-of-distribution detection.

Each function takes a whole data set, on any device, computes in float64 on the CPU, and returns
plain numbers. Names begin with "cls/" (classification), "reg/" (regression), "cal/" (calibration)
or "ood/" (out-of-distribution detection).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from kfac_backend.options import Likelihood
from marglik.prediction.curves import (
    calibration_error,
    coverage_curve,
    inside_intervals,
    reliability,
    risk_by_coverage,
)
from marglik.prediction.links import Prediction

__all__ = [
    "SHARES",
    "compute_metrics",
    "example_scores",
    "out_of_distribution_metrics",
    "reliability_curve",
]

COVERAGE_LEVELS = {"cal/coverage50": 0.5, "cal/coverage90": 0.9, "cal/coverage95": 0.95}
SHARES = frozenset({"cls/accuracy", *COVERAGE_LEVELS})
"""Metrics that are shares: of correct predictions, or of targets inside an interval."""


def compute_metrics(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, float]:
    """The metrics of a prediction, by name.

    Classification; the prediction is the first of the most probable classes:

    - "cls/NLL": −log p_y (nats), mean over examples. A probability below the smallest normal
      number of the dtype that it comes in counts as that number: 87 nats in float32.
    - "cls/accuracy": share of right predictions.
    - "cls/Brier": Σ_c (p_c − y_c)², mean over examples, in 0..2 (Brier 1950).
    - "cls/AURC": area under the risk-coverage curve, see `risk_by_coverage`.
    - "cal/ECE": expected calibration error of the top probability, 15 bins of equal width (Guo et
      al. 2017, arXiv:1706.04599, eq. 3).

    Bernoulli; the prediction of each output is 1 where p > 0.5:

    - "cls/NLL": −Σ_c log p(y_c) (nats), summed over outputs, mean over examples; clamped as above.
    - "cls/accuracy", "cls/Brier" = (p − y)²: means over all outputs, in 0..1.
    - "cal/ECE": over all outputs, of the predicted side's probability max(p, 1 − p).

    Regression:

    - "reg/NLL": −Σ_c log N(y_c; mean_c, variance_c) (nats), summed over outputs, mean over
      examples.
    - "reg/RMSE": √ of the mean of (y − mean)² over all targets, in the targets' unit.
    - "cal/coverage50", "cal/coverage90", "cal/coverage95": share of all targets within the central
      interval of that level; calibrated predictives have 0.5, 0.9 and 0.95.

    Args:
        prediction: predictions for N examples.
        targets: class indices (N,), or targets (N, C) of regression and Bernoulli outputs (0, 1).
        likelihood: decides which metrics these are.

    Raises:
        TypeError: labels that are not integers.
        ValueError: wrong shapes, no examples, labels out of range, soft targets, logits or NaN for
            probabilities, a variance that is not positive.
    """
    scores = example_scores(prediction, targets, likelihood)
    means = {name: values.mean().item() for name, values in scores.items()}
    if likelihood == "regression":
        return means | {"reg/RMSE": means["reg/RMSE"] ** 0.5}
    if likelihood == "classification":
        confidence = prediction.mean.detach().cpu().double().amax(1)
        risk = risk_by_coverage(confidence, scores["cls/accuracy"].bool())
        means["cls/AURC"] = risk.mean().item()
    error = calibration_error(reliability_curve(prediction, targets, likelihood))
    return means | {"cal/ECE": error}


def example_scores(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, Tensor]:
    """Each example's contribution to the metrics that are means: name -> (N,), or (N, C).

    Their means are those of `compute_metrics`, whose arguments and errors these are; the square of
    "reg/RMSE" is the mean of what stands under its name here.
    """
    mean, y, variance = _checked(prediction, targets, likelihood)
    if likelihood == "regression":
        inside = inside_intervals(mean, variance, y, tuple(COVERAGE_LEVELS.values()))
        return {
            "reg/NLL": -Normal(mean, variance.sqrt()).log_prob(y).sum(dim=1),
            "reg/RMSE": (y - mean).square(),
            **dict(zip(COVERAGE_LEVELS, inside.double(), strict=True)),
        }
    tiny = torch.finfo(prediction.mean.dtype).tiny
    if likelihood == "bernoulli":
        return {
            "cls/NLL": -torch.where(y == 1, mean, 1 - mean).clamp(min=tiny).log().sum(dim=1),
            "cls/accuracy": ((mean > 0.5) == (y == 1)).double(),
            "cls/Brier": (mean - y).square(),
        }
    labels = y[:, None]  # (N, 1)
    residual = mean.scatter_add(1, labels, mean.new_full(labels.shape, -1.0))  # (N, C)
    return {
        "cls/NLL": -mean.gather(1, labels).squeeze(1).clamp(min=tiny).log(),
        "cls/accuracy": (mean.argmax(dim=1) == y).double(),
        "cls/Brier": residual.square().sum(dim=1),
    }


def reliability_curve(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, Any]:
    """The data of a reliability diagram as plain lists, see `marglik.prediction.curves`.

    For classification, bins of confidence. For Bernoulli outputs, too, over all outputs, with the
    confidence max(p, 1 − p). For regression, the coverage of central intervals.
    """
    mean, y, variance = _checked(prediction, targets, likelihood)
    if likelihood == "regression":
        return coverage_curve(mean, variance, y)
    if likelihood == "classification":
        confidence, predicted = mean.max(dim=1)
        return reliability(confidence, predicted == y)
    confidence = torch.maximum(mean, 1 - mean).flatten()
    return reliability(confidence, ((mean > 0.5) == (y == 1)).flatten())


def out_of_distribution_metrics(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """How well a score tells out-of-distribution (OOD) data from our own; it is larger for OOD.

    - "ood/AUROC": probability that an OOD example scores higher than ours; equal scores count half.
    - "ood/AUPR": average precision with OOD as the positive class; chance is M / (N + M).
    - "ood/FPR95": share of our own examples that are flagged at the largest threshold (score >=
      threshold) that flags at least 95 % of the OOD examples.

    Source: Hendrycks, Mazeika & Dietterich 2019 (arXiv:1812.04606); OOD is the positive class
    there, too. With our own data as the positive class AUPR and FPR95 are other numbers.

    Args:
        inside: (N,) scores of examples from the training distribution.
        outside: (M,) scores of examples from elsewhere.

    Raises:
        ValueError: no examples on a side, or scores that are not finite.
    """
    # Here, because importing scikit-learn takes a second that not everyone needs.
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    for name, values in (("inside", inside), ("outside", outside)):
        if values.dim() != 1 or not len(values):
            shape = tuple(values.shape)
            raise ValueError(f"{name} has shape {shape}; expected a score for each example, (N,).")
        _refuse(values[~values.isfinite()], f"{name} has {{}}; expected finite scores.")
    scores = torch.cat([inside.detach().cpu().double(), outside.detach().cpu().double()]).numpy()
    is_ood = [0] * len(inside) + [1] * len(outside)
    # Dropped points of the curve could be the first that reaches 95 %.
    fpr, tpr, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    return {
        "ood/AUROC": float(roc_auc_score(is_ood, scores)),
        "ood/AUPR": float(average_precision_score(is_ood, scores)),
        "ood/FPR95": float(fpr[(tpr >= 0.95).argmax()]),
    }


def _checked(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, targets and total variance on the CPU, in float64 (labels in int64)."""
    mean, y = prediction.mean.detach().cpu().double(), targets.detach().cpu()
    is_classes = likelihood == "classification"
    if mean.dim() != 2 or not mean.numel() or y.shape != mean.shape[: 1 if is_classes else 2]:
        wanted = "(N, C) and (N,)" if is_classes else "(N, C) and (N, C)"
        raise ValueError(
            f"Predictions have shape {tuple(mean.shape)}, targets {tuple(y.shape)}; expected "
            f"{wanted}, of at least one example."
        )
    if likelihood == "regression":
        variance = prediction.total.detach().cpu().double().expand_as(mean)
        for name, values in (("means", mean), ("targets", y), ("variances", variance)):
            _refuse(values[~values.isfinite()], f"The {name} include {{}}; expected finite ones.")
        _refuse(variance[variance <= 0], "The variances include {}; expected positive ones.")
        return mean, y.double(), variance
    rounding = max(1e-3, 4 * torch.finfo(prediction.mean.dtype).eps)
    is_p = (mean >= 0) & (mean <= 1 + rounding)  # NaN is neither
    sums = mean.sum(dim=1) if is_classes else mean.new_ones(1)
    _refuse(
        torch.cat([mean[~is_p], sums[(sums - 1).abs() > rounding]]),
        "The probabilities (or their sum over classes) include {}; expected numbers in [0, 1] with "
        "sum 1. Pass logits through softmax, independent outputs through sigmoid with likelihood "
        "'bernoulli'; NaN comes from a predictive that has diverged.",
    )
    if is_classes and (y.is_floating_point() or y.dtype == torch.bool):
        raise TypeError(f"Labels have dtype {y.dtype}; expected class indices, int64.")
    wrong = (y < 0) | (y >= mean.shape[1]) if is_classes else (y != 0) & (y != 1)
    wanted = f"0 to {mean.shape[1] - 1}, the predictive's classes" if is_classes else "0 or 1"
    _refuse(y[wrong], f"The targets include {{}}; expected {wanted}. Leave such examples out.")
    return mean.clamp(max=1.0), y.long() if is_classes else y.double(), mean


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise a ValueError that names the first of the wrong values, if there are any."""
    if len(wrong):
        raise ValueError(message.format(f"{wrong[0].item():.4g}"))
