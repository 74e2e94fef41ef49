"""A fitted posterior saved in a folder, to the bit: safetensors and JSON, nothing pickled.

- ``posterior.safetensors``: the Kronecker factors; corrected eigenvalues with their eigenbasis.
- ``model.safetensors``: the network's parameters and buffers; for a network on a frozen base, as
  with LoRA, without the base.
- ``fingerprints.safetensors``: a 64-bit number for each example of the fit, with which `calibrate`
  recognises training data. The file is missing if the inputs contain no tensors.
- ``posterior.json``: hyperparameters, how to build the network, what data it was fitted to, and
  SHA-256 sums of all files. It is written last. If it exists, the other files are complete.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kfac_backend.atomic_files import read_tensors, sha256_of_tensors, write_tensors
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.options import CurvatureOptions
from kfac_backend.sharding import check_whole
from marglik.laplace import Laplace, ParametricLaplace
from marglik.posterior.posterior import Posterior
from marglik.specification import build_from_spec
from marglik.storage.environment import environment
from marglik.storage.model_state import (
    check_state,
    names_replaced,
    tensors_of,
    tensors_of_others,
)
from marglik.storage.record_files import (
    FACTORS,
    FINGERPRINTS,
    MODEL,
    POSTERIOR,
    read_posterior,
    write_record,
)


def save_posterior(
    laplace: Posterior,
    folder: str | Path,
    *,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    frozen: bool | None = None,
) -> str:
    """Write a fitted posterior and its network; return the SHA-256 sum of ``posterior.json``.

    If two processes write into one folder, it may contain files of both. Such a folder does not
    load, because ``posterior.json`` contains the sums of its own process's files.

    Args:
        laplace: the posterior.
        folder: folder to write to; created if it does not exist.
        model: specification of the network, ``{"class_path": ..., "init_args": {...}}``; without
            it, loading needs the network as an argument.
        data: record of the data of the fit, see `marglik.application.data.record`.
        frozen: whether to write parameters without a posterior, such as the other layers of a
            last-layer `Laplace`. Without them, loading needs a network that already has them, and
            compares their sum. By default they are written only if ``model`` is given, because a
            network built from it has random ones.

    Raises:
        AttributeError: the posterior is not fitted.
        ValueError: the network has changed since the fit.
        TypeError: ``model`` or ``data`` is not plain data.
        RuntimeError: another rank has some of the blocks.
    """
    check_whole(laplace.model, "A saved posterior")
    folder, factors = Path(folder), laplace.fitted_factors()
    laplace.check_weights()
    factors.check_are_here()  # before an earlier folder is removed
    names = list(factors.blocks)
    plain = [_plain(name) for name in names]
    delta = laplace.prior_precision.expand(len(names))
    record: dict[str, Any] = {
        "likelihood": str(laplace.likelihood),
        "laplace": laplace.saved_subset if isinstance(laplace, ParametricLaplace) else None,
        "num_data": factors.num_data,
        "sample_size": laplace.sample_size,
        "num_outputs": factors.num_outputs,
        "curvature": laplace.options.to_json(),
        "prior_precision": dict(zip(plain, delta.tolist(), strict=True)),
        "sigma_noise": laplace.sigma_noise.item(),
        "temperature": float(laplace.temperature),
        "corrected": factors.is_corrected,
        "evidence": float(laplace.log_marginal_likelihood()),
        "effective_parameters": dict(
            zip(plain, laplace.effective_parameters().tolist(), strict=True)
        ),
        "parameters": {_plain(n): block.num_parameters for n, block in factors.blocks.items()},
        "model": model,
        "data": data,
        "calibrations": laplace.calibrations,
        **environment(next(laplace.model.parameters()).device),
    }
    writes_all = model is not None if frozen is None else frozen
    base = {} if writes_all else tensors_of_others(laplace.model, names)
    record["frozen_sha256"] = _sum_of_base(laplace.model, base) if base else None
    json.dumps(record)  # raises a TypeError now, before anything is overwritten
    state = {_plain(n): value for n, value in tensors_of(laplace.model, without=base).items()}
    folder.mkdir(parents=True, exist_ok=True)
    # Remove it first, because it has the sums of the files that are now replaced.
    (folder / POSTERIOR).unlink(missing_ok=True)
    sums = {FACTORS: _renamed(factors, _plain).save(folder / FACTORS)}
    sums[MODEL] = write_tensors(folder / MODEL, state)
    (folder / FINGERPRINTS).unlink(missing_ok=True)
    if laplace.fingerprints is not None:
        numbers = {"fingerprints": laplace.fingerprints}
        sums[FINGERPRINTS] = write_tensors(folder / FINGERPRINTS, numbers)
    return write_record(folder / POSTERIOR, record, sums)


def load_posterior(
    folder: str | Path, model: nn.Module | None = None, device: torch.device | str | None = None
) -> Posterior:
    """Return a posterior written by `save_posterior`, for a network of the same architecture.

    It has the saved class: a `Posterior`, or one of the classes of `Laplace`.

    Args:
        folder: folder written by `save_posterior`.
        model: the network, into which the saved parameters are loaded. Parameters without a
            posterior are frozen. If `save_posterior` omitted them, the network must already have
            them. None builds the network from the folder's specification, if its class is one of
            ours or of torchvision.models.
        device: device for the network and the posterior; None keeps the model's device.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file was altered; the network has other parameters (name, shape or dtype) or
            another frozen base; or the folder alone cannot build the network.
    """
    record = read_posterior(folder)
    if model is None:
        if record["model"] is None:
            raise ValueError(
                f"{folder} does not specify how to build its network. Pass the network: "
                "load_posterior(folder, model)."
            )
        model = cast("nn.Module", build_from_spec(nn.Module, record["model"], folder=Path(folder)))
    check_module(model)
    model.to(device)
    device = next(model.parameters()).device
    # The names in this network, in which torch.compile may have wrapped another part.
    own = {_plain(name): name for name in model.state_dict()}
    saved_delta: dict[str, float] = record["prior_precision"]
    delta = {own.get(name, name): value for name, value in saved_delta.items()}
    frozen_sum = record["frozen_sha256"]
    base = tensors_of_others(model, delta) if frozen_sum else {}
    path = Path(folder) / MODEL
    saved, _ = read_tensors(path, kind="weights")
    state = {own.get(name, name): value for name, value in saved.items()}
    check_state(model, state | base, str(path))
    if frozen_sum and _sum_of_base(model, base) != frozen_sum:
        raise ValueError(
            f"The posterior in {folder} was saved without the frozen parameters, and "
            f"{type(model).__name__} has other frozen parameters than at the fit (the SHA-256 sums "
            "differ). Load the same pretrained parameters first, in the same dtype. Or save with "
            "save_posterior(..., frozen=True)."
        )
    model.load_state_dict(state, strict=False)  # the names are checked
    for name, p in model.named_parameters():
        p.requires_grad_(name in delta)
    factors = KroneckerFactors.load(Path(folder) / FACTORS, device)
    factors = _renamed(factors, lambda name: own.get(name, name))
    numbers: dict[str, Any] = {
        "options": CurvatureOptions(**record["curvature"]),
        "prior_precision": torch.tensor(list(delta.values()), dtype=torch.float64),
        "sigma_noise": record["sigma_noise"],
        "temperature": record["temperature"],
    }
    subset = record.get("laplace")
    if subset is None:
        laplace = Posterior(model, record["likelihood"], **numbers)
    else:
        laplace = _laplace(model, record["likelihood"], subset, [*delta], numbers)
    laplace.restore(factors, record["sample_size"])
    laplace.calibrations = record["calibrations"]
    if (path := Path(folder) / FINGERPRINTS).exists():
        laplace.fingerprints = read_tensors(path, kind="fingerprints")[0]["fingerprints"]
    return laplace


def _laplace(
    model: nn.Module,
    likelihood: str,
    subset: dict[str, Any],
    names: list[str],
    numbers: dict[str, Any],
) -> ParametricLaplace:
    """Return a `Laplace` of the saved subset of a network's weights.

    Args:
        model: the network, with the saved parameters.
        likelihood: its name with options.
        subset: see `ParametricLaplace.saved_subset`.
        names: the parameters that have a posterior.
        numbers: the other arguments of `Laplace`.
    """
    if subset["is_reward"]:
        likelihood = "reward_modeling"
    subset_of_weights = subset["subset_of_weights"]
    if subset_of_weights == "subnetwork":
        numbers |= {"subnetwork_indices": names}
    if subset_of_weights == "last_layer":
        modules = {_plain(name): name for name, _ in model.named_modules()}
        numbers |= {"last_layer_name": modules[subset["last_layer_name"]]}
    return Laplace(model, likelihood, subset_of_weights, "kron", **numbers)


def _plain(name: str) -> str:
    """Return a parameter's name in the network that `torch.compile` wraps."""
    return name.replace("_orig_mod.", "")


def _renamed(factors: KroneckerFactors, name_of: Callable[[str], str]) -> KroneckerFactors:
    """Return the same factors of parameters with other names."""
    blocks = {name_of(n): block.replace(name=name_of(n)) for n, block in factors.blocks.items()}
    return replace(factors, blocks=blocks)


def _sum_of_base(model: nn.Module, base: dict[str, Tensor]) -> str:
    """Return the SHA-256 sum of the frozen parameters with which the network runs."""
    replaced = names_replaced(model)
    return sha256_of_tensors(p for name, p in base.items() if name not in replaced)
