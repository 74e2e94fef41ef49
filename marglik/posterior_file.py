"""A fitted posterior in a folder, to the bit: safetensors and JSON, nothing pickled.

- ``posterior.safetensors``: the Kronecker factors.
- ``model.safetensors``: the network's parameters and buffers.
- ``posterior.json``: hyperparameters, how to build the network, what data it is for, and SHA-256
  sums of all three. Written last: where it is, the others are whole.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from kfac_backend.files import write_tensors
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.laplace_interface import KfacEF, KfacGGN
from marglik.laplace import KronLaplace
from marglik.model_state import load_state, tensors_of
from marglik.provenance import environment
from marglik.record_file import read_record, write_record
from marglik.run_files import FACTORS, MODEL, POSTERIOR

__all__ = ["load_posterior", "read_posterior", "save_posterior"]

FORMAT, FORMAT_VERSION = "marglik.posterior", 1


def save_posterior(
    laplace: KronLaplace,
    folder: str | Path,
    *,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> str:
    """Write a fitted posterior and its network; returns the SHA-256 sum of ``posterior.json``.

    All sums are of what is written. Two processes that write into one folder may leave a mixture of
    their files, but none that loads.

    Args:
        laplace: the posterior.
        folder: where to; made if it is not there.
        model: how to build the network, ``{"class_path": ..., "init_args": {...}}``; without it,
            loading needs a network.
        data: what it was fitted to, see `marglik.data_record`.

    Raises:
        AttributeError: a posterior that is not fitted.
        ValueError: a prior mean that is not one number; a network that changed since the fit.
        TypeError: a model or data that is no plain data.
    """
    folder, terms, factors = Path(folder), laplace.evidence_terms, laplace.factors
    assert factors is not None
    prior_mean = torch.as_tensor(laplace.prior_mean)
    if prior_mean.numel() != 1:
        raise ValueError(
            f"The prior mean has {prior_mean.numel()} entries; a saved posterior has one number "
            "for all parameters. Keep laplace.state_dict() instead."
        )
    if not torch.equal(parameters_to_vector(laplace.params), cast(Tensor, laplace.mean)):
        raise ValueError(
            "The network's parameters are no longer those that the posterior was fitted at; fit "
            "again."
        )
    names = list(factors.blocks)
    delta = laplace.prior_precision.expand(len(names))
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "likelihood": laplace.likelihood,
        "num_data": factors.num_data,
        "num_outputs": factors.num_outputs,
        "kfac_approx": factors.kfac_approx,
        "fisher": factors.fisher,
        "prior_precision": dict(zip(names, delta.tolist(), strict=True)),
        "prior_mean": prior_mean.item(),
        "sigma_noise": torch.as_tensor(laplace.sigma_noise).item(),
        "temperature": float(laplace.temperature),
        "damping": laplace.damping,
        "evidence": float(laplace.log_marginal_likelihood()),
        "effective_parameters": dict(
            zip(names, laplace.effective_parameters().tolist(), strict=True)
        ),
        "parameters": dict(zip(names, terms.sizes.int().tolist(), strict=True)),
        "model": model,
        "data": data,
        **environment(next(laplace.model.parameters()).device),
    }
    json.dumps(record)  # raises before anything is overwritten
    state = tensors_of(laplace.model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POSTERIOR).unlink(missing_ok=True)  # it must not name files that are gone
    sums = {FACTORS: factors.save(folder / FACTORS)}
    sums[MODEL] = write_tensors(folder / MODEL, state)
    return write_record(folder / POSTERIOR, record, sums)


def read_posterior(folder: str | Path) -> dict[str, Any]:
    """What ``posterior.json`` says, once the files that it speaks of are found unchanged.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: not such a file, a newer format, or a file that was truncated or altered.
    """
    path = Path(folder) / POSTERIOR
    if not path.is_file():
        raise FileNotFoundError(
            f"No posterior in {folder} ({POSTERIOR} is missing); make one with marglik train or "
            "marglik fit."
        )
    record = read_record(path, FORMAT, FORMAT_VERSION, what="posterior", remedy="Fit again.")
    if not {FACTORS, MODEL} <= record["sha256"].keys():
        raise ValueError(f"{path} is not as it was written: it was altered. Fit again.")
    return record


def load_posterior(
    folder: str | Path, model: nn.Module, device: torch.device | str | None = None
) -> KronLaplace:
    """The posterior that `save_posterior` wrote, on a network of the same architecture.

    Args:
        folder: where it is.
        model: the network, which gets the saved parameters; those without a posterior are frozen.
        device: where to; the model's own if None.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file that was altered; a network with other parameters, by name, shape or
            dtype.
    """
    record = read_posterior(folder)
    model.to(device)
    device = next(model.parameters()).device
    load_state(model, Path(folder) / MODEL)
    delta: dict[str, float] = record["prior_precision"]
    for name, p in model.named_parameters():
        p.requires_grad_(name in delta)
    factors = KroneckerFactors.load(Path(folder) / FACTORS, device)
    if list(factors.blocks) != list(delta):
        raise ValueError(
            f"{POSTERIOR} and {FACTORS} in {folder} are about different parameters; fit again."
        )
    options: dict[str, Any] = {"rank_tolerance": factors.rank_tolerance}
    if factors.fisher == "mc":
        options["stochastic"] = True
    laplace = KronLaplace(
        model,
        record["likelihood"],
        sigma_noise=record["sigma_noise"],
        prior_precision=torch.tensor(list(delta.values()), dtype=torch.float64),
        prior_mean=record["prior_mean"],
        temperature=record["temperature"],
        backend=KfacEF if factors.fisher == "empirical" else KfacGGN,
        damping=record["damping"],
        backend_kwargs=options,
        kfac_approx=factors.kfac_approx,
    )
    laplace.restore(factors)
    return laplace
