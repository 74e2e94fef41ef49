"""Where a run's objects and numbers come from: what makes it repeatable, its posterior loadable."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Provenance", "environment", "versions"]


@dataclass(frozen=True)
class Provenance:
    """The options of a run, and how its network and data are made."""

    options: str | None = None
    """All options as YAML."""
    model: dict[str, Any] | None = None
    """``{"class_path": ..., "init_args": {...}}``."""
    data: dict[str, Any] | None = None
    """The same for the data."""
    preset: str | None = None
    """The preset that the options started from."""


def environment(device: "torch.device") -> dict[str, Any]:
    """Versions and device, for results that others compare."""
    import torch  # which marglik --help is spared

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Package -> version, of those that results depend on."""
    packages = ("marglik", "torch", "torchvision", "laplace-torch", "lightning")
    return {package: version(package) for package in packages}
