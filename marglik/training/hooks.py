"""Hooks on the optimisers' steps, which add the prior's gradient and end the epochs.

A pre-hook runs before a step, but after `GradScaler.step` has unscaled the gradients and after the
loop has clipped them. If the step has a closure, the pre-hook runs before the backward pass. It
then replaces the closure by one that adds the prior's gradient afterwards. Fused optimisers unscale
the gradients in their own step and are also called with infinite gradients. They then have the
attributes ``grad_scale`` and ``found_inf``. A step that a scaler skips does not count.

The hooks also copy the weights after each step, so that `StepHooks.weights_since_steps` can compare
all of them with the present weights.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from kfac_backend.sharding import local_parts
from marglik.training import algorithm
from marglik.training.loss_agreement import LossCheck
from marglik.training.state import LearnerState, Part, Problem

_ACTIVE: "WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[StepHooks]]" = WeakKeyDictionary()
"""The hooks that each optimiser has."""

COMPARED_STEPS = 10
"""Number of first steps after which all weights are compared, regardless of torch's version
counters."""

Since = Literal["unchanged", "changed", "changed as after each step", "unclear"]
"""How the present weights differ from the weights after the latest step."""


class StepHooks:
    """The hooks of a training, active until `remove`, or until the object is deleted.

    The optimisers have weak references to it, so a loop may end in any way.

    Args:
        problem: the training problem.
        state: changed by the steps.
        optimizers: all optimisers passed to the start, including ones with only frozen tensors.
        loss_check: called before the first step.
    """

    def __init__(
        self,
        problem: Problem,
        state: LearnerState,
        optimizers: Sequence[torch.optim.Optimizer],
        loss_check: LossCheck | None = None,
    ) -> None:
        self.problem, self.state, self.loss_check = problem, state, loss_check
        self._left = [WeightsLeft(part) for part in problem.parts]
        self._parameters = {id(p): name for name, p in problem.named.items()}
        self._optimizers = weakref.WeakSet(optimizers)
        self.is_in_step = False
        """Whether an optimiser of the training is in its step."""
        self._calls = 0
        self._calls_before: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        hooks: weakref.ref[StepHooks] = weakref.ref(self)
        self._handles = [
            register_optimizer_step_pre_hook(partial(_before_any_step, hooks)),
            register_optimizer_step_post_hook(partial(_after_any_step, hooks)),
            *([] if loss_check is None else [loss_check.handle]),
        ]
        for part in problem.parts:
            self._handles += [
                part.optimizer.register_step_pre_hook(partial(_before_step, hooks, part.index)),
                part.optimizer.register_step_post_hook(partial(_after_step, hooks, part.index)),
            ]
        for optimizer in optimizers:
            _ACTIVE[optimizer] = hooks
        weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)
        for optimizer in self._optimizers:
            _ACTIVE.pop(optimizer, None)

    def weights_since_steps(self) -> Since:
        """Compare all present weights with the weights after the latest steps; collective.

        A loop may clip weights after each step. Such a change after the last step is a part of the
        step, and not a restored state. If weights changed after some steps only, the case is
        unclear.
        """
        changed = [left for left in self._left if left.is_changed()]
        is_new = any(not left.is_changed_each_time for left in changed)
        device = next(iter(self.problem.named.values())).device
        any_rank = self.problem.ranks.any
        if not any_rank(bool(changed), device):
            return "unchanged"
        if not any_rank(is_new, device):
            return "changed as after each step"
        is_unclear = any(left.is_changed_at_times for left in changed)
        return "unclear" if any_rank(is_unclear, device) else "changed"

    def look_before_step(self, part: int) -> None:
        """Compare the weights with the weights after the previous step."""
        self._calls += 1
        self.is_in_step = True
        self._left[part].look_before_step()

    def check_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise a RuntimeError if an unknown optimiser has stepped this training's parameters.

        Optimisers that wrap an optimiser of the training, or are wrapped by it, are known.
        """
        is_alone = self._calls == self._calls_before.pop(optimizer, None) and not self.is_in_step
        if not is_alone or active_hooks(optimizer) is not None:
            return
        groups = optimizer.param_groups
        names = [self._parameters.get(id(p)) for group in groups for p in group["params"]]
        if name := next((name for name in names if name), None):
            raise RuntimeError(
                f"{type(optimizer).__name__} made a step for '{name}', but start was not called "
                "with this optimiser. Weight decays only act in the optimisers passed to start. "
                "Pass all optimisers to start, as a list. To continue with a new optimiser, call "
                "learner.detach(), learner.load_state_dict(learner.state_dict()), and then "
                "learner.start(...) with it."
            )

    def count_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the number of steps when an unknown optimiser begins a step."""
        if active_hooks(optimizer) is None:
            self._calls_before[optimizer] = self._calls

    def add_penalty(self, optimizer: torch.optim.Optimizer, part: int) -> None:
        """Add the prior's gradient, if the step will be made."""
        check, self.loss_check = self.loss_check, None
        if check is not None:
            self.problem.count_batches_of_step(check.compare())
        if not _is_skipped(optimizer):
            scale = getattr(optimizer, "grad_scale", None)
            algorithm.penalty(self.problem, self.state, 1.0 if scale is None else scale, part)

    def end_of_step(self, part: int) -> None:
        """End the epoch after the last of its steps; after an error in it, after the next step."""
        self._left[part].remember()
        steps, state = self.problem.steps_per_epoch, self.state
        is_last = part == len(self.problem.parts) - 1
        if steps and is_last and state.steps[part] >= (state.epoch + 1) * steps:
            algorithm.end_of_epoch(self.problem, state, state.epoch + 1)


