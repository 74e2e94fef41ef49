"""Layers that torch.nn lacks and that the backend covers: the scalars of Fixup networks."""

import torch
from torch import Tensor, nn

__all__ = ["Bias", "Scale"]


class Bias(nn.Module):
    """Adds one learned scalar to every entry of its input.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3. Shape (1,) and not (), since
    laplace-torch rejects 0-dimensional parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + bias, in the shape of x."""
        return x + self.bias


class Scale(nn.Module):
    """Multiplies every entry of its input by one learned scalar.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · x, in the shape of x."""
        return x * self.scale
