"""The proof, on a pass's first batches, that the hooks of `capture` see all that rules rely on.

A wrong number is worse than an error: a layer that is used outside of its forward, that computes
something else than its rule supposes, or that mixes examples raises here, by name. What a proof
finds out on the way, the pass goes on with: how batches split, which runs of layers are on what all
examples share, and the rules of derived layers.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.layers import Rule, Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import Run, SharedAxes
from kfac_backend.layers.rule import summed_gradients
from kfac_backend.model.batches import Plan, examples, make_plan
from kfac_backend.model.calls import (
    call_with,
    explicit_forwards,
    forked_random_numbers,
    num_examples,
)
from kfac_backend.model.capture import Capture, first_input, rows_of
from kfac_backend.model.comparison import DtypesInUse, close, noise_like, same_with_derivatives
from kfac_backend.model.finite import check_inputs
from kfac_backend.model.memory import is_out_of_memory
from kfac_backend.model.rule_assignment import DividedLayer, RuleAssignment, TrackedLayer

__all__ = [
    "Proof",
    "no_copies",
    "verify_divided",
    "verify_independence",
    "verify_own_parameters",
]

MOST_EXAMPLES = 30
"""Examples of a batch that a proof runs on: enough to differ, few against a batch."""


class Proof:
    """What is known of a model and its layers, proved on the first batches of a pass.

    Args:
        model: the model.
        assignment: its tracked layers.
    """

    def __init__(self, model: nn.Module, assignment: RuleAssignment) -> None:
        self._model = model
        self._uses_verified = self._independence_verified = False
        self.assignment = assignment
        """With what the proof found out of the layers, once it is made."""
        self.plan = Plan()
        """How batches run fastest."""
        self.output_dim = 0
        """How many axes the model's output has; 0 for what is no tensor."""

    def is_made(self, N: int | None) -> bool:
        """Whether a batch of N examples has nothing to add."""
        return self._uses_verified and (self._independence_verified or N is None or N < 2)

    def some(self, x: Any, N: int | None) -> Tensor | None:
        """The numbers of those of a batch's N examples to prove on, a few from all over it.

        None: all of it, where an input cannot be taken apart or is small.
        """
        if N is None or num_examples(x) != N:
            return None
        device = next(self._model.parameters()).device
        self.plan = make_plan(self._model, x, device)
        most = max(2, min(MOST_EXAMPLES, (self.plan.part_size or N) - 2))
        if not self.plan.splits or N <= most:
            return None
        return torch.linspace(0, N - 1, most, dtype=torch.float64).long().to(device)

    def make(self, x: Any, N: int | None, ignored: Tensor | None = None) -> None:
        """Prove what is not proved yet.

        Args:
            x: examples, those that `some` says.
            N: how many they are; None if that is not known.
            ignored: loss terms (N, ...) that do not count.

        Raises:
            ValueError: inputs with NaN or infinity, if nothing can be proved with them.
            NotImplementedError: what hooks cannot follow, by name.
        """
        try:
            self._make(x, N, ignored)
        except NotImplementedError:
            check_inputs(x)  # NaN spreads in ways that look like something else
            raise

    def _make(self, x: Any, N: int | None, ignored: Tensor | None) -> None:
        by_example = N is not None and num_examples(x) == N
        if not self._uses_verified:
            verify_divided(self._model, self.assignment, x)
            if by_example:
                self.assignment = find_runs(self._model, self.assignment, x)
        if not self._independence_verified and (N is None or N > 1):
            again = with_first_again(x, self.plan.splits) if by_example else (x, None)
            self._independence_verified, runs = verify_independence(
                self._model,
                self.assignment,
                *again,
                self.plan.channels_last,
                ignored,
            )
            if not by_example:
                self.assignment = _with_runs(self.assignment, runs)
        if not self._uses_verified:
            f, self.assignment = verify_uses(self._model, self.assignment, x)
            self.output_dim = f.dim() if isinstance(f, Tensor) else 0
            self._uses_verified = True


