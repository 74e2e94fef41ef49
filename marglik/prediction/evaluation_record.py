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
from kfac_backend.loss.hessian import counted_terms
from kfac_backend.model.batches import each_batch
from kfac_backend.options import Likelihood, check_option
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
from marglik.prediction.evaluation import (
    compute_metrics,
    example_scores,
    predict_all,
    reliability_curve,
)
from marglik.prediction.intervals import (
    differences,
    intervals,
    of_examples,
    out_of_distribution_intervals,
    risk_interval,
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
from marglik.storage.checkpoint import Checkpoints, CheckpointsOfRanks
from marglik.storage.provenance import environment

__all__ = [
    "IN_SAMPLE",
    "EvaluationConfig",
    "combined",
    "compared",
    "evaluate",
    "evaluate_network",
    "has_in_sample_metrics",
]

_logger = logging.getLogger(__name__)

ENTROPY_BINS = 30

IN_SAMPLE = (
    "Where a predictive was calibrated on the validation set, its metrics on that set are "
    "in-sample: they do not test it."
)
"""Note to print beside such metrics."""

Score = Literal["entropy", "epistemic"]


@dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated besides the test set.

    Args:
        shift: whether to evaluate on corrupted test images as well: noise, blur, lower contrast and
            JPEG artefacts, at five severities each. This is twenty times the work.
        ood_score: score by which out-of-distribution images are detected: the predictive entropy,
            or its epistemic part.
        uncertain: number of the most uncertain test images that the report shows.
    """

    shift: bool = False
    ood_score: Score = "entropy"
    uncertain: int = 12

    def __post_init__(self) -> None:
        check_option("evaluation.ood_score", self.ood_score, Score)
        if self.uncertain < 0:
            raise ValueError(f"evaluation.uncertain must be 0 or more, not {self.uncertain}.")

    def check(self, splits: Splits) -> None:
        """Raise a ValueError unless the data supports this evaluation."""
        if self.shift and isinstance(splits, ImageSplits) and splits.image_shape[0] not in (1, 3):
            raise ValueError(
                f"{splits.name} has images of {splits.image_shape[0]} channels; evaluation.shift "
                "supports one or three. Leave it out."
            )


def evaluate(
    predictives: Mapping[str, Predictive],
    splits: Splits,
    likelihood: Likelihood,
    config: EvaluationConfig = EvaluationConfig(),  # noqa: B008
    *,
    ood: ImageData | OutOfDistributionImages | None = None,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    progress: bool = False,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks = Ranks(None),  # noqa: B008
    scores: dict[str, dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Evaluate predictives on test, validation, shifted and out-of-distribution data.

    Args:
        predictives: name -> predictive; the most uncertain images are those of the last one.
        splits: the data; images are normalised by its mean and std.
        likelihood: likelihood of the predictives.
        config: what is evaluated besides the test set.
        ood: out-of-distribution images.
        batch_size: number of test examples in a batch.
        device: device on which batches are made.
        progress: whether to show progress bars.
        checkpoints: where to keep the state between batches. If there is a state, the evaluation
            continues from it, and makes the same predictions.
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
        ValueError: shifts or out-of-distribution data without images, or with regression.
    """
    images = splits if isinstance(splits, ImageSplits) else None
    if images is None and (config.shift or ood is not None):
        raise ValueError(
            f"{splits.name} holds no images; shift and ood are for images. Leave them out."
        )
    states = None if checkpoints is None else CheckpointsOfRanks(checkpoints, ranks)
    work = _Evaluation(
        splits, likelihood, batch_size, torch.device(device), progress, states, ranks
    )
    config.check(splits)
    ood_images = ood if isinstance(ood, OutOfDistributionImages) else None
    if isinstance(ood, ImageData) and images is not None:
        ood_images = out_of_distribution_images(ood, images)
    record: dict[str, Any] = {
        "format": "marglik.evaluation",
        "version": 1,
        "data": splits.name,
        "likelihood": likelihood,
        "classes": None if splits.classes is None else list(splits.classes),
        **work.sizes(),
        "predictives": work.finished,
        "ood": None,
        "shift": None,
        "uncertain": None,
    }
    for label, predict in predictives.items():
        if label in work.finished:  # by the process that was interrupted
            continue
        _logger.info("evaluating %s on %s", label, splits.name)
        # The first call computes eigenvectors; the time of the test set must not include that.
        predict(work.two_inputs())
        prediction, targets = work.predict("test", predict)
        found = _prefixed("test", compute_metrics(prediction, targets, likelihood))
        if splits.validation is not None:
            of_validation = compute_metrics(*work.predict("validation", predict), likelihood)
            found |= _prefixed("validation", of_validation)
        entry: dict[str, Any] = work.intervals(label, prediction, targets)
        entry["reliability"] = reliability_curve(prediction, targets, likelihood)
        if likelihood == "classification":
            entry["risk_coverage"] = risk_coverage_curve(prediction.mean, targets)
            entry["classes"] = errors_by_class(prediction.mean, targets)
        if likelihood != "regression":
            entry["entropy"] = _entropies(prediction, likelihood)
        if ood_images is not None:
            of_ood = work.predict_images("ood", ood_images.images, predict)
            inside, outside = (_score(p, config.ood_score) for p in (prediction, of_ood))
            found |= out_of_distribution_metrics(inside, outside)
            entry["roc"] = roc_curve(inside, outside)
            ends_of_ood = out_of_distribution_intervals(inside, outside).items()
            entry["intervals"] |= {name: list(ends) for name, ends in ends_of_ood}
            entry["entropy"]["ood"] = _entropies(of_ood, likelihood)["test"]
        if config.shift:
            found |= work.shifted(predict)
        if images is not None and likelihood == "classification" and config.uncertain:
            examples = _most_uncertain(prediction, images, config.uncertain)
            work.uncertain = {"predictive": label, "examples": examples}
        work.finish(label, {"metrics": found, **entry, "seconds": work.seconds["test"]})
    record["uncertain"] = work.uncertain
    if ood_images is not None:
        record["ood"] = {
            "name": ood_images.name,
            "num_examples": len(ood_images.images),
            "score": config.ood_score,
            "note": ood_images.note,
            "sha256": sha256_of_tensors([ood_images.images]),
        }
    if scores is not None:
        scores |= work.scores
    if config.shift:
        record["shift"] = {"kinds": list(CORRUPTIONS), "severities": list(SEVERITIES)}
    return record | environment(work.device)


def evaluate_network(
    map_: Predictive,
    laplace: Posterior | None,
    configs: Sequence[PredictiveConfig],
    splits: Splits,
    likelihood: Likelihood,
    config: EvaluationConfig,
    *,
    of: str,
    seed: int = 0,
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
        config: what is evaluated besides the test set.
        of: SHA-256 sum that identifies the posterior or checkpoint.
        seed: seed of sampling, the same for each way of predicting.
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
        if not one.tolerance:  # evaluations of older versions lack the key
            del plain["variance_tolerance"]
        plain["calibration"] = None if found is None else asdict(found.calibration)
        how[label] = plain | {"seed": seed}
    record = evaluate(predictives, splits, likelihood, config, **options)
    for label, entry in record["predictives"].items():
        entry["options"] = how[label]
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
        options = former.get("options", {})
        if label.startswith("Laplace") and options and "calibration" not in options:
            label += ", uncalibrated"  # older versions had no calibration, and no such label
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


class _Evaluation:
    """The data, how to go through it, and the results so far, which are the state to resume from.

    Predictives are evaluated one after the other, and `finish` ends each. What belongs to the
    current one alone (seconds, predictions of each part of the data, metrics of shifts) is dropped
    then; what belongs to all (entries, images, scores) is kept. A state may be saved after any
    batch: it has the predictions so far, so that a process that resumes repeats none of them, and
    draws no random numbers twice.
    """

    def __init__(
        self,
        splits: Splits,
        likelihood: Likelihood,
        batch_size: int,
        device: torch.device,
        progress: bool,
        checkpoints: CheckpointsOfRanks | None,
        ranks: Ranks,
    ) -> None:
        self.splits = splits
        self.likelihood: Likelihood = likelihood
        self.batch_size = batch_size
        self.device = device
        self.progress = progress
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._shard = Shard(ranks.rank, ranks.size)
        state = checkpoints.load() if checkpoints is not None and checkpoints.exists() else {}
        self.finished: dict[str, Any] = state.get("finished", {})
        """Name of a predictive -> its entry in the record."""
        self.uncertain: dict[str, Any] | None = state.get("uncertain")
        """The images on which the latest of them is most uncertain."""
        self.scores: dict[str, dict[str, Tensor]] = state.get("scores", {})
        """Name of a predictive -> metric -> its value for each test example, (N,). The others are
        compared with the first."""
        # Of the current predictive, by part of the data:
        self.seconds: dict[str, float] = state.get("seconds", {})
        self._batches: dict[str, list[tuple[Prediction, Tensor]]] = {
            part: [(Prediction(*values), y) for *values, y in batches]
            for part, batches in state.get("batches", {}).items()
        }
        self._shifted: dict[str, float] = state.get("shifted", {})

    def finish(self, label: str, entry: dict[str, Any]) -> None:
        """Store the entry of a predictive, and forget what belongs to it alone."""
        self.finished[label] = entry
        self.seconds, self._batches, self._shifted = {}, {}, {}

    def _save(self) -> None:
        assert self._checkpoints is not None
        batches = {
            part: [(p.mean, p.aleatoric, p.epistemic, y) for p, y in found]
            for part, found in self._batches.items()
        }
        self._checkpoints.save(
            {
                "finished": self.finished,
                "uncertain": self.uncertain,
                "scores": self.scores,
                "seconds": self.seconds,
                "batches": batches,
                "shifted": self._shifted,
            }
        )

    def _predict_all(
        self, part: str, predict: Predictive, batches: Any, **options: Any
    ) -> tuple[Prediction, Tensor]:
        """Predictions and targets of a part of the data; batches that a state holds are skipped."""
        kept = self._batches.setdefault(part, [])
        # Seconds add up over the processes that have worked on this part.
        before, start = self.seconds.get(part, 0.0), time.perf_counter()

        def keep(prediction: Prediction, y: Tensor) -> None:
            kept.append((prediction, y))
            self.seconds[part] = before + time.perf_counter() - start
            if self._checkpoints is not None and self._checkpoints.is_due:
                self._save()

        return predict_all(
            predict,
            batches,
            earlier=[*kept],  # a copy, since `keep` appends to the list
            on_batch=keep,
            progress=self.progress,
            ranks=self._ranks,
            **options,
        )

    def predict(
        self, split: Literal["validation", "test"], predict: Predictive
    ) -> tuple[Prediction, Tensor]:
        batches = split_batches(
            self.splits, split, self.batch_size, device=self.device, shard=self._shard
        )
        return self._predict_all(split, predict, batches, targets=self.splits.targets)

    def sizes(self) -> dict[str, int | None]:
        """The numbers of test examples and, for sequences, of positions that count."""
        if isinstance(self.splits, ImageSplits):
            return {"num_test": len(self.splits.test), "num_positions": None}
        y = self.splits.test[1]
        several = self.likelihood == "classification" and y.dim() > 1
        return {"num_test": len(y), "num_positions": self.splits.num_terms if several else None}

    def intervals(self, label: str, prediction: Prediction, targets: Tensor) -> dict[str, Any]:
        """Intervals of a predictive's metrics, and of the differences from the first predictive's.

        Empty for sequences with different numbers of positions that count: the rows of a prediction
        do not say which sequence they belong to.
        """
        positions = self._positions(len(targets))
        if positions is None:
            return {"intervals": {}}
        of_rows = example_scores(prediction, targets, self.likelihood)
        scores = {name: of_examples(values, positions).cpu() for name, values in of_rows.items()}
        plain = {name: list(ends) for name, ends in intervals(scores).items()}
        if self.likelihood == "classification":
            confidence, correct = prediction.mean.amax(dim=1), of_rows["cls/accuracy"].bool()
            if ends := risk_interval(confidence, correct, positions):
                plain["cls/AURC"] = list(ends)
        found: dict[str, Any] = {"intervals": _prefixed("test", plain)}
        self.scores[label] = scores
        of = next(iter(self.scores))
        if of != label:
            found["against"] = {"predictive": of, "differences": compared(scores, self.scores[of])}
        return found

    def _positions(self, rows: int) -> int | None:
        """Rows of predictions per test example; None if the number differs between examples."""
        if isinstance(self.splits, ImageSplits):
            return 1
        y = self.splits.test[1]
        counted = counted_terms(y, self.likelihood)
        alike = rows % len(y) == 0 and (counted is None or bool(counted.all()))
        return rows // len(y) if alike else None

    def two_inputs(self) -> Any:
        return next(iter(split_batches(self.splits, "test", 2, device=self.device)))[0]

    def predict_images(self, part: str, images: Tensor, predict: Predictive) -> Prediction:
        assert isinstance(self.splits, ImageSplits)
        unlabelled = ImageSet(images, torch.zeros(len(images), dtype=torch.int64))
        batches = ImageBatches(
            unlabelled,
            self.splits.mean,
            self.splits.std,
            self.batch_size,
            device=self.device,
            shard=self._shard,
        )
        return self._predict_all(part, predict, batches)[0]

    def shifted(self, predict: Predictive) -> dict[str, float]:
        """The metrics on the corrupted test sets."""
        assert isinstance(self.splits, ImageSplits)
        test = self.splits.test
        shifts = [*product(CORRUPTIONS, SEVERITIES)]
        for kind, severity in each_batch(shifts, "Shifted test sets", self.progress, unit="set"):
            part = f"shift/{kind}/{severity}"
            if any(name.startswith(f"{part}/") for name in self._shifted):
                continue
            _logger.info("evaluating on %s of severity %d", kind, severity)
            images = corrupt(test.images, kind, severity)
            prediction = self.predict_images(part, images, predict)
            found = compute_metrics(prediction, test.labels, self.likelihood)
            self._shifted |= _prefixed(part, found)
            del self._batches[part]  # else the state would grow to twenty times the test set's
        return self._shifted


def compared(
    scores: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """`differences` of test metrics as plain data, under keys such as ``test/cls/NLL``."""
    found = differences(scores, reference).items()
    return _prefixed("test", {name: list(values) for name, values in found})


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{key}": value for key, value in values.items()}


def _score(prediction: Prediction, kind: Score) -> Tensor:
    score = prediction.entropy if kind == "entropy" else prediction.epistemic
    return score if score.dim() == 1 else score.sum(1)


def _entropies(prediction: Prediction, likelihood: Likelihood) -> dict[str, list]:
    outputs = prediction.mean.shape[1] if likelihood == "classification" else 2
    largest = math.log(outputs)
    # Rounding may put an entropy above its bound, where the histogram would not count it.
    entropy = prediction.entropy.flatten().double().clamp(0, largest)
    counts, edges = torch.histogram(entropy, ENTROPY_BINS, range=(0.0, largest))
    return {"edges": edges.tolist(), "test": [int(count) for count in counts]}


def _most_uncertain(
    prediction: Prediction, splits: ImageSplits, number: int
) -> list[dict[str, Any]]:
    entropy = prediction.entropy
    indices = entropy.argsort(descending=True, stable=True)[:number].tolist()
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
