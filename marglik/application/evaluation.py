"""Evaluate predictives on test and out-of-distribution data, for ``evaluation.json``."""

import base64
import io
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.likelihoods import IGNORED, Likelihood, counted_terms, likelihood_of
from kfac_backend.ranks import Ranks
from marglik.application.data.out_of_distribution import OutOfDistributionImages
from marglik.application.data.splits import SplitName, Splits, split_batches, tensors_in
from marglik.application.records import (
    Against,
    Evaluation,
    Example,
    OutOfDistribution,
    PredictiveRecord,
    Uncertain,
)
from marglik.data.batches import Batches
from marglik.posterior.posterior import Posterior
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.intervals import area_interval, differences, intervals, of_examples
from marglik.prediction.links import Calibration, Prediction
from marglik.prediction.metric_types import Metrics
from marglik.prediction.metrics import (
    compute_metrics,
    confusion_matrix,
    example_scores,
    out_of_distribution_metrics,
    reliability_curve,
    risk_coverage_curve,
    roc_curve,
)
from marglik.prediction.predictive import (
    Labels,
    Predictive,
    PredictiveConfig,
    label_noise_of,
    laplace_predictive,
    map_predictive,
    predict_all,
    remembered_calibration,
)
from marglik.storage.environment import environment

_logger = logging.getLogger(__name__)

ExampleScores = dict[str, Metrics[Tensor]]
"""Name of a predictive -> metrics of each test example, (N,)."""
SHOWN_NOISE = 0.01
"""Share ε of random labels above which the record has the NLL of both kinds of labels."""
MOST_UNCERTAIN = 12
"""Number of most uncertain test images in the report."""
LARGEST_PICTURE = 48
"""Maximum height and width (pixels) of other pictures, so that each has only a few kilobytes."""


