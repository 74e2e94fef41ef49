"""Models with attention, and batches for them."""

import torch
from torch import Tensor, nn

from tests.kfac_backend.networks import Model
from tests.random_numbers import normal


class Attending(nn.Module):
    """Attention between two sequences, and a linear head on the positions' mean."""

    def __init__(self, attn_mask: Tensor | None = None, **options):
        super().__init__()
        options = {"batch_first": True, **options}
        self.attention = nn.MultiheadAttention(options.pop("embed_dim", 4), 2, **options)
        self.head = nn.Linear(self.attention.embed_dim, 3)
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = [batch["query"], batch["key"], batch.get("value", batch["key"])]
        if not self.attention.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        mask, padding = batch.get("mask", self.attn_mask), batch.get("padding_mask")
        if mask is not None and mask.dim() == 4:  # (N, heads, R, S)
            mask = mask.flatten(0, 1)
        x, _ = self.attention(*inputs, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        return self.head(x.mean(1))


def batch_of(N: int = 3, R: int = 3, S: int = 4, d=(4, 4, 4), **more) -> dict:
    batch = {"query": normal(N, R, d[0]), "key": normal(N, S, d[1], seed=1), **more}
    if d[2] != d[1]:
        batch["value"] = normal(N, S, d[2], seed=2)
    return {**batch, "labels": torch.arange(N) % 3}


class WeightsToo(Attending):
    """The attention weights are outputs, too, those of the heads or their average."""

    def __init__(self, average: bool):
        super().__init__()
        self.average = average

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = (batch["query"], batch["key"], batch["key"])
        x, weights = self.attention(*inputs, average_attn_weights=self.average)
        weights = weights if self.average else weights.mean(1)
        return self.head(x.mean(1)) + weights.mean(1)[:, :3]


PADDING = torch.tensor([[False] * 2 + [True] * 2, [False, True, False, False], [False] * 4])
CAUSAL = torch.ones(3, 4).triu(1).bool()


class Layered(nn.Module):
    """An encoder layer, a decoder layer with another sequence for memory, and a linear head."""

    def __init__(self, causal: bool = False, **options):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **options}
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, **options)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 6, **options)
        self.head = nn.Linear(4, 3)
        self.batch_first = options["batch_first"]
        self.register_buffer("mask", torch.ones(3, 3).triu(1).bool() if causal else None)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, memory, padding = batch["query"], batch["key"], batch.get("padding_mask")
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        memory = self.encoder(memory, src_key_padding_mask=padding)
        x = self.decoder(x, memory, tgt_mask=self.mask, memory_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(x.mean(1))


def stack() -> nn.Module:
    """Several encoder layers with padding, pooled over positions that all examples have."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = m.stack(batch["key"], src_key_padding_mask=batch["padding_mask"])
        return m.head(x[:, 1:3].mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2)  # nested tensors, were gradients off
    return Model(forward, stack=layers, head=nn.Linear(4, 3))
