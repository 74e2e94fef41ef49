"""Calling a model with other parameters, and with layers whose parts hooks can see.

Whatever happens meanwhile, errors and interrupts, the model is afterwards what it was.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda

from kfac_backend.model.memory import is_out_of_memory
from kfac_backend.model.rule_assignment import RuleAssignment
from kfac_backend.threads import SharedSetting, turn_of

__all__ = [
    "arguments",
    "call_with",
    "check_output",
    "explicit_forwards",
    "forked_random_numbers",
    "logits_of",
    "num_examples",
    "own_loss",
    "plain_attention",
    "takes_labels",
    "restoration",
    "uncompiled",
]


def restoration(*modules: nn.Module) -> Callable[[], object]:
    """A function that puts these modules and all below them back into their present state.

    That is their parameters, as objects, their hooks, forwards and modes, and the thread's grad
    mode; no values. Python handles signals between its own instructions only, and what is returned
    here is one call into C, so that Ctrl-C comes before or after it, never half-way. It must be the
    whole ``finally``, since a context manager's own code can be interrupted before it cleans up::

        restore = restoration(model)
        try:
            ...
        finally:
            restore()
    """
    # torch.no_grad() cleans up in Python, too.
    steps: list[Callable[[], object]] = [
        partial(torch._C._set_grad_enabled, torch.is_grad_enabled())
    ]
    for module in {m for root in modules for m in root.modules()}:
        own = vars(module)
        kinds = ("_forward_hooks", "_forward_pre_hooks")  # and what belongs to them
        hooks = [value for key, value in own.items() if key.startswith(kinds)]
        steps += _contents([module._parameters, *hooks])
        steps.append(partial(own.update, {k: own[k] for k in ("training", "forward") if k in own}))
        if "forward" not in own:
            steps.append(partial(own.pop, "forward", None))
    return _at_once(steps)


def call_with(
    model: nn.Module,
    parameters: dict[str, Tensor],
    x: Any,
    channels_last: bool = False,
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """The model's output at x with these parameters, and its other parameters as constants.

    A mapping is the model's one argument, unless its forward names the mapping's keys, as those of
    Hugging Face's models do; an output with ``logits`` is these. Nothing is written into the
    model's own parameters.

    Args:
        model: the model.
        parameters: name -> value, for some of its parameters.
        x: the input.
        channels_last: give convolutions' weights that memory format.
        keywords: further arguments of the forward.
    """
    args, kwargs = arguments(model, x)
    kwargs = {**kwargs, **(keywords or {})}
    return logits_of(_called(model, parameters, args, kwargs, channels_last))


def takes_labels(model: nn.Module, x: Any) -> bool:
    """Whether a model's forward can be given labels, of which it may compute a loss."""
    (args, _), parameters = arguments(model, x), _parameters(model)
    return (
        any(p.name == "labels" for p in parameters)
        or _takes_anything(parameters)
        or (bool(args) and isinstance(args[0], Mapping) and "labels" in args[0])
    )


