"""Copies of expressions, one for each row that they meet, and the gradients that come back in them.

`follower` says what an expression is. Here it gets its copies, so that each example has a gradient
of its own, and these gradients go to a pass's sink.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfac_backend.engine.operations.follower import Expression, Follower
from kfac_backend.engine.rule_assignment import LayerRun, TrackedLayer
from kfac_backend.layers import Use
from kfac_backend.layers.rows import current_rows
from kfac_backend.precision import at_least_float32
from kfac_backend.sharding import detached_parameters

if TYPE_CHECKING:
    from kfac_backend.engine.capture import Capture


def follower_of(capture: "Capture", kind: Callable[..., Follower] | None = None) -> Follower:
    """The context that sees the operations on what a capture follows; ``kind`` makes it."""
    operations, runs = capture.assignment.operations, capture.assignment.runs.items()
    once = {layer for layer, kinds in runs if "followed" in kinds}
    values = detached_parameters(capture.model) if operations.names else {}
    leaves = {name: values[name].requires_grad_() for name in operations.names}

    def ran(tracked: TrackedLayer, a: Tensor, output: Tensor) -> Tensor:
        """The output of a function that is a layer's run: ``F.linear(a, weight)``."""
        capture.before(tracked)
        return capture.after(tracked, tracked.layer, (a,), {}, output)

    return (kind or Follower)(operations, leaves, Copies(capture), ran, once)


class Copies:
    """The copies of one forward pass.

    Args:
        capture: the pass's hooks, whose sink receives inputs and gradients.
    """

    def __init__(self, capture: "Capture") -> None:
        self._capture = capture
        # Runs on what all examples share: the use to report their gradients for, and the output's
        # shape.
        self._shared: dict[LayerRun, tuple[Use, torch.Size]] = {}
        # One vector's gradients of such outputs. They may meet the examples at several places,
        # which autograd reaches one by one, so that the sum is reported when the vector is done.
        self._waiting: dict[LayerRun, Tensor] = {}

    def for_rows(self, expression: Expression, M: int) -> Tensor:
        """A copy (M, ...) of an expression for each row; reports its parameters' gradients.

        A copy is a source: backward passes end there, and the expression's own graph takes each
        example's gradient on to the parameters.
        """
        capture = self._capture
        N, parameters = capture.runs.num_examples, capture.assignment.operations.own
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
        if rows_of_each > 1:
            capture.runs.has_row_groups = True
        # The copies are a leaf of their own: in the expression autograd would sum the gradient over
        # all rows; in the copies row m has its own.
        # Expanded, not copied: one piece of memory serves all rows.
        source = expression.value.detach().expand(M, *expression.value.shape).requires_grad_()
        capture.sources.add(source)
        examples = M // rows_of_each if rows is None else rows.num_examples
        uses = {leaf: Use(source.new_zeros(examples, 0)) for leaf in expression.leaves}
        for leaf, use in uses.items():
            if isinstance(leaf, str):
                capture.report_input(parameters[leaf], use)

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
                    with capture.arithmetic():
                        capture.sink.gradient(parameters[leaf], uses[leaf], gradients)
                else:  # other parts of its gradient may still come
                    earlier = self._waiting.get(leaf)
                    self._waiting[leaf] = gradients if earlier is None else earlier + gradients

        source.register_hook(on_gradient)
        return source

    def start(
        self, follower: Follower, tracked: TrackedLayer, number: int, use: Use, output: Tensor
    ) -> Tensor:
        """The output of a run on what all examples share, followed to where it meets them."""
        run = LayerRun(tracked, number)
        self._shared[run] = use, output.shape
        return follower.begin(run, output)

    def vector_done(self) -> list[LayerRun]:
        """Hand over the gradients of runs that started expressions; returns these runs."""
        runs = list(self._waiting)
        for run in runs:
            use, shape = self._shared[run]
            gradients = self._waiting.pop(run).unflatten(1, shape)
            with self._capture.arithmetic():
                self._capture.sink.gradient(run.tracked, use, gradients)
        return runs
