"""Which assignment of rules a model's layers have: the first that the check agrees with.

Layers have the rule of their class, and a row for each example, unless `comparison.compare` says
otherwise. What disagrees is tried with the next of the `CANDIDATES`, and the check decides again.
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
from kfac_backend.engine.rule_assignment import (
    Refusal,
    RuleAssignment,
    TrackedLayer,
    UnexpectedRun,
)
from kfac_backend.layers import Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import Run, SharedAxes
from kfac_backend.sharding import class_and_hooks

MOST_EXAMPLES = 8
"""The most distinct examples that a proof runs on, unless a batch cannot be split. Mixing shows
only among examples that are there."""


class Search:
    """Finds the first assignment that the check agrees with.

    Args:
        model: the model.
        can_split: whether examples alone have the outputs that they have together.
        x: a batch, of which `MOST_EXAMPLES` run, spread evenly over it, if it can be split.
        N: the number of its examples; None if it is not known.
        counted: the loss terms (N, ...) that count; None is all.
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
                # Where the copy replaces another example, that one is compared, too.
                self._batches = [(again, of_them), *([] if can_split else self._batches)]

    def check(self, assignment: RuleAssignment) -> Comparison:
        """Compare the hooks with autograd on these examples, and on the first of them again."""
        x, counted = self._batches[0]
        return compare(self.model, assignment, x, counted)

    def run(self, assignment: RuleAssignment) -> tuple[RuleAssignment, Comparison]:
        """The assignment that the check agrees with, and the comparison.

        Raises:
            Refusal: parameters for which no candidate agrees.
            NotImplementedError: layers in which examples mix.
        """
        names = {name for t in assignment.all for name in t.parameters.values()}
        names |= assignment.unknown.keys()
        # Step 1: the rules of the layers' classes. Derived layers that take other arguments are
        # followed.
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
        if comparison.is_other_output:  # own parameters are all that has copies so far
            own = _own_names(assignment)
            raise Refusal(dict.fromkeys(own, no_copies(own))) from comparison.error
        # Step 2: the other candidates.
        for candidate in CANDIDATES:
            # Of one example a single row may be what all examples share.
            is_open = self.N == 1 or comparison.unknown or assignment.unknown
            if comparison.is_finite and (is_open or not comparison.agrees):
                assignment, comparison = candidate(self, assignment, comparison)
        if not comparison.is_finite:
            return assignment, comparison
        if not comparison.agrees:
            raise_mixed(comparison)
        for x, counted in self._batches[1:]:
            raise_mixed(compare(self.model, assignment, x, counted))
        # Step 3: layers that did not run, and rows of embeddings that are constants.
        runs = comparison.runs.number
        ran = {name for t in assignment.layers if runs[t] for name in t.parameters.values()}
        if idle := [t for t in assignment.layers if not ran.issuperset(t.parameters.values())]:
            warnings.warn(
                "These layers are no part of the forward pass, and their blocks are zero: "
                f"{', '.join(map(str, idle))}.",
                stacklevel=2,
            )
            unseen = {name for t in idle for name in t.parameters.values()} - ran
            assignment = replace(assignment, idle=tuple(unseen))
        assert names <= {name for t in assignment.all for name in t.parameters.values()}
        # Where any can be.
        of_layers = [getattr(t.layer, "padding_idx", None) for t in assignment.all]
        if assignment.diagonal or of_layers.count(None) < len(of_layers):
            from kfac_backend.engine.operations.padding import padding_rows

            assignment = replace(assignment, padding=padding_rows(self.model, self.few))
        return assignment, comparison

    def again(self, assignment: RuleAssignment) -> tuple[RuleAssignment, Comparison]:
        """The same assignment, if the check agrees.

        Raises:
            Refusal: parameters for which it does not.
            NotImplementedError: layers in which examples mix.
        """
        comparison = self.check(assignment)
        if comparison.is_finite:
            raise_mixed(comparison)
            if comparison.is_other_output:
                raise NotImplementedError(no_copies(_own_names(assignment))) from comparison.error
            for message in self._messages(assignment, comparison).values():
                raise NotImplementedError(message)
        return assignment, comparison

    def other_rules(
        self, assignment: RuleAssignment, comparison: Comparison
    ) -> tuple[RuleAssignment, Comparison]:
        """Candidate 1: the rules for derived layers that do the same along other axes."""
        # Of a layer for which none is right the last one stays, whose parameters are followed then.
        number = max((len(t.rule.alternatives) for t in assignment.layers), default=0)
        alternatives = [t.rule.alternatives for t in assignment.layers]
        for k in range(number if comparison.wrong else 0):
            layers = [
                replace(t, rule=rules[k])
                if rules[k:] and comparison.wrong.keys() & set(t.parameters.values())
                else t
                for t, rules in zip(assignment.layers, alternatives, strict=True)
            ]
            if layers == assignment.layers:
                break
            assignment = replace(assignment, layers=layers)
            comparison = self.check(assignment)
        return assignment, comparison

    def other_runs(
        self, assignment: RuleAssignment, comparison: Comparison
    ) -> tuple[RuleAssignment, Comparison]:
        """Candidates 2: runs on an input that all examples share, on several rows, on constants."""
        if self.N is not None and (self.N == 1 or comparison.unknown or comparison.mixed):
            return self._shared_or_consecutive(assignment, comparison)
        if comparison.runs.constants():
            assignment = _with_runs(assignment, comparison.runs.kinds())
        return assignment, comparison

    def _shared_or_consecutive(
        self, assignment: RuleAssignment, comparison: Comparison
    ) -> tuple[RuleAssignment, Comparison]:
        """Kinds of runs, by the shapes of inputs with one example and with the same one twice.

        - An input that all examples share, such as an embedding of positions, has the same shape
          both times. If the model broadcasts the output, a copy for each example changes no number
          and receives that example's gradient. Otherwise the output is followed to where it meets
          the examples.
        - Several rows of each example are k > 1 rows for one example and 2k for two.
        """

        def trial() -> tuple[dict[TrackedLayer, list[Run]], list[dict[TrackedLayer, list[Any]]]]:
            shapes = []
            # The same example twice, not two: sizes that depend on values (routing) then agree.
            for index in ([0, 0], [0]):
                some, inputs = examples(self.few, torch.tensor(index)), _InputShapes()
                with Capture(self.model, assignment, inputs) as capture:
                    with forked_random_numbers(self.model):
                        f = capture.forward(some)
                    if len(index) == 1:
                        capture.backward(f, [noise_like(f)])
                    runs = capture.runs.kinds()
                shapes.append({t: of_runs for t, of_runs in inputs.shapes.items() if t in runs})
            return runs, shapes

        result = try_twice(trial)
        if isinstance(result, Exception):  # a model that needs a whole batch
            return _with_runs(assignment, comparison.runs.kinds()), comparison
        kinds, (shapes_of_two, shapes) = result
        shared: dict[tuple[TrackedLayer, int], torch.Size] = {}
        for tracked, sizes in shapes.items():
            of_two = shapes_of_two.get(tracked, [])
            for number, (shape, twice) in enumerate(zip(sizes, of_two, strict=False)):
                # The shape is None where `examples_of_rows` gives the examples.
                if shape is None or twice is None or kinds[tracked][number] == "constant":
                    continue
                if shape == twice and len(sizes) == len(of_two):
                    shared[tracked, number] = shape
                elif len(shape) and shape[0] > 1 and twice[0] == 2 * shape[0]:
                    kinds[tracked][number] = "consecutive"
        if all(set(of_layer) == {"examples"} for of_layer in kinds.values()) and not shared:
            return assignment, comparison
        # A first axis of size one may be a batch axis or an axis with a single position. Its size
        # does not tell, so both are tried: with the wrong one the model's output changes.
        names = {name for tracked, _ in shared for name in tracked.parameters.values()}
        for first in (True, False) if shared else ():
            for (tracked, number), shape in shared.items():
                with_first = first and len(shape) > 0 and shape[0] == 1
                kinds[tracked][number] = SharedAxes(with_first, len(shape))
            tried, compared = self._consecutive_where_right(_with_runs(assignment, kinds))
            is_mixed = any(names & set(t.parameters.values()) for t in compared.mixed)
            if not (compared.is_other_output or is_mixed or names & compared.wrong.keys()):
                return tried, compared
        # Neither fits, as for a table that is indexed before it meets the examples.
        for tracked, number in shared:
            kinds[tracked][number] = "followed"
        assignment = _with_runs(assignment, kinds)
        # `followed` compares, if there is anything shared.
        return (assignment, comparison) if shared else self._consecutive_where_right(assignment)

    def _consecutive_where_right(
        self, assignment: RuleAssignment
    ) -> tuple[RuleAssignment, Comparison]:
        """The assignment without guesses of several rows that do not follow one another."""
        while True:
            comparison = self.check(assignment)
            runs = dict(assignment.runs)
            for tracked in comparison.mixed:
                # The experts of one array are all routed alike.
                names = set(tracked.parameters.values())
                if "consecutive" in runs.get(tracked.layer, ()):
                    for t in assignment.layers:
                        if names & set(t.parameters.values()) and t.layer in runs:
                            runs[t.layer] = tuple(
                                "examples" if kind == "consecutive" else kind
                                for kind in runs[t.layer]
                            )
            if runs == assignment.runs:
                return assignment, comparison
            assignment = replace(assignment, runs=runs)

    def followed(
        self, assignment: RuleAssignment, comparison: Comparison
    ) -> tuple[RuleAssignment, Comparison]:
        """Candidates 3: parameters, and outputs that all examples share, operation by operation."""
        shared = _shared_outputs(assignment)
        wrong = self._messages(assignment, comparison)
        own = [name for name in _own_names(assignment) if name in wrong]
        if own:
            raise Refusal({name: wrong[name] for name in own})
        if not (wrong or shared or assignment.unknown):
            return assignment, comparison
        if self.N is None:  # following needs one example and two
            raise Refusal({**assignment.unknown, **wrong})
        # Loaded only where there is something to follow.
        from kfac_backend.engine.operations.classify import follow

        layers = [t for t in assignment.layers if wrong.keys() & set(t.parameters.values())]
        idle = [t for t in layers if not comparison.runs.number[t]]
        # A layer's own runs are by its rule, if it is right and other uses are not seen; or they
        # are followed, too, if it is not.
        choices = [idle, layers]
        if any(class_and_hooks(t.layer) != (t.layer_type, []) for t in layers):
            choices.reverse()
        refusals = []
        for without in choices if len(idle) < len(layers) else [idle]:
            tried = _without_layers(assignment, without)
            messages = {**wrong, **{n: e for n, e in tried.unknown.items() if n not in wrong}}
            try:
                tried = follow(self.model, tried, self.few, messages, shared)
                tried, compared = self._consecutive_where_right(tried)
                if not compared.is_finite:
                    return tried, compared
                every = {**messages, **shared}
                wrong_now = {name: every[name] for name in compared.wrong if name in every}
                if compared.is_other_output or wrong_now:
                    raise Refusal(wrong_now or every) from compared.error
                if compared.wrong:
                    raise Refusal(self._messages(tried, compared))
                if compared.runs.constants():
                    tried = _with_runs(tried, compared.runs.kinds())
                return tried, compared
            except Refusal as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _messages(self, assignment: RuleAssignment, comparison: Comparison) -> dict[str, str]:
        """Parameters whose gradients are wrong -> the message if they cannot be followed.

        Raises:
            NotImplementedError: the rule of one was registered by the user for this very layer.
        """
        messages = {}
        for t in assignment.all:
            for name in t.parameters.values():
                if name not in comparison.wrong or name in messages:
                    continue
                messages[name] = (
                    f"'{name}' reached the model's output outside of the forward of its layer {t}, "
                    "where hooks cannot see it (used functionally, by a layer without a rule, or "
                    "in a compiled model), or the layer computes something other than its class "
                    f"{t.layer_type.__name__} and the rule for it (an overridden forward, a hook, "
                    f"or computed weights): gradients differ by {comparison.wrong[name]:.2g} of "
                    "themselves. Call the layer itself, pass the model before torch.compile, "
                    "register a rule for its class (register_rule), derive it from nn.Module, or "
                    "freeze it (requires_grad_(False))."
                )
                if isinstance(t.layer, OwnParameter):
                    messages[name] = no_copies([name])
                if not t.built_in:
                    raise NotImplementedError(messages[name])
        return messages


