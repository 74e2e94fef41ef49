"""What a loader is: how many examples it yields, a random sample of them, and a rank's shard.

Updates see a sample, so that they cost a tenth of the steps between them. A of M examples is an
unbiased mean and (N/M) · B an unbiased sum: the evidence of a sample is an estimate of all data's.
Directions that M rows do not reach are lost, which are far more than a network determines. What
default updates change beside exact ones of all data is measured in
`experiments.weight_decay.sampled_updates`: decays by a factor of 1.02 to 1.49 (median over tensors;
fewer updates count in it, too), the test NLL by -.005 to +.008.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from kfac_backend.engine.calls import check_read_twice, length
from kfac_backend.engine.task import split_batch
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from marglik.training.random_state import random_numbers_restored, samplers_of

Loader = Iterable[Any]
"""Batches (x, y), or mappings, examples first; iterated once per epoch."""

SHARE = 0.1
"""Of the cost of the steps since the last update, in passes over one example."""
FEWEST = 256
"""Examples of a sample, at least."""
BATCH_SIZE = 256
"""Examples of its batches: large ones take a fraction of the time of many small ones."""


def count_examples(loader: Loader, options: TargetOptions = TargetOptions()) -> int:  # noqa: B008
    """The number of examples in one pass over a loader, read off its sampler if it has one.

    ``len(loader.dataset)`` would be wrong with ``drop_last``, or a sampler of a part of the data.

    Raises:
        TypeError: an iterator, which could be read only once; targets that are no tensors.
    """
    if hasattr(loader, "num_examples"):
        return loader.num_examples  # pyright: ignore[reportAttributeAccessIssue]
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        batch_size = getattr(owner, "batch_size", None)
        if isinstance(sampler, Sized) and batch_size:
            count = len(sampler)
            return count - count % batch_size if getattr(owner, "drop_last", False) else count
    check_read_twice(loader)
    count = 0
    for batch in loader:
        _, y = split_batch(batch, options)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"A batch's targets are {type(y).__name__}; make tensors of arrays: "
                "torch.from_numpy(array)."
            )
        count += len(y)
    return count


def num_batches(loader: Any) -> int:
    """The number of batches in one pass over a loader."""
    try:
        return len(loader)
    except TypeError:
        return sum(1 for _ in loader)


# --- a sample ---


def sample_size(num_data: int, seen: float, vectors: int) -> int:
    """M, the number of examples of an update; N if that is all.

    By counts and not by clocks, since a run must repeat to the bit.

    Args:
        num_data: N.
        seen: examples of the training steps since the last update.
        vectors: backward passes per example of the update. One takes twice a forward pass.
    """
    return min(num_data, max(FEWEST, round(SHARE * seen * 3 / (1 + 2 * vectors))))


def sampled(loader: Loader, number: int, num_data: int, ranks: Ranks, seed: int) -> Iterable[Any]:
    """Batches of about ``number`` random examples of a loader's, without replacement.

    The loader's iterator, which a training loop may be using, is not touched, nor are the random
    numbers that it would draw.

    Args:
        loader: a loader with a method ``sample``, as `marglik.data.Batches`; a plain DataLoader of
            a map-style dataset, of whose sampler's examples these are some, collated anew; or any
            other with a length, of which these are whole batches. Data without a length is returned
            as it is, and so is the latter if all of it is asked for.
        number: M, of all ranks together.
        num_data: N, of all ranks together.
        ranks: each samples its own shard.
        seed: of the choice; the same on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    if hasattr(loader, "sample"):
        return _Again(partial(loader.sample, number, BATCH_SIZE), seed)  # pyright: ignore
    if _is_of_examples(loader):
        batches = loader.batch_sampler  # pyright: ignore[reportAttributeAccessIssue]
        with random_numbers_restored(loader):
            indices = sorted(i for batch in batches for i in batch)  # in whatever order they came
        M = max(1, min(len(indices), round(number * len(indices) / num_data)))
        chosen = [indices[i] for i in torch.randperm(len(indices), generator=generator)[:M]]
        starts = range(0, M, BATCH_SIZE)
        parts = [chosen[i : i + BATCH_SIZE] for i in starts]
        return _with_batches(loader, parts, generator)  # pyright: ignore[reportArgumentType]
    total = length(loader)
    if total is None or number >= num_data:
        return own_iteration(loader)
    M = max(1, math.ceil(total * number / num_data))
    numbers = set(torch.randperm(total, generator=generator)[:M].tolist())
    return _Some(own_iteration(loader), numbers)


