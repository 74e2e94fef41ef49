"""Parameters that no hook sees, followed operation by operation.

Models have parameters outside of layers: class tokens, scales, norms that they implement
themselves. They also hand a layer's weight to a function (``F.linear(x, self.qkv.weight)``) instead
of calling the layer. Hooks see neither. `TorchFunctionMode` does: torch shows it each operation of
the forward pass.

An *expression* is a tensor that depends on followed parameters, and on no example: w itself, 1 + w,
rows of a table, several biases in one. Where an operation combines it with a tensor that does
depend on the examples, it *meets* them, in one of two ways:

- As the weight of a linear map (``F.linear``, a convolution, an embedding, ``@``), if it is the
  parameter as it is stored, or its transpose. The operation is then treated as a run of a layer
  with that weight, and gets that layer's rule.
- Otherwise each row of the examples gets a copy of the expression, and the operation runs row by
  row (`torch.func.vmap`): a product with a scale, a sum with a position embedding, a norm, a map
  whose weight was normalised. The gradient of a copy is that of one row, and the expression's own
  graph takes each example's sum on to the parameters. No approximation is made.

A layer that runs once for all examples (a table of relative positions), and whose output cannot be
copied for each example at once, starts an expression as well. Its output is followed as a parameter
is, and receives each example's gradient.

Life cycle. `classify.follow` finds out what each operation is. It runs the model with one example
(`CollectShapes`) and with the same example twice (`ClassifyOperations`): an output that has twice
the size in the second run has met the examples. What is found goes into `Operations.kinds`. From
then on `Capture` makes a new `Follower` for each forward pass, which looks every operation up
there. Its expressions live as long as the forward pass and its backward passes. An operation that
is not found is an error.

An operation is identified by what it is made of and not by its place in the forward pass, so that a
loop may run longer in another batch. What is found is a hypothesis: `comparison.compare`
compares the model's output and the gradients before a pass uses it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfac_backend.engine.model_calls import plain_attention
from kfac_backend.engine.rule_assignment import LayerRun, RuleAssignment, TrackedLayer
from kfac_backend.layers import FunctionalLayer, Rule, Use
from kfac_backend.layers.convolution import ConvolutionRule
from kfac_backend.layers.embedding import EmbeddingRule
from kfac_backend.layers.rows import current_rows
from kfac_backend.layers.stacked import by_matrix
from kfac_backend.layers.weight_sharing import LinearRule, TransposedLinearRule
from kfac_backend.precision import at_least_float32


class Receiver(Protocol):
    """The pass that a follower reports to; `Capture` is one."""

    def add_source(self, leaf: Tensor) -> None:
        """End backward passes at a leaf."""

    def report_input(self, tracked: TrackedLayer, use: Use) -> None:
        """Hand over a use's input."""

    def report_gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Hand over the gradient of one vector in a use's output."""

    def report_run(self, tracked: TrackedLayer, a: Tensor, output: Tensor) -> Tensor:
        """Hand over the run of a function that is a layer's, ``F.linear(a, weight)``."""
        ...


@dataclass(frozen=True, eq=False)
class Expression:
    """A tensor computed from followed parameters, and from layers' outputs for all examples."""

    value: Tensor
    """The tensor that the model sees, without a graph. Expressions are looked up by its id, so it
    must stay alive: Python gives the id of a dead object to the next one."""
    twin: Tensor
    """The same values with a graph down to the leaves, for `gradients`. The model must not see it,
    since a graph is how a tensor is recognised that has met the examples."""
    key: int
    """How it was made: see `Operations.key`."""
    leaves: "Leaves"
    """What it was computed from."""

    @property
    def names(self) -> list[str]:
        """The parameters it depends on, those of layers included."""
        names = [
            [leaf] if isinstance(leaf, str) else leaf.tracked.parameters.values()
            for leaf in self.leaves
        ]
        return list(dict.fromkeys(chain.from_iterable(names)))

    def gradients(self, b: Tensor) -> dict["str | LayerRun", Tensor]:
        """Gradients (K, P) with respect to each leaf, from K gradients in the expression."""
        if len(self.leaves) == 1:  # the parameter itself, mostly: no graph is needed
            ((name, leaf),) = self.leaves.items()
            if _is_stored(self.value, leaf, in_shape=False):
                return {name: b.reshape(len(b), -1)}  # also of one entry that is read out
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(
            self.twin,
            leaves,
            b.to(self.twin.dtype).reshape(-1, *self.twin.shape),
            retain_graph=True,
            create_graph=b.requires_grad,  # a covariance may be differentiated in its inputs
            is_grads_batched=True,
            materialize_grads=True,
        )
        return {name: g.flatten(1) for name, g in zip(self.leaves, gradients, strict=True)}


