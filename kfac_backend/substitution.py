"""The proof that what a pass runs instead of the model's own is equal to it: parts, and copies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.calls import call_with, explicit_forwards, forked_random_numbers
from kfac_backend.capture import Capture
from kfac_backend.comparison import DtypesInUse, close, noise_like, same_with_derivatives
from kfac_backend.coverage import Coverage, DividedLayer, TrackedLayer
from kfac_backend.memory import is_out_of_memory
from kfac_backend.rules import Use

__all__ = ["no_copies", "verify_divided", "verify_own_parameters"]


def verify_divided(model: nn.Module, coverage: Coverage, x: Any) -> None:
    """Compare layers' forwards by parts with their own, and the derivatives in their parameters."""
    divided = [d for d in coverage.divided if d.by_parts.is_checked]
    if not divided:
        return
    parameters = {
        name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }

    def check(d: DividedLayer) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            own = [p for p in layer.parameters() if p.requires_grad]
            rates = [(m, m.training) for m in layer.modules()]
            used = DtypesInUse()
            layer.train(False)  # dropout would draw other numbers in the two
            try:
                args, kwargs = _without_graph(args), _without_graph(kwargs)
                with used:
                    should = _tensor_of(type(layer).forward(layer, *args, **kwargs))
                does = _tensor_of(d.by_parts.forward(layer, d.parts, *args, **kwargs))
            except TypeError:  # a derived class with other arguments
                should, does = torch.empty(0), torch.empty(1)
            finally:
                for module, mode in rates:
                    module.training = mode
            if not same_with_derivatives(should, does, own, used.tolerance):
                raise NotImplementedError(
                    f"Layer '{d.name}' ({type(layer).__name__}) computes something else than "
                    f"{type(d.by_parts).__name__} (an overridden forward, other options, or wrong "
                    "parts). Register parts for its class (register_rule), or freeze it "
                    "(requires_grad_(False))."
                )

        return hook

    handles = [d.layer.register_forward_hook(check(d), with_kwargs=True) for d in divided]
    try:
        with torch.enable_grad():
            call_with(model, parameters, x)
    finally:
        for handle in handles:
            handle.remove()


def verify_own_parameters(model: nn.Module, coverage: Coverage, x: Any) -> None:
    """Prove that copies for each example change no output, and that their gradients add up."""
    gradients: dict[str, Tensor] = {}

    def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        for name in tracked.parameters.values():
            gradients[name] = gradients.get(name, 0) + b.sum(0).flatten()

    own = [name for t in coverage.own_parameters for name in t.parameters.values()]
    names = list(dict.fromkeys(own))  # modules may share one
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    only = Coverage([], coverage.own_parameters, coverage.divided, [], names)
    with torch.enable_grad():
        with explicit_forwards(coverage), forked_random_numbers(model), DtypesInUse() as used:
            f = call_with(model, leaves, x)
        capture = Capture(model, only, lambda tracked, use: None, record)
        if not isinstance(f, Tensor):
            return  # reported with the targets
        try:
            with forked_random_numbers(model):
                g = capture.forward(x)
        except Exception as error:  # whatever the forward does with copies
            if isinstance(error, NotImplementedError) or is_out_of_memory(error):
                raise
            raise no_copies(names) from error
        u = noise_like(f)
        same = close(f.detach(), g.detach(), used.tolerance)
        if same and f.requires_grad:
            should = torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)
            capture.backward(g, [u])
            for name, gradient in zip(names, should, strict=True):
                if gradient is not None:
                    does = gradients.get(name, torch.zeros_like(gradient).flatten())
                    same = same and close(gradient.flatten(), does, used.tolerance)
    if not same:
        raise no_copies(names)


def no_copies(names: list[str]) -> NotImplementedError:
    """What to say of own parameters whose copies the forward does not take."""
    return NotImplementedError(
        f"The forward does not take a copy for each example of {', '.join(map(repr, names))}: with "
        "(N, ...) in place of (1, ...) its output is another, or examples mix. Use them "
        "elementwise, give register_parameters the shape as which they are broadcast, or freeze "
        "them (requires_grad_(False))."
    )


def _tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _without_graph(arguments: Any) -> Any:
    """Arguments as constants; the same tensor stays the same."""
    known: dict[int, Tensor] = {}

    def constant(value: Any) -> Any:
        return known.setdefault(id(value), value.detach()) if isinstance(value, Tensor) else value

    if isinstance(arguments, dict):
        return {key: constant(value) for key, value in arguments.items()}
    return tuple(constant(value) for value in arguments)
