"""Elementwise affine layers with one scalar parameter: the exact GGN entry, in either mode."""

from collections.abc import Collection

from torch import Tensor

from kfac_backend.layers import Bias, Scale
from kfac_backend.options import KfacApprox
from kfac_backend.rules.rule import Rule
from kfac_backend.weight_sharing import at_least_float32

__all__ = ["BiasRule", "ScaleRule"]


class _ScalarRule(Rule):
    """One scalar θ: its GGN entry is Σ_n Σ_v (∂ v_nᵀf_n / ∂θ)², no approximation."""

    needs_examples = True

    def input_grams(
        self, layer: object, a: Tensor, kfac_approx: KfacApprox, names: Collection[str]
    ) -> dict[str, tuple[Tensor, int]]:
        """None: the block is B alone."""
        return {}


class BiasRule(_ScalarRule):
    """`layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    layer_type = Bias
    parameter_names = frozenset({"bias"})

    def gradient_grams(
        self,
        layer: Bias,
        a: Tensor | None,
        b: Tensor,
        kfac_approx: KfacApprox,
        names: Collection[str],
    ) -> dict[str, Tensor]:
        """Σ_n (Σ b_n)², as (1, 1, 1)."""
        return {"bias": _sum_of_squares(at_least_float32(b).flatten(1).sum(1))}


class ScaleRule(_ScalarRule):
    """`layers.Scale`, θ·x: the derivative is the inner product of input and output gradient."""

    layer_type = Scale
    parameter_names = frozenset({"scale"})
    needs_input = True

    def gradient_grams(
        self,
        layer: Scale,
        a: Tensor | None,
        b: Tensor,
        kfac_approx: KfacApprox,
        names: Collection[str],
    ) -> dict[str, Tensor]:
        """Σ_n (a_n · b_n)², as (1, 1, 1)."""
        assert a is not None
        product = at_least_float32(a) * at_least_float32(b)
        return {"scale": _sum_of_squares(product.flatten(1).sum(1))}


def _sum_of_squares(derivatives: Tensor) -> Tensor:
    """Σ_n d_n² as a (1, 1, 1) Gram matrix."""
    return derivatives.square().sum().reshape(1, 1, 1)
