"""How much memory there is, and the error when it is exhausted."""

import os
from pathlib import Path

import torch
from torch import nn

__all__ = [
    "is_out_of_memory",
    "out_of_memory",
    "total_memory",
]

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit (cgroup v2 and v1)."""


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU, or of the machine or container; None where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # not "max"
            total = min(total, int(text))
    return total


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    host = ("can't allocate memory", "not enough memory")  # in the words of Linux and of Windows
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in host)


def out_of_memory(
    model: nn.Module, device: torch.device, batch_size: int, fitting: int | None
) -> torch.OutOfMemoryError:
    """The error for a batch that does not fit.

    Args:
        model: the model.
        device: where it ran.
        batch_size: examples of the batch.
        fitting: a number of examples that was tried and fits; None if not even one does.
    """
    where = f"Out of memory on {device} in a curvature pass with batches of {batch_size} examples."
    if fitting is not None:
        return torch.OutOfMemoryError(f"{where} Batches of {fitting} fit.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    factors = sum(
        (len(p) ** 2 + (p[0].numel() ** 2 if p.dim() > 1 else 0)) * p.element_size()
        for p in parameters
    )
    return torch.OutOfMemoryError(
        f"{where} The factors alone take about {factors / 2**20:.0f} MiB. Use smaller batches, "
        "keep large factors by their diagonal (diagonal_above) or by eigenvectors (sketch_rank), "
        "or freeze the largest layers (requires_grad_(False))."
    )
