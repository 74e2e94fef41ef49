"""Base class of rules, which compute the blocks of one kind of layer in a pass.

Life cycle. A pass makes one rule for each layer with its first batch, and may let rules of tied
layers `Rule.share` their sums. For each part of a batch it calls `Rule.add_input` for each use.
Then, for each vector that is propagated back, it calls `Rule.add_gradient` for each use that the
vector reaches, and `gram.FactorSum.end` for all factors, which at the first vector adds the inputs.
All inputs are known before the first gradient, because the forward pass comes first. The rule holds
the sums over all batches. Of the present batch it holds only sums that wait for other uses. After
the last batch `Rule.block_sums` returns the sums, and the rule is dropped.

A predictive calls `Rule.position_gradients` and `Rule.example_gradients` instead. These add to no
sum.

A parameter may be used several times in a forward pass, by one layer that runs twice or by layers
that share it. In expand mode each use just adds more rows. In reduce mode, and for elementwise
parameters, a block is the sum of outer products of one row per example, and that row is itself a
sum over all uses. So the sum waits, in its `FactorSum`, until the last use in the forward pass, or
the last one that a vector reaches. Outer products of single uses would drop the cross terms between
uses, and the block would be wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import Factor, FactorSum
from kfac_backend.layers.rows import Rows
from kfac_backend.options import ExpandScaling, Mode
from kfac_backend.precision import at_least_float32

FEWEST_POSITIONS = 256
"""Minimum number of positions for a single product in `summed_gradients`."""


@dataclass(frozen=True, eq=False)
class Use:
    """One run of a layer in a forward pass."""

    a: Tensor
    """The layer's input, detached: (N, ...), or (M, ...) with `rows`."""
    rows: Rows | None = None
    """The example of each of the M rows; None if row n is example n."""


class BlockSums(NamedTuple):
    """A layer's sums of one parameter's block, additive over the data, before scaling."""

    B: Factor
    """The factor over the parameter's rows, a sum over the data: (d_out, d_out), or (G, ...)."""
    A: Factor | None = None
    """Sum over all terms, (d_in, d_in) or (G, ...); None for a parameter without an input
    factor."""
    num_terms: int = 0
    """The number of terms in A."""
    per_example: bool = False
    """Whether A is divided by the number of examples, and not by the number of its terms."""
    slot: tuple[int, int] = (0, 1)
    """(index, count) of this map among the maps in the parameter; (0, 1) for a single map."""

    def map(self, change: Callable[[Factor], Factor]) -> "BlockSums":
        """Return the sums with each factor replaced."""
        return self._replace(B=change(self.B), A=None if self.A is None else change(self.A))


class ExampleGradients(NamedTuple):
    """Gradients of C outputs in one parameter, example by example: Σ_r b_nrc ⊗ a_nr per group."""

    b: Float[Tensor, "G N R C d_out"]
    """Gradients with respect to the layer's output."""
    a: Float[Tensor, "G N R d_in"] | None = None
    """The layer's inputs; None for a parameter without an input factor, whose gradient is Σ_r b."""


