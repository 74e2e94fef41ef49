"""Compare captured inputs and gradients with autograd on a few examples.

The comparison uses random gradients u of the outputs, and a coefficient c_n for each example:

- Backward pass 1 propagates u. The gradients Σ b aᵀ by the rules must equal autograd's. This shows
  that the hooks capture every use of a parameter, and that every rule computes what its layer does.
- Backward pass 2 propagates c_n u_n. Each row's b must be c_n times its b of pass 1. This shows
  that the row belongs to example n, and that no examples mix.

Both conditions are linear in u, so equality at random values implies equality.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.capture import Capture, Runs, Sink, check_run, layer_hooks
from kfac_backend.engine.model_calls import (
    DtypesInUse,
    call_with,
    close,
    explicit_forwards,
    forked_random_numbers,
    is_out_of_memory,
    noise_like,
    try_twice,
)
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.layers import Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import SharedAxes
from kfac_backend.layers.rule import summed_gradients
from kfac_backend.precision import at_least_float32
from kfac_backend.sharding import class_and_hooks, detached_parameters

COEFFICIENTS = tuple(sign * 2.0**k for k in range(-2, 3) for sign in (1, -1))
"""Coefficients c. Powers of two scale gradients without rounding, so the comparison of rows is
exact up to the order of sums."""


@dataclass(eq=False)
class _Gradients(Sink):
    """Store the gradient of each use by vector."""

    needs_inputs = True
    keeps_graph: bool = False
    by_vector: list[dict[tuple[TrackedLayer, Use], Tensor]] = field(default_factory=lambda: [{}])

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Store a copy, because autograd may reuse the memory."""
        self.by_vector[-1][tracked, use] = b.detach().clone()

    def vector_done(self) -> None:
        """Begin the next vector."""
        self.by_vector.append({})


@dataclass(eq=False)
class Comparison:
    """Result of a check."""

    assignment: RuleAssignment
    """The assignment that was checked, or a completed one."""
    runs: Runs = field(default_factory=Runs)
    """Runs of the layers."""
    output_dim: int = 0
    """Number of axes of the model's output."""
    is_finite: bool = True
    """Whether outputs and gradients are finite. If not, the check of the targets reports them."""
    is_other_output: bool = False
    """Whether copies of parameters, or layers by parts, change the model's output."""
    error: Exception | None = None
    """Error of the model with these copies or parts, if any."""
    wrong: dict[str, float] = field(default_factory=dict)
    """Relative error of the gradient by parameter, if it differs from autograd's."""
    mixed: list[TrackedLayer] = field(default_factory=list)
    """Layers with rows that belong to no example, or to another one than their position says."""
    unknown: list[TrackedLayer] = field(default_factory=list)
    """Layers whose rows belong to one example each, but to an unknown one."""
    hidden: list[TrackedLayer] = field(default_factory=list)
    """Layers with rows that do not count, but reach the output."""

    @property
    def agrees(self) -> bool:
        """Whether all is proved, except for the examples of ``unknown`` layers' rows."""
        is_wrong = self.is_other_output or self.wrong or self.mixed or self.hidden
        return not is_wrong and not self.runs.constants()

    def add_rows(
        self,
        by_use: Mapping[tuple[TrackedLayer, Use], Tensor],
        of_c: Mapping[tuple[TrackedLayer, Use], Tensor],
        c: Tensor,
        tolerance: float,
    ) -> None:
        """Add errors in the rows of uses, from their gradients for u and for c_n u_n."""
        c = torch.cat([c, c.new_zeros(1)])  # for rows that do not count
        for (tracked, use), gradients in by_use.items():
            others = of_c.get((tracked, use), torch.zeros_like(gradients))
            b, b_c = (at_least_float32(g).reshape(len(g), -1) for g in (gradients, others))
            index, N = torch.arange(len(b), device=b.device), len(c) - 1
            is_unknown = use.rows is None and len(b) != N
            if use.rows is not None:
                index, number = use.rows.index, use.rows.num_examples
                if b[index == number].any():
                    self.hidden += [] if tracked in self.hidden else [tracked]
                    continue
                if number != N:  # the pass reports it
                    continue
            if is_unknown:  # each row must still belong to one of the examples
                ratio = (b_c * b).sum(1) / (b * b).sum(1).clamp(min=torch.finfo(b.dtype).tiny)
                index = (ratio[:, None] - c[:N].to(b)).abs().argmin(1)
            norms = b.norm(dim=1)
            # In rows that cancel, only rounding errors remain.
            limit = 1e-2 * tolerance * (norms + 1e-3 * norms.amax() if len(norms) else norms)
            if ((b_c - c.to(b)[index, None] * b).norm(dim=1) > limit).any():
                self.mixed += [] if tracked in self.mixed else [tracked]
            elif is_unknown:
                self.unknown += [] if tracked in self.unknown else [tracked]


