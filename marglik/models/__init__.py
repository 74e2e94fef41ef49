"""Networks for classification that K-FAC covers in every layer."""

from marglik.models.lenet import LeNet
from marglik.models.mlp import MLP
from marglik.models.wide_resnet_fixup import WideResNetFixup

__all__ = ["MLP", "LeNet", "WideResNetFixup"]
