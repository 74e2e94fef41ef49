"""Padding of embeddings: rows of parameters that are constants.

torch passes no gradient to the row ``padding_idx`` of an embedding's weight. Training leaves the
row as it is, and it is no parameter: it has no curvature and no prior, and samples do not change
it. That holds where nothing else uses the weight. An output layer that shares it uses that row,
too.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_backend.engine.batches import to_device
from kfac_backend.engine.model_calls import call_with
from kfac_backend.engine.operations.follower import tensors_in
from kfac_backend.sharding import detached_parameters

LOOKUPS = (F.embedding, F.embedding_bag)
"""Functions with the arguments ``input``, ``weight`` and ``padding_idx``."""


def padding_rows(model: nn.Module, x: Any) -> dict[str, int]:
    """Parameter name -> its row that is padding and nothing else; found by a forward pass at x.

    Frozen parameters are left out. The model runs in the mode that it is in.
    """
    x = to_device(x, next(model.parameters()).device)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    values = {name: p for name, p in detached_parameters(model).items() if name in trainable}
    with torch.no_grad(), _Uses(values) as uses:
        call_with(model, values, x)
    only = {name: next(iter(rows)) for name, rows in uses.rows.items() if len(rows) == 1}
    return {name: row for name, row in only.items() if row is not None}


class _Uses(TorchFunctionMode):
    """A context that records which row of some tensors is padding in each of their uses."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in values.items()}
        self.rows: dict[str, set[int | None]] = {}
        """Name -> rows; None is that of a use without padding, or that is no lookup."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        names = [name for t in tensors_in((args, kwargs)) if (name := self._names.get(id(t)))]
        if names and tensors_in(output):  # and not its shape, say
            row = padding_of(func, args, kwargs or {})
            for name in names:
                self.rows.setdefault(name, set()).add(row)
        return output


class NoTangentOfPadding(TorchFunctionMode):
    """A context in which forward-mode differentiation takes an embedding's padding as a constant.

    As backward mode does; torch's forward mode passes the tangent of the row on.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        row = padding_of(func, args, kwargs or {})
        if row is None or func is F.embedding_bag:  # which leaves padding out of its sums
            return output
        tokens = _arguments(func, args, kwargs or {})["input"]
        return torch.where((tokens == row)[..., None], output.detach(), output)


def padding_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """The row, from 0, that is padding in a lookup; None if there is none, or for other calls."""
    if func not in LOOKUPS:
        return None
    arguments = _arguments(func, args, kwargs)
    row = arguments.get("padding_idx")
    return row if row is None or row >= 0 else row + len(arguments["weight"])


def _arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    return inspect.signature(func).bind(*args, **kwargs).arguments
