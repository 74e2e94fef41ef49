"""Hooks on the optimisers' steps: they add the prior's gradient, and end the epochs.

A pre-hook comes before a step, but after `GradScaler.step` has unscaled the gradients, and after
the loop has clipped them. Of a step with a closure it comes before the backward pass, and so hands
on a closure that adds the prior's gradient after it. Fused optimisers unscale in their own step and
are called with infinite gradients, too: they then have the attributes ``grad_scale`` and
``found_inf``. A step that a scaler skips is none.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from marglik.training import algorithm
from marglik.training.state import LearnerState, Problem

_HANDLES: "WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]]" = WeakKeyDictionary()
"""The hooks of each optimiser, so that another start replaces them."""


class StepHooks:
    """The hooks of a training, until `remove`, or until it is no longer referred to.

    The optimisers refer to it weakly, so that a loop may end in any way.

    Args:
        problem: what is trained.
        state: changed by the steps.
    """

    def __init__(self, problem: Problem, state: LearnerState) -> None:
        self.problem, self.state = problem, state
        hooks = weakref.ref(self)
        for part in problem.parts:
            _HANDLES[part.optimizer] = [
                part.optimizer.register_step_pre_hook(partial(_before_step, hooks, part.index)),
                part.optimizer.register_step_post_hook(partial(_after_step, hooks, part.index)),
            ]
        self._handles = [handle for part in problem.parts for handle in _HANDLES[part.optimizer]]
        weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def add_penalty(self, optimizer: torch.optim.Optimizer, part: int) -> None:
        """Add the prior's gradient, if the step will be made."""
        if not _is_skipped(optimizer):
            scale = getattr(optimizer, "grad_scale", None)
            algorithm.penalty(self.problem, self.state, 1.0 if scale is None else scale, part)

    def end_of_step(self, part: int) -> None:
        """End the epoch after the last of its steps; after an error in it, after the next step."""
        steps, state = self.problem.steps_per_epoch, self.state
        is_last = part == len(self.problem.parts) - 1
        if steps and is_last and state.steps[part] >= (state.epoch + 1) * steps:
            algorithm.end_of_epoch(self.problem, state, state.epoch + 1)


def _before_step(
    hooks: Callable[[], StepHooks | None],
    part: int,
    optimizer: torch.optim.Optimizer,
    arguments: Any,
    keywords: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    own = hooks()
    if own is None:
        return None
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        own.add_penalty(optimizer, part)
        return None
    calls: list[Any] = []

    def with_prior() -> Any:
        if calls:
            raise RuntimeError(
                f"{type(optimizer).__name__} has evaluated its closure twice in one step; the "
                "prior learns in steps of one evaluation, as those of SGD and Adam."
            )
        calls.append(closure())
        own.add_penalty(optimizer, part)
        return calls[0]

    return (arguments[0], with_prior, *arguments[2:]), {
        name: value for name, value in keywords.items() if name != "closure"
    }


def _after_step(
    hooks: Callable[[], StepHooks | None], part: int, optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    own = hooks()
    if own is not None and not _is_skipped(optimizer):
        own.end_of_step(part)


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler makes a fused optimiser leave the parameters as they are."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def remove_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Remove the hooks of an earlier training, if there are any."""
    for optimizer in optimizers:
        _remove(_HANDLES.pop(optimizer, []))
