"""A small network, its data and its fitted posterior, for the tests of predictives."""

import torch
from torch import nn

from marglik import KronLaplace

DELTAS = torch.linspace(0.5, 3.0, 6)


class TakesMapping(nn.Module):
    """A network of batches that are mappings."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return self.net(batch["pixels"])


def network(groups=1, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Conv2d(4, 4, 1, groups=groups),
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


def data(likelihood="classification", dtype=torch.float64, n=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator).to(dtype)
    y = torch.randn(n, 3, dtype=torch.float64, generator=generator).to(dtype)
    return x, {"classification": y.argmax(1), "bernoulli": (y > 0).to(y)}.get(likelihood, y)


def fitted(likelihood="classification", model=None, dtype=torch.float64, **options):
    """The posterior, and the inputs that it was fitted to."""
    model = model or network(dtype=dtype)
    la = KronLaplace(model, likelihood, **{"prior_precision": DELTAS} | options)
    la.fit([data(likelihood, dtype)])
    return la, data(likelihood, dtype)[0]
