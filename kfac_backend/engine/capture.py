"""Hooks: one forward pass, then backward passes to the first tracked outputs only.

Parameters are detached meanwhile. The graph begins at the outputs of the first tracked layers,
which become leaves that require a gradient (the *sources*). So no weight gradient is ever computed,
and no backward pass goes further than these layers. A `Sink` is handed each layer's input in the
forward pass, and the gradient in its output in each backward pass.

Life cycle. A `Capture` is a context for one forward pass: entering it registers the hooks, leaving
it removes them and drops the graph. Inside, `forward` runs the model and hands over the input of
each run of a layer. Then `backward` propagates vectors back, one after the other, and hands over
the gradient of each run that a vector reaches. Meanwhile `Runs` note which runs there were and
which of them a vector has reached. Last, `Runs.check_reached` compares these with the runs of the
proof.

A step of training shows its own forward pass instead (`Sink.in_training`). `begin` takes the place
of `forward`: the training runs the model after it, the hooks are removed then, and the graph stays
until `forget`, because the backward passes come later. Parameters keep their graph there, which the
training needs. The curvature's backward passes end at the same sources, so that autograd leaves the
weights' gradients out.
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
    """Receives what the tracked layers see; it ignores what a subclass does not take.

    In this order: for a pass, `start`. For each batch: `input`, each time that a layer
    runs. For each vector that is propagated back: `gradient`, for each run that the vector reaches;
    then `vector_done`. After the last vector `batch_done`, and `example_gradients` of parameters
    without a rule. After the last batch `sums`.
    """

    needs_inputs: ClassVar[bool] = False
    """Whether gradients come with their layer's input, also where its rule does not need it."""
    in_training: bool = False
    """Whether it is told of a step of training: `Capture.begin` is called, and the training makes
    the forward pass, whose graph stays for its backward pass."""
    keeps_graph: bool = False
    """Whether the graph in front of the first layers stays, down to what requires a gradient."""
    differentiable: bool = False
    """Whether inputs, gradients and outputs keep their graphs in the model's input, which must
    require a gradient."""

    around_batch: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the context that a batch runs in."""
    takes_example_gradients: ClassVar[bool] = False
    """Whether `example_gradients` does anything; they cost other passes over each batch."""

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Begin with empty sums, also after a pass that failed.

        Args:
            assignment: the layers, as the proof has completed them.
            kfac_approx: the mode, no longer "auto".
        """

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """A layer runs, on the input of this use."""

    def vectors(
        self, of_fisher: Callable[[Tensor, Tensor], Iterator[Tensor]], f: Tensor, y: Tensor
    ) -> Iterator[Tensor]:
        """The vectors to propagate back at outputs and targets; those of the Fisher by default."""
        # A view: its own gradients, as of a loss, are no vectors, and come to no layer's hook.
        return of_fisher(f.view_as(f) if self.differentiable else f.detach(), y)

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """A vector has reached a use's output, as the gradient b in the output's shape.

        The use has its input only if the layer's rule or this sink needs it; otherwise an empty
        tensor takes its place, so that memory does not hold all layers' inputs. Autograd may add to
        b in place later, or reuse its memory.
        """

    def vector_done(self) -> None:
        """All inputs of a batch, and all gradients of a vector, have come.

        It comes at least once for each batch: outputs that depend on no layer have no gradients.
        """

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """All vectors of a batch have come, whose outputs and targets these are."""

    def example_gradients(self, name: str, g: Tensor) -> None:
        """Each example's gradient for each vector (n, V, *shape) in a parameter without a rule."""

    def needs_examples(self, tracked: TrackedLayer) -> bool:
        """Whether it must be known which example each of the layer's rows belongs to."""
        return True

    def sums(self) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
        """The sums of a pass, additive over data: those of blocks by name, and others.

        They are taken out: the sink is empty until the next `start`.
        """
        return {}, {}


