"""Find embedding rows that are padding: constant rows of parameters.

torch passes no gradient to the row ``padding_idx`` of an embedding's weight. Training does not
change the row, so it is no parameter: it has no curvature and no prior, and samples do not change
it. This holds if nothing else uses the weight. An output layer that shares it uses that row, too.
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
    """Return the row of each parameter that is only padding, from a forward pass at x.

    Frozen parameters are omitted. The model runs in its present mode.
    """
    x = to_device(x, next(model.parameters()).device)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    values = {name: p for name, p in detached_parameters(model).items() if name in trainable}
    with torch.no_grad(), _Uses(values) as uses:
        call_with(model, values, x)
    only = {name: next(iter(rows)) for name, rows in uses.rows.items() if len(rows) == 1}
    return {name: row for name, row in only.items() if row is not None}


class _Uses(TorchFunctionMode):
    """Context that records which row of some tensors is padding in each of their uses."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in values.items()}
        self.rows: dict[str, set[int | None]] = {}
        """Rows by name; None for a use without padding, or for a use that is no lookup."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        names = [name for t in tensors_in((args, kwargs)) if (name := self._names.get(id(t)))]
        if names and tensors_in(output):  # not only a shape, for example
            row, _ = padding_of(func, args, kwargs or {})
            for name in names:
                self.rows.setdefault(name, set()).add(row)
        return output


class NoTangentOfPadding(TorchFunctionMode):
    """Context in which forward-mode differentiation treats an embedding's padding as constant.

    This agrees with backward mode. torch's forward mode alone propagates the row's tangent.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        row, tokens = padding_of(func, args, kwargs or {})
        if row is None or func is F.embedding_bag:  # embedding_bag leaves padding out of its sums
            return output
        return torch.where((tokens == row)[..., None], output.detach(), output)


def padding_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int | None, Any]:
    """Return the padding row of a lookup, counted from 0, and the tokens; None without either."""
    if func not in LOOKUPS:
        return None, None
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    row = arguments.get("padding_idx")
    row = row if row is None or row >= 0 else row + len(arguments["weight"])
    return row, arguments["input"]
