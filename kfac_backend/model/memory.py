"""How much memory there is, what is said when it is exhausted, and how the heap stays small."""

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
"""Where a container's limit stands."""
RESIDENT = Path("/proc/self/statm")
"""Where Linux says how many of its pages the process has, second."""
GROWTH = 1.2
"""How much more memory than a batch has left a later one may leave."""


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


class _Heap:
    """Gives the process's free memory back to Linux when it has grown, with glibc's allocator.

    Blocks of many sizes, up to 32 MiB, come from one heap, whose holes are often not used again:
    up to glibc 2.37 an aligned block, as torch's are, does not fit the hole that its like has left.
    So the heap doubles over dozens of batches. To give the holes back after each batch, or to give
    larger blocks pages of their own (mallopt), would cost a fifth of its time, as new pages do.
    """

    def __init__(self) -> None:
        linux = sys.platform.startswith("linux") and RESIDENT.is_file()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if linux else None
        self._usual: int | None = None

    def end_of_batch(self) -> None:
        if self._trim is None:  # another allocator, which has its own ways
            return
        pages = int(RESIDENT.read_text().split()[1])
        if self._usual is None:
            self._usual = pages
        elif pages > GROWTH * self._usual:
            self._trim(0)
            self._usual = None  # the next batch takes what it needs, and tells how much that is


_heap = _Heap()


def give_back_free_memory() -> None:
    """Say that a batch is over; now and then, its free memory goes back to the system."""
    _heap.end_of_batch()


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
        f"{where} The factors alone take about {factors / 2**20:.0f} MiB. Use smaller batches, "
        "keep large factors by their diagonal (diagonal_above) or by eigenvectors (sketch_rank), "
        "or freeze the largest layers (requires_grad_(False))."
    )