CANDIDATES = (Search.other_rules, Search.other_runs, Search.followed)
"""What is tried in this order where the check disagrees; after them comes a refusal."""


def raise_mixed(comparison: Comparison) -> None:
    """Raise a NotImplementedError for the first layer in which examples mix.

    Raises:
        Refusal: own parameters that are not used elementwise.
    """
    for tracked in comparison.hidden:
        raise NotImplementedError(
            f"In layer {tracked} rows that do not count reach the output. Leave them out of "
            "whatever pools over positions, or let them count (those that a batch's mask "
            "hides: dict_key_mask=None)."
        )
    for tracked in comparison.mixed:
        if isinstance(tracked.layer, OwnParameter):
            names = list(tracked.parameters.values())
            raise Refusal(dict.fromkeys(names, no_copies(names)))
        raise NotImplementedError(mixed_message(tracked))


def mixed_message(tracked: TrackedLayer) -> str:
    """The message for a layer in which the rows of different examples mix."""
    return (
        f"In layer {tracked} the rows of different examples mix: its input has no batch axis in "
        "front, a layer behind it shares information within a batch, or its rows are examples in "
        "another order than the outputs. Put the batch axis first (N, ..., d), say which example "
        "each row belongs to (examples_of_rows), make what belongs together one example with "
        "several loss terms (outputs (N, R, C)), or freeze it (requires_grad_(False))."
    )


