"""What makes a run repeatable and its posterior loadable: options, classes, versions, device."""

import platform
from dataclasses import dataclass
from importlib.metadata import distributions, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Provenance:
    """The options of a run, and how its network and data are built."""

    options: str | None = None
    """All options as YAML."""
    model: dict[str, Any] | None = None
    """``{"class_path": ..., "init_args": {...}}``."""
    data: dict[str, Any] | None = None
    """The same for the data."""


def check_yaml(text: str) -> None:
    """Raise a ValueError for YAML with aliases: a few lines of them may stand for gigabytes.

    Raises:
        ValueError: aliases.
        yaml.YAMLError: a text that is no YAML.
    """
    import yaml

    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has YAML aliases (*name), which are not supported; write them out")


def environment(device: "torch.device") -> dict[str, Any]:
    """Device, number of threads and versions, which numbers depend on."""
    import torch  # which marglik --help is spared

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Package -> version, of the packages that results depend on and that are installed."""
    packages = ("marglik", "torch", "torchvision", "laplace-torch", "lightning")
    return {package: version(package) for package in packages if any(distributions(name=package))}
