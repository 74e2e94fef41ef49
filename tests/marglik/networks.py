"""Networks of 8×8 images that the backend does not cover, and networks with random parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class WithBilinear(nn.Module):
    """Multiplies the features with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(64, 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) as logits (N, 10)."""
        return self.product(x.flatten(1), x.flatten(1))


def randomised(model: nn.Module) -> nn.Module:
    """The model in float64, with random biases and norms too, so that each parameter matters."""
    torch.manual_seed(0)
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def trained_loss(model: nn.Module, x: Any, y: Tensor) -> float:
    """The loss after 60 steps, by which every parameter has got a gradient."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    return loss.item()
