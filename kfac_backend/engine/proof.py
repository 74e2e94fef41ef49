"""The proof, on a pass's first batches, that the hooks of `capture` see all that rules rely on.

A wrong number is worse than an error. Three kinds of layer would give wrong numbers, and each kind
has its check:

- `verify_uses` finds a layer whose parameters are used outside of its forward, where no hook sees
  them, or that computes something other than its rule assumes. These parameters, and those without
  a rule, are then followed operation by operation (`operations`), which `verify_gradients` proves.
- `verify_divided` and `verify_gradients` find a layer whose replacement (its parts, or a copy of a
  parameter for each example) computes something other than the layer itself.
- `verify_independence` finds a layer that mixes the rows of different examples.

A parameter that fails raises an error that names it, or, if the user asked for that, becomes a
constant or gets the diagonal of its block (``unsupported``).

Life cycle. A pass makes one `Proof` when it is constructed. With each batch it asks
`Proof.is_made`, and calls `Proof.make` if something is left to prove; a first batch of several
examples usually proves all. From then on `Proof.assignment`, `batch` and `output_dim` stay as they
are, and the pass reads them for all batches: which rule each layer has, how the model takes
batches, and which runs of a layer work on an input that all examples share or on several rows of
each (`find_runs`). They live as long as the pass.
"""

import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples, num_examples
from kfac_backend.engine.capture import Capture, RunRecord, Sink, check_run, layer_hooks, rows_of
from kfac_backend.engine.model_calls import (
    BatchTrial,
    DtypesInUse,
    attempt,
    call_with,
    close,
    explicit_forwards,
    forked_random_numbers,
    is_out_of_memory,
    noise_like,
    preserve_state,
    try_batch,
)
from kfac_backend.engine.rule_assignment import Refusal, RuleAssignment, TrackedLayer
from kfac_backend.engine.task import check_inputs
from kfac_backend.layers import Rule, Use
from kfac_backend.layers.elementwise import OwnParameter
from kfac_backend.layers.rows import Run, SharedAxes, counted_positions, current_rows
from kfac_backend.layers.rule import summed_gradients
from kfac_backend.sharding import (
    class_and_hooks,
    detached_parameters,
    gathered_again,
    is_sharded,
    reshard,
)

MOST_EXAMPLES = 8
"""The most examples that a proof runs on, unless a batch cannot be split. Measured with WRN-16-4
Fixup and batches of 32: a proof on 30 examples took as long as one to two batches, on 8 a quarter
of one."""