def compare(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    counted: Tensor | None = None,
    *,
    own_forwards: bool = False,
) -> Comparison:
    """Compare hooks with autograd on a few examples x, in one forward and two backward passes.

    Parameters of no layer are constants. ``counted`` marks the loss terms (N, ...) that count; None
    means all. With ``own_forwards`` the expected outputs and gradients come from the layers' own
    forwards, also for layers that run by parts.

    Raises:
        NotImplementedError: hooks cannot follow a run of a layer.
        UnexpectedRun: a layer whose input or output does not fit its class.
    """
    values = detached_parameters(model)
    names = (name for t in assignment.all for name in t.parameters.values())
    leaves = {name: values[name].requires_grad_() for name in names}
    # Step 1: the forward pass.
    with torch.enable_grad():
        expected = _expected(model, assignment, leaves, x, own_forwards)
        is_itself, used = expected is None, DtypesInUse()
        sink = _Gradients(keeps_graph=is_itself)
        capture = Capture(model, assignment, sink, constants=leaves if is_itself else None)
        # Check before a layer runs (without output), because its own error would not name it.
        checked = layer_hooks(
            assignment,
            lambda t, _, args, kw: check_run(model, t, a := t.rule.input_of(args, kw), output=a),
        )
        with capture, checked:
            with forked_random_numbers(model), used:
                # With copies a forward may fail in any way.
                f = capture.forward(x) if is_itself else try_twice(lambda: capture.forward(x))
            if isinstance(f, NotImplementedError):
                raise f
            if isinstance(f, Exception):
                return Comparison(assignment, is_other_output=True, error=f)
            runs = capture.runs
            comparison = Comparison(assignment, runs, f.dim(), mixed=[*runs.not_divisible])
            if expected is not None and not close(expected.detach(), f.detach(), used.tolerance):
                comparison.is_other_output = True
            else:
                comparison.is_finite = f.dim() > 1 and bool(torch.isfinite(f).all())
            if comparison.is_other_output or not comparison.is_finite:
                return comparison
            # Step 2: the backward passes.
            coefficients, by_autograd = _propagate(capture, f, expected, leaves, counted)
    # Step 3: the comparison.
    first, *others = sink.by_vector
    comparison.is_finite = all(bool(b.norm(torch.inf).isfinite()) for b in first.values())
    if comparison.is_finite:
        comparison.wrong = _wrong_gradients(assignment, leaves, by_autograd, first, used.tolerance)
        for c, of_c in zip(coefficients, others, strict=False):
            comparison.add_rows(first, of_c, c, used.tolerance)
    return comparison


def _expected(
    model: nn.Module,
    assignment: RuleAssignment,
    leaves: dict[str, Tensor],
    x: Any,
    own_forwards: bool,
) -> Tensor | None:
    """Return the output of the unchanged model, or None if the hooks' forward pass computes it.

    It does if neither copies replace parameters nor parts replace layers.
    """
    kinds = chain.from_iterable(assignment.runs.values())
    has_copies = bool(assignment.own_parameters or assignment.operations.names)
    has_copies |= any(isinstance(kind, SharedAxes) or kind == "followed" for kind in kinds)
    if not (own_forwards or has_copies):
        return None
    forwards = _without_cudnn() if own_forwards else explicit_forwards(assignment)
    with forwards, forked_random_numbers(model):
        return call_with(model, leaves, x)


