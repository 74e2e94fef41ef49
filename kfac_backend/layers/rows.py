"""Declare which example each row of a layer's input belongs to, if row n is not example n.

Graphs of a batch are concatenated, padded positions belong to no example, and some layers have the
batch axis second. A model declares this in its own forward, around the calls of its layers. It must
not be guessed from the data: a zero gradient, for example, does not mean that a row is padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kfac_backend.precision import at_least_float32


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples of M rows, where the first axes of a layer's input are its rows."""

    axes: tuple[int, ...]
    """Sizes of these axes; M is their product."""
    index: Tensor
    """(M,) int64: 0..N-1, or N for a row that does not count."""
    num_examples: int
    """N."""
    all_count: bool
    """Whether each row belongs to an example."""
    by_roots: bool = False
    """Whether reduce scales both sums by 1/√R_n; otherwise the inputs' sum alone, by 1/R_n."""
    of_positions: bool = False
    """Whether layers whose input has another shape are ignored instead of raising an error."""
    weights: Tensor | None = None
    """Each row's weight (M,) in the mean of its example's inputs; None if all are 1."""

    def on(self, device: torch.device) -> "Rows":
        """Return the same rows with the index on a device."""
        if self.index.device == device:
            return self
        return replace(self, index=self.index.to(device))

    @cached_property
    def counts(self) -> Tensor:
        """Number of rows of each example, (N,) int64."""
        return torch.bincount(self.index, minlength=self.num_examples + 1)[:-1]

    @property
    def as_given(self) -> Tensor:
        """The index as passed to `examples_of_rows`: in the rows' axes, -1 for no example."""
        return torch.where(self.index < self.num_examples, self.index, -1).view(self.axes)

    def flatten(self, x: Tensor) -> Tensor:
        """Return (*axes, ...) as (M, ...)."""
        return x.flatten(0, len(self.axes) - 1)

    def counting(self, x: Tensor) -> Tensor:
        """Return the rows of (M, ...) that belong to an example."""
        return x if self.all_count else x[self.index < self.num_examples]

    def sums(self, x: Tensor) -> Tensor:
        """Return each example's sum over its rows: (M, ...) as (N, ...), at least in float32."""
        # Entry N collects the rows that do not count, and is cut off. This needs no copy of x.
        x = at_least_float32(x)
        total = x.new_zeros(self.num_examples + 1, *x.shape[1:])
        return total.index_add_(0, self.index, x)[:-1]

    def weighted(self, x: Tensor) -> Tensor:
        """Return inputs (M, ...) times the rows' weights."""
        if self.weights is None:
            return x
        return x * self.weights.to(x).view(-1, *[1] * (x.dim() - 1))

    def padded(self, x: Tensor) -> Tensor:
        """Return each example's rows, padded with zeros at the end: (M, ...) as (N, K, ...)."""
        counts = self.counts.tolist()
        if not any(counts):
            return x.new_zeros(self.num_examples, 1, *x.shape[1:])
        # Sort by example. The rows that do not count come last.
        ordered = x[self.index.argsort(stable=True)][: sum(counts)]
        return pad_sequence(list(ordered.split(counts)), batch_first=True)


@dataclass(frozen=True)
class SharedAxes:
    """Axes of an input that all examples share, such as a table of position embeddings."""

    with_first: bool
    """Whether the first axis is a batch axis with one entry; otherwise there is no batch axis."""
    number: int
    """Number of axes."""

    def are_those_of(self, a: Tensor) -> bool:
        """Return whether an input is shared, and no earlier layer has copied it per example."""
        return a.dim() == self.number and (not self.with_first or a.shape[0] == 1)

    def for_each_example(self, x: Tensor, N: int) -> Tensor:
        """Return a shared input or output as (N, ...), expanded without a copy."""
        return x.expand(N, *x.shape[1:]) if self.with_first else x.expand(N, *x.shape)


Run = SharedAxes | Literal["examples", "consecutive", "followed", "constant"]
"""Kind of a run of a layer.

- "examples": one row for each example, or rows whose examples are declared;
- "consecutive": several consecutive rows for each example, such as the windows of an image;
- `SharedAxes`: an input that all examples share; the output is copied for each example;
- "followed": a shared input; the output is followed up to the operation that combines it with the
  examples;
- "constant": no derivative passes through its output (it is detached, or not used).
"""


_current: ContextVar[Callable[[], Rows] | None] = ContextVar("rows", default=None)
"""Returns the model's declaration. The checks of the index wait for the GPU, so only a curvature
pass makes them: training runs the same forward and must not wait."""


def consecutive_rows(M: int, N: int, device: torch.device) -> Rows | None:
    """Return M rows as M / N consecutive rows per example; None if M is N, or no multiple of N."""
    if M == N or M % N:
        return None
    index = torch.arange(M, device=device) // (M // N)
    return Rows((M,), index, N, all_count=True)


def current_rows() -> Rows | None:
    """Return the innermost `examples_of_rows` or `counted_positions`; None outside of them."""
    declared = _current.get()
    return None if declared is None else declared()


