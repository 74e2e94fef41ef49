"""Each layer of torch.nn that has parameters, with one example that has one position.

Lazy layers are of the plain classes once they have run, as LazyLinear shows.
"""

import torch
from torch import nn

TOKENS = torch.tensor([[2]])


def noise(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def one(*shape):
    """One example."""
    return noise(1, *shape)


def images(axes, channels=4, size=3):
    return one(channels, *[size] * axes)


RIGHT = {
    "Linear": (lambda: nn.Linear(3, 4), one(3)),
    "LazyLinear": (lambda: nn.LazyLinear(4), one(3)),
    "Embedding": (lambda: nn.Embedding(5, 4), TOKENS),
    "PReLU": (lambda: nn.PReLU(3), one(3)),
    "LayerNorm": (lambda: nn.LayerNorm(5), one(5)),
    "RMSNorm": (lambda: nn.RMSNorm(5), one(5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), images(1)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), images(2)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), one(1, 4)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 5), one(1, 4)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 5), one(1, 4)),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5), 2),
        one(1, 4),
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 5), 2),
        one(1, 4),
    ),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 5), one(1, 4)),
    "RNN": (lambda: nn.RNN(3, 4, batch_first=True), one(1, 3)),
    "LSTM": (lambda: nn.LSTM(3, 4, batch_first=True), one(1, 3)),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), one(1, 3)),
    "RNNCell": (lambda: nn.RNNCell(3, 4), one(3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), one(3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), one(3)),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2], div_value=1.0),
        one(4),
    ),
}
for axes in (1, 2, 3):
    RIGHT |= {
        f"Conv{axes}d": (
            lambda axes=axes: getattr(nn, f"Conv{axes}d")(4, 3, 3), images(axes),
        ),
        f"ConvTranspose{axes}d": (
            lambda axes=axes: getattr(nn, f"ConvTranspose{axes}d")(4, 3, 2), images(axes, size=1),
        ),
        f"BatchNorm{axes}d": (lambda axes=axes: getattr(nn, f"BatchNorm{axes}d")(4), images(axes)),
        f"InstanceNorm{axes}d": (
            lambda axes=axes: getattr(nn, f"InstanceNorm{axes}d")(4, affine=True), images(axes),
        ),
    }  # fmt: skip

NAMED = {
    "Bilinear": (lambda: nn.Bilinear(3, 3, 4), one(3)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 4), TOKENS),
}

if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.15
    NAMED["LinearCrossEntropyLoss"] = (lambda: nn.LinearCrossEntropyLoss(3, 4), one(3))


class Around(nn.Module):
    """The layer, and what makes class logits of whatever it returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)

    def forward(self, x):
        kind = type(self.layer)
        if kind is nn.MultiheadAttention:
            x = self.layer(x, x, x)[0]
        elif kind in (nn.Bilinear, nn.Transformer, nn.TransformerDecoder):
            x = self.layer(x, x)
        elif kind is nn.TransformerDecoderLayer:
            x = self.layer(x, x)
        elif kind is nn.AdaptiveLogSoftmaxWithLoss:
            x = self.layer.log_prob(x)
        elif kind.__name__ == "LinearCrossEntropyLoss":
            x = self.layer(x, torch.zeros(len(x)).long()).view(1, 1)
        else:
            x = self.layer(x)
        while isinstance(x, tuple):
            x = x[0]
        return self.head(torch.tanh(x).flatten(1))


def around(table, name):
    build, x = table[name]
    torch.manual_seed(0)
    model = Around(build()).double().eval()
    with torch.no_grad():
        model(x)
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model, x
