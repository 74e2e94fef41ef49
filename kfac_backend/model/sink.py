"""What a driver hands to whoever computes something from a model's passes.

A `Driver` runs a model over batches. All that differs between a pass for factors, for corrected
eigenvalues, for derivatives of factors or for output covariances is the sink: what it makes of the
layers' inputs and of the gradients in their outputs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor

from kfac_backend.layers import Use
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.options import KfacApprox


class Sink:
    """Receives what the tracked layers see; it ignores what a subclass does not take.

    In this order: for a pass, `start`. For each part of a batch: `input`, each time that a layer
    runs; then `forward_done`. For each vector that is propagated back: `gradient`, for each run
    that the vector reaches; then `vector_done`. After the last vector `part_done`, and
    `example_gradients` of parameters without a rule. After the last batch `sums`.
    """

    needs_inputs: ClassVar[bool] = False
    """Whether gradients come with their layer's input, also where its rule does not need it."""
    differentiable: bool = False
    """Whether inputs, gradients and outputs keep their graphs in the model's input, which must
    require a gradient."""

    takes_example_gradients: ClassVar[bool] = False
    """Whether `example_gradients` does anything; they cost other passes over each part."""
    most_examples: int | None = None
    """The most examples of a part, where batches may be split; None: as many as the plan says."""

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Begin with empty sums, also after a pass that failed.

        Args:
            assignment: the layers, as the proof has completed them.
            kfac_approx: the mode, no longer "auto".
        """

    def part(self) -> AbstractContextManager[object]:
        """The context that a part runs in."""
        return nullcontext()

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """A layer runs, on the input of this use."""

    def forward_done(self) -> None:
        """The forward pass has ended: all inputs of the part have come."""

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """A vector has reached a use's output, as the gradient b in the output's shape.

        The use has its input only if the layer's rule or this sink needs it; otherwise an empty
        tensor takes its place, so that memory does not hold all layers' inputs. Autograd may add to
        b in place later, or reuse its memory.
        """

    def vector_done(self) -> None:
        """All gradients of a vector have come."""

    def part_done(self, f: Tensor, y: Tensor) -> None:
        """All vectors of a part have come, whose outputs and targets these are."""

    def example_gradients(self, name: str, g: Tensor) -> None:
        """Each example's gradient for each vector (n, V, *shape) in a parameter without a rule."""

    def needs_examples(self, tracked: TrackedLayer) -> bool:
        """Whether it must be known which example each of the layer's rows belongs to."""
        return True

    def num_bytes(self) -> int:
        """The memory that the sums take."""
        return 0

    def sums(self) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
        """The sums of a pass, additive over data: those of blocks by name, and others.

        They are taken out: the sink is empty until the next `start`.
        """
        return {}, {}