def _propagate(
    capture: Capture,
    f: Tensor,
    expected: Tensor | None,
    leaves: dict[str, Tensor],
    counted: Tensor | None,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Propagate u and c u back from the outputs f. Return c and autograd's gradients for u.

    If ``expected``, the output of the unchanged model, has its own pass, the gradients are its
    gradients. More examples than `COEFFICIENTS` get several c, from the digits of their numbers.
    """
    numbers, coefficients = torch.arange(len(f)), []
    while not coefficients or numbers.any():
        digit = numbers % len(COEFFICIENTS)
        coefficients.append(torch.tensor(COEFFICIENTS)[digit].to(f.device))
        numbers = numbers // len(COEFFICIENTS)
    parameters, gradients = list(leaves.values()), [None] * len(leaves)
    # Random gradients, because ones would cancel in a layer with a constant sum of outputs, such as
    # softmax. Terms that do not count propagate nothing in the pass either. `check_targets` reports
    # labels that do not fit.
    u = noise_like(f)
    if counted is not None and counted.shape == f.shape[:-1]:
        u = u * counted[..., None]
    if expected is None:
        gradients = capture.backward(f, [u], parameters)
    else:
        capture.backward(f, [u])
        if leaves and expected.requires_grad:
            gradients = torch.autograd.grad(expected, parameters, u, allow_unused=True)
    capture.backward(f, (u * c.to(u).view(-1, *[1] * (f.dim() - 1)) for c in coefficients))
    return coefficients, dict(zip(leaves, gradients, strict=True))


def _wrong_gradients(
    assignment: RuleAssignment,
    leaves: dict[str, Tensor],
    by_autograd: dict[str, Tensor | None],
    gradients: dict[tuple[TrackedLayer, Use], Tensor],
    tolerance: float,
) -> dict[str, float]:
    """Return the relative error of each parameter whose gradient differs from autograd's."""
    rules = {t: t.rule(t.layer, "expand", t.parameters) for t in assignment.all}
    wrong: dict[str, float] = {}
    rest, scale = {}, dict.fromkeys(leaves, 0.0)
    for name, g in by_autograd.items():
        g = torch.zeros_like(leaves[name]) if g is None else g
        rest[name] = (g.to_dense() if g.is_sparse else g.clone()).flatten()
    norms = {name: float(g.norm()) for name, g in rest.items()}
    # Autograd's gradient, minus each use's part.
    for (tracked, use), b in gradients.items():
        try:
            by_rule = (
                dict.fromkeys(tracked.parameters, b.sum(0).flatten())
                if isinstance(tracked.layer, OwnParameter)
                else summed_gradients(rules[tracked], use, b)
            )
        except (RuntimeError, ValueError, IndexError) as error:
            is_own = class_and_hooks(tracked.layer)[0] is tracked.layer_type
            if is_out_of_memory(error) or (isinstance(error, NotImplementedError) and is_own):
                raise
            # The rule does not support such inputs.
            wrong |= dict.fromkeys(tracked.parameters.values(), torch.inf)
            continue
        size = 1.0 if not use.a.is_floating_point() else max(1.0, float(use.a.norm()))
        for local, g in by_rule.items():
            name = tracked.parameters[local]
            slot, slots = tracked.slots.get(local, (0, 1))
            part = rest[name].chunk(slots)[slot]
            part -= g.to(part)
            scale[name] += size * float(b.norm())
    for name, difference in rest.items():
        # The parts may cancel, as in the bias of attention's keys. Then only rounding remains.
        largest = max(norms[name], 1e-3 * scale[name])
        if not float(difference.norm()) <= tolerance * largest:
            wrong.setdefault(name, float(difference.norm()) / max(largest, 1e-300))
    return wrong


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Return a context without cuDNN, whose recurrent layers have no derivative in eval mode."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.enabled = cudnn.enabled, False
    try:
        yield
    finally:
        cudnn.enabled = before
