"""Models that compute a loss of labels and take masks of padding, in the style of Hugging Face.

The stand-in is a Transformer of plain torch. Its references are pairs (x, y) of examples alone,
without padding, with labels that are shifted by hand.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors

V = 7
IGNORED = -100


@dataclass
class Output:
    """What such models return."""

    logits: Tensor
    loss: Tensor | None = None


class Block(nn.Module):
    """Attention and a hidden layer; in float64 hidden keys have the weight zero exactly."""

    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.hidden = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x, visible):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k)
        p = scores.masked_fill(~visible[:, None], torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.out(torch.einsum("nhqk,nkhd->nqhd", p, v).flatten(2))
        return x + torch.tanh(self.hidden(x))


class Transformer(nn.Module):
    """Language model ("causal", "masked") or classifier ("first", "mean", "all").

    Args:
        kind: what it is; "all" is a classifier that takes padding into its mean.
        label_smoothing: of its own loss.
    """

    def __init__(self, kind, label_smoothing=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.label_smoothing = kind, label_smoothing
        self.tokens, self.positions = nn.Embedding(V, 4), nn.Embedding(16, 4)
        self.block = Block(4)
        self.head = nn.Linear(4, V if kind in ("causal", "masked") else 3)
        for p in self.parameters():
            nn.init.normal_(p, std=0.7)
        self.double()

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None):
        N, R = input_ids.shape
        mask = torch.ones(N, R) if attention_mask is None else attention_mask
        visible = mask.bool()[:, None].expand(N, R, R)
        if self.kind == "causal":
            visible = visible & torch.ones(R, R).tril().bool()
        position_ids = torch.arange(R)[None] if position_ids is None else position_ids
        x = self.block(self.tokens(input_ids) + self.positions(position_ids), visible)
        if self.kind == "first":
            x = x[:, 0]
        elif self.kind == "mean":
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.kind == "all":
            x = x.mean(1)
        f = self.head(x)
        return Output(f, None if labels is None else self.loss(f, labels))

    def loss(self, f, labels):
        if self.kind == "causal":
            f, labels = f[:, :-1], labels[:, 1:]
        return F.cross_entropy(
            f.flatten(0, -2), labels.flatten(), label_smoothing=self.label_smoothing
        )


class Plain(nn.Module):
    """The logits as a function of the tokens alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


LENGTHS = [5, 3, 2, 4]


def sentences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, V, (n,), generator=generator) for n in lengths]


def padded(sequences, length, left=False, pad=0):
    """Tokens, mask and numbers of positions (N, length)."""
    N = len(sequences)
    ids, mask = torch.full((N, length), pad), torch.zeros(N, length, dtype=torch.long)
    positions = torch.zeros(N, length, dtype=torch.long)
    for n, sequence in enumerate(sequences):
        R = len(sequence)
        where = slice(length - R, None) if left else slice(R)
        ids[n, where], mask[n, where], positions[n, where] = sequence, 1, torch.arange(R)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def batch_of(kind, length=5, left=False, pad=0):
    """A batch as a user of such models has it."""
    batch = padded(sentences(), length, left, pad)
    if kind in ("causal", "masked"):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        if kind == "masked":
            labels = labels.masked_fill(labels % 2 == 0, IGNORED)
    else:
        labels = torch.tensor([0, 2, 1, 1])
    return batch | {"labels": labels}


def alone(kind):
    """Examples (x, y), one by one, without padding; labels as the outputs predict them."""
    if kind not in ("causal", "masked"):
        return [
            (x[None], torch.tensor([y])) for x, y in zip(sentences(), [0, 2, 1, 1], strict=True)
        ]
    pairs = []
    for x in sentences():
        if kind == "causal":
            y = torch.cat([x[1:], torch.tensor([IGNORED])])
        else:
            y = x.masked_fill(x % 2 == 0, IGNORED)
        pairs.append((x[None], y[None]))
    return pairs


def factors(model, batches, mode="expand", **options):
    return kronecker_factors(model, batches, "classification", kfac_approx=mode, **options)


def assert_same_loss_and_blocks(first, second, prefix=""):
    assert first.num_loss_terms == second.num_loss_terms
    assert_close(first.loss, second.loss)
    for name, block in first.blocks.items():
        assert_close(block.to_dense(), second.to_dense(prefix + name))
