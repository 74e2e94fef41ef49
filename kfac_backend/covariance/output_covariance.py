"""The outputs' covariance J Σ Jᵀ under a Kronecker-factored posterior, without the Jacobian J.

C vectors are propagated back to the inputs only, as in the curvature pass; each layer's inputs and
output gradients are contracted with its block's eigenvectors. Exact for the linearised network,
whichever mode the factors are from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.covariance.eigenbasis import LARGEST_PRODUCT, bytes_per_example
from kfac_backend.covariance.gradient_covariance import gradient_covariance
from kfac_backend.covariance.layer_gradients import LayerGradients, PosteriorPrecision
from kfac_backend.layers import ExampleGradients, Use
from kfac_backend.model.batches import Plan, detached, example_shapes, examples, make_plan
from kfac_backend.model.calls import call_with, check_output, num_examples, restoration
from kfac_backend.model.capture import Capture
from kfac_backend.model.memory import give_back_free_memory
from kfac_backend.model.rule_assignment import TrackedLayer, assignment_of_blocks, check_module
from kfac_backend.model.verification import Proof
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.threads import turn_of

__all__ = ["OutputCovariance", "PosteriorPrecision"]

DEFAULT_MEMORY = {"cpu": 96 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True)
class _Sizes:
    """How many examples are worked on at once, for inputs of one shape."""

    part: int | None
    """In a pass; None: batches stay whole."""
    chunks: dict[TrackedLayer, int]
    """In each layer's products."""
    channels_last: bool = False


