"""Capture the inputs and output gradients of layers with hooks.

A capture has one forward pass, and backward passes that end at the first tracked outputs.
Parameters are detached meanwhile. The graph begins at the outputs of the first tracked layers,
which become leaves that require a gradient (the *sources*). So autograd computes no weight
gradients, and no backward pass goes further than these layers. A `Sink` receives each layer's input
in the forward pass, and the gradient of its output in each backward pass.

Life cycle. A `Capture` is a context for one forward pass: entering it registers the hooks, leaving
it removes them and drops the graph. Inside, `forward` runs the model and reports the input of each
run of a layer. Then `backward` propagates vectors back, one after the other, and reports the
gradient of each run that a vector reaches. `Runs` records the runs, and which of them a vector has
reached. Last, `Runs.check_reached` compares them with the runs of the proof.

A training step makes its own forward pass (`Sink.in_training`), so it calls `begin` instead of
`forward`. The hooks are removed after the forward pass, but the graph stays until `forget`, because
the backward passes come later. Parameters keep their graph, which the training needs. The
curvature's backward passes end at the same sources, so autograd skips the weights' gradients.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from kfac_backend.engine.batches import num_examples
from kfac_backend.engine.model_calls import call_with, explicit_forwards
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer, UnexpectedRun
from kfac_backend.layers import Use
from kfac_backend.layers.rows import Rows, Run, SharedAxes, consecutive_rows, current_rows
from kfac_backend.layers.weight_sharing import LinearRule
from kfac_backend.options import KfacApprox
from kfac_backend.sharding import detached_parameters

if TYPE_CHECKING:
    from kfac_backend.engine.operations.follower import Follower


class Sink:
    """Base class of receivers of layer inputs and gradients. By default it ignores them.

    A pass calls the methods in this order. At the beginning: `start`. For each batch: `input` for
    each run of a layer. For each propagated vector: `gradient` for each run that the vector
    reaches, then `vector_done`. After the last vector: `batch_done`, and `example_gradients` for
    parameters without a rule. After the last batch: `sums`.
    """

    needs_inputs: ClassVar[bool] = False
    """Whether gradients come with their layer's input even if the layer's rule does not need it."""
    in_training: bool = False
    """Whether the sink receives a training step: `Capture.begin` is called, and the training makes
    the forward pass, whose graph stays for its backward pass."""
    keeps_graph: bool = False
    """Whether the graph in front of the first layers is kept, down to tensors that require a
    gradient."""
    differentiable: bool = False
    """Whether inputs, gradients and outputs keep their graphs to the model's input, which must
    require a gradient."""

    around_batch: Callable[[], AbstractContextManager[object]] = nullcontext
    """Factory of a context around each batch."""
    takes_example_gradients: ClassVar[bool] = False
    """Whether the sink uses `example_gradients`, which cost further passes over each batch."""

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Begin with empty sums. The assignment is completed, and the mode is no longer "auto"."""

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Receive the input of a layer's run."""

    def vectors(
        self, of_fisher: Callable[[Tensor, Tensor], Iterator[Tensor]], f: Tensor, y: Tensor
    ) -> Iterator[Tensor]:
        """Return the vectors to propagate back from the outputs, by default the Fisher's."""
        # A view: gradients of f itself, as of a loss, are no vectors and must reach no layer's
        # hook.
        return of_fisher(f.view_as(f) if self.differentiable else f.detach(), y)

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Receive the gradient b of a use's output, in the output's shape.

        The use has its input only if the layer's rule or this sink needs it. Otherwise an empty
        tensor replaces it, so that memory does not hold all layers' inputs. Autograd may later add
        to b in place, or reuse its memory.
        """

    def vector_done(self) -> None:
        """Called after all inputs of a batch, and after all gradients of a vector.

        It is called at least once per batch: outputs that depend on no layer have no gradients.
        """

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Called after all vectors of a batch, with its outputs and targets."""

    def example_gradients(self, name: str, g: Tensor) -> None:
        """Receive gradients (n, V, *shape) per example and vector of a parameter without a rule."""

    def needs_examples(self, tracked: TrackedLayer) -> bool:
        """Return whether the example of each of the layer's rows must be known."""
        return True

    def sums(self) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
        """Return the sums of a pass, of blocks by name and of others. They add over data.

        The sink is empty afterwards, until the next `start`.
        """
        return {}, {}


