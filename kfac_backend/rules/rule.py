"""The contract of a rule, and the rule shared by all layers whose weight is a matrix."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.options import KfacApprox
from kfac_backend.weight_sharing import GramSum, PositionSums

__all__ = ["ExampleGradients", "GramSums", "Rule", "WeightSharingRule"]


class GramSums(NamedTuple):
    """The sums of one parameter's block, not scaled."""

    B: Tensor | None
    """Sum over the data (G, d_out, d_out); None without any gradient."""
    A: Tensor | None = None
    """Sum over all terms (G, d_in, d_in); None for a parameter without an input factor."""
    num_terms: int = 0
    """How many terms A is the sum of."""


class ExampleGradients(NamedTuple):
    """Gradients of C outputs in one parameter, example by example: Σ_r b_nrc ⊗ a_nr per group."""

    b: Float[Tensor, "G N R C d_out"]
    """Gradients with respect to the layer's output."""
    a: Float[Tensor, "G N R d_in"] | None = None
    """The layer's inputs; None for a parameter without an input factor, whose gradient is Σ_r b."""


class Rule(ABC):
    """Sums up, for one layer and one pass, what its inputs and output gradients add to its blocks.

    Rules know nothing of scaling, Fisher kinds or autocast, which `curvature_pass.py` sees to. A
    layer's parameters have their local names here ("weight", not "block.0.weight").

    Args:
        layer: the layer.
        kfac_approx: the mode.
        names: the trainable parameters of the layer.
    """

    layer_type: ClassVar[type[nn.Module]]
    """The layer that `reference` computes; subclasses are covered if they compute the same."""

    parameter_names: ClassVar[frozenset[str]]
    """The local names of the parameters that the rule knows."""

    needs_input: ClassVar[bool] = False
    """Whether `add_gradient` needs the layer's input, which then is kept until the backward."""

    needs_examples: ClassVar[bool] = False
    """Whether the block is made of per-example sums under expand, too."""

    def __init__(self, layer: Any, kfac_approx: KfacApprox, names: Collection[str]) -> None:
        self.layer = layer
        self.kfac_approx: KfacApprox = kfac_approx
        self.names = names

    @classmethod
    def reference(cls, layer: Any, a: Tensor) -> Tensor:
        """What the layer must compute from its input for this rule to be right."""
        return cls.layer_type.forward(layer, a)

    @abstractmethod
    def add_input(self, a: Tensor) -> None:
        """Add a batch's input, batch first, detached."""

    @abstractmethod
    def add_gradient(self, a: Tensor | None, b: Tensor, sums: PositionSums) -> None:
        """Add one or more backward vectors' gradients with respect to the layer's output.

        Args:
            a: the layer's input (N, ...) if `needs_input`, else None.
            b: the gradients (V·N, ...), the output's shape for V = 1 vector.
            sums: sums of b over positions, shared between layers.
        """

    @abstractmethod
    def gram_sums(self) -> dict[str, GramSums]:
        """The sums so far, for each of the parameters ``names``."""

    @abstractmethod
    def position_gradients(self, a: Tensor, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """What `example_gradients` needs of output gradients, position by position.

        Args:
            a: the layer's input (N, ...).
            b: gradients (M, ...) of one or more vectors, M = V·N.
        """

    @abstractmethod
    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """Each example's gradients in the parameters ``names``.

        Args:
            a: the layer's input (N, ...).
            b: the C outputs' `position_gradients`.
        """


class WeightSharingRule(Rule):
    """A layer with a matrix ``weight``, applied at R positions, and a ``bias`` added at each.

    The weight's block is B ⊗ A, one per group; the bias's is B over all outputs.
    """

    parameter_names = frozenset({"weight", "bias"})

    features: ClassVar[int] = -1
    """The axis of the layer's output that is not a position."""

    def __init__(self, layer: Any, kfac_approx: KfacApprox, names: Collection[str]) -> None:
        super().__init__(layer, kfac_approx, names)
        self.A, self.num_terms = self.new_input_gram(), 0
        self.B_weight = GramSum()
        # One matrix for both, unless the weight's is split into groups.
        self.B_bias = self.B_weight if self.groups == 1 else GramSum()

    @abstractmethod
    def inputs(self, a: Tensor) -> Tensor:
        """The layer's input as (G, N, R, d_in)."""

    def mean_inputs(self, a: Tensor) -> Tensor:
        """The means â over positions, (G, N, d_in)."""
        return self.inputs(a).mean(2)

    @property
    def groups(self) -> int:
        """G, the number of independent weight matrices."""
        return 1

    def new_input_gram(self) -> GramSum:
        """What the inputs' Gram matrix is summed up in."""
        return GramSum()

    def add_input_gram(self, a: Tensor) -> int:
        """Add the inputs of all positions to A; returns R."""
        rows = self.inputs(a)
        self.A.add(rows.flatten(1, 2))
        return rows.shape[2]

    def add_input(self, a: Tensor) -> None:
        """The Gram matrix of the weight's inputs; a bias has no input factor."""
        if "weight" not in self.names:
            return
        if self.kfac_approx == "reduce":
            self.A.add(self.mean_inputs(a))
            self.num_terms += len(a)
        else:
            self.num_terms += len(a) * self.add_input_gram(a)

    def add_gradient(self, a: Tensor | None, b: Tensor, sums: PositionSums) -> None:
        """B per group for the weight, B over all outputs for the bias."""
        if self.kfac_approx == "reduce":
            rows = sums(b, self.features)
        else:
            rows = b.movedim(self.features, -1).flatten(0, -2)  # no copy if the features lie last
        if self.groups == 1 or "bias" in self.names:
            self.B_bias.add(rows[None])
        if self.groups > 1 and "weight" in self.names:
            self.B_weight.add(rows.unflatten(-1, (self.groups, -1)).movedim(1, 0))

    def position_gradients(self, a: Tensor, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """The gradients with features last; summed over positions if the weight is frozen."""
        rows = b.movedim(self.features, -1)
        rows = rows.flatten(1, -2) if rows.dim() > 2 else rows[:, None]
        return rows if "weight" in self.names else rows.sum(1, keepdim=True)

    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """Σ_r b ⊗ a for the weight, Σ_r b for the bias."""
        gradients = {}
        if "weight" in self.names:
            by_group = b.unflatten(-1, (self.groups, -1)).movedim(-2, 0)
            gradients["weight"] = ExampleGradients(by_group, self.inputs(a))
        if "bias" in self.names:
            gradients["bias"] = ExampleGradients(b[None])
        return gradients

    def gram_sums(self) -> dict[str, GramSums]:
        """Both blocks' sums."""
        both = {
            "weight": GramSums(self.B_weight.total(), self.A.total(), self.num_terms),
            "bias": GramSums(self.B_bias.total()),
        }
        return {name: both[name] for name in self.names}