class OutputCovariance:
    """A function from inputs to outputs f (N, C) and their covariances J Σ Jᵀ (N, C, C).

    Args:
        model: the network at the posterior's mean. It runs in the mode (train or eval) it is in.
        precision: the posterior precision, block by block; parameters without a block are
            constants.
        memory: bytes that gradients and their products may take at once, besides the activations
            of the examples that they belong to; about 96 MiB on a CPU and 2 GiB on a GPU if None.
            Batches of tensors are split inside to keep it, down to one example.
        batched: propagate the C vectors back at once, which holds one layer's gradients at a time.

    Raises:
        ValueError: no block, or one of a parameter that the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: PosteriorPrecision,
        *,
        memory: int | None = None,
        batched: bool = False,
    ) -> None:
        if memory is not None and memory < 1:
            raise ValueError(f"memory must be at least one byte, not {memory}.")
        check_module(model)
        sizes = {name: spectrum.numel() for name, (_, spectrum) in precision.items()}
        with turn_of(model):
            self._proof = Proof(model, assignment_of_blocks(model, sizes))
        self._model = model
        self._precision = precision
        device = next(model.parameters()).device.type
        self._memory = memory or DEFAULT_MEMORY.get(device, DEFAULT_MEMORY["cuda"])
        largest = LARGEST_PRODUCT.get(device, LARGEST_PRODUCT["cuda"])
        self._product_bytes = max(1, min(largest, self._memory // 8))
        self._batched = batched
        self._sizes: dict[Any, _Sizes] = {}

    def __call__(self, x: Any) -> tuple[Float[Tensor, "N C"], Float[Tensor, "N C C"]]:
        """Outputs and covariances at a batch, a tensor or a mapping of tensors; without a graph.

        Raises:
            TypeError: a model whose output is not a tensor.
            NotImplementedError: outputs of another shape than (N, C); a layer that hooks cannot
                follow.
            ValueError: no examples.
        """
        # Under inference mode there would be no graph to go back.
        with turn_of(self._model), full_float32(), torch.inference_mode(False):
            x = detached(x, next(self._model.parameters()).device)
            if num_examples(x) == 0:
                raise ValueError("The batch has no examples; leave it out.")
            layers = (tracked.layer for tracked in self._proof.assignment.layers)
            restore = restoration(self._model, *layers)
            try:
                sizes = self._sizes_for(x)
                parts = [self._part(part, sizes) for part in self._parts(x, sizes)]
            finally:
                restore()
            outputs, covariances = zip(*parts, strict=True)
            result = torch.cat(outputs), torch.cat(covariances)
        give_back_free_memory()
        return result

    def _sizes_for(self, x: Any) -> _Sizes:
        """How many examples fit; and, once, the proof that the hooks see all."""
        N = num_examples(x)
        if not self._proof.is_made(N):
            which = self._proof.some(x, N)
            some = x if which is None else examples(x, which)
            self._proof.make(some, num_examples(some))
            self._gradients = LayerGradients(
                self._proof.assignment, self._precision, self._product_bytes
            )
            self._sizes.clear()
        key = example_shapes(x)
        if key not in self._sizes:
            self._sizes[key] = self._measure(x if N is None else examples(x, slice(2)))
        return self._sizes[key]

    def _measure(self, x: Any) -> _Sizes:
        """How many examples of this shape fit into the memory."""
        plan = make_plan(self._model, x, next(self._model.parameters()).device)
        if num_examples(x) == 1:
            plan = Plan(splits=True)
        shapes: dict[TrackedLayer, tuple[int, int]] = {}

        def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            rows = self._gradients.rules[tracked].position_gradients(use, b)
            M, R, d_out = rows.shape
            R = R * -(-M // len(f))  # of each example, whose rows may be several
            shapes[tracked] = R + shapes.get(tracked, (0, 0))[0], d_out

        with self._capture(record) as capture:
            f = capture.forward(x)
            self._check_output(f, x)
            capture.backward(f, [torch.zeros_like(f)])
        C, itemsize = f.shape[1], at_least_float32(f).element_size()
        work = {
            tracked: bytes_per_example(R, C, d_out, self._input_size(tracked, d_out), itemsize)
            for tracked, (R, d_out) in shapes.items()
        }
        sizes = [itemsize * C * R * d_out for R, d_out in shapes.values()]
        held = max(sizes, default=1) * 2 if self._batched else sum(sizes)
        largest = max(work.values(), default=0)
        memory = self._memory - 2 * self._product_bytes
        part = max(1, (memory - largest) // max(held, 1))
        part = min(part, plan.part_size or part)
        room = max(memory - part * held, largest)
        chunks = {tracked: max(1, room // size) for tracked, size in work.items()}
        return _Sizes(part if plan.splits else None, chunks, plan.channels_last)

    def _input_size(self, tracked: TrackedLayer, d_out: int) -> int:
        """Entries of a layer's input at one position, over all groups."""
        largest = max(self._precision[name][1].numel() for name in tracked.parameters.values())
        return max(1, largest // d_out)

    def _parts(self, x: Any, sizes: _Sizes) -> Iterator[Any]:
        N = num_examples(x)
        if N is None or sizes.part is None:
            yield x
            return
        for start in range(0, N, sizes.part):
            yield examples(x, slice(start, start + sizes.part))

    def _part(self, x: Any, sizes: _Sizes) -> tuple[Tensor, Tensor]:
        """Outputs and covariances of a part of a batch."""
        uses: dict[TrackedLayer, int] = {}
        seen: dict[tuple[TrackedLayer, Use], Tensor] = {}  # gradients (M, R, C, d_out)
        current = 0

        def count(tracked: TrackedLayer, use: Use) -> None:
            uses[tracked] = uses.get(tracked, 0) + 1

        def one_vector(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            self._check_rows(tracked, use, len(f))
            gradients = self._gradients.rules[tracked].position_gradients(use, b)  # (M, R, d_out)
            if (tracked, use) not in seen:
                M, R, d_out = gradients.shape
                seen[tracked, use] = gradients.new_zeros(M, R, f.shape[1], d_out)
            seen[tracked, use][:, :, current] = gradients

        def all_vectors(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            self._check_rows(tracked, use, len(f))
            gradients = self._gradients.rules[tracked].position_gradients(use, b)
            gradients = gradients.unflatten(0, (f.shape[1], -1)).movedim(0, 2)
            if self._gradients.stands_alone(tracked, uses[tracked]):
                with self._no_autocast(f):
                    chunk = sizes.chunks.get(tracked, 1)
                    self._gradients.add_one(covariance, (tracked, use, gradients), chunk)
            else:
                seen[tracked, use] = gradients

        def vectors() -> Iterator[Tensor]:
            nonlocal current
            for current in range(f.shape[1]):
                vector = torch.zeros_like(f)
                vector[:, current] = 1
                yield vector

        on_gradient = all_vectors if self._batched else one_vector
        with self._capture(on_gradient, sizes.channels_last, count) as capture:
            f = capture.forward(x)
            self._check_output(f, x)
            covariance = at_least_float32(f.detach()).new_zeros(*f.shape, f.shape[1])
            with self._no_autocast(f):
                capture.backward(f, vectors())
        f = f.detach()  # lets go of the graph
        with self._no_autocast(f):
            tied: list[tuple[TrackedLayer, Use, Tensor]] = []
            while seen:
                (tracked, use), gradients = seen.popitem()
                if self._gradients.stands_alone(tracked, uses[tracked]):
                    chunk = sizes.chunks.get(tracked, 1)
                    self._gradients.add_one(covariance, (tracked, use, gradients), chunk)
                else:
                    tied.append((tracked, use, gradients))
            self._gradients.add(covariance, tied)
            if self._proof.assignment.diagonal:
                self._add_uncovered(covariance, x)
        return f, covariance

    def _add_uncovered(self, covariance: Tensor, x: Any) -> None:
        """Add what parameters without a rule bring; their blocks are diagonal."""
        parameters = {
            n: self._model.get_parameter(n).detach() for n in self._proof.assignment.diagonal
        }

        N = len(covariance)
        # One by one, where the input can be taken apart.
        apart = num_examples(x) == N
        for which in [slice(n, n + 1) for n in range(N)] if apart else [slice(N)]:
            some = examples(x, which) if apart else x
            jacobians = torch.func.jacrev(lambda p, some=some: call_with(self._model, p, some))(
                parameters
            )
            for name, jacobian in jacobians.items():
                b = jacobian.flatten(2).movedim(2, 0)[:, :, None, :, None]  # (P, N, 1, C, 1)
                part = gradient_covariance(ExampleGradients(b), *self._precision[name])
                covariance[which] += part

    def _capture(
        self, on_gradient: Any, channels_last: bool = False, on_input: Any = None
    ) -> Capture:
        return Capture(
            self._model,
            self._proof.assignment,
            on_input or (lambda tracked, use: None),
            on_gradient,
            channels_last=channels_last,
            batched=self._batched,
            keep_inputs=True,
        )

    def _no_autocast(self, f: Tensor) -> torch.autocast:
        return torch.autocast(f.device.type, enabled=False)

    def _check_rows(self, tracked: TrackedLayer, use: Use, N: int) -> None:
        rows = len(use.a) if use.rows is None else use.rows.num_examples
        if rows != N:
            raise NotImplementedError(
                f"Layer {tracked} got {rows} rows for {N} outputs; the covariance must know each "
                "example's rows. Keep the batch axis first and the shared axes apart: (N, ..., d), "
                "or say which example each row belongs to (examples_of_rows)."
            )

    def _check_output(self, f: Any, x: Any) -> None:
        check_output(f)
        N = num_examples(x)
        if f.dim() != 2 or (N is not None and len(f) != N):
            raise NotImplementedError(
                f"The model returned shape {tuple(f.shape)} for {N} examples; the covariance is "
                "there for outputs (N, C)."
            )
