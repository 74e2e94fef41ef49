"""Objects that several commands make of their options."""

from typing import Any

import torch
from lightning.fabric import Fabric

from marglik.runs.config import Accelerator, Precision

__all__ = ["build_fabric", "build_from_spec"]


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
