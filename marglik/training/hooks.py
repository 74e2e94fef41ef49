"""Hooks on the optimisers' steps, which add the prior's gradient and end the epochs.

A pre-hook runs before a step, but after `GradScaler.step` has unscaled the gradients and after the
loop has clipped them. If the step has a closure, the pre-hook runs before the backward pass. It
then replaces the closure by one that adds the prior's gradient afterwards. Fused optimisers unscale
the gradients in their own step and are also called with infinite gradients. They then have the
attributes ``grad_scale`` and ``found_inf``. A step that a scaler skips does not count.

The hooks also store a fingerprint of each tensor after a step. `StepHooks.weights_since_steps` uses
it to decide whether the weights have changed.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from kfac_backend.sharding import is_part, local_parts
from marglik.training import algorithm
from marglik.training.loss_agreement import FirstStepLossCheck
from marglik.training.problem import Part, Problem, count_batches_of_step
from marglik.training.state import LearnerState

_ACTIVE: "WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[StepHooks]]" = WeakKeyDictionary()
"""Maps each optimiser to its hooks."""

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
        counts_batches: whether the learner counts a step for each batch, because the caller gave
            no number of steps.
    """

    def __init__(
        self,
        problem: Problem,
        state: LearnerState,
        optimizers: Sequence[torch.optim.Optimizer],
        loss_check: FirstStepLossCheck | None = None,
        *,
        counts_batches: bool = False,
    ) -> None:
        self._counts_batches = counts_batches
        self.problem, self.state, self.loss_check = problem, state, loss_check
        self._left = [WeightsLeft(part) for part in problem.parts]
        self._parameters = {id(p): name for name, p in problem.named.items()}
        self._optimizers = weakref.WeakSet(optimizers)
        self.is_in_step = False
        """Whether an optimiser of the training is in its step."""
        self._calls = 0
        self._calls_before: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        hooks: weakref.ref[StepHooks] = weakref.ref(self)
        optimizer_ids = frozenset(id(part.optimizer) for part in problem.parts)
        at_others = partial(_at_other_steps, hooks, optimizer_ids)
        self._handles = [
            register_optimizer_step_pre_hook(partial(at_others, StepHooks.count_before)),
            register_optimizer_step_post_hook(partial(at_others, StepHooks.check_step_of)),
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
            count_batches_of_step(self.problem, number := check.compare())
            if self._counts_batches and number > 1:
                warnings.warn(
                    f"The first step has the gradients of {number} batches, but the learner counts "
                    f"a step for each batch, {self.problem.steps_per_epoch} in an epoch. Its "
                    f"epochs would be {number} times too long. If your loop accumulates gradients, "
                    "pass steps_per_epoch to start: the number of optimiser steps in an epoch.",
                    RuntimeWarning,
                    stacklevel=2,
                )
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
    """Fingerprints of the weights after an optimiser's latest step, one number per tensor.

    Version counters do not detect changes of ``p.data``, and a sample of the weights does not
    detect changes elsewhere. A copy detects all changes, but takes longer and as much memory as
    the weights.

    Args:
        part: the optimiser and its parameters.
    """

    def __init__(self, part: Part) -> None:
        self._parameters = part.parameters
        self._is_whole = not any(map(is_part, part.parameters))
        self._dtypes: list[torch.dtype] = []
        self._marks: list[int] = []  # of the weights after the latest step
        self._views: list[Tensor] = []  # of the weights' own memory
        self._fingerprints: list[Tensor] = []
        self._compared = self._changed = 0  # number of comparisons and changes before steps

    def _present(self) -> tuple[Sequence[Tensor], list[int]]:
        """Return this rank's parts of the weights, and their marks: addresses and versions."""
        parts = self._parameters if self._is_whole else local_parts(self._parameters)
        return parts, [*map(Tensor.data_ptr, parts), *map(_version, parts)]

    def remember(self) -> None:
        """Take the fingerprints of the present weights."""
        parts, marks = self._present()
        number = len(parts)
        if marks[:number] != self._marks[:number]:  # making a view takes as long as a sum
            self._dtypes = [part.dtype for part in parts]
            self._views = [view_of_bits(part.detach()) for part in parts]
        self._marks, self._fingerprints = marks, fingerprints(self._views)

    @torch.no_grad()
    def is_changed(self) -> bool:
        """Return whether this rank's parts of the weights have other values now.

        Moving to another device is no change, nor is a cast from which the values can be restored.
        """
        rows = zip(local_parts(self._parameters), self._dtypes, self._views)  # noqa: B905
        now = fingerprints([view_like(part.to(view.device, d), view) for part, d, view in rows])
        return any(a.item() != b.item() for a, b in zip(now, self._fingerprints, strict=True))

    def look_before_step(self) -> None:
        """Compare before the first steps, and then if torch counts a change; see `Since`."""
        if self._compared >= COMPARED_STEPS:
            if self._changed or self._present()[1] == self._marks:  # decided, or unchanged
                return
        if self._fingerprints and not self.is_changed_at_times:
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


_version = attrgetter("_version")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(views: list[Tensor]) -> list[Tensor]:
    """Return one number for each of `view_of_bits`, which shows whether values have changed.

    On a CPU it is the sum of the bits modulo 2⁶⁴: exact, for any order and number of threads. It
    detects each change of a single value. It does not detect values in another order, nor in
    float64 an even number of changed signs. On a GPU it is the norm in float64, of all tensors at
    once, which does not detect changed signs either.
    """
    if views and views[0].is_floating_point():
        return list(torch._foreach_norm(views, 2, torch.float64))
    return [view.sum() for view in views]


def view_of_bits(values: Tensor) -> Tensor:
    """Return the values' bits as integers, of 64 bits if memory allows, to sum in 1/4 of the time.

    On a GPU it returns the values themselves, see `fingerprints`.
    """
    if values.is_cuda:
        return values
    size = values.element_size()
    is_aligned = values.storage_offset() * size % 8 == 0 and values.numel() * size % 8 == 0
    if is_aligned and values.is_contiguous():
        return values.view(-1).view(torch.int64)
    return values.view(_INTEGERS[size])


def view_like(values: Tensor, view: Tensor) -> Tensor:
    """Return `view_of_bits` of values in other memory, in integers of the same size as ``view``."""
    return values if values.dtype == view.dtype else values.reshape(-1).clone().view(view.dtype)


def _at_other_steps(
    hooks: Callable[[], StepHooks | None],
    known: frozenset[int],
    look: Callable[[StepHooks, torch.optim.Optimizer], None],
    optimizer: torch.optim.Optimizer,
    *_: Any,
) -> None:
    if id(optimizer) not in known and (own := hooks()) is not None:
        look(own, optimizer)


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
    """Return whether a gradient scaler makes a fused optimiser skip the step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def active_hooks(optimizer: torch.optim.Optimizer) -> StepHooks | None:
    """Return the hooks of the training whose optimiser is in a step, if there is one."""
    hooks = _ACTIVE.get(optimizer)
    return None if hooks is None else hooks()
