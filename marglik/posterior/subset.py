"""The last layer of a network, whose parameters alone have a posterior in last-layer Laplace."""

from typing import Any, Literal

import torch
from torch import nn

from kfac_backend.model.batches import to_device
from kfac_backend.model.calls import call_with
from marglik.eval_mode import in_eval_mode

__all__ = ["Layers", "freeze_all_but", "last_layer"]

Layers = Literal["all", "last"]
"""Whose uncertainty counts: "last" treats all other layers as constants."""


def last_layer(model: nn.Module, x: Any) -> str:
    """The name of the layer with trainable parameters that starts last at input x.

    A module with parameters of its own and other layers inside starts before these layers, and so
    is not the last one.

    Raises:
        ValueError: no layer with a trainable parameter of its own runs.
    """
    ran: list[str] = []

    def run() -> None:
        for name, module in model.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        with torch.no_grad():
            call_with(model, {}, to_device(x, next(model.parameters()).device))

    in_eval_mode(model, run)()  # removes the hooks as well
    if not ran:
        raise ValueError(
            f"{type(model).__name__} runs no layer with trainable parameters; it has no last layer."
        )
    return ran[-1]


def freeze_all_but(model: nn.Module, layer: str) -> None:
    """Freeze all parameters but those of one layer."""
    kept = set(model.get_submodule(layer).parameters())
    for p in model.parameters():
        p.requires_grad_(p in kept)
