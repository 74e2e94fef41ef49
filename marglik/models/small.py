"""Small networks for small data: an MLP, and a LeNet with two convolutions and three linear layers.

`marglik train` sets sizes of None from the data.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from kfac_backend.engine.model_calls import VECTORISED
from kfac_backend.options import check_option, check_positive

Activation = Literal["relu", "tanh", "gelu"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class MLP(nn.Module):
    """Fully connected network on the flattened input, which returns logits.

    Args:
        in_features: number of features of an example; channels × height × width for images.
        hidden: widths of the hidden layers, from the first to the last; empty for a linear model.
        num_classes: number C of classes or outputs.
        activation: nonlinearity after each hidden layer.

    Raises:
        ValueError: a width is missing or below 1, or ``activation`` is unknown.
    """

    def __init__(
        self,
        in_features: int | None = None,
        hidden: tuple[int, ...] = (128, 128),
        num_classes: int | None = None,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if in_features is None or num_classes is None:
            raise ValueError(
                f"in_features={in_features}, num_classes={num_classes}: pass both numbers, because "
                "there is no data to infer them from."
            )
        widths = (in_features, *hidden, num_classes)
        if min(widths) < 1:
            raise ValueError(
                f"in_features={in_features}, hidden={tuple(hidden)}, num_classes={num_classes}: "
                "every width must be at least 1."
            )
        check_option("activation", activation, Activation)
        *inner, last = [nn.Linear(d_in, d_out) for d_in, d_out in pairwise(widths)]
        # The last layer has no activation: its outputs are logits.
        layers: list[nn.Module] = [nn.Flatten()]
        for linear in inner:
            layers += [linear, _ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers, last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of examples (N, ...) with in_features features each."""
        return self.layers(x)


class Standardised(nn.Module):
    """Network that standardises its inputs (N, d): it returns f((x − mean) / std).

    Args:
        model: the network f.
        mean: means (d,) of the columns of the training split.
        std: standard deviations (d,) of these columns; 1 for a constant column.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        """Return f at the standardised columns."""
        return self.model((x - self.mean) / self.std)


class LeNet(nn.Module):
    """LeNet-5 with ReLU and maximum pooling, which returns logits.

    It is a small network for small images, and trains in seconds on a CPU. Unlike in the original,
    both 5×5 convolutions are padded to keep the resolution. The network therefore supports 8×8
    digits as well as 28×28 and 32×32 images.

    Source: LeCun, Bottou, Bengio & Haffner 1998, "Gradient-Based Learning Applied to Document
    Recognition".

    Args:
        num_classes: number C of classes.
        in_channels: number of channels of the images: 1 for greyscale, 3 for colour.
        image_size: height and width of the images in pixels, at least 4.

    Raises:
        ValueError: ``image_size`` is below 4, or an argument is missing or below 1.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        in_channels: int | None = None,
        image_size: int | None = None,
    ) -> None:
        super().__init__()
        if num_classes is None or in_channels is None or image_size is None:
            raise ValueError(
                f"num_classes={num_classes}, in_channels={in_channels}, image_size={image_size}: "
                "pass all numbers, because there is no data to infer them from."
            )
        if image_size < 4:
            raise ValueError(
                f"image_size={image_size} is too small: LeNet halves the resolution twice and "
                "needs at least 4 pixels per side. Enlarge the images, or use an MLP."
            )
        check_positive("num_classes", num_classes)
        check_positive("in_channels", in_channels)
        pooled = image_size // 2 // 2  # each pooling drops an odd last row and column
        self.conv1 = nn.Conv2d(in_channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=2)
        self.fc1 = nn.Linear(16 * pooled * pooled, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of images (N, in_channels, image_size, image_size)."""
        x = max_pool2d(relu(self.conv1(x)), 2)  # (N, 6, image_size/2, image_size/2)
        x = max_pool2d(relu(self.conv2(x)), 2)  # (N, 16, image_size/4, image_size/4)
        x = relu(self.fc1(x.flatten(1)))
        return self.fc3(relu(self.fc2(x)))


VECTORISED.update((MLP, Standardised, LeNet))
