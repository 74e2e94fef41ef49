"""Batches: on a device, some of their examples, and parts that suit the memory."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.model.calls import call_with, forked_random_numbers, num_examples
from kfac_backend.model.comparison import close

__all__ = [
    "Plan",
    "detached",
    "each_batch",
    "example_shapes",
    "examples",
    "make_plan",
    "parts",
    "splits_by_example",
    "to_device",
]

LARGEST_ACTIVATION = 16 * 2**20
"""Bytes of the largest activation of a part of a batch, on a CPU.

Larger ones get fresh pages from the system each time, and the page faults cost more than the
arithmetic. Measured on two x86-64 cores with WRN-16-4, exact reduce pass over 128 images, in parts
whose largest activation has 2, 4, 8, 16 and 32 MiB: 4.4, 3.9, 3.7, 3.7 and 4.6 s.
"""


def each_batch(
    loader: Iterable[Any], description: str, progress: bool = False, unit: str = "batch"
) -> Iterator[Any]:
    """The batches of one pass over a loader, with a progress bar on a terminal if asked for.

    The loader is iterated once. ``tqdm.auto.tqdm(loader)`` would call ``iter`` twice, so that a
    DataLoader would start its workers twice and draw more seeds.

    Args:
        loader: the batches.
        description: what the bar says.
        progress: whether to show it.
        unit: what it counts.
    """
    try:
        total = len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a generator, a dataset without a length
        total = None
    hidden = None if progress else True  # None: shown on a terminal only
    bar = tqdm(iter(loader), description, total, leave=False, unit=unit, disable=hidden)
    return iter(bar)


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
        return {key: to_device(entry, device) for key, entry in value.items()}
    return value


def examples(x: Any, which: slice | Tensor) -> Any:
    """Some examples of an input whose first axis they are, or that is indexed by examples."""
    if isinstance(x, Mapping):
        return {key: tensor[which] for key, tensor in x.items()}
    return x[which]


def example_shapes(x: Any) -> Any:
    """The shapes of one example, as a value that can be compared."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def detached(x: Any, device: torch.device) -> Any:
    """The input on the device, detached; inference tensors, which no graph takes, are copied."""
    x = to_device(x, device)
    if isinstance(x, Mapping):
        return {key: detached(value, device) for key, value in x.items()}
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x.is_inference() else x.detach()


def splits_by_example(x: Any, y: Any) -> bool:
    """Whether the input has as many examples as there are targets."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets


def parts(x: Any, y: Any, size: int | None) -> Iterator[tuple[Any, Any]]:
    """The batch in even parts of at most ``size`` examples; whole if that is None."""
    if size is None or not splits_by_example(x, y):
        yield x, y
        return
    size = math.ceil(len(y) / math.ceil(len(y) / size))
    for start in range(0, len(y), size):
        which = slice(start, start + size)
        yield examples(x, which), y[which]


@dataclass(frozen=True)
class Plan:
    """How a model's batches run fastest; only rounding changes."""

    part_size: int | None = None
    """How many examples run at once; None: batches stay whole."""
    channels_last: bool = False
    """Whether convolutions run in that memory format."""
    splits: bool = False
    """Whether an example alone has the same output as in a batch, so that batches may be split."""


def make_plan(model: nn.Module, x: Any, device: torch.device) -> Plan:
    """How to run batches like this one, tried on its first two examples.

    Batches whose rows are not independent examples stay whole, and a model whose output depends on
    the memory format keeps its own. On a GPU batches always stay whole, since small ones are slow.
    """
    N = num_examples(x)
    if not N:
        return Plan()
    on_cpu = device.type == "cpu"
    largest = 0

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        # Dropout that is on must not use up the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            one = call_with(model, {}, examples(x, slice(1)))
            by_example = largest
            two = call_with(model, {}, examples(x, slice(2)))
            channels_last = on_cpu and _takes_channels_last(model, examples(x, slice(2)), two)
        splits = N > 1 and by_example > 0 and len(two) == 2 and close(two[:1], one)
    # A model may need a whole batch. If that fails as well, the pass reports it with its cause.
    except Exception:
        return Plan()
    finally:
        for handle in handles:
            handle.remove()
    size = max(1, LARGEST_ACTIVATION // by_example) if splits and on_cpu else None
    return Plan(size, channels_last, splits)


def _takes_channels_last(model: nn.Module, x: Any, f: Tensor) -> bool:
    try:
        return close(f, call_with(model, {}, x, channels_last=True))
    except RuntimeError:
        return False