def own_iteration(loader: Loader) -> Loader:
    """The loader, with an iterator of its own where one with persistent workers has but one."""
    if not getattr(loader, "persistent_workers", False):
        return loader
    loader = copy(loader)
    loader._iterator = None  # pyright: ignore
    return loader


def _is_of_examples(loader: Loader) -> bool:
    """Whether batches of any examples may take the place of the loader's own.

    A sampler of batches of the user's may group examples that fit together, and an ``__iter__`` may
    change them: of such loaders whole batches are taken.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    origins = (type(loader).__iter__.__module__, type(loader.batch_sampler).__module__)
    return all(origin.split(".")[0] in ("torch", "accelerate") for origin in origins)


def _with_batches(
    loader: DataLoader[Any], batches: list[list[Any]], generator: torch.Generator
) -> DataLoader[Any]:
    """A DataLoader of the same dataset, which yields these batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


class _Again:
    """What a function makes of a generator, the same in each iteration."""

    def __init__(self, make: Callable[[torch.Generator], Iterable[Any]], seed: int) -> None:
        self._make, self._seed = make, seed

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make(torch.Generator().manual_seed(self._seed)))


class _Some:
    """Batches of a loader by their numbers; it is read up to the last of them."""

    def __init__(self, loader: Loader, numbers: set[int]) -> None:
        self._loader, self._numbers = loader, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        last = max(self._numbers)
        for number, batch in enumerate(self._loader):
            if number in self._numbers:
                yield batch
            if number == last:
                return


# --- several ranks ---


def count_on_ranks(loader: Loader, ranks: Ranks, options: TargetOptions) -> int:
    """N, the number of examples in the shards of all ranks; collective.

    Raises:
        ValueError: there are none.
    """
    num_data = sum(ranks.gather(count_examples(loader, options)))
    if not num_data:
        raise ValueError("The data is empty: the loader yields no batch.")
    return num_data


def check_shards(loader: Loader, ranks: Ranks) -> None:
    """Raise a ValueError unless a loader is a shard that ranks can train on together; collective.

    An example that is in two shards is not detected.
    """
    if ranks.size == 1:
        return
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            _check_sampler(sampler, ranks)
    numbers = ranks.gather(num_batches(loader))
    if len(set(numbers)) > 1:
        raise ValueError(
            f"Ranks have different numbers of batches: {', '.join(map(str, numbers))}. They take "
            "their steps together. Give each rank a shard of the same number of batches, for "
            "example with drop_last=True."
        )


def _check_sampler(sampler: DistributedSampler, ranks: Ranks) -> None:
    size: int = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    if sampler.num_replicas != ranks.size or sampler.rank != ranks.rank:
        raise ValueError(
            f"The DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, but "
            f"this is rank {ranks.rank} of {ranks.size}. Create it after the launch, without "
            "num_replicas and rank."
        )
    if sampler.total_size > size:
        raise ValueError(
            f"The DistributedSampler repeats {sampler.total_size - size} of {size} examples to "
            f"give {ranks.size} ranks the same number; they would count twice. Pass "
            "DistributedSampler(..., drop_last=True), which leaves the rest out, or use the shard "
            "Subset(dataset, range(rank, len(dataset), ranks)) if that gives all ranks the same "
            "number of batches."
        )
