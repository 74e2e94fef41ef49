"""The driver of a pass: it runs a model over batches, and hands a sink what the layers see.

Life cycle. The constructor assigns a rule to each layer. `Driver.start` begins a pass with a sink.
`Driver.add` takes one batch: its `Preparation` finds the targets, and proves and decides on the
first batches what holds for all. Then the batch runs part by part. For each part a `Capture` runs
the model forward, where the sink receives the layers' inputs, and propagates the Fisher's vectors
back, where it receives the gradients. `Driver.finish` sums over ranks. What is proved stays proved
for the next pass.

A sink's sums begin with the first batch and not earlier: only the proof decides the rules of
derived layers, and only the first batch decides kfac_approx="auto".

A step of training makes its own forward pass (`optimizer.training_pass`), and calls what `Driver`
does to a part one by one: `capture`, `propagate`, `Totals.add`.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import detached, each_batch, examples, parts, splits_by_example
from kfac_backend.engine.calls import (
    call_with,
    forked_random_numbers,
    in_channels_last,
    is_out_of_memory,
)
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.checks import LateChecks, check_finite
from kfac_backend.engine.memory import out_of_memory
from kfac_backend.engine.preparation import Preparation
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import RuleAssignment, assign_rules
from kfac_backend.engine.task import Task, counting, split_batch
from kfac_backend.fisher import warn_of_many_passes
from kfac_backend.likelihoods import IGNORED, Likelihood, loss_sum, num_counted_terms
from kfac_backend.options import CurvatureOptions
from kfac_backend.precision import LONG_PASS, Arithmetic, backward_arithmetic, full_float32
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks
from kfac_backend.sharding import is_sharded, ranks_of_model, resharded


@dataclass
class Totals:
    """What a pass has counted, and the loss that it has summed."""

    # They stay on the device until the end, so that no batch waits for a transfer. The loss has
    # many terms, and is summed in float64.
    num_loss_terms: Tensor
    loss: Tensor
    num_data: int = 0
    num_outputs: int = 0

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
        proof = Proof(model, assignment or assign_rules(model, options.unsupported))
        self.preparation = Preparation(model, proof, self.task, options.kfac_approx, self.ranks)
        """The proof and the mode, which stay for all passes."""
        self.sink = sink or Sink()
        """What receives the layers' inputs and gradients."""
        self.start()

    def start(self, sink: Sink | None = None) -> None:
        """Begin a pass, with another sink if one is given; batches so far are forgotten."""
        self.sink = self.sink if sink is None else sink
        # Asked anew, since the model may have moved between two passes.
        self.device = next(self.model.parameters()).device
        self.is_sharded = is_sharded(self.model)
        """Whether all ranks run the model together, see `sharding`."""
        if self.is_sharded and (number := ranks_of_model(self.model)) != self.ranks.size:
            raise ValueError(
                f"The model is sharded over {number} ranks, and {self.ranks.size} of them shall "
                "pass over the data. All run it together: pass process_group='default'."
            )
        self.arithmetic = Arithmetic(self.device, self.options.backward_precision)
        """How the backward passes and the sums are computed."""
        # Each rank draws labels of its own. Drawing from the common generator would leave it in
        # different states on ranks with different numbers of batches; `finish` advances it once
        # per pass instead, on all ranks alike.
        self._own_generator = self.generator
        if self.fisher.draws and self.ranks.size > 1:
            self._own_generator = self.ranks.generator(self._common_generator())
        self.failed = False
        """Whether a batch was added in part, so that the sums are useless."""
        self._is_over = False  # whether the sums were taken, so that a batch begins another pass
        # Convolutions' weights in the memory format that is faster; None until the first part, with
        # which the sink starts, too.
        self._weights: dict[str, Tensor] | None = None
        self.totals = Totals(
            torch.zeros((), dtype=torch.long, device=self.device),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        self._late = LateChecks(self.device)

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of some data; errors are those of `add`."""
        batches = each_batch(data, description, progress)
        for batch in self.ranks.in_step(batches, self.device) if self.is_sharded else batches:
            if batch is None:
                self.preparation.run_along()
                continue
            x, y = split_batch(batch, self.options)
            is_long = self.totals.num_data >= LONG_PASS
            if self.arithmetic.precision == "auto" and not self.is_sharded and is_long:
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
        if isinstance(y, Tensor) and y.dim() and not len(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        # Until all of the batch is added. An error or Ctrl-C in between would leave a part of it in
        # the sums, and the caller could go on with wrong numbers.
        self.failed, kfac_approx = True, self.preparation.kfac_approx
        with full_float32(), resharded(self.model) if self.is_sharded else nullcontext():
            if not self._fits(x, y):
                # Other ranks would have to try smaller batches, too.
                fitting = None if self.is_sharded else self._fitting_size(x, y)
                # Not decided by the examples that happen to fit.
                self.preparation.kfac_approx = kfac_approx
                raise out_of_memory(self.model, self.device, len(y), fitting)
            if self._late.is_time():
                self._late.read(self.model, self.task.check)
        self.failed = False

    def finish(self, *, by_owners: bool = False) -> PassSums:
        """The sums over all ranks' data; the sink holds none afterwards.

        Collective. ``by_owners`` lets each be kept by one rank alone, see `sum_over_ranks`.
        """
        self._go_on()
        # If a check or the sum over ranks fails now, the pass must begin again.
        totals, preparation = self.totals, self.preparation
        self.failed = bool(totals.num_data)
        self._late.read(self.model, self.task.check)
        if preparation.kfac_approx == "auto":
            preparation.decide_mode()
        blocks, others = self.sink.sums() if totals.num_data else ({}, {})
        sums = PassSums(
            blocks, others, preparation.kfac_approx,
            num_outputs=totals.num_outputs, num_data=totals.num_data,
            num_loss_terms=int(totals.num_loss_terms), loss=totals.loss.item(),
            padding=preparation.proof.assignment.padding,
        )  # fmt: skip
        must_agree = {"the likelihood": self.task.likelihood, "the options": self.options}
        sums = sum_over_ranks(sums, self.ranks, self.model, must_agree, by_owners=by_owners)
        if self.fisher.draws and self.ranks.size > 1:  # so that the next pass draws other labels
            common = self._common_generator()
            torch.rand((), generator=common, device=common.device)
        self._is_over, self._weights = True, None
        return sums

    def _common_generator(self) -> torch.Generator:
        """The generator that all ranks have alike: the user's, or torch's on the device."""
        if self.generator is None and self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return self.generator or torch.default_generator

    def _go_on(self) -> None:
        """Begin a pass if the last one is over; raise a RuntimeError after a batch that failed."""
        if self._is_over:
            self.start()
        if self.failed:
            raise RuntimeError(
                "The last batch of this curvature pass failed, and a part of it is in the sums. "
                "Call reset() and begin with the first batch."
            )

    # ---- One part of a batch, step by step.

    def capture(self, *, in_training: bool = False) -> Capture:
        """A context that hands the sink what the layers see of one part of a batch.

        The sink starts with the first part of a pass.
        """
        proof = self.preparation.proof
        if self._weights is None:
            self.sink.start(proof.assignment, self.preparation.kfac_approx)
            in_format = proof.plan.channels_last and not in_training
            self._weights = in_channels_last(self.model) if in_format else {}
        return Capture(
            self.model, proof.assignment, self.sink,
            constants=self._weights, in_training=in_training,
            arithmetic=partial(self.arithmetic.of_sums, in_training),
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
            if self.is_sharded:  # terms that count for no example of a batch have no vector
                steps = self.ranks.in_step(vectors, self.device)
                vectors = (torch.zeros_like(f) if v is None else v for v in steps)
            capture.backward(f, vectors)

    def vectors(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """The Fisher's vectors at outputs and targets."""
        return self.fisher.vectors(
            self.task.likelihood, f, y, self._own_generator, may_ignore=self.task.may_ignore
        )

    def add_part(self, x: Any, y: Any) -> None:
        """Add one part of a batch, of any number of examples."""
        mask, likelihood = self.task.mask(x), self.task.likelihood
        capture = self.capture()
        with self.sink.part():
            with counting(mask), capture:
                # One forward pass: A, and all that a gradient will need.
                f = capture.forward(x)
                # Steady batches are checked on the device, and the result is read later. The first
                # of its form is checked before the first backward pass: an error is cheap now.
                if not isinstance(y, Tensor) or not self._late.see(x, f, y):
                    self.task.check(f, y)
                    check_finite(self.model, f, x)
                elif likelihood.name in ("classification", "noisy_classification"):
                    # A label out of range, which is reported later, must not stop a GPU now.
                    y = y.long().masked_fill((y < 0) | (y >= f.shape[-1]), IGNORED)
                self.task.look_at(f)
                if not self.totals.num_data:
                    warn_of_many_passes(self.fisher, likelihood, f)
                capture.runs.check_examples(len(f), self.sink, hides=mask is not None)
                self.propagate(capture, f, y)
                capture.runs.check_reached()
                masked = capture.runs.masked
            if masked or self.is_sharded:
                self.preparation.prove_masked(masked, x, y, together=self.is_sharded)
            with torch.autocast(self.device.type, enabled=False):
                self.sink.part_done(f, y)
        if self.preparation.proof.assignment.diagonal and self.sink.takes_example_gradients:
            self._add_example_gradients(x, y)
        # Counted last: a part that failed must not count.
        self.totals.add(f, y, likelihood)
        self.totals.loss += loss_sum(f.detach(), y, likelihood)

    def _add_example_gradients(self, x: Any, y: Tensor) -> None:
        """Hand over the gradients in parameters without a rule, which no hook sees."""
        # Loaded only where such parameters are.
        from kfac_backend.engine.operations.example_gradients import gradients_of_examples

        with torch.no_grad(), forked_random_numbers(self.model):
            f = call_with(self.model, {}, x)
        vectors = torch.stack(list(self.vectors(f, y)), 1)  # (N, V, ..., C)
        names = self.preparation.proof.assignment.diagonal
        for _, by_name in gradients_of_examples(
            self.model, names, x, f, vectors.__getitem__, vectors.shape[1]
        ):
            for name, g in by_name.items():
                self.sink.example_gradients(name, g)

    # ---- Batches that fit into memory.

    def _fits(self, x: Any, y: Any) -> bool:
        """Add the batch; False if the memory is exhausted, after which the sums are useless."""
        try:
            if self.is_sharded:
                self.preparation.prepare_together(x, y)
                y = self.task.targets(None, x, y)
            else:
                y = self.preparation.prepare(x, y)
            # Parts of a batch must give what the batch gives, up to rounding. Only of one tensor of
            # inputs can that be known: the rows of a mapping's layers depend on its mask or its
            # lengths. Ranks that share a model run whole batches, one each.
            proof, plan = self.preparation.proof, self.preparation.proof.plan
            sizes = [s for s in (plan.part_size, self.sink.most_examples) if s is not None]
            may_split = plan.splits and isinstance(x, Tensor) and not self.is_sharded
            is_large = may_split and bool(sizes) and x.shape[:1].numel() > min(sizes)
            if is_large and splits_by_example(x, y) and proof.same_in_parts(x):
                for part in parts(x, y, min(sizes)):
                    with proof.part(len(part[1])):
                        self.add_part(*part)
            else:
                self.add_part(x, y)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # No error leaves here: its traceback would keep the memory that the next try needs.
            return False
        return True

    def _fitting_size(self, x: Any, y: Any) -> int | None:
        """The largest of half the examples, a quarter, ..., that fits; None if not even one."""
        size = len(y) // 2 if self.preparation.proof.plan.splits else 0
        while size:
            self.start()
            self.failed = True
            if self._fits(examples(x, slice(size)), y[:size]):
                return size
            size //= 2
        return None
