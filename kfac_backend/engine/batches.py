"""Split a loader's batches into model inputs and targets, and select examples of an input.

A batch is a pair, a mapping, or a value that ``batch=`` converts (`split_batch`). An input is a
tensor, an object, a mapping, or `Arguments`. `engine.task` interprets the targets, and
`engine.model_calls` calls the model.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy as copy_of
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.options import TargetOptions

NO_BATCH = (
    "The data is empty: the loader yields no batch. Likely causes: an empty data set, "
    "drop_last=True with fewer examples than a batch, or a generator that was already read."
)
"""Error of a loader without batches."""


def each_batch(loader: Iterable[Any], description: str, progress: bool = False) -> Iterator[Any]:
    """Return the batches of one pass over a loader, with an optional progress bar on a terminal.

    The loader is iterated once. ``tqdm.auto.tqdm(loader)`` would call ``iter`` twice, so a
    DataLoader would start its workers twice and draw more seeds.
    """
    if not progress:
        return iter(loader)
    # disable=None shows the bar on a terminal only.
    total = length(loader)
    return iter(tqdm(iter(loader), description, total, leave=False, unit="batch", disable=None))


def length(loader: Any) -> int | None:
    """Return the number of a loader's batches, or None for generators and unsized datasets."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def check_read_twice(data: Iterable[Any]) -> None:
    """Raise a TypeError for an iterator, because a second pass over it would get no batch."""
    if isinstance(data, Iterator):  # unlike iter(data), this draws no random numbers
        raise TypeError(
            f"The data is a {type(data).__name__}, which can be read only once, but it is needed "
            "several times. Pass a DataLoader or a list of batches."
        )


class SplitBatch(NamedTuple):
    """Input and targets of a batch. `split_batch` returns them unchanged."""

    x: Any
    y: Any


def split_batch(batch: Any, options: TargetOptions) -> tuple[Any, Any]:
    """Return a batch's input and targets.

    The input is the model's argument: a tensor, an object, a mapping, or `Arguments`.

    Raises:
        KeyError: a mapping lacks a key that the options name.
        TypeError: a batch has another form.
    """
    if isinstance(batch, SplitBatch):
        return batch
    if options.batch is not None:
        try:
            args, kwargs, y = options.batch(batch)
            of_call = Arguments({**dict(enumerate(args)), **kwargs})
        except (TypeError, ValueError) as error:
            raise TypeError(
                "batch= must take a batch and return (args, kwargs, y): the model's arguments and "
                f"the targets. It failed with {type(error).__name__}: {error}"
            ) from error
        return (args[0] if len(args) == 1 and not kwargs else of_call), y
    if isinstance(batch, Mapping):
        names, x = options.dict_key_x, batch
        keys_of: dict[str, tuple[str, ...]] = {"dict_key_y": (options.dict_key_y,)}
        if names is not None:
            keys_of["dict_key_x"] = (names,) if isinstance(names, str) else names
        for option, keys in keys_of.items():
            for key in keys:
                if key not in batch:
                    raise KeyError(
                        f"A batch has no '{key}', but {option} is {getattr(options, option)!r}. "
                        f"Its keys are {', '.join(map(str, batch))}. Pass dict_key_x, the key of "
                        "the model's input (None: the whole mapping), and dict_key_y, the key of "
                        "the targets."
                    )
        if isinstance(names, str):
            x = batch[names]
        elif names is not None:
            x = Arguments({name: batch[name] for name in names})
        return x, batch[options.dict_key_y]
    try:
        if isinstance(batch, Tensor):  # a tensor with two rows would unpack into x and y
            raise TypeError
        x, y = batch
    except (TypeError, ValueError):
        raise TypeError(
            f"A batch is {type(batch).__name__}, but must be (x, y) or a mapping with "
            f"'{options.dict_key_y}'. For other batches pass batch=, a function that returns "
            "(args, kwargs, y). The data is an iterable of batches; a single batch is [(x, y)]."
        ) from None
    return x, y


