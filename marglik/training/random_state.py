"""The state of all random generators that training may draw from."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "check_workers",
    "generators_of",
    "random_state",
    "samplers_of",
    "set_random_state",
]


def check_workers(*loaders: Any) -> None:
    """Raise a ValueError for loaders with persistent workers, whose random state we cannot read."""
    if any(getattr(loader, "persistent_workers", False) for loader in loaders):
        raise ValueError(
            "The loader has persistent_workers=True: a checkpoint cannot hold the random state of "
            "its workers, and a resumed run would shuffle and augment its data differently. Pass "
            "persistent_workers=False, or train without checkpoints."
        )


def generators_of(*loaders: Any) -> list[torch.Generator]:
    """The ``generator`` attributes of loaders and their samplers, each once."""
    found = []
    for loader in loaders:
        owners = (loader, *samplers_of(loader))
        found += [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """The sampler of a loader, and that of its batch sampler; None where there is none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)


def random_state(
    generators: Sequence[torch.Generator] = (), *, own_device: bool = False
) -> dict[str, Any]:
    """The states of torch's (CPU and CUDA), numpy's and Python's generators, and of ``generators``.

    Plain data and tensors. ``own_device`` leaves out all CUDA devices but the current one, since
    with several processes the others belong to other processes.
    """
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available():
        cuda = [torch.cuda.get_rng_state()] if own_device else torch.cuda.get_rng_state_all()
    kind, keys, position, has_normal, normal = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_normal, normal),
        "python": random.getstate(),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Restore what `random_state` returned.

    The state of a single CUDA device is set on the current one. States of several are set if this
    machine has the same number of devices, and ignored otherwise: they are of another machine.
    """
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == 1:
        torch.cuda.set_rng_state(state["cuda"][0])
    elif torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    for generator, own in zip(generators, state["generators"], strict=True):
        generator.set_state(own)
