"""Compute Gram matrices from inputs and output gradients, with one file per kind of layer.

A pass finds a layer's rule in the registry.
"""

from kfac_backend.layers.elementwise import Bias, ExactRule, Scale
from kfac_backend.layers.layer_by_parts import FunctionalLayer, LayerByParts, LinearPart
from kfac_backend.layers.registry import (
    Registered,
    declared_parameters,
    register_parameters,
    register_rule,
    registered,
    supported_layers,
)
from kfac_backend.layers.rule import ExampleGradients, Rule, Use
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
