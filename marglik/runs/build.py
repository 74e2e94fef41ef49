"""Objects that several commands build from their options."""

import json
import logging
import os
from collections.abc import Callable, Collection
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import distributed as dist
from torch import nn

from kfac_backend.ranks import RankError, Ranks
from marglik.data import DataSource
from marglik.runs.config import Accelerator, Precision
from marglik.storage.checkpoint import differences

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = [
    "build_fabric",
    "build_from_spec",
    "check_same_on_ranks",
    "device_of",
    "join_ranks",
    "number_of_ranks",
]

TRUSTED = ("marglik", "torchvision")
"""Packages whose classes a file may name."""


def device_of(accelerator: Accelerator) -> torch.device:
    """The device that ``--accelerator`` names; "auto" takes the first GPU, if there is one.

    Raises:
        ValueError: a device that this machine does not have.
    """
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise ValueError(
            "--accelerator cuda is not available on this machine: torch finds no CUDA device. "
            "Pass auto or cpu."
        )
    return torch.device("cpu") if accelerator == "cpu" or not has_gpu else torch.device("cuda", 0)


def number_of_ranks(devices: int | None, accelerator: Accelerator = "auto") -> int:
    """The number of processes that share the work: torchrun's, else ``devices``, else one.

    Raises:
        ValueError: torchrun has started another number than ``devices``, or there are fewer GPUs.
    """
    started = _started()
    number = devices or started or 1
    if started and started != number:
        raise ValueError(
            f"--devices {number}: torchrun has started {started} processes. Leave --devices out."
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if started else number
    gpus = torch.cuda.device_count()
    if number > 1 and device_of(accelerator).type == "cuda" and here > gpus:
        raise ValueError(
            f"--devices {here}: this machine has {gpus} GPU(s). Pass {gpus} or less, or "
            "--accelerator cpu."
        )
    return number


def _started() -> int:
    """The number of processes that torchrun has started, 0 without torchrun."""
    by_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if by_torchrun else 0


def build_fabric(
    accelerator: Accelerator,
    precision: Precision = "32-true",
    devices: int | None = None,
    rank_timeout: float = 600.0,
) -> "Fabric":
    """A launched Fabric: device and precision of training steps, and the other processes, if any.

    Commands that do not train use `join_ranks`, which imports Lightning only for several processes.

    Args:
        accelerator: "cpu", "cuda" or "auto".
        precision: precision of the training steps.
        devices: see `number_of_ranks`.
        rank_timeout: seconds that a process waits for the others.

    Raises:
        ValueError: a device that this machine does not have, or another number of processes.
    """
    number, device = number_of_ranks(devices, accelerator), device_of(accelerator)
    from lightning.fabric import Fabric  # here, since importing Lightning takes seconds
    from lightning.fabric.strategies import DDPStrategy

    if number == 1:
        return Fabric(accelerator=device.type, devices=1, precision=precision)
    if not _started():
        raise ValueError(
            f"devices={number} works on the command line, which starts the processes. Start this "
            f"program with torchrun --nproc-per-node {number}."
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=rank_timeout)
    fabric = Fabric(
        accelerator=device.type,
        devices=here,
        num_nodes=number // here,
        strategy=DDPStrategy(process_group_backend=backend, timeout=limit),
        precision=precision,
    )
    for name in ("lightning.fabric", "lightning.pytorch"):  # no lines about the launch
        logging.getLogger(name).setLevel(logging.WARNING)
    fabric.launch()
    return fabric


def join_ranks(
    accelerator: Accelerator, devices: int | None = None, rank_timeout: float = 600.0
) -> tuple[torch.device, Ranks]:
    """The device of this process, and the ranks that it shares the work with, once it joined them.

    Raises:
        ValueError: a device that this machine does not have, or another number of processes.
    """
    if number_of_ranks(devices, accelerator) == 1:
        return device_of(accelerator), Ranks(None)
    return build_fabric(accelerator, devices=devices, rank_timeout=rank_timeout).device, Ranks()


def check_same_on_ranks(identity: dict[str, Any], ranks: Ranks) -> None:
    """Raise a RankError that names what differs, on all ranks, unless all run the same run."""
    first, *others = ranks.gather(json.loads(json.dumps(identity)), "the start")
    for rank, other in enumerate(others, 1):
        for name, here, there in differences(first, other):
            raise RankError(
                f"The processes were started differently: {name} is {here} on rank 0, {there} on "
                f"rank {rank}. Start all with the same command, data and versions."
            )


def build_from_spec(kind: type | tuple[type, ...], spec: Any, named: Collection[str] = ()) -> Any:
    """The object that ``{"class_path": ..., "init_args": {...}}`` describes.

    A specification comes from a file, perhaps a downloaded one, and importing a class runs code.
    So it may name networks and data sources of marglik and torchvision, and else what the user
    named. Arguments are plain values or specifications in turn; nothing in them is imported.

    Args:
        kind: the class, or alternative classes, that it must be an instance of.
        spec: the path of its class (or of a function that returns such an object, as torchvision
            has), and the arguments.
        named: paths of classes that the user named on the command line.

    Raises:
        ValueError: a class that may not or cannot be imported, or arguments that it does not take.
    """
    path = spec.get("class_path") if isinstance(spec, dict) else None
    try:
        found = _built(spec, named)
        if not isinstance(found, kind):
            raise TypeError("another kind of object is needed")
    except Exception as error:  # a class raises whatever its arguments lead to
        raise ValueError(f"{path} could not be built from its saved arguments: {error}.") from error
    return found


def _built(value: Any, named: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_built(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: _built(item, named) for key, item in value.items()}
    arguments = (value.get("init_args") or {}) | (value.get("dict_kwargs") or {})
    make = _maker(str(value["class_path"]), named)
    return make(**{name: _built(item, named) for name, item in arguments.items()})


def _maker(path: str, named: Collection[str]) -> Callable[..., Any]:
    """The class or function of that path, if it may be imported and makes networks or data."""
    package = path.partition(".")[0]
    if package not in TRUSTED and path not in named:
        raise ValueError(
            f"a file may only name classes of {' and '.join(TRUSTED)}, as importing others runs "
            f"their code. If you trust {path}, name it on the command line: --model {path} (or "
            "--data)"
        )
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name)
    made = found if isinstance(found, type) else get_type_hints(found).get("return")
    if not (isinstance(made, type) and issubclass(made, (nn.Module, DataSource))):
        raise ValueError(f"{path} is no class of networks or data")
    return found
