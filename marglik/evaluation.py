"""Predictions for whole data sets, and what they are worth."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_backend.batches import Targets, each_batch, split_batch
from kfac_backend.loss_hessian import counted_terms
from kfac_backend.options import Likelihood, ShiftLabels
from marglik.links import Prediction
from marglik.metrics import bernoulli_metrics, classification_metrics, regression_metrics
from marglik.predictive import Predictive
from marglik.reliability import coverage_curve, reliability

__all__ = ["compute_metrics", "predict_all", "reliability_curve"]


def predict_all(
    predict: Predictive,
    batches: Iterable[Any],
    *,
    dict_key_y: str = "labels",
    ignore_index: int | None = None,
    shift_labels: ShiftLabels = "auto",
    dict_key_mask: str | None = "attention_mask",
    progress: bool = False,
    earlier: Sequence[tuple[Prediction, Tensor]] = (),
    on_batch: Callable[[Prediction, Tensor], None] | None = None,
) -> tuple[Prediction, Tensor]:
    """Predictions and targets of all batches, on the CPU.

    The positions of sequences come one after the other, without those that do not count, so that
    what is computed from them is about positions (tokens), not about sequences.

    Args:
        predict: the predictive.
        batches: (x, y), or mappings with targets under ``dict_key_y``.
        dict_key_y: the targets' key.
        ignore_index: the label of targets that do not count; None: all count.
        shift_labels: see `kronecker_factors`. "auto" asks the network of `map_predictive` and
            `laplace_predictive`; the targets of other predictives are taken as they are.
        dict_key_mask: see `kronecker_factors`.
        progress: whether to show a bar.
        earlier: predictions and targets of the first batches, if they were made before.
        on_batch: called with those of each further batch.

    Raises:
        ValueError: no batch, or no target that counts.
    """
    model = getattr(predict, "model", None)
    if model is None and shift_labels == "auto":
        shift_labels = False
    likelihood: Any = getattr(predict, "likelihood", "classification")
    targets_of = Targets(likelihood, ignore_index, shift_labels, dict_key_mask)
    found = list(earlier)
    for i, batch in enumerate(each_batch(batches, "Predicting", progress)):
        if i < len(earlier):
            continue
        x, y = split_batch(batch, dict_key_y)
        prediction, y = predict(x).to("cpu"), targets_of(model, x, y).cpu()
        counted = counted_terms(y, targets_of.ignore_index)
        if counted is not None or prediction.mean.dim() > 2:
            y = y.flatten(0, prediction.mean.dim() - 2) if counted is None else y[counted]
            prediction = prediction.terms(counted)
        found.append((prediction, y))
        if on_batch is not None:
            on_batch(prediction, y)
    predictions, targets = [p for p, _ in found], [y for _, y in found]
    if not predictions:
        raise ValueError("The data is empty: the loader yields no batch.")
    if not sum(map(len, targets)):
        raise ValueError(f"All targets are {targets_of.ignore_index}, which do not count.")
    return Prediction.cat(predictions), torch.cat(targets)


def compute_metrics(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, float]:
    """The metrics of `marglik.metrics` that are for this likelihood."""
    if likelihood == "classification":
        return classification_metrics(prediction.mean, targets)
    if likelihood == "bernoulli":
        return bernoulli_metrics(prediction.mean, targets)
    return regression_metrics(prediction.mean, prediction.total, targets)


def reliability_curve(
    prediction: Prediction, targets: Tensor, likelihood: Likelihood
) -> dict[str, list]:
    """What a reliability diagram shows, as plain lists; see `figures.reliability_diagram`.

    Bins of confidence for classification and Bernoulli (all outputs, of the predicted side), the
    coverage of central intervals for regression.
    """
    if likelihood == "regression":
        return coverage_curve(prediction.mean, prediction.total, targets)
    p = prediction.mean
    if likelihood == "classification":
        confidence, predicted = p.max(dim=-1)
        return reliability(confidence, predicted == targets).to_json()
    confidence = torch.maximum(p, 1 - p).flatten()
    return reliability(confidence, ((p > 0.5) == (targets > 0.5)).flatten()).to_json()
