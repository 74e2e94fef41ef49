"""How much memory there is, and what a curvature pass says when it is exhausted."""

import os
from pathlib import Path

import torch
from torch import nn

__all__ = ["is_out_of_memory", "out_of_memory", "total_memory"]

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's limit stands."""


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that a device has: a GPU's, or the machine's; None where it does not tell."""
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
    """The error for a batch of this size, where batches of ``fitting`` were tried and fit."""
    where = f"Out of memory on {device} in a curvature pass with batches of {batch_size} examples."
    if fitting is not None:
        return torch.OutOfMemoryError(f"{where} Batches of {fitting} fit.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    factors = sum(
        (len(p) ** 2 + (p[0].numel() ** 2 if p.dim() > 1 else 0)) * p.element_size()
        for p in parameters
    )
    return torch.OutOfMemoryError(
        f"{where} The factors alone take about {factors / 2**20:.0f} MiB. Use smaller batches, or "
        "freeze the largest layers (requires_grad_(False))."
    )
