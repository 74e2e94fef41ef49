"""Objects that several commands make of their options."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from kfac_backend.laplace_interface import KfacEF, KfacGGN
from kfac_backend.options import Likelihood
from marglik.config import Accelerator, CurvatureConfig, Precision
from marglik.laplace import KronLaplace

__all__ = ["build_fabric", "build_from_spec", "build_laplace", "fabric_of"]


def build_laplace(
    model: nn.Module,
    likelihood: Likelihood,
    curvature: CurvatureConfig,
    prior_precision: Tensor | float,
    *,
    sigma_noise: Tensor | float = 1.0,
    temperature: float = 1.0,
    ignore_index: int | None = None,
) -> KronLaplace:
    """A posterior with the curvature that the options ask for, not fitted."""
    options: dict[str, Any] = {
        "rank_tolerance": curvature.rank_tolerance,
        "backward_precision": curvature.backward_precision,
        "batched": curvature.batched,
        "ignore_index": ignore_index,
    }
    empirical = curvature.fisher == "empirical"
    if not empirical:
        options["stochastic"] = curvature.fisher == "mc"
        options["num_samples"] = curvature.mc_samples
    return KronLaplace(
        model,
        likelihood,
        sigma_noise=sigma_noise,
        prior_precision=prior_precision,
        temperature=temperature,
        backend=KfacEF if empirical else KfacGGN,
        backend_kwargs=options,
        kfac_approx=curvature.kfac_approx,
    )


def build_fabric(accelerator: Accelerator, precision: Precision = "32-true") -> Fabric:
    """Device and precision.

    Raises:
        ValueError: a device that is not there.
    """
    available = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = available if accelerator == "auto" else accelerator
    try:
        return Fabric(accelerator=chosen, devices=1, precision=precision)
    except RuntimeError as error:
        raise ValueError(
            f"--accelerator {accelerator} is not to be had here: {error} Pass auto or cpu."
        ) from error


def fabric_of(model: nn.Module) -> Fabric:
    """A Fabric on the model's own device, in full precision."""
    device = next(model.parameters()).device
    devices: Any = [device.index or 0] if device.type != "cpu" else 1
    return Fabric(accelerator=device.type, devices=devices, precision="32-true")


def build_from_spec(kind: type | tuple[type, ...], spec: dict[str, Any]) -> Any:
    """An object from ``{"class_path": ..., "init_args": {...}}``, as the command line makes it.

    Args:
        kind: the class that it must be derived from; several are alternatives.
        spec: which class, with which arguments.

    Raises:
        ValueError: a class that cannot be imported, or arguments that it does not take.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, "object")
    try:
        return parser.instantiate(parser.parse_object({"object": spec})).object
    except ArgumentError as error:
        raise ValueError(
            f"{spec.get('class_path')} could not be made as it was saved: {error}"
        ) from error
