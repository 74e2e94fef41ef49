"""The proof, on a pass's first batches, that the hooks of `capture` see all that rules rely on.

A wrong number is worse than an error: a layer that is used outside of its forward, that computes
something else than its rule supposes, or that mixes examples raises here, by name.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.capture import Capture, call_with, first_input
from kfac_backend.coverage import Coverage, TrackedLayer

__all__ = ["verify_independence", "verify_uses"]


def verify_uses(model: nn.Module, coverage: Coverage, x: Any) -> None:
    """Prove with one forward pass that each parameter acts through its layer's class alone.

    Each tracked layer's output is cut off; whatever then depends on a parameter bypassed a hook.

    Raises:
        NotImplementedError: a tracked parameter is used outside of its layer's forward; a layer
            computes something else than the class that its rule is for.
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
            own = [parameters[name] for name in tracked.parameters.values()]
            if not _computes_its_class(tracked, own, a, output):
                raise NotImplementedError(
                    f"Layer {tracked} computes something else than its class "
                    f"{tracked.rule.layer_type.__name__} (an overridden forward, a hook, or "
                    "computed weights), so that its rule would give wrong numbers. Derive it from "
                    "nn.Module, or freeze it (requires_grad_(False))."
                )
            called.add(tracked.name)
            return output.detach()

        return hook

    handles = [t.layer.register_forward_hook(check(t), with_kwargs=True) for t in coverage.layers]
    try:
        with torch.enable_grad():
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


def verify_independence(
    model: nn.Module, coverage: Coverage, x: Any, channels_last: bool = False
) -> bool:
    """Prove with one forward pass that no row of a layer belongs to two examples.

    Returns:
        Whether that could be told: not from a single example, nor from numbers that are not finite.

    Raises:
        NotImplementedError: the first example's output reaches a row that another's reaches.
    """
    rows: dict[TrackedLayer, list[Tensor]] = {tracked: [] for tracked in coverage.layers}
    finite = True

    def record(tracked: TrackedLayer, a: Tensor | None, b: Tensor) -> None:
        nonlocal finite
        finite = finite and bool(torch.isfinite(b).all())
        rows[tracked].append((b.reshape(len(b), -1) != 0).any(1))

    capture = Capture(model, coverage, lambda tracked, a: None, record, channels_last=channels_last)
    with capture:
        f = capture.forward(x)
        if not isinstance(f, Tensor) or f.dim() < 2 or len(f) < 2:
            return False  # a wrong output is reported with the targets
        if not torch.isfinite(f).all():
            return False  # reported by name, after the forward pass
        first = _noise_like(f)
        rest = first.clone()
        first[1:], rest[:1] = 0.0, 0.0
        capture.backward(f, [first, rest])
    if not finite:
        return False  # 0 · NaN is in every row; the eigenvalues will name the layer
    for tracked, seen in rows.items():
        if len(seen) < 2:
            continue
        by_first, by_rest = seen
        if len(by_first) == len(f):  # an example's own row has its own index
            mixed = by_first[1:].any() or by_rest[:1].any()
        else:
            mixed = (by_first & by_rest).any()
        if mixed:
            raise NotImplementedError(
                f"In layer {tracked} the rows of different examples mix: its input has no batch "
                "axis in front, or a layer behind it shares information within a batch. Put the "
                "batch axis first (N, ..., d), or freeze it (requires_grad_(False))."
            )
    return True


def _computes_its_class(tracked: TrackedLayer, own: list[Tensor], a: Tensor, output: Any) -> bool:
    """Whether output and its derivative in the layer's own parameters are the class's."""
    if not isinstance(output, Tensor):
        return False
    expected = tracked.rule.reference(tracked.layer, a)
    if expected.shape != output.shape or not output.requires_grad:
        return False
    u = _noise_like(output)
    pairs = [(expected.detach(), output.detach())]
    for should, does in zip(
        torch.autograd.grad(expected, own, u),
        torch.autograd.grad(output, own, u, retain_graph=True, allow_unused=True),
        strict=True,
    ):
        if does is None:
            return False
        pairs.append((should, does))
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(output.dtype, 0.1)
    return all(
        not torch.isfinite(should).all()  # reported with the model's output
        or (should - does).norm() <= tolerance * should.norm()
        for should, does in pairs
    )


def _noise_like(x: Tensor) -> Tensor:
    """The same normal numbers each time: the user's random numbers are not touched."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


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
