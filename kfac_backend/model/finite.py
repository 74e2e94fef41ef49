"""The errors of a curvature pass for NaN and infinity."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_finite", "check_inputs"]


def check_finite(model: nn.Module, f: Tensor, x: Any) -> None:
    """Raise a ValueError that names what has NaN or infinity, if the outputs f have any."""
    # The sum is tested first, which takes a fifth of the time of testing each entry. If all entries
    # are finite it may still overflow, and then each entry is tested.
    if torch.isfinite(f.sum()) or torch.isfinite(f).all():
        return
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            raise ValueError(
                f"Parameter '{name}' contains NaN or infinity; training has diverged. "
                "Go back to an earlier state, with a smaller learning rate."
            )
    check_inputs(x)
    raise ValueError(
        "The model's output contains NaN or infinity though its parameters and inputs are "
        "finite; activations overflow. Normalise the inputs, or use float32 or float64."
    )


def check_inputs(x: Any) -> None:
    """Raise a ValueError if the inputs have NaN or infinity."""
    tensors = x.values() if isinstance(x, Mapping) else [x]
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
            raise ValueError("The inputs contain NaN or infinity; clean the data.")
