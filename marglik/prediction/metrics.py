"""Compute metrics of predictions, and the curves of the report.

The metrics measure accuracy, likelihood, calibration and out-of-distribution detection. Each
function takes a whole data set, on any device. It computes in float64 on the CPU and returns plain
numbers and lists. Risk-coverage and ROC curves have at most `POINTS` points.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik.prediction.links import Prediction
from marglik.prediction.metric_types import Bins, Coverage, Curve, Metrics

__all__ = [
    "SHARES",
    "compute_metrics",
    "confidence_threshold",
    "example_scores",
    "out_of_distribution_metrics",
    "reliability_curve",
]

COVERAGE_LEVELS = {"coverage50": 0.5, "coverage90": 0.9, "coverage95": 0.95}
SHARES = frozenset({"accuracy", *COVERAGE_LEVELS})
"""Metrics that are shares of correct predictions, or of targets inside an interval."""
LEVELS = tuple(k / 20 for k in range(1, 20))
"""Levels of coverage curves: 0.05, 0.10, ..., 0.95."""
BINS = 15
POINTS = 101
MOST_CLASSES = 20
"""Maximum number of classes for a confusion matrix."""


def compute_metrics(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood | str
) -> Metrics[float]:
    """Return the metrics of a prediction. Metrics of other likelihoods are None.

    For classification, the predicted class is the first of the most probable classes:

    - ``nll``: −log p_y (nats), mean over examples. Probabilities are clamped to the smallest normal
      number of their dtype, so an example contributes at most 87 nats in float32.
    - ``accuracy``: share of correct predictions.
    - ``brier``: Σ_c (p_c − y_c)², mean over examples, in 0..2 (Brier 1950).
    - ``aurc``: area under the risk-coverage curve (Geifman et al. 2019, arXiv:1805.08206).
    - ``ece``: expected calibration error of the top probability, 15 bins of equal width (Guo et al.
      2017, arXiv:1706.04599, eq. 3).

    For Bernoulli, each output predicts 1 if p > 0.5:

    - ``nll``: −Σ_c log p(y_c) (nats), summed over outputs, mean over examples; clamped as above.
    - ``accuracy``, ``brier`` = (p − y)²: means over all outputs, in 0..1.
    - ``ece``: over all outputs, with the probability max(p, 1 − p) of the predicted value.

    For regression:

    - ``nll``: −Σ_c log N(y_c; mean_c, variance_c) (nats), summed over outputs, mean over examples.
      Other numeric likelihoods use their `log_score`.
    - ``rmse``: √ of the mean of (y − mean)² over all targets, in the unit of the targets. A
      censored number counts only if it is above the mean.
    - ``coverage50``, ``coverage90``, ``coverage95``: share of all targets within the central
      interval of this level. A calibrated predictive has 0.5, 0.9 and 0.95. Counts and censored
      numbers use the share of their `ranks` in the interval.

    Args:
        prediction: predictions for N examples.
        targets: class indices (N,), or targets (N, C) of regression and Bernoulli outputs (0, 1).
        likelihood: likelihood of the targets, which determines the metrics.

    Raises:
        TypeError: labels are not integers.
        ValueError: shapes do not fit, there are no examples, labels are out of range or soft,
            probabilities are logits or NaN, or a variance is not positive.
    """
    likelihood = likelihood_of(likelihood)
    scores = example_scores(prediction, targets, likelihood)
    means = scores.map(lambda values: values.mean().item())
    if means.rmse is not None:
        return means | Metrics(rmse=means.rmse**0.5)
    if likelihood.kind == "classes":
        confidence = prediction.mean.detach().cpu().double().amax(1)
        right: Any = scores.accuracy
        risk = _risk_by_coverage(confidence, right.bool())
        means |= Metrics(aurc=risk.mean().item())
    return means | Metrics(
        ece=_calibration_error(reliability_curve(prediction, targets, likelihood))
    )


def example_scores(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood | str
) -> Metrics[Any]:
    """Return each example's contribution to the metrics that are means: tensors (N,), or (N, C).

    The mean of a tensor is the metric of `compute_metrics`, or for ``rmse`` the square of the
    metric. Arguments and errors are the same as in `compute_metrics`.
    """
    likelihood = likelihood_of(likelihood)
    mean, y, variance = _checked(prediction, targets, likelihood)
    if likelihood.kind == "continuous":
        number, _, censored = likelihood.observed(y, variance)
        residual = number - mean
        if censored is not None:
            residual = torch.where(censored, residual.clamp(min=0), residual)
        inside = _inside_intervals(
            *likelihood.ranks(y, mean, variance), [*COVERAGE_LEVELS.values()]
        )
        return Metrics(
            nll=-likelihood.log_score(y, mean, variance).sum(dim=1),
            rmse=residual.square(),
            **dict(zip(COVERAGE_LEVELS, inside, strict=True)),
        )
    tiny = torch.finfo(prediction.mean.dtype).tiny
    if likelihood.kind == "binary":
        return Metrics(
            nll=-torch.where(y == 1, mean, 1 - mean).clamp(min=tiny).log().sum(dim=1),
            accuracy=((mean > 0.5) == (y == 1)).double(),
            brier=(mean - y).square(),
        )
    labels = y[:, None]  # (N, 1)
    residual = mean.scatter_add(1, labels, mean.new_full(labels.shape, -1.0))  # (N, C)
    return Metrics(
        nll=-mean.gather(1, labels).squeeze(1).clamp(min=tiny).log(),
        accuracy=(mean.argmax(dim=1) == y).double(),
        brier=residual.square().sum(dim=1),
    )


def reliability_curve(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood | str
) -> Bins | Coverage:
    """Return the data of a reliability diagram.

    For classification, it is the mean confidence and the accuracy in `BINS` bins of the confidence,
    of equal width on [0, 1]. For Bernoulli, the same bins contain all outputs, with the confidence
    max(p, 1 − p). For regression, it is the share of all N·C targets within the central interval of
    each level.
    """
    likelihood = likelihood_of(likelihood)
    mean, y, variance = _checked(prediction, targets, likelihood)
    if likelihood.kind == "continuous":
        shares = _inside_intervals(*likelihood.ranks(y, mean, variance), LEVELS).mean(dim=(1, 2))
        return Coverage(list(LEVELS), shares.tolist(), mean.numel())
    if likelihood.kind == "classes":
        confidence, predicted = mean.max(dim=1)
        return _bins(confidence, predicted == y)
    return _bins(torch.maximum(mean, 1 - mean).flatten(), ((mean > 0.5) == (y == 1)).flatten())


def _bins(confidence: Tensor, correct: Tensor, num_bins: int = BINS) -> Bins:
    """Return the bins of `reliability_curve` for confidences (N,) and hits (N,).

    Bins are open below and closed above, as in Guo et al. 2017 (arXiv:1706.04599, sec. 2), so a
    confidence of exactly 1 counts in the last bin. torchmetrics puts it in an extra bin (issue
    3510 of torchmetrics), and does not return bins.
    """
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    index = torch.bucketize(confidence.double(), edges[1:-1])  # (N,)
    counts = index.bincount(minlength=num_bins).tolist()

    def means(values: Tensor) -> list[float | None]:
        sums = index.bincount(weights=values.double(), minlength=num_bins).tolist()
        return [s / n if n else None for s, n in zip(sums, counts, strict=True)]

    return Bins(edges.tolist(), counts, means(confidence), means(correct))


def _calibration_error(bins: Any) -> float:
    """Return Σ_m (n_m / N) |accuracy_m − confidence_m| over nonempty bins (Guo et al., eq. 3)."""
    columns = zip(bins.counts, bins.confidence, bins.accuracy, strict=True)
    return sum(n * abs(a - c) for n, c, a in columns if n) / sum(bins.counts)


def _inside_intervals(low: Tensor, high: Tensor, levels: Sequence[float]) -> Tensor:
    """Return the share (levels, N, C) of ranks from low to high in the interval of each level.

    The interval of level q is (1 − q)/2 to (1 + q)/2, both ends included. If low = high, the share
    is 0 or 1.
    """
    q = torch.tensor(list(levels), dtype=torch.float64)[:, None, None]
    width = high - low
    shared = torch.minimum(high, (1 + q) / 2) - torch.maximum(low, (1 - q) / 2)
    return torch.where(width > 0, shared.clamp(min=0) / width, (shared >= 0).double())


def _risk_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return the error rate of the k most confident predictions, (N,). Its mean is the AURC.

    Examples with equal confidence count with their mean error, the average over their orders.
    Source: Geifman, Uziel & El-Yaniv 2019 (arXiv:1805.08206).
    """
    _, group, sizes = confidence.unique(return_inverse=True, return_counts=True)
    errors = group.bincount(weights=(~correct).double()) / sizes  # per group, least confident first
    errors = errors.repeat_interleave(sizes).flip(0)  # (N,), most confident first
    return errors.cumsum(0) / torch.arange(1, len(errors) + 1)


