"""The string options of the package, and the one place that checks them."""

from typing import Literal, get_args

__all__ = [
    "BackwardPrecision",
    "Fisher",
    "KfacApprox",
    "Likelihood",
    "Unsupported",
    "check_option",
]

KfacApprox = Literal["expand", "reduce"]
Fisher = Literal["exact", "mc", "empirical"]
Likelihood = Literal["classification", "regression", "bernoulli"]
Unsupported = Literal["error", "freeze", "diagonal"]
BackwardPrecision = Literal["float32", "tf32", "bf16"]


def check_option(name: str, value: object, options: object) -> None:
    """Raise a ValueError that lists ``options`` (a Literal) unless ``value`` is one of them."""
    supported = get_args(options)
    if value not in supported:
        raise ValueError(
            f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, supported))}."
        )
