"""Which trainable parameters have a rule, and the proof that the hooks see every use of them.

A wrong number is worse than an error: whatever is not covered raises here, by name, before any
curvature is computed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from kfac_backend.options import KfacApprox, Unsupported
from kfac_backend.rules import RULES, Rule, rule_for

__all__ = ["Coverage", "TrackedLayer", "find_coverage", "verify_coverage"]


@dataclass(frozen=True)
class TrackedLayer:
    """A layer with a rule and at least one trainable parameter."""

    name: str
    layer: nn.Module
    rule: Rule
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


def verify_coverage(model: nn.Module, coverage: Coverage, x: Any, kfac_approx: KfacApprox) -> None:
    """Prove with one forward pass that the hooks see every use of every tracked parameter.

    Each tracked layer's output is cut off from the graph. Whatever then still depends on a tracked
    parameter used it outside of its layer's forward (functionally, or in a compiled model).

    Raises:
        NotImplementedError: such a use; a layer that runs twice in one forward pass; a subclass
            that computes something else; positions folded into the batch axis where the rule
            needs examples.
        TypeError: a layer whose input is not of floating point.
    """
    calls: dict[str, int] = {}
    folded: list[TrackedLayer] = []
    leading: dict[str, int] = {}

    def check(tracked: TrackedLayer) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            a = first_input(args, kwargs)
            calls[tracked.name] = calls.get(tracked.name, 0) + 1
            if calls[tracked.name] > 1:
                raise NotImplementedError(
                    f"Layer {tracked} runs more than once in a forward pass; tied weights are not "
                    "supported yet. Use separate layers, or freeze it (requires_grad_(False))."
                )
            if a.requires_grad:
                raise _used_outside(tracked_parameters, a, f"the input of layer {tracked}")
            if type(layer).forward is not tracked.rule.layer_type.forward:
                _check_reference(tracked, a, output)
            leading[tracked.name] = len(a)
            return output.detach()

        return hook

    def check_dtype(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        a = first_input(args, kwargs)
        if not a.is_floating_point():
            name = next(t.name for t in coverage.layers if t.layer is layer)
            raise TypeError(
                f"Layer '{name}' got an input of dtype {a.dtype}; it needs floating point. "
                "Convert the data, for example x.float() / 255 for images in uint8."
            )

    tracked_parameters = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if any(name in layer.parameters.values() for layer in coverage.layers)
    }
    handles: list[RemovableHandle] = []
    for tracked in coverage.layers:
        handles.append(tracked.layer.register_forward_pre_hook(check_dtype, with_kwargs=True))
        handles.append(tracked.layer.register_forward_hook(check(tracked), with_kwargs=True))
    try:
        with torch.enable_grad():
            f = call_with(model, tracked_parameters, x)
    finally:
        for handle in handles:
            handle.remove()

    if isinstance(f, Tensor) and f.requires_grad:
        raise _used_outside(tracked_parameters, f, "the model's output")
    if isinstance(f, Tensor) and f.dim():
        for tracked in coverage.layers:
            if leading.get(tracked.name, len(f)) != len(f) and (
                kfac_approx == "reduce" or tracked.rule.needs_examples
            ):
                folded.append(tracked)
        if folded:
            raise NotImplementedError(
                f"Layer {folded[0]} got {leading[folded[0].name]} rows in a batch of {len(f)} "
                f"examples; kfac_approx={kfac_approx!r} must know each example's rows. Keep the "
                "batch axis first and the shared axes apart: (N, ..., d)."
            )
    unused = [str(tracked) for tracked in coverage.layers if tracked.name not in calls]
    if unused:
        warnings.warn(
            f"No part of the forward pass, so that their blocks are zero: {', '.join(unused)}.",
            stacklevel=2,
        )


def call_with(model: nn.Module, parameters: dict[str, Tensor], x: Any) -> Any:
    """The model's output at x with these parameters, and its other parameters as constants."""
    constants = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, constants | parameters, (x,))


def first_input(args: tuple, kwargs: dict) -> Tensor:
    """A layer's input, from the arguments that a forward hook sees."""
    return args[0] if args else next(iter(kwargs.values()))


def _check_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) is in train mode, where it mixes the "
                "examples of a batch and the GGN is not defined. Call model.eval() first."
            )


def _check_not_shared(model: nn.Module) -> None:
    names: dict[nn.Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad and p in names:
            raise NotImplementedError(
                f"Parameters '{names[p]}' and '{name}' are the same tensor; tied weights are not "
                "supported yet. Use separate tensors, or freeze it (requires_grad_(False))."
            )
        names[p] = name


def _no_rule(module_name: str, module: nn.Module, parameter: str) -> NotImplementedError:
    supported = ", ".join(layer_type.__name__ for layer_type in RULES)
    return NotImplementedError(
        f"Parameter '{parameter}' of layer '{module_name}' ({type(module).__name__}) has no K-FAC "
        f"rule. Supported: {supported}. Freeze it (requires_grad_(False)), or pass "
        'unsupported="freeze" or unsupported="diagonal".'
    )


def _check_reference(tracked: TrackedLayer, a: Tensor, output: Tensor) -> None:
    with torch.no_grad():
        expected = tracked.rule.reference(tracked.layer, a)
        same = expected.shape == output.shape and torch.allclose(
            expected, output, rtol=1e-3, atol=1e-3 * float(expected.abs().max() or 1.0)
        )
    if not same:
        raise NotImplementedError(
            f"Layer {tracked} overrides forward and computes something else than "
            f"{tracked.rule.layer_type.__name__}; its rule would give wrong numbers. Freeze it "
            '(requires_grad_(False)), or pass unsupported="freeze" with a class of its own.'
        )


def _used_outside(parameters: dict[str, Tensor], value: Tensor, where: str) -> NotImplementedError:
    grads = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    names = ", ".join(
        f"'{name}'" for name, g in zip(parameters, grads, strict=True) if g is not None
    )
    return NotImplementedError(
        f"{names} reached {where} outside of the forward of its own layer (used functionally, or "
        "in a compiled model), where hooks cannot see it. Call the layer itself, pass the model "
        "before torch.compile, or freeze the parameter (requires_grad_(False))."
    )
