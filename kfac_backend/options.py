"""The options of the package, and the one place that checks them."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch

__all__ = [
    "Approximation",
    "BackwardPrecision",
    "Fisher",
    "KfacApprox",
    "Likelihood",
    "Mode",
    "ShiftLabels",
    "Unsupported",
    "check_option",
    "check_positive",
]

Mode = Literal["expand", "reduce"]
Approximation = Mode | dict[str, Mode]
"""A layer's mode, or one for each of its shared axes: {"augmentation": "reduce", "space": "expand"}
names them in their order."""
KfacApprox = Literal["expand", "reduce", "auto"] | dict[str, Approximation]
"""One mode for all layers, "auto", or patterns of layers' names with their modes; see `modes`."""
Fisher = Literal["exact", "mc", "empirical"]
Likelihood = Literal["classification", "regression", "bernoulli"]
Unsupported = Literal["error", "freeze", "diagonal"]
BackwardPrecision = Literal["float32", "tf32", "bf16"]
ShiftLabels = bool | Literal["auto"]
"""Whether labels stand one position behind the outputs that predict them; see `Targets`."""


def check_option(name: str, value: object, options: object) -> None:
    """Raise a ValueError that lists ``options`` (a Literal) unless ``value`` is one of them."""
    supported = get_args(options)
    if isinstance(value, Mapping) or value not in supported:
        raise ValueError(
            f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, supported))}."
        )


def check_positive(name: str, value: object) -> None:
    """Raise an error unless a number, or each entry of a tensor, is positive and finite."""
    try:
        numbers = torch.as_tensor(value).detach().double()
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; a number or a tensor is needed.") from None
    right = numbers.isfinite() & (numbers > 0)
    if not right.all():
        raise ValueError(f"{name} must be positive, not {numbers[~right][0].item()}.")