class Proof:
    """What is known of a model and its layers, proved on the first batches of a pass.

    The proof has two parts, which are made separately: that the hooks see every use of the
    parameters, and that no layer mixes examples. One example is enough for the first part. The
    second part waits for the first batch of several examples.
    """

    def __init__(self, model: nn.Module, assignment: RuleAssignment) -> None:
        self._model, self._initial = model, assignment
        self._structure: tuple[list[Any], list[Any]] | None = None  # when all was proved
        self._uses_verified = self._independence_verified = False
        self.holds_for_masks = False
        """Whether `make_for_masks` has proved its part, for the layers in ``masked``."""
        self.masked: set[TrackedLayer] = set()
        """Layers some of whose rows a mask hid in that proof."""
        self.rows: set[tuple[TrackedLayer, int]] = set()
        """Numbers of rows of an example, with the layers, with which independence was proved."""
        self.assignment = assignment
        """The tracked layers; once the proof is made, with their runs and matching rules."""
        self.batch = BatchTrial()
        """How the model takes batches."""
        self.output_dim = 0
        """How many axes the model's output has; 0 before the proof."""

    def is_made(self, N: int | None) -> bool:
        """Whether everything is proved that a batch of N examples (None: unknown) can prove."""
        return self._uses_verified and (self._independence_verified or N is None or N < 2)

    def is_of_this_structure(self) -> bool:
        """Whether all is proved, and the model has the modules, modes and parameters it had."""
        return self._structure is not None and self._structure[1] == _structure(self._model)[1]

    def renew(self) -> bool:
        """Ask for the proof again, at other values of the parameters: `make` makes less of it.

        Returns:
            False if the model has other modules, modes or parameters: then it needs another proof.
        """
        if self._structure is None:
            return not self._uses_verified  # nothing is proved yet, or only a part
        if not self.is_of_this_structure():
            return False
        self._uses_verified = self._independence_verified = self.holds_for_masks = False
        self.masked, self.rows = set(), set()
        return True

    def make(self, x: Any, N: int | None, counted: Tensor | None = None) -> None:
        """Prove, on a few of the examples, what is not proved yet.

        Dropout that is on uses up no random numbers of the caller. After `renew`, what other
        values of the parameters could change is proved again on two examples, if the model's
        structure is the same; if it does not hold again, the whole proof is made.

        N is None if the targets do not tell it. ``counted`` marks the loss terms (N, ...) that
        count; None is all.

        Raises:
            ValueError: inputs with NaN or infinity, if they prevent the proof.
            NotImplementedError: what the hooks cannot follow, by name.
        """
        if num_examples(x) != N:
            N = None  # what belongs to which example is not known
        if self._structure is not None:
            if self._holds_again(x, N, counted):
                return
            self.assignment, self._structure = self._initial, None
        if N is not None:
            self.batch = try_batch(self._model, x, N)
            x, N, counted = self._few(x, N, counted)
        try:
            with forked_random_numbers(self._model):
                while True:  # ends, as each refusal takes parameters away or raises
                    try:
                        assignment = self.assignment
                        if not self._uses_verified:
                            assignment = self._prove_uses(x, N)
                        if not self._independence_verified and (N is None or N > 1):
                            assignment = self._prove_independence(assignment, x, N, counted)
                        break
                    except Refusal as refusal:
                        self._give_up(refusal)
        except NotImplementedError:
            check_inputs(x)  # NaN spreads to all rows, which looks as if examples mixed
            raise
        # Only now, so that a check that raises leaves the assignment as it was.
        self.assignment, self._uses_verified = assignment, True
        if self._independence_verified:
            self._structure = _structure(self._model)

    def _few(self, x: Any, N: int, counted: Tensor | None) -> tuple[Any, int, Tensor | None]:
        """Some examples, spread evenly over the batch, if it can be split."""
        if not self.batch.splits or N <= MOST_EXAMPLES:
            return x, N, counted
        device = next(self._model.parameters()).device
        index = torch.linspace(0, N - 1, MOST_EXAMPLES, dtype=torch.float64).long().to(device)
        return examples(x, index), MOST_EXAMPLES, None if counted is None else counted[index]

    def make_for_rows(
        self, rows: set[tuple[TrackedLayer, int]], x: Any, N: int, counted: Tensor | None
    ) -> None:
        """Prove that examples' rows follow one another where they are more or fewer than before.

        Of sequences that a mask has packed, a first batch of equal lengths looks as if each example
        had as many rows as the others in all batches.
        """
        x, N, counted = self._few(x, N, counted)
        x, numbers = with_first_again(x, N, self.batch.splits)
        try:
            with forked_random_numbers(self._model):
                verify_independence(self._model, self.assignment, x, numbers, counted)
        except _Mixed as mixed:
            raise NotImplementedError(
                f"{mixed} In earlier batches each example had as many rows as the others. Say "
                "which example each row belongs to (examples_of_rows)."
            ) from mixed
        self.rows |= rows

    def _holds_again(self, x: Any, N: int | None, counted: Tensor | None) -> bool:
        """Prove on two examples that the assignment still holds; False if it does not.

        Other numbers may have opened a gate, behind which examples mix or a parameter is used.
        How batches split is not tried again, nor which runs share an input.
        """
        assignment = self.assignment
        kinds = {kind for kinds in assignment.runs.values() for kind in kinds}
        if assignment.operations.names or assignment.diagonal or kinds & {"several", "followed"}:
            return False
        if not self.batch.splits or N is None or N < 2:
            return False
        if not isinstance(x, Tensor | dict):  # `with_first_again` may not take it
            return False
        model, two = self._model, None if counted is None else counted[:2]

        def trial() -> bool:
            with forked_random_numbers(model):
                one = examples(x, slice(1))  # which shows every use
                verify_divided(model, assignment, one)
                _, proved, candidates = verify_uses(model, assignment, one)
                if candidates:
                    return False
                proved = self._prove_independence(proved, examples(x, slice(2)), 2, two)
                if self._independence_verified:
                    self.assignment, self._uses_verified = proved, True
                return self._independence_verified

        holds = attempt(trial)
        if isinstance(holds, Exception) and not isinstance(holds, NotImplementedError):
            raise holds
        return holds is True

    def make_for_masks(self, x: Any, mask: Tensor | None, counted: Tensor | None) -> None:
        """Prove that the positions which a mask hides reach no output that counts.

        The mask is given, or the model has one of its own.

        Then their gradients are zero and add nothing to B, so that it is enough to leave their
        inputs out of A. One batch whose mask hides any is enough, for the layers that the mask fits
        there: a model may trim a batch to its longest sequence, so that the mask fits its layers in
        other batches alone. It comes after `make`, whose layers and runs it takes.

        ``counted`` marks the loss terms (N, ...) that count; None is all.
        """
        with counted_positions(mask):
            _, runs = verify_independence(self._model, self.assignment, x, counted=counted)
        self.holds_for_masks, self.masked = True, self.masked | runs.masked
        # As many as the mask counts: the model has dropped what it hides.
        counts = None if mask is None else int(mask.sum())
        unmasked = [name for name, number in runs.unmasked.items() if number != counts]
        if counts is not None and unmasked:
            warnings.warn(
                f"The mask of positions does not fit the inputs of {', '.join(unmasked)}, "
                "whose positions are others: all of them count. If some are padding, factors "
                "depend on it: say which count (examples_of_rows), or batch equal lengths.",
                stacklevel=2,
            )

    def _prove_uses(self, x: Any, N: int | None) -> RuleAssignment:
        """The assignment, completed, with which the hooks see every use of the parameters."""
        # The order matters. Parts come first, since every later check runs them in place of the
        # layers' own forwards. Runs on shared inputs must be known before parameters are followed,
        # because the outputs of such runs are copied for each example; and before independence is
        # proved, because rows that all examples share look as if examples mixed.
        model = self._model
        # Step 1: layers that run by parts compute what they compute whole.
        verify_divided(model, self.assignment, x)
        # Step 2: which parameters act through their own layers alone.
        f, assignment, candidates = verify_uses(model, self.assignment, x)
        self.output_dim = f.dim()
        shared: dict[str, str] = {}
        # Step 3: which runs are on what all examples share, or on several rows of each.
        if N is not None:
            assignment, shared = find_runs(model, assignment, x)
        # Step 4: all other uses, operation by operation.
        if candidates or shared:
            if N is None:  # following needs one example and two
                raise Refusal(candidates)
            # Loaded only where there is something to follow.
            from kfac_backend.engine.operations.classify import follow

            assignment = follow(model, assignment, x, candidates, shared)
            verify_gradients(model, assignment, x, candidates | shared)
        # Step 5: which rows are constants, where any can be.
        of_layers = [getattr(t.layer, "padding_idx", None) for t in assignment.all]
        if assignment.diagonal or of_layers.count(None) < len(of_layers):
            from kfac_backend.engine.operations.padding import padding_rows

            assignment = replace(assignment, padding=padding_rows(model, x))
        return assignment

    def _prove_independence(
        self, assignment: RuleAssignment, x: Any, N: int | None, counted: Tensor | None
    ) -> RuleAssignment:
        """Step 6: no layer mixes examples, with everything in place that the steps before found."""
        whole, numbers = x, None
        if N is not None:
            x, numbers = with_first_again(x, N, self.batch.splits)
            if not self.batch.splits and numbers is not None:  # which has left examples out
                verify_independence(self._model, assignment, whole, counted=counted)
        own_names = [name for t in assignment.own_parameters for name in t.parameters.values()]
        if own_names:
            messages = dict.fromkeys(own_names, no_copies(own_names))
            verify_gradients(self._model, assignment, x, messages)
        while True:
            try:
                self._independence_verified, runs = verify_independence(
                    self._model, assignment, x, numbers, counted
                )
                break
            # "several" was a guess from the number of rows. Without it the rows may still be
            # independent, in another order; then only their examples are unknown.
            except _Mixed as mixed:
                assignment = _without_several_rows(assignment, mixed)
        self.masked, self.rows = self.masked | runs.masked, self.rows | runs.rows
        # `find_runs` could not tell them of inputs whose examples are not known.
        return _with_runs(assignment, runs.kinds()) if N is None else assignment

    def _give_up(self, refusal: Refusal) -> None:
        """Treat the refused parameters as the option ``unsupported`` says.

        Raises:
            NotImplementedError: the refusal itself, for unsupported="error", or of a parameter that
                has a rule for "freeze".
            ValueError: no parameter is left.
        """
        assignment, names = self.assignment, refusal.errors
        if assignment.unsupported == "error" or not names:
            raise NotImplementedError(str(refusal)) from refusal.__cause__
        if assignment.unsupported == "freeze":
            # "freeze" is for layers without a rule. A layer with one whose uses cannot be proved is
            # more likely a mistake than a choice.
            with_rule = [name for name in names if name not in assignment.unknown]
            if with_rule:
                raise NotImplementedError(names[with_rule[0]]) from refusal.__cause__
            warnings.warn(
                f"Treated as constants, having no K-FAC rule: {', '.join(names)}.", stacklevel=2
            )
            self.assignment = assignment.with_constants(names)
            return
        self.assignment = replace(
            assignment.without(names),
            diagonal=[n for n in assignment.names if n in names or n in assignment.diagonal],
            divided=[d for d in assignment.divided if d not in refusal.divided],
        )


