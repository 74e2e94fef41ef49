"""A small language model: a causal transformer that predicts the next token."""

import torch
from torch import Tensor, nn

from marglik.models.transformer import TransformerBlock, check_heads
from marglik.sizes import check_sizes

__all__ = ["GPT"]


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

    Raises:
        ValueError: if a size is below 1, or ``heads`` does not divide ``dim``.
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
        check_heads(dim, heads)
        check_sizes(vocab_size=vocab_size, context=context, depth=depth)
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(context, dim)
        blocks = [TransformerBlock(dim, heads, 4 * dim, causal=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        # One parameter, used twice: curvature sees the sum over both uses.
        if tied:
            self.head.weight = self.token_embedding.weight
        self.apply(_initialise)
        for block in blocks:
            # 2 depth branches add up; scaled like this, their sum has the variance of one.
            for last in (block.attention.projection, block.fc2):
                nn.init.normal_(last.weight, std=0.02 * (2 * depth) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, R, vocab_size) of int64 tokens (N, R), R at most ``context``."""
        if tokens.dim() != 2 or tokens.shape[1] > self.context:
            raise ValueError(
                f"GPT got tokens of shape {tuple(tokens.shape)}; it takes (N, R) with R at most "
                f"context={self.context}: cut the sequences, or build it with a longer context."
            )
        # One row of numbers per sequence, so that each example has positions of its own.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (N, R, d)
        return self.head(self.norm(self.blocks(x)))


def _initialise(module: nn.Module) -> None:
    """N(0, 0.02²) for weights of linear layers and embeddings, zero for biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
