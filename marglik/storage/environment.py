"""Record device, number of threads and versions, which affect results."""

import platform
from importlib.metadata import distributions, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def environment(device: "torch.device") -> dict[str, Any]:
    """Return device, number of threads and versions, which affect results."""
    import torch  # imported here, because marglik --help does not need it

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return package -> version for installed packages that affect results."""
    packages = ("marglik", "torch", "torchvision", "laplace-torch", "lightning")
    return {package: version(package) for package in packages if any(distributions(name=package))}