@contextmanager
def examples_of_rows(
    index: Tensor | None,
    num_examples: int = 0,
    *,
    by_roots: bool = True,
    weights: Tensor | None = None,
) -> Iterator[None]:
    """Context manager that declares the example of each row of the layers called inside.

    Without this context, row n is example n, and all its positions count. The context affects only
    the curvature. Expand averages over the rows that count. Reduce sums over each example's R_n
    rows, and divides both the sum of inputs and the sum of output gradients by √R_n. Source:
    Eschenhagen et al. 2023 (arXiv:2311.00636), appendix on graph neural networks.

    ``with examples_of_rows(graphs.edge_graph, len(graphs)): edges = self.edge_update(edges)``

    Args:
        index: integers in the shape of the first axes of these layers' inputs: the example's
            number, -1 for a row that does not count. None has no effect.
        num_examples: N, the examples of the batch, including those without rows.
        by_roots: False divides the sum of inputs by R_n and keeps the sum of gradients, as reduce
            does for equal numbers of positions. In a linear network False is exact if the network
            takes the mean over an example's rows. True is exact if the network divides their sum by
            √R_n.
        weights: the weight of each row in the mean of inputs that reduce takes, for a network that
            takes weighted means. They have the shape of the index, and the mean 1 over each
            example's rows.
    """
    declared = None
    if index is not None:
        declared = partial(_checked, index, num_examples, by_roots, weights)
    with _declared(declared):
        yield


@contextmanager
def counted_positions(mask: Tensor | None) -> Iterator[None]:
    """Context manager that declares which positions of inputs (N, R, ...) or (N·R, ...) count.

    Other positions, such as padding, are not counted in R_n. Reduce takes the mean of an example's
    inputs and the sum of its gradients. The context ignores layers whose input has another shape,
    such as (N, d) after a pooling. It may therefore enclose a whole model.

    Args:
        mask: (N, R), boolean, False for padding. None has no effect.

    Raises:
        TypeError: a mask of another dtype.
    """
    if mask is None:
        yield
        return
    if mask.dtype != torch.bool:
        raise TypeError(
            f"The mask has dtype {mask.dtype}. Pass a boolean mask, for example mask.bool()."
        )
    numbers = torch.arange(len(mask), device=mask.device).view(-1, *[1] * (mask.dim() - 1))
    index = torch.where(mask, numbers, -1)
    with _declared(partial(_checked, index, len(mask), of_positions=True)):
        yield


@contextmanager
def rows_of_sequences(
    x: Tensor, batch_first: bool, padding: Tensor | None = None
) -> Iterator[None]:
    """Declare the examples of the rows of x (N, R, ...) from the model's declaration and padding.

    A declaration for rows with other axes is about other sequences, and is ignored here. The
    sequences x are transposed so that the examples come first; ``batch_first`` says whether they
    do in the layer's input, to which an index belongs. ``padding`` (N, R) is True or -inf for
    positions that do not count.
    """
    N, R = x.shape[:2]
    rows, index, weights, by_roots, examples = current_rows(), None, None, False, N
    known_weights = None if rows is None else rows.weights
    first = batch_first or (rows is not None and rows.of_positions)  # a mask is always (N, R)
    # Declared position by position, in the order of the axes of the layer's input.
    if rows is not None and rows.axes == ((N, R) if first else (R, N)):
        index, by_roots = (rows.as_given if first else rows.as_given.T), rows.by_roots
        if known_weights is not None:
            weights = known_weights.view(N, R) if first else known_weights.view(R, N).T
    elif rows is not None and rows.axes == (N,):  # whole sequences are an example's rows
        index, examples = rows.as_given[:, None].expand(N, R), rows.num_examples
        weights = None if known_weights is None else known_weights[:, None]
    # Padding belongs to no example, for any declaration of the rest.
    if padding is not None:
        hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
        if index is None:
            index = torch.arange(N, device=x.device)[:, None].expand(N, R)
        index = index.masked_fill(hidden, -1)
    with examples_of_rows(index, examples, by_roots=by_roots, weights=weights):
        yield


@contextmanager
def _declared(rows: Callable[[], Rows] | None) -> Iterator[None]:
    token = _current.set(rows and cache(rows))
    try:
        yield
    finally:
        _current.reset(token)


def _checked(
    index: Tensor,
    N: int,
    by_roots: bool = False,
    weights: Tensor | None = None,
    of_positions: bool = False,
) -> Rows:
    """Return the rows of an index, with -1 for those that do not count, after a check."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"The examples of rows have dtype {index.dtype}. Pass integers.")
    flat = index.detach().flatten().long()
    smallest, largest = (int(v) for v in torch.aminmax(flat)) if len(flat) else (0, -1)
    if smallest < -1 or largest >= N:
        raise ValueError(
            f"A row has the example number {smallest if smallest < -1 else largest}, but there are "
            f"{N} examples. Pass numbers from 0 to N - 1, or -1 for rows that do not count."
        )
    examples = torch.where(flat < 0, N, flat)
    weights = None if weights is None else weights.expand(index.shape).flatten()
    return Rows(tuple(index.shape), examples, N, smallest >= 0, by_roots, of_positions, weights)
