"""Map each kind of layer to its rule, and register users' rules."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from torch import nn

from kfac_backend.layers.elementwise import (
    Bias,
    BiasRule,
    ChannelsRule,
    LastAxesRule,
    Scale,
    ScaleRule,
)
from kfac_backend.layers.layer_by_parts import LayerByParts, LinearPart, TransposedPart
from kfac_backend.layers.rule import Rule
from kfac_backend.layers.weight_sharing import LinearRule, TransposedLinearRule

AnyRule = type[Rule] | type[LayerByParts]
T = TypeVar("T", bound=type)

RULES: dict[type[nn.Module], AnyRule | str] = {
    **dict.fromkeys((nn.Linear, LinearPart), LinearRule),
    TransposedPart: TransposedLinearRule,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "convolution.ConvolutionRule"),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "convolution.ConvTransposeRule",
    ),
    nn.Bilinear: "bilinear.BilinearRule",
    nn.Embedding: "embedding.EmbeddingRule",
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), LastAxesRule),
    **dict.fromkeys(
        (
            *(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
            *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.PReLU),
        ),
        ChannelsRule,
    ),
    nn.MultiheadAttention: "by_parts.attention.AttentionByParts",
    **dict.fromkeys(
        (
            *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
            *(nn.TransformerEncoder, nn.TransformerDecoder),
        ),
        "by_parts.attention.SequenceFirst",
    ),
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), "by_parts.recurrent.RecurrentByParts"),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), "by_parts.recurrent.CellByParts"),
    Bias: BiasRule,
    Scale: ScaleRule,
}
"""Maps a layer to its rule, or to the rule's module and name, which is imported with the first such
layer."""

RULES_BY_NAME: dict[str, AnyRule] = {
    "transformers.pytorch_utils.Conv1D": TransposedLinearRule,
    "transformers.modeling_utils.Conv1D": TransposedLinearRule,  # before version 4.28
}
"""Layers of other libraries by name, so that these libraries need not be imported."""

RULES_BY_ATTRIBUTE = {"_apply_gate": "by_parts.experts.ExpertsByParts"}
"""Layers of transformers that a decorator makes, by the attribute that it adds to their classes."""

BUILT_IN = dict(RULES)

PARAMETERS: dict[type[nn.Module], dict[str, tuple[int, ...] | None]] = {
    nn.MultiheadAttention: {"bias_k": None, "bias_v": None}
}


class Registered(NamedTuple):
    """Layer's rule, and the class that it was registered for."""

    layer_type: type[nn.Module]
    rule: AnyRule
    built_in: bool


def register_rule(*layer_types: type[nn.Module]) -> Callable[[T], T]:
    """Class decorator that registers a rule for these layers and their subclasses.

    The rule is a `Rule`, or a `LayerByParts` for a layer that consists of several linear maps. The
    first batch of each curvature pass checks it: the gradients by the rule must equal the gradients
    by autograd.

    Args:
        layer_types: the layers' classes; earlier rules for them are replaced.

    Raises:
        TypeError: an argument is not a layer's class, or the decorated class is not a rule.
    """
    for layer_type in layer_types or [None]:
        if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
            raise TypeError(
                f"register_rule got {layer_type!r}. Pass a class derived from nn.Module: "
                "@register_rule(MyLinear)."
            )

    def register(rule: T) -> T:
        if not issubclass(rule, Rule | LayerByParts):
            raise TypeError(
                f"{rule.__name__} is not a rule. Derive it from Rule, WeightSharingRule or "
                "LayerByParts of kfac_backend.layers."
            )
        RULES.update(dict.fromkeys(layer_types, rule))
        return rule

    return register


def register_parameters(*names: str, **views: tuple[int, ...]) -> Callable[[T], T]:
    """Class decorator for modules with their own parameters: biases, scales, class tokens.

    A pass can also find such parameters by following them through the operations of the forward
    pass. It does not need to follow registered parameters. The forward method must use them
    elementwise, so that it accepts a copy for each example, (N, ...) instead of (1, ...). Their
    blocks are then exact. The first batch of each pass proves this.

    ``@register_parameters("class_token", "position_embedding", scale=(1, 1, -1))``

    Args:
        names: parameters whose first axis has size one.
        views: for other parameters, the shape in which they are broadcast. It begins with 1: (1, 1,
            -1) for a scale (d,) of activations (N, R, d).

    Raises:
        ValueError: a view does not begin with 1.
    """
    for name, view in views.items():
        if not view or view[0] != 1:
            raise ValueError(
                f"The view {view} of parameter '{name}' must begin with 1, which becomes N."
            )

    def register(module_type: T) -> T:
        parameters = PARAMETERS.setdefault(module_type, {})
        parameters.update(dict.fromkeys(names), **views)
        return module_type

    return register


def registered(layer: nn.Module) -> Registered | None:
    """Return the rule of the layer's class or of its nearest base class; None if there is none."""
    for cls in type(layer).__mro__:
        rule = RULES.get(cls) or RULES_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is not None:
            kind = _imported(rule) if isinstance(rule, str) else rule
            return Registered(cls, kind, BUILT_IN.get(cls) is rule)
    for attribute, rule in RULES_BY_ATTRIBUTE.items():
        if hasattr(type(layer), attribute):
            return Registered(type(layer), _imported(rule), True)
    return None


def _imported(rule: str) -> AnyRule:
    module, _, name = rule.rpartition(".")
    return getattr(import_module(f"kfac_backend.layers.{module}"), name)


def declared_parameters(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the registered parameters of a module's class and base classes, with their views."""
    declared: dict[str, Any] = {}
    for cls in reversed(type(module).__mro__):
        declared |= PARAMETERS.get(cls, {})
    return declared


def supported_layers() -> list[str]:
    """Return the names of the layers that have a rule, without the parts of others."""
    return [kind.__name__ for kind in RULES if not issubclass(kind, LinearPart)]
