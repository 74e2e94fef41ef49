"""Predictions for whole data sets, and their metrics."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kfac_backend.loss import counted_terms
from kfac_backend.model.batches import Targets, each_batch, split_batch
from kfac_backend.options import Likelihood, TargetOptions
from kfac_backend.ranks import Ranks
from marglik.prediction.curves import coverage_curve, reliability
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import (
    bernoulli_metrics,
    bernoulli_scores,
    classification_metrics,
    classification_scores,
    regression_metrics,
    regression_scores,
)
from marglik.prediction.predictive import Predictive

__all__ = ["compute_metrics", "example_scores", "predict_all", "reliability_curve"]


def predict_all(
    predict: Predictive,
    batches: Iterable[Any],
    *,
    targets: TargetOptions = TargetOptions(),  # noqa: B008
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
    **keywords: Any,
) -> tuple[Prediction, Tensor]:
    """Predictions and targets of all batches, on the CPU.

    Sequences are flattened to their positions, without those that do not count: metrics of the
    result are about positions (tokens), not about sequences.

    Args:
        predict: the predictive.
        batches: (x, y), or mappings.
        targets: how batches give their targets. ``shift_labels="auto"`` asks the network of
            `map_predictive` and `laplace_predictive`; with other predictives, targets are not
            shifted.
        progress: whether to show a bar.
        ranks: the ranks that each predict a contiguous part of every batch, which may be empty; the
            loader yields this rank's (see `marglik.data.shard`). All ranks get all predictions, in
            the order of the data.
        keywords: single options that replace those of ``targets``, such as ``dict_key_y="target"``.

    Raises:
        ValueError: no batch, or no target that counts.
    """
    targets = targets.but(**keywords)
    model = getattr(predict, "model", None)
    if model is None and targets.shift_labels == "auto":
        targets = targets.but(shift_labels=False)
    likelihood: Likelihood = getattr(predict, "likelihood", "classification")
    targets_of = Targets(likelihood, targets)
    found: list[tuple[Prediction, Tensor]] = []
    for batch in each_batch(batches, "Predicting", progress):
        x, y = split_batch(batch, targets.dict_key_y)
        part: tuple[Prediction, Tensor] | None = None
        if len(y) or ranks.size == 1:
            part = _of_counted_terms(
                predict(x).to("cpu"), targets_of(model, x, y).cpu(), likelihood
            )
        found += [one for one in ranks.gather(part, "predictions") if one is not None]
    if not found:
        raise ValueError("The data is empty: the loader yields no batch.")
    if not sum(len(y) for _, y in found):
        raise ValueError("No target counts: all labels are marked as ignored, or hidden by a mask.")
    predictions, all_targets = zip(*found, strict=True)
    return Prediction.cat(list(predictions)), torch.cat(all_targets)


def _of_counted_terms(
    prediction: Prediction, y: Tensor, likelihood: Likelihood
) -> tuple[Prediction, Tensor]:
    """Prediction and targets of the positions that count, (M, ...)."""
    # Only for sequences: a predictive that is not ours does not say its likelihood, and
    # classification, which is then assumed, would look for ignored labels in any targets.
    counted = counted_terms(y, likelihood) if y.dim() < prediction.mean.dim() else None
    if counted is not None:
        return prediction.terms(counted), y[counted]
    if prediction.mean.dim() > 2:
        return prediction.terms(), y.flatten(0, prediction.mean.dim() - 2)
    return prediction, y


def compute_metrics(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, float]:
    """The metrics of a prediction, by name; see `marglik.prediction.metrics` for their definitions.

    Args:
        prediction: predictions for N examples.
        targets: class indices (N,), or targets (N, C) of regression and Bernoulli outputs.
        likelihood: decides which metrics these are.
    """
    if likelihood == "classification":
        return classification_metrics(prediction.mean, targets)
    if likelihood == "bernoulli":
        return bernoulli_metrics(prediction.mean, targets)
    return regression_metrics(prediction.mean, prediction.total, targets)


def example_scores(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, Tensor]:
    """Each example's contribution to the metrics that are means: name -> (N,), or (N, C)."""
    if likelihood == "classification":
        return classification_scores(prediction.mean, targets)
    if likelihood == "bernoulli":
        return bernoulli_scores(prediction.mean, targets)
    return regression_scores(prediction.mean, prediction.total, targets)


def reliability_curve(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, Any]:
    """The data of a reliability diagram as plain lists; `figures.reliability_diagram` draws it.

    For classification, bins of confidence. For Bernoulli outputs, too, over all outputs, with the
    confidence max(p, 1 − p). For regression, the coverage of central intervals.
    """
    if likelihood == "regression":
        return coverage_curve(prediction.mean, prediction.total, targets)
    p = prediction.mean
    if likelihood == "classification":
        confidence, predicted = p.max(dim=-1)
        return reliability(confidence, predicted == targets)
    confidence = torch.maximum(p, 1 - p).flatten()
    return reliability(confidence, ((p > 0.5) == (targets > 0.5)).flatten())
