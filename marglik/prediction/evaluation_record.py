"""The results of an evaluation as plain data: the content of ``evaluation.json``."""

import base64
import io
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from kfac_backend.files import sha256_of_tensors
from kfac_backend.loss import counted_terms
from kfac_backend.model.batches import each_batch
from kfac_backend.options import Likelihood
from kfac_backend.ranks import Ranks
from marglik.data import (
    CORRUPTIONS,
    SEVERITIES,
    ImageBatches,
    ImageData,
    ImageSet,
    ImageSplits,
    Splits,
    corrupt,
    out_of_distribution_images,
)
from marglik.data.batches import split_batches
from marglik.data.images.out_of_distribution import OutOfDistributionImages
from marglik.data.record import tensors_in
from marglik.data.shard import Shard
from marglik.posterior.posterior import Posterior
from marglik.prediction.curves import errors_by_class, risk_coverage_curve, roc_curve
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.evaluation import (
    compute_metrics,
    example_scores,
    predict_all,
    reliability_curve,
)
from marglik.prediction.intervals import (
    area_interval,
    differences,
    intervals,
    of_examples,
)
from marglik.prediction.links import Prediction
from marglik.prediction.metrics import out_of_distribution_metrics
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    laplace_predictive,
    map_predictive,
    remembered_calibration,
)
from marglik.storage.provenance import environment

__all__ = [
    "IN_SAMPLE",
    "combined",
    "compared",
    "evaluate",
    "evaluate_network",
    "has_in_sample_metrics",
]

_logger = logging.getLogger(__name__)

ENTROPY_BINS = 30
MOST_UNCERTAIN = 12
"""Number of the most uncertain test images that the report shows."""

IN_SAMPLE = (
    "Where a predictive was calibrated on the validation set, its metrics on that set are "
    "in-sample: they do not test it."
)
"""Note to print beside such metrics."""


