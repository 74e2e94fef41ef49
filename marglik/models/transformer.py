"""Pre-norm transformer blocks, which the vision transformer and the language model share."""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from marglik.sizes import check_sizes

__all__ = ["SelfAttention", "TransformerBlock", "check_heads"]


class SelfAttention(nn.Module):
    """Self-attention with several heads: softmax(Q Kᵀ / √(d/h)) V per head, then a projection.

    Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1 and sec. 3.2.2. Queries, keys
    and values come from one linear layer ``qkv``, in this order, each with the heads in a row.

    Args:
        dim: d, the features of a position.
        heads: h, a divisor of d.
        causal: whether position r sees the positions up to r alone.
    """

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values (N, R, d) of x (N, R, d)."""
        heads = self.qkv(x).unflatten(-1, (3, self.heads, x.shape[-1] // self.heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # each (N, h, R, d/h)
        # Softmax over the positions s of q_r k_sᵀ / √(d/h), by torch's own kernel.
        attended = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        # Heads side by side again: (N, R, d).
        return self.projection(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Two residual branches: attention, and an MLP with GELU; each normalises its input.

    Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture" (pre-LN).

    Args:
        dim: d, the features of a position.
        heads: h, the attention heads, a divisor of d.
        mlp_dim: width of the MLP's hidden layer.
        causal: whether position r sees the positions up to r alone.
    """

    def __init__(self, dim: int, heads: int, mlp_dim: int, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus both branches: (N, R, d) to (N, R, d)."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


def check_heads(dim: int, heads: int) -> None:
    """Raise a ValueError unless both are at least 1 and ``heads`` divides ``dim``."""
    check_sizes(dim=dim, heads=heads)
    if dim % heads:
        divisors = ", ".join(str(h) for h in range(1, dim + 1) if dim % h == 0)
        raise ValueError(
            f"heads={heads} does not divide dim={dim}; choose one of {divisors}, or another dim."
        )
