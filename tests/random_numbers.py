"""Random numbers of a seed, and how far two tensors are apart."""

import torch
from torch import Tensor

__all__ = ["error", "normal"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖."""
    return float((found - exact).norm() / exact.norm())
