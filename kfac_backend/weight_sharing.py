"""Gram matrices over weight-sharing positions: the two modes, expand and reduce.

Everywhere a layer's inputs are ``a`` (G, N, R, d_in) and the gradients with respect to its outputs
``b`` (G, N, R, d_out): G groups (1 unless the layer is a grouped convolution), N examples, R
positions that share the weight, features last. Source of the two modes: Eschenhagen et al. 2023
(arXiv:2311.00636), sections 3.2 (expand) and 3.3 (reduce).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.options import KfacApprox

__all__ = ["at_least_float32", "gradient_gram", "input_gram"]


def input_gram(
    a: Float[Tensor, "G N R d_in"], kfac_approx: KfacApprox
) -> tuple[Float[Tensor, "G d_in d_in"], int]:
    """Unscaled input Gram matrix of A, and the number of terms that A is the mean of.

    Expand: Σ_n Σ_r a_nr a_nrᵀ, of N·R terms. Reduce: Σ_n â_n â_nᵀ with the mean over positions
    â_n = 1/R Σ_r a_nr, of N terms.
    """
    _, examples, positions, _ = a.shape
    a = at_least_float32(a)
    if kfac_approx == "reduce":
        return _gram(a.mean(dim=2)), examples
    return _gram(a.flatten(1, 2)), examples * positions


def gradient_gram(
    b: Float[Tensor, "G N R d_out"], kfac_approx: KfacApprox
) -> Float[Tensor, "G d_out d_out"]:
    """One backward vector's part of the gradient factor B, a sum over the examples.

    Expand: Σ_n Σ_r b_nr b_nrᵀ. Reduce: Σ_n b̂_n b̂_nᵀ with the sum over positions b̂_n = Σ_r b_nr.
    """
    b = at_least_float32(b)
    if kfac_approx == "reduce":
        return _gram(b.sum(dim=2))
    return _gram(b.flatten(1, 2))


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float64 if it is, else in float32: sums of half precision lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def _gram(rows: Float[Tensor, "G M d"]) -> Float[Tensor, "G d d"]:
    """Σ_m rows_m rows_mᵀ per group, whatever autocast says."""
    with torch.autocast(rows.device.type, enabled=False):
        return rows.mT @ rows
