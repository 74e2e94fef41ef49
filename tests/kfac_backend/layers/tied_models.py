"""Models that use one weight more than once, each with its reference for one example."""

import torch
from torch import Tensor, nn

from tests.attention_references import encoder_layer, linear
from tests.taps import Taps


class Pooled(nn.Module):
    """A loss term per position, or, if ``pool``, one of their scaled sum."""

    pool: bool = False

    def outputs(self, x: Tensor, axis: int) -> Tensor:
        return 0.5 * x.sum(axis) if self.pool else x

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        raise NotImplementedError


class CalledTwice(Pooled):
    """One layer for two halves of the positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(torch.cat([self.layer(x[:, :1]), self.layer(x[:, 1:])], 1), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        halves = [linear(taps, self.layer, "layer", part) for part in (x[:1], x[1:])]
        return self.outputs(torch.cat(halves), 0)


class TwoLayers(Pooled):
    """Two layers that have one weight and biases of their own, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        weight, names = self.first.weight, ("first.weight", "second.bias")
        x = linear(taps, self.first, "first", x).tanh()
        return self.outputs(taps.linear(x, weight, self.second.bias, names), 0)


class Recurrent(Pooled):
    """A recurrent network by hand: the state's layer is called once for each position."""

    def __init__(self):
        super().__init__()
        self.state, self.read, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        read, state, f = self.read(x), torch.zeros_like(x[:, 0]), []
        for r in range(x.shape[1]):
            state = (self.state(state) + read[:, r]).tanh()
            f.append(self.head(state))
        return self.outputs(torch.stack(f, 1), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        read, state, f = linear(taps, self.read, "read", x), torch.zeros_like(x[0]), []
        for r in range(len(x)):
            state = (linear(taps, self.state, "state", state) + read[r]).tanh()
            f.append(linear(taps, self.head, "head", state))
        return self.outputs(torch.stack(f), 0)


class PositionsThenMean(Pooled):
    """One layer for each position and, later, for their mean: three positions and one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        return self.outputs(x + self.layer(x.mean(1, keepdim=True)), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x = linear(taps, self.layer, "layer", x).tanh()
        return self.outputs(x + linear(taps, self.layer, "layer", x.mean(0, keepdim=True)), 0)


class EncoderTwice(Pooled):
    """A whole Transformer layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
        self.embed = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.layer(self.layer(self.embed(x))), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x = linear(taps, self.embed, "embed", x)
        for _ in range(2):
            x = encoder_layer(taps, self.layer, "layer.", x)
        return self.outputs(x, 0)


class TiedBias(Pooled):
    """Two layers with one bias and weights of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x, names = linear(taps, self.first, "first", x).tanh(), ("second.weight", "first.bias")
        return self.outputs(taps.linear(x, self.second.weight, self.first.bias, names), 0)


class TwoNames(Pooled):
    """One layer that the model has under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x = linear(taps, self.first, "first", x).tanh()
        return self.outputs(linear(taps, self.first, "first", x), 0)


class GroupsTwice(Pooled):
    """A convolution with groups, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 2, padding=1, stride=2, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.reshape(len(x), 2, 2, -1)).tanh()
        x = self.layer(x[:, ::2])
        return self.outputs(x.flatten(2).transpose(1, 2), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x, weight = x.reshape(2, 2, -1), self.layer.weight.flatten(1)
        for step in range(2):
            x = x.tanh()[::2] if step else x
            windows = nn.functional.unfold(x[None], 2, padding=1, stride=2)[0].T  # (R, 8)
            groups = [
                taps.linear(
                    windows[:, 4 * g : 4 * g + 4],
                    weight[2 * g : 2 * g + 2],
                    None,
                    ("layer.weight", ""),
                    (g, 0),
                )
                for g in range(2)
            ]
            rows = x.shape[1] // 2 + 1
            x = torch.cat(groups, -1).T.reshape(4, rows, -1)
        return self.outputs(x.flatten(1).T, 0)


class LanguageModel(Pooled):
    """The embedding's weight is the output layer's, too: opposite orientations."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(5, 2), nn.Linear(2, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.head(self.hidden(self.embed(x)).tanh()), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x = taps.embedding(x, self.embed.weight, "embed.weight")
        x = linear(taps, self.hidden, "hidden", x).tanh()
        names = ("embed.weight", "")
        return self.outputs(taps.linear(x, self.embed.weight, None, names), 0)


class EmbeddedTwice(LanguageModel):
    """As above; the tokens are embedded twice, and two layers read the weight out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.embed(x) + self.embed(x.flip(1)).tanh()).tanh()
        return self.outputs(self.head(x) + self.head(x.sin()), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        W, names = self.embed.weight, ("embed.weight", "")
        x = taps.embedding(x, W, names[0]) + taps.embedding(x.flip(0), W, names[0]).tanh()
        x = linear(taps, self.hidden, "hidden", x).tanh()
        return self.outputs(
            taps.linear(x, W, None, names) + taps.linear(x.sin(), W, None, names), 0
        )


class PaddedLanguageModel(LanguageModel):
    """As above; token 0 is padding: no position of the embedding, but one of the output layer."""

    def __init__(self):
        super().__init__()
        self.embed.padding_idx = 0

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        W, names = self.embed.weight, ("embed.weight", "")
        x = taps.embedding(x, W, names[0], padding_idx=0)
        x = linear(taps, self.hidden, "hidden", x).tanh()
        return self.outputs(taps.linear(x, W, None, names), 0)


class Autoencoder(Pooled):
    """A convolution, and a transposed one with its weight: opposite orientations."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(2, 3, 2, stride=1, bias=False)
        self.decode = nn.ConvTranspose1d(3, 2, 2, stride=1, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.decode(self.encode(x.reshape(len(x), 2, -1)).tanh())
        return self.outputs(x.transpose(1, 2), 1)

    def reference(self, taps: Taps, x: Tensor) -> Tensor:
        x, W, names = x.reshape(2, -1), self.encode.weight.flatten(1), ("encode.weight", "")
        windows = torch.stack([x[:, p : p + 2].flatten() for p in range(x.shape[1] - 1)])
        code = taps.linear(windows, W, None, names).tanh()
        patches = taps.linear(code, W, None, names, input_first=True)
        columns = []
        for p in range(x.shape[1]):
            writers = [q for q in (p - 1, p) if 0 <= q < len(code)]
            columns.append(sum(patches[q].reshape(2, 2)[:, p - q] for q in writers))
        return self.outputs(torch.stack(columns), 0)
