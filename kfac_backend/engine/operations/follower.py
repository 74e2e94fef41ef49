"""Follow parameters that no hook captures, operation by operation.

Models have parameters outside of layers: class tokens, scales, norms that they implement
themselves. They also pass a layer's weight to a function (``F.linear(x, self.qkv.weight)``) instead
of calling the layer. Hooks capture neither. A `TorchFunctionMode` does, because torch calls it for
each operation of the forward pass.

An *expression* is a tensor that depends on followed parameters, but on no example: w itself, 1 + w,
rows of a table, several biases in one. An operation combines it with a tensor that does depend on
the examples in one of two ways:

- As the weight of a linear map (``F.linear``, a convolution, an embedding, ``@``), if it is the
  stored parameter, or its transpose. The operation then counts as a run of a layer with that
  weight, and gets that layer's rule.
- Otherwise each row of the examples gets a copy of the expression, and the operation runs row by
  row (`torch.func.vmap`). Examples are a product with a scale, a sum with a position embedding, a
  norm, and a map with a normalised weight. The gradient of a copy belongs to one row, and the
  expression's own graph propagates each example's sum to the parameters. This is exact.

If a layer runs once for all examples (a table of relative positions), and its output cannot be
copied for each example at once, it starts an expression as well. Its output is followed like a
parameter, and receives each example's gradient.

Life cycle. `classify.follow` determines the kind of each operation. It runs the model with one
example (`CollectShapes`), and with the same example twice (`ClassifyOperations`). If an output has
twice the size in the second run, it depends on the examples. The result is stored in
`Operations.kinds`. From then on `Capture` makes a new `Follower` for each forward pass, which looks
every operation up there. Its expressions live as long as the forward pass and its backward passes.
An operation without an entry is an error.

The key of an operation depends on its arguments and not on its position in the forward pass, so a
loop may run longer in another batch. The kinds are hypotheses: `comparison.compare` compares the
model's output and the gradients before a pass uses them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

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


@dataclass(frozen=True, eq=False)
class Expression:
    """Tensor computed from followed parameters, and from layer outputs that all examples share."""

    value: Tensor
    """Tensor in the model, without a graph. Expressions are looked up by its id, so it must stay
    alive: Python reuses the id of a dead object."""
    twin: Tensor
    """Same values with a graph down to the leaves, for `gradients`. The model must not use it,
    because a graph marks tensors that depend on the examples."""
    key: int
    """Key of its computation, see `Operations.key`."""
    leaves: "Leaves"
    """Leaves of its computation."""

    @property
    def names(self) -> list[str]:
        """Parameters that it depends on, including parameters of layers."""
        names = [
            [leaf] if isinstance(leaf, str) else leaf.tracked.parameters.values()
            for leaf in self.leaves
        ]
        return list(dict.fromkeys(chain.from_iterable(names)))

    def gradients(self, b: Tensor) -> dict["str | LayerRun", Tensor]:
        """Return gradients (K, P) of each leaf, from K gradients of the expression."""
        if len(self.leaves) == 1:  # usually the parameter itself, which needs no graph
            ((name, leaf),) = self.leaves.items()
            if _is_stored(self.value, leaf, in_shape=False):
                return {name: b.reshape(len(b), -1)}  # also for a single entry of it
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(
            self.twin,
            leaves,
            b.to(self.twin.dtype).reshape(-1, *self.twin.shape),
            retain_graph=True,
            create_graph=b.requires_grad,  # for derivatives of covariances
            is_grads_batched=True,
            materialize_grads=True,
        )
        return {name: g.flatten(1) for name, g in zip(self.leaves, gradients, strict=True)}


Leaves = Mapping[str | LayerRun, Tensor]
"""Maps a parameter's name to its leaf, and a layer's run to zeros that are added to its output."""


class Call(NamedTuple):
    """Operation on expressions that is about to run."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expressions: list[Expression]
    key: int

    def run(self, replaced: Callable[[Tensor], Tensor] = lambda value: value) -> Any:
        """Return the result, with each tensor argument replaced."""
        return self.func(*_mapped(self.args, replaced), **_mapped(self.kwargs, replaced))

    @property
    def changes(self) -> Tensor | None:
        """Tensor that the operation changes in place, if any."""
        # By torch's naming: add_ and __iadd__ are in place, __add__ is not.
        name = getattr(self.func, "__name__", "")
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        first = self.args[0] if self.args else None
        return first if (in_place or name == "__setitem__") and isinstance(first, Tensor) else None

    def __str__(self) -> str:
        return getattr(self.func, "__name__", str(self.func))


