"""Small transformers, of images and of text, and the pre-norm blocks that both are made of."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from kfac_backend import register_parameters


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


@register_parameters("position_embedding")
class VisionTransformer(nn.Module):
    """Logits of a vision transformer for small images.

    Each patch becomes a position with d features, to which a learned position embedding is added.
    Transformer blocks mix the positions, and the mean of all normalised positions is classified.
    K-FAC sees the paper's reduce setting: the R positions of an example share the weights, and have
    one loss term together.

    Source: Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words". Weights are initialised
    uniformly as in Glorot & Bengio 2010, biases to zero, the position embedding from N(0, 0.02²).

    Args:
        num_classes: C, the number of classes.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels.
        patch_size: height and width of a patch in pixels, a divisor of ``image_size``.
        dim: d, the features of a position.
        depth: number of transformer blocks.
        heads: attention heads in a block, a divisor of ``dim``.
        mlp_ratio: width of the blocks' hidden layer, in units of ``dim``.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        patch_size: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 2.0,
    ) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        R = (image_size // patch_size) ** 2
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, R, dim))
        mlp_dim = round(mlp_ratio * dim)
        self.blocks = nn.Sequential(*[TransformerBlock(dim, heads, mlp_dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.apply(_glorot)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of images (N, in_channels, image_size, image_size)."""
        x = self.patch_embedding(x).flatten(2).mT.contiguous()  # (N, R, d), patches row by row
        x = self.norm(self.blocks(x + self.position_embedding))  # (N, R, d)
        return self.head(x.mean(dim=1))


def _glorot(module: nn.Module) -> None:
    """Glorot's initialisation for linear maps; queries, keys and values are three of them."""
    if isinstance(module, SelfAttention):
        for weight in module.qkv.weight.detach().chunk(3):
            nn.init.xavier_uniform_(weight)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight.detach().flatten(1))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """Logits of the next token at every position of a sequence.

    Token and position embeddings are added, causal transformer blocks mix each position with those
    before it, and a linear layer, by default with the token embedding's weight, gives the logits.
    K-FAC sees the paper's expand setting: each of the N·R positions has a loss term.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Weights are
    initialised from N(0, 0.02²), those at the end of a residual branch from
    N(0, 0.02² / (2 depth)), and biases to zero. There is no dropout, which would make the loss
    random.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: length of the longest sequence.
        dim: d, the features of a position.
        depth: number of transformer blocks, whose MLPs have 4 d hidden features.
        heads: attention heads in a block, a divisor of ``dim``.
        tied: whether the output layer's weight is the token embedding's.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 64,
        dim: int = 64,
        depth: int = 2,
        heads: int = 4,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(context, dim)
        blocks = [TransformerBlock(dim, heads, 4 * dim, causal=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        # One parameter, used twice: curvature sees the sum over both uses.
        if tied:
            self.head.weight = self.token_embedding.weight
        self.apply(_normal)
        for block in blocks:
            # 2 depth branches add up; scaled like this, their sum has the variance of one.
            for last in (block.attention.projection, block.fc2):
                nn.init.normal_(last.weight, std=0.02 * (2 * depth) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, R, vocab_size) of int64 tokens (N, R), R at most the context."""
        # One row of numbers per sequence, so that each example has positions of its own.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (N, R, d)
        return self.head(self.norm(self.blocks(x)))


def _normal(module: nn.Module) -> None:
    """N(0, 0.02²) for weights of linear layers and embeddings, zero for biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