class Rule(ABC):
    """Sums a layer's contributions to its blocks in one pass, from its inputs and output gradients.

    A rule does not depend on the kind of Fisher or on autocast, which the pass (`curvature`)
    handles. It uses the parameters' local names ("weight", not "block.0.weight"). Its tensors are
    detached; their first axis is the examples, or the rows.

    Args:
        layer: the layer.
        mode: expand or reduce.
        names: the trainable parameters of the layer.
        diagonal_above: number of rows of a factor above which only its diagonal is computed, see
            `CurvatureOptions`; None computes whole factors.
        expand_scaling: see `CurvatureOptions`.
    """

    parameter_names: ClassVar[frozenset[str]]
    """The local names of the parameters that the rule supports."""

    needs_input: ClassVar[bool] = False
    """Whether `add_gradient` needs the layer's input, which is then stored for the backward
    pass."""

    needs_examples: ClassVar[bool] = False
    """Whether the block also needs each example's sum in expand mode. The example of each row must
    then be known. In reduce mode all rules need this."""

    takes_integers: ClassVar[bool] = False
    """Whether the layer's input consists of integers, as an embedding's does."""

    features: ClassVar[int] = -1
    """The axis of the features in the layer's input and output: -1, or 1 for channels. All other
    axes except the first are positions."""

    transposed: ClassVar[bool] = False
    """Whether the weight is stored as (d_in, d_out). Its block is then A ⊗ B instead of B ⊗ A."""

    alternatives: ClassVar[tuple[type["Rule"], ...]] = ()
    """Rules for derived layers that compute the same along other axes, such as a LayerNorm over the
    channels of images. The proof selects the first one that matches."""

    def __init__(
        self,
        layer: Any,
        mode: Mode,
        names: Collection[str],
        diagonal_above: int | None = None,
        expand_scaling: ExpandScaling = "positions",
    ) -> None:
        self.layer = layer
        self.mode: Mode = mode
        self.names = names
        self.diagonal_above = diagonal_above
        self.per_example = mode == "expand" and expand_scaling == "examples"
        """Whether input factors are divided by the number of examples, in expand mode."""
        self.A: dict[str, FactorSum] = {}
        """Sums of input factors by local name, for parameters that have one."""
        self.B: dict[str, FactorSum] = {}
        """Sums of gradient factors by local name. Two names may have the same one."""
        self._shared: set[str] = set()  # parameters whose sums another rule reports
        self.make_sums()

    @classmethod
    def input_of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the layer's input, from the arguments of its forward."""
        if args:
            return args[0]
        return kwargs.get("input", next(v for v in kwargs.values() if isinstance(v, Tensor)))

    @abstractmethod
    def make_sums(self) -> None:
        """Create empty sums in ``A`` and ``B``."""

    @classmethod  # noqa: B027
    def check(cls, layer: Any) -> None:
        """Raise a NotImplementedError if the layer has an option that the rule does not support."""

    def add_input(self, use: Use) -> None:  # noqa: B027
        """Add the input of one use, which is one run of the layer, to its input factors."""

    @abstractmethod
    def add_gradient(self, use: Use, b: Tensor) -> None:
        """Add the gradients of a backward vector with respect to one use's output.

        The use has its input only if `needs_input`; b has the output's shape.
        """

    def separate(self) -> None:  # noqa: B027
        """Give each parameter its own sums if two shared them before."""

    def share(self, name: str, other: "Rule", others_name: str) -> None:
        """Add to the sums of another rule from now on, because both parameters are one tensor."""
        for mine, others in ((self.A, other.A), (self.B, other.B)):
            if name in mine:
                mine[name] = others[others_name]
        self._shared.add(name)

    def block_sums(self) -> dict[str, BlockSums]:
        """Return the sums so far of all ``names``, except those that another rule has."""
        # Return the Gram matrices themselves, not copies, because they become the block in place.
        sums, names = {}, [name for name in self.names if name not in self._shared]
        factors = {one: one.gram.factor() for one in {self.B[name] for name in names}}
        for name in names:
            B = factors[self.B[name]]
            if name not in self.A:
                sums[name] = BlockSums(B)
                continue
            A, terms = self.A[name].gram.factor(), self.A[name].num_terms
            if not self.transposed or name == "bias":
                sums[name] = BlockSums(B, A, terms, self.per_example)
                continue
            # The rows are the inputs. The second factor is later divided by the number of terms in
            # place, so it must not be the matrix of another parameter's B.
            alone = all(self.B[other] is not self.B[name] for other in names if other != name)
            sums[name] = BlockSums(A, B if alone else B.clone(), terms, self.per_example)
        return sums

    @abstractmethod
    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Return output gradients with a single axis of positions, for `example_gradients`.

        Args:
            use: the use, with its input (M, ...).
            b: gradients of a vector, in the output's shape.
        """

    @abstractmethod
    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """Return the gradients in the parameters ``names``, separately for each example (or row).

        Args:
            a: the layer's input (N, ...).
            b: the C outputs' `position_gradients`.
        """


def sum_over(b: Tensor, axes: list[int]) -> Tensor:
    """Return the sum of a gradient over some axes, at least in float32.

    It is computed once for all layers with the same gradient, such as a bias and the layer in
    front. The tensor itself stores known sums of a gradient.
    """
    if not axes:
        return at_least_float32(b)
    # Autograd may add to a gradient in place, where branches join: that is another version.
    key = b._version, tuple(axes)  # pyright: ignore[reportPrivateUsage]
    cache = {} if b.requires_grad else vars(b).setdefault("_sums", {})
    if key not in cache:
        dtype = torch.float64 if b.dtype == torch.float64 else torch.float32
        cache[key] = b.sum(axes, dtype=dtype)
    return cache[key]


def unshared_copy(sums: Tensor, x: Tensor) -> Tensor:
    """Return sums of x that may wait: a copy if they are x itself, which others may change."""
    shares_memory = sums.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return sums.clone() if shares_memory else sums


def dense_gradients(gradients: ExampleGradients, transposed: bool) -> Float[Tensor, "N C P"]:
    """Return Σ_r b ⊗ a of each example and output, flattened as PyTorch flattens the parameter.

    A ``transposed`` parameter is stored as (d_in, d_out).
    """
    if gradients.a is None:
        return gradients.b.sum(2).movedim(0, 2).flatten(2)  # (G, N, C, d) -> (N, C, G·d)
    order = "gnrco,gnri->ncgio" if transposed else "gnrco,gnri->ncgoi"
    return torch.einsum(order, gradients.b, gradients.a.to(gradients.b.dtype)).flatten(2)


def summed_gradients(
    rule: Rule, use: Use, b: Float[Tensor, "M ..."]
) -> dict[str, Float[Tensor, " P"]]:
    """Return gradients summed over all rows by local name, from one gradient of the output."""
    positions = rule.position_gradients(use, b)[:, :, None]  # (M, R, 1, d_out)
    sums: dict[str, Tensor] = {}
    # Take some rows at a time, so that patches of images stay in the cache.
    number = max(1, FEWEST_POSITIONS // max(1, positions.shape[1]))
    for some in zip(use.a.split(number), positions.split(number), strict=True):
        for name, (b, a) in rule.example_gradients(*some).items():
            # Treat their positions as one example's in one product, without an array (P,) for each.
            a = None if a is None else a.flatten(1, 2)[:, None]
            as_one = ExampleGradients(b.flatten(1, 2)[:, None], a)
            g = dense_gradients(as_one, rule.transposed)[0, 0]
            sums[name] = sums[name].add_(g) if name in sums else g
    return sums