@dataclass(eq=False)
class Runs:
    """Runs of the tracked layers in a forward pass, and which of them a vector has reached."""

    num_examples: int | None = None
    """N of the input; None if unknown."""
    number: Counter[TrackedLayer] = field(default_factory=Counter)
    """Number of runs of each layer so far."""
    reached: dict[tuple[TrackedLayer, int], bool] = field(default_factory=dict)
    """Maps (layer, number of a run that needs a gradient) to whether a gradient has come."""
    examples: dict[TrackedLayer, set[int]] = field(default_factory=dict)
    """Numbers of examples to which the rows of a layer's runs belong."""
    rows: set[tuple[TrackedLayer, int]] = field(default_factory=set)
    """Number of consecutive rows per example, for layers with several."""
    not_divisible: list[TrackedLayer] = field(default_factory=list)
    """Layers with several rows per example in the proof, but no multiple of N rows now."""
    masked: set[TrackedLayer] = field(default_factory=set)
    """Layers with rows that a mask of positions hides."""
    unmasked: dict[str, int] = field(default_factory=dict)
    """Maps layers that a mask of positions does not fit to their number of positions, if
    several."""

    def constants(self) -> list[tuple[TrackedLayer, int]]:
        """Return runs that no vector has reached although one has reached their parameters.

        If no run of the parameters was reached, the layer does not affect this output.
        """
        reached = {
            name
            for (tracked, _), is_reached in self.reached.items()
            if is_reached
            for name in tracked.parameters.values()
        }
        return [
            (tracked, number)
            for (tracked, number), is_reached in self.reached.items()
            if not is_reached and reached.intersection(tracked.parameters.values())
        ]

    def kinds(self) -> dict[TrackedLayer, list[Run]]:
        """Return the kind of each run of the layers, as far as the vectors so far show it."""
        kinds: dict[TrackedLayer, list[Run]] = {
            tracked: ["examples"] * number for tracked, number in self.number.items()
        }
        for tracked, number in self.constants():
            kinds[tracked][number] = "constant"
        return kinds

    def check_number(self, assignment: RuleAssignment) -> None:
        """Raise a NotImplementedError if the number of runs of a layer with several kinds changed.

        Kinds are assigned to runs by their order, which another number of runs would shift.
        """
        for tracked in assignment.layers:
            runs = assignment.runs.get(tracked.layer, ())
            number = self.number[tracked]
            if len(set(runs)) > 1 and number != len(runs):
                raise _other_runs(tracked, f"{number} times instead of {len(runs)}")

    def check_examples(self, N: int, sink: Sink, *, hides: bool) -> None:
        """Raise a NotImplementedError if rows of N examples are needed, but not known.

        They are needed if the sink needs them (for example to sum over positions), or if a mask
        hides positions, which would otherwise count.
        """
        for tracked, numbers in self.examples.items():
            wrong = numbers - {N}
            if wrong and (hides or sink.needs_examples(tracked)):
                error = unknown_examples(tracked, wrong.pop(), N)
                way_out = " Or let all positions count (dict_key_mask=None)." if hides else ""
                raise NotImplementedError(f"{error}{way_out}")

    def check_reached(self) -> None:
        """Raise a NotImplementedError for a run that is constant, unlike in the proof."""
        if not all(self.reached.values()):
            for tracked, number in self.constants():
                raise _other_runs(tracked, f"with a constant output in run {number + 1}")


