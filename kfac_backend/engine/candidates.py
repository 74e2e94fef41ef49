"""Find the assignment of rules that passes the check, among a list of candidates.

By default a layer has the rule of its class, and each of its rows is an example. Where
`comparison.compare` disagrees, the search tries the next of the `CANDIDATES` and checks again.
"""

import warnings
from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.comparison import Comparison, compare
from kfac_backend.engine.model_calls import (
    forked_random_numbers,
    noise_like,
    preserve_state,
    try_twice,
)
from kfac_backend.engine.rule_assignment import Refusal, RuleAssignment, TrackedLayer, UnexpectedRun
from kfac_backend.layers import Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import Run, SharedAxes
from kfac_backend.sharding import class_and_hooks

MOST_EXAMPLES = 8
"""Maximum number of distinct examples in a proof, unless a batch cannot be split. A proof can only
detect mixing among the examples that it runs on."""


class Search:
    """Search for the first assignment that passes the check.

    Args:
        model: the model.
        can_split: whether examples alone have the same outputs as in the batch.
        x: a batch. If it can be split, `MOST_EXAMPLES` evenly spaced examples run.
        N: number of its examples; None if unknown.
        counted: the loss terms (N, ...) that count; None means all.
    """

    def __init__(
        self, model: nn.Module, can_split: bool, x: Any, N: int | None, counted: Tensor | None
    ) -> None:
        if can_split and N is not None and N > MOST_EXAMPLES:
            index = torch.linspace(0, N - 1, MOST_EXAMPLES, dtype=torch.float64).long()
            index = index.to(next(model.parameters()).device)
            x, N = examples(x, index), MOST_EXAMPLES
            counted = None if counted is None else counted[index]
        self.model, self.N, self.few = model, N, x
        self._batches = [(x, counted)]
        if N is not None and N > 1:
            again, index = with_first_again(x, N, can_split)
            if index is not None:
                of_them = None if counted is None else counted[index.to(counted.device)]
                # If the copy replaces an example, compare the original batch, too.
                self._batches = [(again, of_them), *([] if can_split else self._batches)]

    def check(self, assignment: RuleAssignment) -> Comparison:
        """Compare the hooks with autograd on these examples, with the first one repeated."""
        x, counted = self._batches[0]
        return compare(self.model, assignment, x, counted)

    def run(self, assignment: RuleAssignment) -> Comparison:
        """Return the comparison of an assignment that passes the check, or raise an error.

        A `Refusal` names parameters for which no candidate passes.
        """
        names = {name for t in assignment.all for name in t.parameters.values()}
        names |= assignment.unknown.keys()
        # Step 1: the rules of the layers' classes. Follow the operations of derived layers that
        # take other arguments.
        while True:
            try:
                if any(divided.by_parts.is_checked for divided in assignment.divided):
                    check_parts(self.model, assignment, self.few)
                comparison = self.check(assignment)
                break
            except UnexpectedRun as error:
                if class_and_hooks(error.tracked.layer)[0] is error.tracked.layer_type:
                    raise
                assignment = _without_layers(assignment, [error.tracked])
        if comparison.is_other_output:  # so far only registered parameters have copies
            own = _own_names(assignment)
            raise Refusal(dict.fromkeys(own, no_copies(own))) from comparison.error
        # Step 2: try the other candidates.
        for candidate in CANDIDATES:
            # With one example, all examples may share a single row.
            is_open = self.N == 1 or comparison.unknown or comparison.assignment.unknown
            if comparison.is_finite and (is_open or not comparison.agrees):
                comparison = candidate(self, comparison)
        if not comparison.is_finite:
            return comparison
        if not comparison.agrees:
            raise_mixed(comparison)
        assignment = comparison.assignment
        for x, counted in self._batches[1:]:
            raise_mixed(compare(self.model, assignment, x, counted))
        # Step 3: report layers that did not run, and find embedding rows that are constants.
        runs = comparison.runs.number
        ran = {name for t in assignment.layers if runs[t] for name in t.parameters.values()}
        if idle := [t for t in assignment.layers if not ran.issuperset(t.parameters.values())]:
            warnings.warn(
                "These layers are no part of the forward pass, and their blocks are zero: "
                f"{', '.join(map(str, idle))}. Freeze them if the model does not need them.",
                stacklevel=2,
            )
            unseen = {name for t in idle for name in t.parameters.values()} - ran
            assignment = replace(assignment, idle=tuple(unseen))
        assert names <= {name for t in assignment.all for name in t.parameters.values()}
        # Only if any layer can have such rows.
        of_layers = [getattr(t.layer, "padding_idx", None) for t in assignment.all]
        if assignment.diagonal or of_layers.count(None) < len(of_layers):
            from kfac_backend.engine.operations.padding import padding_rows

            assignment = replace(assignment, padding=padding_rows(self.model, self.few))
        comparison.assignment = assignment
        return comparison

    def again(self, assignment: RuleAssignment) -> Comparison:
        """Return the comparison if the assignment passes the check, otherwise raise an error."""
        comparison = self.check(assignment)
        if comparison.is_finite:
            raise_mixed(comparison)
            if comparison.is_other_output:
                raise NotImplementedError(no_copies(_own_names(assignment))) from comparison.error
            for message in self._messages(comparison).values():
                raise NotImplementedError(message)
        return comparison

    def other_rules(self, comparison: Comparison) -> Comparison:
        """Try candidate 1: the rules for derived layers that compute the same along other axes."""
        # If no rule is right for a layer, the last one stays, and candidate 3 follows its
        # parameters.
        alternatives = [t.rule.alternatives for t in comparison.assignment.layers]
        number = max(map(len, alternatives), default=0)
        for k in range(number if comparison.wrong else 0):
            assignment = comparison.assignment
            layers = [
                replace(t, rule=rules[k])
                if rules[k:] and comparison.wrong.keys() & set(t.parameters.values())
                else t
                for t, rules in zip(assignment.layers, alternatives, strict=True)
            ]
            if layers == assignment.layers:
                break
            comparison = self.check(replace(assignment, layers=layers))
        return comparison

    def other_runs(self, comparison: Comparison) -> Comparison:
        """Try candidates 2: runs on a shared input, on several rows each, and on constants."""
        if self.N is not None and (self.N == 1 or comparison.unknown or comparison.mixed):
            return self._shared_or_consecutive(comparison)
        if comparison.runs.constants():
            comparison.assignment = comparison.assignment.with_runs(comparison.runs.kinds())
        return comparison

    def _shared_or_consecutive(self, comparison: Comparison) -> Comparison:
        """Derive the kinds of runs from input shapes with one example, and with it repeated.

        - An input that all examples share, such as a position embedding, has the same shape both
          times. If the model broadcasts the output, a copy per example changes no number and
          receives that example's gradient. Otherwise the search follows the output up to the
          operation that combines it with the examples.
        - A run with several rows per example has k > 1 rows for one example and 2k for two.
        """

        def trial() -> tuple[dict[TrackedLayer, list[Run]], list[dict[TrackedLayer, list[Any]]]]:
            shapes = []
            # The same example twice, because sizes that depend on values (routing) then agree.
            for index in ([0, 0], [0]):
                some, inputs = examples(self.few, torch.tensor(index)), _InputShapes()
                with Capture(self.model, comparison.assignment, inputs) as capture:
                    with forked_random_numbers(self.model):
                        f = capture.forward(some)
                    if len(index) == 1:
                        capture.backward(f, [noise_like(f)])
                    runs = capture.runs.kinds()
                shapes.append({t: of_runs for t, of_runs in inputs.shapes.items() if t in runs})
            return runs, shapes

        result = try_twice(trial)
        if isinstance(result, Exception):  # a model that needs a whole batch
            comparison.assignment = comparison.assignment.with_runs(comparison.runs.kinds())
            return comparison
        kinds, (shapes_of_two, shapes) = result
        shared: dict[tuple[TrackedLayer, int], torch.Size] = {}
        for tracked, sizes in shapes.items():
            of_two = shapes_of_two.get(tracked, [])
            for number, (shape, twice) in enumerate(zip(sizes, of_two, strict=False)):
                # The shape is None if `examples_of_rows` declares the examples.
                if shape is None or twice is None or kinds[tracked][number] == "constant":
                    continue
                if shape == twice and len(sizes) == len(of_two):
                    shared[tracked, number] = shape
                elif len(shape) and shape[0] > 1 and twice[0] == 2 * shape[0]:
                    kinds[tracked][number] = "consecutive"
        if all(set(of_layer) == {"examples"} for of_layer in kinds.values()) and not shared:
            return comparison
        # A first axis of size one may be a batch axis or an axis with a single position. The size
        # does not distinguish them, so try both: the wrong one changes the model's output.
        names = {name for tracked, _ in shared for name in tracked.parameters.values()}
        for first in (True, False) if shared else ():
            for (tracked, number), shape in shared.items():
                with_first = first and len(shape) > 0 and shape[0] == 1
                kinds[tracked][number] = SharedAxes(with_first, len(shape))
            compared = self._consecutive_where_right(comparison.assignment.with_runs(kinds))
            is_mixed = any(names & set(t.parameters.values()) for t in compared.mixed)
            if not (compared.is_other_output or is_mixed or names & compared.wrong.keys()):
                return compared
        # Neither fits, for example a table that is indexed before it is added to the examples.
        for tracked, number in shared:
            kinds[tracked][number] = "followed"
        comparison.assignment = comparison.assignment.with_runs(kinds)
        # If anything is shared, `followed` makes the comparison.
        return comparison if shared else self._consecutive_where_right(comparison.assignment)

    def _consecutive_where_right(self, assignment: RuleAssignment) -> Comparison:
        """Return the comparison without wrong guesses of "consecutive" rows."""
        while True:
            comparison = self.check(assignment)
            runs = dict(assignment.runs)
            for tracked in comparison.mixed:
                # All experts of one array are routed alike.
                names = set(tracked.parameters.values())
                if "consecutive" in runs.get(tracked.layer, ()):
                    for t in assignment.layers:
                        if names & set(t.parameters.values()) and t.layer in runs:
                            runs[t.layer] = tuple(
                                "examples" if kind == "consecutive" else kind
                                for kind in runs[t.layer]
                            )
            if runs == assignment.runs:
                return comparison
            assignment = replace(assignment, runs=runs)

    def followed(self, comparison: Comparison) -> Comparison:
        """Try candidates 3: follow parameters and shared outputs operation by operation."""
        assignment = comparison.assignment
        shared = _shared_outputs(assignment)
        wrong = self._messages(comparison)
        own = [name for name in _own_names(assignment) if name in wrong]
        if own:
            raise Refusal({name: wrong[name] for name in own})
        if not (wrong or shared or assignment.unknown):
            return comparison
        if self.N is None:  # following needs a run with one example and a run with two
            raise Refusal({**assignment.unknown, **wrong})
        # Import only if there is something to follow.
        from kfac_backend.engine.operations.classify import follow

        layers = [t for t in assignment.layers if wrong.keys() & set(t.parameters.values())]
        idle = [t for t in layers if not comparison.runs.number[t]]
        # Keep the rule for a layer's own runs if it is right and only other uses are missing.
        # Otherwise follow these runs, too.
        choices = [idle, layers]
        if any(class_and_hooks(t.layer) != (t.layer_type, []) for t in layers):
            choices.reverse()
        refusals = []
        for without in choices if len(idle) < len(layers) else [idle]:
            tried = _without_layers(assignment, without)
            messages = {**wrong, **{n: e for n, e in tried.unknown.items() if n not in wrong}}
            try:
                tried = follow(self.model, tried, self.few, messages, shared)
                compared = self._consecutive_where_right(tried)
                if not compared.is_finite:
                    return compared
                every = {**messages, **shared}
                wrong_now = {name: every[name] for name in compared.wrong if name in every}
                if compared.is_other_output or wrong_now:
                    raise Refusal(wrong_now or every) from compared.error
                if compared.wrong:
                    raise Refusal(self._messages(compared))
                if compared.runs.constants():
                    compared.assignment = compared.assignment.with_runs(compared.runs.kinds())
                return compared
            except Refusal as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _messages(self, comparison: Comparison) -> dict[str, str]:
        """Return the error message of each parameter with wrong gradients, for a failed follow.

        Raises:
            NotImplementedError: the user registered the parameter's rule for this very class.
        """
        messages = {}
        for t in comparison.assignment.all:
            for name in t.parameters.values():
                if name not in comparison.wrong or name in messages:
                    continue
                messages[name] = (
                    f"The gradient of '{name}' differs from autograd's by "
                    f"{comparison.wrong[name]:.2g} (relative). Either the parameter is used "
                    f"outside of the forward of its layer {t}, where hooks cannot see it (a "
                    "functional call, a layer without a rule, or a compiled model). Or the layer "
                    f"computes something other than its class {t.layer_type.__name__} (an "
                    "overridden forward, a hook, or computed weights). Call the layer itself, "
                    "pass the model before torch.compile, register a rule for its class "
                    "(register_rule), derive it from nn.Module, or freeze it "
                    "(requires_grad_(False))."
                )
                if isinstance(t.layer, OwnParameter):
                    messages[name] = no_copies([name])
                if not t.built_in:
                    raise NotImplementedError(messages[name])
        return messages


