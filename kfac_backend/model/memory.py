"""How much memory there is, the error when it is exhausted, and how the heap stays small."""

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import nn

__all__ = [
    "give_back_free_memory",
    "is_out_of_memory",
    "out_of_memory",
    "total_memory",
]

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit (cgroup v2 and v1)."""
RESIDENT = Path("/proc/self/statm")
"""File whose second number is the process's resident pages on Linux."""
GROWTH = 1.2
"""Growth of the resident memory since an earlier batch at which the heap is trimmed."""


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


class _Heap:
    """Gives the process's free memory back to Linux when it has grown, with glibc's allocator.

    Blocks of up to 32 MiB come from one heap, whose holes are often not used again: up to glibc
    2.37 an aligned block, as torch's are, does not fit the hole that a block of the same size has
    left. So the heap doubles over dozens of batches. Trimming it after each batch, or giving larger
    blocks pages of their own (mallopt), would cost a fifth of a batch's time, because fresh pages
    are slow.
    """

    def __init__(self) -> None:
        linux = sys.platform.startswith("linux") and RESIDENT.is_file()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if linux else None
        self._usual: int | None = None

    def end_of_batch(self) -> None:
        if self._trim is None:  # another allocator
            return
        pages = int(RESIDENT.read_text().split()[1])
        if self._usual is None:
            self._usual = pages
        elif pages > GROWTH * self._usual:
            self._trim(0)
            self._usual = None  # measure anew after the next batch


_heap = _Heap()


def give_back_free_memory() -> None:
    """Call it after each batch: it trims the heap when that has grown."""
    _heap.end_of_batch()


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