class WeightsLeft:
    """Copy of the weights after an optimiser's latest step.

    All weights are compared by value. Version counters do not detect changes of ``p.data``, and a
    sample of the weights would not detect a partial restore.

    Args:
        part: the optimiser and its parameters.
    """

    def __init__(self, part: Part) -> None:
        self._parameters = part.parameters
        self._values: list[Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._compared = self._changed = 0  # how often before a step

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the present weights."""
        parts = local_parts(self._parameters)
        self._versions = [(part.data_ptr(), part._version) for part in parts]
        if self._values:
            torch._foreach_copy_(self._values, parts)
        else:
            self._values = [part.clone() for part in parts]

    def is_changed(self) -> bool:
        """Whether the weights have other values now, on this rank; a cast does not count."""
        pairs = zip(local_parts(self._parameters), self._values)  # noqa: B905  # none at first
        return any(
            not torch.allclose(now, left.to(now), rtol=0, atol=0, equal_nan=True)
            for now, left in pairs
        )

    def look_before_step(self) -> None:
        """Compare before the first steps, and then if torch counts a change; see `Since`."""
        is_early = self._compared < COMPARED_STEPS
        if not self._values or self.is_changed_at_times:
            return
        if not is_early and self.is_changed_each_time:
            return
        parts = local_parts(self._parameters)
        if is_early or self._versions != [(part.data_ptr(), part._version) for part in parts]:
            self._compared += 1
            self._changed += self.is_changed()

    @property
    def is_changed_each_time(self) -> bool:
        """Whether the loop changed the weights after each of the first steps."""
        return 0 < self._changed == self._compared

    @property
    def is_changed_at_times(self) -> bool:
        """Whether the loop changed the weights after some steps, but not after others."""
        return 0 < self._changed < self._compared


def _before_any_step(
    hooks: Callable[[], StepHooks | None], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    if (own := hooks()) is not None:
        own.count_before(optimizer)


def _after_any_step(
    hooks: Callable[[], StepHooks | None], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    if (own := hooks()) is not None:
        own.check_step_of(optimizer)


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
    own.look_before_step(part)
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        own.add_penalty(optimizer, part)
        return None
    calls: list[Any] = []

    def with_prior() -> Any:
        if calls:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluated its closure twice in one step. The prior "
                "supports optimisers with one evaluation per step, such as SGD and Adam."
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
    if own is None:
        return
    own.is_in_step = False
    if not _is_skipped(optimizer):
        own.end_of_step(part)


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler makes a fused optimiser leave the parameters as they are."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def active_hooks(optimizer: torch.optim.Optimizer) -> StepHooks | None:
    """Return the hooks of the training whose optimiser is in a step, if there is one."""
    hooks = _ACTIVE.get(optimizer)
    return None if hooks is None else hooks()