def verify_uses(model: nn.Module, assignment: RuleAssignment, x: Any) -> tuple[Any, RuleAssignment]:
    """Prove with a forward pass that each parameter acts through its layer's class alone.

    Each tracked layer's output is cut off; whatever then depends on a parameter bypassed a hook.

    Returns:
        The model's output, and the assignment with the rules that derived layers obey.

    Raises:
        NotImplementedError: a tracked parameter is used outside of its layer's forward; a layer
            computes something else than the class, the parts or the rule that are supposed.
    """
    tracked_names = {name for t in assignment.layers for name in t.parameters.values()}
    parameters = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if name in tracked_names
    }
    rules: dict[TrackedLayer, list[type[Rule]]] = {}

    def check(tracked: TrackedLayer) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            a = first_input(args, kwargs)
            if a.requires_grad:
                raise _used_outside(parameters, a, f"the input of layer {tracked}")
            own = {local: parameters[name] for local, name in tracked.parameters.items()}
            before = rules.get(tracked)
            rules[tracked] = [
                rule
                for rule in _rules_obeyed(tracked, own, args, kwargs, output)
                if before is None or rule in before
            ]
            if not rules[tracked]:
                raise NotImplementedError(
                    f"Layer {tracked} computes something else than its class "
                    f"{tracked.layer_type.__name__} and the rule for it (an overridden forward, a "
                    "hook, or computed weights), so that its rule would give wrong numbers. "
                    "Register a rule for its class (register_rule), derive it from nn.Module, or "
                    "freeze it (requires_grad_(False))."
                )
            return output.detach()

        return hook

    handles = [t.layer.register_forward_hook(check(t), with_kwargs=True) for t in assignment.layers]
    try:
        with torch.enable_grad(), explicit_forwards(assignment):
            f = call_with(model, parameters, x)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(f, Tensor) and f.requires_grad:
        raise _used_outside(parameters, f, "the model's output")
    unused = [str(tracked) for tracked in assignment.layers if tracked not in rules]
    if unused:
        warnings.warn(
            f"No part of the forward pass, so that their blocks are zero: {', '.join(unused)}.",
            stacklevel=2,
        )
    layers = [
        t if t not in rules or rules[t][0] is t.rule else replace(t, rule=rules[t][0])
        for t in assignment.layers
    ]
    return f, replace(assignment, layers=layers)


def _rules_obeyed(
    tracked: TrackedLayer, own: dict[str, Tensor], args: tuple, kwargs: dict, output: Any
) -> list[type[Rule]]:
    """The rules that a layer's derivative in its own parameters is in accordance with.

    One of ours is for what its class computes; else, where a forward is another or the rule is a
    user's, gradients are taken apart as the rule does, and put together again.
    """
    layer, tensors = tracked.layer, list(own.values())
    if not isinstance(output, Tensor):
        return []
    if tracked.built_in and _same_as_class(tracked, tensors, args, kwargs, output):
        return [tracked.rule]
    a, u = first_input(args, kwargs).detach(), noise_like(output)
    rows = rows_of(tracked, a)
    if rows is not None:
        a, u = rows.flatten(a), rows.flatten(u)
    if not (a.dim() and u.dim() and len(a) == len(u)):
        return []
    # Two rows tell whether a forward is the one that we know, without the memory that all take.
    some = slice(2 if tracked.built_in else len(a))
    u[some.stop :] = 0.0
    should = torch.autograd.grad(
        output, tensors, u.view_as(output), retain_graph=True, allow_unused=True
    )
    if None in should:
        return []
    obeyed = []
    for kind in (tracked.rule, *tracked.rule.alternatives):
        try:
            rule = kind(layer, "expand", tracked.parameters)
            does = summed_gradients(rule, Use(a[some], rows), u[some])
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            continue  # the rule is not for such inputs
        pairs = [
            (gradient.flatten(), does[local].to(gradient))
            for local, gradient in zip(own, should, strict=True)
            if gradient is not None
        ]
        if all(close(*pair) for pair in pairs):
            obeyed.append(kind)
            continue
        tolerance = _tolerance_of(tracked, args, kwargs)
        if all(close(*pair, tolerance) for pair in pairs):
            obeyed.append(kind)
    return obeyed


