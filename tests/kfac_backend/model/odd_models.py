"""Networks that are a function of their layers, for what a pass proves of them."""

import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors


class Model(nn.Module):
    """A function of named children."""

    def __init__(self, function, **children):
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(children)
        for i, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(i)
            p.data = 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        self.double()

    def forward(self, x):
        return self.function(self.layers, x)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double()


def factors(model, x, y=None, **options):
    """Of one batch; labels are 0, 1, 0, ... where none are given, here or in a mapping."""
    if y is None and not isinstance(x, torch.Tensor):
        batch = x
    else:
        batch = x, torch.arange(len(x)) % 2 if y is None else y
    return kronecker_factors(model, [batch], "classification", **options)


def assert_same_blocks(first, second):
    for mine, theirs in zip(first.blocks.values(), second.blocks.values(), strict=True):
        assert_close(mine.to_dense(), theirs.to_dense())


class Gain(nn.Module):
    """A layer without a rule."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.by
