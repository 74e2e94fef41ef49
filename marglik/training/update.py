"""One update of the prior: the curvature at the present parameters, then steps on the evidence."""

import time
from typing import Any

import torch

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.distributed import Ranks
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.prior import precision_to_weight_decay
from marglik.training.loaders import Loader
from marglik.training.ranks import WithExamples, copy_from_rank_0, own_random_numbers

__all__ = ["fit", "update_prior"]


def update_prior(
    hyperparameters: Hyperparameters,
    laplace: Any,
    data: Loader,
    num_data: int,
    steps: int,
    *,
    temperature: float = 1.0,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
    dict_key_y: str = "labels",
    factors: KroneckerFactors | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Fit a Laplace approximation and climb its evidence; collective where there are ranks.

    Args:
        hyperparameters: which change.
        laplace: not fitted yet; it is fitted here.
        data: of the curvature pass; with several ranks this one's shard.
        num_data: N, what the data should yield, of all ranks.
        steps: of the hyperparameters.
        temperature: T of the likelihood.
        progress: whether to show a bar over the batches.
        ranks: who has a shard of the data each; all end with the same hyperparameters, to the bit.
        dict_key_y: the targets' key in batches that are mappings.
        factors: of the curvature, in place of a pass over the data.

    Returns:
        The evidence (nats) before each step and after the last; the update's record, but for its
        epoch, with the seconds of the pass, of the eigenvalues and of the steps.

    Raises:
        ValueError: the data yields another number of examples.
        FloatingPointError: the evidence is not finite.
    """
    device = next(laplace.model.parameters()).device
    start = _now(device)
    if factors is None:
        fit(laplace, data, ranks, progress, dict_key_y)
    else:
        laplace.restore(factors)
    if laplace.n_data != num_data:
        raise ValueError(
            f"The curvature pass saw {laplace.n_data} examples, but the loader promised "
            f"{num_data}; its length must be what it yields."
        )
    fitted = _now(device)
    before = float(laplace.log_marginal_likelihood())
    decomposed = _now(device)
    evidences = hyperparameters.update(laplace, steps)
    if ranks.size > 1:
        found = torch.tensor([before, *evidences], dtype=torch.float64)
        copy_from_rank_0([*hyperparameters.tensors(), found], ranks, device)
        before, *evidences = found.tolist()
    end = _now(device)

    groups, delta = hyperparameters.groups, hyperparameters.prior_precision
    weight_decay = precision_to_weight_decay(delta, num_data, temperature)
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
        record["left_out_share"] = laplace.factors.left_out_share
    return evidences, record


def fit(
    laplace: Any,
    data: Loader,
    ranks: Ranks,
    progress: bool = False,
    dict_key_y: str = "labels",
) -> None:
    """Fit a Laplace approximation to the data of all ranks, of which this one has a shard."""
    if ranks.size == 1:
        laplace.fit(data, progress_bar=progress)
        return
    with own_random_numbers(ranks):
        laplace.fit(WithExamples(data, dict_key_y), progress_bar=progress)


def _now(device: torch.device) -> float:
    """The time when the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
