"""What `marglik evaluate` does: the metrics of a saved posterior, or of a bare checkpoint."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kfac_backend.files import sha256
from kfac_backend.options import Likelihood, check_positive
from kfac_backend.ranks import Ranks
from marglik import data as sources
from marglik import models
from marglik.data import DataSource, ImageData, Splits
from marglik.data.batches import Shard, split_batches
from marglik.data.record import as_trained, is_held_out
from marglik.posterior.posterior import Posterior
from marglik.posterior.posterior_file import load_posterior
from marglik.posterior.pretrained import load_pretrained
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.evaluation_record import evaluate_network
from marglik.prediction.predictive import (
    PredictiveConfig,
    PredictiveMethod,
    map_predictive,
)
from marglik.runs.build import build_from_spec, check_same_on_ranks, join_ranks
from marglik.runs.config import Accelerator, check_devices, check_seed
from marglik.runs.model_check import check_model
from marglik.storage.provenance import versions
from marglik.storage.record_file import ENSEMBLE, POSTERIOR, as_json, read_posterior
from marglik.storage.run_folder import EVALUATION, RunFolder

__all__ = ["evaluate_run"]

_logger = logging.getLogger(__name__)


def evaluate_run(
    path: str,
    model: str | nn.Module | None = None,
    data: str | DataSource | None = None,
    likelihood: Likelihood | None = None,
    sigma_noise: float | None = None,
    methods: list[PredictiveMethod] | None = None,
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    shift: bool = False,
    ood: ImageData | None = None,
    output: str | None = None,
    accelerator: Accelerator = "auto",
    devices: int | None = None,
    rank_timeout: float = 600.0,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluate a network at its parameters (MAP) and under its posterior.

    A predictive whose calibration is not saved with the posterior is calibrated on the data's
    validation set, if the network was not trained on it.

    Returns the content of ``evaluation.json``, which replaces that of an earlier evaluation in the
    folder; its folder under "output"; and the new calibrations under "calibrated".

    Args:
        path: folder that marglik train or marglik fit has written, or a checkpoint file. A
            checkpoint has no posterior, and needs --model and --data.
        model: class of the network. It must be named if it is your own, as the folder alone may not
            choose what code runs; without options, it gets those that the folder has.
        data: class of the data whose test split is evaluated; null takes the training data's own.
        likelihood: likelihood of a checkpoint, classification if null; a folder knows its own.
        sigma_noise: standard deviation of the noise of a regression checkpoint, 1 if null; a folder
            knows its own.
        methods: list of predictive methods to evaluate one after the other; [] evaluates the MAP
            alone, null predictive.method alone.
        predictive: how the posterior predicts.
        shift: whether to evaluate on corrupted test images as well: noise, blur, lower contrast and
            JPEG artefacts, at five severities each. This is twenty times the work.
        ood: class of out-of-distribution images, on which the predictives should be uncertain.
        output: folder to write evaluation.json and the report to; null takes the folder itself, or
            runs/CHECKPOINT_map for a checkpoint. Must be given for other data than the folder's
            own.
        accelerator: cpu or cuda; auto takes cuda if it is available.
        devices: number of processes that share the work, one per GPU, or all on the CPU.
        rank_timeout: largest number of seconds that a process waits for another, before all end.
        seed: seed of the random numbers of sampling.
        progress: whether to show progress bars on a terminal, and lines of text elsewhere.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: data, model or posterior that do not fit together; files that were altered.
        RankError: another process has failed or is gone, or was started with other options.
    """
    check_devices(devices, rank_timeout)
    check_seed(seed)
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist; pass a run's folder or a checkpoint.")
    if sigma_noise is not None:
        check_positive("sigma_noise", sigma_noise)
    device, ranks = join_ranks(accelerator, devices, rank_timeout)
    progress = progress and ranks.rank == 0
    ensemble = None
    if Path(path).is_dir():
        # Without a posterior, `read_posterior` raises an error that says how to make one.
        record = RunFolder(path).posterior() or read_posterior(path)
        of = sha256((Path(path) / POSTERIOR).read_bytes())
        if sigma_noise is not None:
            raise ValueError(f"{path} knows its noise; leave --sigma_noise out.")
        if likelihood not in (None, record["likelihood"]):
            raise ValueError(
                f"{path} is for likelihood {record['likelihood']!r}, not {likelihood!r}; leave "
                "--likelihood out."
            )
        model = _object(path, model, record, "model", nn.Module)
        data = _object(path, data, record["data"] or {}, "source", DataSource)
        assert isinstance(model, nn.Module) and isinstance(data, DataSource)
        splits = as_trained(data.load(), record["data"])
        if output is None and record["data"] and splits.name != record["data"]["name"]:
            raise ValueError(
                f"{splits.name} is not what {path} was trained on "
                f"({record['data']['name']}); pass --output, so that its numbers get a folder "
                "of their own."
            )
        laplace = load_posterior(path, model, device)
        if (Path(path) / ENSEMBLE).exists():
            ensemble = Ensemble.load(path, model)
        likelihood = record["likelihood"]
        map_ = map_predictive(model, record["likelihood"], laplace.sigma_noise)
        folder = RunFolder(output or path)
    else:
        if model is None or data is None:
            raise ValueError(f"{path} is a checkpoint; it needs --model and --data.")
        model = _object(path, model, {}, "model", nn.Module)
        data = _object(path, data, {}, "source", DataSource)
        assert isinstance(model, nn.Module) and isinstance(data, DataSource)
        load_pretrained(model, path)
        model, splits, laplace, record = model.to(device), data.load(), None, None
        likelihood = likelihood or "classification"
        map_ = map_predictive(model, likelihood, sigma_noise or 1.0)
        of = sha256(Path(path).read_bytes() + repr(sigma_noise).encode())
        folder = RunFolder(output or f"runs/{Path(path).stem}_map")
    configs = []
    if laplace is not None:
        asked = [predictive.method] if methods is None else methods
        configs = [replace(predictive, method=method) for method in asked]
    for config in configs or [None]:
        check_model(model, splits, None, likelihood, config)  # pyright: ignore[reportArgumentType]
    check_same_on_ranks({"path": of, "data": splits.name, "versions": versions()}, ranks)
    if ranks.rank == 0:
        folder.adopt("evaluate")
        # Now, since the report at the end would find the same errors only after the work.
        folder.check()
    calibrated = {}
    if laplace is not None and record is not None:
        trained_on = record["data"]
        calibrated = _calibrate(laplace, configs, splits, trained_on, device, progress, ranks)
    found = evaluate_network(
        map_,
        laplace,
        configs,
        splits,
        likelihood,  # pyright: ignore[reportArgumentType]
        shift=shift,
        seed=seed,
        ensemble=ensemble,
        ood=ood,
        batch_size=predictive.batch_size,
        device=device,
        progress=progress,
        ranks=ranks,
    )
    if ranks.rank == 0:
        folder.write(EVALUATION, as_json(found))
    return found | {"output": str(folder.path), "calibrated": calibrated}


