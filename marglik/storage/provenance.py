"""Record options, classes, versions and device, to repeat a run and to load its posterior."""

import platform
from dataclasses import dataclass
from importlib.metadata import distributions, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Provenance:
    """Options of a run, and the specifications of its network and data."""

    options: str | None = None
    """All options as YAML."""
    model: dict[str, Any] | None = None
    """``{"class_path": ..., "init_args": {...}}``."""
    data: dict[str, Any] | None = None
    """``{"class_path": ..., "init_args": {...}}`` of the data."""


def check_yaml(text: str) -> None:
    """Raise a ValueError for YAML with aliases, of which a few lines may stand for gigabytes.

    Raises:
        ValueError: the text has aliases.
        yaml.YAMLError: the text is not YAML.
    """
    import yaml

    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has YAML aliases (*name), which are not supported; write them out")


def environment(device: "torch.device") -> dict[str, Any]:
    """Return device, number of threads and versions, which affect the numbers."""
    import torch  # imported here, because marglik --help does not need it

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages that affect results, by package."""
    packages = ("marglik", "torch", "torchvision", "laplace-torch", "lightning")
    return {package: version(package) for package in packages if any(distributions(name=package))}
