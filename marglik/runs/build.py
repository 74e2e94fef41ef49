"""Objects that several commands make of their options."""

from typing import TYPE_CHECKING, Any

import torch

from marglik.runs.config import Accelerator, Precision

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["build_fabric", "build_from_spec", "device_of"]


def device_of(accelerator: Accelerator) -> torch.device:
    """The device that ``--accelerator`` names; "auto" takes the first GPU where there is one.

    Raises:
        ValueError: a device that is not there.
    """
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise ValueError(
            "--accelerator cuda is not available on this machine: torch finds no CUDA device. "
            "Pass auto or cpu."
        )
    return torch.device("cpu") if accelerator == "cpu" or not has_gpu else torch.device("cuda", 0)


def build_fabric(accelerator: Accelerator, precision: Precision = "32-true") -> "Fabric":
    """Device and precision of training's steps; whoever only needs the device asks `device_of`.

    Raises:
        ValueError: a device that is not there.
    """
    device = device_of(accelerator)
    from lightning.fabric import Fabric  # here, since importing Lightning takes seconds

    return Fabric(accelerator=device.type, devices=1, precision=precision)


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
