"""Training on several ranks of torch.distributed: what they share, and what each has alone.

Each rank has a shard of the data, the whole network, and random numbers of its own. What one
process sums over the data is summed over the ranks' shards, so that all ranks take the same steps.
"""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DistributedSampler

from kfac_backend.model.batches import split_batch
from kfac_backend.ranks import RankError, Ranks
from marglik.training.loaders import Loader, count_examples, num_batches
from marglik.training.random_state import random_state, samplers_of, set_random_state

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = [
    "WithExamples",
    "check_alone",
    "check_shards",
    "copy_from_rank_0",
    "count_on_ranks",
    "own_random_numbers",
    "ranks_of",
    "step_errors",
]

LOST_RANKS = re.compile(r"gloo|nccl|process ?group|connection|timed out|timeout", re.IGNORECASE)
"""Words in the messages of torch's errors about lost ranks: with gloo these are plain RuntimeErrors
and have no type of their own."""


def ranks_of(fabric: "Fabric") -> Ranks:
    """The ranks that a Fabric has launched; this process alone if it has one device.

    Raises:
        NotImplementedError: a strategy that splits a model over ranks, or copies it to several
            devices of one process.
        RuntimeError: a Fabric that was not launched.
        ValueError: a Fabric of one device in one of several processes.
    """
    running = Ranks().size
    if fabric.world_size == 1:
        if running > 1:
            raise ValueError(
                f"This is one of {running} processes of torch.distributed, but the Fabric has a "
                "single device: each process would train a network of its own on its part of the "
                f'data. Pass fabric=Fabric(devices={running}, strategy="ddp"), after its launch(), '
                "or leave the process group (torch.distributed.destroy_process_group())."
            )
        return Ranks(None)
    strategy = type(fabric.strategy).__name__
    if strategy != "DDPStrategy":
        raise NotImplementedError(
            f"The Fabric's strategy is {strategy}; the curvature needs the whole network on each "
            'rank. Pass Fabric(strategy="ddp").'
        )
    if running != fabric.world_size:
        raise RuntimeError(
            f"The Fabric is for {fabric.world_size} processes, but this is one of {running}: call "
            "fabric.launch() first."
        )
    return Ranks()


def check_alone(what: str) -> None:
    """Raise a NotImplementedError if this is one of several processes of torch.distributed."""
    ranks = Ranks()
    if ranks.size > 1:
        raise NotImplementedError(
            f"This is one of {ranks.size} processes of torch.distributed, and {what} works in a "
            "single process only. Train with OnlineTraining and a Fabric of several devices "
            "(marglik train --devices), or in one process."
        )


def check_shards(ranks: Ranks, **loaders: Loader) -> None:
    """Raise a ValueError unless the loaders are shards that ranks can train on together.

    Collective. It cannot detect an example that is in two shards.

    Args:
        ranks: the ranks that train together.
        loaders: this rank's loaders, by the names that errors give them.
    """
    if ranks.size == 1:
        return
    for name, loader in loaders.items():
        for sampler in samplers_of(loader):
            if isinstance(sampler, DistributedSampler):
                _check_sampler(sampler, name, ranks)
    for name, loader in loaders.items():
        numbers = ranks.gather(num_batches(loader), "the check of the loaders")
        if len(set(numbers)) > 1:
            raise ValueError(
                f"Ranks have different numbers of batches in {name}: "
                f"{', '.join(map(str, numbers))}. They take their steps together. Give each rank "
                "a shard of the same number of batches, for example with drop_last=True."
            )


def count_on_ranks(loader: Loader, ranks: Ranks) -> int:
    """N, the number of examples in the shards of all ranks; collective.

    Raises:
        ValueError: there are none.
    """
    num_data = sum(ranks.gather(count_examples(loader), "counting the data"))
    if not num_data:
        raise ValueError("The data is empty: the loader yields no batch.")
    return num_data


def _check_sampler(sampler: DistributedSampler, name: str, ranks: Ranks) -> None:
    size: int = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    if sampler.num_replicas != ranks.size or sampler.rank != ranks.rank:
        raise ValueError(
            f"The DistributedSampler of {name} is for rank {sampler.rank} of "
            f"{sampler.num_replicas}, but this is rank {ranks.rank} of {ranks.size}. Create it "
            "after the launch, without num_replicas and rank."
        )
    if sampler.total_size > size:
        raise ValueError(
            f"The DistributedSampler of {name} repeats {sampler.total_size - size} of {size} "
            f"examples to give {ranks.size} ranks the same number; they would count twice. Pass "
            "DistributedSampler(..., drop_last=True), which leaves the rest out, or use the shard "
            "Subset(dataset, range(rank, len(dataset), ranks)) if that gives all ranks the same "
            "number of batches."
        )


class WithExamples:
    """The batches of a loader without the empty ones: a rank's shard of a small batch may be empty.

    The curvature pass has no use for a batch without examples; network steps do, since there all
    ranks step together.
    """

    def __init__(self, loader: Loader, dict_key_y: str = "labels") -> None:
        self._loader = loader
        self._dict_key_y = dict_key_y

    def __len__(self) -> int:
        """The number of batches including empty ones, for a progress bar."""
        return num_batches(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if len(split_batch(batch, self._dict_key_y)[1]):
                yield batch


@contextmanager
def own_random_numbers(ranks: Ranks) -> Iterator[None]:
    """A context in which torch, numpy and Python draw other random numbers on each rank.

    Otherwise dropout and augmentation would do the same to the examples of all ranks. The seeds are
    derived from the state that all ranks have in common, and that state is restored afterwards. So
    a checkpoint between two such contexts has one state, which holds for any number of ranks. The
    same seed and number of ranks give the same numbers.
    """
    if ranks.size == 1:
        yield
        return
    common = random_state(own_device=True)
    seed = ranks.generator(torch.default_generator).initial_seed()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        set_random_state(common)
        torch.rand(())  # moves the common state on: the next context must derive other seeds


@contextmanager
def step_errors(ranks: Ranks) -> Iterator[None]:
    """A context that explains the errors which `DistributedDataParallel` raises in a step."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if ranks.size == 1 or isinstance(error, RankError):
            raise
        if "Expected to have finished reduction" in said:
            raise ValueError(
                "The network has trainable parameters that did not take part in the loss; the "
                "ranks wait for their gradients. Freeze them (requires_grad_(False)), or pass "
                'Fabric(strategy="ddp_find_unused_parameters_true").'
            ) from error
        if isinstance(error, dist.DistError) or LOST_RANKS.search(said):
            raise RankError(
                f"Rank {ranks.rank} of {ranks.size} lost the others in a step of training: {said}\n"
                "One of them has failed, died or hung; its own output says why. End all ranks, and "
                "resume the run if it has checkpoints."
            ) from error
        raise


def copy_from_rank_0(tensors: Sequence[Tensor], ranks: Ranks, device: torch.device) -> None:
    """Replace tensors by rank 0's values on all ranks, to the bit.

    Args:
        tensors: floating-point tensors of at most 64 bits, on any device; changed in place.
        ranks: the ranks that exchange them.
        device: a device that the ranks' backend can send from: NCCL sends from GPUs only.
    """
    if ranks.size == 1:
        return
    # One message for all of them; float64 holds narrower numbers exactly.
    with torch.no_grad():
        flat = torch.cat(
            [tensor.detach().flatten().to(device, torch.float64) for tensor in tensors]
        )
        ranks.exchange_([flat], [0], "an update of the prior")
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