def _own_names(assignment: RuleAssignment) -> list[str]:
    return [name for t in assignment.own_parameters for name in t.parameters.values()]


def _without_layers(assignment: RuleAssignment, layers: list[TrackedLayer]) -> RuleAssignment:
    """The assignment in which layers' parameters are followed operation by operation."""
    if not layers:
        return assignment
    unknown = {
        name: f"Layer {t} computes something other than its class {t.layer_type.__name__} and the "
        "rule for it. Register a rule for its class (register_rule), derive it from nn.Module, or "
        "freeze it (requires_grad_(False))."
        for t in layers
        for name in t.parameters.values()
    }
    return replace(
        assignment,
        layers=[t for t in assignment.layers if t not in layers],
        unknown={**unknown, **assignment.unknown},
    )


def _shared_outputs(assignment: RuleAssignment) -> dict[str, str]:
    """The parameters of layers whose output is followed -> the message if that fails."""
    layers = [t for t in assignment.layers if "followed" in assignment.runs.get(t.layer, ())]
    message = (
        f"{' and '.join(map(str, layers))} has the same input for all examples, and its output "
        "cannot be copied for each, (N, ...): that would change the model's output, or rows of "
        "different examples mix (dropout on a shared output mixes them, too). Give it a batch axis "
        "(N, ...), or freeze it (requires_grad_(False))."
    )
    return {name: message for t in layers for name in t.parameters.values()}


