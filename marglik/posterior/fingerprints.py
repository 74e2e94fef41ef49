"""Fingerprints of training examples, by which `calibrate` recognises them among validation data.

A fingerprint is 8 bytes, Σ_i c_i v_i modulo 2^64 over 129 to 256 entries v of an example's input
(all of a smaller one), with fixed odd numbers c_i. It depends on the values alone: on no batch,
device or library. Entries of 0 add nothing, so that padding with 0 at the end does not change it.
Floats count as float32, and integers as int64. Inputs that are augmented anew in each epoch have
other fingerprints each time, and are not recognised; neither are tokens that are padded on the left
to another length.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from kfac_backend.engine.batches import SplitBatch, arguments, length, split_batch
from kfac_backend.options import TargetOptions

MOST_ENTRIES = 256
"""Entries of an example that count: as many would take as long as a small network's pass."""
MOST_EXAMPLES = 2**20
"""Examples of a fit whose fingerprints are stored: 8 MiB."""
SMALLEST_SHARE = 0.01
"""Share of validation examples that may be training examples beyond chance without a warning."""


class FingerprintedBatches:
    """A loader's batches, split; the fingerprints of their examples are collected on the way.

    Args:
        loader: (x, y), or mappings.
        model: the network, which says which entries of a mapping it takes.
        options: how batches give their inputs.
    """

    def __init__(self, loader: Iterable[Any], model: nn.Module, options: TargetOptions) -> None:
        self._loader, self._model, self._options = loader, model, options
        self._parts: list[Tensor | None] = []

    def __len__(self) -> int:
        number = length(self._loader)
        if number is None:
            raise TypeError(f"{type(self._loader).__name__} has no length.")
        return number

    def __iter__(self) -> Iterator[Any]:
        number, self._parts = 0, []
        for batch in self._loader:
            split = split_batch(batch, self._options)
            if number < MOST_EXAMPLES:
                part = fingerprints(split[0], self._model)
                self._parts.append(part)
                number += 0 if part is None else len(part)
            yield SplitBatch(*split)

    def collected(self) -> Int64[Tensor, "M"] | None:
        """The fingerprints of the latest iteration, on the CPU; None of inputs that have none."""
        return concatenated(self._parts)


def concatenated(parts: list[Tensor | None]) -> Int64[Tensor, "M"] | None:
    """The fingerprints of all parts of the data; None if one of the parts has none."""
    known = [part for part in parts if part is not None]
    return torch.cat(known).cpu()[:MOST_EXAMPLES] if known and len(known) == len(parts) else None


@torch.no_grad()
def fingerprints(x: Any, model: nn.Module) -> Int64[Tensor, "N"] | None:
    """The fingerprint of each example of a network's input; None where it holds no plain tensor."""
    args, kwargs = arguments(model, x)
    tensors = _tensors_of({**dict(enumerate(args)), **kwargs})
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return None
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        rows = tensor.reshape(len(tensor), -1 if tensor.numel() else 0)
        # A power of two, which longer and shorter sequences have in common.
        stride = 1 << max(0, math.ceil(math.log2(max(rows.shape[1], 1) / MOST_ENTRIES)))
        rows = rows[:, ::stride]
        if rows.is_floating_point():
            rows = rows.to(torch.float32).contiguous().view(torch.int32)
        numbers = _multipliers(rows.device)[: rows.shape[1]]
        total += (rows.to(torch.int64) * numbers).sum(1).to(total.device)
    return total


def _tensors_of(inputs: Mapping[Any, Any]) -> list[Tensor]:
    """The plain tensors of a call's arguments, without labels; hidden tokens are 0."""
    tensors: list[Tensor] = []
    mask = inputs.get("attention_mask")
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            tensors += _tensors_of(value)
        elif isinstance(value, Tensor) and value.dim() and key != "labels":
            if value.layout != torch.strided or value.is_complex() or value.is_quantized:
                continue
            is_hidden = isinstance(mask, Tensor) and mask.shape == value.shape
            tensors.append(value * (mask != 0) if is_hidden else value)
    return tensors


@lru_cache
def _multipliers(device: torch.device) -> Int64[Tensor, "256"]:
    """Odd numbers of 64 bits, by the generator splitmix64 (Steele et al. 2014)."""
    numbers, state, mask = [], 0, 2**64 - 1
    for _ in range(MOST_ENTRIES):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z = (z ^ (z >> 31)) | 1
        numbers.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def num_in_common(known: Int64[Tensor, "N"], others: Int64[Tensor, "M"]) -> tuple[int, bool]:
    """How many of M other examples are among N known ones, and whether these are too many.

    Different examples may have equal inputs, as in a table of a few categories. The share of the
    known ones that another known one equals is the share that chance gives M others.
    """
    M, (_, inverse, counts) = len(others), known.unique(return_inverse=True, return_counts=True)
    number = int(torch.isin(others, known).sum())
    chance = float((counts[inverse] > 1).double().mean())
    expected = M * chance + 3 * math.sqrt(M * chance * (1 - chance))
    return number, number > expected + max(1.0, SMALLEST_SHARE * M)
