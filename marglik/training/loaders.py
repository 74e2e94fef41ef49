"""What a loader is, and how many examples it yields."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

__all__ = ["CountedLoader", "Loader", "count_examples", "num_batches"]

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