CANDIDATES = (Search.other_rules, Search.other_runs, Search.followed)
"""Candidates in the order of trial after a failed check. If none passes, the search refuses."""


def raise_mixed(comparison: Comparison) -> None:
    """Raise a NotImplementedError for the first layer in which examples mix."""
    for tracked in comparison.hidden:
        raise NotImplementedError(
            f"In layer {tracked} rows that do not count reach the output. Leave them out of "
            "operations that pool over positions, or let all positions count (for a batch's mask: "
            "dict_key_mask=None)."
        )
    for tracked in comparison.mixed:
        if isinstance(tracked.layer, OwnParameter):
            names = list(tracked.parameters.values())
            raise Refusal(dict.fromkeys(names, no_copies(names)))
        raise NotImplementedError(mixed_message(tracked))


def mixed_message(tracked: TrackedLayer) -> str:
    """Return the message for a layer in which the rows of different examples mix."""
    return (
        f"In layer {tracked} the rows of different examples mix. Likely causes: its input has no "
        "batch axis in front, a later layer shares information within a batch, or its rows are "
        "in another order than the outputs. Put the batch axis first (N, ..., d), say which "
        "example each row belongs to (examples_of_rows), make one example with several loss terms "
        "of examples that belong together (outputs (N, R, C)), or freeze it "
        "(requires_grad_(False))."
    )


