"""Save and restore the state of all random generators that training may use, on each rank."""

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
    """Return the states of torch's, numpy's and Python's generators, and of ``generators``.

    For CUDA, only the state of the current device; other devices belong to other processes.
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
    """Restore a result of `random_state`; without a CUDA device, all but its state."""
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
    """Context manager that restores all generators on exit, also the generators of ``loaders``.

    A loader that shuffles with its own generator therefore has the same order in each such context,
    also after a resume. Other loaders use torch's generator, which the training advances.
    """
    generators = generators_of(*loaders)
    before = random_state(generators)
    try:
        yield
    finally:
        set_random_state(before, generators)


@contextmanager
def seeded_random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """Context manager that seeds torch's random numbers and restores their state on exit."""
    device = next(model.parameters()).device
    with forked_random_numbers(model):
        # Not torch.manual_seed, which stores a stack trace for each kind of device that has not
        # been used yet. This takes 5 ms per call, and its memory grows with the calls.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            getattr(module, "manual_seed_all", module.manual_seed)(seed)
        yield


@contextmanager
def own_random_numbers(ranks: Ranks) -> Iterator[None]:
    """Context manager in which torch, numpy and Python draw different random numbers on each rank.

    Otherwise dropout and augmentation would be the same for the examples of all ranks. The seeds
    are derived from the state that all ranks share, and this state is restored afterwards. A
    checkpoint between two such contexts therefore has one state, which is valid for any number of
    ranks. The same seed and number of ranks give the same numbers.
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
        torch.rand(())  # advances the common state, so that the next context derives other seeds
