"""Second moments of gradients in the eigenbasis of a block: its corrected eigenvalues.

Eigenvalue (i, j) is Σ_n Σ_v (q_Bᵢᵀ G_nv q_Aⱼ)², with G_nv = Σ_r b_nvr a_nrᵀ the gradient of example
n and backward vector v: the diagonal of the exact block in the basis Q_B ⊗ Q_A. With one position
it never needs G_nv: Σ_n (Σ_v b̃_nvi²) ã_nj². Source: George et al. 2018 (arXiv:1806.03884),
section 3; with shared positions, an example's gradient is the sum over all of them, in either mode.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.eigenbasis import (
    LARGEST_PRODUCT,
    bases,
    bytes_per_example,
    grouped,
    products,
    rotated,
)
from kfac_backend.covariance.gradients import LayerGradients, Seen, some_examples
from kfac_backend.layers import ExampleGradients
from kfac_backend.model.rule_assignment import RuleAssignment

__all__ = ["CorrectedEigenvalues", "add_second_moments"]


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
        tracked, _, rows = seen
        _, R, V, d_out = rows.shape
        entries = max(self.moments[name].numel() for name in tracked.parameters.values())
        d_in = max(1, entries // d_out)
        size = self._memory // max(1, bytes_per_example(R, V, d_out, d_in, rows.element_size()))
        for _, some in some_examples(seen, max(1, size)):
            self.add([some])

    def add(self, seen: list[Seen]) -> None:
        """Add the part of several uses; the gradients in a tied parameter are summed first."""
        for gradients in self.of_uses(seen):
            joined, moments = gradients.joined(), gradients.spectrum  # a view of the sums
            if joined is not None:
                add_second_moments(
                    moments, joined[0], gradients.block, self._product_bytes, transposed=joined[1]
                )
                continue
            for part in gradients.dense_in_basis(self._product_bytes):
                moments += part.square_().sum((0, 1))


def add_second_moments(
    moments: Float[Tensor, "*G rows columns"],
    gradients: ExampleGradients,
    block: EigenBlock,
    product_bytes: int = LARGEST_PRODUCT["cpu"],
    *,
    transposed: bool = False,
) -> None:
    """Add Σ_n Σ_v (Qᵀ g_nv)² of one parameter's gradients g_nv, in place.

    Args:
        moments: the sums, in the shape of `EigenBlock.spectrum`.
        gradients: the vectors' gradients in the parameter.
        block: the eigenvectors Q.
        product_bytes: bytes of a gradient that are computed at once, but at least one row.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    b = gradients.b.to(block.Q_B.dtype)
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, V, d_out)
        if block.Q_B.shape[-1] > 1:  # else a diagonal, for P groups of one entry
            b = rotated(b, grouped(block.Q_B))
        moments += b.square().sum((1, 2)).view_as(moments)
        return
    a = gradients.a.to(block.Q_A.dtype)
    Q_B, Q_A, of_groups = bases(block, moments, transposed)
    if b.shape[2] == 1:
        squares = rotated(b[:, :, 0], Q_B).square_().sum(2)  # (G, N, d_out)
        of_groups += squares.mT @ rotated(a[:, :, 0], Q_A).square()
        return
    b = rotated(b, Q_B)
    # Rotate the inputs or their products with b, whichever has fewer rows.
    inputs_first = b.shape[2] <= b.shape[3:].numel()
    if inputs_first:
        a = rotated(a, Q_A)
    for _, g, some, gradient in products(b, a, product_bytes):
        if not inputs_first and Q_A is not None:
            gradient = rotated(gradient[None], Q_A[g : g + 1])[0]
        over_vectors = gradient.square_().sum(-3)  # (rows, d_in), or (N, rows, d_in)
        of_groups[g, some] += over_vectors if over_vectors.dim() == 2 else over_vectors.sum(0)
