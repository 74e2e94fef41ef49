"""Metrics of predictions: accuracy, likelihood, calibration, out-of-distribution detection.

Each function takes a whole data set, on any device, computes in float64 on the CPU, and returns
plain numbers. Names begin with "cls/" (classification), "reg/" (regression), "cal/" (calibration)
or "ood/" (out-of-distribution detection).
"""

import torch
from torch import Tensor
from torch.distributions import Normal

from marglik.prediction.curves import (
    calibration_error,
    inside_intervals,
    reliability,
    risk_by_coverage,
)
from marglik.prediction.metric_inputs import (
    as_binary,
    as_finite,
    as_labels,
    as_probabilities,
    check_rows_sum_to_one,
    check_shapes,
)

__all__ = [
    "SHARES",
    "bernoulli_metrics",
    "bernoulli_scores",
    "classification_metrics",
    "classification_scores",
    "out_of_distribution_metrics",
    "regression_metrics",
    "regression_scores",
    "risk_by_coverage",
]

COVERAGE_LEVELS = {"cal/coverage50": 0.5, "cal/coverage90": 0.9, "cal/coverage95": 0.95}
SHARES = frozenset({"cls/accuracy", *COVERAGE_LEVELS})
"""Metrics that are shares: of correct predictions, or of targets inside an interval."""


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Metrics of class probabilities; the prediction is the first of the most probable classes.

    - "cls/NLL": −log p_y (nats), mean over examples. A probability below the smallest normal
      number of the dtype that it comes in counts as that number: 87 nats in float32.
    - "cls/accuracy": share of right predictions.
    - "cls/Brier": Σ_c (p_c − y_c)², mean over examples, in 0..2 (Brier 1950).
    - "cls/AURC": area under the risk-coverage curve, the mean over k = 1..N of the error rate among
      the k most confident (Geifman, Uziel & El-Yaniv 2019, arXiv:1805.08206); of equal confidences
      the expectation over their random order.
    - "cal/ECE": expected calibration error of the top probability, 15 bins of equal width (Guo et
      al. 2017, arXiv:1706.04599, eq. 3).
    - "cal/ECE_adaptive": the same with 15 bins of equal mass, see `reliability`
      for ties.

    Args:
        probabilities: (N, C), C >= 2, any float dtype; rows sum to one.
        labels: (N,), integers 0..C − 1.

    Raises:
        TypeError: probabilities that are not floats, labels that are not integers.
        ValueError: wrong shapes, no examples, labels out of range, logits or NaN for probabilities.
    """
    scores = classification_scores(probabilities, labels)
    confidence, correct = as_probabilities("", probabilities).amax(1), scores["cls/accuracy"].bool()
    return {
        **_means(scores),
        "cls/AURC": risk_by_coverage(confidence, correct).mean().item(),
        **_calibration_errors(confidence, correct),
    }


def classification_scores(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The NLL, accuracy and Brier score of each example, (N,) in float64.

    Their means are those of `classification_metrics`, whose arguments and errors these are.
    """
    check_shapes(probabilities=(probabilities, "NC"), labels=(labels, "N"))
    p = as_probabilities("probabilities", probabilities)
    check_rows_sum_to_one(p, probabilities.dtype)
    y = as_labels(labels, p.shape[1])[:, None]  # (N, 1)
    residual = p.scatter_add(1, y, p.new_full(y.shape, -1.0))  # (N, C)
    return {
        "cls/NLL": -_log(p.gather(1, y), probabilities.dtype).squeeze(1),
        "cls/accuracy": (p.argmax(dim=1) == y.squeeze(1)).double(),
        "cls/Brier": residual.square().sum(dim=1),
    }


