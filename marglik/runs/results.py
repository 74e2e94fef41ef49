"""What results.json holds: evidence and weight decays, metrics, labels to look at, ranges."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from marglik.augmentation import LearnedAugmentation
from marglik.augmentation.learned import START
from marglik.data.splits import Splits, tensors_in
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import precision_to_weight_decay
from marglik.prediction.evaluation import data_uri
from marglik.prediction.links import Calibration
from marglik.prediction.suspicious_labels import suspicious_labels
from marglik.training.loop import OnlineResult

NLL, RMSE = "test/reg/NLL", "test/reg/RMSE"
MOST_SUSPICIOUS, IMAGES_SHOWN = 10, 3
"""Number of suspicious labels at most, and of images that are shown as an augmentation changes
them."""
LARGEST_PICTURE = 48
"""Height and width (pixels) of pictures at most: a few kilobytes each."""


# A table's targets are standardised for training. What people read is in the target's own unit:
# y = mean + std·t, so that p(y) = p(t)/std.


def evaluation_in_units(evaluation: dict[str, Any], splits: Splits) -> dict[str, Any]:
    """The content of ``evaluation.json``, from what `evaluate` found for standardised targets.

    Says of the scale what it is, under "target_scale"; None where targets are as they are given.
    """
    scale = splits.target_scale
    evaluation["target_scale"] = None if scale is None else list(scale)
    if scale is None:
        return evaluation
    std, log_std = scale[1], _log_std(splits)
    for entry in evaluation["predictives"].values():
        for of, change in {NLL: lambda v: v + log_std, RMSE: lambda v: v * std}.items():
            entry["metrics"][of] = change(entry["metrics"][of])
            if of in entry["intervals"]:
                entry["intervals"][of] = [change(end) for end in entry["intervals"][of]]
        if "calibration" in entry:
            entry["calibration"] = _in_units(entry["calibration"], std)
    return evaluation


def calibration_in_units(fit: dict[str, Any], splits: Splits) -> dict[str, Any]:
    """The same for what a calibration found."""
    if splits.target_scale is None:
        return fit
    nll = {name: fit[name] + _log_std(splits) for name in fit if name.startswith("nll")}
    calibrations = ("calibration", "map_calibration")
    return fit | nll | {of: _in_units(fit[of], splits.target_scale[1]) for of in calibrations}


def _log_std(splits: Splits) -> float:
    """What the NLL of an example gains: log std for each output."""
    assert splits.target_scale is not None
    return splits.test[1].shape[-1] * math.log(splits.target_scale[1])


def _in_units(calibration: dict[str, Any], std: float) -> dict[str, Any]:
    sigma = calibration["sigma_noise"]
    return calibration | {"sigma_noise": None if sigma is None else sigma * std}


def posterior_results(laplace: Posterior, initial: float, splits: Splits) -> dict[str, Any]:
    """What a posterior says in the results of a run: noise, and each tensor's weight decay.

    Args:
        laplace: the posterior.
        initial: the weight decay that all groups started with.
        splits: the data.
    """
    gamma = laplace.effective_parameters()
    trainable = [n for n, p in laplace.model.named_parameters() if p.requires_grad]
    delta = laplace.prior_precision.expand(len(trainable))
    learned = precision_to_weight_decay(delta, laplace.n_data, laplace.temperature)
    relative = laplace.likelihood.parameters.get("noise", 1.0)  # of each output
    std = 1.0 if splits.target_scale is None else splits.target_scale[1]
    sigma = (laplace.sigma_noise.double().cpu() * relative * std).tolist()
    return {
        "num_data": laplace.n_data,
        "target_scale": None if splits.target_scale is None else list(splits.target_scale),
        "sigma_noise": sigma if laplace.likelihood.has_sigma else None,
        "weight_decay": {
            name: {
                "initial": initial,
                "learned": learned[i].item(),
                "effective_parameters": gamma[i].item(),
                "parameters": int(laplace.evidence_terms.sizes[i]),
            }
            for i, name in enumerate(trainable)
        },
    }


def metrics_of(label: str, evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics and intervals of each predictive, under names such as "learned, MAP"."""
    predictives = evaluation["predictives"].items()
    return {
        kind: {f"{label}, {name}": predictive[kind] for name, predictive in predictives}
        for kind in ("metrics", "intervals")
    }


def suspicious_results(
    learned: OnlineResult, splits: Splits, kept: Tensor, calibration: Calibration
) -> dict[str, Any]:
    """The training labels that look most wrong; where none can be judged, why.

    Where the calibration has label noise, each has the probability that its label is wrong.
    ``kept`` are the positions (N,) of the examples that the network was trained on, in the data.
    """
    y = tensors_in(splits.train)[-1].cpu()
    try:
        assert learned.training_probabilities is not None
        p = learned.training_probabilities.mean().cpu()
    except ValueError as error:
        return {"unknown": str(error)}
    # Ignored labels have no prediction to compare with; of sequences, each position is judged.
    ignored = splits.targets.ignore_index
    counts = torch.arange(len(y)) if ignored is None else (y != ignored).nonzero().flatten()
    found = suspicious_labels(
        y[counts], p[counts], calibration.label_noise or None, calibration.output_temperature
    )
    examples = []
    for i in range(min(found.number, MOST_SUSPICIOUS)):
        # From a place among the judged, to one among the trained on, to one in the data.
        here = int(counts[found.index[i]])
        names = [
            str(int(k)) if splits.classes is None else splits.classes[int(k)]
            for k in (found.label[i], found.predicted[i])
        ]
        example = {"index": int(kept[here]), "label": names[0], "predicted": names[1]}
        wrong = {} if found.wrong is None else {"wrong": found.wrong[i].item()}
        examples.append(example | {"score": found.score[i].item()} | wrong)
        if splits.are_images:
            picture = tensors_in(splits.train)[0][here]
            examples[-1]["image"] = data_uri(picture, LARGEST_PICTURE)
    return {
        "judged": len(found.index),
        "number": found.number,
        "agreement": found.agreement,
        "examples": examples,
    }


@torch.no_grad()
def augmentation_results(model: nn.Module, splits: Splits) -> dict[str, Any]:
    """The learned ranges, and some training images as the network sees them; {} without any."""
    if not isinstance(model, LearnedAugmentation):
        return {}
    ranges = {
        name: {"initial": START * largest, "learned": value, "largest": largest}
        for name, value, largest in zip(
            model.names, model.ranges.tolist(), model.largest.tolist(), strict=True
        )
    }
    images = tensors_in(splits.train)[0][:IMAGES_SHOWN].cpu()
    mean, std = (torch.tensor(of).view(-1, 1, 1) for of in (splits.mean, splits.std))
    # What the network sees is normalised; what people see is not.
    copies = model.transformed(((images - mean) / std).to(model.ranges.device)).cpu()
    copies = (copies * std + mean).round().clamp(0, 255).to(torch.uint8)
    rows = [
        [data_uri(picture, LARGEST_PICTURE) for picture in (image, *of_image)]
        for image, of_image in zip(images, copies, strict=True)
    ]
    return {"augmentation": {"ranges": ranges, "copies": model.copies, "examples": rows}}
