"""Run `marglik fit`: fit a posterior to a network that was trained elsewhere."""

import logging
from pathlib import Path

import torch
from torch import nn

from marglik.application.data.record import data_record
from marglik.application.data.splits import split_batches
from marglik.application.provenance import Provenance
from marglik.application.records import Evaluation
from marglik.application.run_folder import begin_run, check_free, remove_states
from marglik.application.runs.build import check_model, device_of
from marglik.application.runs.config import Accelerator, CurvatureConfig, PriorRules, check_seed
from marglik.application.runs.evaluate import evaluate_run
from marglik.data import DataSource
from marglik.post_hoc import maximize_evidence
from marglik.posterior.posterior import Layers, Posterior, last_layer
from marglik.posterior.prior import PriorGroups
from marglik.posterior_file import save_posterior
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.predictive import PredictiveConfig
from marglik.storage.model_state import load_pretrained

_logger = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    data: DataSource,
    checkpoint: str,
    likelihood: str = "classification",
    layers: Layers = "last",
    structure: PriorRules = "per_tensor",
    curvature: CurvatureConfig = CurvatureConfig(),  # noqa: B008
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    output: str | None = None,
    overwrite: bool = False,
    batch_size: int = 128,
    accelerator: Accelerator = "auto",
    seed: int = 0,
    progress: bool = True,
    provenance: Provenance = Provenance(),  # noqa: B008
) -> Evaluation:
    """Fit a posterior to a trained network, calibrate it, save it and evaluate it.

    It chooses the prior precision, and the noise of regression, that maximise the evidence. The
    validation split calibrates the predictive. Returns the results of `evaluate_run`.

    Args:
        model: class of the network, with the options of its training. Any importable class works.
        data: class of the training data. The posterior is fitted to its training split.
        checkpoint: file with the network's parameters: safetensors, or a state dict written by
            torch.save.
        likelihood: distribution of the targets, see docs/likelihoods.md.
        layers: layers of the posterior. last uses only the last layer. all uses all layers and
            takes longer.
        structure: parameters that share a prior precision, as for `marglik train`.
        curvature: Options of the curvature pass.
        predictive: Options of the predictive of a Laplace posterior.
        output: folder to write to. null selects runs/NAME with the name of the checkpoint.
        overwrite: whether to replace a run in the output folder.
        batch_size: number of examples in a batch.
        accelerator: device. auto selects cuda if it is available.
        seed: seed of all random numbers.
        progress: whether to show progress bars on a terminal and lines of text elsewhere.
        provenance: the specifications that build model and data. They are saved with the posterior,
            so that it can be loaded without these arguments.
    """
    # Step 1: check options, data and network before the pass.
    check_seed(seed)
    folder = Path(output or f"runs/{Path(checkpoint).stem}")
    check_free(folder, overwrite)
    if Path(checkpoint).resolve().parent == folder.resolve():
        raise ValueError(f"checkpoint {checkpoint} is in the output folder. Pass another --output.")
    if note := load_pretrained(model, checkpoint):
        _logger.warning("%s: %s", checkpoint, note)
    splits, device = data.load(), device_of(accelerator)
    model = model.to(device)
    batches = split_batches(splits, "train", batch_size, device=device)
    check_model(model, splits, None, likelihood)
    if layers == "last":
        last = set(model.get_submodule(last_layer(model, next(iter(batches))[0])).parameters())
        for p in model.parameters():
            p.requires_grad_(p in last)
    calibrates = predictive.is_calibrated and splits.validation is not None
    check_model(model, splits, curvature, likelihood, predictive if calibrates else None)
    PriorGroups.from_model(model, structure)  # raises for rules that match nothing
    begin_run(folder, None, overwrite=overwrite)

    # Step 2: compute the curvature, then the prior from its eigenvalues, then s and τ.
    torch.manual_seed(seed)
    _logger.info("curvature pass over %d examples of %s", len(batches.dataset), splits.name)
    posterior = Posterior(model, likelihood, curvature.options(splits.targets))
    posterior.fit(batches, progress_bar=progress)
    maximize_evidence(posterior, structure)
    if calibrates:
        held_out = split_batches(splits, "validation", predictive.batch_size, device=device)
        calibrations_of(posterior, held_out, predictive, progress=progress)

    # Step 3: save the posterior and the record of the data, and evaluate.
    record = data_record(splits, provenance.data)
    save_posterior(posterior, folder, model=provenance.model, data=record, frozen=True)
    remove_states(folder)  # remove the empty folder by which marglik recognised an unfinished run
    return evaluate_run(
        str(folder), model, data, predictive=predictive, accelerator=accelerator, seed=seed,
        progress=progress,
    )  # fmt: skip