def own_loss(model: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits, and the loss that a model that `takes_labels` computes of them; None if it does not.

    Models of Hugging Face do.
    """
    (args, kwargs), parameters = arguments(model, x), _parameters(model)
    if args and isinstance(args[0], Mapping):
        args = ({**args[0], "labels": y},)
    else:
        kwargs = {**kwargs, "labels": y}
    try:
        output = _called(model, {}, args, kwargs)
    except Exception as error:
        if _takes_anything(parameters) and not is_out_of_memory(error):
            return None  # what it hands its arguments to takes no labels
        raise
    f, loss = logits_of(output), getattr(output, "loss", None)
    if not isinstance(f, Tensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return f, loss


def _called(
    model: nn.Module,
    parameters: dict[str, Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    channels_last: bool = False,
) -> Any:
    """What the model returns."""
    values = {name: p.detach() for name, p in model.named_parameters()} | parameters
    if channels_last:  # a convolution's output takes its weight's memory format
        for name, p in values.items():
            if p.dim() == 4 and name not in parameters:
                values[name] = p.contiguous(memory_format=torch.channels_last)
    state = _tied(model, values) | _changing_buffers(model)
    with turn_of(model), _no_fused_path.held(), uncompiled():
        # functional_call leaves its tensors in place of the parameters if it is interrupted as it
        # exchanges them.
        exchanged = [m._parameters for m in model.modules()]
        exchanged += [m._buffers for m in model.modules() if m.training]
        restore = _at_once(_contents(exchanged))
        try:
            return torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        finally:
            restore()


def logits_of(output: Any) -> Any:
    """A model's output, or its ``logits`` where it returns an object that has them."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and not isinstance(output, Tensor) else output


def check_output(output: object) -> None:
    """Raise a TypeError unless a model's output is a tensor."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The model returned {type(output).__name__}; a tensor of outputs (N, ..., C) is "
            "needed. Wrap it in a module that returns its logits alone."
        )


@contextmanager
def forked_random_numbers(model: nn.Module) -> Iterator[None]:
    """Dropout that is on does not use up the random numbers, and draws the same ones each time."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield


@contextmanager
def explicit_forwards(assignment: RuleAssignment) -> Iterator[None]:
    """Layers that are divided into parts run by their parts."""
    replaced = []
    try:
        for divided in assignment.divided:
            if "forward" in divided.layer.__dict__:
                raise NotImplementedError(
                    f"Layer '{divided.name}' ({type(divided.layer).__name__}) has a forward of its "
                    "own, which the curvature would replace. Derive a class, or freeze it "
                    "(requires_grad_(False))."
                )
            by_parts = partial(divided.by_parts.forward, divided.layer, divided.parts)
            divided.layer.forward = by_parts
            replaced.append(divided.layer)
        yield
    finally:
        for layer in replaced:
            del layer.forward


def num_examples(x: Any) -> int | None:
    """N of an input with the examples in front; None if that cannot be told.

    Such inputs are tensors, mappings of tensors, and objects with a length and a method ``to``.
    """
    if not isinstance(x, Tensor | Mapping):
        return len(x) if hasattr(x, "__len__") and hasattr(x, "to") else None
    tensors = x.values() if isinstance(x, Mapping) else [x]
    lengths = {len(t) if isinstance(t, Tensor) and t.dim() > 0 else None for t in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model takes an input: as its one argument, or a mapping's entries by their names.

    A forward of one argument takes the mapping whole. Else entries that it does not name are left
    out, and so are "labels": such models would compute a loss of them.
    """
    if not isinstance(x, Mapping):
        return (x,), {}
    parameters = _parameters(model)
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(named) == 1:  # whatever it is called
        return (x,), {}
    takes_any = _takes_anything(parameters)
    known = {key: x[key] for key in x if key != "labels" and (takes_any or key in named)}
    return ((), known) if known else ((x,), {})


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(model.forward).parameters.values())


def _takes_anything(parameters: list[inspect.Parameter]) -> bool:
    """Whether a forward, such as a wrapper's, names no argument and takes any keyword."""
    kinds = {p.kind for p in parameters}
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return kinds <= variable and inspect.Parameter.VAR_KEYWORD in kinds


def _contents(mappings: Iterable[Any]) -> list[Any]:
    """What gives dictionaries their present contents back, in calls into C.

    Others, those of TorchScript's modules, which cannot be exchanged anyway, are left out.
    """
    own = [mapping for mapping in mappings if isinstance(mapping, dict)]
    return [m.clear for m in own] + [partial(m.update, m.copy()) for m in own]


def _at_once(steps: list[Callable[[], object]]) -> Callable[[], object]:
    """All these calls into C as a single one."""
    return partial(deque, map(call, steps), 0)


def _tied(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values under all names that tied tensors have, but one for each place.

    functional_call's own tie_weights visits a module with two names twice, and leaves it without
    its parameters afterwards (pytorch issue 164759).
    """
    first = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{prefix}.{local}" if prefix else local: values[first[id(p)]]
        for prefix, module in model.named_modules()  # each module once
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _changing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what modules in train mode may change in place, such as running statistics."""
    return {
        f"{prefix}.{local}" if prefix else local: buffer.clone()
        for prefix, module in model.named_modules()
        if module.training
        for local, buffer in module.named_buffers(recurse=False)
    }


_no_fused_path = SharedSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
"""PyTorch's fused inference path would run a transformer's layers unseen."""


def uncompiled() -> AbstractContextManager[None]:
    """What `torch.compile` was asked to compile runs as Python for a while, where hooks see all.

    Else torch would compile it anew for each pass's hooks, up to a limit, and then warn.
    """
    # Without this module, whose import takes seconds, nothing can have been compiled.
    return _eager.held() if "torch._dynamo" in sys.modules else nullcontext()


_eager: SharedSetting[Any] = SharedSetting(
    # It takes effect when it is made, and knows what was there before.
    lambda: torch.compiler.set_stance("force_eager"),
    lambda stance: stance and stance.__exit__(None, None, None),
    None,
)


def _attentions() -> tuple[bool, ...]:
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def _set_attentions(enabled: tuple[bool, ...]) -> None:
    cuda.enable_flash_sdp(enabled[0])
    cuda.enable_mem_efficient_sdp(enabled[1])
    cuda.enable_cudnn_sdp(enabled[2])
    cuda.enable_math_sdp(enabled[3])


plain_attention = SharedSetting(_attentions, _set_attentions, (False, False, False, True))
"""Fused attention, on a CPU too, cannot be differentiated twice, nor by vmap; its plain
formula can."""