def check_parts(model: nn.Module, assignment: RuleAssignment, x: Any) -> None:
    """Compare layers that run by parts with their own forward.

    Raises:
        Refusal: parts that compute something else, by the layer's name.
    """
    divided = [d for d in assignment.divided if d.by_parts.is_checked]
    if not divided:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    of_rules = {name for t in assignment.all for name in t.parameters.values()}  # by rules
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
        # All at once is cheaper; one after the other shows whose output is another.
        for d, of_layer in messages.items():
            alone = wrong(replace(assignment, divided=[d], own_parameters=[]))
            if of_layer and (alone.is_other_output or of_layer.keys() & alone.wrong.keys()):
                raise Refusal(of_layer, [d]) from alone.error
        raise Refusal({n: every[n] for n in comparison.wrong if n in every} or every)


def with_first_again(x: Any, N: int, can_split: bool = True) -> tuple[Any, Tensor | None]:
    """The N examples with the first one again at the end, and the example index of each row.

    This exposes a forward that changes the order of the examples, also where they happen to be in
    order. Sorting puts equal examples side by side; here equal examples stand at both ends, so that
    sorting must move some.

    Args:
        x: the examples.
        N: their number.
        can_split: whether the model takes batches of another size. If not, the copy replaces the
            last example of a batch of at least three; a smaller batch is returned as it is, with
            None for the indices.
    """
    if not can_split and N < 3:
        return x, None
    tensors = x.values() if isinstance(x, dict) else [x]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    index = torch.arange(N + 1 if can_split else N, device=device)
    index[-1] = 0
    again = try_twice(lambda: examples(x, index))  # objects of the user's may take slices alone
    return (again, index) if type(again) is type(x) else (x, None)


@dataclass(eq=False)
class _InputShapes(Sink):
    """The shape of each run's input; None where it does not tell the number of examples.

    That is where `examples_of_rows` says which example each row belongs to: the rows of one example
    may be as many as those of several by chance. The same holds where there are none.
    """

    shapes: dict[TrackedLayer, list[torch.Size | None]] = field(default_factory=dict)

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Add a run's shape."""
        declared = use.rows is not None and not use.rows.of_positions
        shape = use.a.shape if use.rows is None else use.rows.axes + use.a.shape[1:]
        counted = None if declared or not use.a.numel() else torch.Size(shape)
        self.shapes.setdefault(tracked, []).append(counted)


def _with_runs(assignment: RuleAssignment, runs: dict[TrackedLayer, list[Run]]) -> RuleAssignment:
    """The assignment with the runs of those layers that have any other kind than "examples"."""
    others = {t.layer: tuple(kinds) for t, kinds in runs.items() if set(kinds) != {"examples"}}
    return replace(assignment, runs=others)


def no_copies(names: list[str]) -> str:
    """The message for own parameters that the forward does not take a copy of for each example."""
    return (
        f"The forward does not take a copy for each example of {', '.join(map(repr, names))}: with "
        "(N, ...) in place of (1, ...) its output is another, or examples mix. Use them "
        "elementwise, give register_parameters the shape as which they are broadcast, or freeze "
        "them (requires_grad_(False))."
    )
