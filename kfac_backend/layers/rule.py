"""The contract of a rule: what a kind of layer must compute, so that a pass can make its blocks.

Life cycle. A pass makes one rule for each layer with its first batch, and may let rules of tied
layers `Rule.share` their sums. For each part of a batch it calls `Rule.begin_forward`,
`Rule.add_input` for each use, and `Rule.end_forward`; then, for each vector that is propagated
back, `Rule.add_gradient` for each use that the vector reaches, and `Rule.end_vector`. All inputs
are known before the first gradient, because the forward pass comes first. The rule holds the sums
over all batches, and of the present batch only what must wait for other uses. After the last batch
`Rule.block_sums` returns the sums, and the rule is dropped.

A predictive calls `Rule.position_gradients` and `Rule.example_gradients` instead. These add
to no sum.

A parameter may be used several times in a forward pass, by one layer that runs twice or by layers
that share it. In expand mode each use just adds more rows. In reduce mode, and for elementwise
parameters, a block is the sum of outer products of one row per example, and that row is itself a
sum over all uses. So the sum waits, in `InputFactor` and `GradientFactor`, until the last use: the
last of the forward pass for inputs, the last of each vector for gradients. Outer products of single
uses would drop the cross terms between uses, and the block would be wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import Gram
from kfac_backend.layers.rows import Rows
from kfac_backend.options import Approximation
from kfac_backend.precision import at_least_float32

__all__ = [
    "BlockSums",
    "ExampleGradients",
    "GradientFactor",
    "InputFactor",
    "PositionSums",
    "Rule",
    "Use",
    "dense_gradients",
    "summed_gradients",
]


@dataclass(frozen=True, eq=False)
class Use:
    """One run of a layer in a forward pass."""

    a: Tensor
    """The layer's input, detached: (N, ...), or (M, ...) with `rows`."""
    rows: Rows | None = None
    """Which example each of the M rows belongs to; None where row n is example n."""


class BlockSums(NamedTuple):
    """The sums of one parameter's block, before scaling; the factor over its rows comes first."""

    B: Tensor
    """Sum over the data (G, d_out, d_out)."""
    A: Tensor | None = None
    """Sum over all terms (G, d_in, d_in), or (d_in, d_in) for all groups; None for a parameter
    without an input factor."""
    num_terms: int = 0
    """The number of terms in A."""


class PositionSums:
    """Sums over positions, computed once for all layers that receive the same gradient tensor.

    The gradient with respect to x + θ is also that with respect to x. So a convolution and the bias
    behind it, or the two ends of a residual branch, receive the same tensor, one after the other:
    remembering the last tensor is enough.
    """

    def __init__(self) -> None:
        self._source: tuple[Tensor, int, int] | None = None
        self._sums = torch.empty(0)

    def __call__(self, b: Float[Tensor, "N ..."], features: int) -> Float[Tensor, "N d"]:
        """Σ over all axes of b but the first and the axis ``features``, in float32 at least."""
        # Identity is not enough: autograd may accumulate into b in place (a new version).
        version = b._version  # pyright: ignore[reportPrivateUsage]
        known = self._source
        if known is None or known[0] is not b or known[1:] != (version, features):
            self._sums = _over_positions(b, features)
            self._source = (b, version, features)
        return self._sums

    def clear(self) -> None:
        """Release the last tensor, at the end of a part."""
        self._source, self._sums = None, torch.empty(0)


class GradientFactor:
    """Σ b bᵀ, where b may be a sum over the parameter's uses.

    Args:
        gram: sums the outer products.
        by_example: whether uses are summed before the outer product; otherwise each use adds rows
            of its own.
    """

    def __init__(self, gram: Gram, by_example: bool) -> None:
        self.gram = gram
        self.by_example = by_example
        self.roots: Tensor | None = None
        """(N,) √R_n by which each example's sum is divided; None without, see `InputFactor`."""
        # Uses in this forward pass, and those of them that the present vector has reached so far.
        self._uses = self._seen = 0
        self._waiting: Tensor | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._uses = 0

    def count_use(self) -> None:
        """One more use in this forward pass."""
        self._uses += 1

    def add(self, rows: Float[Tensor, "G M d"]) -> None:
        """Add one use's rows of one or more vectors; if by_example, row n of all uses is added up.

        After the last use the sum goes into the Gram matrix at once, which releases its memory. A
        vector need not reach all uses; then `end_vector` adds what there is.
        """
        if not self.by_example or self._uses <= 1:
            self.gram.add(self._scaled(rows))
            return
        rows = at_least_float32(rows)
        # A clone, since `rows` may be the tensor that autograd or `PositionSums` still holds.
        self._waiting = rows.clone() if self._waiting is None else self._waiting.add_(rows)
        self._seen += 1
        if self._seen == self._uses:
            self.end_vector()

    def end_vector(self) -> None:
        """Add the waiting sum; uses that the vector did not reach have gradient zero."""
        if self._waiting is not None:
            self.gram.add(self._scaled(self._waiting))
            self._waiting, self._seen = None, 0

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.roots is None:
            return rows
        by_vector = at_least_float32(rows).unflatten(1, (-1, len(self.roots)))
        return (by_vector / self.roots[:, None].to(by_vector.dtype)).flatten(1, 2)