def _structure(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """A model's modules and parameters, and what is to be compared of them: all but numbers."""
    reshard(model)  # what FSDP still keeps gathered are other tensors
    modules = list(model.modules())
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False)]
    kinds: list[Any] = [(id(module), module.training) for module in modules]
    kinds += [(id(p), p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]
    return [*modules, *parameters], kinds  # the objects too, as a dead one's id is given again


class _Mixed(NotImplementedError):
    """The error for a layer in which the rows of different examples mix."""

    def __init__(self, message: str, tracked: TrackedLayer) -> None:
        super().__init__(message)
        self.tracked = tracked


def _without_several_rows(assignment: RuleAssignment, mixed: _Mixed) -> RuleAssignment:
    """The assignment without the guess that the mixed layer has several rows for each example.

    Raises:
        NotImplementedError: the layer was not guessed to; its rows do mix.
    """
    runs = dict(assignment.runs)
    kinds = runs.get(mixed.tracked.layer, ())
    if "several" not in kinds:
        raise NotImplementedError(str(mixed)) from None
    # The experts of one array are all routed alike.
    names = set(mixed.tracked.parameters.values())
    for layer in [t.layer for t in assignment.layers if names & set(t.parameters.values())]:
        kinds = runs.get(layer, ("examples",))
        runs[layer] = tuple("examples" if kind == "several" else kind for kind in kinds)
    return replace(assignment, runs=runs)


def verify_uses(
    model: nn.Module, assignment: RuleAssignment, x: Any
) -> tuple[Tensor, RuleAssignment, dict[str, str]]:
    """Prove with a forward pass which parameters act through their own layer alone.

    Hooks detach each tracked layer's output. So a graph that reaches the next layer's input, or the
    model's output, leads to a parameter that was used in between.

    Returns:
        The model's output, the assignment with the rules that derived layers match, and the
        parameters that must be followed operation by operation, each with the message if
        that fails. A parameter is among them if it is used outside of its layer's forward, if its
        layer computes something other than its rule assumes, or if it has no rule.
    """
    # Step 1: layers whose output only the code of the rule's class can have made. That code is what
    # we know, so that their rules are right. Of all others (an overridden forward, a user's rule)
    # the rules are tried.
    hooks = nn.modules.module
    has_hooks = bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
    plain = {
        t
        for t in assignment.layers
        if t.built_in
        and class_and_hooks(t.layer) == (t.layer_type, [])
        and "forward" not in vars(t.layer)
        and not has_hooks
    }
    # Step 2: a forward pass, in which each layer's output is detached.
    sharded = is_sharded(model)  # whose layers run on what was gathered
    names = {name for t in assignment.layers for name in t.parameters.values()}
    values = detached_parameters(model)
    leaves = {name: p.requires_grad_() for name, p in values.items() if name in names}
    # The rules that match all runs of a layer so far; empty if none does.
    rules: dict[TrackedLayer, list[type[Rule]]] = {}
    # The parameters that are used outside of their layer's forward -> the message.
    outside: dict[str, str] = {}

    def note_uses_outside(value: Tensor, where: str) -> None:
        """Note the parameters that a value depends on although it should on none."""
        with gathered_again(model):
            grads = torch.autograd.grad(
                value.sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
        for name, g in zip(leaves, grads, strict=True):
            if g is not None:
                outside[name] = (
                    f"'{name}' reached {where} outside of the forward of its own layer (used "
                    "functionally, by a layer without a rule, or in a compiled model), where hooks "
                    "cannot see it. Call the layer itself, pass the model before torch.compile, or "
                    "freeze the parameter (requires_grad_(False))."
                )

    def before(tracked: TrackedLayer, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        try:
            check_run(model, tracked, tracked.rule.input_of(args, kwargs))
        except TypeError:
            if class_and_hooks(layer)[0] is tracked.layer_type:
                raise
            rules[tracked] = []  # a derived class that takes other arguments

    def after(
        tracked: TrackedLayer, layer: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Tensor:
        a = tracked.rule.input_of(args, kwargs)
        if a.requires_grad:
            note_uses_outside(a, f"the input of layer {tracked}")
        if tracked in plain:
            # Not with other tensors in the parameters' places, as by functional_call in a forward.
            own = getattr(layer, "_parameters", {})
            is_own = sharded or all(
                own[local] is leaves[name]
                for local, name in tracked.parameters.items()
                if local in own
            )
            rules[tracked] = [tracked.rule] if is_own and rules.get(tracked, True) else []
            return output.detach()
        candidates = rules.setdefault(tracked, [tracked.rule, *tracked.rule.alternatives])
        if candidates and dtypes:  # one rule must match all runs of the layer
            parameters = {local: leaves[name] for local, name in tracked.parameters.items()}
            with gathered_again(model):  # a backward pass in mid-forward
                rules[tracked] = _matching_rules(
                    tracked, candidates, parameters, a, output, dtypes.tolerance
                )
        return output.detach()

    # A derived layer may compute in a coarser dtype.
    dtypes = None if len(plain) == len(assignment.layers) else DtypesInUse()
    with layer_hooks(assignment, before, after), torch.enable_grad(), explicit_forwards(assignment):
        with dtypes or nullcontext():
            f = call_with(model, leaves, x)
    if f.requires_grad:
        note_uses_outside(f, "the model's output")
        f = f.detach()
    # Step 3: layers with a rule that matches, and parameters that must be followed.
    candidates, layers, unused = dict(assignment.unknown), [], []
    for t in assignment.layers:
        if t not in rules:
            # It did not run: its parameters are unused, unless functions use all of them.
            if not outside.keys() >= set(t.parameters.values()):
                layers.append(t)
                unused.append(t)
        elif rules[t]:
            layers.append(t if rules[t][0] is t.rule else replace(t, rule=rules[t][0]))
        else:
            message = (
                f"Layer {t} computes something other than its class {t.layer_type.__name__} and "
                "the rule for it (an overridden forward, a hook, or computed weights), so that its "
                "rule would give wrong numbers. Register a rule for its class (register_rule), "
                "derive it from nn.Module, or freeze it (requires_grad_(False))."
            )
            # A user registered this rule for this very layer: the rule is wrong, which must be
            # said. A rule of ours may just not be for a derived class, which can be followed.
            if not t.built_in:
                raise NotImplementedError(message)
            candidates |= dict.fromkeys(t.parameters.values(), message)
    run = {name for t in rules if rules[t] for name in t.parameters.values()}
    idle = [str(t) for t in unused if not run.issuperset(t.parameters.values())]
    if idle:
        warnings.warn(
            f"No part of the forward pass, so that their blocks are zero: {', '.join(idle)}.",
            stacklevel=2,
        )
    return f, replace(assignment, layers=layers), outside | candidates


def _matching_rules(
    tracked: TrackedLayer,
    rules: list[type[Rule]],
    parameters: dict[str, Tensor],
    a: Tensor,
    output: Any,
    tolerance: float,
) -> list[type[Rule]]:
    """The rules whose gradients in the layer's own parameters equal autograd's.

    A rule computes them from the layer's input and a random gradient of its output, and autograd
    from the graph.
    """
    layer = tracked.layer
    if not isinstance(output, Tensor):
        return []
    a, u = a.detach(), noise_like(output)
    declared = current_rows()
    rows = None if declared is None else rows_of(tracked, a, declared)
    if rows is not None:
        a, u = rows.flatten(a), rows.flatten(u)
    if not (a.dim() and u.dim() and len(a) == len(u)):
        return []
    # For a rule of ours two rows are enough to tell, and take less memory than all. With u zero
    # elsewhere, autograd's gradient is that of these two rows, too.
    some = slice(2 if tracked.built_in else len(a))
    u[some.stop :] = 0.0
    expected = torch.autograd.grad(
        output, list(parameters.values()), u.view_as(output), retain_graph=True, allow_unused=True
    )
    if None in expected:
        return []

    def obeys(kind: type[Rule]) -> bool:
        try:
            rule = kind(layer, "expand", tracked.parameters)
            gradients = summed_gradients(rule, Use(a[some], rows), u[some])
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            return False  # the rule is not for such inputs
        return all(
            close(gradient.flatten(), gradients[local].to(gradient), tolerance)
            for local, gradient in zip(parameters, expected, strict=True)
        )

    return [kind for kind in rules if obeys(kind)]


@dataclass(eq=False)
class _ReachedRows(Sink):
    """Which rows of each use have a gradient that is not zero, vector by vector."""

    rows: dict[tuple[TrackedLayer, Use], list[Tensor]] = field(default_factory=dict)
    finite: bool = True
    """Whether all gradients so far were finite."""

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Add a vector's rows."""
        self.finite = self.finite and bool(torch.isfinite(b).all())
        self.rows.setdefault((tracked, use), []).append((b.reshape(len(b), -1) != 0).any(1))


def verify_independence(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    numbers: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[bool, RunRecord]:
    """Prove with one forward pass that no row of a layer belongs to two examples.

    The gradient of the first example's output must reach only that example's rows, and the gradient
    of the other outputs only the other rows. Examples that happen to be sorted would hide a forward
    that sorts them by their values; `with_first_again` prevents that.

    ``numbers`` has the example's index in ``counted`` for each row of x, and is None if the
    rows are these examples in order. ``counted`` marks the loss terms (N, ...) that count; None is
    all.

    Returns:
        Whether these examples could prove it: a single one cannot, nor can numbers that are not
        finite, of which nothing is returned. And the layers' runs.

    Raises:
        NotImplementedError: the first example's output reaches a row that another's reaches, or a
            row that does not count; own parameters that are not used elementwise.
    """
    reached = _ReachedRows()
    with Capture(model, assignment, reached) as capture:
        f = capture.forward(x)
        for tracked in capture.runs.not_divisible:
            raise _Mixed(f"Layer {tracked} got rows in no multiple of the examples.", tracked)
        if f.dim() < 2 or not torch.isfinite(f).all():
            return False, RunRecord()  # reported by name, with the targets
        if numbers is None or len(numbers) != len(f):
            numbers = torch.arange(len(f))
        numbers = numbers.to(f.device)  # for objects of the user's they were made on the CPU
        # Random gradients, since ones would cancel in a layer such as softmax, whose outputs have a
        # constant sum. Terms that do not count propagate nothing back in the pass either.
        u = noise_like(f)
        # Labels that do not fit the outputs are reported by `check_targets`.
        if (
            counted is not None
            and counted.shape[1:] == f.shape[1:-1]
            and int(numbers.max()) < len(counted)
        ):
            u = u * counted[numbers][..., None]
        # The first example against the rest would not notice examples that mix among the rest. So
        # each bit of the examples' indices splits them into two halves, too, and any two examples
        # lie in different halves for at least one bit.
        order = torch.arange(len(f), device=f.device)
        bits = range((len(f) - 1).bit_length())
        splits = [numbers == 0, *((order >> bit & 1).bool() for bit in bits)]
        for first in splits:
            of_first = first.view(-1, *[1] * (f.dim() - 1))
            capture.backward(f, [u * of_first, u * ~of_first])
            # 0 · NaN is NaN, which would look as if every gradient reached every row. Factors that
            # are not finite raise an error with the layer's name later.
            if not reached.finite:
                return False, RunRecord()
            for (tracked, use), rows in reached.rows.items():
                if len(rows) == 2:  # otherwise one of the two gradients did not reach this run
                    _check_apart(tracked, use, rows[0], rows[1], first)
            reached.rows.clear()
        return len(f) > 1, capture.runs


def _check_apart(
    tracked: TrackedLayer, use: Use, by_first: Tensor, by_rest: Tensor, first: Tensor
) -> None:
    """Raise an error unless gradients of some examples' outputs reach only the rows of these.

    ``first`` is a mask of these examples (N,). ``by_first`` and ``by_rest`` are the rows that
    their gradients reach, and those of the others.
    """
    if use.rows is not None:
        counts = use.rows.index < use.rows.num_examples
        if (by_first | by_rest)[~counts].any():
            raise NotImplementedError(
                f"In layer {tracked} rows that do not count reach the output. Leave them out of "
                "whatever pools over positions, or let them count (those that a batch's mask "
                "hides: dict_key_mask=None)."
            )
        own = first[use.rows.index.clamp(max=len(first) - 1)] & counts
    else:
        # Where rows and examples differ in number, it is unknown whose rows they are. It can still
        # be checked that no row is reached from both.
        own = first if len(by_rest) == len(first) else ~by_rest
    if not ((by_first & ~own).any() or (by_rest & own).any()):
        return
    if isinstance(tracked.layer, OwnParameter):
        names = list(tracked.parameters.values())
        raise Refusal(dict.fromkeys(names, no_copies(names)))
    raise _Mixed(
        f"In layer {tracked} the rows of different examples mix: its input has no batch axis in "
        "front, a layer behind it shares information within a batch, or its rows are examples in "
        "another order than the outputs. Put the batch axis first (N, ..., d), say which example "
        "each row belongs to (examples_of_rows), make what belongs together one example with "
        "several loss terms (outputs (N, R, C)), or freeze it (requires_grad_(False)).",
        tracked,
    )


def with_first_again(x: Any, N: int, splits: bool = True) -> tuple[Any, Tensor | None]:
    """The N examples with the first one appended twice, and the example index of each row.

    This exposes a forward that changes the order of the examples. Sorting puts equal examples side
    by side; here equal examples stand at both ends, so that sorting must move some. With a single
    copy, reversing the batch would exchange the equal examples at its ends and look like no change.

    Args:
        x: the examples.
        N: their number.
        splits: whether the model takes batches of another size. If not, the two copies replace the
            last two examples of a batch of at least four; a smaller batch is returned as it is,
            with None for the indices.
    """
    if not splits and N < 4:
        return x, None
    tensors = x.values() if isinstance(x, dict) else [x]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    numbers = torch.arange(N + 2 if splits else N, device=device)
    numbers[-2:] = 0
    again = attempt(lambda: examples(x, numbers))  # objects of the user's may take slices alone
    return (again, numbers) if type(again) is type(x) else (x, None)


def find_runs(
    model: nn.Module, assignment: RuleAssignment, x: Any
) -> tuple[RuleAssignment, dict[str, str]]:
    """The assignment, completed by the runs of layers that have another input than one row each.

    The model runs on one example and on the same example twice:

    - A run on an input that all examples share, such as an embedding of positions, has the same
      input shape both times. If the model broadcasts its output, a copy for each example changes no
      number and receives that example's gradient. Otherwise the output is followed to where it
      meets the examples (`follow`).
    - A run on several rows of each example has k > 1 rows for one example and 2k for two.
    - A run whose output passes no derivative on is a constant if other runs of its parameters do.
      It does not count as a use of the parameters.

    If the examples cannot be separated, the assignment is returned as it is.

    Returns:
        The assignment, and the parameters of layers whose output must be followed, each with the
        message if that fails.
    """

    def trial() -> list[tuple[Any, Any, Any]]:
        recorded = []
        # The same example twice, not two: sizes that depend on values (routing) then agree.
        for numbers in ([0, 0], [0]):
            some, inputs = examples(x, torch.tensor(numbers)), _InputShapes()
            with Capture(model, assignment, inputs) as capture, forked_random_numbers(model):
                f = capture.forward(some)
                if len(numbers) == 1:
                    capture.backward(f, [noise_like(f)])
                runs = capture.runs.kinds()
            shapes = {t: of_runs for t, of_runs in inputs.shapes.items() if t in runs}
            recorded.append((some, runs, shapes))
        return recorded

    recorded = attempt(trial)
    if isinstance(recorded, Exception):  # a model that needs a whole batch
        return assignment, {}
    (twins, _, shapes_of_two), (_, runs, shapes) = recorded
    # Step 1: compare the sizes of each run's input. Kinds are noted twice: ``kinds_of`` is the
    # answer, ``runs`` has no kind "several" and is what copies of shared outputs are tried with.
    shared: dict[tuple[TrackedLayer, int], torch.Size] = {}
    kinds_of = {tracked: list(kinds) for tracked, kinds in runs.items()}
    for tracked, sizes in shapes.items():
        of_two = shapes_of_two.get(tracked, [])
        for number, (shape, twice) in enumerate(zip(sizes, of_two, strict=False)):
            # The shape is None where `examples_of_rows` gives the examples.
            if shape is None or twice is None or runs[tracked][number] == "constant":
                continue
            if shape == twice and len(sizes) == len(of_two):
                shared[tracked, number] = shape
            elif len(shape) and shape[0] > 1 and twice[0] == 2 * shape[0]:
                kinds_of[tracked][number] = "several"
    # Step 2: try to copy the outputs of shared runs for each example.
    # A first axis of size one may be a batch axis or an axis with a single position. Its size does
    # not tell, so both are tried: with the wrong one the model's output changes.
    for first in (True, False) if shared else ():
        for (tracked, number), shape in shared.items():
            with_first = first and len(shape) > 0 and shape[0] == 1
            kind = SharedAxes(with_first, len(shape))
            runs[tracked][number] = kinds_of[tracked][number] = kind
        if _takes_copies(model, _with_runs(assignment, runs), twins):
            return _with_runs(assignment, kinds_of), {}
    # Step 3: neither fits, as for a table that is indexed before it meets the examples.
    for tracked, number in shared:
        kinds_of[tracked][number] = "followed"
    layers = dict.fromkeys(tracked for tracked, _ in shared)
    message = (
        f"{' and '.join(map(str, layers))} has the same input for all examples, and its output "
        "cannot be copied for each, (N, ...): that would change the model's output, or rows of "
        "different examples mix (dropout on a shared output mixes them, too). Give it a batch axis "
        "(N, ...), or freeze it (requires_grad_(False))."
    )
    names = [name for tracked in layers for name in tracked.parameters.values()]
    return _with_runs(assignment, kinds_of), dict.fromkeys(names, message)


@dataclass(eq=False)
class _InputShapes(Sink):
    """The shape of each run's input; None where it does not tell the number of examples.

    That is where `examples_of_rows` says which example each row belongs to: the rows of one example
    may be as many as those of several by chance. The same holds where there are none.
    """

    shapes: dict[TrackedLayer, list[torch.Size | None]] = field(default_factory=dict)

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Add a run's shape."""
        declared = use.rows is not None and not use.rows.of_positions
        shape = use.a.shape if use.rows is None else use.rows.axes + use.a.shape[1:]
        counted = None if declared or not use.a.numel() else torch.Size(shape)
        self.shapes.setdefault(tracked, []).append(counted)


def _with_runs(assignment: RuleAssignment, runs: dict[TrackedLayer, list[Run]]) -> RuleAssignment:
    """The assignment with the runs of those layers that have any other kind than "examples"."""
    others = {t.layer: tuple(kinds) for t, kinds in runs.items() if set(kinds) != {"examples"}}
    return replace(assignment, runs=others)


def _takes_copies(model: nn.Module, assignment: RuleAssignment, twins: Any) -> bool:
    """Whether the output stays when shared outputs are copied for each of two examples."""

    def trial() -> bool:
        verify_gradients(model, assignment, twins, {})
        # Copies are all equal, so that along a wrong axis of the same size the output stays, too.
        with forked_random_numbers(model):
            verify_independence(model, assignment, twins)
        return True

    return attempt(trial) is True  # a forward may fail in any way on a tensor of another shape


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """A context with cuDNN off: its recurrent layers have no derivative in eval mode."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.enabled = cudnn.enabled, False
    try:
        yield
    finally:
        cudnn.enabled = before


def verify_divided(model: nn.Module, assignment: RuleAssignment, x: Any) -> None:
    """Prove that layers computed by parts leave the model's output and their gradients as they are.

    Raises:
        Refusal: parts that compute something else, by the layer's name.
    """
    divided = [d for d in assignment.divided if d.by_parts.is_checked]
    if not divided:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    of_rules = {name for t in assignment.all for name in t.parameters.values()}  # by rules
    messages = {
        d: {
            names[id(p)]: f"Layer '{d.name}' ({type(d.layer).__name__}) computes something other "
            f"than {type(d.by_parts).__name__} (an overridden forward, other options, or wrong "
            "parts). Register parts for its class (register_rule), or freeze it "
            "(requires_grad_(False))."
            for p in d.layer.parameters()
            if names[id(p)] in of_rules
        }
        for d in divided
    }
    if not any(messages.values()):
        return
    with preserve_state(model):
        model.eval()  # in train mode the two forwards would draw different dropout masks
        try:
            every = dict(ChainMap(*messages.values()))
            verify_gradients(model, assignment, x, every, by_parts=False)
        except Refusal:
            # All at once is cheaper; one after the other shows whose output is another.
            for d, of_layer in messages.items():
                alone = replace(assignment, divided=[d])
                try:
                    if of_layer:
                        verify_gradients(model, alone, x, of_layer, by_parts=False)
                except Refusal as refusal:
                    raise Refusal(refusal.errors, [d]) from refusal
            raise


class _SummedGradients(Sink):
    """The gradient in each of some parameters by the layers' rules, summed over all uses."""

    needs_inputs = True

    def __init__(self, assignment: RuleAssignment, parameters: Mapping[str, Tensor]) -> None:
        self.gradients = {name: torch.zeros_like(p).flatten() for name, p in parameters.items()}
        self._rules = {t: t.rule(t.layer, "expand", t.parameters) for t in assignment.layers}

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Add one use's gradient, summed over its examples."""
        if isinstance(tracked.layer, OwnParameter):
            gradients = dict.fromkeys(tracked.parameters, b.sum(0).flatten())
        elif self.gradients.keys() & set(tracked.parameters.values()):
            gradients = summed_gradients(self._rules[tracked], use, b)
        else:
            return
        for local, gradient in gradients.items():
            if tracked.parameters[local] in self.gradients:
                slot, slots = tracked.slots.get(local, (0, 1))
                part = self.gradients[tracked.parameters[local]].chunk(slots)[slot]
                part += gradient.to(part)


def verify_gradients(
    model: nn.Module,
    assignment: RuleAssignment,
    x: Any,
    messages: Mapping[str, str],
    by_parts: bool = True,
) -> None:
    """Prove that the uses which were found are all uses of some parameters.

    The output must not change: own parameters are replaced by a copy for each example, and so are
    expressions of followed parameters; layers run by their parts. And the gradients from all uses,
    by their rules and summed over the examples, must equal autograd's.

    ``messages`` has the message for each parameter if that does not hold; empty, the output is all
    that is compared. ``by_parts`` says
    whether autograd's gradients are of layers by parts, too, or of their own forward.

    Raises:
        Refusal: parameters for which it does not hold.
    """
    # The random gradient u is propagated back twice: by the rules, and by autograd to the leaves.
    values = detached_parameters(model)
    leaves = {name: values[name].requires_grad_() for name in messages}
    by_rules = _SummedGradients(assignment, leaves)
    with torch.enable_grad():
        forwards = explicit_forwards(assignment) if by_parts else _without_cudnn()
        with forwards, forked_random_numbers(model), DtypesInUse() as used:
            f = call_with(model, leaves, x)
        # One random vector is enough: different linear maps agree on it with probability zero.
        u = noise_like(f)

        # With hooks and copies the output must be the same, and so must the gradients by the rules.
        def trial() -> bool:
            with (
                Capture(model, assignment, by_rules) as capture,
                forked_random_numbers(model),
            ):
                g = capture.forward(x)
                equal = close(f.detach(), g.detach(), used.tolerance)
                if equal and messages:
                    capture.backward(g, [u])
                return equal

        equal = attempt(trial)  # a forward may fail in any way on a tensor of another shape
        if isinstance(equal, NotImplementedError):
            raise equal
        if equal is not True:
            raise Refusal(messages) from (equal or None)
        by_autograd: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and f.requires_grad:  # as it may without leaves, by a hook of the model's own
            by_autograd = torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)
    wrong = {}
    for (name, leaf), gradient in zip(leaves.items(), by_autograd, strict=True):
        expected = torch.zeros_like(leaf) if gradient is None else gradient
        if not close(expected.flatten(), by_rules.gradients[name], used.tolerance):
            wrong[name] = messages[name]
    if wrong:
        raise Refusal(wrong)


def no_copies(names: list[str]) -> str:
    """The message for own parameters that the forward does not take a copy of for each example."""
    return (
        f"The forward does not take a copy for each example of {', '.join(map(repr, names))}: with "
        "(N, ...) in place of (1, ...) its output is another, or examples mix. Use them "
        "elementwise, give register_parameters the shape as which they are broadcast, or freeze "
        "them (requires_grad_(False))."
    )
