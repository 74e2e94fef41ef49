"""The contract of a rule, and the rule shared by all layers whose weight is a matrix."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.options import KfacApprox
from kfac_backend.weight_sharing import gradient_gram, input_gram

__all__ = ["Rule", "WeightSharingRule"]


class Rule(ABC):
    """How one kind of layer turns inputs and output gradients into Gram matrices.

    Rules know nothing of scaling, batches or Fisher kinds; `factors.py` adds all of that. A layer's
    parameters are called by their local names here ("weight", not "block.0.weight").
    """

    layer_type: type[nn.Module]
    """The layer that `reference` computes; subclasses are covered if they compute the same."""

    parameter_names: frozenset[str]
    """The local names of the parameters that the rule knows."""

    needs_input: bool = False
    """Whether `gradient_grams` needs the layer's input, which then is kept until the backward."""

    needs_examples: bool = False
    """Whether the block is made of per-example sums under expand, too."""

    def reference(self, layer: Any, a: Tensor) -> Tensor:
        """What the layer must compute from its input for this rule to be right."""
        return self.layer_type.forward(layer, a)

    @abstractmethod
    def input_grams(
        self, layer: Any, a: Tensor, kfac_approx: KfacApprox, names: Collection[str]
    ) -> dict[str, tuple[Tensor, int]]:
        """Per parameter with an input factor: Gram matrix (G, d_in, d_in), terms it is the sum of.

        Args:
            layer: the layer.
            a: its input, batch first, detached.
            kfac_approx: the mode.
            names: the trainable parameters of the layer.
        """

    @abstractmethod
    def gradient_grams(
        self,
        layer: Any,
        a: Tensor | None,
        b: Tensor,
        kfac_approx: KfacApprox,
        names: Collection[str],
    ) -> dict[str, Tensor]:
        """Per parameter: one backward vector's part (G, d_out, d_out) of the gradient factor.

        Args:
            layer: the layer.
            a: its input if `needs_input`, else None.
            b: the gradient with respect to its output, in the output's shape.
            kfac_approx: the mode.
            names: the trainable parameters of the layer.
        """


class WeightSharingRule(Rule):
    """A layer with a matrix ``weight``, applied at R positions, and a ``bias`` added at each.

    The weight's block is B ⊗ A, one per group; the bias's is B over all outputs.
    """

    parameter_names = frozenset({"weight", "bias"})

    @abstractmethod
    def inputs(self, layer: Any, a: Tensor) -> Tensor:
        """The layer's input as (G, N, R, d_in)."""

    @abstractmethod
    def output_gradients(self, layer: Any, b: Tensor) -> Tensor:
        """The gradient with respect to the layer's output as (N, R, d_out of all groups)."""

    def groups(self, layer: Any) -> int:
        """G, the number of independent weight matrices."""
        return 1

    def input_grams(
        self, layer: Any, a: Tensor, kfac_approx: KfacApprox, names: Collection[str]
    ) -> dict[str, tuple[Tensor, int]]:
        """The Gram matrix of the weight's inputs; a bias has no input factor."""
        if "weight" not in names:
            return {}
        return {"weight": input_gram(self.inputs(layer, a), kfac_approx)}

    def gradient_grams(
        self,
        layer: Any,
        a: Tensor | None,
        b: Tensor,
        kfac_approx: KfacApprox,
        names: Collection[str],
    ) -> dict[str, Tensor]:
        """B per group for the weight, B over all outputs for the bias."""
        rows = self.output_gradients(layer, b)  # (N, R, d_out)
        groups = self.groups(layer)
        grams: dict[str, Tensor] = {}
        if "bias" in names:
            grams["bias"] = gradient_gram(rows[None], kfac_approx)
        if "weight" in names and groups == 1 and "bias" in grams:
            grams["weight"] = grams["bias"]
        elif "weight" in names:
            by_group = torch.stack(rows.chunk(groups, dim=-1))  # (G, N, R, d_out / G)
            grams["weight"] = gradient_gram(by_group, kfac_approx)
        return grams
