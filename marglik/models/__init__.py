"""Networks for classification in which every layer has a K-FAC rule."""

from marglik.models.graph_network import GraphNetwork
from marglik.models.small import MLP, LeNet, Standardised
from marglik.models.transformers import GPT, VisionTransformer
from marglik.models.wide_resnet_fixup import WideResNetFixup

__all__ = [
    "GPT",
    "MLP",
    "GraphNetwork",
    "LeNet",
    "Standardised",
    "VisionTransformer",
    "WideResNetFixup",
]