class Follower(TorchFunctionMode):
    """Context that treats each operation on followed parameters as `Operations` says.

    Args:
        capture: the `Capture` that makes this follower, and receives inputs and gradients.
        assignment: contains the followed parameters, and the kinds of operations on them.
        values: all parameters of the model by name, without graphs.
        num_examples: N of the batch; None if unknown.
    """

    def __init__(
        self,
        capture: Any,  # naming its class would close a circle of imports
        assignment: RuleAssignment,
        values: Mapping[str, Tensor],
        num_examples: int | None,
    ) -> None:
        super().__init__()
        self._capture, self._operations = capture, assignment.operations
        self._num_examples = num_examples
        self._once = {layer for layer, kinds in assignment.runs.items() if "followed" in kinds}
        self._expressions: dict[int, Expression] = {}  # by the id of the value
        self._roots: dict[int, str] = {}  # maps the id of a parameter's value to its name
        self.inside: list[TrackedLayer] = []
        """Layers with a rule that are running. Their rules cover operations on their own
        parameters, so these are not followed."""
        leaves = {name: values[name].requires_grad_() for name in self._operations.names}
        self.values = {name: leaf.detach() for name, leaf in leaves.items()}
        """Replacements of the parameters, with which the model must be called."""
        for name, value in self.values.items():
            key = self._operations.key(name)
            self._expressions[id(value)] = Expression(
                value, leaves[name], key, {name: leaves[name]}
            )
            self._roots[id(value)] = name
        # Runs on inputs that all examples share: the use to report gradients for, and the output's
        # shape.
        self._shared_runs: dict[LayerRun, tuple[Use, torch.Size]] = {}
        # One vector's gradients of such outputs. Several operations may combine an output with the
        # examples, and autograd reaches them one by one. So the sum is reported when the vector is
        # done.
        self._partial_gradients: dict[LayerRun, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Most operations have no followed parameter among their arguments, and run unchanged.
        expressions = [e for value in tensors_in((args, kwargs)) if (e := self._expression(value))]
        if not expressions:
            return func(*args, **kwargs)
        rewritten = self._rewritten(func, args, kwargs)
        if rewritten is not None:
            with self:  # this mode also receives its simpler functions
                return rewritten(*args, **kwargs)
        key = self._operations.key(func, *(e.key for e in expressions))
        return self._run(Call(func, args, kwargs, expressions, key))

    def start_expression(
        self, tracked: TrackedLayer, number: int, use: Use, output: Tensor
    ) -> Tensor:
        """Follow the output of a layer that ran once for all examples."""
        run = LayerRun(tracked, number)
        self._shared_runs[run] = use, output.shape
        expression = self._expressions.get(id(output))  # set if the layer's input was an expression
        # The layer's rule needs the gradient of its output. The graph of the twin gives it as the
        # gradient of zeros that are added to the output. Earlier parts of an expression keep their
        # own leaves.
        zeros = torch.zeros_like(output).requires_grad_()
        twin = (output.detach() if expression is None else expression.twin) + zeros
        key = self._operations.key(tracked.name, number)
        value = output.detach()
        leaves: Leaves = {} if expression is None else expression.leaves
        self._expressions[id(value)] = Expression(value, twin, key, {**leaves, run: zeros})
        return value

    def vector_done(self) -> list[LayerRun]:
        """Report the gradients of runs that started expressions, and return these runs."""
        runs = list(self._partial_gradients)
        for run in runs:
            use, shape = self._shared_runs[run]
            b = self._partial_gradients.pop(run).unflatten(1, shape)
            self._capture.report_gradient(run.tracked, use, b)
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
        if tensors_in(output):
            raise NotImplementedError(
                f"{_names(call)} is used by {call} in this batch, unlike in the first batch, so "
                "its block is unknown. Freeze it (requires_grad_(False)), or pass "
                'unsupported="diagonal".'
            )
        return output

    def _computed(self, call: Call) -> Any:
        """Compute an expression from expressions, without a graph and with one."""
        output = call.run()
        outputs = tensors_in(output)
        if any(value.requires_grad for value in outputs):
            raise NotImplementedError(
                f"{_names(call)} is combined with the examples in {call}, unlike in the first "
                "batch. Freeze it (requires_grad_(False))."
            )
        if outputs:
            self._follow_on(call, outputs)
        return output

    def _follow_on(self, call: Call, outputs: list[Tensor]) -> None:
        """Record the operation's results as expressions."""
        # Run the operation again on the twins, whose graph leads to the leaves. The model uses the
        # result without a graph, because a graph marks tensors that depend on the examples.
        twin_of = {id(e.value): e.twin for e in call.expressions}
        twins = tensors_in(call.run(lambda value: twin_of.get(id(value), value)))
        leaves = {key: leaf for e in call.expressions for key, leaf in e.leaves.items()}
        for number, (value, twin) in enumerate(zip(outputs, twins, strict=True)):
            # Otherwise it is a constant, for example under no_grad or from a comparison.
            if twin.requires_grad:
                key = self._operations.key(call.key, number)
                self._expressions[id(value)] = Expression(value, twin, key, leaves)

    def _row_by_row(self, call: Call, axis: int) -> Any:
        """Run the operation on each row of the examples, with a copy of each expression per row.

        ``axis`` is the output's axis of rows, counted from the end, because broadcasting aligns the
        last axes.
        """
        expressions = {id(e.value): e for e in call.expressions}
        # Step 1: find the tensors with rows of the examples, and their axis of rows.
        use = weight_use(call)
        if use is not None and id(use.weight) in expressions:
            # A linear map's input may have other axes than its output, except for the first.
            M, with_rows = len(use.a), {id(use.a): (use.a, -use.a.dim())}
        else:
            tensors = tensors_in((call.args, call.kwargs))
            others = [t for t in tensors if id(t) not in expressions and t.dim() >= -axis]
            M = max((t.shape[axis] for t in others), default=1)
            if M == 1 and call.changes is None:  # the size may be another argument, as in expand
                M = call.run().shape[axis]
            with_rows = {id(t): (t, axis) for t in others if t.shape[axis] == M}
        copies = {key: self._copies(e, M) for key, e in expressions.items()}

        def run(replacements: Mapping[int, Tensor], M: int) -> Tensor:
            output = call.run(lambda value: replacements.get(id(value), value))
            if output.dim() < -axis or output.shape[axis] != M:
                raise NotImplementedError(
                    f"{_names(call)} is used by {call}, which does not support one copy per "
                    "example in this batch. Freeze it (requires_grad_(False)), or pass "
                    'unsupported="diagonal".'
                )
            return output

        if not with_rows:
            return run({key: _aligned(rows, axis) for key, rows in copies.items()}, M)

        # Step 2: run row by row, with torch's map over all rows.
        def of_row(*values: Tensor) -> Tensor:
            replacements = dict(zip([*copies, *with_rows], values, strict=True))
            for key, (_, rows_axis) in with_rows.items():  # a batch of one row
                replacements[key] = replacements[key].unsqueeze(rows_axis)
            return run(replacements, 1).squeeze(axis)

        pairs = [*((rows, 0) for rows in copies.values()), *with_rows.values()]
        tensors, axes = zip(*pairs, strict=True)
        with plain_attention():  # each row has its own mask
            output = torch.func.vmap(of_row, axes)(*tensors).movedim(0, axis)
        return output if call.changes is None else call.changes

    def _copies(self, expression: Expression, M: int) -> Tensor:
        """Return a copy (M, ...) of an expression for each row, and report parameter gradients.

        A copy is a source: backward passes end there, and the expression's own graph propagates
        each example's gradient to the parameters.
        """
        N, own = self._num_examples, self._operations.own
        rows, rows_of_each = current_rows(), 0
        # Positions of a mask, or the rows of another tensor, say nothing about these rows.
        if rows is not None and not rows.of_positions and len(rows.index) == M:
            rows = rows.on(expression.value.device)
        else:
            rows, rows_of_each = None, M // N if N else 0
            if not N or M % N:
                raise NotImplementedError(
                    f"Parameters {', '.join(map(repr, expression.leaves))} are combined with {M} "
                    f"rows of {N} examples. Say which example each row belongs to "
                    "(examples_of_rows), or freeze them (requires_grad_(False))."
                )
        # The copies are a separate leaf. In the expression autograd would sum the gradient over all
        # rows; in the copies each row m has its own gradient. Expand, do not copy: one piece of
        # memory serves all rows.
        source = expression.value.detach().expand(M, *expression.value.shape).requires_grad_()
        self._capture.add_source(source)
        examples = M // rows_of_each if rows is None else rows.num_examples
        uses = {leaf: Use(source.new_zeros(examples, 0)) for leaf in expression.leaves}
        for leaf, use in uses.items():
            if isinstance(leaf, str):
                self._capture.report_input(own[leaf], use)

        def on_gradient(b: Tensor) -> None:
            # An example's gradient of the expression is the sum over its rows. The expression's
            # graph propagates it to the parameters, example by example.
            if rows is not None:
                b = rows.sums(b)
            elif rows_of_each > 1:
                b = at_least_float32(b).unflatten(0, (-1, rows_of_each)).sum(1)
            for leaf, gradients in expression.gradients(b).items():
                if isinstance(leaf, str):
                    self._capture.report_gradient(own[leaf], uses[leaf], gradients)
                else:  # other parts of its gradient may follow
                    earlier = self._partial_gradients.get(leaf)
                    gradients = gradients if earlier is None else earlier + gradients
                    self._partial_gradients[leaf] = gradients

        source.register_hook(on_gradient)
        return source

    def _as_layer(self, call: Call, layers: tuple[TrackedLayer, ...]) -> Any:
        """Run the operation as a run of a layer, or of its matrix's layer in a stack."""
        use = weight_use(call)
        assert use is not None
        tracked = self._in_stack(layers, use)
        layer = tracked.layer
        assert isinstance(layer, FunctionalLayer)
        if use.settings != layer.settings:
            raise NotImplementedError(
                f"Layer {tracked} runs with {use.settings} and with {layer.settings}. These runs "
                "have no common block. Freeze it (requires_grad_(False))."
            )
        output = call.run()
        self._capture.before(tracked)
        return self._capture.after(tracked, layer, (use.a,), {}, output)

    def _in_stack(self, layers: tuple[TrackedLayer, ...], use: "WeightUse") -> TrackedLayer:
        stored = self._stored(use.weight)
        assert stored is not None
        return layers[stored.slot or 0]

    def _expression(self, value: Any) -> Expression | None:
        name = self._roots.get(id(value))
        if name is not None and any(name in t.parameters.values() for t in self.inside):
            return None
        return self._expressions.get(id(value))

    def _stored(self, value: Any) -> "Stored | None":
        """Return the parameter that a tensor is: whole, transposed, or one matrix of a stack.

        None if the tensor was computed from the parameter, or has another shape.
        """
        expression = self._expression(value)
        if expression is None or len(expression.leaves) > 1:
            return None
        ((name, leaf),) = expression.leaves.items()
        if isinstance(name, LayerRun):
            return None
        slot = None
        # A view of one matrix of a stack begins at that matrix.
        if leaf.dim() == 3 and value.dim() == 2:
            slot = (value.storage_offset() - leaf.storage_offset()) // leaf[0].numel() % len(leaf)
            leaf = leaf[slot]
        # Memory and strides identify a tensor; its values would not distinguish w from a copy of
        # it.
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
        """Return the function as a sequence of simpler ones, if it uses an expression in two ways.

        ``F.linear`` takes a bias with the weight, and each has its own kind of operation.
        """
        if func is Tensor.repeat:
            return _repeat(*args)
        if func is torch.addmm and any(self._expression(value) for value in (args[0], *args[2:])):
            return _addmm
        if func not in WEIGHTS:
            return by_matrix(func, args, self._is_stack)
        arguments = _arguments(func, args, kwargs)
        weight, bias = arguments["weight"], arguments.get("bias")
        # If its weight is a parameter, it is a layer's run, including the bias.
        if not self._expression(bias) or (self._stored(weight) and self._stored(bias)):
            return by_matrix(func, args, self._is_stack)
        return lambda *_, **__: _without_bias(func, arguments)


class Refused(NotImplementedError):
    """Error for an operation that cannot be followed. Its message continues "'name' ..."."""


class Stored(NamedTuple):
    """Parameter, or part of one, whose memory a tensor is."""

    name: str
    transposed: bool
    """Whether the tensor is the transpose."""
    slot: int | None
    """Index of the matrix in a stack of them, (E, ., .); None for the whole."""


class WeightUse(NamedTuple):
    """Arguments of a linear operation."""

    a: Tensor
    weight: Tensor
    bias: Tensor | None
    rule: type[Rule]
    settings: dict[str, Any]
    """Attributes that its rule reads from a layer: stride, padding and so on."""


def weight_use(call: Call) -> WeightUse | None:
    """Return the arguments of an operation that is linear in its input; None for any other."""
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
    """Move the rows of copies (M, *shape) to an axis from the end, where the shape has size one."""
    missing = -axis - (rows.dim() - 1)
    if missing > 0:
        return rows.reshape(len(rows), *[1] * (missing - 1), *rows.shape[1:])
    return rows.squeeze(axis).movedim(0, axis)


def _is_stored(value: Tensor, parameter: Tensor, in_shape: bool = True) -> bool:
    """Return whether a tensor is the parameter: the same memory, with entries in the same order.

    With ``in_shape=False`` a contiguous view of another shape counts, too.
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
    """Return the tensors in arguments or results."""
    # Recursion by hand, as in `_mapped`, because each operation calls it: torch's tree functions
    # are slower.
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
    """Return the arguments with each tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, function) for entry in value)
    return value