class InputFactor:
    """Σ a aᵀ over positions, or over examples' means â of the positions of all uses.

    In the first case a rule adds to ``gram`` itself. In the second it calls `add_sums`.

    Args:
        gram: sums the outer products.
    """

    def __init__(self, gram: Gram) -> None:
        self.gram = gram
        self.num_terms = 0
        # Of this forward pass, over its uses so far: positions per example, and their sums.
        self._counts: int | Tensor = 0
        self._waiting: Tensor | None = None
        self._by_roots: bool | None = None

    def begin_forward(self) -> None:
        """Forget the uses of the last forward pass."""
        self._counts, self._waiting = 0, None

    def add_sums(
        self, sums: Float[Tensor, "G N d"], positions: int | Tensor, by_roots: bool
    ) -> None:
        """Add one use's sums of each example over ``positions``, or (N,) of them.

        They are scaled in `end_forward`, so that uses with different R are weighted by their
        positions.
        """
        if self._by_roots not in (None, by_roots):
            raise NotImplementedError(
                "A weight's inputs are scaled by 1/√R_n in one use (examples_of_rows) and not in "
                "another. Use examples_of_rows in all of its uses, or in none."
            )
        self._by_roots = by_roots
        self._waiting = sums if self._waiting is None else self._waiting + sums
        self._counts = self._counts + positions

    @property
    def roots(self) -> Tensor | None:
        """(N,): √R_n over all uses, which divides the gradients' sums as well, or None.

        None if only the inputs' sums are divided, by R_n. Known after the last use of a forward
        pass.
        """
        if not self._by_roots or isinstance(self._counts, int):
            return None
        return self._counts.clamp(min=1).double().sqrt()

    def end_forward(self) -> None:
        """Add the examples' sums of all uses."""
        if self._waiting is None:
            return
        scale: Any = self.roots
        if scale is None:
            scale = self._counts
        if isinstance(scale, Tensor):
            scale = scale.clamp(min=1).to(self._waiting.dtype)[:, None]
        means = self._waiting / scale
        self.gram.add(means)
        self.num_terms += means.shape[1]
        self._waiting = None


def _over_positions(b: Tensor, features: int) -> Tensor:
    features %= b.dim()
    positions = [axis for axis in range(1, b.dim()) if axis != features]
    if not positions:
        return at_least_float32(b)
    return b.sum(positions, dtype=torch.promote_types(b.dtype, torch.float32))


class ExampleGradients(NamedTuple):
    """Gradients of C outputs in one parameter, example by example: Σ_r b_nrc ⊗ a_nr per group."""

    b: Float[Tensor, "G N R C d_out"]
    """Gradients with respect to the layer's output."""
    a: Float[Tensor, "G N R d_in"] | None = None
    """The layer's inputs; None for a parameter without an input factor, whose gradient is Σ_r b."""


