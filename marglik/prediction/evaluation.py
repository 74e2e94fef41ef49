"""Predictions for whole data sets."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kfac_backend.loss import counted_terms
from kfac_backend.model.batches import Targets, each_batch, split_batch
from kfac_backend.options import Likelihood, TargetOptions
from kfac_backend.ranks import Ranks
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import Predictive

__all__ = ["predict_all"]


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
            loader yields this rank's (`marglik.data.batches.Shard`). All ranks get all predictions,
            in the order of the data.
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
