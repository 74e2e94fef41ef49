"""Networks of 8×8 images that the backend does not cover, and networks with random parameters."""

import torch
from torch import Tensor, nn


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