def bernoulli_metrics(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Metrics of independent yes-or-no outputs; the prediction is 1 where p > 0.5.

    - "cls/NLL": −Σ_c log p(y_c) (nats), summed over outputs, mean over examples. A probability of
      the target below the smallest normal number of its dtype counts as that number; note that
      float32 cannot tell probabilities above 1 − 3e-8 from 1, which then costs 87 nats where the
      target is 0. Float64 can.
    - "cls/accuracy", "cls/Brier" = (p − y)²: means over all outputs, in 0..1.
    - "cal/ECE", "cal/ECE_adaptive": over all outputs, of the predicted side's probability
      max(p, 1 − p); as in `classification_metrics`.

    Args:
        probabilities: (N, C) of the target 1, any float dtype.
        targets: (N, C), 0 or 1, any dtype.

    Raises:
        TypeError: probabilities that are not floats.
        ValueError: wrong shapes, no examples, soft targets, logits or NaN for probabilities.
    """
    scores = bernoulli_scores(probabilities, targets)
    p = as_probabilities("", probabilities)
    correct = (p > 0.5) == as_binary(targets)
    confidence = torch.maximum(p, 1 - p)
    return _means(scores) | _calibration_errors(confidence.flatten(), correct.flatten())


def bernoulli_scores(probabilities: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The NLL of each example, (N,), accuracy and Brier score of each output, (N, C), in float64.

    Their means are those of `bernoulli_metrics`, whose arguments and errors these are.
    """
    check_shapes(probabilities=(probabilities, "NC"), targets=(targets, "NC"))
    p = as_probabilities("probabilities", probabilities)
    y = as_binary(targets)
    return {
        "cls/NLL": -_log(torch.where(y, p, 1 - p), probabilities.dtype).sum(dim=1),
        "cls/accuracy": ((p > 0.5) == y).double(),
        "cls/Brier": (p - y.double()).square(),
    }


def regression_metrics(mean: Tensor, variance: Tensor, targets: Tensor) -> dict[str, float]:
    """Metrics of Gaussian predictives.

    - "reg/NLL": −Σ_c log N(y_c; mean_c, variance_c) (nats), summed over outputs, mean over
      examples.
    - "reg/RMSE": √ of the mean of (y − mean)² over all targets, in the targets' unit.
    - "cal/coverage50", "cal/coverage90", "cal/coverage95": share of all targets within the central
      interval of that level; calibrated predictives have 0.5, 0.9 and 0.95.

    Args:
        mean: (N, C).
        variance: (N, C), positive, with the noise σ².
        targets: (N, C).

    Raises:
        ValueError: shapes that differ, no examples, variances that are not positive, or numbers
            that are not finite.
    """
    means = _means(regression_scores(mean, variance, targets))
    return means | {"reg/RMSE": means["reg/RMSE"] ** 0.5}


def regression_scores(mean: Tensor, variance: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The NLL of each example, (N,), squared error and coverages of each output, (N, C); float64.

    Their means are those of `regression_metrics`, whose arguments and errors these are; the square
    of "reg/RMSE" is the mean of what stands under its name here.
    """
    is_inside = inside_intervals(mean, variance, targets, tuple(COVERAGE_LEVELS.values()))
    m, v, y = (values.detach().cpu().double() for values in (mean, variance, targets))
    return {
        "reg/NLL": -Normal(m, v.sqrt()).log_prob(y).sum(dim=1),
        "reg/RMSE": (y - m).square(),
        **dict(zip(COVERAGE_LEVELS, is_inside.double(), strict=True)),
    }


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
        ValueError: no examples on a side, wrong shapes, scores that are not finite.
    """
    check_shapes(inside=(inside, "N"), outside=(outside, "M"))
    # Here, because importing scikit-learn takes a second that not everyone needs.
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    sides = [as_finite("inside", inside), as_finite("outside", outside)]
    scores = torch.cat(sides).numpy()
    is_ood = torch.cat([torch.zeros_like(sides[0]), torch.ones_like(sides[1])]).numpy()
    # Dropped points of the curve could be the first that reaches 95 %.
    fpr, tpr, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    return {
        "ood/AUROC": float(roc_auc_score(is_ood, scores)),
        "ood/AUPR": float(average_precision_score(is_ood, scores)),
        "ood/FPR95": float(fpr[(tpr >= 0.95).argmax()]),
    }


def _log(probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Logarithms of probabilities, clamped to the smallest normal number of ``dtype``; finite."""
    return probabilities.clamp(min=torch.finfo(dtype).tiny).log()


def _means(scores: dict[str, Tensor]) -> dict[str, float]:
    return {name: values.mean().item() for name, values in scores.items()}


def _calibration_errors(confidence: Tensor, correct: Tensor) -> dict[str, float]:
    return {
        "cal/ECE": calibration_error(reliability(confidence, correct)),
        "cal/ECE_adaptive": calibration_error(reliability(confidence, correct, adaptive=True)),
    }
