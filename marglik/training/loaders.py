"""What a loader is, and how many examples it yields."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

__all__ = ["CountedLoader", "Loader", "MergedBatches", "count_examples", "num_batches"]

Loader = Iterable[Any]
"""Batches (x, y), or mappings, examples first; iterated once per epoch."""


def count_examples(loader: Loader) -> int:
    """The number of examples in one pass over a loader, read off its sampler if it has one.

    ``len(loader.dataset)`` would be wrong with ``drop_last``, or a sampler of a part of the data.

    Raises:
        TypeError: an iterator, which could be read only once; batches without tensors.
    """
    if hasattr(loader, "num_examples"):
        return loader.num_examples  # pyright: ignore[reportAttributeAccessIssue]
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        batch_size = getattr(owner, "batch_size", None)
        if isinstance(sampler, Sized) and batch_size:
            count = len(sampler)
            return count - count % batch_size if getattr(owner, "drop_last", False) else count
    batches = iter(loader)
    if batches is loader:
        raise TypeError(
            f"The data is a {type(loader).__name__}, which can be read only once; pass a "
            "DataLoader or a list of batches."
        )
    return sum(len(_any_tensor(batch)) for batch in batches)


class CountedLoader:
    """A loader whose ``dataset`` has the length that its batches add up to; for laplace-torch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.num_examples = count_examples(loader)
        self.dataset = range(self.num_examples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class MergedBatches:
    """The batches of a loader, several small ones in one: for passes whose sums are over examples.

    A curvature pass over a small network takes as long for 50 examples as for 500. Batches of
    other things than tensors with examples first are left as they are, as are large ones.

    Args:
        loader: batches (x, y) or mappings.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def num_examples(self) -> int:
        """The number of examples in one pass."""
        return count_examples(self._loader)

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in self._loader:
            shape = _shape_of_examples(batch)
            together = [*waiting, batch]
            fits = shape is not None and _numbers(together) <= MERGED_NUMBERS
            if waiting and not (fits and shape == _shape_of_examples(waiting[0])):
                yield _joined(waiting)
                together = [batch]
            if shape is None or _numbers(together) > MERGED_NUMBERS:
                yield batch
                together = []
            waiting = together
        if waiting:
            yield _joined(waiting)


MERGED_NUMBERS = 2**17
"""Most numbers in the tensors of a merged batch: 512 images of 16 x 16 pixels."""


def _tensors(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _shape_of_examples(batch: Any) -> Any:
    """What must agree for batches to be joined; None if a batch cannot be."""
    if not isinstance(batch, (tuple, list, Mapping)):
        return None
    values = _tensors(batch)
    if not all(type(v) is Tensor and v.dim() and len(v) == len(values[0]) for v in values):
        return None
    keys = list(batch) if isinstance(batch, Mapping) else None
    return type(batch), keys, [(v.shape[1:], v.dtype, v.device) for v in values]


def _numbers(batches: list[Any]) -> int:
    return sum(value.numel() for batch in batches for value in _tensors(batch))


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    columns = [torch.cat(parts) for parts in zip(*map(_tensors, batches), strict=True)]
    if isinstance(batches[0], Mapping):
        return dict(zip(batches[0], columns, strict=True))
    return tuple(columns)


def num_batches(loader: Any) -> int:
    """The number of batches in one pass over a loader."""
    try:
        return len(loader)
    except TypeError:
        return sum(1 for _ in loader)


def _any_tensor(batch: Any) -> Tensor:
    values = batch.values() if hasattr(batch, "values") else batch
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise TypeError("A batch has no tensors; make some of arrays: torch.from_numpy(array).")
