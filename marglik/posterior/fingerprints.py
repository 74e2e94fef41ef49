"""Fingerprints of training examples, by which `calibrate` recognises them in validation data.

A fingerprint has 8 bytes. It is Σ_i c_i v_i modulo 2^64 over 129 to 256 entries v of an example's
input (all entries of a smaller one), with fixed odd numbers c_i. It depends only on the values, not
on the batch, the device or the library. Entries of 0 add nothing, so padding with 0 at the end does
not change it. Floats count as float32, and integers as int64. If augmentation changes the inputs in
each epoch, the fingerprints change, too, and the examples are not recognised. The same holds for
tokens that are padded on the left to another length.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from kfac_backend.engine.batches import SplitBatch, arguments, split_batch
from kfac_backend.options import TargetOptions

MOST_ENTRIES = 256
"""Maximum number of entries of an example that count. Using all would take as long as a small
network's pass."""
MOST_EXAMPLES = 2**20
"""Maximum number of examples of a fit with stored fingerprints: 8 MiB."""
SMALLEST_SHARE = 0.01
"""Share of training examples in the validation data, beyond chance, above which a warning
appears."""


class FingerprintedBatches:
    """Split batches of a loader, collecting the fingerprints of their examples.

    Args:
        loader: yields (x, y), or mappings.
        model: the network, which determines the used entries of a mapping.
        options: options for splitting batches.
    """

    def __init__(self, loader: Iterable[Any], model: nn.Module, options: TargetOptions) -> None:
        self._loader, self._model, self._options = loader, model, options
        self.parts: list[Tensor | None] = []
        """The latest iteration's fingerprints of each batch; None if an input has none."""

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Any]:
        number, self.parts = 0, []
        for batch in self._loader:
            split = split_batch(batch, self._options)
            if number < MOST_EXAMPLES:
                part = fingerprints(split[0], self._model)
                self.parts.append(part)
                number += 0 if part is None else len(part)
            yield SplitBatch(*split)


def concatenated(parts: list[Tensor | None]) -> Int64[Tensor, "M"] | None:
    """Concatenate the fingerprints of all parts of the data, on the CPU; None if any has none."""
    tensors = [part for part in parts if part is not None]
    if not tensors or len(tensors) < len(parts):
        return None
    return torch.cat(tensors).cpu()[:MOST_EXAMPLES]


@torch.no_grad()
def fingerprints(x: Any, model: nn.Module) -> Int64[Tensor, "N"] | None:
    """Return the fingerprint of each example of an input; None if it has no plain tensor."""
    args, kwargs = arguments(model, x)
    tensors = _tensors_of({**dict(enumerate(args)), **kwargs})
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return None
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        rows = tensor.reshape(len(tensor), -1 if tensor.numel() else 0)
        # A power of two, so that sequences of similar lengths have the same stride.
        stride = 1 << max(0, math.ceil(math.log2(max(rows.shape[1], 1) / MOST_ENTRIES)))
        rows = rows[:, ::stride]
        if rows.is_floating_point():
            rows = rows.to(torch.float32).contiguous().view(torch.int32)
        numbers = _multipliers(rows.device)[: rows.shape[1]]
        total += (rows.to(torch.int64) * numbers).sum(1).to(total.device)
    return total


def _tensors_of(inputs: Mapping[Any, Any]) -> list[Tensor]:
    """Return the plain tensors of a call's arguments, without labels; hidden tokens are 0."""
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
    """Return odd numbers of 64 bits, from the generator splitmix64 (Steele et al. 2014)."""
    numbers, state, mask = [], 0, 2**64 - 1
    for _ in range(MOST_ENTRIES):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z = (z ^ (z >> 31)) | 1
        numbers.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def num_in_common(training: Int64[Tensor, "N"], validation: Int64[Tensor, "M"]) -> tuple[int, bool]:
    """Count the validation examples that are training examples; return whether they are too many.

    Different examples may have equal inputs, for example in a table of a few categories. The share
    of training examples that equal another training example estimates the share of such accidental
    matches among the M validation examples.
    """
    M = len(validation)
    _, inverse, counts = training.unique(return_inverse=True, return_counts=True)
    number = int(torch.isin(validation, training).sum())
    chance = float((counts[inverse] > 1).double().mean())
    expected = M * chance + 3 * math.sqrt(M * chance * (1 - chance))
    return number, number > expected + max(1.0, SMALLEST_SHARE * M)
