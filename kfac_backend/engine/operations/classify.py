"""Classify each operation on followed parameters with two forward passes of a model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples
from kfac_backend.engine.capture import Capture
from kfac_backend.engine.model_calls import (
    DtypesInUse,
    close,
    forked_random_numbers,
    is_out_of_memory,
    try_twice,
)
from kfac_backend.engine.operations.follower import (
    PRODUCTS,
    Call,
    Expression,
    Follower,
    Refused,
    WeightUse,
    tensors_in,
    weight_use,
)
from kfac_backend.engine.rule_assignment import (
    Operations,
    Refusal,
    RuleAssignment,
    TrackedLayer,
    followed,
)
from kfac_backend.layers import FunctionalLayer, Rule
from kfac_backend.layers.weight_sharing import LinearRule, TransposedLinearRule


def follow(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    candidates: Mapping[str, str],
    shared: Mapping[str, str],
) -> RuleAssignment:
    """Return the assignment with parameters that are followed operation by operation.

    The result is not proved yet. ``candidates`` are the parameters to follow, and ``shared`` those
    of layers that run once for all examples and whose output is followed. Both map names to
    messages for a failed follow, which become a `Refusal`.
    """
    errors = {**candidates, **shared}
    operations = Operations(tuple(candidates), {name: followed(model, name) for name in candidates})
    extended = replace(assignment, operations=operations)

    def run(follower: Callable[..., Follower], indices: list[int]) -> Any:
        with Capture(model, extended, follower=follower) as capture, forked_random_numbers(model):
            capture.forward(examples(x, torch.tensor(indices)))
            return capture.follower

    # Two runs: a size that doubles with a second example counts examples or their rows.
    def trial() -> Any:
        one = run(CollectShapes, [0])
        return run(partial(ClassifyOperations, shapes=one.shapes, model=model), [0, 0])

    tried = try_twice(trial)
    if isinstance(tried, Exception):
        raise Refusal(errors) from tried
    layer_tuples = [kind for kind in operations.kinds.values() if isinstance(kind, tuple)]
    layers = list(dict.fromkeys(chain.from_iterable(layer_tuples)))
    of_layers = {name for t in assignment.layers + layers for name in t.parameters.values()}
    # A parameter has one block of one kind: by a rule if it is a weight, exact if it is copied.
    why = dict.fromkeys(tried.copied & of_layers, "is a weight, and also used by other operations")
    why |= tried.refused
    if why:
        refused = [name for name in errors if name in why]
        raise Refusal({n: f"{errors[n]} Reason: '{n}' {why[n]}." for n in refused})
    # In the second run weights have become layers, in addition to those with hooks. The other
    # parameters are combined with the examples by broadcasting, and have the exact block of an
    # elementwise parameter.
    broadcast = {name: t for name, t in operations.own.items() if name not in of_layers}
    consecutive_rows = {t.layer: ("consecutive",) for t in tried.consecutive_rows}
    return replace(
        assignment,
        layers=assignment.layers + layers,
        operations=replace(operations, own=broadcast),
        runs={**assignment.runs, **consecutive_rows},
    )


class CollectShapes(Follower):
    """First of two runs, with one example: record the shapes of all tensors that use parameters.

    With a single example, an expression looks like a tensor that depends on the examples, so both
    are followed. In the second run an operation has fewer expressions, and thus another key. So
    each result is recorded under the keys of all subsets of the operation's expressions. One of
    them is the subset of the true expressions, with which `ClassifyOperations` looks it up.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shapes: dict[int, list[list[torch.Size]]] = {}

    def _run(self, call: Call) -> Any:
        output = call.run()
        outputs = tensors_in(output)
        if not outputs:
            return output
        shapes = [value.shape for value in outputs]
        keys = [e.key for e in call.expressions]
        # Only the second run shows which of them are expressions, and which depend on the example:
        # it uses the key of the true expressions. With many, for example in a concatenated list,
        # all subsets would be too many.
        sizes = range(1, len(keys) + 1) if len(keys) <= 4 else (1, len(keys))
        for some in dict.fromkeys(chain.from_iterable(combinations(keys, k) for k in sizes)):
            self.shapes.setdefault(self._operations.key(call.func, *some), []).append(shapes)
        if call.changes is None or self._expression(call.changes):
            self._follow_on(call, outputs)
        return output