@dataclass(eq=False)
class Runs:
    """The runs of the tracked layers in a forward pass, and which of them a vector has reached."""

    num_examples: int | None = None
    """N of the input; None if it is not known."""
    number: Counter[TrackedLayer] = field(default_factory=Counter)
    """How often each layer has run so far."""
    reached: dict[tuple[TrackedLayer, int], bool] = field(default_factory=dict)
    """(Layer, number of a run from which a gradient must come) -> whether one has come."""
    examples: dict[TrackedLayer, set[int]] = field(default_factory=dict)
    """How many examples the rows of a layer's runs belong to."""
    rows: set[tuple[TrackedLayer, int]] = field(default_factory=set)
    """How many rows each example has in layers with several, if these follow one another."""
    not_divisible: list[TrackedLayer] = field(default_factory=list)
    """Layers with several rows for each example by the proof, but no multiple of N rows now."""
    masked: set[TrackedLayer] = field(default_factory=set)
    """Layers of whose rows a mask of positions hides some."""
    unmasked: dict[str, int] = field(default_factory=dict)
    """Layer that a mask of positions does not fit -> the number of its positions, if several."""

    def constants(self) -> list[tuple[TrackedLayer, int]]:
        """The runs that no vector has reached, though one has reached their parameters elsewhere.

        If no run of the parameters was reached, the layer takes no part in this output.
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
        """What each run of the layers is, as far as the vectors so far show."""
        kinds: dict[TrackedLayer, list[Run]] = {
            tracked: ["examples"] * number for tracked, number in self.number.items()
        }
        for tracked, number in self.constants():
            kinds[tracked][number] = "constant"
        return kinds

    def check_number(self, assignment: RuleAssignment) -> None:
        """Raise a NotImplementedError if a layer with runs of several kinds has one more or less.

        Kinds are assigned to a layer's runs by their order, which that would shift.
        """
        for tracked in assignment.layers:
            runs = assignment.runs.get(tracked.layer, ())
            number = self.number[tracked]
            if len(set(runs)) > 1 and number != len(runs):
                raise _other_runs(tracked, f"{number} times instead of {len(runs)}")

    def check_examples(self, N: int, sink: Sink, *, hides: bool) -> None:
        """Raise a NotImplementedError where each of N examples' rows are needed and not known.

        They are needed where the sink needs them (as where positions are summed), and where a mask
        hides positions, which would count.
        """
        for tracked, numbers in self.examples.items():
            wrong = numbers - {N}
            if wrong and (hides or sink.needs_examples(tracked)):
                error = unknown_examples(tracked, wrong.pop(), N)
                way_out = " Or let all positions count (dict_key_mask=None)." if hides else ""
                raise NotImplementedError(f"{error}{way_out}")

    def check_reached(self) -> None:
        """Raise a NotImplementedError if a run is constant that was not on the first batch."""
        if not all(self.reached.values()):
            for tracked, number in self.constants():
                raise _other_runs(tracked, f"with a constant output in run {number + 1}")


class Capture:
    """A context that hands a sink the tracked layers' inputs and the gradients in their outputs.

    Args:
        model: the model.
        assignment: its tracked layers.
        sink: receives them.
        constants: name -> what takes a parameter's place, such as its weight in another memory
            format, unless the parameter is followed.
        arithmetic: makes the context in which the sink works.
        follower: makes the context that sees operations on parameters, from the arguments of
            `Follower`, which is the default. The proof passes other followers, which find out
            what the operations are.

    Raises:
        NotImplementedError: in the forward pass, a layer under no_grad; own parameters with an
            input whose number of examples is not known.
        TypeError: in the forward pass, a layer's input that is not of floating point.
        ValueError: in the forward pass, rows that are not those of a layer's input.
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
        """The context in which the sink works."""
        self._constants = dict(constants or {})
        self._follows = bool(assignment.operations.names) or any(
            "followed" in kinds for kinds in assignment.runs.values()
        )
        self._kind_of_follower = follower
        self.follower: "Follower | None" = None
        """What sees the operations on followed parameters; None if nothing is followed."""
        self._hooks = ExitStack()
        self.listens = False
        """Whether gradients are reported, whoever propagates them. The hooks on gradients stay on
        the graph, which the training's own backward pass uses, too."""
        self.runs = Runs()
        """The layers' runs in the forward pass."""
        self._sources: list[Any] = []  # where backward passes end: leaves, or edges of a kept graph
        self._idle: dict[str, Tensor] = {}  # the first sources
        # The nodes of tracked outputs and of leaves so far. `requires_grad` does not tell whether a
        # tensor depends on a source: see `_reach`.
        self._nodes: set[Node] = set()
        self._runs_backward = False  # whether a backward pass has begun

    def __enter__(self) -> Self:
        before = self.before if self._follows else None
        self._hooks = layer_hooks(self.assignment, before, self.after)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        if not self.sink.in_training:  # there the backward passes are still to come
            self.forget()

    def forget(self) -> None:
        """Drop the graph, and report nothing from now on."""
        self.listens = False
        # Hooks stay on a graph as long as its output lives, and they reach this object. A sink that
        # holds the output would close a circle that Python's garbage collector cannot see.
        self.sink, self._sources, self._nodes = Sink(), [], set()
        self.follower = self._kind_of_follower = None

    def forward(self, x: Any) -> Tensor:
        """The model's output at x, with a graph down to the first tracked outputs."""
        divided = self.assignment.divided
        by_parts = explicit_forwards(self.assignment) if divided else nullcontext()
        with torch.enable_grad(), by_parts:
            # Own parameters enter as copies (N, ...), followed and idle ones as leaves; all others
            # are constants, so that no graph leads to them.
            copies = self.begin(x)
            if self._follows:
                # Loaded only where there is something to follow.
                from kfac_backend.engine.operations.follower import Follower

                kind, N = self._kind_of_follower or Follower, self.runs.num_examples
                self.follower = kind(self, self.assignment, detached_parameters(self.model), N)
            follower = self.follower
            with follower or nullcontext():
                watched = {} if follower is None else follower.values
                f = call_with(self.model, self._constants | copies | watched | self._idle, x)
        if self.assignment.runs:
            self.runs.check_number(self.assignment)
        return f

    def begin(self, x: Any) -> dict[str, Tensor]:
        """Prepare for the forward pass at x; returns the copies of own parameters that it must use.

        These are name -> (N, ...), one copy for each example. The gradient in a copy is one
        example's; in the parameter itself autograd would add the examples' gradients up.
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
                    f"Parameter '{tracked.name}' needs a copy for each example, whose number "
                    f"cannot be told from an input of type {type(x).__name__}. Pass a tensor or a "
                    "mapping of tensors, examples first, or give the type a __len__."
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
        """Propagate each vector (in the shape of f) back from f.

        Returns:
            The last vector's gradients in some leaves.
        """
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        self.listens = True
        # In training all hooks are removed now.
        if not (self._runs_backward or self.sink.in_training):
            self._hooks.enter_context(layer_hooks(self.assignment, before=_refuse_another_run))
            self._runs_backward = True
        # Autograd is asked for the gradients in the sources alone. So it computes none of a weight,
        # and stops at the first tracked layers; the hooks see the gradients in all later outputs as
        # they pass. What it returns, the sources' own gradients, was reported in the same way.
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
            self._check_idle(gradients[len(leaves) :])
            # The gradients of followed outputs are complete now.
            for run in () if self.follower is None else self.follower.vector_done():
                self.runs.reached[run.tracked, run.number] = True
            with self.arithmetic():
                self.sink.vector_done()
        # What is propagated back later is no vector: a training's own gradients, or those of what
        # was computed from these gradients.
        self.listens = False
        return gradients[: len(leaves)]

    def _check_idle(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise a NotImplementedError if a layer that has not run receives a gradient.

        The gradients are those of the sources, of which the idle parameters are the first.
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
        """Hand a use's input to the sink, and note how many examples its rows belong to."""
        number = use.a.shape[:1].numel() if use.rows is None else use.rows.num_examples
        self.runs.examples.setdefault(tracked, set()).add(number if use.a.dim() else 0)
        with self.arithmetic():
            self.sink.input(tracked, use)

    def add_source(self, leaf: Tensor) -> None:
        """End backward passes at a leaf, too."""
        self._sources.append(leaf)
        self._nodes.add(get_gradient_edge(leaf).node)

    def report_gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Hand the gradient in a use's output to the sink."""
        with self.arithmetic():
            self.sink.gradient(tracked, use, b)

    def report_run(self, tracked: TrackedLayer, a: Tensor, output: Tensor) -> Tensor:
        """The output of a function that is a layer's run, ``F.linear(a, weight)``, with hooks."""
        self.before(tracked)
        return self.after(tracked, tracked.layer, (a,), {}, output)

    def before(self, tracked: TrackedLayer, *_: Any) -> None:
        """The hook before a layer runs, where operations outside of layers are followed."""
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
        """The hook after it; what it returns takes the place of the layer's output."""
        if self.follower is not None:
            self.follower.inside.remove(tracked)
        a = tracked.rule.input_of(args, kwargs)
        check_run(self.model, tracked, a, output)
        if not self.sink.differentiable:
            a = a.detach()
        # Step 1: what this run works on, as the proof has found.
        runs, N = self.runs, self.runs.num_examples
        number = runs.number[tracked]
        runs.number[tracked] += 1
        # Where all runs are of one kind, a layer may run more often than on the first batch.
        kinds = self.assignment.runs.get(tracked.layer, ("examples",))
        kind = kinds[min(number, len(kinds) - 1)]
        if kind == "followed" and self.follower and N is not None:
            if output.requires_grad:  # so it depends on examples, as it did not in the proof
                raise _other_runs(tracked, f"on examples in run {number + 1}")
            use = Use(a.expand(N, *a.shape))
            self.report_input(tracked, use)
            runs.reached[tracked, number] = False
            if not (self.sink.needs_inputs or tracked.rule.needs_input):
                use = Use(a.new_empty(0))
            return self.follower.start_expression(tracked, number, use, output)
        if isinstance(kind, SharedAxes) and kind.are_those_of(a) and N is not None:
            a, output = kind.for_each_example(a, N), kind.for_each_example(output, N)
        # Step 2: whose example each row is, if row n is not example n.
        declared = current_rows()
        rows = None if declared is None else rows_of(tracked, a, declared)
        if rows is not None and rows.of_positions and not rows.all_count:
            runs.masked.add(tracked)
        if rows is None and declared is not None and N and len(a) == N:
            features = 1 if tracked.rule.takes_integers else a.shape[tracked.rule.features]
            if (number_of_all := a.numel() // max(features, 1)) > N:
                runs.unmasked[str(tracked)] = number_of_all
        # Not within a mask of positions: it would have to be grouped in the same way.
        if kind == "consecutive" and declared is None and N:
            rows = consecutive_rows(len(a), N, a.device)
            runs.rows.add((tracked, len(a) // N))
            if len(a) % N and tracked not in runs.not_divisible:
                runs.not_divisible.append(tracked)
        # Step 3: report the input, and remember that a gradient has to come.
        use = Use(a if rows is None else rows.flatten(a), rows)
        if kind != "constant":
            self.report_input(tracked, use)
            # An empty output, as of a graph without edges, gets no gradient, and is no constant.
            if output.numel():
                runs.reached[tracked, number] = False
        if not (self.sink.needs_inputs or tracked.rule.needs_input):
            use = Use(a.new_empty(0), rows)  # the hooks would keep the input in memory
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
        """The output, whose gradients are handed to the sink.

        ``number`` is that of the layer's run; own parameters, which do not run, have none.
        """
        # An operation in place on a view gives it another node of the graph, and torch never calls
        # hooks of the former one. So layers that return a view (InstanceNorm) return a copy here.
        if number is not None and output._is_view():  # pyright: ignore[reportPrivateUsage]
            # Of (N, R, d) linear layers return a view of a product that nobody else has: the same
            # memory, without a view. A copy would take some percent of a transformer's batch.
            is_linear = issubclass(tracked.rule, LinearRule)
            output = (
                torch.ops.aten._unsafe_view(output, output.shape) if is_linear else output.clone()
            )
        # A first layer's output becomes a source; later ones are reached through the graph.
        output = self._reach(output)
        # Autograd checks the versions of tensors that it keeps. Without gradients of weights it
        # keeps no layer's input, so an input that is modified in place must be noticed here.
        version = use.a._version  # pyright: ignore[reportPrivateUsage]

        def on_gradient(b: Tensor) -> None:
            if not self.listens:  # the training's own backward pass
                return
            if self.sink.in_training:  # whose gradients may have a graph
                b = b.detach()
            if is_constant:
                raise _other_runs(tracked, f"without a constant output in run {(number or 0) + 1}")
            if number is not None:
                self.runs.reached[tracked, number] = True
            if use.a._version != version:  # pyright: ignore[reportPrivateUsage]
                raise NotImplementedError(
                    f"The input of layer {tracked} was modified in place after the layer had "
                    "read it, so that it could not be trained either. Modify a copy."
                )
            if not b.numel():  # graphs without edges
                return
            axes = 1 if use.rows is None else len(use.rows.axes)
            with self.arithmetic():
                self.sink.gradient(tracked, use, b.flatten(0, axes - 1) if axes > 1 else b)

        output.register_hook(on_gradient)
        return output

    def _reach(self, output: Tensor) -> Tensor:
        """A tracked output that backward passes reach; it becomes a source if no other one does.

        Where the graph in front of it is still needed, backward passes end at its edge, and it is
        not cut.
        """
        # A graph may lead to parameters without a rule, to the model's input, or to the output of a
        # frozen embedding that requires a gradient for a checkpoint, and to no tracked layer. So
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
                # A clone, since an activation may work in place, which autograd forbids on a leaf.
                output = source.clone()
        if output.grad_fn is not None:
            self._nodes.add(output.grad_fn)
        return output


def layer_hooks(
    assignment: RuleAssignment,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> ExitStack:
    """A context in which functions are called before and after each run of the tracked layers.

    They get the tracked layer, and then what torch gives hooks with keyword arguments.
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
    """The hook before a layer runs again in a backward pass."""
    raise NotImplementedError(
        f"Layer {tracked} runs again in the backward pass (torch.utils.checkpoint), "
        "where it would be counted twice. Checkpoint in train mode alone (if "
        "self.training), with the curvature in eval mode; switch checkpointing off; or "
        "freeze it (requires_grad_(False))."
    )


def check_run(model: nn.Module, tracked: TrackedLayer, a: Tensor, output: object) -> None:
    """Raise an error if the hooks cannot follow a run of a layer on this input.

    Raises:
        UnexpectedRun: an input of integers for a layer that takes none, or the other way round; an
            output that is no tensor.
        NotImplementedError: a layer that runs without gradients.
    """
    if a.is_floating_point() == tracked.rule.takes_integers:
        dtype = next(model.parameters()).dtype
        needs = f"floating point, as the model's parameters ({dtype})"
        way_out = "x.float() / 255 for images in uint8"
        if tracked.rule.takes_integers:
            needs, way_out = "integers", "tokens.long() for tokens' numbers"
        raise UnexpectedRun(
            tracked,
            f"Layer {tracked} got an input of dtype {a.dtype}; it needs {needs}. "
            f"Convert the data, for example {way_out}.",
        )
    if not isinstance(output, Tensor):
        raise UnexpectedRun(
            tracked, f"Layer {tracked} returned {type(output).__name__}, and not a tensor."
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(a):  # pyright: ignore
        raise NotImplementedError(
            f"Layer {tracked} runs inside of torch.func.vmap or another transform, where hooks "
            "see one example or none. Call it on the whole batch, or freeze it "
            "(requires_grad_(False))."
        )
    if not torch.is_grad_enabled():
        raise NotImplementedError(
            f"Layer {tracked} runs without gradients (under torch.no_grad, or in a reentrant "
            "checkpoint). Let gradients through (checkpoint with use_reentrant=False, in train "
            "mode alone), or freeze it (requires_grad_(False))."
        )


def _other_runs(tracked: TrackedLayer, difference: str) -> NotImplementedError:
    """The error for a layer whose runs differ from those that were found on the first batch."""
    return NotImplementedError(
        f"Layer {tracked}, which runs on examples and on something else, runs {difference} in this "
        "batch. That differs from the first batch, so that its runs cannot be told apart. Use "
        "separate layers, or freeze it (requires_grad_(False))."
    )


def unknown_examples(
    tracked: TrackedLayer, rows: int, N: int, unit: str = "examples"
) -> NotImplementedError:
    """The error for a layer with rows that belong to unknown ones of N examples."""
    return NotImplementedError(
        f"Layer {tracked} got {rows} rows in a batch of {N} {unit}, and each example's rows must "
        "be known. Keep the batch axis first and the shared axes apart, (N, ..., d), or say which "
        "example each row belongs to (examples_of_rows)."
    )


def rows_of(tracked: TrackedLayer, a: Tensor, rows: Rows) -> Rows | None:
    """The examples of a layer's rows, by what `examples_of_rows` or `counted_positions` declares.

    A mask of positions (`counted_positions`) may enclose a whole model; it is ignored by layers
    whose input has other axes. An index of rows (`examples_of_rows`) must fit each layer inside.

    Raises:
        ValueError: an index that does not fit the layer's input.
    """
    rows = rows.on(a.device)
    features = a.dim() if tracked.rule.takes_integers else tracked.rule.features % max(a.dim(), 1)
    fits = tuple(a.shape[: len(rows.axes)]) == rows.axes
    flattened = len(rows.axes) > 1 and a.shape[:1] == (math.prod(rows.axes),) != rows.axes[:1]
    # An axis of features is no axis of positions, even if it has the same size.
    applies = flattened or (fits and features >= len(rows.axes))
    if rows.of_positions and not applies:
        return None
    # (N·R, ...): that these are positions is a guess, which the proof of independence tests.
    if rows.of_positions and flattened:
        return replace(rows, axes=(math.prod(rows.axes),))
    if not fits:
        raise ValueError(
            f"Layer {tracked} got an input of shape {tuple(a.shape)} where examples_of_rows was "
            f"given an index of shape {rows.axes}; its axes must be the input's first. Call the "
            "layer outside of it, or give the index of these rows."
        )
    return rows