class Rule(ABC):
    """Sums up, for one layer and one pass, what its inputs and output gradients add to its blocks.

    A rule need not know the kind of Fisher or autocast: the pass (`curvature`) takes care of both.
    It knows parameters by their local names ("weight", not "block.0.weight"). The tensors that it
    receives are detached; their first axis is the examples, or the rows.

    Args:
        layer: the layer.
        mode: expand, reduce, or a mode for each shared axis.
        names: the trainable parameters of the layer.
    """

    parameter_names: ClassVar[frozenset[str]]
    """The local names of the parameters that the rule knows."""

    needs_input: ClassVar[bool] = False
    """Whether `add_gradient` needs the layer's input, which is then kept for the backward."""

    needs_examples: ClassVar[bool] = False
    """Whether the block needs each example's sum in expand mode, too. Then it must be known which
    example each row belongs to. In reduce mode all rules need that."""

    takes_integers: ClassVar[bool] = False
    """Whether the layer's input consists of integers, as an embedding's does."""

    features: ClassVar[int] = -1
    """The axis of the features in the layer's input and output: -1, or 1 for channels. All other
    axes except the first are positions."""

    transposed: ClassVar[bool] = False
    """Whether the weight is stored (d_in, d_out): its block is A ⊗ B instead of B ⊗ A."""

    alternatives: ClassVar[tuple[type["Rule"], ...]] = ()
    """Rules for derived layers that do the same along other axes, such as a LayerNorm over the
    channels of images. The proof takes the first of them that matches."""

    def __init__(self, layer: Any, mode: Approximation, names: Collection[str]) -> None:
        self.layer = layer
        self.mode: Approximation = mode
        self.names = names

    def use_diagonals(self, above: int | None) -> None:  # noqa: B027
        """Keep factors over more than ``above`` rows by their diagonal; called before any input.

        Args:
            above: see ``diagonal_above`` of `CurvatureOptions`; None keeps them whole.
        """

    def factor_sizes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(local name, "B" or "A") -> (G, d) of each factor that is kept whole, to estimate memory.

        Small factors may be left out.
        """
        return {}

    @classmethod  # noqa: B027
    def check(cls, layer: Any) -> None:
        """Raise a NotImplementedError if the layer has an option that the rule does not support."""

    def begin_forward(self) -> None:  # noqa: B027
        """Prepare for a forward pass, of examples that were not seen before."""

    @abstractmethod
    def add_input(self, use: Use) -> None:
        """Add the input of one use, which is one run of the layer."""

    def end_forward(self) -> None:  # noqa: B027
        """Called when the inputs of all uses in this forward pass have been added.

        Only now is an example's sum over several uses of one tensor complete.
        """

    @abstractmethod
    def add_gradient(self, use: Use, b: Tensor, sums: PositionSums) -> None:
        """Add the gradients of one or more backward vectors with respect to one use's output.

        Args:
            use: the use; it has its input only if `needs_input`.
            b: the gradients (V·N, ...), which is the output's shape for V = 1 vector.
            sums: sums of b over positions, shared between layers.
        """

    def end_vector(self) -> None:  # noqa: B027
        """Called when the gradients of all uses have been added, for one or several vectors."""

    @abstractmethod
    def share(self, name: str, other: "Rule", others_name: str) -> None:
        """Add to the sums of another rule from now on, since both parameters are one tensor."""

    @abstractmethod
    def block_sums(self) -> dict[str, BlockSums]:
        """The sums so far of all ``names``, except those whose sums another rule has (`share`)."""

    @abstractmethod
    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Output gradients with a single axis of positions, as `example_gradients` takes them.

        Args:
            use: the use, with its input (N, ...).
            b: gradients (M, ...) of one or more vectors, M = V·N.
        """

    @abstractmethod
    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """The gradients in the parameters ``names``, separately for each example (or row).

        Args:
            a: the layer's input (N, ...).
            b: the C outputs' `position_gradients`.
        """


def dense_gradients(gradients: ExampleGradients, transposed: bool) -> Float[Tensor, "N C P"]:
    """Σ_r b ⊗ a of each example and output, flattened as PyTorch flattens the parameter.

    Args:
        gradients: its factors.
        transposed: whether the parameter is stored inputs first.
    """
    if gradients.a is None:
        return gradients.b.sum(2).movedim(0, 2).flatten(2)  # (G, N, C, d) -> (N, C, G·d)
    order = "gnrco,gnri->ncgio" if transposed else "gnrco,gnri->ncgoi"
    return torch.einsum(order, gradients.b, gradients.a.to(gradients.b.dtype)).flatten(2)


def summed_gradients(
    rule: Rule, use: Use, b: Float[Tensor, "M ..."]
) -> dict[str, Float[Tensor, " P"]]:
    """Local name -> the gradient summed over all rows, from one gradient in the layer's output."""
    positions = rule.position_gradients(use, b)  # (M, R, d_out)
    return {
        name: dense_gradients(_as_one_example(gradients), rule.transposed)[0, 0]
        for name, gradients in rule.example_gradients(use.a, positions[:, :, None]).items()
    }


def _as_one_example(gradients: ExampleGradients) -> ExampleGradients:
    """All examples' positions as those of one, whose gradient is the sum over the examples.

    It is computed in one product, without an array (P,) for each example.
    """
    b, a = gradients
    return ExampleGradients(
        b.flatten(1, 2)[:, None], None if a is None else a.flatten(1, 2)[:, None]
    )
