"""One file per kind of layer: how it turns input and output gradient into Gram matrices.

The registry below is all that the rest of the package knows of layers.
"""

from torch import nn

from kfac_backend.rules.affine import BiasRule, ScaleRule
from kfac_backend.rules.convolution import Conv2dRule
from kfac_backend.rules.linear import LinearRule
from kfac_backend.rules.rule import ExampleGradients, GramSums, Rule, WeightSharingRule

__all__ = ["RULES", "ExampleGradients", "GramSums", "Rule", "WeightSharingRule", "rule_for"]

RULES: dict[type[nn.Module], type[Rule]] = {
    rule.layer_type: rule for rule in (LinearRule, Conv2dRule, BiasRule, ScaleRule)
}


def rule_for(layer: nn.Module) -> type[Rule] | None:
    """The rule of the layer's class or of its nearest base class; None if there is none."""
    return next((RULES[cls] for cls in type(layer).__mro__ if cls in RULES), None)