def _calibrate(
    laplace: Posterior,
    configs: list[PredictiveConfig],
    splits: Splits,
    trained_on: dict[str, Any] | None,
    device: torch.device,
    progress: bool,
    ranks: Ranks,
) -> dict[str, Any]:
    """Calibrate predictives that the posterior has no calibration of; returns label -> calibration.

    On the validation set, unless the network may have been trained on it. The saved posterior is
    not changed.
    """
    remembered = laplace.calibrations
    unknown = [c for c in configs if c.is_calibrated and c.label not in remembered]
    if not unknown or not is_held_out(splits, trained_on):
        return {}
    for config in unknown:
        if config.label not in laplace.calibrations:  # one call calibrates both links
            _logger.info("calibrating %s on the validation set", config.label)
            shard = Shard(ranks.rank, ranks.size)
            batches = split_batches(
                splits, "validation", config.batch_size, device=device, shard=shard
            )
            calibrations_of(laplace, batches, config, progress=progress, ranks=ranks)
    laplace.calibrations |= remembered
    return {config.label: laplace.calibrations[config.label] for config in unknown}


def _object(path: str, given: Any, record: dict[str, Any], key: str, kind: Any) -> Any:
    """The network or data: as given, or as the folder's record says how to build it.

    A class that is given by its name alone gets the arguments of the record, if that names it, too.
    """
    if isinstance(given, kind):
        return given
    package = models if key == "model" else sources
    if given in package.__all__:
        given = f"{package.__name__}.{given}"
    spec = record.get(key)
    if spec is None and given is None:
        option = "--model" if key == "model" else "--data"
        raise ValueError(f"{path} does not say how its {option[2:]} is built; pass {option}.")
    if given is not None and (spec is None or spec["class_path"] != given):
        spec = {"class_path": given}
    return build_from_spec(kind, spec, named=[] if given is None else [given])
