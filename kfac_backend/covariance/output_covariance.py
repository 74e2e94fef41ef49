"""The outputs' covariance J Σ Jᵀ under a Kronecker-factored posterior, without the Jacobian J.

One vector per output, C in all, is propagated back to the layers' outputs only, as in a curvature
pass. Each layer's inputs and output gradients are contracted with its block's eigenvectors. The
result is exact for the linearised network, whichever mode the factors are from.

Outputs (N, R, C), one for each position of a sequence or pixel of an image, have a covariance
(C, C) at each position. It may depend on all of the example's inputs, so that an example takes R·C
vectors. Each pair of an example and a position is therefore handled as an example of its own, and
one vector carries as many pairs as memory allows.

Life cycle. `OutputCovariance` proves the model on its first batch, as a curvature pass does. For
each shape of input it measures once how many pairs fit into the memory (`_Sizes`) and keeps that.
A call splits its batch into parts. For each part the model runs forward once; then the C vectors go
back, once for each group of layers. A group's gradients are held until the last vector has come,
contracted, and dropped.

The graph of the outputs holds the capture's hooks, and these hold the functions that they call. So
none of these functions may hold the outputs: that would be a cycle through C++, which Python's
collector never frees, and the network with it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kfac_backend.covariance.eigenbasis import LARGEST_PRODUCT, bytes_per_example
from kfac_backend.covariance.gradients import LayerGradients, PosteriorPrecision, some_examples
from kfac_backend.covariance.parameter_covariance import (
    gradient_covariance,
    joint_covariance,
    joint_part,
    parameter_covariance,
)
from kfac_backend.covariance.without_rule import GradientsWithoutRule
from kfac_backend.layers import ExampleGradients, Use
from kfac_backend.model.batches import Plan, detached, example_shapes, examples, make_plan
from kfac_backend.model.calls import call_with, num_examples, plain_attention, restoration
from kfac_backend.model.capture import Capture, unknown_examples
from kfac_backend.model.checks import check_module, check_output, total_memory
from kfac_backend.model.proof import Proof
from kfac_backend.model.rule_assignment import TrackedLayer, assignment_of_blocks
from kfac_backend.precision import at_least_float32, full_float32

__all__ = [
    "OutputCovariance",
    "PosteriorPrecision",
    "check_classes",
    "check_not_empty",
    "check_positions",
    "check_tolerance",
    "default_memory",
]

CPU_MEMORY = 144 * 2**20
"""Bytes for gradients on a CPU."""
GPU_SHARE = 8
"""On a GPU an eighth of its memory is for gradients; few examples at once would leave it idle."""

Group = frozenset[TrackedLayer]


@dataclass(frozen=True)
class _Sizes:
    """How many examples are worked on at once, for inputs of one shape."""

    output: torch.Size
    """The shape of one example's output, (..., C)."""
    part: int | None
    """Examples in one forward pass; None: batches stay whole."""
    chunks: dict[TrackedLayer, int]
    """Examples in the products of each layer."""
    groups: list[Group]
    """Groups of layers whose gradients are held together. The vectors are propagated back once for
    each group, so there is more than one only if memory is short."""
    channels_last: bool = False


class _Part(NamedTuple):
    """M pairs of an example and one of its positions, handled at once."""

    x: Any
    """The examples, repeated for each pair."""
    positions: Tensor
    """(M,) the position of each pair, among all positions of the output."""
    kept: Tensor | None
    """Indices of the pairs that were asked for; None: all. A batch that cannot be split by example
    runs whole, with pairs for all its examples."""
    numbers: Tensor
    """Indices of the kept pairs in the result."""