def evaluate(
    predictives: Mapping[str, Predictive],
    splits: Splits,
    likelihood: Likelihood,
    *,
    shift: bool = False,
    ood: ImageData | OutOfDistributionImages | None = None,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
    scores: dict[str, dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Evaluate predictives on test, validation, shifted and out-of-distribution data.

    Args:
        predictives: name -> predictive; the most uncertain images are those of the last one.
        splits: the data; images are normalised by its mean and std.
        likelihood: likelihood of the predictives.
        shift: whether to evaluate on corrupted test images as well, see `corrupt`.
        ood: out-of-distribution images, told by the predictive entropy.
        batch_size: number of test examples in a batch.
        device: device on which batches are made.
        progress: whether to show progress bars.
        ranks: the ranks that each predict a part of every batch; all get the same record, except
            for seconds.
        scores: a mapping to add to: predictive -> name of a metric -> its value for each test
            example, (N,). `compared` takes them, to compare two networks on the same examples.

    Returns:
        For each predictive the metrics, under keys such as ``test/cls/NLL``, ``test/cal/ECE``,
        ``shift/noise/3/cls/NLL`` and ``ood/AUROC``; intervals of the test metrics, and their
        differences from those of the first predictive (see `marglik.prediction.intervals`);
        reliability, risk-coverage and ROC curves; errors by class; histograms of the predictive
        entropy; and the seconds for the test set. For sequences, all of these are about positions
        (tokens) that count, and the record has their number; intervals are given only if all
        sequences have the same number of them.

    Raises:
        ValueError: shifts or out-of-distribution data without images, or with regression; shifts of
            images with neither one nor three channels.
    """
    images = splits if isinstance(splits, ImageSplits) else None
    if images is None and (shift or ood is not None):
        raise ValueError(
            f"{splits.name} holds no images; shift and ood are for images. Leave them out."
        )
    if shift and images is not None and images.image_shape[0] not in (1, 3):
        raise ValueError(
            f"{splits.name} has images of {images.image_shape[0]} channels; shift supports one or "
            "three. Leave it out."
        )
    ood_images = ood if isinstance(ood, OutOfDistributionImages) else None
    if isinstance(ood, ImageData) and images is not None:
        ood_images = out_of_distribution_images(ood, images)
    data = _TestData(splits, likelihood, batch_size, torch.device(device), progress, ranks)
    scores = {} if scores is None else scores
    entries: dict[str, dict[str, Any]] = {}
    uncertain = None
    for label, predict in predictives.items():
        _logger.info("evaluating %s on %s", label, splits.name)
        # The first call computes eigenvectors; the time of the test set must not include that.
        predict(data.two_inputs())
        start = time.perf_counter()
        prediction, targets = data.predict("test", predict)
        seconds = time.perf_counter() - start
        entry, of_examples = _entry_of_test(data, prediction, targets)
        if of_examples is not None:
            scores[label] = of_examples
            first = next(iter(scores))
            if first != label:
                found = compared(of_examples, scores[first])
                entry["against"] = {"predictive": first, "differences": found}
        if splits.validation is not None:
            of_validation = compute_metrics(*data.predict("validation", predict), likelihood)
            entry["metrics"] |= _prefixed("validation", of_validation)
        if ood_images is not None:
            _add_ood(entry, prediction, data.predict_images(ood_images.images, predict), likelihood)
        if shift:
            entry["metrics"] |= _shifted(data, predict)
        if images is not None and likelihood == "classification":
            examples = _most_uncertain(prediction, images)
            uncertain = {"predictive": label, "examples": examples}
        entries[label] = entry | {"seconds": seconds}
    record = {
        "format": "marglik.evaluation",
        "version": 1,
        "data": splits.name,
        "likelihood": likelihood,
        "classes": None if splits.classes is None else list(splits.classes),
        **data.sizes(),
        "predictives": entries,
        "ood": None,
        "shift": None,
        "uncertain": uncertain,
    }
    if ood_images is not None:
        record["ood"] = {
            "name": ood_images.name,
            "num_examples": len(ood_images.images),
            "score": "entropy",
            "note": ood_images.note,
            "sha256": sha256_of_tensors([ood_images.images]),
        }
    if shift:
        record["shift"] = {"kinds": list(CORRUPTIONS), "severities": list(SEVERITIES)}
    return record | environment(data.device)


def evaluate_network(
    map_: Predictive,
    laplace: Posterior | None,
    configs: Sequence[PredictiveConfig],
    splits: Splits,
    likelihood: Likelihood,
    *,
    of: str,
    seed: int = 0,
    ensemble: Ensemble | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`evaluate` a network at its parameters and under its posterior; returns the whole record.

    The record also says what was evaluated (a sum of the posterior and of the test set) and with
    which options, so that `combined` can tell which results belong together. If the posterior has a
    calibration of a predictive, the temperature-scaled MAP is evaluated, too; a posterior
    predictive without one is labelled "uncalibrated".

    Args:
        map_: the predictive of the network at its parameters.
        laplace: the posterior, if there is one.
        configs: the ways in which the posterior predicts, evaluated one after the other.
        splits: see `evaluate`.
        likelihood: likelihood of the predictives.
        of: SHA-256 sum that identifies the posterior or checkpoint.
        seed: seed of sampling, the same for each way of predicting.
        ensemble: an ensemble whose first member is the network.
        options: further arguments of `evaluate`.
    """
    predictives: dict[str, Predictive] = {"MAP": map_}
    how: dict[str, dict[str, Any]] = {"MAP": {}}
    for one in configs:
        assert laplace is not None
        found = remembered_calibration(laplace, one)
        if found is not None:
            scaled, label = found.map_calibration, "MAP, temperature-scaled"
            sigma = scaled.sigma_noise or laplace.sigma_noise
            predictives[label] = map_predictive(
                laplace.model, likelihood, sigma, scaled.output_temperature
            )
            how[label] = {"calibration": asdict(scaled)}
        label = one.label if found is not None else f"{one.label}, uncalibrated"
        generator = torch.Generator(options["device"]).manual_seed(seed)
        ranks = options.get("ranks", Ranks(None))
        predictives[label] = laplace_predictive(laplace, one, generator, ranks=ranks)
        # Only what changes predictions: `combined` replaces a result whose options differ.
        without_effect = ("batch_size", "memory")
        plain = {name: v for name, v in asdict(one).items() if name not in without_effect}
        plain["calibration"] = None if found is None else asdict(found.calibration)
        how[label] = plain | {"seed": seed}
    if ensemble is not None:
        predictives[ensemble.label] = ensemble
        found = ensemble.calibration
        calibration = None if found is None else asdict(found)
        how[ensemble.label] = {"members": len(ensemble.models), "calibration": calibration}
    record = evaluate(predictives, splits, likelihood, **options)
    for label, entry in record["predictives"].items():
        entry["options"] = how[label]
        if ensemble is not None and label == ensemble.label:
            entry["seconds_of_training"] = ensemble.seconds
    scale = [splits.mean, splits.std] if isinstance(splits, ImageSplits) else []
    tensors = [*tensors_in(splits.test), *map(torch.tensor, scale)]
    return record | {"of": of, "test": sha256_of_tensors(tensors)}


def has_in_sample_metrics(evaluation: Mapping[str, Any]) -> bool:
    """Whether an evaluation has metrics of a calibrated predictive on a validation set."""
    return any(
        (entry.get("options") or {}).get("calibration")
        and any(key.startswith("validation/") for key in entry["metrics"])
        for entry in evaluation["predictives"].values()
    )


def combined(found: dict[str, Any], earlier: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A new evaluation merged with an earlier one, and what it replaces of that one, in words.

    Results of the earlier evaluation are kept if they are of the same network or posterior and the
    same test set, and of another way of predicting, or of parts that the new one does not have (a
    shift, say). An evaluation has one out-of-distribution data set: a new one drops the earlier
    results on the old one.
    """
    for key, what in SUBJECT.items():
        if found[key] != earlier.get(key):
            return found, [f"all of the earlier evaluation, which was of {what}"]
    replaced, entries = [], {}
    stays = found["ood"] is None or found["ood"] == earlier["ood"]
    for label, former in earlier["predictives"].items():
        entry = found["predictives"].get(label)
        if entry is not None and entry["options"] != former["options"]:
            before, now = former["options"], entry["options"]
            changes = [f"{k} {before.get(k)}, now {now[k]}" for k in now if now[k] != before.get(k)]
            replaced.append(f"{label}, which was evaluated with {'; '.join(changes)}")
            entries[label] = entry
            continue
        if not stays:
            former = _without_ood(former)
        entries[label] = former if entry is None else _both(former, entry)
    if earlier["ood"] and not stays:
        replaced.append(f"the results on out-of-distribution data ({_ood_name(earlier['ood'])})")
    former = {key: earlier[key] for key in ("ood", "shift", "uncertain") if found[key] is None}
    return found | former | {"predictives": found["predictives"] | entries}, replaced


SUBJECT = {
    "of": "another network or posterior",
    "data": "other data",
    "test": "another test set",
    "likelihood": "another likelihood",
}
"""Keys that say what was evaluated -> what to call it if they differ."""


def _without_ood(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key != "roc"}
    for name in ("metrics", "intervals"):
        if name in kept:
            kept[name] = {k: v for k, v in kept[name].items() if not k.startswith("ood/")}
    if kept.get("entropy"):
        kept["entropy"] = {k: v for k, v in kept["entropy"].items() if k != "ood"}
    return kept


def _both(former: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    both = former | entry
    for name in ("metrics", "intervals", "entropy"):
        if name in entry:
            both[name] = former.get(name, {}) | entry[name]
    return both


def _ood_name(ood: dict[str, Any]) -> str:
    return f"{ood['num_examples']} of {ood['name']}, detected by {ood['score']}"


@dataclass(frozen=True)
class _TestData:
    """The data, and how predictives go through it."""

    splits: Splits
    likelihood: Likelihood
    batch_size: int
    device: torch.device
    progress: bool
    ranks: Ranks

    @property
    def _shard(self) -> Shard:
        return Shard(self.ranks.rank, self.ranks.size)

    def predict(
        self, split: Literal["validation", "test"], predict: Predictive
    ) -> tuple[Prediction, Tensor]:
        batches = split_batches(
            self.splits, split, self.batch_size, device=self.device, shard=self._shard
        )
        return predict_all(
            predict,
            batches,
            targets=self.splits.targets,
            progress=self.progress,
            ranks=self.ranks,
        )

    def predict_images(self, images: Tensor, predict: Predictive) -> Prediction:
        assert isinstance(self.splits, ImageSplits)
        batches = ImageBatches(
            ImageSet(images, torch.zeros(len(images), dtype=torch.int64)),
            self.splits.mean,
            self.splits.std,
            self.batch_size,
            device=self.device,
            shard=self._shard,
        )
        return predict_all(predict, batches, progress=self.progress, ranks=self.ranks)[0]

    def two_inputs(self) -> Any:
        return next(iter(split_batches(self.splits, "test", 2, device=self.device)))[0]

    def sizes(self) -> dict[str, int | None]:
        """The numbers of test examples and, for sequences, of positions that count."""
        if isinstance(self.splits, ImageSplits):
            return {"num_test": len(self.splits.test), "num_positions": None}
        y = self.splits.test[1]
        several = self.likelihood == "classification" and y.dim() > 1
        return {"num_test": len(y), "num_positions": self.splits.num_terms if several else None}

    def positions(self, rows: int) -> int | None:
        """Rows of predictions per test example; None if the number differs between examples."""
        if isinstance(self.splits, ImageSplits):
            return 1
        y = self.splits.test[1]
        counted = counted_terms(y, self.likelihood)
        alike = rows % len(y) == 0 and (counted is None or bool(counted.all()))
        return rows // len(y) if alike else None


def _entry_of_test(
    data: _TestData, prediction: Prediction, targets: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Metrics, intervals and curves of the test set, and each example's scores, (N,).

    Without intervals and scores for sequences with different numbers of positions that count: the
    rows of a prediction do not say which sequence they belong to.
    """
    likelihood = data.likelihood
    entry: dict[str, Any] = {
        "metrics": _prefixed("test", compute_metrics(prediction, targets, likelihood)),
        "intervals": {},
        "reliability": reliability_curve(prediction, targets, likelihood),
    }
    if likelihood != "regression":
        entry["entropy"] = _entropies(prediction, likelihood)
    if likelihood == "classification":
        entry["risk_coverage"] = risk_coverage_curve(prediction.mean, targets)
        entry["classes"] = errors_by_class(prediction.mean, targets)
    positions = data.positions(len(targets))
    if positions is None:
        return entry, None
    of_rows = example_scores(prediction, targets, likelihood)
    scores = {name: of_examples(values, positions).cpu() for name, values in of_rows.items()}
    ends = {name: list(pair) for name, pair in intervals(scores).items()}
    entry["intervals"] = _prefixed("test", ends)
    return entry, scores


def _add_ood(
    entry: dict[str, Any], inside: Prediction, outside: Prediction, likelihood: Likelihood
) -> None:
    """Add how well the entropy tells out-of-distribution data from the test set.

    And, as one number, how well the epistemic part does, where there is one.
    """
    scores = [p.entropy if p.entropy.dim() == 1 else p.entropy.sum(1) for p in (inside, outside)]
    entry["metrics"] |= out_of_distribution_metrics(*scores)
    entry["roc"] = roc_curve(*scores)
    if ends := area_interval(*scores):
        entry["intervals"]["ood/AUROC"] = list(ends)
    if inside.epistemic.any() or outside.epistemic.any():
        parts = (p.epistemic for p in (inside, outside))
        by_epistemic = [part if part.dim() == 1 else part.sum(1) for part in parts]
        found = out_of_distribution_metrics(*by_epistemic)
        entry["metrics"]["ood/AUROC_epistemic"] = found["ood/AUROC"]
    entry["entropy"]["ood"] = _entropies(outside, likelihood)["test"]


def _shifted(data: _TestData, predict: Predictive) -> dict[str, float]:
    """The metrics on the corrupted test sets."""
    assert isinstance(data.splits, ImageSplits)
    test, found = data.splits.test, {}
    shifts = [*product(CORRUPTIONS, SEVERITIES)]
    for kind, severity in each_batch(shifts, "Shifted test sets", data.progress, unit="set"):
        _logger.info("evaluating on %s of severity %d", kind, severity)
        prediction = data.predict_images(corrupt(test.images, kind, severity), predict)
        metrics = compute_metrics(prediction, test.labels, data.likelihood)
        found |= _prefixed(f"shift/{kind}/{severity}", metrics)
    return found


def compared(
    scores: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """`differences` of test metrics as plain data, under keys such as ``test/cls/NLL``."""
    found = differences(scores, reference).items()
    return _prefixed("test", {name: list(values) for name, values in found})


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{key}": value for key, value in values.items()}


def _entropies(prediction: Prediction, likelihood: Likelihood) -> dict[str, list]:
    outputs = prediction.mean.shape[1] if likelihood == "classification" else 2
    largest = math.log(outputs)
    # Rounding may put an entropy above its bound, where the histogram would not count it.
    entropy = prediction.entropy.flatten().double().clamp(0, largest)
    counts, edges = torch.histogram(entropy, ENTROPY_BINS, range=(0.0, largest))
    return {"edges": edges.tolist(), "test": [int(count) for count in counts]}


def _most_uncertain(prediction: Prediction, splits: ImageSplits) -> list[dict[str, Any]]:
    entropy = prediction.entropy
    indices = entropy.argsort(descending=True, stable=True)[:MOST_UNCERTAIN].tolist()
    probability, predicted = prediction.mean.max(dim=-1)
    return [
        {
            "index": i,
            "label": splits.classes[int(splits.test.labels[i])],
            "predicted": splits.classes[int(predicted[i])],
            "probability": probability[i].item(),
            "entropy": entropy[i].item(),
            "aleatoric": prediction.aleatoric[i].item(),
            "epistemic": prediction.epistemic[i].item(),
            "image": _data_uri(splits.test.images[i]),
        }
        for i in indices
    ]


def _data_uri(image: Tensor) -> str:
    """A uint8 image (C, H, W) as a PNG in a data URI; channels beyond three are left out."""
    from PIL import Image

    channels = 3 if len(image) >= 3 else 1
    pixels = image[:channels].permute(1, 2, 0).squeeze(-1).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