def _own_names(assignment: RuleAssignment) -> list[str]:
    return [name for t in assignment.own_parameters for name in t.parameters.values()]


def _without_layers(assignment: RuleAssignment, layers: list[TrackedLayer]) -> RuleAssignment:
    """Return the assignment that follows these layers' parameters operation by operation."""
    unknown = {
        name: (
            f"Layer {t} computes something other than its class {t.layer_type.__name__}, so the "
            "rule for the class does not apply. Register a rule for its class (register_rule), "
            "derive it from nn.Module, or freeze it (requires_grad_(False))."
        )
        for t in layers
        for name in t.parameters.values()
    }
    return replace(
        assignment,
        layers=[t for t in assignment.layers if t not in layers],
        unknown={**unknown, **assignment.unknown},
    )


def _shared_outputs(assignment: RuleAssignment) -> dict[str, str]:
    """Return messages for parameters of layers with a followed output, for a failed follow."""
    layers = [t for t in assignment.layers if "followed" in assignment.runs.get(t.layer, ())]
    message = (
        f"{' and '.join(map(str, layers))} has the same input for all examples. Its output cannot "
        "be copied for each example, (N, ...), because that changes the model's output or mixes "
        "examples (as dropout on a shared output does). Give it a batch axis (N, ...), or freeze "
        "it (requires_grad_(False))."
    )
    return {name: message for t in layers for name in t.parameters.values()}


