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
from kfac_backend.engine.candidates import Search, mixed_message, raise_mixed, with_first_again
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

MOST_EXAMPLES = 8
"""The most distinct examples that a proof runs on, unless a batch cannot be split. Mixing shows
only among examples that are there."""


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
        if self._structure is not None:
            if self._holds_again(x, N, counted):
                return
            self._structure = None
        stage = self._num_examples
        if not stage:
            self.assignment = self._initial
        if N is not None:
            self.batch = try_batch(self._model, x, N)
            x, N, counted = self._few(x, N, counted)
        search = Search(self._model, self.batch.can_split, x, N, counted)
        try:
            with forked_random_numbers(self._model):
                while True:  # ends, as each refusal takes parameters away or raises
                    try:
                        # After a batch of one example sums have begun with its layers.
                        run = search.again if stage else search.run
                        assignment, comparison = run(self.assignment)
                        break
                    except Refusal as refusal:
                        self._give_up(refusal)
        except NotImplementedError:
            check_inputs(x)  # NaN spreads to all rows, which looks as if examples mixed
            raise
        # Only now, so that a check that raises leaves the assignment as it was.
        self._accept(assignment, comparison, 1 if N == 1 else 2)

    def _accept(self, assignment: RuleAssignment, comparison: Comparison, number: int) -> None:
        self.assignment, self.output_dim = assignment, comparison.output_dim
        if not comparison.is_finite:
            return
        self._num_examples = number
        self.masked, self.rows = comparison.runs.masked, comparison.runs.rows
        if number > 1:
            self._structure = _structure(self._model)

    def _few(self, x: Any, N: int, counted: Tensor | None) -> tuple[Any, int, Tensor | None]:
        """Some examples, spread evenly over the batch, if it can be split."""
        if not self.batch.can_split or N <= MOST_EXAMPLES:
            return x, N, counted
        device = next(self._model.parameters()).device
        index = torch.linspace(0, N - 1, MOST_EXAMPLES, dtype=torch.float64).long().to(device)
        return examples(x, index), MOST_EXAMPLES, None if counted is None else counted[index]

    def _holds_again(self, x: Any, N: int | None, counted: Tensor | None) -> bool:
        """Check the same assignment on two examples; False if it does not agree.

        Other numbers may have opened a gate, behind which examples mix or a parameter is used.
        """
        if not self.batch.can_split or N is None or N < 2 or not isinstance(x, Tensor | dict):
            return False
        x, numbers = with_first_again(examples(x, slice(2)), 2)
        counted = (
            None if counted is None or numbers is None else counted[numbers.to(counted.device)]
        )

        def trial() -> Comparison:
            with forked_random_numbers(self._model):
                return compare(self._model, self.assignment, x, counted)

        again = try_twice(trial)
        if isinstance(again, Exception):
            if isinstance(again, NotImplementedError):
                return False
            raise again
        holds = again.is_finite and again.agrees
        if holds:
            self._accept(self.assignment, again, 2)
        return holds

    def make_for_rows(
        self, rows: set[tuple[TrackedLayer, int]], x: Any, N: int, counted: Tensor | None
    ) -> None:
        """Prove that examples' rows follow one another where they are more or fewer than before.

        Of sequences that a mask has packed, a first batch of equal lengths looks as if each example
        had as many rows as the others in all batches.
        """
        x, N, counted = self._few(x, N, counted)
        search = Search(self._model, self.batch.can_split, x, N, counted)
        with forked_random_numbers(self._model):
            comparison = search.check(self.assignment)
        for tracked in comparison.mixed:
            raise NotImplementedError(
                f"{mixed_message(tracked)} In earlier batches each example had as many rows as the "
                "others. Say which example each row belongs to (examples_of_rows)."
            )
        self.rows |= rows

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
