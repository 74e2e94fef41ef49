"""Batches: on a device, some of their examples, parts that fit memory."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.engine.calls import (
    attempt,
    call_with,
    close,
    forked_random_numbers,
    in_channels_last,
    map_entries,
    num_examples,
)
from kfac_backend.sharding import is_sharded

LARGEST_ACTIVATION = 8 * 2**20
"""Bytes of the largest activation of a part of a batch, on a CPU.

Larger ones leave the cache, and get fresh pages from the system each time. Exact reduce passes over
128 images, WRN-16-4, in parts whose largest activation has 2, 4, 8, 16 and 32 MiB take 4.4, 3.9,
3.7, 3.7 and 4.6 s (two x86-64 cores), and 12.2, 11.0, 10.4, 11.2 and 12.7 s (a core of another).
"""


def each_batch(
    loader: Iterable[Any], description: str, progress: bool = False, unit: str = "batch"
) -> Iterator[Any]:
    """The batches of one pass over a loader, with a progress bar on a terminal if asked for.

    The loader is iterated once. ``tqdm.auto.tqdm(loader)`` would call ``iter`` twice, so that a
    DataLoader would start its workers twice and draw more seeds.
    """
    if not progress:
        return iter(loader)
    # disable=None: shown on a terminal only.
    total = length(loader)
    return iter(tqdm(iter(loader), description, total, leave=False, unit=unit, disable=None))


def length(loader: Any) -> int | None:
    """The number of a loader's batches; None of a generator, or of a dataset without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def to_device(value: Any, device: torch.device) -> Any:
    """The value on the device: objects with a method ``to``, and those that a mapping holds.

    Raises:
        TypeError: an array of NumPy.
    """
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        raise TypeError(
            f"A batch has {type(value).__name__}; tensors are needed: torch.from_numpy(array)."
        )
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return map_entries(lambda entry: to_device(entry, device), value)
    return value


def examples(x: Any, which: slice | Tensor | None) -> Any:
    """Some examples of an input whose first axis they are, or that is indexed by examples.

    None adds the first axis to a single example.
    """
    if isinstance(x, Mapping):
        return map_entries(lambda tensor: tensor[which], x)
    return x[which]


def example_shapes(x: Any) -> Any:
    """The shapes of one example, as a value that can be compared."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def detached(x: Any, device: torch.device) -> Any:
    """The input on the device, detached; inference tensors, which no graph takes, are copied."""
    if isinstance(x, Tensor):
        x = x.to(device)
        return x.clone() if x.is_inference() else x.detach()
    if isinstance(x, Mapping):
        return map_entries(lambda value: detached(value, device), x)
    return to_device(x, device)


def splits_by_example(x: Any, y: Any) -> bool:
    """Whether the input has as many examples as there are targets."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets


def parts(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch in even parts of at most ``size`` examples."""
    size = math.ceil(len(y) / math.ceil(len(y) / size))
    for start in range(0, len(y), size):
        yield x[start : start + size], y[start : start + size]


def first_and_last(x: Any, N: int | None) -> Any:
    """The first and the last of an input's N examples: in a sorted batch they differ most."""
    if not isinstance(x, Tensor | Mapping) or not N:  # of a user's objects only slices are known
        return examples(x, slice(2))
    return examples(x, slice(None, None, max(N - 1, 1)))


@dataclass(frozen=True)
class Plan:
    """How a model's batches run fastest; only rounding changes."""

    part_size: int | None = None
    """How many examples fit into the cache at once; None: batches stay whole."""
    channels_last: bool = False
    """Whether convolutions run in that memory format."""
    splits: bool = False
    """Whether examples alone have the outputs that they have together, so that a few may run."""


def make_plan(model: nn.Module, x: Any, N: int | None, device: torch.device) -> Plan:
    """How to run batches like this one of N examples, tried on its first and its last one.

    Batches whose rows are not independent examples stay whole, and a model whose output depends on
    the memory format keeps its own. On a GPU batches always stay whole, since small ones are slow.
    """
    if not N:
        return Plan()
    # Ranks that share a model run it equally often, whatever the sizes of their batches are.
    is_alone = device.type == "cpu" and not is_sharded(model)
    sizes: list[int] = []  # bytes of all modules' outputs

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]

    def trial() -> Plan:
        ends = first_and_last(x, N)
        # Dropout that is on must not use up the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            # Each alone, and both together: where the outputs are the same, a few examples may run
            # in the place of a batch. The largest activation of the first tells how many fit into
            # the cache.
            first, *others = (examples(ends, slice(k, k + 1)) for k in range(min(N, 2)))
            with ExitStack() as handles:
                for module in modules:
                    handles.callback(module.register_forward_hook(hook).remove)
                alone = [call_with(model, {}, first)]
            alone += [call_with(model, {}, other) for other in others]
            by_example = max(sizes, default=0)
            both = call_with(model, {}, ends)
            weights = in_channels_last(model) if is_alone else {}
            channels_last = False
            if weights:
                f = attempt(lambda: call_with(model, weights, ends))
                channels_last = not isinstance(f, Exception) and close(both, f)
        splits = (
            len(alone) == len(both) == 2
            and by_example > 0
            and all(close(both[k : k + 1], f) for k, f in enumerate(alone))
        )
        size = max(1, LARGEST_ACTIVATION // by_example) if splits and is_alone else None
        return Plan(size, channels_last, splits)

    plan = attempt(trial)
    # A model that needs a whole batch gets one. If it fails on that, too, the pass says why.
    return Plan() if isinstance(plan, Exception) else plan


def check_read_twice(data: Iterable[Any]) -> None:
    """Raise a TypeError for an iterator, from which a second pass would get no batch."""
    if isinstance(data, Iterator):  # which, unlike iter(data), draws no random numbers
        raise TypeError(
            f"The data is a {type(data).__name__}, which can be read only once, and it is read "
            "several times; pass a DataLoader or a list of batches."
        )
