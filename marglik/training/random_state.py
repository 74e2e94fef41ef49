"""The state of all random generators that training may draw from, on each rank."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from kfac_backend.engine.model_calls import forked_random_numbers
from kfac_backend.ranks import Ranks
from marglik.loaders import generators_of


def random_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, and of ``generators``: plain data.

    Of CUDA devices that of the current one alone; others belong to other processes.
    """
    kind, keys, position, has_normal, normal = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_normal, normal),
        "python": random.getstate(),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Restore what `random_state` returned; without a CUDA device, all but that device's."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    for generator, own in zip(generators, state["generators"], strict=True):
        generator.set_state(own)


@contextmanager
def random_numbers_restored(*loaders: Any) -> Iterator[None]:
    """A context that leaves all generators, also those of ``loaders``, as they were.

    So a loader that shuffles with a generator of its own has the same order in each such context,
    also after a resume. Others draw their order from torch's, which the training moves on.
    """
    generators = generators_of(*loaders)
    before = random_state(generators)
    try:
        yield
    finally:
        set_random_state(before, generators)


@contextmanager
def seeded_random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """A context in which torch's random numbers begin at a seed; before and after, they go on."""
    device = next(model.parameters()).device
    with forked_random_numbers(model):
        # Not torch.manual_seed, which keeps a stack trace for each kind of device that has not been
        # used yet: 5 ms, and as much memory as there are calls.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            getattr(module, "manual_seed_all", module.manual_seed)(seed)
        yield


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
    common = random_state()
    seed = ranks.generator(torch.default_generator).initial_seed()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        set_random_state(common)
        torch.rand(())  # moves the common state on: the next context must derive other seeds
