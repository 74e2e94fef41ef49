"""One file per kind of layer: how it turns input and output gradient into Gram matrices.

The registry is all that the rest of the package knows of layers.
"""

from kfac_backend.rules.elementwise import ExactRule
from kfac_backend.rules.matrix import WeightSharingRule
from kfac_backend.rules.parts import LayerByParts, LinearPart
from kfac_backend.rules.registry import (
    Registered,
    declared_parameters,
    register_parameters,
    register_rule,
    registered,
    supported_layers,
)
from kfac_backend.rules.rule import ExampleGradients, Rule, Use

__all__ = [
    "ExactRule",
    "ExampleGradients",
    "LayerByParts",
    "LinearPart",
    "Registered",
    "Rule",
    "Use",
    "WeightSharingRule",
    "declared_parameters",
    "register_parameters",
    "register_rule",
    "registered",
    "supported_layers",
]