def _repeat(value: Tensor, *repeats: Any) -> Callable[..., Tensor] | None:
    """Return `Tensor.repeat` along the first or a new axis as operations that can be followed.

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
    """Return the arguments of a function of `WEIGHTS` by name."""
    return {**dict(zip(WEIGHTS[func][1], args, strict=False)), **kwargs}


def _without_bias(func: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """Compute a linear map as the map without its bias, and a sum."""
    bias, channels = arguments.pop("bias"), arguments["weight"].dim() > 2
    y = func(**arguments)
    return y + (bias.reshape(-1, *[1] * (y.dim() - 2)) if channels else bias)


def _addmm(bias: Tensor, input: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    """Compute addmm, as in transformers' Conv1D, as a product and a sum."""
    if scales:
        raise Refused("is used by addmm with scales")
    return input @ mat2 + bias


PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum"),
    *("addmm", "baddbmm", "linear", "bilinear"),
}
"""Names of operations that sum over the entries of an expression. They would read copies (N,
...) as another matrix. So here an expression may be combined with the examples only as a layer's
weight."""
WEIGHTS: dict[Callable[..., Any], tuple[type[Rule], tuple[str, ...]]] = {
    F.linear: (LinearRule, ("input", "weight", "bias")),
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d),
        (ConvolutionRule, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
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
"""Maps linear operations to the rule of the equivalent layer, and the arguments' names."""
