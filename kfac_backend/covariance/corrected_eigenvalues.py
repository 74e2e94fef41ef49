"""Second moments of gradients in the eigenbasis of blocks: their corrected eigenvalues.

Eigenvalue (i, j) is Σ_n Σ_v (q_Bᵢᵀ G_nv q_Aⱼ)², with G_nv = Σ_r b_nvr a_nrᵀ the gradient of example
n and backward vector v: the diagonal of the exact block in the basis Q_B ⊗ Q_A. Source: George et
al. 2018 (arXiv:1806.03884), section 3; with shared positions, an example's gradient is the sum over
all of them, in either mode.
"""

from collections.abc import Mapping

import torch

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.contraction import add_second_moments
from kfac_backend.covariance.gradients import LayerGradients, Seen
from kfac_backend.model.rule_assignment import RuleAssignment

__all__ = ["CorrectedEigenvalues"]


class CorrectedEigenvalues(LayerGradients):
    """Sums up the squares of gradients in the eigenbasis, from output gradients of layers.

    Args:
        assignment: the layers.
        bases: parameter name -> the eigenvectors of its block.
        memory: bytes that the inputs and gradients of a layer may take at once.
        product_bytes: see `add_second_moments`.
    """

    def __init__(
        self,
        assignment: RuleAssignment,
        bases: Mapping[str, EigenBlock],
        memory: int,
        product_bytes: int,
    ) -> None:
        self.moments = {name: torch.zeros_like(block.spectrum()) for name, block in bases.items()}
        """Parameter name -> the sums so far, in the shape of `EigenBlock.spectrum`."""
        super().__init__(assignment, {n: (block, self.moments[n]) for n, block in bases.items()})
        self._memory = memory
        self._product_bytes = product_bytes

    def add_one(self, seen: Seen) -> None:
        """Add the part of a layer that shares no parameter, some examples at a time."""
        for _, some in self.some_examples(seen, self._memory):
            self.add([some])

    def add(self, seen: list[Seen]) -> None:
        """Add the part of several uses; the gradients in a tied parameter are summed first."""
        for gradients in self.of_uses(seen):
            add_second_moments(gradients, self._product_bytes)
