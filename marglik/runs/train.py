"""One training run from data to results: what `marglik train` does."""

import logging
import re
import time
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from kfac_backend.options import Likelihood
from marglik.data import DataSource, ImageData
from marglik.data.images.out_of_distribution import out_of_distribution_images
from marglik.data.record import data_record, tensors_in
from marglik.data.splits import hold_out
from marglik.posterior.posterior_file import save_posterior
from marglik.posterior.prior import PriorGroups
from marglik.prediction.evaluation_record import compared
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.build import build_fabric, build_from_spec
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.model_check import check_image_options, check_model
from marglik.runs.results import (
    check_same_on_ranks,
    metrics_of,
    results_of,
    run_identity,
    saved_results,
)
from marglik.runs.training_setup import TrainingSetup
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.provenance import Provenance, environment, versions
from marglik.storage.record_file import as_json
from marglik.storage.run_folder import CHECKPOINT, EVALUATION, LOG, RESULTS, RunFolder, RunLog
from marglik.training.optimizers import OptimizerConfig
from marglik.training.ranks import ranks_of

__all__ = ["train"]

_logger = logging.getLogger(__name__)

STATES = ("learned", "learned_scores", "baseline")
"""The names of a run's checkpoints, in the order in which they are written."""


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
    check_image_options(
        splits,
        augment=run.augment,
        channels_last=bool(run.channels_last),
        ood=ood is not None,
    )
    ood_images = None if ood is None else out_of_distribution_images(ood, splits)
    model = fabric.to_device(model)
    check_model(model, splits, curvature, likelihood, predictive)
    PriorGroups.from_model(model, prior.structure)
    held_out = 0
    if run.held_out and predictive.is_calibrated and splits.validation is None:
        splits = hold_out(splits, run.held_out, run.seed)
        held_out = len(tensors_in(splits.validation)[-1])
    initial_model = deepcopy(model) if run.baseline else None  # the baseline's starting point
    setup = TrainingSetup(
        splits, held_out, optimizer, prior, curvature, predictive, ood_images, run,
        fabric, ranks, likelihood,
    )  # fmt: skip
    setup.check()
    identity = run_identity(model, splits, ood_images, setup.options(), provenance)
    identity["likelihood"] = likelihood
    check_same_on_ranks(identity | {"versions": versions()}, ranks)

    # Step 2: the folder, which may hold an earlier part of this run.
    folder = RunFolder(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', splits.name.lower())}")
    made_with = environment(fabric.device) | ({"ranks": ranks.size} if ranks.size > 1 else {})
    states = {
        name: Checkpoints(folder.path / CHECKPOINT / name, run=identity, made_with=made_with)
        for name in (*STATES, *(f"member_{k}" for k in range(1, run.members)))
    }
    with ExitStack() as lock:
        results: dict[str, Any] | None = None
        log: RunLog | None = None
        if leads:
            # Held to the end of the run, hence the ExitStack.
            lock.enter_context(folder.locked())
            results, goes_on = _what_is_there(folder, states, identity, run.resume)
            if results is None:
                folder.begin("train", provenance, overwrite=run.overwrite, resume=goes_on)
                log = RunLog(folder)
        results = ranks.gather(results, "opening the output folder")[0]

        # Step 3: train network and weight decays, calibrate, save, evaluate.
        if results is None:
            if held_out:
                _logger.info("%d training examples are held out for calibration", held_out)
            ready = time.perf_counter()
            learned = setup.train(model, prior, states["learned"], log)
            trained = time.perf_counter()
            of_training = results_of(learned, prior)  # before the posterior sees what is held out
            setup.calibrate(learned.laplace)
            calibrated = time.perf_counter()
            ensemble = None
            if run.members > 1:
                make_model = partial(_another, provenance)
                ensemble = setup.ensemble(model, learned, make_model, states)
            of_all = learned.seconds if ensemble is None else ensemble.seconds
            joined = time.perf_counter()
            if leads:
                if ensemble is not None:
                    ensemble.save(folder.path)
                record = data_record(splits, provenance.data)
                save_posterior(
                    learned.laplace, folder.path, model=provenance.model, data=record, frozen=True
                )
            saved = time.perf_counter()
            scores: dict[str, dict[str, Tensor]] = {}
            found = setup.evaluate(model, learned.laplace, scores, ensemble)
            evaluated = time.perf_counter()
            results = (
                identity
                | of_training
                | metrics_of("fixed" if prior.method == "fixed" else "learned", found)
                | environment(fabric.device)
                | {
                    "held_out": held_out,
                    "calibration": learned.laplace.calibrations.get(predictive.label),
                    "num_positions": found["num_positions"],
                    # Training counts in full, though resumed; the rest is this process's.
                    "seconds": of_all + evaluated - joined + calibrated - trained + ready - start,
                    "seconds_beside": {
                        "start": ready - start,
                        "calibration": calibrated - trained,
                        "members": of_all - learned.seconds,
                        "evaluation": evaluated - saved,
                    },
                    "complete": initial_model is None,
                }
            )
            if leads:
                if initial_model is not None:
                    # The baseline is compared on the same examples, perhaps by another process.
                    states["learned_scores"].save({"scores": scores})
                folder.write(EVALUATION, as_json(found))
                folder.write(RESULTS, as_json(results))  # now, since the baseline may fail

        # Step 4: the same from the same start, with the initial weight decay kept.
        if not results["complete"]:
            assert initial_model is not None
            _logger.info("second training, with the initial weight decay")
            initial = setup.train(initial_model, replace(prior, method="fixed"), states["baseline"])
            trained = time.perf_counter()
            setup.calibrate(initial.laplace)
            scores = {}
            found = setup.evaluate(initial_model, initial.laplace, scores)
            for kind, of_baseline in metrics_of("initial", found).items():
                results[kind] |= of_baseline
            seconds = initial.seconds + time.perf_counter() - trained
            results["seconds"] = float(results["seconds"]) + seconds
            results["seconds_beside"]["baseline"] = seconds
            results["complete"] = True
            if leads:
                learned_scores = states["learned_scores"].load()["scores"]
                results["differences"] = {
                    name: compared(learned_scores[name], of)
                    for name, of in scores.items()
                    if name in learned_scores
                }
                folder.write(RESULTS, as_json(results))
        if leads:
            folder.discard(CHECKPOINT)
    return results | {"output": str(folder.path)}


def _another(provenance: Provenance) -> nn.Module:
    """A network of the same class and options as the first one, with other initial parameters."""
    return build_from_spec(nn.Module, provenance.model, named=_class_paths(provenance.model))


def _class_paths(spec: Any) -> list[str]:
    """All classes that a specification names; the user did, on the command line."""
    inner = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else []
    own = [spec["class_path"]] if isinstance(spec, dict) and "class_path" in spec else []
    return own + [path for value in inner for path in _class_paths(value)]


def _what_is_there(
    folder: RunFolder, states: dict[str, Checkpoints], identity: dict[str, Any], resume: bool
) -> tuple[dict[str, Any] | None, bool]:
    """The results of the run to resume, if it has any, and whether there is a checkpoint.

    Raises:
        FileNotFoundError: the run to resume has a log but no checkpoint.
        ValueError: results or checkpoints are of another run, or were altered.
    """
    results = saved_results(folder, identity) if resume else None
    goes_on = resume and states["learned"].exists()
    for checkpoints in states.values():
        if goes_on and checkpoints.exists():
            checkpoints.check()  # raises before anything is changed
    if resume and results is None and not goes_on and folder.read(LOG):
        raise FileNotFoundError(
            f"{folder.path} holds a run that was cut off, but no checkpoint to continue from. "
            "Start again: --overwrite instead of --resume."
        )
    return results, goes_on
