"""Prove on a pass's first batches that hooks capture the correct inputs and gradients.

A wrong number is worse than an error. A comparison with autograd (`comparison`) shows that the
hooks capture every use of a parameter, that every rule computes what its layer does, and that no
examples mix. If it disagrees, the search tries the next candidate (`candidates`) and compares
again. A parameter for which no candidate passes raises an error that names it. With the option
``unsupported`` it becomes a constant, or gets the diagonal of its block instead.

Life cycle. The constructor of a pass makes one `Proof`. For each batch the pass asks
`Proof.is_made`, and calls `Proof.make` if something is left to prove. A first batch of several
examples usually proves everything. Afterwards `Proof.assignment`, `batch` and `output_dim` stay
constant, and the pass uses them for all batches.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples, num_examples
from kfac_backend.engine.candidates import Search, mixed_message, raise_mixed
from kfac_backend.engine.capture import Runs
from kfac_backend.engine.comparison import Comparison, compare
from kfac_backend.engine.model_calls import (
    ALL_HOOKS,
    GLOBAL_HOOKS,
    BatchTrial,
    forked_random_numbers,
    try_batch,
    try_twice,
)
from kfac_backend.engine.rule_assignment import Refusal, RuleAssignment, TrackedLayer
from kfac_backend.engine.task import check_inputs
from kfac_backend.layers.rows import counted_positions
from kfac_backend.sharding import reshard


class Proof:
    """Proved facts about a model and its layers, from the first batches of a pass.

    A batch of one example proves the uses of parameters. The first batch of several examples proves
    that none mix.
    """

    def __init__(self, model: nn.Module, assignment: RuleAssignment) -> None:
        self._model, self._initial = model, assignment
        self._structure: _Structure | None = None  # set by a proof
        self._is_whole = False  # whether that proof had several examples
        self._num_examples = 0  # number of examples that were checked: 0, 1, or several (2)
        self.holds_for_masks = False
        """Whether `make_for_masks` has proved its part, for the layers in ``masked``."""
        self.masked: set[TrackedLayer] = set()
        """Layers with rows that a mask hid in that proof."""
        self.rows: set[tuple[TrackedLayer, int]] = set()
        """Layers and their numbers of rows per example for which independence was proved."""
        self.assignment = assignment
        """The tracked layers; after the proof with their runs and matching rules."""
        self.batch = BatchTrial()
        """Properties of the model's batches."""
        self.output_dim = 0
        """Number of axes of the model's output; 0 before the proof."""

    def is_made(self, N: int | None) -> bool:
        """Return whether a batch of N examples (None: unknown) can prove nothing more."""
        return self._num_examples >= min(N or 1, 2)

    def is_of_this_structure(self) -> bool:
        """Return whether all is proved for the model's present modules, modes and parameters."""
        if self._structure is None or not self._is_whole:
            return False
        return self._structure.kinds == _structure(self._model).kinds

    def is_outdated(self) -> bool:
        """Return whether the model has changed since the last proof, other than in values.

        It has if it now has other modules, modes, parameters, hooks or forwards. This compares
        counters and identities. It does not find an attribute by which a forward or a hook decides
        what it computes. The answer is of this rank alone.
        """
        if self._structure is None:
            return False
        now = _structure(self._model)
        return (now.kinds, now.calls) != (self._structure.kinds, self._structure.calls)

    def renew(self) -> bool:
        """Request a shorter proof at other values of the parameters, which `make` then makes.

        False if the model has other modules, modes or parameters, and so needs a new proof.
        """
        if not self._num_examples and self._structure is None:
            return True
        if not self.is_of_this_structure():  # or after a partial proof
            return False
        self._num_examples, self.holds_for_masks = 0, False
        self.masked, self.rows = set(), set()
        return True

    def make(self, x: Any, N: int | None, counted: Tensor | None = None) -> None:
        """Prove missing facts on a few of the examples.

        Active dropout does not advance the caller's random numbers. After `renew` the check runs on
        two examples, if the model's structure is unchanged. If this check fails, the whole proof is
        made.

        N is None if the targets do not show it. ``counted`` marks the loss terms (N, ...) that
        count; None means all.

        Raises:
            ValueError: inputs with NaN or infinity, if they prevent the proof.
            NotImplementedError: the hooks cannot follow a parameter or layer; the message names it.
        """
        if num_examples(x) != N:
            N = None  # the targets do not match the examples
        stage = self._num_examples
        comparison = self._again(x, N, counted) if self._is_whole else None
        if comparison is None:
            self._structure, self._is_whole = None, False
            if not stage:
                self.assignment = self._initial
            if N is not None:
                self.batch = try_batch(self._model, x, N)
            search = Search(self._model, self.batch.can_split, x, N, counted)
            # After a batch of one example, sums with its layers exist already.
            run = search.again if stage else search.run
            try:
                with forked_random_numbers(self._model):
                    while comparison is None:  # each refusal removes parameters or raises
                        try:
                            comparison = run(self.assignment)
                        except Refusal as refusal:
                            self._give_up(refusal)
            except NotImplementedError:
                check_inputs(x)  # NaN spreads to all rows, which looks like mixed examples
                raise
        # Assign only now, so that a failed check leaves the assignment unchanged.
        self.assignment, self.output_dim = comparison.assignment, comparison.output_dim
        if comparison.is_finite:
            self._num_examples = 1 if N == 1 else 2
            self.masked, self.rows = comparison.runs.masked, comparison.runs.rows
            self._structure, self._is_whole = _structure(self._model), N != 1

    def _again(self, x: Any, N: int | None, counted: Tensor | None) -> Comparison | None:
        """Check the same assignment on two examples. Return None if it does not agree.

        Other values may have opened a gate, behind which examples mix or a parameter is used.
        """
        if not self.batch.can_split or N is None or N < 2 or not isinstance(x, Tensor | dict):
            return None
        counted = None if counted is None else counted[:2]
        search = Search(self._model, True, examples(x, slice(2)), 2, counted)

        def trial() -> Comparison:
            with forked_random_numbers(self._model):
                return search.check(self.assignment)

        again = try_twice(trial)
        if isinstance(again, NotImplementedError):
            return None
        if isinstance(again, Exception):
            raise again
        return again if again.is_finite and again.agrees else None

    def make_for_runs(
        self, runs: Runs, x: Any, mask: Tensor | None, counted: Tensor | None
    ) -> None:
        """Prove facts about the layers' runs on a batch x that earlier batches did not show.

        ``mask`` (N, R) and ``counted`` (N, ...) mark the positions and the loss terms that count;
        None means all.
        """
        # First on a few examples. If these do not show all, then on the whole batch.
        for _ in range(2):
            if self.needs_mask(runs.masked, mask):
                self.make_for_masks(x, mask, counted)
        if runs.rows <= self.rows:
            return
        # A new number of consecutive rows per example: for sequences that a mask has packed, a
        # first batch of equal lengths looks as if all examples had equally many rows.
        with forked_random_numbers(self._model):
            search = Search(self._model, self.batch.can_split, x, num_examples(x), counted)
            comparison = search.check(self.assignment)
        for tracked in comparison.mixed:
            raise NotImplementedError(
                f"{mixed_message(tracked)} In earlier batches all examples had equally many rows. "
                "Say which example each row belongs to (examples_of_rows)."
            )
        self.rows |= runs.rows

    def needs_mask(self, masked: set[TrackedLayer], mask: Tensor | None) -> bool:
        """Return whether a batch that hides rows of these layers needs `make_for_masks`."""
        return bool(masked - self.masked or (mask is not None and not self.holds_for_masks))

    def make_for_masks(self, x: Any, mask: Tensor | None, counted: Tensor | None) -> None:
        """Prove that positions hidden by a mask reach no output that counts.

        The mask is given, or the model has its own. The hidden positions' gradients are then zero
        and add nothing to B, so it suffices to leave their inputs out of A. The first proof needs
        two examples. A model may trim a batch to its longest sequence, so the mask fits its layers
        only in other batches; later proofs run whole batches. Call this after `make`, because it
        uses the layers and runs of `make`.

        ``counted`` marks the loss terms (N, ...) that count; None means all.
        """
        if mask is not None and not self.holds_for_masks and num_examples(x) == len(mask):
            # The first example with a hidden position, and another one.
            hiding = torch.argmin(mask.all(1).int())
            index = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, mask = examples(x, index), mask[index]
            counted = None if counted is None else counted[index]
        with counted_positions(mask):
            comparison = compare(self._model, self.assignment, x, counted)
        runs = comparison.runs
        raise_mixed(comparison)
        self.holds_for_masks, self.masked = True, self.masked | runs.masked
        # Equal if the model has dropped the positions that the mask hides.
        counts = None if mask is None else int(mask.sum())
        unmasked = [name for name, number in runs.unmasked.items() if number != counts]
        if counts is not None and unmasked:
            warnings.warn(
                f"The mask of positions does not fit the inputs of {', '.join(unmasked)}. All of "
                "their positions count, and if some are padding, the factors depend on it. Use "
                "batches of equal lengths, or say which positions count (examples_of_rows). In "
                "convolutions all positions count. Replace a convolution of kernel size 1 by "
                "nn.Linear on (N, R, d), which leaves out the padding.",
                stacklevel=2,
            )

    def _give_up(self, refusal: Refusal) -> None:
        """Treat the refused parameters as the option ``unsupported`` says, or raise an error."""
        assignment, names = self.assignment, refusal.errors
        if assignment.unsupported == "error" or not names:
            raise NotImplementedError(str(refusal)) from refusal.__cause__
        if assignment.unsupported == "freeze":
            # "freeze" is for layers without a rule. A layer with a rule whose uses cannot be proved
            # is more likely a mistake than a choice.
            with_rule = [name for name in names if name not in assignment.unknown]
            if with_rule:
                raise NotImplementedError(names[with_rule[0]]) from refusal.__cause__
            warnings.warn(
                "These parameters have no K-FAC rule and are treated as constants: "
                f"{', '.join(names)}.",
                stacklevel=2,
            )
            self.assignment = assignment.with_constants(names)
            return
        self.assignment = replace(
            assignment.without(names),
            diagonal=[n for n in assignment.names if n in names or n in assignment.diagonal],
            divided=[d for d in assignment.divided if d not in refusal.divided],
        )


class _Structure(NamedTuple):
    """Everything of a model that can be compared, except for values."""

    objects: list[Any]
    """Compared objects, which are kept because Python reuses the id of a dead one."""
    kinds: list[Any]
    """Modules, modes and parameters."""
    calls: list[Any]
    """Hooks and forwards, which may also change what a module computes."""


def _structure(model: nn.Module) -> _Structure:
    """Return a model's modules, parameters, hooks and forwards, as comparable values."""
    reshard(model)  # tensors that FSDP still keeps gathered are other objects
    modules = list(model.modules())
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False)]
    kinds: list[Any] = [(id(module), module.training) for module in modules]
    kinds += [(id(p), p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]
    calls: list[Any] = [tuple(hooks) for hooks in GLOBAL_HOOKS]
    forwards: list[Any] = []
    for module in modules:
        own = vars(module)
        forward = own.get("forward"), getattr(type(module), "forward", None)
        forwards += forward
        # torch counts the hooks, so that no other hook gets the number of a former one.
        numbers = [sorted(own[name]) if own.get(name) else () for name in ALL_HOOKS]
        calls.append((type(module), *map(id, forward), *numbers))
    return _Structure([*modules, *parameters, *forwards], kinds, calls)