def check_parts(model: nn.Module, assignment: RuleAssignment, x: Any) -> None:
    """Raise a `Refusal` that names a layer whose parts compute something else than its forward."""
    divided = [d for d in assignment.divided if d.by_parts.is_checked]
    names = {id(p): name for name, p in model.named_parameters()}
    of_rules = {name for t in assignment.all for name in t.parameters.values()}  # those with a rule
    messages = {
        d: {
            names[id(p)]: f"Layer '{d.name}' ({type(d.layer).__name__}) computes something other "
            f"than {type(d.by_parts).__name__} (an overridden forward, other options, or wrong "
            "parts). Register parts for its class (register_rule), or freeze it "
            "(requires_grad_(False))."
            for p in d.layer.parameters()
            if names[id(p)] in of_rules
        }
        for d in divided
    }
    every = dict(ChainMap(*messages.values()))
    if not every:
        return

    def wrong(alone: RuleAssignment) -> Comparison:
        return compare(model, alone, x, own_forwards=True)

    with preserve_state(model):
        model.eval()  # in train mode the two forwards would draw different dropout masks
        comparison = wrong(replace(assignment, own_parameters=[]))
        if not comparison.is_other_output and not every.keys() & comparison.wrong.keys():
            return
        # One run for all is cheaper; single runs show which layer's output differs.
        for d, of_layer in messages.items():
            alone = wrong(replace(assignment, divided=[d], own_parameters=[]))
            if of_layer and (alone.is_other_output or of_layer.keys() & alone.wrong.keys()):
                raise Refusal(of_layer, [d]) from alone.error
        raise Refusal({n: every[n] for n in comparison.wrong if n in every} or every)


