"""Parameters that no hook sees, followed operation by operation.

Models have parameters outside of layers: class tokens, scales, norms that they implement
themselves. They also hand a layer's weight to a function (``F.linear(x, self.qkv.weight)``) instead
of calling the layer. Hooks see neither. `TorchFunctionMode` does: torch shows it each operation of
the forward pass.

An *expression* is a tensor that depends on followed parameters, and on no example: w itself, 1 + w,
rows of a table, several biases in one. Where an operation combines it with a tensor that does
depend on the examples, it *meets* them, in one of three ways:

- As the weight of a linear map (``F.linear``, a convolution, an embedding, ``@``). The operation is
  then treated as a run of a layer with that weight, and gets that layer's rule. The expression must
  be the parameter as it is stored, or its transpose.
- As the weight of such a map, but computed: normalised, or standardised. Each example's map runs
  with a copy of its own (`torch.func.vmap`), and the rest is as below.
- Otherwise by broadcasting. Each example is then given its own copy of the expression. The gradient
  of a copy is that of one example, and the expression's own graph takes it on to the parameters. No
  approximation is made.

A layer that runs once for all examples (a table of relative positions), and whose output cannot be
copied for each example at once, starts an expression as well. Its output is followed as a parameter
is, and receives each example's gradient.

Life cycle. `classify.follow` finds out what each operation is. It runs the model with one example
(`RecordShapes`) and with the same example twice (`ClassifyOperations`): an output that has twice
the size in the second run has met the examples. What is found goes into `Operations.kinds`. From
then on `Capture` makes a new `Follower` for each forward pass, which looks every operation up
there. Its expressions live as long as the forward pass and its backward passes. An operation that
is not found is an error.

An operation is identified by what it is made of and not by its place in the forward pass, so that a
loop may run longer in another batch. What is found is a hypothesis: `proof.verify_gradients`
compares the model's output and the gradients before a pass uses it.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_backend.engine.rule_assignment import (
    LayerRun,
    Operations,
    TrackedLayer,
)
from kfac_backend.layers import FunctionalLayer, Rule
from kfac_backend.layers.convolution import ConvolutionRule
from kfac_backend.layers.embedding import EmbeddingRule
from kfac_backend.layers.stacked import by_matrix
from kfac_backend.layers.weight_sharing import LinearRule, TransposedLinearRule

if TYPE_CHECKING:
    from kfac_backend.engine.operations.copies import Copies


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
        operations: what each operation is.
        leaves: name -> a leaf that requires a gradient.
        copies: makes a copy of an expression for each row.
        layer: called with a layer, its input and its output; returns the output.
        once: layers whose output starts an expression, since they run once for all examples.
    """

    def __init__(
        self,
        operations: Operations,
        leaves: Mapping[str, Tensor],
        copies: "Copies",
        layer: Callable[[TrackedLayer, Tensor, Tensor], Tensor],
        once: Container[nn.Module] = (),
    ) -> None:
        super().__init__()
        self._operations = operations
        self.copies, self._layer, self._once = copies, layer, once
        self._expressions: dict[int, Expression] = {}  # by the id of the value
        self._roots: dict[int, str] = {}  # id of a parameter's value -> its name
        self.inside: list[TrackedLayer] = []
        """The layers with a rule that are running. Their rules cover what they do with their own
        parameters, so that such operations are not followed."""
        self.values = {name: leaf.detach() for name, leaf in leaves.items()}
        """What the model must be called with in place of the parameters."""
        for name, value in self.values.items():
            self._add_expression(value, leaves[name], operations.key(name), {name: leaves[name]})
            self._roots[id(value)] = name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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

    def begin(self, run: LayerRun, output: Tensor) -> Tensor:
        """The output of a layer that ran once for all examples, as the start of an expression."""
        expression = self._expressions.get(id(output))  # if the layer's input was an expression
        # The layer's rule needs the gradient in its output, which the graph of the twin yields as
        # that of zeros added to it. Earlier parts of an expression keep their own leaves.
        zeros = torch.zeros_like(output).requires_grad_()
        twin = (output.detach() if expression is None else expression.twin) + zeros
        key = self._operations.key(run.tracked.name, run.number)
        value = output.detach()
        leaves: Leaves = {} if expression is None else expression.leaves
        self._add_expression(value, twin, key, {**leaves, run: zeros})
        return value

    def _run(self, call: Call) -> Any:
        kind = self._operations.kinds.get(call.key)
        if kind == "computed":
            return self._computed(call)
        if isinstance(kind, int):
            return self._met(call, kind)
        if isinstance(kind, tuple):
            return self._met_as_weight(call, kind)
        if kind == "mapped":
            return self._mapped(call)
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

    def _met(self, call: Call, axis: int) -> Any:
        """The operation with a copy of each expression for each row of its output.

        ``axis`` is the output's axis of rows, counted from the end, since broadcasting
        aligns the last axes.
        """
        # The rows are as many as the other tensor has there. An expression has one entry there, or
        # no such axis, so that its copies take that place, aligned as broadcasting would.
        M = max((t.shape[axis] for t in call.tensors if t.dim() >= -axis), default=1)
        if M == 1:  # the size comes from another argument, as in expand
            M = call.run().shape[axis]
        copies: dict[int, Tensor] = {}
        for e in call.expressions:
            if id(e.value) not in copies:
                copies[id(e.value)] = _aligned(self.copies.for_rows(e, M), axis)
        output = call.run(lambda value: copies.get(id(value), value))
        if not isinstance(output, Tensor) or output.dim() < -axis or output.shape[axis] != M:
            raise NotImplementedError(
                f"{_names(call)} meets {call} in this batch, which takes no copy of it for each "
                'example. Freeze it (requires_grad_(False)), or pass unsupported="diagonal".'
            )
        return output

    def _met_as_weight(self, call: Call, layers: tuple[TrackedLayer, ...]) -> Any:
        """The operation as the run of a layer, or of that of its matrix in a stack."""
        use = weight_use(call.func, call.args, call.kwargs)
        assert use is not None
        tracked = self._in_stack(layers, use)
        layer = tracked.layer
        assert isinstance(layer, FunctionalLayer)
        if use.settings != layer.settings:
            raise NotImplementedError(
                f"Layer {tracked} runs with {use.settings} and with {layer.settings}, which have "
                "no common block. Freeze it (requires_grad_(False))."
            )
        return self._layer(tracked, use.a, call.run())

    def _in_stack(self, layers: tuple[TrackedLayer, ...], use: "WeightUse") -> TrackedLayer:
        stored = self._stored(use.weight)
        assert stored is not None
        return layers[stored.slot or 0]

    def _mapped(self, call: Call) -> Tensor:
        """A linear operation of each row (M, ...) of its input, with a copy of its weight."""
        use = weight_use(call.func, call.args, call.kwargs)
        e = None if use is None else self._expression(use.weight)
        assert use is not None and e is not None

        # A map of all rows has one weight; vmap runs it for each row, with a weight of its own. The
        # row keeps a first axis of one, as the operation may need a batch.
        def of_row(a: Tensor, weight: Tensor) -> Tensor:
            replacements = {id(use.a): a[None], id(use.weight): weight}
            return call.run(lambda value: replacements.get(id(value), value))[0]

        return torch.func.vmap(of_row)(use.a, self.copies.for_rows(e, len(use.a)))

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
        for turned in (False, True)[: 1 + (leaf.dim() in (2, 3))]:
            if _is_stored(value, leaf.mT if turned else leaf):
                return Stored(name, turned, slot)
        return None

    def _is_stack(self, value: Any) -> bool:
        stored = self._stored(value)
        return stored is not None and value.dim() == 3

    def _rewritten(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """The function as a sequence of simpler ones, if an expression is its scale or its bias.

        ``F.layer_norm`` takes a weight (d,) but no copies (N, 1, d), and ``F.linear`` uses a weight
        and a bias in two different ways. As separate products and sums each has its own kind.
        """
        if func is Tensor.repeat:
            return _repeat(*args)
        if func is torch.addmm and any(self._expression(value) for value in (args[0], *args[2:])):
            return _addmm
        if func not in AFFINE:
            return by_matrix(func, args, self._is_stack)
        places = AFFINE[func][0].items()
        values = [kwargs.get(key, args[i] if i < len(args) else None) for key, i in places]
        if not any(self._expression(value) for value in values):
            return None
        if func in WEIGHTS:  # with a parameter as its weight it is a layer's run, bias included
            _, weight, bias, *_ = weight_use(func, args, kwargs) or (None, None, None)
            if self._stored(weight) and self._stored(bias):
                return None
        return partial(_without_affine, func)


class Refused(NotImplementedError):
    """An operation that cannot be followed; its message continues "'name' ..."."""


class Stored(NamedTuple):
    """What a tensor is in memory: a parameter, or a part of it."""

    name: str
    turned: bool
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


def weight_use(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> WeightUse | None:
    """The arguments of an operation that is linear in its input; None for any other."""
    if func not in WEIGHTS:
        return None
    rule, names = WEIGHTS[func]
    arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    a, weight, bias = (
        arguments.pop("input", None),
        arguments.pop("weight", None),
        arguments.pop("bias", None),
    )
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
    return [tensor for entry in value for tensor in tensors_in(entry)]


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


def _without_affine(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A function of `AFFINE` as the function without weight and bias, a product and a sum."""
    positions, of_channels = AFFINE[func]
    arguments = list(args)
    values: dict[str, Any] = {}
    for key, i in positions.items():
        values[key] = kwargs.pop(key, None) if i >= len(arguments) else arguments[i]
        if i < len(arguments):
            arguments[i] = None
    y = func(*arguments, **kwargs)
    for key, operation in (("weight", torch.mul), ("bias", torch.add)):
        if (value := values.get(key)) is not None:
            behind = [1] * (y.dim() - 2) if of_channels else []
            y = operation(y, value.reshape(-1, *behind) if behind else value)
    return y


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
AFFINE: dict[Callable[..., Any], tuple[dict[str, int], bool]] = {
    F.layer_norm: ({"weight": 2, "bias": 3}, False),
    F.rms_norm: ({"weight": 2}, False),
    F.group_norm: ({"weight": 2, "bias": 3}, True),
    F.batch_norm: ({"weight": 3, "bias": 4}, True),
    F.linear: ({"bias": 2}, False),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), ({"bias": 2}, True)),
}
"""Functions that scale their output by a ``weight`` and add a ``bias`` at the end: the position of
these arguments, and whether they are of channels, (N, C, ...), instead of the last axes."""
