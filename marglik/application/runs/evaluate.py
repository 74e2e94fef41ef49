"""Run `marglik evaluate`: compute the metrics of a saved posterior."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from kfac_backend.atomic_files import file_sum
from marglik.application.data.out_of_distribution import out_of_distribution_images
from marglik.application.data.record import (
    as_trained,
    data_to_evaluate,
    is_held_out,
    is_own_test,
    num_seen,
)
from marglik.application.data.splits import split_batches
from marglik.application.evaluation import evaluate, predictives_of
from marglik.application.records import CalibrationRecord, Evaluation
from marglik.application.run_folder import EVALUATION, read_results, write_evaluation
from marglik.application.runs.build import check_model, device_of
from marglik.application.runs.config import Accelerator, check_seed
from marglik.application.runs.results import calibration_record
from marglik.data import DataSource, Splits
from marglik.posterior.posterior import Posterior
from marglik.posterior_file import load_posterior
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.predictive import PredictiveConfig, PredictiveMethod
from marglik.specification import build_from_spec
from marglik.storage.record_files import ENSEMBLE, POSTERIOR, read_posterior, read_record

_logger = logging.getLogger(__name__)


def evaluate_run(
    path: str,
    model: str | nn.Module | None = None,
    data: str | DataSource | None = None,
    methods: list[PredictiveMethod] | None = None,
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    ood: DataSource | None = None,
    output: str | None = None,
    accelerator: Accelerator = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Evaluate a network at its parameters (MAP) and under its posterior.

    If the posterior has no saved calibration for a predictive, the validation set calibrates it,
    unless the network was trained on this set.

    The result counts the test examples whose inputs were used for training or calibration. For the
    test data of the run this number is 0.

    Returns the content of ``evaluation.json``. The file replaces an earlier evaluation in the
    folder.

    Args:
        path: folder written by marglik train, marglik fit or save_posterior.
        model: class of the network. Pass it again if it is your own class. For safety, marglik does
            not run code that is named only in the folder. Without options of the class, the network
            gets the options stored in the folder. If an option of the class names a file of
            pretrained weights, repeat this option.
        data: class of the data. null selects the test split of the training data. For other data,
            all examples are evaluated, or the test split if the class has one, as ImageFolder does.
            For data in files, pass the class and its options again. For safety, marglik does not
            read or download files that are named only in the folder.
        methods: list of predictive methods to evaluate one after the other. [] evaluates only the
            MAP. null evaluates only predictive.method.
        predictive: Options of the predictive of a Laplace posterior.
        ood: class of out-of-distribution images, on which the predictives should be uncertain.
        output: folder for evaluation.json and the report. null selects the folder of the run. It is
            required for data other than the data of the run.
        accelerator: device. auto selects cuda if it is available.
        seed: seed of the random numbers for sampling.
        progress: whether to show progress bars on a terminal and lines of text elsewhere.
    """
    check_seed(seed)
    if Path(path).is_file():
        raise ValueError(
            f"{path} is a file. Pass a folder written by marglik train, fit or save_posterior."
        )
    device = device_of(accelerator)

    # Step 1: get network, posterior and data from the arguments or from the folder.
    record = read_posterior(path)
    network = saved_object(path, model, record, "model", nn.Module)
    source = saved_object(path, data, record["data"] or {}, "source", DataSource)
    splits = as_trained(data_to_evaluate(source, record["data"]), record["data"])
    if output is None and record["data"] and not is_own_test(splits, record["data"]):
        raise ValueError(
            f"{splits.name} has other test examples than {record['data']['name']}, on which {path} "
            "was trained. Pass --output to write the evaluation to another folder."
        )
    laplace = load_posterior(path, network, device)
    ensemble = Ensemble.load(path, network) if (Path(path) / ENSEMBLE).exists() else None
    chosen = [predictive.method] if methods is None else methods
    configs = [replace(predictive, method=method).for_posterior(laplace) for method in chosen]
    for config in configs or [None]:
        check_model(network, splits, None, laplace.likelihood, config)
    folder = Path(output or path)
    # Check now, because the report would find the same errors only at the end.
    read_results(folder)
    read_record(folder / EVALUATION)
    posterior = folder / POSTERIOR
    if posterior.is_file() and file_sum(posterior) != file_sum(Path(path) / POSTERIOR):
        raise ValueError(
            f"{folder} contains another posterior than {path}, and an evaluation there would seem "
            "to belong to it. Pass another --output."
        )

    # Step 2: compute missing calibrations, and the metrics.
    calibrated: dict[str, CalibrationRecord] = {}
    if is_held_out(splits, record["data"]):
        calibrated = _calibrate(laplace, configs, splits, progress)
    evaluation, _ = evaluate(
        predictives_of(laplace, configs, ensemble, seed=seed),
        splits,
        laplace.likelihood,
        labels=predictive.labels,
        ood=None if ood is None else out_of_distribution_images(ood, splits),
        batch_size=predictive.batch_size,
        device=device,
        progress=progress,
    )
    evaluation = replace(evaluation, num_seen=num_seen(splits, record["data"]))
    write_evaluation(folder, evaluation, Path(path))
    return replace(evaluation, output=str(folder), calibrated=calibrated)


def _calibrate(
    laplace: Posterior, configs: list[PredictiveConfig], splits: Splits, progress: bool
) -> dict[str, CalibrationRecord]:
    """Calibrate predictives without a saved calibration, and return label -> calibration.

    It uses the validation set. The saved posterior does not change.
    """
    remembered = laplace.calibrations
    unknown = [c for c in configs if c.is_calibrated and c.label not in remembered]
    for config in unknown:
        if config.label not in laplace.calibrations:  # one call calibrates both links
            _logger.info("calibrating %s on the validation data", config.label)
            device, size = laplace.mean.device, config.batch_size
            batches = split_batches(splits, "validation", size, device=device)
            calibrations_of(laplace, batches, config, progress=progress)
    fits = laplace.calibrations = laplace.calibrations | remembered
    return {c.label: calibration_record(c.label, fits[c.label], splits) for c in unknown}


def saved_object(path: str, passed: Any, record: dict[str, Any], key: str, kind: Any) -> Any:
    """Return a passed network or data set, otherwise build it from the record of the folder.

    If the name of a class is passed and the record has the same class, it gets the arguments in the
    record.
    """
    if isinstance(passed, kind):
        return passed
    spec = record.get(key)
    if spec is None and passed is None:
        option = "--model" if key == "model" else "--data"
        raise ValueError(f"{path} does not specify how to build its {option[2:]}. Pass {option}.")
    if passed is not None and passed not in _classes_in(spec):
        spec = {"class_path": passed}
    named = [] if passed is None else [passed]
    return build_from_spec(kind, spec, named=named, folder=Path(path))


def _classes_in(spec: Any) -> Iterator[str | None]:
    """Yield the classes of a specification and of networks within it, as in `Standardised`."""
    while isinstance(spec, dict):
        yield str(spec.get("class_path"))
        spec = (spec.get("init_args") or {}).get("model")