def _same_as_class(
    tracked: TrackedLayer, tensors: list[Tensor], args: tuple, kwargs: dict, output: Tensor
) -> bool:
    try:
        expected = tracked.layer_type.forward(tracked.layer, *args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        return False  # a derived layer takes other inputs
    return same_with_derivatives(expected, output, tensors)


def _tolerance_of(tracked: TrackedLayer, args: tuple, kwargs: dict) -> float:
    """That of the coarsest dtype in which the layer computes."""
    with DtypesInUse() as used, torch.no_grad(), forked_random_numbers(tracked.layer):
        tracked.layer.forward(*args, **kwargs)
    return used.tolerance


def verify_independence(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    numbers: Tensor | None = None,
    channels_last: bool = False,
    ignored: Tensor | None = None,
) -> tuple[bool, dict[TrackedLayer, list[Run]]]:
    """Prove with one forward pass that no row of a layer belongs to two examples.

    Gradients of the first example's output must reach its own rows alone, and those of the others'
    outputs all rows but these. A forward that puts examples in order by what they contain could
    have nothing to do by chance: see `with_first_again`. Further passes compare copies of modules'
    own parameters, if there are any.

    Args:
        model: the model.
        assignment: its tracked layers.
        x: some examples.
        numbers: which of the examples that ``ignored`` is for these are; None for themselves.
        channels_last: as of `Capture`.
        ignored: loss terms (N, ...) that do not count.

    Returns:
        Whether that could be told: not from a single example, nor from numbers that are not finite.
        What the layers' runs are, as far as that is known: see `Capture.runs`.

    Raises:
        NotImplementedError: the first example's output reaches a row that another's reaches, or a
            row that does not count; own parameters that are not used elementwise.
    """
    if assignment.own_parameters:
        verify_own_parameters(model, assignment, x)
    reached: dict[tuple[TrackedLayer, Use], list[Tensor]] = {}
    finite = True

    def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        nonlocal finite
        finite = finite and bool(torch.isfinite(b).all())
        reached.setdefault((tracked, use), []).append((b.reshape(len(b), -1) != 0).any(1))

    capture = Capture(
        model, assignment, lambda tracked, use: None, record, channels_last=channels_last
    )
    with capture:
        f = capture.forward(x)
        if not isinstance(f, Tensor) or f.dim() < 2:
            return False, {}  # a wrong output is reported with the targets
        if not torch.isfinite(f).all():
            return False, {}  # reported by name, after the forward pass
        if numbers is None or len(numbers) != len(f):
            numbers = torch.arange(len(f), device=f.device)
        u = noise_like(f)
        if ignored is not None and ignored[numbers].shape == f.shape[:-1]:
            u = u * ~ignored[numbers][..., None]
        is_first = numbers == 0
        of_first = is_first.view(-1, *[1] * (f.dim() - 1))
        capture.backward(f, [u * of_first, u * ~of_first])
    if not finite:
        return False, {}  # 0 · NaN is in every row; the eigenvalues will name the layer
    for (tracked, use), seen in reached.items():
        if len(seen) < 2:
            continue
        by_first, by_rest = seen
        if use.rows is not None:
            index, N = use.rows.index, use.rows.num_examples
            counts = index < N
            if (by_first | by_rest)[~counts].any():
                raise NotImplementedError(
                    f"In layer {tracked} rows that do not count reach the output. Leave them out "
                    "of whatever pools over positions, or let them count (those that a batch's "
                    "mask hides: dict_key_mask=None)."
                )
            own = is_first[index.clamp(max=len(f) - 1)] & counts
        else:
            own = is_first if len(by_first) == len(f) else ~by_rest
        if (by_first & ~own).any() or (by_rest & own).any():
            if isinstance(tracked.layer, OwnParameter):
                raise no_copies([tracked.name])
            raise NotImplementedError(
                f"In layer {tracked} the rows of different examples mix: its input has no batch "
                "axis in front, a layer behind it shares information within a batch, or its rows "
                "are examples in another order than the outputs. Put the batch axis first "
                "(N, ..., d), say which example each row belongs to (examples_of_rows), make what "
                "belongs together one example with several loss terms (outputs (N, R, C)), or "
                "freeze it (requires_grad_(False))."
            )
    return len(f) > 1, capture.runs


def with_first_again(x: Any, splits: bool = True) -> tuple[Any, Tensor | None]:
    """The examples with the first twice more at the end, and the numbers of these rows.

    Sorted by whatever the first differs in from any other, they are no longer in this order: it
    begins and ends with the same, and whoever is first or last then is another. Twice, so that the
    reverse is another order, too.

    Args:
        x: the examples.
        splits: whether a batch may have another number of examples; the last two are left out else,
            if there are four.
    """
    N = num_examples(x)
    assert N is not None
    if not splits and N < 4:
        return x, None
    tensors = x.values() if isinstance(x, dict) else [x]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    numbers = torch.arange(N + 2 if splits else N, device=device)
    numbers[-2:] = 0
    try:
        again = examples(x, numbers)
    except Exception:  # an object that takes slices only
        return x, None
    return (again, numbers) if type(again) is type(x) else (x, None)


def find_runs(model: nn.Module, assignment: RuleAssignment, x: Any) -> RuleAssignment:
    """The assignment, knowing which runs of layers are not on rows of examples.

    A run on what all examples share, as an embedding of positions may be, has inputs of one shape
    for one example and for two. Its output is broadcast: a copy for each example changes nothing,
    and has its gradient. A run whose output no derivative goes through, of a parameter that has
    others, is a constant, and no use of it.

    Args:
        model: the model.
        assignment: its tracked layers.
        x: some examples; nothing is told from an input whose examples cannot be taken apart.

    Raises:
        NotImplementedError: outputs that the model does not broadcast.
    """
    try:
        one, twins = (examples(x, torch.tensor(numbers)) for numbers in ([0], [0, 0]))
        runs, shapes = _runs_and_shapes(model, assignment, one)
        shapes_of_two = _runs_and_shapes(model, assignment, twins, backward=False)[1]
    except Exception as error:  # the whole batch will show it, if it is wrong, too
        if is_out_of_memory(error):
            raise
        return assignment
    shared = {
        (tracked, number): shape
        for tracked, seen in shapes.items()
        if len(seen) == len(shapes_of_two.get(tracked, []))
        for number, (shape, of_two) in enumerate(zip(seen, shapes_of_two[tracked], strict=True))
        if shape is not None and shape == of_two and runs[tracked][number] != "constant"
    }
    if not shared:
        return _with_runs(assignment, runs)
    # A first axis of one entry may be that of the examples, or one of positions, of which there is
    # just one here.
    for first in (True, False):
        for (tracked, number), shape in shared.items():
            with_first = first and len(shape) > 0 and shape[0] == 1
            runs[tracked][number] = SharedAxes(with_first, len(shape))
        known = _with_runs(assignment, runs)
        error = _wrong(model, known, twins)
        if error is None:
            return known
    names = dict.fromkeys(str(tracked) for tracked, _ in shared)
    raise NotImplementedError(
        f"{' and '.join(names)} has the same input for all examples, and its output cannot be "
        "given to each, (N, ...): the model's output would be another, or rows of different "
        "examples mix (dropout on what all share does that, too). Give it a batch axis (N, ...), "
        "or freeze it (requires_grad_(False))."
    ) from error


def _runs_and_shapes(
    model: nn.Module, assignment: RuleAssignment, x: Any, backward: bool = True
) -> tuple[dict[TrackedLayer, list[Run]], dict[TrackedLayer, list[torch.Size | None]]]:
    """What the layers' runs are, and their inputs' shapes, None where rows say their examples."""
    shapes: dict[TrackedLayer, list[torch.Size | None]] = {}

    def record(tracked: TrackedLayer, use: Use) -> None:
        # Rows whose examples are told, or none at all, may be as many by chance.
        told = use.rows is not None and not use.rows.of_positions
        shape = use.a.shape if use.rows is None else use.rows.axes + use.a.shape[1:]
        known = None if told or not use.a.numel() else torch.Size(shape)
        shapes.setdefault(tracked, []).append(known)

    capture = Capture(model, assignment, record, lambda *_: None)
    with capture, forked_random_numbers(model):
        f = capture.forward(x)
        if backward and isinstance(f, Tensor):
            capture.backward(f, [noise_like(f)])
        return capture.runs, {t: seen for t, seen in shapes.items() if t in capture.runs}


def _with_runs(assignment: RuleAssignment, runs: dict[TrackedLayer, list[Run]]) -> RuleAssignment:
    others = {
        tracked.layer: tuple(kinds)
        for tracked, kinds in runs.items()
        if any(kind != "examples" for kind in kinds)
    }
    return replace(assignment, runs=others)


def _wrong(model: nn.Module, assignment: RuleAssignment, twins: Any) -> Exception | None:
    """Why copies of outputs for each example are something else; None if they are not."""
    try:
        with explicit_forwards(assignment), forked_random_numbers(model), DtypesInUse() as used:
            f = call_with(model, {}, twins)
        with (
            Capture(model, assignment, lambda *_: None, lambda *_: None) as capture,
            forked_random_numbers(model),
        ):
            g = capture.forward(twins)
        if isinstance(f, Tensor) and not close(f.detach(), g.detach(), used.tolerance):
            return ValueError("The model's output is another one.")
        with forked_random_numbers(model):
            verify_independence(model, assignment, twins)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
    return None


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


def verify_divided(model: nn.Module, assignment: RuleAssignment, x: Any) -> None:
    """Compare layers' forwards by parts with their own, and the derivatives in their parameters."""
    divided = [d for d in assignment.divided if d.by_parts.is_checked]
    if not divided:
        return
    parameters = {
        name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }

    def check(d: DividedLayer) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            own = [p for p in layer.parameters() if p.requires_grad]
            rates = [(m, m.training) for m in layer.modules()]
            used = DtypesInUse()
            layer.train(False)  # dropout would draw other numbers in the two
            try:
                args, kwargs = _without_graph(args), _without_graph(kwargs)
                with used:
                    should = _tensor_of(type(layer).forward(layer, *args, **kwargs))
                does = _tensor_of(d.by_parts.forward(layer, d.parts, *args, **kwargs))
            except TypeError:  # a derived class with other arguments
                should, does = torch.empty(0), torch.empty(1)
            finally:
                for module, mode in rates:
                    module.training = mode
            if not same_with_derivatives(should, does, own, used.tolerance):
                raise NotImplementedError(
                    f"Layer '{d.name}' ({type(layer).__name__}) computes something else than "
                    f"{type(d.by_parts).__name__} (an overridden forward, other options, or wrong "
                    "parts). Register parts for its class (register_rule), or freeze it "
                    "(requires_grad_(False))."
                )

        return hook

    handles = [d.layer.register_forward_hook(check(d), with_kwargs=True) for d in divided]
    try:
        with torch.enable_grad():
            call_with(model, parameters, x)
    finally:
        for handle in handles:
            handle.remove()


def verify_own_parameters(model: nn.Module, assignment: RuleAssignment, x: Any) -> None:
    """Prove that copies for each example change no output, and that their gradients add up."""
    gradients: dict[str, Tensor] = {}

    def record(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        for name in tracked.parameters.values():
            gradients[name] = gradients.get(name, 0) + b.sum(0).flatten()

    own = [name for t in assignment.own_parameters for name in t.parameters.values()]
    names = list(dict.fromkeys(own))  # modules may share one
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in names}
    only = RuleAssignment([], assignment.own_parameters, assignment.divided, [], names)
    with torch.enable_grad():
        with explicit_forwards(assignment), forked_random_numbers(model), DtypesInUse() as used:
            f = call_with(model, leaves, x)
        capture = Capture(model, only, lambda tracked, use: None, record)
        if not isinstance(f, Tensor):
            return  # reported with the targets
        try:
            with forked_random_numbers(model):
                g = capture.forward(x)
        except Exception as error:  # whatever the forward does with copies
            if isinstance(error, NotImplementedError) or is_out_of_memory(error):
                raise
            raise no_copies(names) from error
        u = noise_like(f)
        same = close(f.detach(), g.detach(), used.tolerance)
        if same and f.requires_grad:
            should = torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)
            capture.backward(g, [u])
            for name, gradient in zip(names, should, strict=True):
                if gradient is not None:
                    does = gradients.get(name, torch.zeros_like(gradient).flatten())
                    same = same and close(gradient.flatten(), does, used.tolerance)
    if not same:
        raise no_copies(names)


def no_copies(names: list[str]) -> NotImplementedError:
    """What to say of own parameters whose copies the forward does not take."""
    return NotImplementedError(
        f"The forward does not take a copy for each example of {', '.join(map(repr, names))}: with "
        "(N, ...) in place of (1, ...) its output is another, or examples mix. Use them "
        "elementwise, give register_parameters the shape as which they are broadcast, or freeze "
        "them (requires_grad_(False))."
    )


def _tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _without_graph(arguments: Any) -> Any:
    """Arguments as constants; the same tensor stays the same."""
    known: dict[int, Tensor] = {}

    def constant(value: Any) -> Any:
        return known.setdefault(id(value), value.detach()) if isinstance(value, Tensor) else value

    if isinstance(arguments, dict):
        return {key: constant(value) for key, value in arguments.items()}
    return tuple(constant(value) for value in arguments)
