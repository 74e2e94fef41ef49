"""Ctrl-C at any point: KeyboardInterrupt where CPython handles signals, and nowhere else.

Python runs a signal's handler when a function of its own begins and when one of C has returned,
both of which a profile function sees. (It does so at backward jumps, too, which come with either
in any loop that does something.) So a clean-up that is one call into C cannot be interrupted, and
one of several lines can.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

POINTS = ("call", "c_return")

WHERE_MODELS_CHANGE = (
    "calls.py", "capture.py", "contextlib.py", "grad_mode.py", "hooks.py", "modes.py",
    "_named_member_accessor.py", "output_distribution.py", "stateless.py", "substitution.py",
    "verification.py",
)  # fmt: skip
"""Files whose places are worth an interrupt: hooks, forwards, modes and parameters change there."""


def run_with(profile: Callable[[FrameType, str, Any], None], function: Callable[[], Any]) -> None:
    """Run a function with a profile function, which may raise KeyboardInterrupt.

    Without the garbage collector, which may call functions at any point, so that points are
    numbered alike in each run.
    """
    collects = gc.isenabled()
    gc.disable()
    with settings_of_torch():
        sys.setprofile(profile)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()


@contextmanager
def settings_of_torch() -> Iterator[None]:
    """A context that restores those of torch's own settings which an interrupt can leave changed.

    `torch.autocast` counts one level too many if it is interrupted as it begins or ends, and then
    keeps its copies of weights for ever, so that no later test would see them trained;
    `torch.compiler.set_stance` takes effect before it returns, and nothing would be compiled.
    """
    levels = _levels_of_autocast()
    try:
        yield
    finally:
        for _ in range(_levels_of_autocast() - levels):
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("default")


def _levels_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def points_of(function: Callable[[], Any]) -> list[int]:
    """The points, by their numbers, at which a model may be half changed.

    Of the places in the code that run often the first and the last time.
    """
    places: dict[tuple[CodeType, int, str], list[int]] = {}
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        if event in POINTS:
            number += 1
            if frame.f_code.co_filename.endswith(WHERE_MODELS_CHANGE):
                places.setdefault((frame.f_code, frame.f_lasti, event), []).append(number)

    run_with(count, function)
    return sorted({n for numbers in places.values() for n in (numbers[0], numbers[-1])})


def interrupt(function: Callable[[], Any], point: int) -> None:
    """Run a function, and interrupt it at a point."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        if event in POINTS:
            number += 1
            if number == point:
                raise KeyboardInterrupt

    run_with(count, function)


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What must be the same afterwards: values, objects and their types, flags, hooks, modes."""
    found: dict[Any, Any] = {"grad mode": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        found[name, "mode"] = module.training
        found[name, "forward"] = vars(module).get("forward")
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_with_kwargs", "_always_called")):
                found[name, key] = dict(value)
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                flags = type(tensor), tensor.requires_grad, tensor.grad is None, tensor.dtype
                found[name, local] = id(tensor), *flags
                found[name, local, "values"] = tensor.detach().flatten().tolist()
    return found


def check_interrupts(
    model: nn.Module, function: Callable[[], Any], most: int = 40, least: int = 40
) -> None:
    """Interrupt a function at up to ``most`` places; the model must stay as it was."""
    before = everything_of(model)
    points = points_of(function)
    assert everything_of(model) == before and len(points) >= least
    for point in points[:: -(-len(points) // most)]:
        interrupt(function, point)
        after = everything_of(model)
        assert after == before, [key for key in before if before[key] != after.get(key)]
    function()
