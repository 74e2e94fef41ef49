"""Which trainable parameters have a rule; whatever has none is an error that names it."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfac_backend.options import Unsupported
from kfac_backend.rules import RULES, Rule, rule_for

__all__ = ["Coverage", "TrackedLayer", "coverage_of_blocks", "find_coverage"]


@dataclass(frozen=True, eq=False)
class TrackedLayer:
    """A layer with a rule and at least one trainable parameter; hashed by identity."""

    name: str
    layer: nn.Module
    rule: type[Rule]
    parameters: dict[str, str]
    """Local name ("weight") -> name in the model ("stage1.0.conv1.weight")."""

    def __str__(self) -> str:
        return f"'{self.name}' ({type(self.layer).__name__})"


@dataclass(frozen=True)
class Coverage:
    """What a curvature pass computes: the layers with rules, and parameters by their diagonal."""

    layers: list[TrackedLayer]
    diagonal: list[str]
    names: list[str]
    """All parameters that get a block, in the order of ``model.named_parameters()``."""


def find_coverage(model: nn.Module, unsupported: Unsupported = "error") -> Coverage:
    """Sort the trainable parameters of a model into those with a rule and those without.

    Args:
        model: the model; parameters with ``requires_grad=False`` are left out.
        unsupported: "error" raises, "freeze" leaves parameters without a rule out with a warning
            that names them, "diagonal" asks for the exact diagonal of their block.

    Raises:
        ValueError: no trainable parameter, a 0-dimensional one, BatchNorm in train mode.
        NotImplementedError: a layer without a rule, a tensor shared by two layers.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(
            "The model has no trainable parameter. Call requires_grad_(True) on those whose "
            "curvature is wanted."
        )
    for name, p in trainable.items():
        if p.dim() == 0:
            raise ValueError(
                f"Parameter '{name}' is 0-dimensional, which laplace-torch cannot hold. "
                "Give it shape (1,), for example nn.Parameter(torch.zeros(1))."
            )
    _check_batch_norm(model)
    _check_not_shared(model)

    layers, without_rule = [], []
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        own = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        rule = rule_for(module)
        known = {n: prefix + n for n in own if rule and n in rule.parameter_names}
        if rule and known:
            layers.append(TrackedLayer(module_name, module, rule, known))
        without_rule += [(module_name, module, prefix + n) for n in own if n not in known]

    if without_rule and unsupported == "error":
        raise _no_rule(*without_rule[0])
    if without_rule and unsupported == "freeze":
        listing = ", ".join(name for _, _, name in without_rule)
        warnings.warn(f"Treated as constants, having no K-FAC rule: {listing}.", stacklevel=2)
    diagonal = [name for _, _, name in without_rule] if unsupported == "diagonal" else []
    covered = {full for layer in layers for full in layer.parameters.values()} | set(diagonal)
    if not covered:
        raise ValueError("No trainable parameter of the model has a K-FAC rule.")
    return Coverage(layers, diagonal, [name for name in trainable if name in covered])


def coverage_of_blocks(model: nn.Module, sizes: Mapping[str, int]) -> Coverage:
    """The layers and parameters that have a block; the others are constants.

    Args:
        model: the model.
        sizes: parameter name -> entries of its block.

    Raises:
        ValueError: no block, one of a parameter that the model lacks or has in another size, or of
            a frozen one.
    """
    parameters = dict(model.named_parameters())
    unknown = [name for name in sizes if name not in parameters]
    if unknown or not sizes:
        what = f"a block for '{unknown[0]}', which the model lacks" if unknown else "no block"
        raise ValueError(f"The posterior has {what}; it belongs to another model.")
    for name, size in sizes.items():
        if size != parameters[name].numel():
            raise ValueError(
                f"The posterior's block of '{name}' has {size} entries, the parameter "
                f"{parameters[name].numel()}; it belongs to another model."
            )
    coverage = find_coverage(model, "diagonal")
    frozen = [name for name in sizes if name not in coverage.names]
    if frozen:
        raise ValueError(
            f"Parameter '{frozen[0]}' has a posterior, but requires_grad=False. Call "
            "requires_grad_(True) on it, as it was when the posterior was fitted."
        )
    layers = []
    for tracked in coverage.layers:
        own = {local: name for local, name in tracked.parameters.items() if name in sizes}
        if own:
            layers.append(TrackedLayer(tracked.name, tracked.layer, tracked.rule, own))
    diagonal = [name for name in coverage.diagonal if name in sizes]
    return Coverage(layers, diagonal, list(sizes))


def _check_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.training:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) is in train mode, where it mixes the "
                "examples of a batch and the GGN is not defined. Call model.eval() first."
            )
        if module.running_mean is None:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) keeps no running statistics, so that it "
                "mixes the examples of a batch in eval mode, too. Use track_running_stats=True."
            )


def _check_not_shared(model: nn.Module) -> None:
    # Each module comes once, so that one module under two names is no tie.
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for local, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{local}" if prefix else local
            if p.requires_grad and p in names:
                raise NotImplementedError(
                    f"Parameters '{names[p]}' and '{name}' are the same tensor; tied weights are "
                    "not supported yet. Use separate tensors, or freeze it "
                    "(requires_grad_(False))."
                )
            names[p] = name


def _no_rule(module_name: str, module: nn.Module, parameter: str) -> NotImplementedError:
    supported = ", ".join(layer_type.__name__ for layer_type in RULES)
    return NotImplementedError(
        f"Parameter '{parameter}' of layer '{module_name}' ({type(module).__name__}) has no K-FAC "
        f"rule. Supported: {supported}. Freeze it (requires_grad_(False)), or pass "
        'unsupported="freeze" or unsupported="diagonal".'
    )
