"""Collect the content of ``results.json``, in the units of the data."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from marglik.application.data.splits import Splits, split_batches, take, tensors_in
from marglik.application.evaluation import ExampleScores, calibration_in_units, data_uri, example
from marglik.application.explain import corrected_posterior, explanations
from marglik.application.records import (
    Augmentation,
    CalibrationRecord,
    Evaluation,
    Evidence,
    Explanations,
    Network,
    Range,
    SuspiciousLabels,
    TensorDecay,
)
from marglik.application.runs.setup import Setup
from marglik.attribution.influence import self_influence
from marglik.augmentation import LearnedAugmentation
from marglik.augmentation.learned import START
from marglik.posterior.prior import precision_to_weight_decay
from marglik.prediction.links import Calibration, CalibrationFit
from marglik.prediction.predictive import label_noise_of
from marglik.prediction.suspicious_labels import suspicious_labels
from marglik.training.loop import OnlineResult
from marglik.training.state import common_factors

MOST_SUSPICIOUS, IMAGES_SHOWN = 10, 3
"""Maximum number of suspicious labels, and of images with augmented copies."""


def calibration_record(name: str, content: dict[str, Any], splits: Splits) -> CalibrationRecord:
    """Return the record of a predictive's calibration, in the units of the targets."""
    fit = dict(vars(CalibrationFit.of(content)))
    for key in ("calibration", "map_calibration"):
        fit[key] = calibration_in_units(fit[key], splits)
    if splits.target_scale is not None:  # y = mean + std·t, so p(y) = p(t)/std
        log_std = splits.test[1].shape[-1] * math.log(splits.target_scale[1])
        fit |= {key: fit[key] + log_std for key in fit if key.startswith("nll")}
    return CalibrationRecord(**fit, predictive=name)


def posterior_results(setup: Setup, outcome: OnlineResult) -> dict[str, Any]:
    """Return noise and weight decay per tensor, including the factor from held-out labels."""
    splits, laplace, learner = setup.splits, outcome.laplace, outcome.learner
    gamma = laplace.effective_parameters()
    delta = laplace.prior_precision.expand(laplace.n_layers)
    learned = precision_to_weight_decay(delta, laplace.n_data, laplace.temperature)
    assert learner is not None
    factors = common_factors(learner.problem, learner.state)
    learned = learned * learner.state.hyperparameters.groups.per_tensor(factors).to(learned)
    relative = laplace.likelihood.parameters.get("noise", 1.0)  # noise of each output over σ
    std = 1.0 if splits.target_scale is None else splits.target_scale[1]
    sigma = (laplace.sigma_noise.double().cpu() * relative * std).reshape(-1).tolist()
    return {
        "num_data": laplace.n_data,
        "target_scale": None if splits.target_scale is None else list(splits.target_scale),
        "sigma_noise": sigma if laplace.likelihood.has_sigma else None,
        "weight_decay": {
            name: TensorDecay(
                initial=setup.prior.weight_decay,  # the same for all groups
                learned=learned[i].item(),
                effective_parameters=gamma[i].item(),
                parameters=block.num_parameters,
            )
            for i, (name, block) in enumerate(laplace.fitted_factors().blocks.items())
        },
    }


def learned_results(
    setup: Setup, outcome: OnlineResult, evaluation: Evaluation, scores: ExampleScores
) -> dict[str, Any]:
    """Return the fields of `Results` from the learned network's training and evaluation.

    ``scores`` are the scores of each test example.
    """
    laplace, splits = outcome.laplace, setup.splits
    label = setup.predictive.for_posterior(laplace).label
    fit = laplace.calibrations.get(label)
    own = {"label_noise": label_noise_of(laplace.likelihood, None)}
    of_map = Calibration(**fit["map_calibration"] if fit else own)
    before = [record["evidence_before"] for record in outcome.records if record["kind"] == "update"]
    name = "fixed" if setup.prior.method == "fixed" else "learned"
    suspicious, explained = _attribution(setup, outcome, of_map, scores)
    return {
        "networks": {name: Network(evaluation.scores)},
        "evidence": Evidence((*before, outcome.evidence)[0], outcome.evidence, outcome.epoch),
        "environment": evaluation.environment,
        "held_out": setup.held_out,
        "calibration": fit and calibration_record(label, fit, splits),
        "num_positions": evaluation.num_positions,
        "suspicious_labels": suspicious,
        "explanations": explained,
        "augmentation": _augmentation(setup.model, splits),
    }


