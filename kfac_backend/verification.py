"""The proof, on a pass's first batches, that the hooks of `capture` see all that rules rely on.

A wrong number is worse than an error: a layer that is used outside of its forward, that computes
something else than its rule supposes, or that mixes examples raises here, by name.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.calls import call_with, explicit_forwards
from kfac_backend.capture import Capture, first_input, rows_of
from kfac_backend.comparison import close, noise_like, same_with_derivatives
from kfac_backend.coverage import Coverage, TrackedLayer
from kfac_backend.dense_gradients import layer_gradients
from kfac_backend.rules import Use
from kfac_backend.rules.own_parameters import OwnParameter
from kfac_backend.substitution import no_copies, verify_own_parameters

__all__ = ["verify_independence", "verify_uses"]


def verify_uses(model: nn.Module, coverage: Coverage, x: Any) -> Any:
    """Prove with a forward pass that each parameter acts through its layer's class alone.

    Each tracked layer's output is cut off; whatever then depends on a parameter bypassed a hook.
    A further forward pass compares layers made of parts, if there are any.

    Returns:
        The model's output.

    Raises:
        NotImplementedError: a tracked parameter is used outside of its layer's forward; a layer
            computes something else than the class, the parts or the rule that are supposed.
    """
    tracked_names = {name for t in coverage.layers for name in t.parameters.values()}
    parameters = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if name in tracked_names
    }
    called: set[str] = set()

    def check(tracked: TrackedLayer) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            a = first_input(args, kwargs)
            if a.requires_grad:
                raise _used_outside(parameters, a, f"the input of layer {tracked}")
            own = {local: parameters[name] for local, name in tracked.parameters.items()}
            if not _computes_its_class(tracked, own, args, kwargs, output):
                raise NotImplementedError(
                    f"Layer {tracked} computes something else than its class "
                    f"{tracked.layer_type.__name__} and the rule for it (an overridden forward, a "
                    "hook, or computed weights), so that its rule would give wrong numbers. Derive "
                    "it from nn.Module, or freeze it (requires_grad_(False))."
                )
            called.add(tracked.name)
            return output.detach()

        return hook

    handles = [t.layer.register_forward_hook(check(t), with_kwargs=True) for t in coverage.layers]
    try:
        with torch.enable_grad(), explicit_forwards(coverage):
            f = call_with(model, parameters, x)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(f, Tensor) and f.requires_grad:
        raise _used_outside(parameters, f, "the model's output")
    unused = [str(tracked) for tracked in coverage.layers if tracked.name not in called]
    if unused:
        warnings.warn(
            f"No part of the forward pass, so that their blocks are zero: {', '.join(unused)}.",
            stacklevel=2,
        )
    return f


def verify_independence(
    model: nn.Module,
    coverage: Coverage,
    x: Any,
    channels_last: bool = False,
    ignored: Tensor | None = None,
) -> bool:
    """Prove with one forward pass that no row of a layer belongs to two examples.

    Further ones compare copies of modules' own parameters, if there are any.

    Args:
        model: the model.
        coverage: its tracked layers.
        x: some examples.
        channels_last: as of `Capture`.
        ignored: loss terms (N, ...) that do not count.

    Returns:
        Whether that could be told: not from a single example, nor from numbers that are not finite.

    Raises:
        NotImplementedError: the first example's output reaches a row that another's reaches, or a
            row that does not count; own parameters that are not used elementwise.
    """
    if coverage.own_parameters:
        verify_own_parameters(model, coverage, x)
    reached: dict[tuple[TrackedLayer, Use], list[Tensor]] = {}
    finite = True

    def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        nonlocal finite
        finite = finite and bool(torch.isfinite(b).all())
        reached.setdefault((tracked, use), []).append((b.reshape(len(b), -1) != 0).any(1))

    capture = Capture(
        model, coverage, lambda tracked, use: None, record, channels_last=channels_last
    )
    with capture:
        f = capture.forward(x)
        if not isinstance(f, Tensor) or f.dim() < 2:
            return False  # a wrong output is reported with the targets
        if not torch.isfinite(f).all():
            return False  # reported by name, after the forward pass
        first = noise_like(f)
        if ignored is not None and ignored.shape == f.shape[:-1]:
            first = first * ~ignored[..., None]
        rest = first.clone()
        first[1:], rest[:1] = 0.0, 0.0
        capture.backward(f, [first, rest])
    if not finite:
        return False  # 0 · NaN is in every row; the eigenvalues will name the layer
    for (tracked, use), seen in reached.items():
        if len(seen) < 2:
            continue
        by_first, by_rest = seen
        if use.rows is not None:
            index, N = use.rows.index, use.rows.num_examples
            if (by_first | by_rest)[index == N].any():
                raise NotImplementedError(
                    f"In layer {tracked} rows that do not count reach the output. Leave them out "
                    "of whatever pools over positions, or let them count (those that a batch's "
                    "mask hides: dict_key_mask=None)."
                )
            mixed = by_first[index != 0].any() or by_rest[index == 0].any()
        elif len(by_first) == len(f):  # an example's own row has its own index
            mixed = by_first[1:].any() or by_rest[:1].any()
        else:
            mixed = (by_first & by_rest).any()
        if mixed and isinstance(tracked.layer, OwnParameter):
            raise no_copies([tracked.name])
        if mixed:
            raise NotImplementedError(
                f"In layer {tracked} the rows of different examples mix: its input has no batch "
                "axis in front, or a layer behind it shares information within a batch. Put the "
                "batch axis first (N, ..., d), say which example each row belongs to "
                "(examples_of_rows), make what belongs together one example with several loss "
                "terms (outputs (N, R, C)), or freeze it (requires_grad_(False))."
            )
    return len(f) > 1


def _computes_its_class(
    tracked: TrackedLayer, own: dict[str, Tensor], args: tuple, kwargs: dict, output: Any
) -> bool:
    """Whether output and its derivative in the layer's own parameters are the class's.

    With a rule that is not ours, also whether they are what the rule supposes.
    """
    if not isinstance(output, Tensor):
        return False
    expected = tracked.layer_type.forward(tracked.layer, *args, **kwargs)
    tensors = list(own.values())
    if not same_with_derivatives(expected, output, tensors):
        return False
    if tracked.built_in:
        return True
    a = first_input(args, kwargs)
    rows = rows_of(tracked, a)
    u = noise_like(output)
    flat = u if rows is None else rows.flatten(u)
    rule = tracked.rule(tracked.layer, "expand", tracked.parameters)
    use = Use(a.detach() if rows is None else rows.flatten(a.detach()), rows)
    should = torch.autograd.grad(output, tensors, u, retain_graph=True, allow_unused=True)
    does = layer_gradients(rule, use, flat)
    return all(
        gradient is not None and close(gradient.flatten(), does[local].sum(0).to(gradient))
        for local, gradient in zip(own, should, strict=True)
    )


def _used_outside(parameters: dict[str, Tensor], value: Tensor, where: str) -> NotImplementedError:
    grads = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    names = ", ".join(
        f"'{name}'" for name, g in zip(parameters, grads, strict=True) if g is not None
    )
    return NotImplementedError(
        f"{names} reached {where} outside of the forward of its own layer (used functionally, by "
        "a layer without a rule, or in a compiled model), where hooks cannot see it. Call the "
        "layer itself, pass the model before torch.compile, or freeze the parameter "
        "(requires_grad_(False))."
    )
