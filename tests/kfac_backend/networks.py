"""Networks and batches for the tests of the curvature pass."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kfac_backend.layers import Bias, Scale
from marglik.models import WideResNetFixup
from tests.kfac_backend.block_checks import randomize


class Model(nn.Module):
    """A function of the model and its input; children and parameters have the names given."""

    def __init__(self, function, **own):
        super().__init__()
        self.function = function
        for name, value in own.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x):
        return self.function(self, x)


def random_model(function, **own):
    """The same in float64 and eval mode, its parameters normal."""
    return randomize(Model(function, **own), 0.5)


class OwnNorm(nn.Module):
    """A LayerNorm without a rule: its parameters are put together to the matrix of a linear map."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        matrix = torch.cat([torch.diag(self.weight), self.bias[:, None]], 1)
        z = nn.functional.layer_norm(x, x.shape[-1:])
        # From the left, so that the examples do not come first: as a weight it would be followed.
        return (matrix @ torch.cat([z, torch.ones_like(z[..., :1])], -1).mT).mT


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), Bias(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 2, groups=2),
        Scale(), Bias(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(),
        nn.Linear(5, 3),
    ).double()  # fmt: skip


def data(n=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def wide_resnet(width=1, dtype=torch.float64):
    torch.manual_seed(0)
    model = WideResNetFixup(widen_factor=width).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model.to(dtype)


def images(n, dtype=torch.float64, size=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, size, size, generator=generator).to(dtype)
    return x, torch.randint(10, (n,), generator=generator)


def convolution_flops(work):
    """Of the convolutions that some work runs, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    return counts.get(aten.convolution, 0), counts.get(aten.convolution_backward, 0)
