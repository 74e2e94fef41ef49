"""Rule of bilinear layers."""

from typing import Any

from torch import Tensor

from kfac_backend.layers.weight_sharing import LinearRule


class BilinearRule(LinearRule):
    """Rule of nn.Bilinear, y_k = Σ_ij W_kij u_i v_j + b_k: a linear layer on the products u_i v_j.

    Its block is B ⊗ A, with A (d_u d_v, d_u d_v) over pairs of inputs.
    """

    @classmethod
    def input_of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the products of both inputs, (N, ..., d_u d_v)."""
        u, v = (*args, *(kwargs[name] for name in ("input1", "input2") if name in kwargs))
        return (u[..., :, None] * v[..., None, :]).flatten(-2)