def risk_coverage_curve(probabilities: Tensor, labels: Tensor) -> Curve:
    """Return the error rate (risk) of the most confident predictions by their share (coverage).

    Args:
        probabilities: class probabilities (N, C).
        labels: class indices (N,).
    """
    confidence, predicted = probabilities.max(dim=1)
    risk = _risk_by_coverage(confidence, predicted == labels)
    number = min(len(risk), POINTS)  # evenly spaced, with the first and last
    ranks = torch.linspace(0, len(risk) - 1, number, dtype=torch.float64).round().long()
    return Curve(_plain((ranks + 1) / len(risk)), _plain(risk[ranks]))


def confidence_threshold(
    confidence: Tensor, right: Tensor, risk: float = 0.05, level: float = 0.9
) -> float:
    """Return the lowest confidence above which at most a share ``risk`` of the answers is wrong.

    The threshold holds with probability ``level``, if more confident answers are more often
    correct. Let a person decide about answers below it. The result is infinite if the data show no
    such threshold. Even without a mistake, log(1 - level) / log(1 - risk) answers must lie above
    it: 45 for a risk of 5 % and 230 for 1 %.

    The method is fixed-sequence testing (Angelopoulos et al. 2021, arXiv:2110.01052, section 4). It
    tests groups of the most confident answers, from small to large, by the bound of Clopper and
    Pearson, until one test fails. The tests then need not share the error probability 1 - level.
    The m-th group is the smallest group that may contain m mistakes. With much data, the first
    group may contain up to three mistakes, so that an early mistake does not end the sequence.

    Args:
        confidence: confidences (N,) of answers to data that were not used for training or
            calibration; higher is more confident.
        right: whether each answer is correct, boolean (N,).
        risk: largest share of wrong answers, between 0 and 1.
        level: probability that the threshold holds, between 0 and 1.

    Raises:
        ValueError: an argument is not supported.
    """
    with extra("statistics"):
        from scipy.stats import binom, nbinom
    if not (0 < risk < 1 and 0 < level < 1):
        raise ValueError(f"risk={risk} and level={level}: both must be between 0 and 1.")
    is_mask = right.dtype == torch.bool and confidence.shape == right.shape
    if confidence.dim() != 1 or not is_mask or confidence.isnan().any():
        raise ValueError(
            f"confidence has shape {tuple(confidence.shape)}, right has {tuple(right.shape)} and "
            f"{right.dtype}. Pass one confidence per answer, (N,), without NaN, and one boolean "
            "per answer (right.bool())."
        )
    ordered, order = confidence.sort(descending=True)
    wrong, N = (~right[order]).cumsum(0), len(order)

    def smallest(mistakes: int) -> int:
        """Return the smallest number of answers that can show the risk, given the mistakes."""
        return mistakes + 1 + int(nbinom.ppf(level, mistakes + 1, risk))

    threshold, size, mistakes = math.inf, 0, min(3, N // (20 * smallest(0)))
    while size < N:
        least = ordered[min(smallest(mistakes), N) - 1]
        size = int((ordered >= least).sum())  # equally confident answers belong to the group
        if binom.cdf(int(wrong[size - 1]), size, risk) > 1 - level:
            break
        threshold = float(least)
        mistakes = max(mistakes + 1, int(1.1 * mistakes))
    return threshold


def confusion_matrix(probabilities: Tensor, labels: Tensor) -> list[list[int]] | None:
    """Return counts (C, C), labels in rows and predictions in columns.

    With more than `MOST_CLASSES` classes it is None. See `risk_coverage_curve` for the arguments.
    """
    C, predicted = probabilities.shape[1], probabilities.argmax(dim=1)
    if C > MOST_CLASSES:
        return None
    return (C * labels + predicted).bincount(minlength=C * C).view(C, C).tolist()


def out_of_distribution_metrics(inside: Tensor, outside: Tensor) -> Metrics[float]:
    """Return how well a score detects out-of-distribution (OOD) data. Higher scores mean OOD.

    - ``auroc``: probability that an OOD example has a higher score than an in-distribution example;
      equal scores count half.
    - ``aupr``: average precision with OOD as the positive class; chance is M / (N + M).
    - ``fpr95``: share of in-distribution examples that are flagged at the largest threshold (score
      >= threshold) that flags at least 95 % of the OOD examples.

    Source: Hendrycks, Mazeika & Dietterich 2019 (arXiv:1812.04606), also with OOD as the positive
    class. With the other class as positive, AUPR and FPR95 are different numbers.

    Args:
        inside: (N,) scores of in-distribution examples.
        outside: (M,) scores of out-of-distribution examples.

    Raises:
        ValueError: a side has no examples, or scores are not finite.
    """
    with extra("statistics"):
        from sklearn import metrics  # imported here, because scikit-learn takes a second

    for name, values in (("inside", inside), ("outside", outside)):
        if values.dim() != 1 or not len(values):
            shape = tuple(values.shape)
            raise ValueError(f"{name} has shape {shape}. Pass one score per example, (N,).")
        _refuse(values[~values.isfinite()], f"{name} has {{}}; expected finite scores.")
    scores = torch.cat([inside.detach().cpu().double(), outside.detach().cpu().double()]).numpy()
    is_ood = [0] * len(inside) + [1] * len(outside)
    # Keep all points of the curve, because a dropped point could be the first that reaches 95 %.
    fpr, tpr, _ = metrics.roc_curve(is_ood, scores, drop_intermediate=False)
    return Metrics(
        auroc=float(metrics.roc_auc_score(is_ood, scores)),
        aupr=float(metrics.average_precision_score(is_ood, scores)),
        fpr95=float(fpr[(tpr >= 0.95).argmax()]),
    )


def roc_curve(inside: Tensor, outside: Tensor) -> Curve:
    """Return the share of flagged out-of-distribution data against the share of flagged test data.

    The curves of all predictives have the same x. See `out_of_distribution_metrics` for arguments.
    """
    with extra("statistics"):
        from sklearn import metrics  # imported here, because scikit-learn takes a second

    is_ood = [0] * len(inside) + [1] * len(outside)
    fpr, tpr, _ = metrics.roc_curve(is_ood, torch.cat([inside, outside]).numpy())
    shares = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    at = torch.searchsorted(torch.from_numpy(fpr), shares, right=True) - 1
    return Curve(_plain(shares), _plain(torch.from_numpy(tpr)[at]))


def _plain(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]  # a pixel is 0.003


def _checked(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, targets and total variance on the CPU, in float64 (labels in int64)."""
    mean, y = prediction.mean.detach().cpu().double(), targets.detach().cpu()
    kind, is_classes = likelihood.kind, likelihood.kind == "classes"
    variance = prediction.total_uncertainty.detach().cpu().double()
    y = y.double() if kind == "continuous" else y
    # Targets may have their own noise, which is not yet in the variances.
    observed, with_noise, _ = likelihood.observed(
        y, variance.expand_as(mean) if kind == "continuous" else mean
    )
    if (
        mean.dim() != 2
        or not mean.numel()
        or observed.shape != mean.shape[: 1 if is_classes else 2]
    ):
        expected = "(N, C) and (N,)" if is_classes else "(N, C) and (N, C)"
        raise ValueError(
            f"Predictions have shape {tuple(mean.shape)}, targets {tuple(observed.shape)}. "
            f"Supported are {expected}, with at least one example."
        )
    if kind == "continuous":
        for name, values in (("means", mean), ("targets", y), ("variances", with_noise)):
            _refuse(values[~values.isfinite()], f"The {name} include {{}}; expected finite ones.")
        _refuse(with_noise[with_noise <= 0], "The variances include {}; expected positive ones.")
        return mean, y, variance.expand_as(mean)
    y = observed
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
        raise TypeError(f"Labels have dtype {y.dtype}. Pass class indices, int64.")
    wrong = (y < 0) | (y >= mean.shape[1]) if is_classes else (y != 0) & (y != 1)
    expected = f"0 to {mean.shape[1] - 1}, the predictive's classes" if is_classes else "0 or 1"
    _refuse(y[wrong], f"The targets include {{}}; expected {expected}. Leave such examples out.")
    return mean.clamp(max=1.0), y.long() if is_classes else y.double(), mean


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise a ValueError that names the first wrong value, if there is one."""
    if len(wrong):
        raise ValueError(message.format(f"{wrong[0].item():.4g}"))
