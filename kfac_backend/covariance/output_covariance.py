"""Compute the output covariance J Σ Jᵀ under a Kronecker-factored posterior, without J.

One vector per output, C in total, is propagated back to the layers' outputs only, as in a curvature
pass. Each layer's inputs and output gradients are contracted with its block's eigenvectors. The
result is exact for the linearised network, for factors of any mode.

Outputs (N, R, C), one for each position of a sequence or pixel of an image, have a covariance (C,
C) at each position. It may depend on all of the example's inputs, so an example takes R·C vectors.
Each pair of an example and a position is therefore treated as a separate example, and one vector
carries as many pairs as memory allows.

Life cycle. `OutputCovariance` proves the model on its first batch, like a curvature pass, and again
if the model's modules, modes, hooks or forwards have changed. For each shape of input it measures
once how many pairs fit into the memory (`_Sizes`). A call splits its batch into parts. For each
part the model runs forward once. Then the C vectors are propagated back, and all layers' gradients
are held until the last vector. Then they are contracted and dropped, layer by layer.

The graph of the outputs refers to the capture's hooks, and these refer to the sink. So no sink may
hold the outputs: that would be a cycle through C++, which Python's collector never frees, and the
network with it.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kfac_backend.covariance.contraction import (
    LARGEST_PRODUCT,
    LayerBasis,
    covariance_part,
    layer_part,
    variances_part,
)
from kfac_backend.covariance.gradients import (
    HeldGradients,
    LayerGradients,
    LayerUse,
    ParameterGradients,
    PosteriorPrecision,
)
from kfac_backend.engine.batches import detached, example_shapes, examples, num_examples
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.factor_sums import total_memory
from kfac_backend.engine.model_calls import (
    BatchTrial,
    call_with,
    has_known_code,
    in_channels_last,
    plain_attention,
    preserve_state,
    try_batch,
)
from kfac_backend.engine.operations.example_gradients import gradients_of_examples
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import TrackedLayer, assignment_of_blocks
from kfac_backend.layers import ExampleGradients, WeightSharingRule
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.sharding import check_whole

CPU_MEMORY = 144 * 2**20
"""Bytes for gradients on a CPU."""
GPU_SHARE = 8
"""Share of a GPU's memory for gradients, as 1/8; with few examples at once it would be idle."""
PRODUCTS = 8
"""Bytes of a layer's inputs and gradients at once, as a multiple of a product's bytes."""
AT_ONCE = 2**11
"""Maximum number of entries of a vector's gradients, per vector up to 32, for a backward pass with
all vectors at once. Above it, passes with one vector are faster on a CPU."""


class _Sizes(NamedTuple):
    """Number of pairs that are processed at once, for inputs of one shape."""

    output: torch.Size
    """Shape of one example's output, (..., C)."""
    part: int | None
    """Pairs in one forward pass; None keeps batches whole."""
    channels_last: bool
    entries: int
    """Number of entries of a pair's gradients at the outputs of all layers, of one vector."""


class _Part(NamedTuple):
    """M pairs of an example and one of its positions, processed at once."""

    x: Any
    """The examples, repeated for each pair."""
    positions: Tensor
    """Position of each pair, (M,), among all positions of the output."""
    pairs: Tensor | None
    """Indices of the requested pairs; None means all. A batch that cannot be split by example runs
    whole, with pairs for all its examples."""
    numbers: Tensor
    """Indices of these pairs in the result."""


class _OtherOutputsError(NotImplementedError):
    """The outputs for inputs of one shape have another shape than before."""


