"""Memory: how much there is, whether the factors fit, and what to say where it is exhausted."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from kfac_backend.engine.factor_sums import make_rules
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.layers import Rule
from kfac_backend.layers.gram import Gram
from kfac_backend.options import PassOptions

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


LARGE = 8192
"""Rows above which an error message calls a weight large."""


def check_memory(assignment: RuleAssignment, options: PassOptions, device: torch.device) -> None:
    """Raise an error unless the factors fit into memory, and the largest can be decomposed there.

    The estimate is Σ d² entries for all factors, plus two copies of the largest in float64 for its
    eigenvalues. Memory that other programs take is unknown and not counted.

    Raises:
        torch.OutOfMemoryError: they do not fit; it names the largest factor and the ways out.
        ValueError: a mode for layers that the model does not have.
    """
    # With "auto" the mode is not known yet; except those of embeddings, factors have the same size
    # in both modes.
    auto = options.kfac_approx == "auto"
    rules = make_rules(assignment, "expand" if auto else options.kfac_approx, options)
    memory, sizes = total_memory(device), _sizes(rules)
    total = sum(entries * itemsize for entries, _, itemsize in sizes.values())
    if memory is None or not sizes:
        return
    largest = max(sizes, key=lambda name: sizes[name][0])
    entries, d, itemsize = sizes[largest]
    eigenvalues = 2 * 8 * entries
    if total + eigenvalues <= memory:
        return
    GiB = 2**30
    raise torch.OutOfMemoryError(
        f"The factors would take {total / GiB:.1f} GiB, {largest} ({d}×{d}) alone "
        f"{entries * itemsize / GiB:.1f} GiB, and its eigenvalues {eigenvalues / GiB:.1f} GiB more "
        f"while they are computed; {device} has {memory / GiB:.1f} GiB. Keep the factors over the "
        f"rows of large weights by their diagonal (diagonal_above={min(LARGE, d - 1)}), or freeze "
        "the layer (requires_grad_(False))."
    )


def _sizes(rules: Mapping[TrackedLayer, Rule]) -> dict[str, tuple[int, int, int]]:
    """Each factor's entries, its size d, and the bytes of an entry."""
    names: dict[Gram, str] = {}  # a weight and its bias may have the same
    for tracked, rule in rules.items():
        for which, sums in (("B", rule.B), ("A", rule.A)):
            for local, of_name in sums.items():
                names.setdefault(of_name.gram, f"{which} of '{tracked.parameters[local]}'")
    sizes: dict[str, tuple[int, int, int]] = {}
    for gram, name in names.items():
        size = gram.groups * gram.size**2, gram.size, gram.like.element_size()
        sizes[name] = max(sizes.get(name, (0, 0, 0)), size)
    return sizes


def factor_bytes(rules: Mapping[TrackedLayer, Rule]) -> int:
    """The memory that all factors take."""
    return sum(entries * itemsize for entries, _, itemsize in _sizes(rules).values())


def out_of_memory(
    model: nn.Module, device: torch.device, batch_size: int, fitting: int | None
) -> torch.OutOfMemoryError:
    """The error for a batch that does not fit.

    ``fitting`` is a number of examples that was tried and fits; None if not even one does.
    """
    where = f"Out of memory on {device} in a curvature pass with batches of {batch_size} examples."
    if fitting is not None:
        return torch.OutOfMemoryError(f"{where} Batches of {fitting} fit.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    factors = sum(
        (len(p) ** 2 + (p.shape[1:].numel() ** 2 if p.dim() > 1 else 0)) * p.element_size()
        for p in parameters
    )
    return torch.OutOfMemoryError(
        f"{where} The factors alone take about {factors / 2**20:.0f} MiB. Use smaller batches, "
        "keep large factors by their diagonal (diagonal_above), or freeze the largest layers "
        "(requires_grad_(False))."
    )
