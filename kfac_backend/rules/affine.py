"""Elementwise affine layers with one scalar parameter: the exact GGN entry, in either mode.

One scalar θ has the entry Σ_n Σ_v (∂ v_nᵀf_n / ∂θ)²; nothing is approximated.
"""

from jaxtyping import Float
from torch import Tensor

from kfac_backend.rules.elementwise import ExactRule
from kfac_backend.rules.rule import Use
from kfac_backend.weight_sharing import PositionSums, at_least_float32

__all__ = ["BiasRule", "ScaleRule"]


class BiasRule(ExactRule):
    """`layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    parameter_names = frozenset({"bias"})

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """Σ b_n, in parts."""
        if b.dim() <= 2:  # nothing to share, and b itself must not wait
            return {"bias": at_least_float32(b).reshape(len(b), -1).sum(1, keepdim=True)}
        # By features first, as the convolution or the linear layer in front needs it, too.
        return {"bias": sums(b, features=1 if b.dim() == 4 else -1)}


class ScaleRule(ExactRule):
    """`layers.Scale`, θ·x: the derivative is the inner product of input and output gradient."""

    parameter_names = frozenset({"scale"})
    needs_input = True

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """a_n · b_n, in parts."""
        a, b = at_least_float32(use.a), at_least_float32(b)
        if a.dim() == 1:
            a, b = a[:, None], b[:, None]
        if not a.is_contiguous():  # channels last: bring both into the order in memory
            a, b = a.movedim(1, -1), b.movedim(1, -1)
        a, b = a.flatten(1), b.flatten(1).unflatten(0, (-1, len(a)))
        return {"scale": _inner_products(a, b).flatten(0, 1)}


def _inner_products(a: Float[Tensor, "N D"], b: Float[Tensor, "V N D"]) -> Float[Tensor, "V N k"]:
    """a_n · b_vn in k parts, diagonals of small products: half the traffic of (a * b).sum()."""
    k = next(k for k in (4, 2, 1) if a.shape[-1] % k == 0)
    a, b = a.unflatten(-1, (k, -1)), b.unflatten(-1, (k, -1))
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1)