def _attribution(
    setup: Setup, outcome: OnlineResult, calibration: Calibration, scores: ExampleScores
) -> tuple[SuspiciousLabels, Explanations | None]:
    """Return the suspicious labels with their self-influence, and the explained predictions."""
    splits, posterior = setup.splits, outcome.laplace
    suspicious, positions = _suspicious(outcome, splits, calibration)
    y = splits.test[1]
    if not scores or y[0].numel() > 1:  # sequences, and several numbers
        return suspicious, None
    try:
        posterior, train = corrected_posterior(splits, posterior, setup.ranks)
        if positions and splits.train[1].dim() == 1:
            part = take(splits.train, torch.tensor(positions))
            shown = replace(splits, train=part, train_indices=None)
            batches = split_batches(shown, "train", 1, device=setup.device)
            values = self_influence(posterior, batches).tolist()  # the same on each rank
            pairs = zip(suspicious.examples, values, strict=False)
            examples = [
                replace(one, numbers=one.numbers | {"self-influence": value})
                for one, value in pairs
            ]
            suspicious = replace(suspicious, examples=examples)
        return suspicious, explanations(splits, posterior, train, scores)
    except (NotImplementedError, ValueError, torch.OutOfMemoryError) as error:
        # The training is done, and a section of the report is not worth its loss.
        return suspicious, Explanations([], str(error))


def _suspicious(
    outcome: OnlineResult, splits: Splits, calibration: Calibration
) -> tuple[SuspiciousLabels, list[int]]:
    """Return the training labels with the highest scores, or the reason why there are no scores.

    If the calibration has label noise, each label has a probability of being wrong. Also returns
    the positions of the examples in the training data.
    """
    y = tensors_in(splits.train)[-1].cpu()
    try:
        assert outcome.training_probabilities is not None
        p = outcome.training_probabilities.mean().cpu()
    except ValueError as error:
        return SuspiciousLabels(unknown=str(error)), []
    # Omit ignored labels, which have no predictions.
    ignored = splits.targets.ignore_index
    counts = torch.arange(len(y)) if ignored is None else (y != ignored).nonzero().flatten()
    labels = suspicious_labels(
        y[counts], p[counts], calibration.label_noise, calibration.output_temperature
    )
    examples = []
    # Convert indices among labels with scores to indices in the training data.
    positions = counts[labels.index[: min(labels.number, MOST_SUSPICIOUS)]].tolist()
    for i, position in enumerate(positions):
        numbers = {"score": labels.score[i].item()}
        if labels.wrong is not None:
            numbers["probability of being wrong"] = labels.wrong[i].item()
        examples.append(example(splits, "train", position, labels.predicted[i], numbers))
    judged = SuspiciousLabels(len(labels.index), labels.number, labels.agreement, examples)
    return judged, positions


@torch.no_grad()
def _augmentation(model: nn.Module, splits: Splits) -> Augmentation | None:
    """Return the learned ranges and some augmented images, or None without augmentation."""
    if not isinstance(model, LearnedAugmentation):
        return None
    ranges = {
        name: Range(START * largest, value, largest)
        for name, value, largest in zip(
            model.names, model.ranges.tolist(), model.largest.tolist(), strict=True
        )
    }
    images = tensors_in(splits.train)[0][:IMAGES_SHOWN].cpu()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (splits.mean, splits.std))
    # Normalise the images for the network, and revert it for the pictures.
    copies = model.transformed(((images - mean) / std).to(model.ranges.device)).cpu()
    copies = (copies * std + mean).round().clamp(0, 255).to(torch.uint8)
    rows = [
        [data_uri(picture) for picture in (image, *of_image)]
        for image, of_image in zip(images, copies, strict=True)
    ]
    return Augmentation(ranges, model.copies, rows)
