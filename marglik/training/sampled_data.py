"""The data of an update: a random sample, so that updates cost a tenth of the steps between them.

A of M examples is an unbiased mean and (N/M) · B an unbiased sum, so that the evidence of a sample
is an estimate of all data's. Directions that M rows do not reach are lost, which are far more than
a network determines. What default updates change beside exact ones of all data is measured in
`experiments.weight_decay.sampled_updates`: decays by a factor of 1.02 to 1.49 (median over tensors;
fewer updates count in it, too), the test NLL by -.005 to +.008.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from kfac_backend.engine.batches import length
from kfac_backend.ranks import Ranks
from marglik.training.loaders import Loader
from marglik.training.random_state import random_numbers_restored

SHARE = 0.1
"""Of the cost of the steps since the last update, in passes over one example."""
FEWEST = 256
"""Examples of a sample, at least."""
BATCH_SIZE = 256
"""Examples of its batches: large ones take a fraction of the time of many small ones."""


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
