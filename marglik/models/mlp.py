"""Fully connected network."""

from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn

__all__ = ["MLP"]

Activation = Literal["relu", "tanh", "gelu"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class MLP(nn.Module):
    """Logits of a fully connected network on the flattened input.

    Args:
        in_features: numbers in one example: channels × height × width for images.
        hidden: widths of the hidden layers, from the first to the last; empty for a linear model.
        num_classes: C, the number of classes.
        activation: nonlinearity after each hidden layer.

    Raises:
        ValueError: if a width is below 1, or ``activation`` is unknown.
    """

    def __init__(
        self,
        in_features: int,
        hidden: tuple[int, ...] = (128, 128),
        num_classes: int = 10,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        widths = (in_features, *hidden, num_classes)
        if min(widths) < 1:
            raise ValueError(
                f"in_features={in_features}, hidden={tuple(hidden)}, num_classes={num_classes}: "
                "every width must be at least 1."
            )
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r} is unknown; choose one of {get_args(Activation)}."
            )
        *inner, last = [nn.Linear(d_in, d_out) for d_in, d_out in pairwise(widths)]
        # The last layer has no activation: its outputs are logits.
        layers: list[nn.Module] = [nn.Flatten()]
        for linear in inner:
            layers += [linear, _ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers, last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of examples (N, ...) with in_features numbers each."""
        return self.layers(x)
