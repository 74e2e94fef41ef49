"""Predictions for whole data sets, and what they are worth."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kfac_backend.batches import split_batch
from kfac_backend.options import Likelihood
from marglik.links import Prediction
from marglik.metrics import bernoulli_metrics, classification_metrics, regression_metrics
from marglik.predictive import Predictive
from marglik.reliability import coverage_curve, reliability

__all__ = ["metrics", "predict_all", "reliability_curve"]


def predict_all(
    predict: Predictive,
    batches: Iterable[Any],
    *,
    dict_key_y: str = "labels",
    progress: bool = False,
) -> tuple[Prediction, Tensor]:
    """Predictions and targets of all batches, on the CPU.

    Args:
        predict: the predictive.
        batches: (x, y), or mappings with targets under ``dict_key_y``.
        dict_key_y: the targets' key.
        progress: whether to show a bar.

    Raises:
        ValueError: no batch.
    """
    hidden = None if progress else True  # None: shown on a terminal only
    predictions, targets = [], []
    for batch in tqdm(batches, desc="Predicting", unit="batch", leave=False, disable=hidden):
        x, y = split_batch(batch, dict_key_y)
        predictions.append(predict(x).to("cpu"))
        targets.append(y.cpu())
    if not predictions:
        raise ValueError("The data is empty: the loader yields no batch.")
    return Prediction.cat(predictions), torch.cat(targets)


def metrics(prediction: Prediction, targets: Tensor, likelihood: Likelihood) -> dict[str, float]:
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
