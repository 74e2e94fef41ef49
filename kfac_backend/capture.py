"""Hooks: one forward pass, then backward passes to the first tracked outputs only.

No parameter requires a gradient meanwhile, so no weight gradient is ever computed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_backend.coverage import Coverage, TrackedLayer, call_with, first_input

__all__ = ["Capture"]

OnInput = Callable[[TrackedLayer, Tensor], None]
OnGradient = Callable[[TrackedLayer, Tensor | None, Tensor], None]


class Capture:
    """A context in which the tracked layers show their inputs and their outputs' gradients.

    Args:
        model: the model.
        coverage: its tracked layers.
        on_input: called with (layer, input) in the forward pass.
        on_gradient: called with (layer, input or None, output gradient) in each backward pass; the
            input is there if the layer's rule needs it.
    """

    def __init__(
        self, model: nn.Module, coverage: Coverage, on_input: OnInput, on_gradient: OnGradient
    ) -> None:
        self._model = model
        self._coverage = coverage
        self._on_input = on_input
        self._on_gradient = on_gradient
        self._handles: list[RemovableHandle] = []
        self._sources: list[Tensor] = []

    def __enter__(self) -> "Capture":
        for tracked in self._coverage.layers:
            hook = self._forward_hook(tracked)
            self._handles.append(tracked.layer.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sources.clear()

    def forward(self, x: Any) -> Any:
        """The model's output at x, with a graph down to the first tracked outputs."""
        self._sources.clear()
        with torch.enable_grad():
            return call_with(self._model, {}, x)

    def backward(self, f: Tensor, vectors: Iterable[Tensor]) -> None:
        """Propagate each vector (in the shape of f) back from f."""
        for vector in vectors:
            # Without a graph the output depends on no tracked layer: all gradients are zero.
            if f.requires_grad:
                torch.autograd.grad(f, self._sources, vector, retain_graph=True, allow_unused=True)

    def _forward_hook(self, tracked: TrackedLayer) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            a = first_input(args, kwargs).detach()
            self._on_input(tracked, a)
            # A copy, as an activation may overwrite the input in place before the backward.
            kept = a.clone() if tracked.rule.needs_input else None
            if not output.requires_grad:
                source = output.detach().requires_grad_()
                self._sources.append(source)
                # In-place activations must not touch a leaf.
                output = source.clone()
            output.register_hook(lambda b: self._on_gradient(tracked, kept, b.detach()))
            return output

        return hook
