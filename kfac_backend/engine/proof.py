"""The proof, on a pass's first batches, that the hooks of `capture` see all that rules rely on.

A wrong number is worse than an error. One comparison with autograd (`comparison`) shows that every
use of a parameter is seen, that every rule computes what its layer does, and that no examples mix.
What disagrees is tried with the next candidate (`candidates`), and the comparison decides again. A
parameter for which no candidate agrees raises an error that names it, or, if the user asked for
that, becomes a constant or gets the diagonal of its block (``unsupported``).

Life cycle. A pass makes one `Proof` when it is constructed. With each batch it asks
`Proof.is_made`, and calls `Proof.make` if something is left to prove; a first batch of several
examples usually proves all. From then on `Proof.assignment`, `batch` and `output_dim` stay as they
are, and the pass reads them for all batches.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import examples, num_examples
from kfac_backend.engine.candidates import Search, mixed_message, raise_mixed
from kfac_backend.engine.capture import Runs
from kfac_backend.engine.comparison import Comparison, compare
from kfac_backend.engine.model_calls import (
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
    """What is known of a model and its layers, proved on the first batches of a pass.

    A batch of one example proves which uses there are. The first batch of several examples proves
    that none mix.
    """

    def __init__(self, model: nn.Module, assignment: RuleAssignment) -> None:
        self._model, self._initial = model, assignment
        self._structure: tuple[list[Any], list[Any]] | None = None  # when all was proved
        self._num_examples = 0  # that the check has seen: 0, 1, or several (2)
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
        return self._num_examples >= min(N or 1, 2)

    def is_of_this_structure(self) -> bool:
        """Whether all is proved, and the model has the modules, modes and parameters it had."""
        return self._structure is not None and self._structure[1] == _structure(self._model)[1]

    def renew(self) -> bool:
        """Ask for the proof again, at other values of the parameters: `make` makes less of it.

        Returns:
            False if the model has other modules, modes or parameters: then it needs another proof.
        """
        if self._structure is None:
            return not self._num_examples  # nothing is proved yet, or only a part
        if not self.is_of_this_structure():
            return False
        self._num_examples, self.holds_for_masks = 0, False
        self.masked, self.rows = set(), set()
        return True

    def make(self, x: Any, N: int | None, counted: Tensor | None = None) -> None:
        """Prove, on a few of the examples, what is not proved yet.

        Dropout that is on uses up no random numbers of the caller. After `renew` the check runs on
        two examples, if the model's structure is the same; if it does not agree, the whole proof is
        made.

        N is None if the targets do not tell it. ``counted`` marks the loss terms (N, ...) that
        count; None is all.

        Raises:
            ValueError: inputs with NaN or infinity, if they prevent the proof.
            NotImplementedError: what the hooks cannot follow, by name.
        """
        if num_examples(x) != N:
            N = None  # what belongs to which example is not known
        assignment, stage = self.assignment, self._num_examples
        comparison = None if self._structure is None else self._again(x, N, counted)
        if comparison is None:
            self._structure = None
            if not stage:
                self.assignment = self._initial
            if N is not None:
                self.batch = try_batch(self._model, x, N)
            search = Search(self._model, self.batch.can_split, x, N, counted)
            # After a batch of one example sums have begun with its layers.
            run = search.again if stage else search.run
            try:
                with forked_random_numbers(self._model):
                    while comparison is None:  # each refusal takes parameters away or raises
                        try:
                            assignment, comparison = run(self.assignment)
                        except Refusal as refusal:
                            self._give_up(refusal)
            except NotImplementedError:
                check_inputs(x)  # NaN spreads to all rows, which looks as if examples mixed
                raise
        # Only now, so that a check that raises leaves the assignment as it was.
        self.assignment, self.output_dim = assignment, comparison.output_dim
        if comparison.is_finite:
            self._num_examples = 1 if N == 1 else 2
            self.masked, self.rows = comparison.runs.masked, comparison.runs.rows
            self._structure = None if N == 1 else _structure(self._model)

    def _again(self, x: Any, N: int | None, counted: Tensor | None) -> Comparison | None:
        """Check the same assignment on two examples; None if it does not agree.

        Other numbers may have opened a gate, behind which examples mix or a parameter is used.
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
        """Prove what a batch's runs show and earlier ones did not, if there is anything.

        Args:
            runs: the layers' runs on the batch.
            x: the batch.
            mask: which positions count (N, R); None if all do.
            counted: the loss terms (N, ...) that count; None is all.
        """
        for _ in range(2):  # on a few examples, and if these do not show all, on the whole batch
            if self.needs_mask(runs.masked, mask):
                self.make_for_masks(x, mask, counted)
        if not runs.rows <= self.rows:
            self._make_for_rows(x, counted)
            self.rows |= runs.rows

    def _make_for_rows(self, x: Any, counted: Tensor | None) -> None:
        """Prove that examples' rows follow one another where they are more or fewer than before.

        Of sequences that a mask has packed, a first batch of equal lengths looks as if each example
        had as many rows as the others in all batches.
        """
        N = num_examples(x)
        assert N is not None  # which rows that follow one another were divided by
        with forked_random_numbers(self._model):
            search = Search(self._model, self.batch.can_split, x, N, counted)
            comparison = search.check(self.assignment)
        for tracked in comparison.mixed:
            raise NotImplementedError(
                f"{mixed_message(tracked)} In earlier batches each example had as many rows as the "
                "others. Say which example each row belongs to (examples_of_rows)."
            )

    def needs_mask(self, masked: set[TrackedLayer], mask: Tensor | None) -> bool:
        """Whether `make_for_masks` is missing for a batch that hides rows of these layers."""
        return bool(masked - self.masked or (mask is not None and not self.holds_for_masks))

    def make_for_masks(self, x: Any, mask: Tensor | None, counted: Tensor | None) -> None:
        """Prove that the positions which a mask hides reach no output that counts.

        The mask is given, or the model has one of its own. Then the hidden positions' gradients are
        zero and add nothing to B, so that it is enough to leave their inputs out of A. The first
        time two examples are enough. A model may trim a batch to its longest sequence, so that the
        mask fits its layers in other batches alone: later ones run whole. It comes after `make`,
        whose layers and runs it takes.

        ``counted`` marks the loss terms (N, ...) that count; None is all.
        """
        if mask is not None and not self.holds_for_masks and num_examples(x) == len(mask):
            # The first example that it hides a position of, and another one.
            hiding = torch.argmin(mask.all(1).int())
            index = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, mask = examples(x, index), mask[index]
            counted = None if counted is None else counted[index]
        with counted_positions(mask):
            comparison = compare(self._model, self.assignment, x, counted)
        runs = comparison.runs
        raise_mixed(comparison)
        self.holds_for_masks, self.masked = True, self.masked | runs.masked
        # As many as the mask counts: the model has dropped what it hides.
        counts = None if mask is None else int(mask.sum())
        unmasked = [name for name, number in runs.unmasked.items() if number != counts]
        if counts is not None and unmasked:
            warnings.warn(
                f"The mask of positions does not fit the inputs of {', '.join(unmasked)}. All of "
                "their positions count, and if some are padding, factors depend on it. Batch equal "
                "lengths, or say which positions count (examples_of_rows). Of convolutions all "
                "count: where a kernel has size 1, nn.Linear on (N, R, d) leaves out the padding.",
                stacklevel=2,
            )

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
