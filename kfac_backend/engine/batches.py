"""Batches and inputs: from what a loader yields to what a model takes, and some examples of it.

A batch is a pair, a mapping, or what ``batch=`` reads (`split_batch`). An input is a tensor, an
object, a mapping, or `Arguments`. What the targets mean is in `engine.task`, and the model is
called in `engine.model_calls`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy as copy_of
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.options import TargetOptions


def each_batch(loader: Iterable[Any], description: str, progress: bool = False) -> Iterator[Any]:
    """The batches of one pass over a loader, with a progress bar on a terminal if asked for.

    The loader is iterated once. ``tqdm.auto.tqdm(loader)`` would call ``iter`` twice, so that a
    DataLoader would start its workers twice and draw more seeds.
    """
    if not progress:
        return iter(loader)
    # disable=None: shown on a terminal only.
    total = length(loader)
    return iter(tqdm(iter(loader), description, total, leave=False, unit="batch", disable=None))


def length(loader: Any) -> int | None:
    """The number of a loader's batches; None of a generator, or of a dataset without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def check_read_twice(data: Iterable[Any]) -> None:
    """Raise a TypeError for an iterator, from which a second pass would get no batch."""
    if isinstance(data, Iterator):  # which, unlike iter(data), draws no random numbers
        raise TypeError(
            f"The data is a {type(data).__name__}, which can be read only once, and it is read "
            "several times; pass a DataLoader or a list of batches."
        )


class SplitBatch(NamedTuple):
    """A batch's input and targets, which `split_batch` returns as they are."""

    x: Any
    y: Any


def split_batch(batch: Any, options: TargetOptions) -> tuple[Any, Any]:
    """A batch's input and targets.

    The input is what the model takes: a tensor, an object, a mapping, or `Arguments`.

    Raises:
        KeyError: a mapping without a key that the options name.
        TypeError: a batch of another form.
    """
    if isinstance(batch, SplitBatch):
        return batch
    if options.batch is not None:
        try:
            args, kwargs, y = options.batch(batch)
            of_call = Arguments({**dict(enumerate(args)), **kwargs})
        except (TypeError, ValueError) as error:
            raise TypeError(
                "batch= is a function of a batch that returns (args, kwargs, y): the model's "
                f"arguments and the targets. This one failed: {type(error).__name__}: {error}"
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
                        f"A batch has keys {', '.join(map(str, batch))}, but no '{key}'; pass "
                        f"those that it has: dict_key_x (of the model's input; None takes the "
                        f"mapping as a whole) and dict_key_y (of the targets). {option} is "
                        f"{getattr(options, option)!r}."
                    )
        if isinstance(names, str):
            x = batch[names]
        elif names is not None:
            x = Arguments({name: batch[name] for name in names})
        return x, batch[options.dict_key_y]
    try:
        if isinstance(batch, Tensor):  # one with two rows would unpack into x and y
            raise TypeError
        x, y = batch
    except (TypeError, ValueError):
        raise TypeError(
            f"A batch is {type(batch).__name__}; expected (x, y) or a mapping with "
            f"'{options.dict_key_y}'; for others pass batch=, a function that returns "
            "(args, kwargs, y). A DataLoader of them is data, or a list: of one batch [(x, y)]."
        ) from None
    return x, y


class Arguments(dict[Any, Any]):
    """Several arguments of a model's call: positional ones by their number, others by their name.

    A mapping of another kind may also be a model's one argument, see `arguments`.
    """


def map_entries(function: Callable[[Any], Any], x: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping with the function's value of each entry; arguments remain `Arguments`."""
    entries = {key: function(value) for key, value in x.items()}
    return Arguments(entries) if isinstance(x, Arguments) else entries


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments by which a model takes an input.

    A forward with one argument takes a mapping whole. Otherwise the mapping's entries are keyword
    arguments. Entries that the forward does not name are left out, and so are "labels", from which
    such models would compute a loss.
    """
    if isinstance(x, Arguments):
        positions = [key for key in x if isinstance(key, int)]
        return tuple(x[key] for key in positions), {k: x[k] for k in x if k not in positions}
    if not isinstance(x, Mapping):
        return (x,), {}
    names, takes_any = argument_names(model)
    if len(names) == 1:  # whatever it is called
        return (x,), {}
    keywords = {key: x[key] for key in x if key != "labels" and (takes_any or key in names)}
    return ((), keywords) if keywords else ((x,), {})


def argument_names(model: nn.Module) -> tuple[list[str], bool]:
    """A forward's named arguments, and whether it names none and takes any, as a wrapper's does.

    Of peft's wrapper, they are those of the model that it adapts.
    """
    own: Any = inspect.signature(model.forward).parameters.values()
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own):
        adapted: Any = getattr(model, "get_base_model", lambda: model)()
        own = inspect.signature(adapted.forward).parameters.values()
    parameters = list(own)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return names, not names and any(p.kind == p.VAR_KEYWORD for p in parameters)


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


def detached(x: Any, device: torch.device) -> Any:
    """The input on the device, detached; inference tensors, which no graph takes, are copied."""
    if isinstance(x, Tensor):
        x = x.to(device)
        return x.clone() if x.is_inference() else x.detach()
    if isinstance(x, Mapping):
        return map_entries(lambda value: detached(value, device), x)
    return to_device(x, device)


def copied(value: Any) -> Any:
    """A value whose tensors are copies, also inside of mappings and of objects that hold them."""
    if hasattr(value, "clone"):  # tensors, which keep their graph, and graphs
        return value.clone()
    if isinstance(value, Mapping):
        return map_entries(copied, value)
    if type(value) in (list, tuple):
        return type(value)(copied(entry) for entry in value)
    if hasattr(value, "to") and hasattr(value, "__dict__"):  # a user's object of tensors
        copy = copy_of(value)
        vars(copy).update(copied(vars(value)))
        return copy
    return value


def num_examples(x: Any) -> int | None:
    """N, the length of an input's first axis; None if it has no such number.

    Tensors, mappings of tensors of one length, and objects with a length and a method ``to`` do.
    """
    if not isinstance(x, Tensor | Mapping):
        return len(x) if hasattr(x, "__len__") and hasattr(x, "to") else None
    tensors = x.values() if isinstance(x, Mapping) else [x]
    lengths = {len(t) if isinstance(t, Tensor) and t.dim() > 0 else None for t in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def examples(x: Any, index: slice | Tensor | None) -> Any:
    """Some examples of an input whose first axis they are, or that is indexed by examples.

    None adds the first axis to a single example.
    """
    if isinstance(x, Mapping):
        return map_entries(lambda tensor: tensor[index], x)
    return x[index]


def example_shapes(x: Any) -> Any:
    """The shapes of one example, as a value that can be compared."""
    if isinstance(x, Mapping):
        return tuple((key, example_shapes(value)) for key, value in x.items())
    return x.shape[1:] if isinstance(x, Tensor) else None


def splits_by_example(x: Any, y: Any) -> bool:
    """Whether the input has as many examples as there are targets."""
    targets = len(y) if isinstance(y, Tensor) and y.dim() > 0 else None
    return targets is not None and num_examples(x) == targets
