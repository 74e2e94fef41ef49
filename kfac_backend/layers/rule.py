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
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.uses import BlockSums, PositionSums, Use
from kfac_backend.options import Approximation

__all__ = ["ExampleGradients", "Rule", "dense_gradients", "summed_gradients"]


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

    def use_sketches(self, rank: int) -> None:  # noqa: B027
        """Sum up wide factors as sketches of this rank; called before any input, if at all.

        Rules without sketches keep whole factors.
        """

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
