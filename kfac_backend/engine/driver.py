"""The driver of a pass: it runs a model over batches, and hands a sink what the layers see.

Life cycle. The constructor assigns a rule to each layer. `Driver.start` begins a pass with a sink.
`Driver.add` takes one batch: `Driver.prepare` finds its targets, and proves and decides on the
first batches what holds for all (the proof, and kfac_approx="auto"). Then the batch runs part by
part. For each part a `Capture` runs the model forward, where the sink receives the layers' inputs,
and propagates the Fisher's vectors back, where it receives the gradients. `Driver.finish` sums over
ranks. What is proved stays proved for the next pass.

A sink's sums begin with the first batch and not earlier: only the proof decides the rules of
derived layers, and only the first batch decides kfac_approx="auto".

A step of training makes its own forward pass (`optimizer.training_pass`), and calls what `Driver`
does to a part one by one: `capture`, `propagate`, `PassState.add`.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import (
    detached,
    each_batch,
    examples,
    has_no_examples,
    parts,
    split_batch,
    splits_by_example,
)
from kfac_backend.engine.capture import Capture, RunRecord, Sink
from kfac_backend.engine.model_calls import in_channels_last, is_out_of_memory
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import RuleAssignment, assign_rules
from kfac_backend.engine.sharded_pass import ShardedPass
from kfac_backend.engine.task import BatchChecks, Task, check_inputs
from kfac_backend.layers.rows import counted_positions
from kfac_backend.likelihoods import Likelihood, counted_terms, loss_sum, num_counted_terms
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.precision import LONG_PASS, Arithmetic, backward_arithmetic, full_float32
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks
from kfac_backend.sharding import is_sharded, resharded


@dataclass
class PassState:
    """One pass over some data: what it has counted so far, and the loss that it has summed."""

    checks: BatchChecks
    """What is checked of its batches, some of it on the device and read later."""
    generator: torch.Generator | None
    """The source of drawn numbers, of this rank alone; None is torch's."""
    # These stay on the device until the end, so that no batch waits for a transfer. The loss has
    # many terms, and is summed in float64.
    num_loss_terms: Tensor
    loss: Tensor
    num_data: int = 0
    num_batches: int = 0
    num_outputs: int = 0
    weights: dict[str, Tensor] | None = None
    """Convolutions' weights in the memory format that is faster; None until the first part, with
    which the sink starts, too."""
    failed: bool = False
    """Whether a batch was added in part, so that the sums are useless."""
    is_over: bool = False
    """Whether the sums were taken, so that a batch begins another pass."""

    def add(self, f: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        """Count a part's examples and loss terms, when all of it is added."""
        self.num_data += len(f)
        self.num_outputs = f.shape[-1]
        self.num_loss_terms += num_counted_terms(f, y, likelihood)


class Driver:
    """Runs a model over batches; the parameters must not change between those of a pass.

    Arguments are those of `kronecker_factors`.

    Args:
        model: the model.
        likelihood: of the targets.
        options: all choices of the passes.
        generator: source of drawn numbers.
        process_group: the ranks that have a shard of the data each.
        assignment: the layers to track; by default all with trainable parameters.
        sink: receives what the layers see, until `start` gives another one.

    Raises:
        ValueError: options that are not for the likelihood, the device or the model's layers.
        NotImplementedError: a layer without a rule.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: CurvatureOptions,
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        assignment: RuleAssignment | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.ranks = Ranks(process_group)
        """The ranks that have a shard of the data each."""
        self.model, self.options = model, options
        self.task = Task(likelihood, options)
        """What the batches mean."""
        self.fisher = options.make_fisher()
        """Which matrix."""
        self.generator = generator
        """The common source of all ranks' drawn numbers; None is torch's."""
        # The first batches decide both, for all passes.
        self.proof = Proof(model, assignment or assign_rules(model, options.unsupported))
        """What is known of the model and its layers."""
        self.kfac_approx: KfacApprox = options.kfac_approx
        """The layers' mode; no longer "auto" after the first batch."""
        self.sink = sink or Sink()
        """What receives the layers' inputs and gradients."""
        self.sharded: ShardedPass | None = None
        """What ranks do together that share the model; None if this one has all of it."""
        self.start()

    def start(self, sink: Sink | None = None) -> None:
        """Begin a pass, with another sink if one is given; batches so far are forgotten."""
        self.sink = self.sink if sink is None else sink
        # Asked anew, since the model may have moved between two passes.
        self.device = next(self.model.parameters()).device
        if is_sharded(self.model):
            self.sharded = self.sharded or ShardedPass(self)
            self.sharded.check_ranks()
        self.arithmetic = Arithmetic(self.device, self.options.backward_precision)
        """How the backward passes and the sums are computed."""
        # Each rank has draws of its own. Drawing from the common generator would leave it in
        # different states on ranks with different numbers of batches; `finish` advances it once
        # per pass instead, on all ranks alike.
        own = self.generator
        if self.fisher.draws and self.ranks.size > 1:
            own = self.ranks.generator(_common_generator(own, self.device))
        self.state = PassState(
            BatchChecks(self.model, self.task, self.device),
            own,
            torch.zeros((), dtype=torch.long, device=self.device),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of some data; errors are those of `add`.

        Of several ranks some may have no example of a batch, or no batch at all.
        """
        batches = each_batch(data, description, progress)
        pairs = (split_batch(batch, self.options) for batch in batches)
        if self.ranks.size > 1:
            pairs = (pair for pair in pairs if not has_no_examples(pair[1]))
        for x, y in self.sharded.in_step(pairs) if self.sharded else pairs:
            is_long = self.state.num_data >= LONG_PASS
            if self.arithmetic.precision == "auto" and not self.sharded and is_long:
                # Loaded only where a pass is long.
                from kfac_backend.engine.automatic_precision import fitting_precision

                self.arithmetic.precision = fitting_precision(self, x, y)
            self.add(x, y)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch: forward passes of its parts, and one backward pass per vector.

        Collective for a model under `fully_shard`: all ranks add equally many batches.

        Raises:
            torch.OutOfMemoryError: naming a batch size that fits.
            RuntimeError: after a batch that failed, until `start`.
        """
        self._go_on()
        x, y = detached(x, self.device), detached(y, self.device)
        if has_no_examples(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        # Until all of the batch is added. An error or Ctrl-C in between would leave a part of it in
        # the sums, and the caller could go on with wrong numbers.
        self.state.failed, kfac_approx = True, self.kfac_approx
        with full_float32(), resharded(self.model) if self.sharded else nullcontext():
            if not self._fits(x, y):
                # Other ranks would have to try smaller batches, too.
                fitting = None if self.sharded else self._fitting_size(x, y)
                # Not decided by the examples that happen to fit.
                self.kfac_approx = kfac_approx
                way_out = (
                    f"Batches of {fitting} fit."
                    if fitting
                    else "Use smaller batches, keep large factors by their diagonal "
                    "(diagonal_above), or freeze the largest layers (requires_grad_(False))."
                )
                raise torch.OutOfMemoryError(
                    f"Out of memory on {self.device} in a curvature pass with batches of {len(y)} "
                    f"examples. {way_out}"
                )
            # After the first, second, fourth, eighth batch, ...: what is wrong is found before the
            # pass has taken twice as long as it needed to meet it.
            self.state.num_batches += 1
            if not self.state.num_batches & (self.state.num_batches - 1):
                self.state.checks.read()
        self.state.failed = False

    def finish(self, *, by_owners: bool = False) -> PassSums:
        """The sums over all ranks' data; the sink holds none afterwards.

        Collective. ``by_owners`` lets each be kept by one rank alone, see `sum_over_ranks`.
        """
        self._go_on()
        # If a check or the sum over ranks fails now, the pass must begin again.
        state = self.state
        state.failed = bool(state.num_data)
        state.checks.read()
        if self.kfac_approx == "auto":  # no batch of this rank has decided it
            from kfac_backend.engine.automatic_mode import mode_of_first_batches

            self.kfac_approx = mode_of_first_batches(self)
        blocks, others = self.sink.sums() if state.num_data else ({}, {})
        sums = PassSums(
            blocks, others, self.kfac_approx,
            num_outputs=state.num_outputs, num_data=state.num_data,
            num_loss_terms=int(state.num_loss_terms), loss=state.loss.item(),
            padding=self.proof.assignment.padding,
        )  # fmt: skip
        must_agree = {"the likelihood": self.task.likelihood, "the options": self.options}
        if self.ranks.size > 1:
            sums = sum_over_ranks(sums, self.ranks, self.model, must_agree, by_owners=by_owners)
            if self.fisher.draws:  # so that the next pass draws other labels
                common = _common_generator(self.generator, self.device)
                torch.rand((), generator=common, device=common.device)
        state.is_over, state.weights = True, None
        return sums

    def _go_on(self) -> None:
        """Begin a pass if the last one is over; raise a RuntimeError after a batch that failed."""
        if self.state.is_over:
            self.start()
        if self.state.failed:
            raise RuntimeError(
                "The last batch of this curvature pass failed, and a part of it is in the sums. "
                "Call reset() and begin with the first batch."
            )

    def prepare(self, x: Any, y: Any, mask: Tensor | None) -> Any:
        """A batch's targets; the first batches make the proof, and decide the mode, for all.

        ``mask`` is that of `Task.mask`.
        """
        # First the targets, since the proof must know which loss terms count.
        y = self.task.targets(self.model, x, y, mask)
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        if not self.proof.is_made(N):
            check_inputs(x)
            self.proof.make(x, N, counted_terms(y, self.task.likelihood))
        if mask is not None and not self.proof.holds_for_masks:
            some, its_mask, counted = x, mask, counted_terms(y, self.task.likelihood)
            if splits_by_example(x, y):  # the first that it hides a position of, and another one
                hiding = torch.argmin(mask.all(1).int())
                index = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
                some, its_mask = examples(x, index), mask[index]
                counted = None if counted is None else counted[index]
            self.proof.make_for_masks(some, its_mask, counted)
        if self.kfac_approx == "auto":
            # Loaded only where the mode is not given.
            from kfac_backend.engine.automatic_mode import mode_of_first_batches

            self.kfac_approx = mode_of_first_batches(self, x, y, mask)
        return y

    # ---- One part of a batch, step by step.

    def capture(self) -> Capture:
        """A context that hands the sink what the layers see of one part of a batch.

        The sink starts with the first part of a pass.
        """
        proof, in_training = self.proof, self.sink.in_training
        if self.state.weights is None:
            self.sink.start(proof.assignment, self.kfac_approx)
            in_format = proof.plan.channels_last and not in_training
            self.state.weights = in_channels_last(self.model) if in_format else {}
        return Capture(
            self.model, proof.assignment, self.sink,
            constants=self.state.weights, arithmetic=partial(self.arithmetic.of_sums, in_training),
        )  # fmt: skip

    def propagate(self, capture: Capture, f: Tensor, y: Tensor) -> None:
        """Propagate the Fisher's vectors back from the outputs of a capture."""
        # Autocast is for the forward pass alone: Gram matrices are summed in float32.
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with no_autocast, backward_arithmetic(self.arithmetic.precision):
            # One backward pass for each vector v of the root of the loss Hessian, with the
            # outputs' gradient v: what reaches a layer's output is b, whose outer products are
            # B. The vectors are made one by one, so that memory never holds all of them.
            vectors = self.sink.vectors(self.vectors, f, y)
            capture.backward(f, self.sharded.vectors(vectors, f) if self.sharded else vectors)

    def vectors(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """The Fisher's vectors at outputs and targets."""
        return self.fisher.vectors(
            self.task.likelihood, f, y, self.state.generator, may_ignore=self.task.may_ignore
        )

    def add_part(self, x: Any, y: Any, mask: Tensor | None = None) -> RunRecord:
        """Add one part of a batch, of any number of examples; returns the layers' runs.

        A mask says which positions count.
        """
        likelihood, capture = self.task.likelihood, self.capture()
        with self.sink.part():
            with counted_positions(mask), capture:
                # One forward pass: A, and all that a gradient will need.
                f = capture.forward(x)
                y = self.state.checks.check(x, f, y)
                if not self.state.num_data:
                    self.fisher.warn_of_many_passes(likelihood, f)
                capture.runs.check_examples(len(f), self.sink, hides=mask is not None)
                self.propagate(capture, f, y)
                capture.runs.check_reached()
                masked = capture.runs.masked
            if self.sharded:
                self.sharded.prove_masked(masked, x, y, mask)
            elif masked - self.proof.masked:
                self.proof.make_for_masks(x, mask, counted_terms(y, likelihood))
            with torch.autocast(self.device.type, enabled=False):
                self.sink.part_done(f, y)
        if self.proof.assignment.diagonal and self.sink.takes_example_gradients:
            # Loaded only where such parameters are.
            from kfac_backend.engine.operations.example_gradients import report_gradients

            names = self.proof.assignment.diagonal
            report_gradients(self.model, names, x, lambda f: self.vectors(f, y), self.sink)
        # Counted last: a part that failed must not count.
        self.state.add(f, y, likelihood)
        self.state.loss += loss_sum(f.detach(), y, likelihood)
        return capture.runs

    # ---- Batches that fit into memory.

    def _fits(self, x: Any, y: Any) -> bool:
        """Add the batch; False if the memory is exhausted, after which the sums are useless."""
        try:
            mask = self.task.mask(x)
            y = (self.sharded or self).prepare(x, y, mask)
            # Parts of a batch must give what the batch gives, up to rounding. Only of one tensor of
            # inputs can that be known: the rows of a mapping's layers depend on its mask or its
            # lengths. Ranks that share a model run whole batches, one each.
            proof, plan = self.proof, self.proof.plan
            sizes = [s for s in (plan.part_size, self.sink.most_examples) if s is not None]
            may_split = plan.splits and isinstance(x, Tensor) and not self.sharded
            is_large = may_split and bool(sizes) and x.shape[:1].numel() > min(sizes)
            if is_large and splits_by_example(x, y) and proof.same_in_parts(x):
                for part in parts(x, y, min(sizes)):
                    with proof.part(len(part[1])):
                        self.add_part(*part)
            else:
                rows = self.add_part(x, y, mask).rows
                if not (self.sharded or rows <= proof.rows):
                    counted = counted_terms(y, self.task.likelihood)
                    proof.make_for_rows(rows, x, len(y), counted)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # No error leaves here: its traceback would keep the memory that the next try needs.
            return False
        return True

    def _fitting_size(self, x: Any, y: Any) -> int | None:
        """The largest of half the examples, a quarter, ..., that fits; None if not even one."""
        size = len(y) // 2 if self.proof.plan.splits else 0
        while size:
            self.start()
            self.state.failed = True
            if self._fits(examples(x, slice(size)), y[:size]):
                return size
            size //= 2
        return None


def _common_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator that all ranks have alike: the user's, or torch's on the device."""
    if generator is None and device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return generator or torch.default_generator