def with_first_again(x: Any, N: int, can_split: bool = True) -> tuple[Any, Tensor | None]:
    """Repeat the first of N examples at the end; return the rows and their example indices.

    This exposes a forward that reorders the examples, even if they happen to be in order: equal
    examples stand at both ends, and sorting would put them side by side. If the model does not
    accept batches of another size (without ``can_split``), the copy replaces the last example of a
    batch of at least three. A smaller batch is returned unchanged, with None for the indices.
    """
    if not can_split and N < 3:
        return x, None
    tensors = x.values() if isinstance(x, dict) else [x]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    index = torch.arange(N + 1 if can_split else N, device=device)
    index[-1] = 0
    again = try_twice(lambda: examples(x, index))  # user-defined objects may support only slices
    return (again, index) if type(again) is type(x) else (x, None)


@dataclass(eq=False)
class _InputShapes(Sink):
    """Record the input shape of each run, or None if it does not give the number of examples.

    It is None if `examples_of_rows` declares the example of each row, because one example may have
    as many rows as several others. It is also None for empty inputs.
    """

    shapes: dict[TrackedLayer, list[torch.Size | None]] = field(default_factory=dict)

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Add a run's shape."""
        declared = use.rows is not None and not use.rows.of_positions
        shape = use.a.shape if use.rows is None else use.rows.axes + use.a.shape[1:]
        counted = None if declared or not use.a.numel() else torch.Size(shape)
        self.shapes.setdefault(tracked, []).append(counted)


def no_copies(names: list[str]) -> str:
    """Return the message for registered parameters of which the forward rejects copies."""
    return (
        f"The forward does not support one copy per example of {', '.join(map(repr, names))}: "
        "with (N, ...) instead of (1, ...) its output changes, or examples mix. Use them "
        "elementwise, pass register_parameters the broadcast shape, or freeze them "
        "(requires_grad_(False))."
    )
