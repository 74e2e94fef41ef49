"""What parameters do that no hook sees: `follow` finds it out, `verify_followed` proves it.

`operations` explains how. The proof compares the model's output and its gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.layers import Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rule import summed_gradients
from kfac_backend.model.batches import examples
from kfac_backend.model.calls import call_with, explicit_forwards, forked_random_numbers
from kfac_backend.model.capture import Capture
from kfac_backend.model.comparison import DtypesInUse, close, noise_like
from kfac_backend.model.memory import is_out_of_memory
from kfac_backend.model.operations import Follower, Shapes, Trial
from kfac_backend.model.rule_assignment import (
    Operations,
    Refusal,
    RuleAssignment,
    TrackedLayer,
    followed,
)

__all__ = ["follow", "verify_followed"]


def follow(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    candidates: Mapping[str, str],
    shared: Mapping[str, str],
) -> RuleAssignment:
    """The assignment with parameters that are followed operation by operation.

    It runs the model with one example and with two, see `operations`. The result is not proved yet.

    Args:
        model: the model.
        assignment: its tracked layers, with their runs.
        x: some examples.
        candidates: the parameters to follow -> the message if that fails.
        shared: the same for parameters of layers that run once for all examples and whose output is
            followed, see `find_runs`.

    Raises:
        Refusal: parameters that cannot be followed.
    """
    errors = {**candidates, **shared}
    places: dict[str, tuple[nn.Module, str]] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(names[id(p)], (module, local))
    operations = Operations(tuple(candidates), {name: followed(model, name) for name in candidates})
    known = replace(assignment, operations=operations)
    made: list[Follower] = []
    copied: set[str] = set()

    def record(tracked: TrackedLayer, use: Use) -> None:
        if isinstance(tracked.layer, OwnParameter):
            copied.update(tracked.parameters.values())

    def shapes(*args: Any) -> Follower:
        made.append(Shapes(*args))
        return made[-1]

    def trial(*args: Any) -> Follower:
        assert isinstance(made[0], Shapes)
        made.append(Trial(*args, seen=made[0].seen, places=places))
        return made[-1]

    try:
        for make, numbers in ((shapes, [0]), (trial, [0, 0])):
            some = examples(x, torch.tensor(numbers))
            with (
                Capture(model, known, record, lambda *_: None, follower=make) as capture,
                forked_random_numbers(model),
            ):
                capture.forward(some)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Refusal(errors) from error
    tried = made[-1]
    assert isinstance(tried, Trial)
    layers = list(dict.fromkeys(w for w in operations.ways.values() if isinstance(w, TrackedLayer)))
    of_layers = {name for t in assignment.layers + layers for name in t.parameters.values()}
    # A parameter has one block, of one kind: a rule's for a weight, the exact one for copies.
    why = dict.fromkeys(copied & of_layers, "is a weight, and also meets other operations")
    why |= tried.refused
    if why:
        raise Refusal(
            {
                name: f"{error} What it does: '{name}' {why[name]}."
                for name, error in errors.items()
                if name in why
            }
        )
    own = {name: t for name, t in operations.own.items() if name not in of_layers}
    folded = {t.layer: ("folded",) for t in tried.folded}
    return replace(
        assignment,
        layers=assignment.layers + layers,
        operations=replace(operations, own=own),
        runs={**assignment.runs, **folded},
    )


def verify_followed(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    candidates: Mapping[str, str],
) -> None:
    """Prove that the uses that were found are all uses of the followed parameters.

    The output must not change, and the gradients from all uses, by their rules and summed over the
    examples, must equal autograd's.

    Raises:
        Refusal: parameters for which that does not hold.
    """
    names = list(candidates)
    sums = {name: torch.zeros_like(model.get_parameter(name)).flatten() for name in names}
    rules = {t: t.rule(t.layer, "expand", t.parameters) for t in assignment.layers}

    def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        if isinstance(tracked.layer, OwnParameter):
            found = dict.fromkeys(tracked.parameters, b.sum(0))
        elif sums.keys() & set(tracked.parameters.values()):
            found = summed_gradients(rules[tracked], use, b)
        else:
            return
        for local, gradient in found.items():
            if tracked.parameters[local] in sums:
                slot, slots = tracked.slots.get(local, (0, 1))
                part = sums[tracked.parameters[local]].chunk(slots)[slot]
                part += gradient.to(part)

    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    with torch.enable_grad():
        with explicit_forwards(assignment), forked_random_numbers(model), DtypesInUse() as used:
            f = call_with(model, leaves, x)
        if not isinstance(f, Tensor):
            return  # reported with the targets
        try:
            with (
                Capture(model, assignment, lambda *_: None, record, keep_inputs=True) as capture,
                forked_random_numbers(model),
            ):
                g = capture.forward(x)
                u = noise_like(f)
                same = close(f.detach(), g.detach(), used.tolerance)
                if same:
                    capture.backward(g, [u])
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            raise Refusal(candidates) from error
        should: Sequence[Tensor | None] = [None] * len(names)
        if f.requires_grad:
            should = torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)
    wrong = {}
    for name, gradient in zip(names, should, strict=True):
        gradient = torch.zeros_like(leaves[name]) if gradient is None else gradient
        if not same or not close(gradient.flatten(), sums[name], used.tolerance):
            wrong[name] = candidates[name]
    if wrong:
        raise Refusal(wrong)