class OutputCovariance:
    """A function from inputs to outputs f (N, C) and their covariances J Σ Jᵀ (N, C, C).

    For outputs (N, R, C) it returns the covariance at each position, (N, R, C, C), but not those
    between positions. The cost is C backward passes an example, or R·C for sequences, whose
    positions depend on each other. Positions of a layer that no output reaches, such as later ones
    in a causal network, are left out of the products. `joint` returns the covariances between
    several inputs.

    Args:
        model: the network at the posterior's mean. It runs in the mode (train or eval) it is in.
        precision: the posterior precision, block by block; parameters without a block are
            constants.
        memory: bytes that gradients and their products may take at once, not counting the result
            and the activations of the examples that they belong to. None: 144 MiB on a CPU, an
            eighth of a GPU's memory. To keep the limit, batches of tensors are split, down to one
            position of one example. Then layers are split into groups, at the price of more
            backward passes. The least that is held are the gradients of one layer's outputs, C at
            each of its positions, and those of a weight that is tied in two orientations, C a few
            times.
        tolerance: t ≥ 0 in V ≤ result ≤ (1 + t) V, with V the exact covariance. Where the posterior
            precision exceeds the prior's by less than the share t, the prior's is used, which saves
            the products with most of a trained network's eigenvectors. 0 is exact up to rounding.
            Biases, tensors that are tied in both orientations, and factors that are diagonal are
            always exact.

    Raises:
        ValueError: no block, or one of a parameter that the model does not have; a tolerance that
            is negative or not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: PosteriorPrecision,
        *,
        memory: int | None = None,
        tolerance: float = 0.0,
    ) -> None:
        check_tolerance(tolerance)
        if memory is not None and memory < 1:
            raise ValueError(f"memory must be at least one byte, not {memory}.")
        check_module(model)
        sizes = {name: block.numel for name, (block, _) in precision.items()}
        self._proof = Proof(model, assignment_of_blocks(model, sizes))
        self._model = model
        self._precision = precision
        device = next(model.parameters()).device
        self._memory = memory or default_memory(device)
        largest = LARGEST_PRODUCT.get(device.type, LARGEST_PRODUCT["cuda"])
        self._product_bytes = max(1, min(largest, self._memory // 8))
        self._tolerance = tolerance
        self._sizes: dict[Any, _Sizes] = {}

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Outputs and covariances at a batch, a tensor or a mapping of tensors; without a graph.

        Args:
            x: the batch.
            positions: a mask of the wanted positions, for outputs (N, R, C) say. The result has
                these M positions only, (M, C) and (M, C, C), in the mask's order.
            classes: indices of the K wanted outputs: (K,) for all alike, or (..., K) for each
                example or position of the result, such as the largest. The result has K instead of
                C.
            variance_only: return the covariances' diagonals, (..., C). This takes as many backward
                passes, but neither computes nor holds C×C products.

        Raises:
            TypeError: a model whose output is not a tensor; a mask or indices of another dtype.
            NotImplementedError: outputs that are not (N, ..., C); a layer that hooks cannot follow.
            ValueError: no examples; positions or classes that the outputs do not have.
        """
        with self._restored():
            device = next(self._model.parameters()).device
            x = detached(x, device)
            check_not_empty(x)
            self._prove(x)
            key = example_shapes(x), None if classes is None else classes.shape[-1]
            if key not in self._sizes:
                some = x if num_examples(x) is None else examples(x, slice(2))
                self._sizes[key] = self._measure(some, key[1])
            sizes = self._sizes[key]
            mask = self._mask(x, sizes, positions)
            M = int(mask.sum())
            shape = tuple(mask.shape) if positions is None else (M,)
            columns = check_classes(classes, shape, sizes.output[-1])
            columns = None if columns is None else columns.to(device)
            result = None
            for part in self._parts(x, sizes, mask):
                of_part = columns[part.numbers] if columns is not None else None
                f, covariance = self._part(part, of_part, sizes, variance_only)
                if result is None:
                    result = tuple(t.new_empty(M, *t.shape[1:]) for t in (f, covariance))
                result[0][part.numbers], result[1][part.numbers] = f, covariance
        assert result is not None  # a position is chosen
        outputs, covariances = result
        return outputs.unflatten(0, shape), covariances.unflatten(0, shape)

    def joint(
        self, x: Float[Tensor, "T q *shape"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "T q K"], Float[Tensor, "T q_K q_K"]]:
        """Outputs and covariances of T sets of q inputs; output c of input p is number p·K + c.

        Both are differentiable in the inputs if these require a gradient; parameters and their
        posterior are constants. All sets are computed at once, with C backward passes, whose graph
        is held in memory if the inputs require a gradient. The tolerance is not used.

        Args:
            x: the inputs, in the model's dtype and on its device.
            classes: indices of the K wanted outputs; all C if None.

        Raises:
            TypeError: a model whose output is not a tensor.
            ValueError: no inputs; indices of outputs that the model does not have.
            NotImplementedError: outputs that are not (N, C); a layer that hooks cannot follow.
        """
        if x.dim() < 3 or not x.shape[:2].numel():
            raise ValueError(
                f"x has shape {tuple(x.shape)}; sets of inputs (T, q, ...) are needed, with at "
                "least one input: x[None] for a single set."
            )
        with self._restored(), plain_attention.held():
            differentiable = torch.is_grad_enabled() and x.requires_grad
            flat = (x.clone() if x.is_inference() else x).flatten(0, 1)
            self._prove(flat.detach())
            f, covariance = self._joint(
                flat if differentiable else flat.detach(), x.shape[1], classes, differentiable
            )
        return f.unflatten(0, x.shape[:2]), covariance

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """A context in which the model runs in full precision, and stays as it was."""
        layers = (tracked.layer for tracked in self._proof.assignment.layers)
        # Inference mode would record no graph for the backward passes.
        with full_float32(), torch.inference_mode(False):
            restore = restoration(self._model, *layers)
            try:
                yield
            finally:
                restore()

    def _prove(self, x: Any) -> None:
        """Prove, once, that the hooks see all uses of the parameters."""
        N = num_examples(x)
        if self._proof.is_made(N):
            return
        self._proof.make(x, N)
        self._gradients = LayerGradients(self._proof.assignment, self._precision)
        self._without_rule = GradientsWithoutRule(
            self._model, self._proof.assignment.diagonal, self._product_bytes
        )
        self._sizes.clear()  # the proof may have found other rules and runs

    def _measure(self, x: Any, K: int | None) -> _Sizes:
        """How many examples of this shape fit into the memory."""
        plan = make_plan(self._model, x, next(self._model.parameters()).device)
        if num_examples(x) == 1:
            plan = Plan(splits=True)
        shapes: dict[TrackedLayer, tuple[int, int]] = {}  # positions of an example, d_out
        uses = Counter[TrackedLayer]()
        N = 1

        def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            rows = self._gradients.rules[tracked].position_gradients(use, b)
            M, R, d_out = rows.shape
            R = R * -(-M // N)  # an example may have several rows
            shapes[tracked] = R + shapes.get(tracked, (0, 0))[0], d_out
            uses[tracked] += 1

        with self._capture(record) as capture:
            f = capture.forward(x)
            self._check_output(f, x)
            N = len(f)
            capture.backward(f, [torch.zeros_like(f)])  # only shapes are recorded
        # Bytes that the products of a layer need for an example, and bytes of its gradients.
        C, itemsize = K or f.shape[-1], at_least_float32(f).element_size()
        work = {
            tracked: bytes_per_example(R, C, d_out, self._input_size(tracked, d_out), itemsize)
            for tracked, (R, d_out) in shapes.items()
        }
        # A pair of an example and a position holds one vector, and the gradients of a group.
        sizes = {tracked: itemsize * C * R * d_out for tracked, (R, d_out) in shapes.items()}
        vector = itemsize * f[0].numel()
        largest = max(work.values(), default=0)
        memory = self._memory - 2 * self._product_bytes
        groups = [frozenset(self._proof.assignment.all)]
        held = sum(sizes.values()) + vector
        if plan.splits and held + largest > memory:
            groups = self._groups(sizes, uses, memory - largest - vector)
            held = max(sum(sizes.get(t, 0) for t in group) for group in groups) + vector
        # Examples at once, from what is left beside one layer's products.
        part = max(1, (memory - largest) // max(held, 1))
        part = min(part, plan.part_size or part)
        room = max(memory - part * held, largest)
        if f.device.type == "cpu":  # more at once is slower
            room = max(min(room, 8 * self._product_bytes), largest)
        chunks = {tracked: max(1, room // size) for tracked, size in work.items()}
        return _Sizes(
            f.shape[1:], part if plan.splits else None, chunks, groups, plan.channels_last
        )

    def _groups(
        self, sizes: dict[TrackedLayer, int], uses: Counter[TrackedLayer], room: int
    ) -> list[Group]:
        """The layers in few groups whose gradients fit into ``room`` bytes: first-fit decreasing.

        Layers with tied parameters stay in one group, since their gradients add up.
        """
        alone = [t for t in sizes if self._gradients.stands_alone(t, uses[t])]
        units = [frozenset([t]) for t in alone] + [frozenset(sizes.keys() - set(alone))]
        groups: list[tuple[int, Group]] = []
        for unit in sorted(units, key=lambda unit: -sum(sizes[t] for t in unit)):
            size = sum(sizes[t] for t in unit)
            fits = [i for i, (taken, _) in enumerate(groups) if taken + size <= room]
            if fits:
                taken, group = groups[fits[0]]
                groups[fits[0]] = taken + size, group | unit
            else:
                groups.append((size, unit))
        # Layers that did not run now may run in another batch.
        rest = frozenset(self._proof.assignment.all) - sizes.keys()
        return [group for group in [*(group for _, group in groups), rest] if group]

    def _input_size(self, tracked: TrackedLayer, d_out: int) -> int:
        """Entries of a layer's input at one position, over all groups."""
        largest = max(self._precision[name][0].numel for name in tracked.parameters.values())
        return max(1, largest // d_out)

    def _mask(self, x: Any, sizes: _Sizes, positions: Tensor | None) -> Tensor:
        """The mask of the wanted positions: (N,) for outputs (N, C), else (N, ...)."""
        N = num_examples(x)
        if N is None:  # only the model's output shows it
            with torch.no_grad():
                N = len(call_with(self._model, {}, x))
        mask = check_positions(positions, torch.Size((N, *sizes.output)))
        return mask.to(next(self._model.parameters()).device)

    def _parts(self, x: Any, sizes: _Sizes, mask: Tensor) -> Iterator[_Part]:
        by_position = mask.flatten(1) if mask.dim() > 1 else mask[:, None]
        of_example, of_positions = by_position.nonzero().T
        numbers = torch.arange(len(of_example), device=mask.device)
        if num_examples(x) is None or sizes.part is None:
            # The whole batch runs for each rank: first with every example's first wanted position,
            # then with every one's second, and so on.
            rank = by_position.long().cumsum(1)[of_example, of_positions]
            for k in range(1, int(by_position.sum(1).max()) + 1):
                now = rank == k
                position = numbers.new_zeros(len(mask))
                position[of_example[now]] = of_positions[now]
                yield _Part(x, position, of_example[now], numbers[now])
            return
        whole = mask.dim() == 1 and len(of_example) == len(mask)
        # Pairs with similar positions together: they reach similar positions of layers, so that
        # more of the others can be left out of the products.
        if not whole:
            order = of_positions.argsort(stable=True)
            of_example, of_positions, numbers = (
                t[order] for t in (of_example, of_positions, numbers)
            )
        for start in range(0, len(numbers), sizes.part):
            some = slice(start, start + sizes.part)
            # Slices of a tensor are no copies.
            x_part = examples(x, some if whole else of_example[some])
            yield _Part(x_part, of_positions[some], None, numbers[some])

    def _part(
        self, part: _Part, classes: Tensor | None, sizes: _Sizes, variance_only: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs (M, C) and covariances (M, C, C), or variances, of a part of the pairs."""
        uses = Counter[TrackedLayer]()
        seen: dict[tuple[TrackedLayer, Use], Tensor] = {}
        group: Group = frozenset()
        current = M = C = 0

        def count(tracked: TrackedLayer, use: Use) -> None:
            uses[tracked] += 1

        def hold(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            if tracked not in group:
                return
            _check_rows(tracked, use, M)
            rows = self._gradients.rules[tracked].position_gradients(use, b)  # (m, R, d_out)
            if (tracked, use) not in seen:  # zero for outputs that do not depend on the use
                m, R, d_out = rows.shape
                seen[tracked, use] = rows.new_zeros(m, R, C, d_out)
            seen[tracked, use][:, :, current] = rows

        with self._capture(hold, sizes.channels_last, count) as capture:
            f = capture.forward(part.x)
            self._check_output(f, part.x)
            M, index = len(f), torch.arange(len(f), device=f.device)
            columns = self._columns(f, part, classes)  # (M, C)
            C = columns.shape[1]

            def vectors() -> Iterator[Tensor]:
                nonlocal current
                for current in range(C):
                    vector = torch.zeros_like(f, memory_format=torch.contiguous_format)
                    vector.view(M, -1, f.shape[-1])[index, part.positions, columns[:, current]] = 1
                    yield vector

            # The outputs that were asked for, (M, C).
            result = f.detach().flatten(1, -2) if f.dim() > 2 else f.detach()[:, None]
            result = result[index[:, None], part.positions[:, None], columns]
            shape = result.shape if variance_only else (*result.shape, C)
            covariance = at_least_float32(result).new_zeros(shape)
            # All vectors for one group of layers, then for the next: only one group's gradients,
            # C at each position, are held.
            for group in sizes.groups:
                with torch.autocast(f.device.type, enabled=False):
                    capture.backward(f, vectors())
                    if group is sizes.groups[-1]:
                        f = f.detach()  # frees the graph before the products
                    self._add_seen(covariance, seen, uses, sizes)
        with torch.autocast(f.device.type, enabled=False):
            self._add_without_rule(covariance, part, result, columns)
        if part.kept is not None:
            return result[part.kept], covariance[part.kept]
        return result, covariance

    def _columns(self, f: Tensor, part: _Part, classes: Tensor | None) -> Tensor:
        """The indices of the wanted outputs of each pair, (M, C)."""
        if classes is None:
            return torch.arange(f.shape[-1], device=f.device).expand(len(f), -1)
        if part.kept is None:
            return classes
        columns = classes.new_zeros(len(f), classes.shape[-1])
        columns[part.kept] = classes
        return columns

    def _add_seen(
        self,
        covariance: Tensor,
        seen: dict[tuple[TrackedLayer, Use], Tensor],
        uses: Counter[TrackedLayer],
        sizes: _Sizes,
    ) -> None:
        """Contract the gradients seen so far, add the result to the covariance, and drop them."""
        tied: list[tuple[TrackedLayer, Use, Tensor]] = []
        # Each layer's gradients are dropped as soon as they are contracted.
        while seen:
            (tracked, use), rows = seen.popitem()
            if self._gradients.stands_alone(tracked, uses[tracked]):
                for chunk, some in some_examples(
                    (tracked, use, rows), sizes.chunks.get(tracked, 1)
                ):
                    self._add(covariance[chunk], [some])
            else:  # the gradients in a tied parameter are summed first
                tied.append((tracked, use, rows))
        self._add(covariance, tied)

    def _add(self, covariance: Tensor, seen: list[tuple[TrackedLayer, Use, Tensor]]) -> None:
        for gradients in self._gradients.of_uses(seen):
            covariance += parameter_covariance(
                gradients,
                self._product_bytes,
                tolerance=self._tolerance,
                variance_only=covariance.dim() == 2,
            )

    def _add_without_rule(
        self, covariance: Tensor, part: _Part, f: Tensor, columns: Tensor
    ) -> None:
        """Add the part of parameters without a rule, whose blocks are diagonal."""
        for which, gradients in self._without_rule(part.x, f, part.positions, columns):
            for name, of_name in gradients.items():
                block, spectrum = self._precision[name]
                covariance[which] += gradient_covariance(
                    of_name, block, spectrum, variance_only=covariance.dim() == 2
                )

    def _joint(
        self, x: Tensor, q: int, classes: list[int] | None, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs (N, K) and covariances (T, q·K, q·K)."""
        N = len(x)
        seen: dict[tuple[TrackedLayer, Use], dict[int, Tensor]] = {}
        current = 0

        def hold(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            _check_rows(tracked, use, N)
            rows = self._gradients.rules[tracked].position_gradients(use, b)  # (M, R, d_out)
            seen.setdefault((tracked, use), {})[current] = rows

        with self._capture(hold, differentiable=differentiable) as capture:
            f = capture.forward(x)
            check_output(f)
            if f.dim() != 2 or len(f) != N:
                raise NotImplementedError(
                    f"The model returned shape {tuple(f.shape)} for {N} inputs; joint covariances "
                    "support outputs (N, C), such as those of regression."
                )
            wanted = torch.arange(f.shape[1]) if classes is None else torch.tensor(classes)
            check_classes(wanted, (N,), f.shape[1])
            for current in range(len(wanted)):
                vector = torch.zeros_like(f)
                vector[:, wanted[current]] = 1
                capture.backward(f, [vector])
        wanted = wanted.to(f.device)
        f = f[:, wanted] if differentiable else f.detach()[:, wanted]
        K = len(wanted)
        covariance = at_least_float32(f.detach()).new_zeros(N // q, q * K, q * K)
        with (
            torch.autocast(f.device.type, enabled=False),
            torch.set_grad_enabled(differentiable),
        ):
            uses = [(*key, _stacked(found, K)) for key, found in seen.items()]
            seen.clear()  # the hooks hold it, and here it would hold their graph
            for gradients in self._gradients.of_uses(uses):
                covariance = covariance + joint_part(gradients, q, self._product_bytes)
            covariance = covariance + self._joint_without_rule(x, f, wanted, q)
        return f, covariance

    def _joint_without_rule(self, x: Tensor, f: Tensor, wanted: Tensor, q: int) -> Tensor:
        """The part of parameters without a rule, whose blocks are diagonal."""
        positions = torch.zeros(len(x), dtype=torch.long, device=x.device)
        columns = wanted.expand(len(x), -1)
        parts = [part for _, part in self._without_rule(x, f, positions, columns)]
        total = f.new_zeros(())
        for name in self._proof.assignment.diagonal:
            b = torch.cat([part[name].b for part in parts], 1)
            total = total + joint_covariance(ExampleGradients(b), *self._precision[name], q)
        return total

    def _capture(
        self,
        on_gradient: Any,
        channels_last: bool = False,
        on_input: Any = None,
        differentiable: bool = False,
    ) -> Capture:
        return Capture(
            self._model,
            self._proof.assignment,
            on_input or (lambda tracked, use: None),
            on_gradient,
            channels_last=channels_last,
            keep_inputs=True,
            differentiable=differentiable,
        )

    def _check_output(self, f: Any, x: Any) -> None:
        check_output(f)
        N = num_examples(x)
        if f.dim() < 2 or (N is not None and len(f) != N):
            raise NotImplementedError(
                f"The model returned shape {tuple(f.shape)} for {N} examples; covariances support "
                "outputs (N, C), or (N, ..., C) with several positions."
            )


def _stacked(found: dict[int, Tensor], K: int) -> Tensor:
    """The gradients (M, R, K, d_out) of all K outputs; zero for outputs that do not reach a use."""
    zero = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(c, zero) for c in range(K)], 2)


def _check_rows(tracked: TrackedLayer, use: Use, N: int) -> None:
    """Raise a NotImplementedError unless it is known which of N examples a layer's rows are of."""
    rows = len(use.a) if use.rows is None else use.rows.num_examples
    if rows != N:
        raise unknown_examples(tracked, rows, N, "the covariance needs", "outputs")


def default_memory(device: torch.device) -> int:
    """Bytes that gradients may take on a device by default."""
    if device.type == "cpu":
        return CPU_MEMORY
    return (total_memory(device) or 2**34) // GPU_SHARE


def check_not_empty(x: Any) -> None:
    """Raise a ValueError for a batch without examples."""
    if num_examples(x) == 0:
        raise ValueError("The batch has no examples; leave it out.")


def check_tolerance(tolerance: float, name: str = "tolerance") -> None:
    """Raise a ValueError unless this is a share by which variances may be too large."""
    if not 0.0 <= tolerance < math.inf:
        raise ValueError(
            f"{name} must be 0 (exact) or a share by which variances may be too large, such as "
            f"0.01, not {tolerance}."
        )


def check_positions(positions: Tensor | None, outputs: torch.Size) -> Tensor:
    """The mask (N, ...) of the wanted positions of outputs (N, ..., C); all if None.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: a mask of another shape, or without any position.
    """
    if positions is None:
        return torch.ones(outputs[:-1], dtype=torch.bool)
    if positions.dtype != torch.bool:
        raise TypeError(
            f"positions has dtype {positions.dtype}; a boolean mask is needed, for example "
            "positions.bool()."
        )
    if positions.shape != outputs[:-1] or not positions.any():
        raise ValueError(
            f"positions is a mask {tuple(positions.shape)} with {int(positions.sum())} positions; "
            f"the outputs {tuple(outputs)} need {tuple(outputs[:-1])}, with at least one."
        )
    return positions


def check_classes(classes: Tensor | None, shape: tuple[int, ...], C: int) -> Tensor | None:
    """The indices of the wanted outputs at each position, (M, K); None if all are wanted.

    Args:
        classes: (K,), or (*shape, K).
        shape: the positions of the result, M in all.
        C: the number of outputs.

    Raises:
        TypeError: indices that are not integers.
        ValueError: another shape, or an index outside of 0..C-1.
    """
    if classes is None:
        return None
    if classes.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"classes has dtype {classes.dtype}; indices must be integers.")
    if not classes.numel() or (classes.dim() != 1 and classes.shape[:-1] != shape):
        raise ValueError(
            f"classes has shape {tuple(classes.shape)}; (K,) is needed, or {(*shape, 'K')} for "
            "those of each position."
        )
    wrong = classes[(classes < 0) | (classes >= C)]
    if len(wrong):
        raise ValueError(f"classes has the index {int(wrong[0])}; the outputs are 0 to {C - 1}.")
    K = classes.shape[-1]
    return classes.long().reshape(-1, K).expand(math.prod(shape), K)