class OutputCovariance:
    """Function from inputs to outputs f (N, C) and their covariances J Σ Jᵀ (N, C, C).

    For outputs (N, R, C) it returns the covariance at each position, (N, R, C, C), but not between
    positions. The cost is C backward passes per example, or R·C for sequences, whose positions
    depend on each other. `joint` returns the covariances between several inputs.

    Args:
        model: the network at the posterior's mean. It runs in its present mode (train or eval).
        precision: the posterior precision, block by block; parameters without a block are
            constants.
        memory: maximum number of bytes of gradients and their products at once, not counting the
            result and the activations of their examples. None uses 144 MiB on a CPU, and an eighth
            of a GPU's memory. To keep the limit, batches of tensors are split, down to one position
            of one example. The minimum is the example's gradients at the outputs of all layers, C
            at each position, and C gradients of a weight that is tied in two orientations.

    Raises:
        ValueError: no block, or one of a parameter that the model does not have.
    """

    def __init__(
        self, model: nn.Module, precision: PosteriorPrecision, *, memory: int | None = None
    ) -> None:
        if memory is not None and memory < 1:
            raise ValueError(f"memory must be at least one byte, not {memory}.")
        check_whole(model, "The covariance of outputs by more than the last layer")
        self._model = model
        self._precision = precision
        self._proof = self._new_proof()
        self._device = next(model.parameters()).device
        self._memory = memory or default_memory(self._device)
        largest = LARGEST_PRODUCT.get(self._device.type, LARGEST_PRODUCT["cuda"])
        self._product_bytes = max(1, min(largest, self._memory // (2 * PRODUCTS)))
        self._no_shift = torch.zeros(1, device=self._device)
        self._sizes: dict[Any, _Sizes] = {}
        self._bases: dict[TrackedLayer, LayerBasis | None] = {}

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
        added: Float[Tensor, "D"] | None = None,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs and covariances for a tensor or a mapping of tensors, without a graph.

        Args:
            x: the batch.
            positions: a mask of the requested positions, for example for outputs (N, R, C). The
                result has only these M positions, (M, C) and (M, C, C), in the mask's order.
            classes: indices of the K requested outputs: (K,) for all positions, or (..., K) for
                each example or position of the result, for example the largest ones. The result has
                K instead of C.
            variance_only: return the covariances' diagonals, (..., C). This takes as many backward
                passes, but neither computes nor holds C×C products.
            added: D values δ. The result then has the variances at each precision P + δ I, in D
                arrays (D, ..., C), for about the cost of one. P may be singular.

        Raises:
            TypeError: the model's output is not a tensor; a mask or indices of another dtype.
            NotImplementedError: outputs that are not (N, ..., C); a layer that hooks cannot follow.
            ValueError: no examples; positions or classes that the outputs do not have.
        """
        shifts = added
        if variance_only and added is None:
            shifts = self._no_shift
        with self._preserved_model():
            x = detached(x, self._device)
            check_not_empty(x)
            self._prove(x)
            key = example_shapes(x), None if classes is None else classes.shape[-1]
            former = self._sizes.get(key)
            if former and positions is not None and positions.shape[1:] != former.output[:-1]:
                del self._sizes[key]
            try:
                f, covariance = self._of_batch(x, key, positions, classes, shifts)
            except _OtherOutputsError:
                # Inputs of the same shape had other outputs, for example with another mask.
                del self._sizes[key]
                f, covariance = self._of_batch(x, key, positions, classes, shifts)
        if added is not None:
            return f, covariance.movedim(-1, 0)
        return f, covariance.squeeze(-1) if variance_only else covariance

    def _of_batch(
        self,
        x: Any,
        key: Any,
        positions: Tensor | None,
        classes: Tensor | None,
        added: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and covariances (..., C, C), or with ``added`` variances (..., C, D).

        The batch is divided into parts; ``key`` is the inputs' shape.

        Raises:
            _OtherOutputsError: the outputs have another shape than earlier ones for this key.
        """
        if key not in self._sizes:
            self._sizes[key] = self._measure(x, key[1])
        sizes = self._sizes[key]
        N = num_examples(x)
        if positions is None and classes is None and N and len(sizes.output) == 1:
            if sizes.part is None or N <= sizes.part:  # the usual case: one part, and all outputs
                all_of_them = torch.arange(N, device=self._device)
                part = _Part(x, torch.zeros_like(all_of_them), None, all_of_them)
                return self._part(part, None, sizes, added=added)
        mask = self._mask(x, sizes, positions)
        M = int(mask.sum())
        shape = tuple(mask.shape) if positions is None else (M,)
        columns = check_classes(classes, shape, sizes.output[-1])
        columns = None if columns is None else columns.to(self._device)
        result = None
        for part in self._parts(x, sizes, mask):
            of_part = columns[part.numbers] if columns is not None else None
            covariance = self._part(part, of_part, sizes, added=added)
            if part.pairs is not None:
                covariance = tuple(t[part.pairs] for t in covariance)
            if result is None:
                result = tuple(t.new_empty(M, *t.shape[1:]) for t in covariance)
            result[0][part.numbers], result[1][part.numbers] = covariance
        assert result is not None  # a position is chosen
        outputs, covariances = result
        return outputs.unflatten(0, shape), covariances.unflatten(0, shape)

    def joint(
        self, x: Float[Tensor, "T q *shape"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "T q K"], Float[Tensor, "T q_K q_K"]]:
        """Return outputs and covariances of T sets of q inputs; output c of input p is p·K + c.

        Both are differentiable in the inputs if these require a gradient. Parameters and their
        posterior are constants. All sets are computed at once, with C backward passes, whose graph
        is held in memory if the inputs require a gradient.

        Args:
            x: the inputs, in the model's dtype and on its device.
            classes: indices of the K requested outputs; None means all C.

        Raises:
            TypeError: the model's output is not a tensor.
            ValueError: no inputs; indices of outputs that the model does not have.
            NotImplementedError: outputs that are not (N, C); a layer that hooks cannot follow.
        """
        if x.dim() < 3 or not x.shape[:2].numel():
            raise ValueError(
                f"x has shape {tuple(x.shape)}. Pass sets of inputs (T, q, ...) with at least one "
                "input, or x[None] for a single set."
            )
        with self._preserved_model(), plain_attention():
            q, differentiable = x.shape[1], torch.is_grad_enabled() and x.requires_grad
            flat = (x.clone() if x.is_inference() else x).flatten(0, 1)
            flat = flat if differentiable else flat.detach()
            self._prove(flat.detach())
            columns = None if classes is None else torch.tensor(classes, device=x.device)
            all_of_them = torch.arange(len(flat), device=x.device)
            part = _Part(flat, torch.zeros_like(all_of_them), None, all_of_them)
            f, covariance = self._part(part, columns, q=q, differentiable=differentiable)
        return f.unflatten(0, x.shape[:2]), covariance

    def _new_proof(self) -> Proof:
        sizes = {name: block.numel for name, (block, _) in self._precision.items()}
        return Proof(self._model, assignment_of_blocks(self._model, sizes))

    @contextmanager
    def _preserved_model(self) -> Iterator[None]:
        """Context in which the model runs in full precision, and whose end restores its state."""
        if self._proof.is_outdated():
            self._proof = self._new_proof()
        layers = (tracked.layer for tracked in self._proof.assignment.layers)
        # Inference mode would record no graph for the backward passes.
        with full_float32(), torch.inference_mode(False), preserve_state(self._model, *layers):
            yield

    def _prove(self, x: Any) -> None:
        """Prove that the hooks capture all uses of the parameters, unless it is proved."""
        N = num_examples(x)
        if self._proof.is_made(N):
            return
        if N == 1 and isinstance(x, Tensor | dict):
            # `_parts` repeats an example for its positions. What fits a single row may not fit two.
            twice = examples(x, torch.tensor([0, 0]))
            if try_batch(self._model, twice, 2).can_split:
                x, N = twice, 2
        self._proof.make(x, N)
        for name in self._proof.assignment.diagonal:
            block = self._precision[name][0]
            if block.Q_A is not None or block.Q_B.shape[-1] > 1:
                self._proof = self._new_proof()  # the next call checks again
                raise NotImplementedError(
                    f"Hooks cannot see the gradient of '{name}', although the posterior has a "
                    "Kronecker-factored block of it. The network's code or hooks may have changed "
                    "since the fit. Restore them, or fit again, which names the cause."
                )
        self._gradients = LayerGradients(self._proof.assignment, self._precision)
        self._bases.clear()
        self._sizes.clear()  # the proof may have found other rules and runs

    def _measure(self, x: Any, K: int | None) -> _Sizes:
        """Measure how many pairs of this shape fit into the memory, by one vector's gradients."""
        N = num_examples(x)
        # A single example is repeated for its positions, as in the proof.
        repeats = BatchTrial(can_split=self._proof.batch.can_split)
        batch = repeats if N == 1 else try_batch(self._model, x, N)
        x = examples(x, slice(2)) if batch.can_split else x
        measured = HeldGradients(self._gradients)
        with self._capture(measured) as capture:
            f = capture.forward(x)
            self._check_output(f, x)
            capture.backward(f, [torch.zeros_like(f)])  # only shapes are recorded
        # One vector's gradients were measured, but K of them are held. The remaining memory after
        # the products determines the number of pairs.
        of_pair = (measured.nbytes * (K or f.shape[-1]) + f.nbytes) // len(f)
        room = self._memory - (PRODUCTS + 2) * self._product_bytes
        part = max(1, room // max(1, of_pair))
        entries = measured.nbytes // f.element_size() // len(f)
        part = part if batch.can_split else None
        return _Sizes(f.shape[1:], part, batch.channels_last, entries)

    def _mask(self, x: Any, sizes: _Sizes, positions: Tensor | None) -> Tensor:
        """Return the mask of the requested positions: (N,) for outputs (N, C), else (N, ...)."""
        N = num_examples(x)
        if N is None:  # only the model's output shows it
            with torch.no_grad():
                N = len(call_with(self._model, {}, x))
        return check_positions(positions, torch.Size((N, *sizes.output))).to(self._device)

    def _parts(self, x: Any, sizes: _Sizes, mask: Tensor) -> Iterator[_Part]:
        by_position = mask.flatten(1) if mask.dim() > 1 else mask[:, None]
        of_example, of_positions = by_position.nonzero().T
        numbers = torch.arange(len(of_example), device=mask.device)
        if num_examples(x) is None or sizes.part is None:
            # Run the whole batch for each rank: first with every example's first requested
            # position, then with every one's second, and so on.
            rank = by_position.long().cumsum(1)[of_example, of_positions]
            for k in range(1, int(by_position.sum(1).max()) + 1):
                now = rank == k
                position = numbers.new_zeros(len(mask))
                position[of_example[now]] = of_positions[now]
                yield _Part(x, position, of_example[now], numbers[now])
            return
        whole = mask.dim() == 1 and len(of_example) == len(mask)
        # Group pairs with similar positions. They reach similar positions of layers, so the
        # products can leave out more of the others.
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
        self,
        part: _Part,
        classes: Tensor | None,
        sizes: _Sizes | None = None,
        *,
        q: int | None = None,
        added: Tensor | None = None,
        differentiable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs (M, K), and covariances (M, K, K), of a part of the pairs.

        With ``added`` return the variances at each of D precisions, (M, K, D), instead. With q,
        return outputs (M, K) and the covariances (T, q·K, q·K) of M = T·q examples.
        """
        sink = HeldGradients(self._gradients, differentiable=differentiable)
        # Torch can map the backward pass of known code over vectors, even if examples mix. Hooks of
        # the capture come later.
        is_known = q is None and has_known_code(self._model)
        # Step 1: the forward pass, and one vector for each requested output. The vector is one at
        # that output of all pairs at once: examples do not mix, so each pair gets its own
        # gradients.
        with self._capture(sink, sizes is not None and sizes.channels_last) as capture:
            f = capture.forward(part.x)
            self._check_output(f, part.x, sizes)
            if q is not None and f.dim() != 2:
                raise NotImplementedError(
                    f"The model returned shape {tuple(f.shape)} for {len(f)} inputs. Joint "
                    "covariances need outputs (N, C), as in regression."
                )
            M, index = len(f), torch.arange(len(f), device=f.device)
            if q is not None:
                classes = check_classes(classes, (M,), f.shape[-1])
            columns = self._columns(f, part, classes)  # (M, K)
            K = columns.shape[1]
            sink.num_examples = M

            is_small = sizes is not None and M * sizes.entries <= AT_ONCE * min(K, 32)
            with torch.autocast(f.device.type, enabled=False):
                if is_known and is_small and K > 1 and f.requires_grad:
                    vectors = _unit_vectors(f, part.positions, columns)
                    sink.store_at_once(partial(capture.backward, f), vectors)
                else:
                    each = columns.split(1, 1)
                    capture.backward(f, (_unit_vectors(f, part.positions, c)[0] for c in each))
        # Step 2: contract the gradients, layer by layer. Each layer's gradients are dropped before
        # the next layer's are rotated.
        f = f if differentiable else f.detach()  # frees the graph before the products
        result = f.flatten(1, -2) if f.dim() > 2 else f[:, None]
        result = result[index[:, None], part.positions[:, None], columns]
        shape = (M, K, K) if q is None else (M // q, q * K, q * K)
        shape = shape if added is None else (M, K, len(added))
        covariance = at_least_float32(result.detach()).new_zeros(shape)
        with torch.autocast(f.device.type, enabled=False), torch.set_grad_enabled(differentiable):
            uses = sink.take()
            if q is None and (added is None or added is self._no_shift):
                uses = self._add_layers(uses, sink.uses, covariance, added is not None)
            for subset, gradients in self._gradients_of(uses, sink, part, f, columns, q):
                covariance[subset] += self._contracted(gradients, added, q or 1)
        return result, covariance

    def _add_layers(
        self,
        layer_uses: Iterator[LayerUse],
        uses: Mapping[TrackedLayer, int],
        covariance: Tensor,
        variance_only: bool,
    ) -> Iterator[LayerUse]:
        """Add the parts of layers in place to which `layer_part` applies; yield all other uses."""
        for tracked, use, rows in layer_uses:
            basis, (N, R, K, d_out) = self._basis(tracked), rows.shape
            if basis is not None and uses[tracked] == 1 and use.rows is None:
                d_in, itemsize = len(basis.Q_A), basis.Q_B.element_size()
                # The general method splits products, and inputs and gradients, of more bytes.
                fits = R == 1 or N * K * d_in * d_out * itemsize <= self._product_bytes
                nbytes = 2 * N * R * (d_in + K * d_out) * itemsize
                if fits and nbytes <= PRODUCTS * self._product_bytes:
                    a = self._gradients.rules[tracked].inputs(use.a)[0]  # pyright: ignore
                    covariance += layer_part(a, rows, basis, variance_only=variance_only)
                    continue
            yield tracked, use, rows

    def _basis(self, tracked: TrackedLayer) -> LayerBasis | None:
        """Return the basis of a layer for `layer_part`; None if the general method is needed.

        The layer needs a weight B ⊗ A of its own, and a bias, if any, with the same eigenvectors.
        """
        if tracked not in self._bases:
            rule, basis = self._gradients.rules[tracked], None
            blocks = {local: self._precision[name] for local, name in tracked.parameters.items()}
            bias = blocks.get("bias")
            if (
                isinstance(rule, WeightSharingRule)
                and rule.same_gradients
                and not (rule.transposed or tracked.slots or self._gradients.is_tied(tracked))
                and "weight" in blocks
            ):
                block, s = blocks["weight"]
                Q_B, Q_A = block.Q_B, block.Q_A
                is_shared = bias is None or torch.equal(bias[0].Q_B, Q_B)
                if Q_A is not None and Q_B.dim() == Q_A.dim() == 2 and is_shared:
                    of_bias = None if bias is None else bias[1].flatten().reciprocal()
                    basis = LayerBasis(Q_B, Q_A, s.reciprocal(), of_bias)
            self._bases[tracked] = basis
        return self._bases[tracked]

    def _contracted(self, gradients: ParameterGradients, added: Tensor | None, q: int) -> Tensor:
        """Return one parameter's part of the covariances, or with ``added`` of the variances."""
        if added is None:
            return covariance_part(gradients, self._product_bytes, q=q)
        return variances_part(gradients, added, self._product_bytes)

    def _gradients_of(
        self,
        uses: Iterator[LayerUse],
        sink: HeldGradients,
        part: _Part,
        f: Tensor,
        columns: Tensor,
        q: int | None,
    ) -> Iterator[tuple[slice, ParameterGradients]]:
        """Yield the gradients of one parameter after the other, with their slice of examples."""
        K = columns.shape[1]
        # Some examples at a time, unless they belong together.
        most_bytes = PRODUCTS * self._product_bytes if q is None else None
        yield from self._gradients.by_parameter(uses, sink.uses, most_bytes)
        names, index = self._proof.assignment.diagonal, torch.arange(K, device=f.device)
        if not names:
            return

        def vectors(subset: slice) -> Tensor:
            """Return a unit vector for each of the requested outputs (n, K, ..., C)."""
            unit = f.new_zeros(len(f[subset]), K, f[0, ..., 0].numel(), f.shape[-1])
            rows = torch.arange(len(unit), device=f.device)[:, None]
            unit[rows, index, part.positions[subset][:, None], columns[subset]] = 1
            return unit.view(*unit.shape[:2], *f.shape[1:])

        entries = self._product_bytes // f.element_size() if q is None else sys.maxsize
        for subset, by_name in gradients_of_examples(
            self._model, names, part.x, f, vectors, K,
            entries=entries, differentiable=torch.is_grad_enabled(),
        ):  # fmt: skip
            for name, J in by_name.items():  # as P groups of one entry, (P, n, 1, K, 1)
                J = ExampleGradients(J.flatten(2).movedim(2, 0)[:, :, None, :, None])
                yield subset, ParameterGradients(*self._precision[name], [(J, False)])

    def _columns(self, f: Tensor, part: _Part, classes: Tensor | None) -> Tensor:
        """Return the indices of the requested outputs of each pair, (M, K)."""
        if classes is None:
            return torch.arange(f.shape[-1], device=f.device).expand(len(f), -1)
        if part.pairs is None:
            return classes
        columns = classes.new_zeros(len(f), classes.shape[-1])
        columns[part.pairs] = classes
        return columns

    def _capture(self, sink: Sink, channels_last: bool = False) -> Capture:
        constants = in_channels_last(self._model) if channels_last else None
        return Capture(self._model, self._proof.assignment, sink, constants=constants)

    def _check_output(self, f: Tensor, x: Any, sizes: _Sizes | None = None) -> None:
        N = num_examples(x)
        if f.dim() < 2 or (N is not None and len(f) != N):
            raise NotImplementedError(
                f"The model returned shape {tuple(f.shape)} for {N} examples. Covariances need "
                "outputs (N, C), or (N, ..., C) with several positions."
            )
        if sizes is not None and f.shape[1:] != sizes.output:
            raise _OtherOutputsError(
                f"The outputs have shape {tuple(f.shape[1:])} for an example, but had shape "
                f"{tuple(sizes.output)} for others of the same shape. Covariances need outputs "
                "whose shape depends on the shape of the inputs alone."
            )


def _unit_vectors(f: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return k vectors (k, *f.shape) that are 1 at each pair's position and column, (M, k)."""
    M, k = columns.shape
    unit = torch.zeros(k, *f.shape, dtype=f.dtype, device=f.device)
    number, pair = (torch.arange(n, device=f.device) for n in (k, M))
    unit.view(k, M, -1, f.shape[-1])[number[:, None], pair, positions, columns.T] = 1
    return unit


def default_memory(device: torch.device) -> int:
    """Return the default number of bytes for gradients on a device."""
    if device.type == "cpu":
        return CPU_MEMORY
    return (total_memory(device) or 2**34) // GPU_SHARE


def check_not_empty(x: Any) -> None:
    """Raise a ValueError for a batch without examples."""
    if num_examples(x) == 0:
        raise ValueError("The batch has no examples. Omit it.")


def check_positions(positions: Tensor | None, outputs: torch.Size) -> Tensor:
    """Return the mask (N, ...) of the requested positions of outputs (N, ..., C); all by default.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: a mask of another shape, or without any position.
    """
    if positions is None:
        return torch.ones(outputs[:-1], dtype=torch.bool)
    if positions.dtype != torch.bool:
        raise TypeError(
            f"positions has dtype {positions.dtype}. Pass a boolean mask, for example "
            "positions.bool()."
        )
    if positions.shape != outputs[:-1] or not positions.any():
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} and selects {int(positions.sum())} "
            f"positions. Outputs {tuple(outputs)} need shape {tuple(outputs[:-1])} and at least "
            "one position."
        )
    return positions


def check_classes(classes: Tensor | None, shape: tuple[int, ...], C: int) -> Tensor | None:
    """Return the indices of the requested outputs per position, (M, K); None for all.

    Args:
        classes: (K,), or (*shape, K).
        shape: the positions of the result, M in total.
        C: the number of outputs.

    Raises:
        TypeError: indices that are not integers.
        ValueError: another shape, or an index outside of 0..C-1.
    """
    if classes is None:
        return None
    if classes.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"classes has dtype {classes.dtype}. Pass integers.")
    if not classes.numel() or (classes.dim() != 1 and classes.shape[:-1] != shape):
        raise ValueError(
            f"classes has shape {tuple(classes.shape)}. Pass (K,), or {(*shape, 'K')} for separate "
            "classes at each position."
        )
    wrong = classes[(classes < 0) | (classes >= C)]
    if len(wrong):
        raise ValueError(
            f"classes has the index {int(wrong[0])}, but the outputs are 0 to {C - 1}."
        )
    K = classes.shape[-1]
    return classes.long().reshape(-1, K).expand(math.prod(shape), K)