class ClassifyOperations(Follower):
    """Second run, with two examples: classify each operation, and try it at once.

    After a refusal the run continues with the operation's plain result, so that one run finds all
    parameters that cannot be followed.

    ``shapes`` is the result of `CollectShapes`.
    """

    def __init__(
        self, *args: Any, shapes: Mapping[int, list[list[torch.Size]]], model: nn.Module
    ) -> None:
        super().__init__(*args)
        self._shapes_of_one, self._model = shapes, model
        self._times: dict[int, int] = {}  # number of runs so far of an operation with each key
        self._stacks: dict[tuple[str, Any], tuple[TrackedLayer, ...]] = {}
        self.refused: dict[str, str] = {}
        """Reasons for refusals by parameter name."""
        self.copied: set[str] = set()
        """Names of the parameters that were copied for each row."""
        self.consecutive_rows: set[TrackedLayer] = set()
        """Layers that got several rows per example."""

    def _run(self, call: Call) -> Any:
        # The operation runs twice here. An in-place operation changes a clone the first time.
        changed = call.changes
        before = None if changed is None else changed.detach().clone()
        expected = call.run(lambda value: value.clone() if value is changed else value)
        outputs = tensors_in(expected)
        if not outputs and before is None:
            return expected
        time = self._times.get(call.key, 0)
        self._times[call.key] = time + 1
        try:
            kind = self._kind(call, outputs, time)
            # In a loop the operation repeats, and must then be of the same kind.
            first_kind = self._operations.kinds.setdefault(call.key, kind)
            if first_kind != kind:
                raise Refused(f"is used by {call} in different ways")
            # Try at once: the result with copies of the expressions must equal the result without.
            with DtypesInUse() as used:
                output = super()._run(call)
            if kind != "computed" and not close(expected.detach(), output.detach(), used.tolerance):
                raise Refused(f"is used by {call}, which does not support one copy per example")
            return output
        except Exception as error:  # an operation may fail in any way on a tensor of another shape
            if is_out_of_memory(error):
                raise
            why = f"is used by {call}, which does not support one copy per example"
            why = str(error) if isinstance(error, Refused) else why
            self.refused |= {name: why for e in call.expressions for name in e.names}
            return call.run() if changed is None else expected

    def _copies(self, expression: Expression, M: int) -> Tensor:
        self.copied.update(leaf for leaf in expression.leaves if isinstance(leaf, str))
        return super()._copies(expression, M)

    def _kind(self, call: Call, outputs: list[Tensor], time: int) -> Any:
        """Return the kind of the operation, see `OperationKind`: "computed", an axis, or a layer.

        ``time`` is the number of earlier runs of the same operation in this forward pass.
        """
        use = weight_use(call)
        # Step 1: operations without comparable sizes.
        if use is not None and not len(use.a) and self._stored(use.weight):
            return self._layer_of(call, use, use.a.shape)  # an expert without any examples
        if self.inside and self.inside[-1].layer not in self._once:
            # Made of the layer's own parameters, they belong to its weight, as in a
            # parametrisation. Otherwise they are its input.
            own = set(self.inside[-1].layer.modules())
            if any(self._place(name)[0] not in own for e in call.expressions for name in e.names):
                raise Refused(f"is used by layer {self.inside[-1]} once for all examples")
        one = self._shapes_of_one.get(call.key, [])
        if time >= len(one) or len(one[time]) != len(outputs):
            raise Refused(f"is used by {call} with two examples, but not with one")
        shapes = [value.shape for value in outputs]
        # Step 2: the same size for two examples as for one, and no graph from a tracked layer. So
        # it does not depend on the examples.
        if shapes == one[time] and not any(value.requires_grad for value in outputs):
            if call.changes is not None and not self._expression(call.changes):
                raise Refused(f"is written into a tensor by {call}")
            return "computed"
        # Step 3: it depends on the examples, along the axis with twice the size.
        axis = _grown_axis(one[time], shapes)
        if axis is None:
            raise Refused(f"is used by {call}, whose output has no axis of examples")
        # Test for linear maps before broadcasting, because they have their own kind of block.
        if use is not None and not self._expression(use.a):
            if len(shapes[0]) + axis != 0:
                raise Refused(
                    f"is the weight of {call}, whose output does not have the examples first"
                )
            # A running layer with another parameter has a rule for its own weight.
            if self.inside or self._stored(use.weight) is None:
                return axis
            return self._layer_of(call, use, shapes[0])
        if str(call) in PRODUCTS:
            raise Refused(f"is a matrix argument of {call}")
        # Only an axis of size one can become the axis of the copies.
        for e in call.expressions:
            if e.value.dim() >= -axis and e.value.shape[axis] != 1:
                raise Refused(f"is used by {call} with several entries along the axis of examples")
        return axis

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """Return a parameter's module, and the parameter's name there."""
        prefix, _, local = name.rpartition(".")
        return self._model.get_submodule(prefix), local

    def _layer_of(self, call: Call, use: WeightUse, shape: torch.Size) -> tuple[TrackedLayer, ...]:
        layers = self._operations.kinds.get(call.key)
        if not isinstance(layers, tuple):
            layers = self._new_layer(call, use)
        if shape[0] > 2:
            self.consecutive_rows.add(self._in_stack(layers, use))
        return layers

    def _new_layer(self, call: Call, use: WeightUse) -> tuple[TrackedLayer, ...]:
        stored = self._stored(use.weight)
        assert stored is not None
        name, transposed, slot = stored
        names = {"weight": name}
        if use.bias is not None and (bias := self._stored(use.bias)):
            names["bias"] = bias.name
        rule: type[Rule] | None = use.rule
        if transposed:
            rule = {LinearRule: TransposedLinearRule, TransposedLinearRule: LinearRule}.get(rule)
        matrix = use.weight.dim() == 2 or "kernel_size" in use.settings
        if rule is None or not matrix or use.a.dim() < 2 - rule.takes_integers:
            raise Refused(f"is the weight of {call} in a form without a rule")
        places = {local: self._place(full) for local, full in names.items()}
        if slot is not None:
            # Add all matrices of a stack at once, because other batches may use other ones.
            E = len(getattr(*places["weight"]))
            if "bias" in names:
                raise Refused(
                    f"is the weight of {call}, which also has a bias. Add the bias to the result"
                )
            layers = (FunctionalLayer(places, use.settings, e) for e in range(E))
            stack = (
                TrackedLayer(f"{name}.{e}", layer, rule, names, FunctionalLayer,
                             slots={"weight": (e, E)})
                for e, layer in enumerate(layers)
            )  # fmt: skip
            return self._stacks.setdefault((name, rule), tuple(stack))
        layer = FunctionalLayer(places, use.settings)
        rule.check(layer)
        prefix, _, local = name.rpartition(".")
        prefix = prefix if local == "weight" else name
        return (TrackedLayer(prefix, layer, rule, names, FunctionalLayer),)


def _grown_axis(one: list[torch.Size], two: list[torch.Size]) -> int | None:
    """Return the axis, from the end, with twice the size for two examples; None if not unique."""
    if len(one) != 1 or len(two) != 1 or len(one[0]) != len(two[0]):
        return None
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(one[0], two[0], strict=True)) if a != b]
    if len(differing) != 1:
        return None
    ((i, a, b),) = differing
    return i - len(one[0]) if b == 2 * a else None