class Arguments(dict[Any, Any]):
    """Several arguments of a model's call: positional ones by index, keyword arguments by name.

    A mapping of another class may also be the model's single argument, see `arguments`.
    """


def map_entries(function: Callable[[Any], Any], x: Mapping[Any, Any]) -> dict[Any, Any]:
    """Apply a function to each entry of a mapping; `Arguments` remain `Arguments`."""
    entries = {key: function(value) for key, value in x.items()}
    return Arguments(entries) if isinstance(x, Arguments) else entries


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for calling a model on an input.

    A forward with one argument receives a mapping whole. Otherwise the mapping's entries become
    keyword arguments. Entries that the forward does not name are omitted, and so is "labels",
    because such models would compute a loss from it.
    """
    if isinstance(x, Arguments):
        positions = [key for key in x if isinstance(key, int)]
        return tuple(x[key] for key in positions), {k: x[k] for k in x if k not in positions}
    if not isinstance(x, Mapping):
        return (x,), {}
    names, takes_any = argument_names(model)
    if len(names) == 1:  # whatever the argument's name
        return (x,), {}
    keywords = {key: x[key] for key in x if key != "labels" and (takes_any or key in names)}
    return ((), keywords) if keywords else ((x,), {})


def argument_names(model: nn.Module) -> tuple[list[str], bool]:
    """Return a forward's argument names, and whether it only takes ``*args`` or ``**kwargs``.

    For peft's wrapper these are the names of the adapted model.
    """
    own: Any = inspect.signature(model.forward).parameters.values()
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own):
        adapted: Any = getattr(model, "get_base_model", lambda: model)()
        own = inspect.signature(adapted.forward).parameters.values()
    parameters = list(own)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return names, not names and any(p.kind == p.VAR_KEYWORD for p in parameters)


def to_device(value: Any, device: torch.device) -> Any:
    """Move a value to the device: objects with a method ``to``, and the entries of mappings."""
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        raise TypeError(
            f"A batch contains {type(value).__name__}, but must contain tensors. Convert it with "
            "torch.from_numpy(array)."
        )
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return map_entries(lambda entry: to_device(entry, device), value)
    return value


def detached(x: Any, device: torch.device) -> Any:
    """Return the input on the device, detached. Inference tensors are cloned to allow a graph."""
    if isinstance(x, Tensor):
        x = x.to(device)
        return x.clone() if x.is_inference() else x.detach()
    if isinstance(x, Mapping):
        return map_entries(lambda value: detached(value, device), x)
    return to_device(x, device)


def copied(value: Any) -> Any:
    """Copy a value's tensors, also inside mappings, sequences and objects of tensors."""
    if hasattr(value, "clone"):  # tensors (which keep their graph) and graphs
        return value.clone()
    if isinstance(value, Mapping):
        return map_entries(copied, value)
    if type(value) in (list, tuple):
        return type(value)(copied(entry) for entry in value)
    if hasattr(value, "to") and hasattr(value, "__dict__"):  # a user-defined object of tensors
        copy = copy_of(value)
        vars(copy).update(copied(vars(value)))
        return copy
    return value


def num_examples(x: Any) -> int | None:
    """Return N, the length of an input's first axis, or None if it is unknown.

    It is known for tensors, mappings of tensors of equal length, and objects with ``__len__`` and
    ``to``.
    """
    if not isinstance(x, Tensor | Mapping):
        return len(x) if hasattr(x, "__len__") and hasattr(x, "to") else None
    tensors = x.values() if isinstance(x, Mapping) else [x]
    lengths = {len(t) if isinstance(t, Tensor) and t.dim() > 0 else None for t in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def examples(x: Any, index: slice | Tensor | None) -> Any:
    """Select examples of an input along its first axis, or by indexing an object.

    With index None the input is a single example, which gets a first axis.
    """
    if isinstance(x, Mapping):
        return map_entries(lambda tensor: tensor[index], x)
    return x[index]


def example_shapes(x: Any) -> Any:
    """Return the shapes of one example as a hashable value."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def splits_by_example(x: Any, y: Any) -> bool:
    """Return whether the input has as many examples as targets."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets
