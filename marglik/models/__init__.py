"""Networks for classification. All of their layers have a K-FAC rule."""

from marglik.models.small import MLP, LeNet, Standardised
from marglik.models.wide_resnet_fixup import WideResNetFixup

__all__ = ["MLP", "LeNet", "Standardised", "WideResNetFixup"]