def evaluate(
    predictives: Mapping[str, Predictive],
    splits: Splits,
    likelihood: Likelihood | str,
    *,
    labels: Labels = "true",
    ood: OutOfDistributionImages | None = None,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> tuple[Evaluation, ExampleScores]:
    """Evaluate predictives on test and out-of-distribution data.

    The last predictive selects the most uncertain images. The predictive entropy detects ``ood``.
    ``labels`` is the kind of the predicted labels. If more than 1 % of the training labels are
    random, the record also has the NLL of the other kind of labels. Ranks each predict a part of
    every batch. All get the same record, except for seconds.

    For sequences, metrics and curves are means over the positions (tokens) that count. Intervals
    then need the same number of positions in all sequences.

    Returns:
        The record, and scores of each example, from which `differences` compares two networks.
    """
    likelihood = likelihood_of(likelihood)
    *_, y = tensors_in(splits.test)

    def predict_images(pixels: Tensor, predict: Predictive) -> Prediction:
        no_labels = torch.zeros(len(pixels), dtype=torch.int64)
        options: Any = {"normalisation": (splits.mean, splits.std), "device": device}
        batches = Batches(pixels, no_labels, batch_size, ranks=ranks, **options)
        return predict_all(predict, batches, progress=progress, ranks=ranks)[0]

    scores: ExampleScores = {}
    records: dict[str, PredictiveRecord] = {}
    uncertain = num_positions = None
    for label, predict in predictives.items():
        _logger.info("evaluating %s on %s", label, splits.name)
        # Predict once before measuring time, because the first call computes eigenvectors.
        predict(next(iter(split_batches(splits, "test", 2, device=device)))[0])
        start = time.perf_counter()
        batches = split_batches(splits, "test", batch_size, device=device, ranks=ranks)
        prediction, targets = predict_all(
            predict, batches, targets=splits.targets, progress=progress, ranks=ranks
        )
        seconds = time.perf_counter() - start
        prediction, targets = in_units(prediction, targets, splits)
        if likelihood.has_labels and y.dim() > 1:
            num_positions = len(targets)  # of those that count
        metrics = compute_metrics(prediction, targets, likelihood)
        record = PredictiveRecord(
            metrics | _of_other_labels(predict, prediction, targets, labels),
            seconds=seconds,
            reliability=reliability_curve(prediction, targets, likelihood),
            seconds_of_training=predict.seconds if isinstance(predict, Ensemble) else None,
        )
        if likelihood.kind == "classes":
            observed, *_ = likelihood.observed(targets, prediction.mean)
            record = replace(
                record,
                risk_coverage=risk_coverage_curve(prediction.mean, observed),
                confusion=confusion_matrix(prediction.mean, observed),
            )
        if (calibration := getattr(predict, "calibration", None)) is not None:
            record = replace(record, calibration=calibration_in_units(calibration, splits))
        if (positions := _positions(splits, likelihood, len(targets))) is not None:
            of_rows = example_scores(prediction, targets, likelihood)
            scores[label] = of_rows.map(lambda row, n=positions: of_examples(row, n))
            record = replace(record, intervals=intervals(scores[label]))
            if (first := next(iter(scores))) != label:
                changes = differences(scores[label], scores[first])
                record = replace(record, against=Against(first, changes))
        if ood is not None:
            outside = predict_images(ood.images, predict)
            record = _with_ood(record, prediction, outside)
        if splits.are_images and likelihood.kind == "classes" and y.dim() == 1:
            uncertain = Uncertain(label, _most_uncertain(prediction, splits))
        records[label] = record
    return Evaluation(
        data=splits.name,
        likelihood=str(likelihood),
        num_test=len(y),
        predictives=records,
        environment=environment(torch.device(device)),
        num_positions=num_positions,
        classes=None if splits.classes is None else list(splits.classes),
        ood=ood and OutOfDistribution(ood.name, len(ood.images), ood.note),
        uncertain=uncertain,
        target_scale=None if splits.target_scale is None else list(splits.target_scale),
    ), scores


def in_units(prediction: Prediction, y: Tensor, splits: Splits) -> tuple[Prediction, Tensor]:
    """Return predictions and targets of a table in the unit of the file.

    The targets are standardised for training. Then the NLL is also that of the file's numbers.
    """
    if splits.target_scale is None:
        return prediction, y
    mean, std = splits.target_scale
    f, *variances = (tensor.double() for tensor in prediction.tensors())
    return Prediction(f * std + mean, *(v * std**2 for v in variances)), y.double() * std + mean


def calibration_in_units(calibration: Calibration, splits: Splits) -> Calibration:
    """Return a calibration with the noise in the unit of the targets."""
    sigma, scale = calibration.sigma_noise, splits.target_scale
    if sigma is None or scale is None:
        return calibration
    return replace(calibration, sigma_noise=sigma * scale[1])


def predictives_of(
    laplace: Posterior,
    configs: Sequence[PredictiveConfig],
    ensemble: Ensemble | None = None,
    *,
    seed: int = 0,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> dict[str, Predictive]:
    """Return name -> predictive: the MAP, the posterior predictives and the ensemble.

    The result includes the temperature-scaled MAP if the posterior has a calibration. The name of a
    posterior predictive without a calibration ends in "uncalibrated". Each predictive draws samples
    from the same seed.
    """
    model, likelihood, sigma = laplace.model, laplace.likelihood, laplace.sigma_noise
    first = configs[0] if configs else PredictiveConfig()
    noise = first.label_noise(likelihood, None)
    predictives: dict[str, Predictive] = {
        "MAP": map_predictive(model, likelihood, sigma, label_noise=noise)
    }
    for config in (one.for_posterior(laplace) for one in configs):
        fit, label = remembered_calibration(laplace, config), config.label
        if fit is None:
            label = f"{label}, uncalibrated"
        else:
            scaled = fit.map_calibration
            of_map = map_predictive(
                model, likelihood, scaled.sigma_noise or sigma, scaled.output_temperature,
                config.label_noise(likelihood, scaled),
            )  # fmt: skip
            predictives["MAP, temperature-scaled"] = replace(of_map, calibration=scaled)
        generator = torch.Generator(laplace.mean.device).manual_seed(seed)
        predictives[label] = laplace_predictive(laplace, config, generator, ranks=ranks)
    if ensemble is not None:
        predictives[ensemble.label] = ensemble.predicting(first.labels)
    return predictives


def _positions(splits: Splits, likelihood: Likelihood, rows: int) -> int | None:
    """Return the number of rows of predictions per test example; None if it varies.

    If it varies, the sequence of a row is unknown.
    """
    y, mark = splits.test[1], splits.ignore_index
    counted = counted_terms(y if mark is None else y.masked_fill(y == mark, IGNORED), likelihood)
    alike = rows % len(y) == 0 and (counted is None or bool(counted.all()))
    return rows // len(y) if alike else None


def _of_other_labels(
    predict: Predictive, prediction: Prediction, targets: Tensor, labels: Labels
) -> Metrics[float]:
    """Return the NLL of the other kind of test labels if ε exceeds `SHOWN_NOISE`."""
    likelihood = likelihood_of(getattr(predict, "likelihood", "classification"))
    noise = label_noise_of(likelihood, getattr(predict, "calibration", None))
    if likelihood.kind != "classes" or noise <= SHOWN_NOISE:
        return Metrics()
    p, (y, *_) = prediction.mean, likelihood.observed(targets, prediction.mean)
    drawn = noise / p.shape[-1]
    other = (1 - noise) * p + drawn if labels == "true" else (p - drawn) / (1 - noise)
    own = other.gather(1, y.long()[:, None]).clamp(min=torch.finfo(p.dtype).tiny)
    nll = -own.log().mean().item()
    return Metrics(**{"nll_observed_labels" if labels == "true" else "nll_true_class": nll})


def _with_ood(
    record: PredictiveRecord, inside: Prediction, outside: Prediction
) -> PredictiveRecord:
    """Add metrics that measure how the entropy detects out-of-distribution data.

    If there is epistemic uncertainty, add the AUROC of this score, too.
    """
    sides = inside, outside
    scores = [p.entropy.reshape(len(p.entropy), -1).sum(1) for p in sides]
    metrics = record.metrics | out_of_distribution_metrics(*scores)
    epistemic = [p.epistemic.reshape(len(p.epistemic), -1).sum(1) for p in sides]
    if any(part.any() for part in epistemic):
        metrics |= Metrics(auroc_epistemic=out_of_distribution_metrics(*epistemic).auroc)
    ends = record.intervals | Metrics(auroc=area_interval(*scores))
    return replace(record, metrics=metrics, intervals=ends, roc=roc_curve(*scores))


def _most_uncertain(prediction: Prediction, splits: Splits) -> list[Example]:
    p, predicted = prediction.mean.max(dim=-1)
    numbers = {
        "probability": p,
        "entropy": prediction.entropy,
        "aleatoric": prediction.aleatoric,
        "epistemic": prediction.epistemic,
    }
    most = prediction.entropy.argsort(descending=True, stable=True)[:MOST_UNCERTAIN]
    return [
        example(splits, "test", i, predicted[i], {k: v[i].item() for k, v in numbers.items()}, None)
        for i in most.tolist()
    ]


def example(
    splits: Splits,
    split: SplitName,
    i: int,
    predicted: Tensor | None,
    numbers: dict[str, float],
    largest: int | None = LARGEST_PICTURE,
) -> Example:
    """Return the i-th example of a split with its label and image, for the report.

    ``predicted`` is a class or a standardised number. Images are shrunk to ``largest`` pixels.
    """
    x, y = getattr(splits, split)

    def text(value: Tensor) -> str:
        if value.is_floating_point():
            mean, std = splits.target_scale or (0.0, 1.0)
            return f"{float(value) * std + mean:.4g}"
        return str(int(value)) if splits.classes is None else splits.classes[int(value)]

    return Example(
        index=int(splits.indices_in_source[i]) if split == "train" else i,
        label=text(y[i].squeeze()),
        predicted=None if predicted is None else text(predicted),
        numbers=numbers,
        image=data_uri(x[i], largest) if splits.are_images else None,
    )


def data_uri(image: Tensor, largest: int | None = LARGEST_PICTURE) -> str:
    """Return a uint8 image (C, H, W) as a PNG in a data URI, without channels beyond three.

    Images with a height or width above ``largest`` (pixels) are shrunk to it.
    """
    with extra("images"):
        from PIL import Image

    channels = 3 if len(image) >= 3 else 1
    pixels = image[:channels].permute(1, 2, 0).squeeze(-1).cpu().numpy()
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    if largest is not None:
        picture.thumbnail((largest, largest))
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
