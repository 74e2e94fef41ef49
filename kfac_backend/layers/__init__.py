"""One file per kind of layer: how it turns input and output gradient into Gram matrices.

The registry is all that the rest of the package knows of layers.
"""

from kfac_backend.layers.elementwise import ExactRule
from kfac_backend.layers.modules import Bias, Scale
from kfac_backend.layers.parts import FunctionalLayer, LayerByParts, LinearPart
from kfac_backend.layers.registry import (
    Registered,
    declared_parameters,
    register_parameters,
    register_rule,
    registered,
    supported_layers,
)
from kfac_backend.layers.rule import ExampleGradients, Rule
from kfac_backend.layers.uses import Use
from kfac_backend.layers.weight_sharing import WeightSharingRule

__all__ = [
    "Bias",
    "ExactRule",
    "ExampleGradients",
    "FunctionalLayer",
    "LayerByParts",
    "LinearPart",
    "Registered",
    "Rule",
    "Scale",
    "Use",
    "WeightSharingRule",
    "declared_parameters",
    "register_parameters",
    "register_rule",
    "registered",
    "supported_layers",
]
