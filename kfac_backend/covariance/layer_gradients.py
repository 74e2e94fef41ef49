"""The covariance of a batch's outputs, layer by layer, from the gradients in all parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.gradient_covariance import dense_covariance, gradient_covariance
from kfac_backend.covariance.parameter_gradients import (
    ParameterGradients,
    Seen,
    SumOfUses,
    group_of,
    some_examples,
)
from kfac_backend.model.rule_assignment import RuleAssignment

__all__ = ["LayerGradients", "PosteriorPrecision"]

PosteriorPrecision = Mapping[str, tuple[EigenBlock, Tensor]]
"""Parameter name -> its block's eigenvectors, and the precision's eigenvalues > 0 in their basis,
(..., d_out, d_in) as `EigenBlock.spectrum` returns them."""


class LayerGradients(ParameterGradients):
    """Turns output gradients of layers into the outputs' covariance.

    Args:
        assignment: the layers.
        precision: the posterior precision.
        product_bytes: see `gradient_covariance`.
        tolerance: see there.
    """

    def __init__(
        self,
        assignment: RuleAssignment,
        precision: PosteriorPrecision,
        product_bytes: int,
        tolerance: float = 0.0,
    ) -> None:
        super().__init__(assignment)
        self._precision = precision
        self._product_bytes = product_bytes
        self._tolerance = tolerance

    def add_one(self, covariance: Tensor, seen: Seen, size: int) -> None:
        """Add the part of a layer that shares no parameter, ``size`` examples at a time.

        Args:
            covariance: (N, C, C), or variances (N, C), added to in place.
            seen: the layer's use.
            size: examples at a time.
        """
        for chunk, some in some_examples(seen, size):
            self.add(covariance[chunk], [some])

    def add(self, covariance: Tensor, seen: list[Seen]) -> None:
        """Add the part of several uses; the gradients in a tied parameter are summed first."""
        for (name, (slot, slots)), gradients in self.of_uses(seen):
            block, spectrum = self._precision[name]
            if slots > 1:
                block, spectrum = group_of(block, slot), spectrum[slot]
            variance_only = covariance.dim() == 2
            covariance += self._covariance(gradients, block, spectrum, variance_only)

    def _covariance(
        self, gradients: SumOfUses, block: EigenBlock, spectrum: Tensor, variance_only: bool
    ) -> Tensor:
        one_way = gradients.in_one_way()
        if one_way is None:
            parts = gradients.dense(self._product_bytes)
            each = [
                dense_covariance(part, block, spectrum, variance_only=variance_only)
                for part in parts
            ]
            return torch.cat(each)
        joined, transposed = one_way
        return gradient_covariance(
            joined,
            block,
            spectrum,
            self._product_bytes,
            tolerance=self._tolerance,
            transposed=transposed,
            variance_only=variance_only,
        )
