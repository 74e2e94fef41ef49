"""A posterior for a network that was trained elsewhere: what `marglik fit` does."""

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from marglik.data import DataSource
from marglik.data.batches import Shard, split_batches
from marglik.data.record import data_record
from marglik.posterior.posterior import Posterior, last_layer
from marglik.posterior.posterior_file import save_posterior
from marglik.posterior.pretrained import freeze_all_but, load_pretrained
from marglik.posterior.prior import PriorGroups, weight_decay_to_precision
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.build import (
    calibrate_on_validation,
    check_model,
    check_same_on_ranks,
    join_ranks,
)
from marglik.runs.config import PostHocConfig, PostHocCurvatureConfig, PostHocRunConfig
from marglik.runs.results import calibration_results, posterior_results
from marglik.storage.provenance import Provenance, environment, versions
from marglik.storage.run_folder import (
    CHECKPOINT,
    begin_run,
    check_free,
    discard,
    write_results,
)
from marglik.training.loaders import WithExamples
from marglik.training.post_hoc import maximize_evidence

__all__ = ["fit"]

_logger = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    data: DataSource,
    checkpoint: str,
    likelihood: str = "classification",
    prior: PostHocConfig = PostHocConfig(),  # noqa: B008
    curvature: PostHocCurvatureConfig = PostHocCurvatureConfig(),  # noqa: B008
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    run: PostHocRunConfig = PostHocRunConfig(),  # noqa: B008
    provenance: Provenance = Provenance(),  # noqa: B008
) -> dict[str, Any]:
    """Fit a Laplace posterior to a trained network, and save it.

    Returns the content of ``results.json``, and the folder under "output".

    Args:
        model: class of the network, built as it was for training; any importable class.
        data: class of the data that the network was trained on. The posterior is fitted to its
            training split.
        checkpoint: file with the network's parameters: safetensors, or a state dict that torch.save
            has written.
        likelihood: distribution of the targets: classification; regression with Gaussian noise;
            bernoulli for independent yes-or-no outputs; and others, see docs/likelihoods.md.
        prior: the prior, and how it is found.
        curvature: the curvature pass.
        predictive: the predictive that the validation split calibrates.
        run: everything else.
        provenance: the options, and how model and data are built; saved with the posterior, which
            can then be loaded without them.

    Raises:
        ValueError: options, data, checkpoint or model that do not fit together.
        NotImplementedError: a layer without a K-FAC rule.
        FileExistsError: the output folder holds a run already, or other files.
        OSError: the output folder cannot be written to.
        RankError: another process has failed or is gone, or was started with other options.
    """
    start = time.perf_counter()
    if curvature.corrected and prior.method == "evidence":
        raise ValueError(
            "curvature.corrected makes the evidence a lower bound, whose maximum misleads. Choose "
            "prior.method fixed, or leave corrected out."
        )
    # Step 1: all that can be wrong with options, data and network is found before the pass.
    folder = Path(run.output or f"runs/{Path(checkpoint).stem}")
    if Path(checkpoint).resolve().parent == folder.resolve():
        raise ValueError(
            f"The checkpoint {checkpoint} is in the output folder, whose old files are removed; "
            "pass another --output."
        )
    device, ranks = join_ranks(run.accelerator)
    leads = ranks.rank == 0  # it alone writes files and shows bars
    run = replace(run, progress=run.progress and leads)
    if leads:
        check_free(folder, run.overwrite)
    note = load_pretrained(model, checkpoint)
    splits = data.load()
    model = model.to(device)
    batch_size = curvature.batch_size or run.batch_size
    batches = split_batches(splits, "train", batch_size, device=device)
    check_model(model, splits, None, likelihood)
    if prior.layers == "last":
        freeze_all_but(model, last_layer(model, next(iter(batches))[0]))
    calibrates = predictive.is_calibrated and splits.validation is not None
    check_model(model, splits, curvature, likelihood, predictive if calibrates else None)
    PriorGroups.from_model(model, prior.structure)  # raises on rules that match nothing

    delta = weight_decay_to_precision(prior.weight_decay, len(batches.dataset), prior.temperature)
    laplace = Posterior(
        model,
        likelihood,
        curvature.options(splits.targets),
        prior_precision=delta,
        sigma_noise=prior.sigma_noise,
        temperature=prior.temperature,
    )
    options = {"curvature": curvature, "prior": prior, "predictive": predictive}
    same = {name: asdict(one) for name, one in options.items()} | {"batch_size": batch_size}
    check_same_on_ranks({"data": splits.name, **same, "versions": versions()}, ranks)
    if leads:
        begin_run(folder, provenance.options, overwrite=run.overwrite)

    # Step 2: the curvature, one pass over the training data (two if corrected).
    torch.manual_seed(run.seed)
    _logger.info("curvature pass over %d examples of %s", len(batches.dataset), splits.name)
    shard = Shard(ranks.rank, ranks.size)
    own = split_batches(splits, "train", batch_size, device=device, shard=shard)
    laplace.fit(
        own if ranks.size == 1 else WithExamples(own),
        progress_bar=run.progress,
        corrected=curvature.corrected,
    )

    # Step 3: the prior, which needs the eigenvalues alone, and then s and τ of the predictive.
    before = float(laplace.log_marginal_likelihood())
    _logger.info("prior by %s", prior.method)
    if prior.method == "evidence":
        maximize_evidence(laplace, prior.structure)
        found = laplace.prior_precision.cpu(), laplace.sigma_noise.cpu()
        laplace.prior_precision, laplace.sigma_noise = ranks.gather(found, "the prior")[0]
    calibrate_on_validation(laplace, predictive, splits, ranks, run.progress)

    # Step 4: what was found; the records last, which have the sums of the files beside them.
    kept = float(laplace.log_marginal_likelihood())
    results = {
        "data": splits.name,
        "model": type(model).__name__,
        "likelihood": likelihood,
        **posterior_results(laplace, prior.weight_decay),
        "evidence": {"first": before, "kept": kept, "epoch": None},
        "note": note,
        "calibration": calibration_results(laplace, predictive),
        "seconds": time.perf_counter() - start,
        **environment(device),
    }
    if leads:
        record = data_record(splits, provenance.data)
        save_posterior(laplace, folder, model=provenance.model, data=record, frozen=True)
        write_results(folder, results)
        discard(folder / CHECKPOINT)
    return results | {"output": str(folder)}
