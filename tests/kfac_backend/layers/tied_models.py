"""Models that use one weight more than once."""

import torch
from torch import Tensor, nn

from tests.kfac_backend.networks import Model


class Pooled(Model):
    """A loss term per position, or, if ``pool``, one of their scaled sum."""

    pool = True

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return 0.5 * f.sum(1) if self.pool else f


def called_twice():
    """One layer for two halves of the positions."""
    return Pooled(
        lambda m, x: torch.cat([m.layer(x[:, :1]), m.layer(x[:, 1:])], 1), layer=nn.Linear(3, 3)
    )


def two_layers():
    """Two layers that have one weight and biases of their own, one after the other."""
    model = Pooled(
        lambda m, x: m.second(m.first(x).tanh()), first=nn.Linear(3, 3), second=nn.Linear(3, 3)
    )
    model.second.weight = model.first.weight
    return model


def tied_bias():
    """Two layers with one bias and weights of their own."""
    model = Pooled(
        lambda m, x: m.second(m.first(x).tanh()), first=nn.Linear(3, 3), second=nn.Linear(3, 3)
    )
    model.second.bias = model.first.bias
    return model


def two_names():
    """One layer that the model has under two names."""
    layer = nn.Linear(3, 3)
    return Pooled(lambda m, x: m.second(m.first(x).tanh()), first=layer, second=layer)


def recurrent():
    """A recurrent network by hand: the state's layer is called once for each position."""

    def forward(m, x):
        read, state, f = m.read(x), torch.zeros_like(x[:, 0]), []
        for r in range(x.shape[1]):
            state = (m.state(state) + read[:, r]).tanh()
            f.append(m.head(state))
        return torch.stack(f, 1)

    layers = {"state": nn.Linear(3, 3), "read": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
    return Pooled(forward, **layers)


def positions_then_mean():
    """One layer for each position and, later, for their mean: three positions and one."""

    def forward(m, x):
        x = m.layer(x).tanh()
        return x + m.layer(x.mean(1, keepdim=True))

    return Pooled(forward, layer=nn.Linear(3, 3))


def encoder_twice():
    """A whole Transformer layer, called twice."""
    layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
    return Pooled(lambda m, x: m.layer(m.layer(m.embed(x))), layer=layer, embed=nn.Linear(3, 4))


def groups_twice():
    """A convolution with groups, called twice."""

    def forward(m, x):
        x = m.layer(x.reshape(len(x), 2, 2, -1)).tanh()
        return m.layer(x[:, ::2]).flatten(2).transpose(1, 2)

    layer = nn.Conv2d(2, 4, 2, padding=1, stride=2, groups=2, bias=False)
    return Pooled(forward, layer=layer)


def language_model(forward=None, padding_idx=None):
    """The embedding's weight is the output layer's, too: opposite orientations.

    Padding is no position of the embedding, but one of the output layer.
    """
    model = Pooled(
        forward or (lambda m, x: m.head(m.hidden(m.embed(x)).tanh())),
        embed=nn.Embedding(5, 2, padding_idx),
        hidden=nn.Linear(2, 2),
        head=nn.Linear(2, 5, bias=False),
    )
    model.head.weight = model.embed.weight
    return model


def embedded_twice():
    """As above; the tokens are embedded twice, and two layers read the weight out."""

    def forward(m, x):
        x = m.hidden(m.embed(x) + m.embed(x.flip(1)).tanh()).tanh()
        return m.head(x) + m.head(x.sin())

    return language_model(forward)


def autoencoder():
    """A convolution, and a transposed one with its weight: opposite orientations."""
    model = Pooled(
        lambda m, x: m.decode(m.encode(x.reshape(len(x), 2, -1)).tanh()).transpose(1, 2),
        encode=nn.Conv1d(2, 3, 2, stride=1, bias=False),
        decode=nn.ConvTranspose1d(3, 2, 2, stride=1, bias=False),
    )
    model.decode.weight = model.encode.weight
    return model
