"""Properties of loaders: their number of examples, their generators, their shards."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from kfac_backend.engine.batches import NO_BATCH, check_read_twice, length, split_batch
from kfac_backend.options import TargetOptions, check_positive
from kfac_backend.ranks import Ranks

Loader = Iterable[Any]
"""Batches (x, y), or mappings, examples first; iterated once per epoch."""


@dataclass(frozen=True)
class EpochBatches:
    """The batches of a trainer's epoch, with a function applied to each.

    Args:
        get_loader: function that returns the trainer's present loader, which may change between
            epochs.
        function: function of a batch and its number.
        limit: number of batches in an epoch; None reads all.
        batches_per_step: number of batches whose gradients a step accumulates.
    """

    get_loader: Callable[[], Loader]
    function: Callable[[Any, int], Any]
    limit: int | None = None
    batches_per_step: int = 1

    def __iter__(self) -> Iterator[Any]:
        loader = self.get_loader()
        with _same_order(loader):
            batches = islice(own_iteration(loader), self.limit)
            with torch.random.fork_rng([]):  # a sampler without a generator draws its order here
                torch.default_generator.manual_seed(0)
                first = [*islice(batches, 1)]
            if getattr(_loader_of(loader), "generator", None) is None:
                # As the iterator of a DataLoader draws.
                torch.empty((), dtype=torch.int64).random_()
            for number, batch in enumerate(chain(first, batches)):
                yield self.function(batch, number)

    def __len__(self) -> int:
        number: int = len(self.get_loader())  # pyright: ignore[reportArgumentType]
        return number if self.limit is None else min(number, self.limit)


def _loader_of(loader: Any) -> Any:
    """Return the user's or the trainer's own loader."""
    while hasattr(loader, "get_loader"):
        loader = loader.get_loader()
    return loader


@contextmanager
def _same_order(loader: Any) -> Iterator[None]:
    """Context in which a loader has a fixed order; restores its state on exit.

    The statistics of BatchNorm depend on the order of the batches. With a fixed order they are the
    same after a resume. With the restored state, the trainer's next epochs have the same order as
    without this context.
    """
    loader = _loader_of(loader)
    states = [(generator, generator.get_state()) for generator in generators_of(loader)]
    names = ("iteration", "end_of_dataloader", "remainder")  # of accelerate's loaders
    position = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    counts_epochs = len(position) == len(names)
    for generator, _ in states:
        generator.manual_seed(0)
    if counts_epochs:  # the order depends on this number
        loader.set_epoch(0)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        if counts_epochs:
            loader.set_epoch(position["iteration"])
            vars(loader).update(position)


def count_examples(loader: Loader, options: TargetOptions = TargetOptions()) -> int:  # noqa: B008
    """Return the number of examples in one pass over a loader, from its sampler if it has one.

    ``len(loader.dataset)`` would be wrong with ``drop_last``, or with a sampler of a part of the
    data.

    Raises:
        TypeError: the loader is an iterator, which can be read only once, or targets are not
            tensors.
    """
    inner, limit = _loader_of(loader), getattr(loader, "limit", None)
    if limit is None and hasattr(inner, "num_examples"):
        return inner.num_examples
    for owner in (inner, getattr(inner, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        batch_size = getattr(owner, "batch_size", None)
        if isinstance(sampler, Sized) and batch_size:
            count = len(sampler)
            count -= count % batch_size if getattr(owner, "drop_last", False) else 0
            if length(inner) not in (None, math.ceil(count / batch_size)):
                break  # the batches are not of the sampler's examples, or have other sizes
            return count if limit is None else min(count, limit * batch_size)
    check_read_twice(inner)
    count = 0
    for batch in loader:
        _, y = split_batch(batch, options)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"The targets of a batch are {type(y).__name__}. Convert arrays to tensors: "
                "torch.from_numpy(array)."
            )
        count += len(y)
    return count


def steps_in_epoch(loader: Loader, steps: int | None) -> int | None:
    """Return the given number of steps in an epoch, or the number of the loader's batches.

    Return None for a stream, which has no length.
    """
    steps = length(loader) if steps is None else steps
    if steps is None:
        return None
    check_positive("steps_per_epoch", steps)
    if steps != int(steps):
        raise ValueError(f"steps_per_epoch must be an integer, not {steps}.")
    return steps


def own_iteration(loader: Loader) -> Loader:
    """Return the loader, or a copy if it stores its iterator.

    A DataLoader with persistent workers stores its only iterator. The ``state_dict()`` of a loader
    contains the position of its latest iterator, which must be the training's iterator.
    """
    if not (getattr(loader, "persistent_workers", False) or hasattr(loader, "state_dict")):
        return loader
    loader = copy(loader)
    if hasattr(loader, "_iterator"):
        loader._iterator = None  # pyright: ignore
    return loader


def count_on_ranks(loader: Loader, ranks: Ranks, options: TargetOptions) -> int:
    """Return N, the number of examples in the shards of all ranks; collective.

    Raises:
        ValueError: there are no examples.
    """
    num_data = sum(ranks.gather(count_examples(loader, options)))
    if not num_data:
        raise ValueError(NO_BATCH)
    return num_data


def check_workers(*loaders: Any) -> None:
    """Raise a ValueError for loaders with persistent workers, whose random state cannot be read."""
    if any(getattr(loader, "persistent_workers", False) for loader in loaders):
        raise ValueError(
            "The loader has persistent_workers=True. A checkpoint cannot store the random state "
            "of its workers, so a resumed run would shuffle and augment the data differently. "
            "Pass persistent_workers=False, or train without checkpoints."
        )


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """Return the sampler of a loader and the sampler of its batch sampler; None without one."""
    loader = _loader_of(loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)


def generators_of(*loaders: Any) -> list[torch.Generator]:
    """Return the ``generator`` attributes of loaders and their samplers, each once."""
    owners = [o for loader in loaders for o in (_loader_of(loader), *samplers_of(loader))]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def check_shards(loader: Loader, ranks: Ranks) -> None:
    """Raise a ValueError unless a loader is a shard with which ranks can train; collective.

    If two shards contain the same example, this is not detected.
    """
    if ranks.size == 1:
        return
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            _check_sampler(sampler, ranks)
    number = length(loader)
    numbers = ranks.gather(sum(1 for _ in loader) if number is None else number)
    if len(set(numbers)) > 1:
        raise ValueError(
            f"Ranks have different numbers of batches: {', '.join(map(str, numbers))}. All ranks "
            "take each step together. Give each rank a shard with the same number of batches, for "
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
            f"give {ranks.size} ranks equally many, so these would count twice. Pass "
            "DistributedSampler(..., drop_last=True). Or use Subset(dataset, range(rank, "
            "len(dataset), ranks)), if all ranks then have the same number of batches."
        )
