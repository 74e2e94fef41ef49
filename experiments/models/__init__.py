"""Networks of the studies: transformers of images and of text, and a graph network."""

from experiments.models.graph_network import GraphNetwork
from experiments.models.transformers import GPT, VisionTransformer

__all__ = ["GPT", "GraphNetwork", "VisionTransformer"]
