"""One training run from data to results: what `marglik train` does."""

import logging
import re
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.files import parse_json, sha256_of_tensors
from kfac_backend.options import Likelihood
from marglik.data import DataSource, ImageData, ImageSplits, Splits
from marglik.data.images.out_of_distribution import out_of_distribution_images
from marglik.data.record import data_record, tensors_in
from marglik.data.splits import hold_out
from marglik.posterior.posterior import Posterior
from marglik.posterior.posterior_file import save_posterior
from marglik.posterior.prior import PriorGroups, precision_to_weight_decay
from marglik.prediction.evaluation_record import compared, data_uri
from marglik.prediction.predictive import PredictiveConfig
from marglik.prediction.suspicious_labels import suspicious_labels
from marglik.runs.build import build_fabric, build_from_spec, check_same_on_ranks
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.model_check import check_model
from marglik.runs.training_setup import TrainingSetup
from marglik.storage.checkpoint import Checkpoints, check_same_run
from marglik.storage.provenance import Provenance, environment, versions
from marglik.storage.record_file import as_json, read_posterior
from marglik.storage.run_folder import CHECKPOINT, EVALUATION, LOG, RESULTS, RunFolder, RunLog
from marglik.training.loop import OnlineResult
from marglik.training.optimizers import OptimizerConfig
from marglik.training.ranks import ranks_of

__all__ = ["train"]

_logger = logging.getLogger(__name__)

NOT_OF_THE_RESULT = (
    "output", "overwrite", "resume", "accelerator", "devices", "rank_timeout", "progress",
)  # fmt: skip
"""Options of the run that do not affect its results, and may differ when it is resumed."""
MOST_SUSPICIOUS = 10
"""Number of training labels that the results list at most."""
LARGEST_PICTURE = 48
"""Height and width (pixels) of their pictures at most: a few kilobytes each."""


