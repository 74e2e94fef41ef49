"""Hooks: one forward pass, then backward passes to the first tracked outputs only.

Parameters are detached meanwhile. A graph begins where the first tracked layers end: their outputs
become leaves that require a gradient. So no weight gradient is ever computed, and nothing before
the first tracked layers is propagated through. Rules see inputs and gradients as they pass by.

A step of training shows its own forward pass instead (``in_training``). Parameters keep their
graph there, which the training goes on to use; the backward passes of the curvature end at the
same outputs, so that autograd leaves the weights' gradients out.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from kfac_backend.layers import FunctionalLayer, Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import Rows, Run, SharedAxes, current_rows, folded_rows
from kfac_backend.model.calls import call_with, explicit_forwards, num_examples
from kfac_backend.model.proof.operations import Expression, Follower, LayerRun
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.precision import at_least_float32

__all__ = ["Capture", "check_before", "first_input", "rows_of"]

OnInput = Callable[[TrackedLayer, Use], None]
OnGradient = Callable[[TrackedLayer, Use, Tensor], None]


class Capture:
    """A context in which the tracked layers show their inputs and their outputs' gradients.

    Args:
        model: the model.
        assignment: its tracked layers.
        on_input: called with (layer, use) in the forward pass, each time that a layer runs.
        on_gradient: called with (layer, use, output gradient) in each backward pass; the use has
            its input if the layer's rule needs it to add a gradient.
        channels_last: run convolutions in that memory format; their outputs and gradients then
            have it, too.
        batched: propagate all vectors back at once, by torch.func.vmap. Fewer launches, V times
            the memory of a backward pass; never faster on a CPU.
        keep_inputs: hand all layers' inputs to ``on_gradient``, whether their rules need them or
            not.
        in_training: show the forward pass of a step of training, which `begin` and `end` enclose,
            instead of one that `forward` makes.
        differentiable: keep the graphs of what is shown, and of the output, in the model's input,
            which must require a gradient.
        follower: makes the context that sees operations on parameters, from the arguments of
            `Follower`.

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
        on_input: OnInput,
        on_gradient: OnGradient,
        *,
        channels_last: bool = False,
        batched: bool = False,
        keep_inputs: bool = False,
        in_training: bool = False,
        differentiable: bool = False,
        follower: Callable[..., Follower] = Follower,
    ) -> None:
        self._model = model
        self._assignment = assignment
        self._on_input = on_input
        self._on_gradient = on_gradient
        self._channels_last = channels_last
        self._batched = batched
        self._keep_inputs = keep_inputs
        self._in_training = in_training
        self._differentiable = differentiable
        self._make_follower = follower
        self._follower: Follower | None = None
        self._handles: list[RemovableHandle] = []
        self.folds = False
        """Whether rows of the last forward pass were taken for several of each example."""
        self.not_folded: list[TrackedLayer] = []
        """Layers whose rows should have been several of each example, but are no multiple."""
        # The state of one forward pass and its backward passes; `forward` clears it.
        self._sources: list[Any] = []  # leaves, or edges in training; the backward passes end there
        self._nodes: set[Node] = set()  # of the outputs so far, where the graph is kept
        self._listens = False
        self._num_examples: int | None = None
        self._runs_backward = False  # once True, a layer that runs is one of a checkpoint
        self._number: dict[TrackedLayer, int] = {}  # runs so far
        self._reached: dict[tuple[TrackedLayer, int], bool] = {}  # by a gradient, for each run
        self._followed: dict[LayerRun, tuple[Use, torch.Size]] = {}
        self._waiting: dict[LayerRun, Tensor] = {}  # one vector's gradients so far

    def __enter__(self) -> "Capture":
        for tracked in self._assignment.layers:
            before, after = self._pre_hook(tracked), self._forward_hook(tracked)
            layer = tracked.layer
            self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._in_training:  # where the backward passes come after the hooks are gone
            self.forget()

    def listen(self) -> None:
        """From now on gradients are shown, whoever propagates them."""
        self._listens = True

    def forget(self) -> None:
        """Let go of the graph, and show no gradient from now on."""
        self._listens = False
        self._sources.clear()
        self._nodes.clear()

    def forward(self, x: Any) -> Any:
        """The model's output at x, with a graph down to the first tracked outputs."""
        with torch.enable_grad(), explicit_forwards(self._assignment):
            copies = self.begin(x)
            follower = self._follower = self._new_follower()
            with follower or nullcontext():
                values = copies if follower is None else copies | follower.values
                f = call_with(self._model, values, x, self._channels_last)
        self.end()
        return f

    def begin(self, x: Any) -> dict[str, Tensor]:
        """Prepare for a forward pass at x; returns the copies of own parameters that it must use.

        These are name -> (N, ...), one for each example, so that their gradients come apart.
        """
        self.forget()
        if not self._in_training:
            self.listen()
        self.folds = False
        self.not_folded.clear()
        self._number.clear()
        self._reached.clear()
        self._followed.clear()
        self._waiting.clear()
        self._runs_backward = False
        self._num_examples = num_examples(x)
        return self._copies_of_own_parameters(x)

    def end(self) -> None:
        """Check, after a forward pass, that all layers ran as often as they are supposed to."""
        for tracked in self._assignment.layers if self._assignment.runs else []:
            known = self._assignment.runs.get(tracked.layer, ())
            number = self._number.get(tracked, 0)
            if len(set(known)) > 1 and number != len(known):
                raise _other_runs(tracked, f"{number} times instead of {len(known)}")

    def backward(
        self, f: Tensor, vectors: Iterable[Tensor], on_vector_end: Callable[[], None] | None = None
    ) -> None:
        """Propagate each vector (in the shape of f) back from f.

        Args:
            f: what `forward` returned.
            vectors: the vectors.
            on_vector_end: called after each, or after all if they are ``batched``.
        """

        def propagate(vector: Tensor) -> Tensor:
            torch.autograd.grad(
                f,
                self._sources,
                vector,
                retain_graph=True,
                create_graph=self._differentiable,
                allow_unused=True,
            )
            return vector

        def end_vector() -> None:
            self._end_vector()
            if on_vector_end is not None:
                on_vector_end()

        vectors = (vector.to(f.dtype) for vector in vectors)
        self._runs_backward = True
        self.listen()
        # Without a graph the output depends on no tracked layer: all gradients are zero.
        if not f.requires_grad:
            return
        if self._batched:
            vectors = list(vectors)
            if vectors:
                torch.func.vmap(propagate)(torch.stack(vectors))
                end_vector()
            return
        for vector in vectors:
            propagate(vector)
            end_vector()

    @property
    def runs(self) -> dict[TrackedLayer, list[Run]]:
        """What each run of the layers is, as far as the vectors so far tell.

        A run is constant if no vector has reached it, while one has reached another run of one of
        the layer's parameters. If no run was reached, the layer just takes no part in this output.
        """
        reached = {
            name
            for (tracked, _), is_reached in self._reached.items()
            if is_reached
            for name in tracked.parameters.values()
        }
        kinds: dict[TrackedLayer, list[Run]] = {
            tracked: ["examples"] * number for tracked, number in self._number.items()
        }
        for (tracked, number), is_reached in self._reached.items():
            if not is_reached and reached.intersection(tracked.parameters.values()):
                kinds[tracked][number] = "constant"
        return kinds

    def check_runs(self) -> None:
        """Raise unless the vectors reached the runs of layers that they are supposed to reach."""
        if all(self._reached.values()):
            return
        for tracked, kinds in self.runs.items():
            if "constant" in kinds:
                number = kinds.index("constant") + 1
                raise _other_runs(tracked, f"with a constant output in run {number}")

    def _new_follower(self) -> Follower | None:
        """Sees the operations on followed parameters, with new leaves; None if there are none."""
        operations = self._assignment.operations
        once = {layer for layer, kinds in self._assignment.runs.items() if "followed" in kinds}
        if not operations.names and not once:
            return None
        leaves = {
            name: self._model.get_parameter(name).detach().requires_grad_()
            for name in operations.names
        }
        return self._make_follower(operations, leaves, self._copies, self._seen, once)

    def _copies(self, expression: Expression, M: int) -> Tensor:
        """A copy (M, ...) of an expression for each row, whose gradients are its parameters'."""
        N, own = self._num_examples, self._assignment.operations.own
        rows, fold = current_rows(), 0
        if rows is not None and not (rows.of_positions or len(rows.index) == M):
            rows = None
        if rows is not None:
            rows = rows.on(expression.value.device)
        if rows is None or rows.of_positions:
            rows, fold = None, M // N if N else 0
            if not N or M % N:
                raise NotImplementedError(
                    f"Parameters {', '.join(map(repr, expression.leaves))} meet {M} rows of {N} "
                    "examples; say which example each row belongs to (examples_of_rows), or freeze "
                    "them (requires_grad_(False))."
                )
        self.folds = self.folds or fold > 1
        source = expression.value.detach().expand(M, *expression.value.shape).requires_grad_()
        self._sources.append(source)
        examples = M // fold if rows is None else rows.num_examples
        uses = {leaf: Use(source.new_zeros(examples, 0)) for leaf in expression.leaves}
        for leaf, use in uses.items():
            if isinstance(leaf, str):
                self._on_input(own[leaf], use)

        def on_gradient(b: Tensor) -> None:
            b = b.reshape(-1, *expression.value.shape)  # (V·M, ...)
            if rows is not None:
                b = rows.sums(b)
            elif fold > 1:
                b = at_least_float32(b).unflatten(0, (-1, fold)).sum(1)
            for leaf, gradients in expression.gradients(b).items():
                if isinstance(leaf, str):
                    self._on_gradient(own[leaf], uses[leaf], gradients)
                else:  # its other ways to the output may still be on their way
                    known = self._waiting.get(leaf)
                    self._waiting[leaf] = gradients if known is None else known + gradients

        if self._batched:
            return _Tap.apply(source.clone(), on_gradient)
        source.register_hook(on_gradient)
        return source

    def _run(self, tracked: TrackedLayer) -> tuple[int, Run]:
        """The number of a layer's run that begins, and what it is."""
        number = self._number.get(tracked, 0)
        self._number[tracked] = number + 1
        known = self._assignment.runs.get(tracked.layer, ("examples",))
        return number, known[min(number, len(known) - 1)]

    def _copies_of_own_parameters(self, x: Any) -> dict[str, Tensor]:
        """Name -> a copy of the parameter for each example, (N, ...).

        A gradient in such a copy is one example's, which autograd would otherwise have summed up.
        """
        copies = {}
        for tracked in self._assignment.own_parameters:
            N = self._num_examples
            if N is None:
                raise NotImplementedError(
                    f"Parameter '{tracked.name}' needs a copy for each example, whose number "
                    f"cannot be told from an input of type {type(x).__name__}. Pass a tensor or a "
                    "mapping of tensors, examples first, or give the type a __len__."
                )
            layer: Any = tracked.layer
            (name,) = tracked.parameters.values()
            value = layer.value if self._in_training else layer.value.detach()
            source = self._as_source(layer.copies(value, N))
            use = Use(source.new_zeros(N, 0))  # there is no input, only a number of examples
            self._on_input(tracked, use)
            copies[name] = self._shown(source, tracked, use)
        return copies

    def _as_source(self, output: Tensor) -> Tensor:
        """The same values, at which backward passes end."""
        if self._in_training or (self._differentiable and output.requires_grad):
            self._sources.append(get_gradient_edge(output))
            return output
        source = output.detach().requires_grad_()
        self._sources.append(source)
        # A clone, since autograd forbids in-place operations, of activations, on a leaf.
        return source.clone()

    def _is_reached_from(self, output: Tensor, a: Tensor) -> bool:
        """Whether a backward pass that ends at the sources so far passes through this output.

        Args:
            output: a layer's output.
            a: the layer's input. In training it may have a graph without a tracked layer in it,
                that of parameters without a rule; where the input's graph is kept, that one.
        """
        if not (self._in_training or self._differentiable):
            return output.requires_grad
        ahead, seen = [a.grad_fn], set()
        while ahead:
            node = ahead.pop()
            if node in self._nodes:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                ahead += [before for before, _ in node.next_functions]
        return False

    def _pre_hook(self, tracked: TrackedLayer) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            self._check(tracked, first_input(args, kwargs))
            if self._follower is not None:
                self._follower.inside.append(tracked)

        return hook

    def _check(self, tracked: TrackedLayer, a: Tensor) -> None:
        if self._runs_backward:
            raise NotImplementedError(
                f"Layer {tracked} runs again in the backward pass (torch.utils.checkpoint), "
                "where it would be counted twice. Checkpoint in train mode alone (if "
                "self.training), with the curvature in eval mode; switch checkpointing off; or "
                "freeze it (requires_grad_(False))."
            )
        check_before(tracked, a)

    def _forward_hook(self, tracked: TrackedLayer) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            if self._follower is not None:
                self._follower.inside.remove(tracked)
            return self._seen(tracked, first_input(args, kwargs), output)

        return hook

    def _seen(self, tracked: TrackedLayer, a: Tensor, output: Tensor) -> Tensor:
        """A layer has run: show its input, and return the output that shows its gradients."""
        if isinstance(tracked.layer, FunctionalLayer):  # which has no hook
            self._check(tracked, a)
        given = a
        if not self._differentiable:
            a = a.detach()
        number, run = self._run(tracked)
        N = self._num_examples
        if run == "followed" and self._follower is not None and N is not None:
            if output.requires_grad:  # it depends on the examples
                raise _other_runs(tracked, f"on examples in run {number + 1}")
            return self._begun(tracked, number, a.expand(N, *a.shape), output)
        if isinstance(run, SharedAxes) and run.are_those_of(a) and N is not None:
            a, output = run.for_each_example(a, N), run.for_each_example(output, N)
        rows = rows_of(tracked, a)
        # Where a mask hides positions, those of folded rows would have to be folded, too.
        if run == "folded" and current_rows() is None and N:
            rows = folded_rows(len(a), N, a.device)
            self.folds = True
            if len(a) % N:
                self.not_folded.append(tracked)
        seen = Use(a if rows is None else rows.flatten(a), rows)
        if run != "constant":
            self._on_input(tracked, seen)
            if output.numel():
                self._reached[tracked, number] = False
        if self._keep_inputs or tracked.rule.needs_input:
            use = seen
        else:
            use = Use(a.new_empty(0), rows)  # not to keep the input in memory until then
        if not self._is_reached_from(output, given):
            output = self._as_source(output)

        def on_reached() -> None:
            if run == "constant":
                raise _other_runs(tracked, f"without a constant output in run {number + 1}")
            self._reached[tracked, number] = True

        return self._shown(output, tracked, use, on_reached)

    def _begun(self, tracked: TrackedLayer, number: int, a: Tensor, output: Tensor) -> Tensor:
        """The output of a run for all examples, which is followed to where it meets them."""
        assert self._follower is not None
        run = LayerRun(tracked, number)
        use = Use(a)
        self._on_input(tracked, use)
        self._reached[tracked, number] = False
        if not (self._keep_inputs or tracked.rule.needs_input):
            use = Use(a.new_empty(0))
        self._followed[run] = use, output.shape
        return self._follower.begin(run, output)

    def _end_vector(self) -> None:
        """Show the gradients of outputs that were followed, now that they are complete."""
        for run, gradients in self._waiting.items():
            use, shape = self._followed[run]
            self._reached[run.tracked, run.number] = True
            self._on_gradient(run.tracked, use, gradients.unflatten(1, shape))
        self._waiting.clear()

    def _shown(
        self,
        output: Tensor,
        tracked: TrackedLayer,
        use: Use,
        on_reached: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The output, whose gradients are shown to the callback."""
        keeps_graph = self._in_training or self._differentiable
        if keeps_graph and output.grad_fn is not None:
            self._nodes.add(output.grad_fn)
        version = use.a._version  # pyright: ignore[reportPrivateUsage]

        def on_gradient(b: Tensor) -> None:
            if not self._listens:  # the training's own backward pass
                return
            on_reached()
            if use.a._version != version:  # pyright: ignore[reportPrivateUsage]
                raise NotImplementedError(
                    f"The input of layer {tracked} was modified in place after the layer had "
                    "read it, so that it could not be trained either. Modify a copy."
                )
            if not b.numel():  # graphs without edges
                return
            axes = 1 if use.rows is None else len(use.rows.axes)
            if self._batched:  # (V, rows, ...)
                b = b.flatten(0, axes)
            elif axes > 1:
                b = b.flatten(0, axes - 1)
            self._on_gradient(tracked, use, b)

        if self._batched:
            return _Tap.apply(output, on_gradient)
        output.register_hook(on_gradient)
        return output


class _Tap(torch.autograd.Function):
    """The identity, whose gradients are shown to a callback, all vectors of a vmap at once.

    A tensor hook would run inside of the vmap, which hides the axis of the vectors.
    """

    @staticmethod
    def forward(x: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.on_gradient = inputs
        ctx.mark_dirty(x)  # no copy, and activations may go on in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _Show.apply(grad_outputs[0], ctx.on_gradient), None


class _Show(torch.autograd.Function):
    """The identity on gradients, which calls back outside of vmap."""

    @staticmethod
    def forward(b: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        on_gradient(b[None])
        return b.view_as(b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Nothing: there are no second derivatives."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Tensor, int]:
        b, on_gradient = args
        b = b.movedim(in_dims[0], 0)  # (V, N, ...)
        on_gradient(b)
        return b, 0


def _other_runs(tracked: TrackedLayer, how: str) -> NotImplementedError:
    """The error for a layer whose runs differ from those that were found on the first batch."""
    return NotImplementedError(
        f"Layer {tracked}, which runs on examples and on something else, runs {how} in this batch: "
        "another way than in the first, so that its runs cannot be told apart. Use separate "
        "layers, or freeze it (requires_grad_(False))."
    )


def check_before(tracked: TrackedLayer, a: Tensor) -> None:
    """Raise an error if a layer that is about to run cannot be followed.

    Raises:
        TypeError: an input of integers for a layer that takes none, or the other way round.
        NotImplementedError: a layer that runs without gradients.
    """
    if a.is_floating_point() == tracked.rule.takes_integers:
        needs, way_out = "floating point", "x.float() / 255 for images in uint8"
        if tracked.rule.takes_integers:
            needs, way_out = "integers", "tokens.long() for tokens' numbers"
        raise TypeError(
            f"Layer {tracked} got an input of dtype {a.dtype}; it needs {needs}. "
            f"Convert the data, for example {way_out}."
        )
    if not torch.is_grad_enabled():
        raise NotImplementedError(
            f"Layer {tracked} runs without gradients (under torch.no_grad, or in a "
            "reentrant checkpoint). Let gradients through (checkpoint with use_reentrant=False, "
            "in train mode alone), or freeze it (requires_grad_(False))."
        )


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A layer's input, from the arguments that a hook sees."""
    if args:
        return args[0]
    return kwargs.get("input", next(v for v in kwargs.values() if isinstance(v, Tensor)))


def rows_of(tracked: TrackedLayer, a: Tensor) -> Rows | None:
    """The examples of a layer's rows, where `examples_of_rows` or `counted_positions` says them.

    A mask of positions (`counted_positions`) may enclose a whole model; it does not concern layers
    whose input has other axes. An index of rows (`examples_of_rows`) must fit each layer inside.

    Raises:
        ValueError: rows that are not those of the layer's input.
    """
    rows = None if isinstance(tracked.layer, OwnParameter) else current_rows()
    if rows is None:
        return None
    rows = rows.on(a.device)
    features = a.dim() if tracked.rule.takes_integers else tracked.rule.features % max(a.dim(), 1)
    fits = tuple(a.shape[: len(rows.axes)]) == rows.axes
    folded = len(rows.axes) > 1 and a.shape[:1] == (math.prod(rows.axes),) != rows.axes[:1]
    # An axis of features is no axis of positions, even if it has as many entries.
    concerned = folded or (fits and features >= len(rows.axes))
    if rows.of_positions and not concerned:
        return None
    if rows.of_positions and folded:  # (N·R, ...), which the proof of independence puts to the test
        return replace(rows, axes=(math.prod(rows.axes),))
    if not fits:
        raise ValueError(
            f"Layer {tracked} got an input of shape {tuple(a.shape)} where examples_of_rows was "
            f"given an index of shape {rows.axes}; its axes must be the input's first. Call the "
            "layer outside of it, or give the index of these rows."
        )
    return rows
