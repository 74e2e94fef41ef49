"""Models that use one weight more than once."""

import torch
from torch import Tensor, nn


class Pooled(nn.Module):
    """A loss term per position, or, if ``pool``, one of their scaled sum."""

    pool: bool = False

    def outputs(self, x: Tensor, axis: int) -> Tensor:
        return 0.5 * x.sum(axis) if self.pool else x


class CalledTwice(Pooled):
    """One layer for two halves of the positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(torch.cat([self.layer(x[:, :1]), self.layer(x[:, 1:])], 1), 1)


class TwoLayers(Pooled):
    """Two layers that have one weight and biases of their own, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)


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


class PositionsThenMean(Pooled):
    """One layer for each position and, later, for their mean: three positions and one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        return self.outputs(x + self.layer(x.mean(1, keepdim=True)), 1)


class EncoderTwice(Pooled):
    """A whole Transformer layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
        self.embed = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.layer(self.layer(self.embed(x))), 1)


class TiedBias(Pooled):
    """Two layers with one bias and weights of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)


class TwoNames(Pooled):
    """One layer that the model has under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.second(self.first(x).tanh()), 1)


class GroupsTwice(Pooled):
    """A convolution with groups, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 2, padding=1, stride=2, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.reshape(len(x), 2, 2, -1)).tanh()
        x = self.layer(x[:, ::2])
        return self.outputs(x.flatten(2).transpose(1, 2), 1)


class LanguageModel(Pooled):
    """The embedding's weight is the output layer's, too: opposite orientations."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(5, 2), nn.Linear(2, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.head(self.hidden(self.embed(x)).tanh()), 1)


class EmbeddedTwice(LanguageModel):
    """As above; the tokens are embedded twice, and two layers read the weight out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.embed(x) + self.embed(x.flip(1)).tanh()).tanh()
        return self.outputs(self.head(x) + self.head(x.sin()), 1)


class PaddedLanguageModel(LanguageModel):
    """As above; token 0 is padding: no position of the embedding, but one of the output layer."""

    def __init__(self):
        super().__init__()
        self.embed.padding_idx = 0


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