class Capture:
    """Context that passes the tracked layers' inputs and output gradients to a sink.

    Args:
        model: the model.
        assignment: its tracked layers.
        sink: the receiver.
        constants: replacements of parameters by name, such as a weight in another memory format.
            They do not apply to followed parameters.
        arithmetic: makes the context in which the sink works.
        follower: makes the context that follows operations on parameters; by default a `Follower`.
            The proof passes other followers, which classify the operations.
    """

    def __init__(
        self,
        model: nn.Module,
        assignment: RuleAssignment,
        sink: Sink | None = None,
        *,
        constants: Mapping[str, Tensor] | None = None,
        arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
        follower: "Callable[..., Follower] | None" = None,
    ) -> None:
        self.model = model
        self.assignment = assignment
        self.sink = Sink() if sink is None else sink
        self.arithmetic = arithmetic
        self._constants = dict(constants or {})
        self._follows = bool(assignment.operations.names) or any(
            "followed" in kinds for kinds in assignment.runs.values()
        )
        self._kind_of_follower = follower
        self.follower: "Follower | None" = None
        """Follows the operations on followed parameters; None if there are none."""
        self._hooks = ExitStack()
        self.listens = False
        """Whether gradients are reported, whoever propagates them. The hooks stay on the graph,
        which the training's own backward pass uses, too."""
        self.runs = Runs()
        self._sources: list[Any] = []  # ends of backward passes: leaves, or edges of a kept graph
        self._idle: dict[str, Tensor] = {}  # the first sources
        # The nodes of tracked outputs and of leaves so far. `requires_grad` does not show whether a
        # tensor depends on a source: see `_reach`.
        self._nodes: set[Node] = set()

    def __enter__(self) -> Self:
        before = self.before if self._follows else None
        self._hooks = layer_hooks(self.assignment, before, self.after)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        if not self.sink.in_training:  # in training the backward passes come later
            self.forget()

    def forget(self) -> None:
        """Drop the graph, and report nothing from now on."""
        self.listens = False
        # Hooks live as long as a graph's output, and they refer to this object. A sink that holds
        # the output would close a cycle that Python's garbage collector cannot see.
        self.sink, self._sources, self._nodes = Sink(), [], set()
        self.follower = self._kind_of_follower = None

    def forward(self, x: Any) -> Tensor:
        """Return the model's output at x, with a graph down to the first tracked outputs."""
        divided = self.assignment.divided
        by_parts = explicit_forwards(self.assignment) if divided else nullcontext()
        with torch.enable_grad(), by_parts:
            # Registered parameters enter as copies (N, ...), followed and idle ones as leaves. All
            # others are constants, so no graph leads to them.
            copies = self.begin(x)
            if self._follows:
                # Import only if there is something to follow.
                from kfac_backend.engine.operations.follower import Follower

                kind, N = self._kind_of_follower or Follower, self.runs.num_examples
                self.follower = kind(self, self.assignment, detached_parameters(self.model), N)
            follower = self.follower
            with follower or nullcontext():
                watched = {} if follower is None else follower.values
                f = call_with(self.model, self._constants | copies | watched | self._idle, x)
        if self.assignment.runs:
            self.runs.check_number(self.assignment)
        # In the backward passes no layer may run again.
        self._hooks.enter_context(layer_hooks(self.assignment, before=_refuse_another_run))
        return f

    def begin(self, x: Any) -> dict[str, Tensor]:
        """Prepare for the forward pass at x, and return copies of the registered parameters.

        The copies have shape (N, ...), one for each example, and the forward pass must use them.
        The gradient of a copy belongs to one example. For the parameter itself autograd would sum
        over the examples.
        """
        self.runs.num_examples = N = num_examples(x)
        for divided in self.assignment.divided:
            divided.by_parts.num_examples = N
            divided.by_parts.differentiable = self.sink.differentiable
        if self.assignment.idle:
            if self.sink.in_training:
                values: dict[str, Tensor] = dict(self.model.named_parameters())
            else:
                values = {n: p.requires_grad_() for n, p in detached_parameters(self.model).items()}
            self._idle = {n: values[n] for n in self.assignment.idle if values[n].requires_grad}
            for leaf in self._idle.values():
                self.add_source(leaf)
        copies = {}
        for tracked in self.assignment.own_parameters:
            if N is None:
                raise NotImplementedError(
                    f"Parameter '{tracked.name}' needs a copy for each example, but the number of "
                    f"examples of an input of type {type(x).__name__} is unknown. Pass a tensor "
                    "or a mapping of tensors, examples first, or give the type a __len__."
                )
            layer: Any = tracked.layer
            (name,) = tracked.parameters.values()
            copy = layer.copies(layer.value if self.sink.in_training else layer.value.detach(), N)
            use = Use(copy.new_zeros(N, 0))  # there is no input, only a number of examples
            self.report_input(tracked, use)
            copies[name] = self._with_hook(copy, tracked, use)
        return copies

    def backward(
        self, f: Tensor, vectors: Iterable[Tensor], leaves: Sequence[Tensor] = ()
    ) -> Sequence[Tensor | None]:
        """Propagate each vector (in the shape of f) back; return the last one's leaf gradients."""
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        self.listens = True
        # The hooks receive the gradients of all outputs on the way to the sources. They have also
        # reported the returned gradients of the sources.
        ends = [*leaves, *self._sources]
        if not (f.requires_grad and ends):
            # The output depends on no tracked layer, or no tracked layer has run.
            with self.arithmetic():
                self.sink.vector_done()
            vectors = ()
        for vector in vectors:
            gradients = torch.autograd.grad(
                f,
                ends,
                vector.to(f.dtype),
                retain_graph=True,
                create_graph=self.sink.differentiable,
                allow_unused=True,
            )
            if self._idle:
                self._check_idle(gradients[len(leaves) :])
            # The gradients of followed outputs are now complete.
            for run in () if self.follower is None else self.follower.vector_done():
                self.runs.reached[run.tracked, run.number] = True
            with self.arithmetic():
                self.sink.vector_done()
        # Gradients that are propagated later are no vectors: they belong to the training, or to
        # derivatives of these gradients.
        self.listens = False
        return gradients[: len(leaves)]

    def _check_idle(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise a NotImplementedError if a layer that has not run receives a gradient.

        ``gradients`` belong to the sources, which begin with the idle parameters.
        """
        ran = {n for t, number in self.runs.number.items() if number for n in t.parameters.values()}
        for name, g in zip(self._idle, gradients, strict=False):
            if g is not None and name not in ran and g.any():
                raise NotImplementedError(
                    f"This batch uses '{name}' outside of its layer, where hooks cannot see it. "
                    "The first examples did not use it, so the pass cannot follow it. Begin with "
                    "examples that use it, call the layer itself, or freeze it "
                    "(requires_grad_(False))."
                )

    def report_input(self, tracked: TrackedLayer, use: Use) -> None:
        """Report a use's input to the sink, and record how many examples its rows belong to."""
        number = use.a.shape[:1].numel() if use.rows is None else use.rows.num_examples
        self.runs.examples.setdefault(tracked, set()).add(number if use.a.dim() else 0)
        with self.arithmetic():
            self.sink.input(tracked, use)

    def add_source(self, leaf: Tensor) -> None:
        """Let backward passes also end at this leaf."""
        self._sources.append(leaf)
        self._nodes.add(get_gradient_edge(leaf).node)

    def report_gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Report the gradient of a use's output to the sink."""
        with self.arithmetic():
            self.sink.gradient(tracked, use, b)

    def before(self, tracked: TrackedLayer, *_: Any) -> None:
        """Hook before a layer runs, if operations outside of layers are followed."""
        if self.follower is not None:
            self.follower.inside.append(tracked)

    def after(
        self,
        tracked: TrackedLayer,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Tensor:
        """Hook after a layer, or ``F.linear`` as a layer, runs. Its result replaces the output."""
        if self.follower is not None:
            self.follower.inside.remove(tracked)
        a = tracked.rule.input_of(args, kwargs)
        check_run(self.model, tracked, a, output)
        if not self.sink.differentiable:
            a = a.detach()
        # Step 1: the kind of this run, according to the proof.
        runs, N = self.runs, self.runs.num_examples
        number = runs.number[tracked]
        runs.number[tracked] += 1
        # If all runs are of one kind, a layer may run more often than on the first batch.
        kinds = self.assignment.runs.get(tracked.layer, ("examples",))
        kind = kinds[min(number, len(kinds) - 1)]
        if kind == "followed" and self.follower and N is not None:
            if output.requires_grad:  # it depends on examples, unlike in the proof
                raise _other_runs(tracked, f"on examples in run {number + 1}")
            use = Use(a.expand(N, *a.shape))
            self.report_input(tracked, use)
            runs.reached[tracked, number] = False
            if not (self.sink.needs_inputs or tracked.rule.needs_input):
                use = Use(a.new_empty(0))
            return self.follower.start_expression(tracked, number, use, output)
        if isinstance(kind, SharedAxes) and kind.are_those_of(a) and N is not None:
            a, output = kind.for_each_example(a, N), kind.for_each_example(output, N)
        # Step 2: the example of each row, if row n is not example n.
        declared = current_rows()
        rows = None if declared is None else rows_of(tracked, a, declared)
        if rows is not None and rows.of_positions and not rows.all_count:
            runs.masked.add(tracked)
        if rows is None and declared is not None and N and len(a) == N:
            features = 1 if tracked.rule.takes_integers else a.shape[tracked.rule.features]
            if (number_of_all := a.numel() // max(features, 1)) > N:
                runs.unmasked[str(tracked)] = number_of_all
        # Skip layers inside a mask of positions, because the mask would need the same grouping.
        if kind == "consecutive" and declared is None and N:
            rows = consecutive_rows(len(a), N, a.device)
            runs.rows.add((tracked, len(a) // N))
            if len(a) % N and tracked not in runs.not_divisible:
                runs.not_divisible.append(tracked)
        # Step 3: report the input, and record that a gradient must come.
        use = Use(a if rows is None else rows.flatten(a), rows)
        if kind != "constant":
            self.report_input(tracked, use)
            # An empty output, for example of a graph without edges, gets no gradient, but is no
            # constant.
            if output.numel():
                runs.reached[tracked, number] = False
        if not (self.sink.needs_inputs or tracked.rule.needs_input):
            use = Use(a.new_empty(0), rows)  # otherwise the hooks would keep the input in memory
        return self._with_hook(output, tracked, use, number, is_constant=kind == "constant")

    def _with_hook(
        self,
        output: Tensor,
        tracked: TrackedLayer,
        use: Use,
        number: int | None = None,
        *,
        is_constant: bool = False,
    ) -> Tensor:
        """Return the output with a hook that reports its gradients to the sink.

        ``number`` is the number of the layer's run. Registered parameters do not run and have none.
        """
        # An in-place operation on a view gives it another node of the graph, and torch never calls
        # the hooks of the old node. For layers that return a view (InstanceNorm) this hook
        # therefore returns a copy.
        if number is not None and output._is_view():  # pyright: ignore[reportPrivateUsage]
            # For (N, R, d) linear layers return a view of a product that nothing else uses. The
            # same memory without a view suffices: a copy would cost some percent of a transformer's
            # batch.
            is_linear = issubclass(tracked.rule, LinearRule)
            output = (
                torch.ops.aten._unsafe_view(output, output.shape) if is_linear else output.clone()
            )
        output = self._reach(output)
        # Autograd checks the versions of the tensors that it keeps. Without weight gradients it
        # keeps no layer inputs, so detect an input that was modified in place here.
        version = use.a._version  # pyright: ignore[reportPrivateUsage]

        def on_gradient(b: Tensor) -> None:
            if not self.listens:  # the training's own backward pass
                return
            if self.sink.in_training:  # its gradients may have a graph
                b = b.detach()
            if is_constant:
                raise _other_runs(tracked, f"without a constant output in run {(number or 0) + 1}")
            if number is not None:
                self.runs.reached[tracked, number] = True
            if use.a._version != version:  # pyright: ignore[reportPrivateUsage]
                raise NotImplementedError(
                    f"The input of layer {tracked} was modified in place after the layer had read "
                    "it. Training such a layer fails, too. Modify a copy."
                )
            if not b.numel():  # graphs without edges
                return
            axes = 1 if use.rows is None else len(use.rows.axes)
            with self.arithmetic():
                self.sink.gradient(tracked, use, b.flatten(0, axes - 1) if axes > 1 else b)

        output.register_hook(on_gradient)
        return output

    def _reach(self, output: Tensor) -> Tensor:
        """Return a tracked output that backward passes reach; the first ones become sources.

        If the graph in front of it is still needed, backward passes end at its edge without a cut.
        """
        # A graph may lead to parameters without a rule, to the model's input, or to the output of a
        # frozen embedding that requires a gradient for a checkpoint, but to no tracked layer. So
        # search it for a tracked output.
        ahead, visited = [output.grad_fn], set()
        while ahead:
            node = ahead.pop()
            if node in self._nodes:
                break
            if node is not None and node not in visited:
                visited.add(node)
                ahead += [before for before, _ in node.next_functions]
        else:
            keeps_graph = self.sink.differentiable or self.sink.keeps_graph
            if self.sink.in_training or (keeps_graph and output.requires_grad):
                self._sources.append(get_gradient_edge(output))
            else:
                source = output.detach().requires_grad_()
                self._sources.append(source)
                # A clone, because an activation may work in place, which autograd forbids on a
                # leaf.
                output = source.clone()
        if output.grad_fn is not None:
            self._nodes.add(output.grad_fn)
        return output


def layer_hooks(
    assignment: RuleAssignment,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> ExitStack:
    """Return a context that calls functions before and after each run of the tracked layers.

    Their arguments are the tracked layer, then the arguments of torch's hooks with keywords.
    """
    handles = ExitStack()
    for tracked in assignment.layers:
        layer = tracked.layer
        if before is not None:
            hook = partial(before, tracked)
            handles.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if after is not None:
            hook = partial(after, tracked)
            handles.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
    return handles


def _refuse_another_run(tracked: TrackedLayer, *_: Any) -> None:
    """Hook before a layer that runs again in a backward pass."""
    raise NotImplementedError(
        f"Layer {tracked} runs again in the backward pass (torch.utils.checkpoint), so hooks "
        "would count it twice. Use checkpoints only in train mode (if self.training) and compute "
        "the curvature in eval mode, switch checkpointing off, or freeze it "
        "(requires_grad_(False))."
    )


def check_run(model: nn.Module, tracked: TrackedLayer, a: Tensor, output: object) -> None:
    """Raise an error if the hooks cannot follow a run of a layer on this input.

    It is an `UnexpectedRun` for a wrong kind of input or output: another rule may support them.
    """
    if a.is_floating_point() == tracked.rule.takes_integers:
        dtype = next(model.parameters()).dtype
        needs = f"floating point, like the model's parameters ({dtype})"
        way_out = "x.float() / 255 for images in uint8"
        if tracked.rule.takes_integers:
            needs, way_out = "integers", "tokens.long() for token indices"
        raise UnexpectedRun(
            tracked,
            f"Layer {tracked} got an input of dtype {a.dtype}, but needs {needs}. Convert the "
            f"data, for example {way_out}.",
        )
    if not isinstance(output, Tensor):
        raise UnexpectedRun(
            tracked, f"Layer {tracked} returned {type(output).__name__}, but must return a tensor."
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(a):  # pyright: ignore
        raise NotImplementedError(
            f"Layer {tracked} runs inside torch.func.vmap or another transform, so hooks cannot "
            "see all examples. Call it on the whole batch, or freeze it (requires_grad_(False))."
        )
    if not torch.is_grad_enabled():
        raise NotImplementedError(
            f"Layer {tracked} runs without gradients (under torch.no_grad, or in a reentrant "
            "checkpoint). Enable gradients (for checkpoints: use_reentrant=False, only in train "
            "mode), or freeze it (requires_grad_(False))."
        )


def _other_runs(tracked: TrackedLayer, difference: str) -> NotImplementedError:
    """Return the error for a layer whose runs differ from those on the first batch."""
    return NotImplementedError(
        f"Layer {tracked} has runs on examples and runs on something else. In this batch it runs "
        f"{difference}, unlike in the first batch, so its runs cannot be told apart. Use separate "
        "layers, or freeze it (requires_grad_(False))."
    )


def unknown_examples(
    tracked: TrackedLayer, rows: int, N: int, unit: str = "examples"
) -> NotImplementedError:
    """Return the error for a layer whose rows belong to unknown examples."""
    return NotImplementedError(
        f"Layer {tracked} got {rows} rows in a batch of {N} {unit}, but each example's rows must "
        "be known. Keep the batch axis first and the shared axes apart, (N, ..., d), or say which "
        "example each row belongs to (examples_of_rows)."
    )


def rows_of(tracked: TrackedLayer, a: Tensor, rows: Rows) -> Rows | None:
    """Return the examples of a layer's rows from `examples_of_rows` or `counted_positions`.

    A mask of positions (`counted_positions`) may enclose a whole model; layers whose input has
    other axes ignore it. An index of rows (`examples_of_rows`) must fit each layer inside.
    """
    rows = rows.on(a.device)
    features = a.dim() if tracked.rule.takes_integers else tracked.rule.features % max(a.dim(), 1)
    fits = tuple(a.shape[: len(rows.axes)]) == rows.axes
    flattened = len(rows.axes) > 1 and a.shape[:1] == (math.prod(rows.axes),) != rows.axes[:1]
    # An axis of features is no axis of positions, even if it has the same size.
    applies = flattened or (fits and features >= len(rows.axes))
    if rows.of_positions and not applies:
        return None
    # (N·R, ...): this guesses that the rows are positions, and the proof of independence tests it.
    if rows.of_positions and flattened:
        return replace(rows, axes=(math.prod(rows.axes),))
    if not fits:
        raise ValueError(
            f"Layer {tracked} got an input of shape {tuple(a.shape)}, but the index of "
            f"examples_of_rows has shape {rows.axes}. The index's axes must be the input's first. "
            "Call the layer outside of the context, or pass the index of these rows."
        )
    return rows
