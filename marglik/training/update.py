"""One update of the prior: the curvature at the present parameters, then steps on the evidence."""

import time
from typing import Any

import torch

from kfac_backend.ranks import Ranks
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.prior import precision_to_weight_decay
from marglik.training.loaders import Loader, count_examples
from marglik.training.ranks import WithExamples, copy_from_rank_0, own_random_numbers

__all__ = ["update_prior"]


def update_prior(
    hyperparameters: Hyperparameters,
    laplace: Any,
    data: Loader,
    num_data: int | None = None,
    steps: int = 10,
    *,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
    dict_key_y: str = "labels",
) -> tuple[list[float], dict[str, Any]]:
    """Fit a Laplace approximation, then take hyperparameter steps that raise its evidence.

    `PriorLearner` calls it; call it yourself where you hold the hyperparameters. Collective where
    there are several ranks.

    Args:
        hyperparameters: prior precisions and noise; changed in place.
        laplace: a Laplace approximation; fitted here, and given the new hyperparameters.
        data: batches for the curvature pass; with several ranks this rank's shard.
        num_data: N, the number of examples that all ranks together should see; None counts them.
        steps: number of hyperparameter steps.
        progress: whether to show a bar over the batches.
        ranks: the ranks that fit together; all end with the same hyperparameters, to the bit.
        dict_key_y: the targets' key in batches that are mappings.

    Returns:
        The evidence (nats, a sum over the data) before each step and after the last; and the record
        of the update, with the seconds of the pass, of the eigenvalues and of the steps.

    Raises:
        ValueError: the pass saw another number of examples than ``num_data``.
        FloatingPointError: the evidence is not finite.
    """
    device = next(laplace.model.parameters()).device
    num_data = count_examples(data) if num_data is None else num_data
    start = _now(device)
    if ranks.size == 1:
        laplace.fit(data, progress_bar=progress)
    else:
        with own_random_numbers(ranks):
            laplace.fit(WithExamples(data, dict_key_y), progress_bar=progress)
    # The weight decays T·δ/N of the steps and the evidence must be of the same N.
    if laplace.n_data != num_data:
        raise ValueError(
            f"The curvature pass saw {laplace.n_data} examples, but the loader promised "
            f"{num_data}; its length must be what it yields."
        )
    fitted = _now(device)
    # The first evidence computes the eigenvalues (unless `fit` has), which all steps share.
    before = float(laplace.log_marginal_likelihood())
    decomposed = _now(device)
    evidences = hyperparameters.update(laplace, steps)
    if ranks.size > 1:
        # Each rank has taken the same steps, but on another processor they may round otherwise, and
        # ranks with different weight decays would drift apart.
        found = torch.tensor([before, *evidences], dtype=torch.float64)
        copy_from_rank_0([*hyperparameters.tensors(), found], ranks, device)
        before, *evidences = found.tolist()
    groups, delta = hyperparameters.groups, hyperparameters.prior_precision
    laplace.prior_precision = groups.for_laplace(delta)
    if laplace.likelihood == "regression":
        laplace.sigma_noise = hyperparameters.sigma_noise
    end = _now(device)

    weight_decay = precision_to_weight_decay(delta, num_data, laplace.temperature)
    record: dict[str, Any] = {
        "evidence_before": before,
        "evidence": evidences[-1],
        "evidence_per_example": evidences[-1] / num_data,
        "prior_precision": groups.summary(delta),
        "weight_decay": groups.summary(weight_decay),
        "seconds": {
            "pass": fitted - start,
            "eigenvalues": decomposed - fitted,
            "steps": end - decomposed,
        },
    }
    if laplace.likelihood == "regression":
        record["sigma_noise"] = hyperparameters.sigma_noise.item()
    if getattr(laplace, "factors", None) is not None:
        gamma = laplace.effective_parameters()
        record["effective_parameters"] = dict(
            zip(laplace.factors.blocks, gamma.tolist(), strict=True)
        )
        record["clipped_eigenvalues"] = laplace.factors.num_clipped()
    return evidences, record


def _now(device: torch.device) -> float:
    """Seconds on a clock, read once the device has finished its work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
