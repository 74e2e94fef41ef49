"""Hooks: one forward pass, then backward passes to the first tracked outputs only.

No parameter requires a gradient meanwhile, so no weight gradient is ever computed. Rules see inputs
and gradients as they pass by.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_backend.coverage import Coverage, TrackedLayer

__all__ = ["Capture", "call_with", "first_input"]

OnInput = Callable[[TrackedLayer, Tensor], None]
OnGradient = Callable[[TrackedLayer, Tensor | None, Tensor], None]


class Capture:
    """A context in which the tracked layers show their inputs and their outputs' gradients.

    Args:
        model: the model.
        coverage: its tracked layers.
        on_input: called with (layer, input) in the forward pass.
        on_gradient: called with (layer, input or None, output gradient) in each backward pass; the
            input is there if the layer's rule needs it to add a gradient.
        channels_last: run convolutions in that memory format; their outputs and gradients then
            have it, too.
        batched: propagate all vectors back at once, by torch.func.vmap. Fewer launches, V times
            the memory of a backward pass; never faster on a CPU.
        keep_inputs: hand all layers' inputs to ``on_gradient``, whether their rules need them or
            not.

    Raises:
        NotImplementedError: in the forward pass, a layer that runs twice, or under no_grad.
        TypeError: in the forward pass, a layer's input that is not of floating point.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        on_input: OnInput,
        on_gradient: OnGradient,
        *,
        channels_last: bool = False,
        batched: bool = False,
        keep_inputs: bool = False,
    ) -> None:
        self._model = model
        self._coverage = coverage
        self._on_input = on_input
        self._on_gradient = on_gradient
        self._channels_last = channels_last
        self._batched = batched
        self._keep_inputs = keep_inputs
        self._handles: list[RemovableHandle] = []
        self._sources: list[Tensor] = []
        self._seen: set[str] = set()

    def __enter__(self) -> "Capture":
        for tracked in self._coverage.layers:
            before, after = self._pre_hook(tracked), self._forward_hook(tracked)
            layer = tracked.layer
            self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sources.clear()

    def forward(self, x: Any) -> Any:
        """The model's output at x, with a graph down to the first tracked outputs."""
        self._sources.clear()
        self._seen.clear()
        with torch.enable_grad():
            return call_with(self._model, {}, x, self._channels_last)

    def backward(self, f: Tensor, vectors: Iterable[Tensor]) -> None:
        """Propagate each vector (in the shape of f) back from f."""

        def propagate(vector: Tensor) -> Tensor:
            torch.autograd.grad(f, self._sources, vector, retain_graph=True, allow_unused=True)
            return vector

        vectors = (vector.to(f.dtype) for vector in vectors)
        # Without a graph the output depends on no tracked layer: all gradients are zero.
        if not f.requires_grad:
            return
        if self._batched:
            torch.func.vmap(propagate)(torch.stack(list(vectors)))
            return
        for vector in vectors:
            propagate(vector)

    def _pre_hook(self, tracked: TrackedLayer) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            a = first_input(args, kwargs)
            if not a.is_floating_point():
                raise TypeError(
                    f"Layer {tracked} got an input of dtype {a.dtype}; it needs floating point. "
                    "Convert the data, for example x.float() / 255 for images in uint8."
                )
            if not torch.is_grad_enabled():
                raise NotImplementedError(
                    f"Layer {tracked} runs without gradients (under torch.no_grad, or in a "
                    "reentrant checkpoint). Freeze it (requires_grad_(False)), or let gradients "
                    "through."
                )
            if tracked.name in self._seen:
                raise NotImplementedError(
                    f"Layer {tracked} runs more than once in a forward pass; tied weights are not "
                    "supported yet. Use separate layers, or freeze it (requires_grad_(False))."
                )
            self._seen.add(tracked.name)

        return hook

    def _forward_hook(self, tracked: TrackedLayer) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            a = first_input(args, kwargs).detach()
            self._on_input(tracked, a)
            kept = a if self._keep_inputs or tracked.rule.needs_input else None
            version = a._version  # pyright: ignore[reportPrivateUsage]

            def on_gradient(b: Tensor) -> None:
                if kept is not None and kept._version != version:  # pyright: ignore
                    raise NotImplementedError(
                        f"The input of layer {tracked} was modified in place after the layer had "
                        "read it, so that it could not be trained either. Modify a copy."
                    )
                self._on_gradient(tracked, kept, b)

            if not output.requires_grad:
                source = output.detach().requires_grad_()
                self._sources.append(source)
                # In-place activations must not touch a leaf.
                output = source.clone()
            if self._batched:
                return _Tap.apply(output, on_gradient)
            output.register_hook(on_gradient)
            return output

        return hook


class _Tap(torch.autograd.Function):
    """The identity; its gradients are shown to a callback, all vectors of a vmap at once."""

    @staticmethod
    def forward(x: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.on_gradient = inputs
        ctx.mark_dirty(x)  # no copy, and activations may go on in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _Show.apply(grad_outputs[0], ctx.on_gradient), None


class _Show(torch.autograd.Function):
    """The identity on gradients, which calls back outside of vmap."""

    @staticmethod
    def forward(b: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        on_gradient(b)
        return b.view_as(b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Nothing: there are no second derivatives."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Tensor, int]:
        b, on_gradient = args
        b = b.movedim(in_dims[0], 0)  # (V, N, ...)
        on_gradient(b.flatten(0, 1))
        return b, 0


def call_with(
    model: nn.Module, parameters: dict[str, Tensor], x: Any, channels_last: bool = False
) -> Any:
    """The model's output at x with these parameters, and its other parameters as constants."""
    constants = {name: p.detach() for name, p in model.named_parameters()}
    if channels_last:  # a convolution's output takes its weight's memory format
        for name, p in constants.items():
            if p.dim() == 4:
                constants[name] = p.contiguous(memory_format=torch.channels_last)
    return torch.func.functional_call(model, constants | parameters, (x,))


def first_input(args: tuple, kwargs: dict) -> Tensor:
    """A layer's input, from the arguments that a hook sees."""
    return args[0] if args else next(iter(kwargs.values()))