def train(
    model: nn.Module,
    data: DataSource,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    prior: PriorConfig = PriorConfig(),  # noqa: B008
    curvature: CurvatureConfig = CurvatureConfig(),  # noqa: B008
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    ood: ImageData | None = None,
    likelihood: Likelihood = "classification",
    run: RunConfig = RunConfig(),  # noqa: B008
    provenance: Provenance = Provenance(),  # noqa: B008
) -> dict[str, Any]:
    """Train a network and its weight decays together: on images, tokens, graphs or tensors.

    A sequence is one example with a label, and so a loss term, at each position. The objective sums
    the loss over positions and averages it over examples; metrics are means over positions, so that
    "cls/NLL" is in nats per token.

    Where several processes share the work (``run.devices``, or torchrun), the first one writes the
    files. Returns the content of ``results.json``, and the folder under "output".

    Args:
        model: class of the network, whose outputs are logits, or means for regression. Any
            importable class will do, such as marglik.models.WideResNetFixup, marglik.models.LeNet,
            marglik.models.MLP, or my_file.MyNet.
        data: class of the data: images (such as marglik.data.Digits), any tensors
            (marglik.data.TensorFile), or an importable class of your own.
        optimizer: the network's optimiser.
        prior: the prior and its updates.
        curvature: the curvature pass.
        predictive: the Laplace predictive of the final evaluation.
        ood: class of out-of-distribution images, on which the predictives should be uncertain.
        likelihood: distribution of the targets: classification; regression with Gaussian noise,
            which is learned; or bernoulli for independent yes-or-no outputs.
        run: everything else.
        provenance: the options, and how model and data are built; saved with the posterior, which
            can then be loaded without them.

    Raises:
        ValueError: options, data or model that do not fit together, or a resume with other options
            than before; raised before any training.
        NotImplementedError: a layer without a K-FAC rule; raised before any training.
        FileExistsError: the output folder holds a run already, or other files.
        OSError: the output folder cannot be written to.
        FloatingPointError: training diverged.
        RankError: another process has failed or is gone, or was started with other options.
    """
    start = time.perf_counter()
    fabric = build_fabric(run.accelerator, run.precision, run.devices, run.rank_timeout)
    ranks = ranks_of(fabric)
    leads = ranks.rank == 0  # it alone writes files and shows bars
    run = replace(run, progress=run.progress and leads)

    # Step 1: all that can be wrong with options, data and network is found before any work.
    if run.baseline and prior.method == "fixed":
        raise ValueError(
            "baseline trains with the initial weight decay, and so does prior.method fixed; "
            "drop one of them."
        )
    if run.members > 1 and provenance.model is None:
        raise ValueError(
            f"members={run.members}: the members are built from provenance.model, which is None. "
            "Pass Provenance(model={'class_path': ..., 'init_args': {...}})."
        )
    splits = data.load()
    if not isinstance(splits, ImageSplits) and (run.augment or run.channels_last or ood):
        raise ValueError(
            f"{splits.name} holds no images; augment, channels_last and ood are for images. Leave "
            "them out."
        )
    ood_images = None if ood is None else out_of_distribution_images(ood, splits)
    model = fabric.to_device(model)
    check_model(model, splits, curvature, likelihood, predictive)
    PriorGroups.from_model(model, prior.structure)
    given = len(tensors_in(splits.train)[-1])
    kept = torch.arange(given)  # positions of the examples to train on, among those of the data
    if run.held_out and predictive.is_calibrated and splits.validation is None:
        splits, kept = hold_out(splits, run.held_out, run.seed)
    held_out = given - len(kept)
    setup = TrainingSetup(
        splits, held_out, optimizer, prior, curvature, predictive, ood_images, run,
        fabric, ranks, likelihood,
    )  # fmt: skip
    setup.check()
    identity = _identity(setup, model, provenance)
    check_same_on_ranks(identity | {"versions": versions()}, ranks)
    initial_model = deepcopy(model) if run.baseline else None  # the baseline's starting point

    # Step 2: the folder, which may hold this run, or an earlier part of it.
    folder = RunFolder(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', splits.name.lower())}")
    made_with = environment(fabric.device) | ({"ranks": ranks.size} if ranks.size > 1 else {})
    states = {
        name: Checkpoints(
            folder.path / CHECKPOINT / name, run=identity, made_with=made_with, ranks=ranks
        )
        for name in ("learned", "initial", *(f"member_{k}" for k in range(1, run.members)))
    }
    results = _finished(folder, identity) if run.resume and leads else None
    results = ranks.gather(results, "opening the output folder")[0]
    if results is not None:
        if leads:
            folder.discard(CHECKPOINT)  # of a run that was killed in its very last moment
        return results | {"output": str(folder.path)}
    goes_on = run.resume and states["learned"].exists()
    if goes_on:
        states["learned"].load()  # raises before anything is changed
    log = None
    if leads:
        if run.resume and not goes_on and folder.read(LOG):
            raise FileNotFoundError(
                f"{folder.path} holds a run that was cut off, but no checkpoint to continue from. "
                "Start again: --overwrite instead of --resume."
            )
        folder.begin("train", provenance, overwrite=run.overwrite, resume=goes_on)
        log = RunLog(folder)

    # Step 3: train network and weight decays, calibrate, save, evaluate. What was trained before
    # comes from its last checkpoint; all else is done again, to the same end.
    if held_out:
        _logger.info("%d training examples are held out for calibration", held_out)
    ready = time.perf_counter()
    learned = setup.train(model, prior, states["learned"], log)
    trained = time.perf_counter()
    of_training = _results_of(learned, prior)  # before the posterior sees what is held out
    setup.calibrate(learned.laplace)
    calibrated = time.perf_counter()
    ensemble = None
    if run.members > 1:
        ensemble = setup.ensemble(model, learned, lambda: _another(provenance), states)
    if leads:
        if ensemble is not None:
            ensemble.save(folder.path)
        record = data_record(splits, provenance.data)
        save_posterior(
            learned.laplace, folder.path, model=provenance.model, data=record, frozen=True
        )
    saved = time.perf_counter()
    found, scores = setup.evaluate(model, learned.laplace, ensemble)
    # Training counts in full, though resumed; the rest is this process's.
    beside = {
        "start": ready - start,
        "calibration": calibrated - trained,
        "members": 0.0 if ensemble is None else ensemble.seconds - learned.seconds,
        "evaluation": time.perf_counter() - saved,
    }
    results = identity | of_training | environment(fabric.device)
    results |= _metrics_of("fixed" if prior.method == "fixed" else "learned", found)
    results |= {
        "held_out": held_out,
        "calibration": learned.laplace.calibrations.get(predictive.label),
        "num_positions": found["num_positions"],
        "suspicious_labels": _suspicious_labels(learned, splits, kept),
        "seconds": learned.seconds + sum(beside.values()),
        "seconds_beside": beside,
        "complete": not run.baseline,
    }
    if leads:
        folder.write(EVALUATION, as_json(found))
        folder.write(RESULTS, as_json(results))  # now, since the baseline may fail

    # Step 4: the same from the same start, with the initial weight decay kept.
    if initial_model is not None:
        _logger.info("second training, with the initial weight decay")
        initial = setup.train(initial_model, replace(prior, method="fixed"), states["initial"])
        trained = time.perf_counter()
        setup.calibrate(initial.laplace)
        found, others = setup.evaluate(initial_model, initial.laplace)
        for kind, of_baseline in _metrics_of("initial", found).items():
            results[kind] |= of_baseline
        results["differences"] = {
            name: compared(scores[name], of) for name, of in others.items() if name in scores
        }
        beside["baseline"] = initial.seconds + time.perf_counter() - trained
        results["seconds"] = learned.seconds + sum(beside.values())
        results["complete"] = True
        if leads:
            folder.write(RESULTS, as_json(results))
    if leads:
        folder.discard(CHECKPOINT)
    return results | {"output": str(folder.path)}


def _identity(setup: TrainingSetup, model: nn.Module, provenance: Provenance) -> dict[str, Any]:
    """What identifies a run, as plain data: data, network, options.

    SHA-256 sums stand for all inputs, labels and initial parameters. A checkpoint is only resumed
    if its run has the same identity.
    """
    splits, ood = setup.splits, setup.ood_images
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    tensors = {name: tensors_in(part) for name, part in parts.items() if part is not None}
    options = setup.options()
    of_run = {k: v for k, v in options["run"].items() if k not in NOT_OF_THE_RESULT}
    return {
        "data": splits.name,
        "examples": {name: len(found[-1]) for name, found in tensors.items()},
        "normalisation": [splits.mean, splits.std] if isinstance(splits, ImageSplits) else None,
        "ood": None if ood is None else ood.name,
        "model": type(model).__name__,
        "model_options": (provenance.model or {}).get("init_args"),
        "likelihood": setup.likelihood,
        "config": options | {"run": of_run},
        "sums": {
            "examples": sha256_of_tensors(t for found in tensors.values() for t in found),
            "ood": None if ood is None else sha256_of_tensors([ood.images]),
            "initial_parameters": sha256_of_tensors(model.state_dict().values()),
        },
    }


def _finished(folder: RunFolder, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The results in a folder, verified with all other files; None if there is still work to do.

    Raises:
        FileNotFoundError: the posterior is missing.
        ValueError: the results are of another run, or a file of the run is damaged.
    """
    results = parse_json(folder.read(RESULTS) or b"null")
    if results is None:
        return None
    check_same_run(identity, {key: results.get(key) for key in identity}, folder.path)
    if not results["complete"]:
        return None
    folder.check()
    read_posterior(folder.path)
    return results


def _another(provenance: Provenance) -> nn.Module:
    """A network of the same class and options as the first one, with other initial parameters."""
    return build_from_spec(nn.Module, provenance.model, named=_class_paths(provenance.model))


def _class_paths(spec: Any) -> list[str]:
    """All classes that a specification names; the user did, on the command line."""
    inner = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else []
    own = [spec["class_path"]] if isinstance(spec, dict) and "class_path" in spec else []
    return own + [path for value in inner for path in _class_paths(value)]


def _results_of(learned: OnlineResult, prior: PriorConfig) -> dict[str, Any]:
    """The part of the results that training found: evidence, noise and weight decays."""
    laplace = learned.laplace
    updates = [record for record in learned.records if record["kind"] == "update"]
    is_regression = laplace.likelihood == "regression"
    return {
        "num_data": laplace.n_data,
        "evidence": {
            "first": updates[0]["evidence_before"] if updates else learned.evidence,
            "kept": learned.evidence,
            "epoch": learned.epoch,
        },
        "sigma_noise": float(laplace.sigma_noise) if is_regression else None,
        "weight_decay": _weight_decays(laplace, prior),
    }


def _suspicious_labels(learned: OnlineResult, splits: Splits, kept: Tensor) -> dict[str, Any]:
    """The training labels that look most wrong; where none can be judged, why.

    ``kept`` are the positions (N,) of the examples that the network was trained on, in the data.
    """
    y = tensors_in(splits.train)[-1].cpu()
    try:
        assert learned.training_probabilities is not None
        p = learned.training_probabilities.mean().cpu()
    except ValueError as error:
        return {"unknown": str(error)}
    ignored = splits.targets.ignore_index
    counts = torch.arange(len(y)) if ignored is None else (y != ignored).nonzero().flatten()
    found = suspicious_labels(y[counts], p[counts])
    examples = []
    for i in range(min(found.number, MOST_SUSPICIOUS)):
        here = int(counts[found.index[i]])
        names = [
            str(int(k)) if splits.classes is None else splits.classes[int(k)]
            for k in (found.label[i], found.predicted[i])
        ]
        example = {"index": int(kept[here]), "label": names[0], "predicted": names[1]}
        examples.append(example | {"score": found.score[i].item()})
        if isinstance(splits, ImageSplits):
            examples[-1]["image"] = data_uri(splits.train.images[here], LARGEST_PICTURE)
    return {
        "judged": len(found.index),
        "number": found.number,
        "agreement": found.agreement,
        "examples": examples,
    }


def _weight_decays(laplace: Posterior, prior: PriorConfig) -> dict[str, dict[str, float]]:
    """Parameter name -> initial and learned weight decay, numbers of effective and all entries."""
    gamma = laplace.effective_parameters()
    trainable = {n: p for n, p in laplace.model.named_parameters() if p.requires_grad}
    delta = laplace.prior_precision.expand(len(trainable))
    learned = precision_to_weight_decay(delta, laplace.n_data, prior.temperature)
    return {
        name: {
            "initial": prior.weight_decay,
            "learned": learned[i].item(),
            "effective_parameters": gamma[i].item(),
            "parameters": p.numel(),
        }
        for i, (name, p) in enumerate(trainable.items())
    }


def _metrics_of(label: str, evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics and intervals of each predictive, under names such as "learned, MAP"."""
    predictives = evaluation["predictives"].items()
    return {
        kind: {f"{label}, {name}": predictive[kind] for name, predictive in predictives}
        for kind in ("metrics", "intervals")
    }