Leaves = Mapping[str | LayerRun, Tensor]
"""A parameter's name -> a leaf that stands for it; a layer's run -> zeros, added to its output."""


class Call(NamedTuple):
    """An operation on expressions that is about to run."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expressions: list[Expression]
    key: int

    def run(self, replaced: Callable[[Tensor], Tensor] = lambda value: value) -> Any:
        """The result, with each tensor argument replaced."""
        return self.func(*_mapped(self.args, replaced), **_mapped(self.kwargs, replaced))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def changes(self) -> Tensor | None:
        """The tensor that it changes in place, if any."""
        # By torch's naming: add_ and __iadd__ are in place, __add__ is not.
        name = getattr(self.func, "__name__", "")
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        first = self.args[0] if self.args else None
        return first if (in_place or name == "__setitem__") and isinstance(first, Tensor) else None

    def __str__(self) -> str:
        return getattr(self.func, "__name__", str(self.func))


class Follower(TorchFunctionMode):
    """A context in which each operation on followed parameters is treated as `Operations` says.

    Args:
        receiver: receives inputs and gradients.
        assignment: has the followed parameters, and what each operation on them is.
        values: name -> parameter without a graph, of all of the model.
        num_examples: N of the batch; None if it is not known.
    """

    def __init__(
        self,
        receiver: Receiver,
        assignment: RuleAssignment,
        values: Mapping[str, Tensor],
        num_examples: int | None,
    ) -> None:
        super().__init__()
        self._receiver, self._operations = receiver, assignment.operations
        self._num_examples = num_examples
        self._once = {layer for layer, kinds in assignment.runs.items() if "followed" in kinds}
        self._expressions: dict[int, Expression] = {}  # by the id of the value
        self._roots: dict[int, str] = {}  # id of a parameter's value -> its name
        self.inside: list[TrackedLayer] = []
        """The layers with a rule that are running. Their rules cover what they do with their own
        parameters, so that such operations are not followed."""
        leaves = {name: values[name].requires_grad_() for name in self._operations.names}
        self.values = {name: leaf.detach() for name, leaf in leaves.items()}
        """What the model must be called with in place of the parameters."""
        for name, value in self.values.items():
            key = self._operations.key(name)
            self._add_expression(value, leaves[name], key, {name: leaves[name]})
            self._roots[id(value)] = name
        # Runs on what all examples share: the use to report gradients for, and the output's shape.
        self._shared_runs: dict[LayerRun, tuple[Use, torch.Size]] = {}
        # One vector's gradients of such outputs. They may meet the examples at several places,
        # which autograd reaches one by one, so that the sum is reported when the vector is done.
        self._partial_gradients: dict[LayerRun, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Most operations have no followed parameter among their arguments: they run as they are.
        expressions = [e for value in tensors_in((args, kwargs)) if (e := self._expression(value))]
        if not expressions:
            return func(*args, **kwargs)
        rewritten = self._rewritten(func, args, kwargs)
        if rewritten is not None:
            with self:  # its parts are shown to this mode again
                return rewritten(*args, **kwargs)
        key = self._operations.key(func, *(e.key for e in expressions))
        return self._run(Call(func, args, kwargs, expressions, key))

    def start_expression(
        self, tracked: TrackedLayer, number: int, use: Use, output: Tensor
    ) -> Tensor:
        """The output of a layer that ran once for all examples, followed to where it meets them."""
        run = LayerRun(tracked, number)
        self._shared_runs[run] = use, output.shape
        expression = self._expressions.get(id(output))  # if the layer's input was an expression
        # The layer's rule needs the gradient in its output, which the graph of the twin yields as
        # that of zeros added to it. Earlier parts of an expression keep their own leaves.
        zeros = torch.zeros_like(output).requires_grad_()
        twin = (output.detach() if expression is None else expression.twin) + zeros
        key = self._operations.key(tracked.name, number)
        value = output.detach()
        leaves: Leaves = {} if expression is None else expression.leaves
        self._add_expression(value, twin, key, {**leaves, run: zeros})
        return value

    def vector_done(self) -> list[LayerRun]:
        """Hand over the gradients of runs that started expressions; returns these runs."""
        runs = list(self._partial_gradients)
        for run in runs:
            use, shape = self._shared_runs[run]
            b = self._partial_gradients.pop(run).unflatten(1, shape)
            self._receiver.report_gradient(run.tracked, use, b)
        return runs

    def _run(self, call: Call) -> Any:
        kind = self._operations.kinds.get(call.key)
        if kind == "computed":
            return self._computed(call)
        if isinstance(kind, int):
            return self._row_by_row(call, kind)
        if isinstance(kind, tuple):
            return self._as_layer(call, kind)
        output = call.run()
        if kind is None and tensors_in(output):
            raise NotImplementedError(
                f"{_names(call)} meets {call} in this batch as it did not in the first, so that "
                'its block cannot be told. Freeze it (requires_grad_(False)), or pass unsupported="'
                'diagonal".'
            )
        return output

    def _computed(self, call: Call) -> Any:
        """An expression made of expressions: computed without a graph, and with one."""
        output = call.run()
        outputs = tensors_in(output)
        if any(value.requires_grad for value in outputs):
            raise NotImplementedError(
                f"{_names(call)} meets the examples in {call}, as it did not in the first batch. "
                "Freeze it (requires_grad_(False))."
            )
        if outputs:
            self._follow_on(call, outputs)
        return output

    def _follow_on(self, call: Call, outputs: list[Tensor]) -> None:
        """Remember the operation's results as expressions."""
        # The operation runs again on the twins, whose graph leads to the leaves. The model sees the
        # result without one, since a graph is how a tensor is told that depends on the examples.
        twin_of = {id(e.value): e.twin for e in call.expressions}
        twins = tensors_in(call.run(lambda value: twin_of.get(id(value), value)))
        leaves = {key: leaf for e in call.expressions for key, leaf in e.leaves.items()}
        for number, (value, twin) in enumerate(zip(outputs, twins, strict=True)):
            if twin.requires_grad:  # otherwise a constant: under no_grad, or of a comparison
                self._add_expression(value, twin, self._operations.key(call.key, number), leaves)

    def _row_by_row(self, call: Call, axis: int) -> Any:
        """The operation on each row of the examples, with a copy of each expression for each row.

        ``axis`` is the output's axis of rows, counted from the end, since broadcasting
        aligns the last axes.
        """
        expressions = {id(e.value): e for e in call.expressions}
        # Step 1: the tensors that have a row of each example, and the axis of these rows.
        use = weight_use(call)
        if use is not None and id(use.weight) in expressions:
            # A linear map: its input may have other axes than its output, but for the first.
            M, with_rows = len(use.a), {id(use.a): (use.a, -use.a.dim())}
        else:
            others = [t for t in call.tensors if id(t) not in expressions and t.dim() >= -axis]
            M = max((t.shape[axis] for t in others), default=1)
            if M == 1 and call.changes is None:  # the size may be another argument, as in expand
                M = call.run().shape[axis]
            with_rows = {id(t): (t, axis) for t in others if t.shape[axis] == M}
        copies = {key: self._copies(e, M) for key, e in expressions.items()}

        def run(replacements: Mapping[int, Tensor], M: int) -> Tensor:
            output = call.run(lambda value: replacements.get(id(value), value))
            if output.dim() < -axis or output.shape[axis] != M:
                raise NotImplementedError(
                    f"{_names(call)} meets {call} in this batch, which takes no copy of it for "
                    "each example. Freeze it (requires_grad_(False)), or pass unsupported="
                    '"diagonal".'
                )
            return output

        if not with_rows:
            return run({key: _aligned(rows, axis) for key, rows in copies.items()}, M)

        # Step 2: one row after the other, by torch's map over all of them.
        def of_row(*values: Tensor) -> Tensor:
            replacements = dict(zip([*copies, *with_rows], values, strict=True))
            for key, (_, rows_axis) in with_rows.items():  # a batch of one row
                replacements[key] = replacements[key].unsqueeze(rows_axis)
            return run(replacements, 1).squeeze(axis)

        pairs = [*((rows, 0) for rows in copies.values()), *with_rows.values()]
        tensors, axes = zip(*pairs, strict=True)
        with plain_attention():  # a mask of its own for each row
            output = torch.func.vmap(of_row, axes)(*tensors).movedim(0, axis)
        return output if call.changes is None else call.changes

    def _copies(self, expression: Expression, M: int) -> Tensor:
        """A copy (M, ...) of an expression for each row; reports its parameters' gradients.

        A copy is a source: backward passes end there, and the expression's own graph takes each
        example's gradient on to the parameters.
        """
        N, own = self._num_examples, self._operations.own
        rows, rows_of_each = current_rows(), 0
        if rows is not None and not (rows.of_positions or len(rows.index) == M):
            rows = None  # given for the rows of another tensor
        if rows is not None:
            rows = rows.on(expression.value.device)
        if rows is None or rows.of_positions:
            rows, rows_of_each = None, M // N if N else 0
            if not N or M % N:
                raise NotImplementedError(
                    f"Parameters {', '.join(map(repr, expression.leaves))} meet {M} rows of {N} "
                    "examples; say which example each row belongs to (examples_of_rows), or freeze "
                    "them (requires_grad_(False))."
                )
        # The copies are a leaf of their own: in the expression autograd would sum the gradient over
        # all rows; in the copies row m has its own.
        # Expanded, not copied: one piece of memory serves all rows.
        source = expression.value.detach().expand(M, *expression.value.shape).requires_grad_()
        self._receiver.add_source(source)
        examples = M // rows_of_each if rows is None else rows.num_examples
        uses = {leaf: Use(source.new_zeros(examples, 0)) for leaf in expression.leaves}
        for leaf, use in uses.items():
            if isinstance(leaf, str):
                self._receiver.report_input(own[leaf], use)

        def on_gradient(b: Tensor) -> None:
            b = b.reshape(-1, *expression.value.shape)  # (V·M, ...)
            # An example's gradient in the expression is the sum over its rows; from there the
            # expression's graph leads to the parameters, example by example.
            if rows is not None:
                b = rows.sums(b)
            elif rows_of_each > 1:
                b = at_least_float32(b).unflatten(0, (-1, rows_of_each)).sum(1)
            for leaf, gradients in expression.gradients(b).items():
                if isinstance(leaf, str):
                    self._receiver.report_gradient(own[leaf], uses[leaf], gradients)
                else:  # other parts of its gradient may still come
                    earlier = self._partial_gradients.get(leaf)
                    gradients = gradients if earlier is None else earlier + gradients
                    self._partial_gradients[leaf] = gradients

        source.register_hook(on_gradient)
        return source

    def _as_layer(self, call: Call, layers: tuple[TrackedLayer, ...]) -> Any:
        """The operation as the run of a layer, or of that of its matrix in a stack."""
        use = weight_use(call)
        assert use is not None
        tracked = self._in_stack(layers, use)
        layer = tracked.layer
        assert isinstance(layer, FunctionalLayer)
        if use.settings != layer.settings:
            raise NotImplementedError(
                f"Layer {tracked} runs with {use.settings} and with {layer.settings}, which have "
                "no common block. Freeze it (requires_grad_(False))."
            )
        return self._receiver.report_run(tracked, use.a, call.run())

    def _in_stack(self, layers: tuple[TrackedLayer, ...], use: "WeightUse") -> TrackedLayer:
        stored = self._stored(use.weight)
        assert stored is not None
        return layers[stored.slot or 0]

    def _add_expression(self, value: Tensor, twin: Tensor, key: int, leaves: Leaves) -> None:
        self._expressions[id(value)] = Expression(value, twin, key, leaves)

    def _expression(self, value: Any) -> Expression | None:
        name = self._roots.get(id(value))
        if name is not None and any(name in t.parameters.values() for t in self.inside):
            return None
        return self._expressions.get(id(value))

    def _stored(self, value: Any) -> "Stored | None":
        """The parameter that a tensor is, its transpose, or a matrix of a stack of them.

        None if it was computed from the parameter, or has another shape.
        """
        expression = self._expression(value)
        if expression is None or len(expression.leaves) > 1:
            return None
        ((name, leaf),) = expression.leaves.items()
        if isinstance(name, LayerRun):
            return None
        slot = None
        # A view of one matrix of a stack begins where that matrix does.
        if leaf.dim() == 3 and value.dim() == 2:
            slot = (value.storage_offset() - leaf.storage_offset()) // leaf[0].numel() % len(leaf)
            leaf = leaf[slot]
        # Memory and strides say what a tensor is; its values would not tell w from a copy of it.
        for transposed in (False, True)[: 1 + (leaf.dim() in (2, 3))]:
            if _is_stored(value, leaf.mT if transposed else leaf):
                return Stored(name, transposed, slot)
        return None

    def _is_stack(self, value: Any) -> bool:
        stored = self._stored(value)
        return stored is not None and value.dim() == 3

    def _rewritten(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """The function as a sequence of simpler ones, where it takes an expression in two ways.

        ``F.linear`` takes a bias beside the weight, and each has its own kind of operation.
        """
        if func is Tensor.repeat:
            return _repeat(*args)
        if func is torch.addmm and any(self._expression(value) for value in (args[0], *args[2:])):
            return _addmm
        if func not in WEIGHTS:
            return by_matrix(func, args, self._is_stack)
        arguments = _arguments(func, args, kwargs)
        weight, bias = arguments["weight"], arguments.get("bias")
        # With a parameter as its weight it is a layer's run, bias included.
        if not self._expression(bias) or (self._stored(weight) and self._stored(bias)):
            return by_matrix(func, args, self._is_stack)
        return lambda *_, **__: _without_bias(func, arguments)


class Refused(NotImplementedError):
    """An operation that cannot be followed; its message continues "'name' ..."."""


class Stored(NamedTuple):
    """What a tensor is in memory: a parameter, or a part of it."""

    name: str
    transposed: bool
    """Whether it is the transpose."""
    slot: int | None
    """The index of the matrix in a stack of them, (E, ., .); None for the whole."""


class WeightUse(NamedTuple):
    """The arguments of a linear operation."""

    a: Tensor
    weight: Tensor
    bias: Tensor | None
    rule: type[Rule]
    settings: dict[str, Any]
    """The attributes that its rule reads from a layer: stride, padding and so on."""


def weight_use(call: Call) -> WeightUse | None:
    """The arguments of an operation that is linear in its input; None for any other."""
    if call.func not in WEIGHTS:
        return None
    rule, _ = WEIGHTS[call.func]
    arguments = _arguments(call.func, call.args, call.kwargs)
    a, weight, bias = (arguments.pop(name, None) for name in ("input", "weight", "bias"))
    if not (isinstance(a, Tensor) and isinstance(weight, Tensor)):
        return None
    settings: dict[str, Any] = {}
    if rule is EmbeddingRule:
        padding = arguments.get("padding_idx")
        settings = {
            "num_embeddings": len(weight),
            "padding_idx": padding if padding is None or padding >= 0 else padding + len(weight),
            "max_norm": arguments.get("max_norm"),
            "scale_grad_by_freq": arguments.get("scale_grad_by_freq", False),
        }
    elif rule not in (LinearRule, TransposedLinearRule):
        n = weight.dim() - 2
        padding = arguments.get("padding", 0)
        groups = arguments.get("groups", 1)
        settings = {
            "in_channels": weight.shape[1] * groups,
            "out_channels": len(weight),
            "kernel_size": tuple(weight.shape[2:]),
            "stride": _each_axis(arguments.get("stride", 1), n),
            "padding": padding if isinstance(padding, str) else _each_axis(padding, n),
            "dilation": _each_axis(arguments.get("dilation", 1), n),
            "groups": groups,
            "padding_mode": "zeros",
        }
    return WeightUse(a, weight, bias, rule, settings)


def _each_axis(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _aligned(rows: Tensor, axis: int) -> Tensor:
    """Copies (M, *shape) with their rows at an axis from the end, where the shape has one entry."""
    missing = -axis - (rows.dim() - 1)
    if missing > 0:
        return rows.reshape(len(rows), *[1] * (missing - 1), *rows.shape[1:])
    return rows.squeeze(axis).movedim(0, axis)


def _is_stored(value: Tensor, parameter: Tensor, in_shape: bool = True) -> bool:
    """Whether a tensor is the parameter: the same memory, with its entries in the same order.

    Unless ``in_shape``, a contiguous view of another shape is one, too.
    """
    if value.data_ptr() != parameter.data_ptr() or value.dtype != parameter.dtype:
        return False
    if in_shape:
        return value.shape == parameter.shape and value.stride() == parameter.stride()
    contiguous = value.is_contiguous() and parameter.is_contiguous()
    return contiguous and value.numel() == parameter.numel()


def _names(call: Call) -> str:
    return ", ".join(dict.fromkeys(f"'{name}'" for e in call.expressions for name in e.names))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments or results."""
    # By hand, as `_mapped`, since each operation passes here: torch's tree functions are slower.
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    tensors: list[Tensor] = []
    for entry in value:
        tensors += [entry] if isinstance(entry, Tensor) else tensors_in(entry)
    return tensors


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with each tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, function) for entry in value)
    return value


def _repeat(value: Tensor, *repeats: Any) -> Callable[..., Tensor] | None:
    """`Tensor.repeat` along the first axis or a new one, as operations that can be followed.

    None for other axes.
    """
    times = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    is_new = len(times) == value.dim() + 1
    if not (is_new or len(times) == value.dim() > 0) or set(times[1:]) - {1} or not times[0]:
        return None

    def repeated(value: Tensor, *_: Any) -> Tensor:
        copies = value.expand(times[0], *value.shape)
        return copies if is_new else copies.flatten(0, 1)

    return repeated


def _arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a function of `WEIGHTS` by name."""
    return {**dict(zip(WEIGHTS[func][1], args, strict=False)), **kwargs}


def _without_bias(func: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """A linear map as the map without its bias, and a sum."""
    bias, channels = arguments.pop("bias"), arguments["weight"].dim() > 2
    y = func(**arguments)
    return y + (bias.reshape(-1, *[1] * (y.dim() - 2)) if channels else bias)


def _addmm(bias: Tensor, input: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    """Write transformers' Conv1D, and what was made after it, as a product and a sum."""
    if scales:
        raise Refused("meets addmm with scales")
    return input @ mat2 + bias


PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum"),
    *("addmm", "baddbmm", "linear", "bilinear"),
}
"""Names of operations that sum over the entries of an expression. They would read copies (N, ...)
as another matrix, so an expression may meet the examples here only as a layer's weight."""
WEIGHTS: dict[Callable[..., Any], tuple[type[Rule], tuple[str, ...]]] = {
    F.linear: (LinearRule, ("input", "weight", "bias")),
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d),
        (
            ConvolutionRule,
            ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        ),
    ),
    F.embedding: (
        EmbeddingRule,
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
    ),
    **dict.fromkeys(
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm),
        (TransposedLinearRule, ("input", "weight")),
    ),
}
"""Linear operations -> the rule of a layer that computes the same, and the arguments' names."""
