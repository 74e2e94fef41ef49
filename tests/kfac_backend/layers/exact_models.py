"""Deep linear networks where one of the two modes is exact, by the paper's propositions."""

from torch import nn


class ScaledSum(nn.Module):
    """c Σ_r x_r over all axes between batch and features."""

    def __init__(self, c):
        super().__init__()
        self.c = c

    def forward(self, x):
        return self.c * x.flatten(1, -2).sum(1)


class ChannelsLast(nn.Module):
    """(N, C, H, W) as (N, H, W, C)."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1)


def linear_layers(depth, bias=False):
    return [nn.Linear(4, 4, bias) for _ in range(depth)] + [nn.Linear(4, 2, bias)]


def summed(depth, c):
    return [*linear_layers(depth, bias=True), ScaledSum(c)]


def pooled_convolution():
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    return [convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]


def pooled_circular_convolutions():
    return [
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]


def pointwise_convolutions():
    return [nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False), ChannelsLast()]


SINGLE, DEEP = 0, 2
CASES = {
    # name: (mode that is exact, network, input shape)
    "single layer, expand setting": ("expand", lambda: linear_layers(SINGLE), (5, 3, 4)),
    "deep, expand setting": ("expand", lambda: linear_layers(DEEP), (5, 3, 4)),
    "two shared axes, expand setting": ("expand", lambda: linear_layers(DEEP), (5, 3, 2, 4)),
    "single layer, sum": ("reduce", lambda: summed(SINGLE, 1.0), (5, 3, 4)),
    "deep, mean": ("reduce", lambda: summed(DEEP, 1 / 3), (5, 3, 4)),
    "deep, scaled sum": ("reduce", lambda: summed(DEEP, -2.5), (5, 3, 4)),
    "two shared axes, sum": ("reduce", lambda: summed(DEEP, 0.7), (5, 3, 2, 4)),
    "convolution, average pooling": ("reduce", pooled_convolution, (5, 3, 6, 5)),
    "circular convolutions, average pooling": (
        "reduce",
        pooled_circular_convolutions,
        (5, 3, 4, 5),
    ),
    "pointwise convolutions, an output per pixel": ("expand", pointwise_convolutions, (5, 3, 3, 2)),
}
