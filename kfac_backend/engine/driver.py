"""The driver of a pass: it runs a model over batches, and hands a sink what the layers see.

Life cycle. The constructor assigns a rule to each layer. `Driver.start` begins a pass with a sink.
`Driver.add` takes one batch: it finds the targets, lets the `Proof` run on the first batches, and
runs the batch part by part. For each part a `Capture` runs the model forward, where the sink
receives the layers' inputs, and propagates the Fisher's vectors back, where it receives the
gradients. `Driver.finish` sums over ranks. What is proved stays proved for the next pass.

A sink's sums begin with the first batch and not earlier: only the proof decides the rules of
derived layers, and only the first batch decides kfac_approx="auto".

A step of training makes its own forward pass (`optimizer.training_pass`), and calls what `Driver`
does to a part one by one: `capture`, `propagate`, `count`.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import detached, each_batch, examples, parts, splits_by_example
from kfac_backend.engine.calls import call_with, forked_random_numbers, in_channels_last
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.checks import (
    LateChecks,
    check_finite,
    check_inputs,
    is_out_of_memory,
    out_of_memory,
    total_memory,
)
from kfac_backend.engine.proof import MOST_EXAMPLES, Proof
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer, assign_rules
from kfac_backend.engine.task import Task, counting
from kfac_backend.fisher import warn_of_many_passes
from kfac_backend.likelihoods import IGNORED, Likelihood, counted_terms, loss_sum, num_counted_terms
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.precision import (
    LONG_PASS,
    BackwardPrecision,
    backward_arithmetic,
    check_precision,
    full_float32,
)
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks
from kfac_backend.sharding import is_sharded, ranks_of_model, resharded


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
    ) -> None:
        self.ranks = Ranks(process_group)
        """The ranks that have a shard of the data each."""
        self.model, self.options = model, options
        self.fisher = options.make_fisher()
        self.task = Task(likelihood, options)
        """What the batches mean."""
        self.likelihood = self.task.likelihood
        self._generator = generator
        # An input and targets that all ranks have; with it one runs that has no batch of its own.
        self._common: tuple[Any, Any] | None = None
        self.proof = Proof(model, assignment or assign_rules(model, options.unsupported))
        """What is known of the model and its layers."""
        self.kfac_approx: KfacApprox = options.kfac_approx
        """The layers' mode; if it is "auto", the first batch decides it for all passes."""
        self.start(Sink())

    def start(self, sink: Sink) -> None:
        """Begin a pass; batches seen so far, and any failure, are forgotten."""
        self.sink = sink
        """What receives the layers' inputs and gradients."""
        # Asked anew, since the model may have moved between two passes.
        self.device = next(self.model.parameters()).device
        self.is_sharded = is_sharded(self.model)
        """Whether all ranks run the model together, see `sharding`."""
        if self.is_sharded and (number := ranks_of_model(self.model)) != self.ranks.size:
            raise ValueError(
                f"The model is sharded over {number} ranks, and {self.ranks.size} of them shall "
                "pass over the data. All run it together: pass process_group='default'."
            )
        self.precision: BackwardPrecision = self.options.backward_precision
        check_precision(self.precision, self.device)
        self.failed = False
        """Whether a batch was added in part, so that the sums are useless."""
        self._has_started = False  # whether the sink has
        # With several ranks each draws labels of its own, from a generator that is derived from the
        # common one's state without changing that. Drawing from the common one would leave it in
        # different states on ranks with different numbers of batches; `finish` advances it once per
        # pass instead, on all ranks alike.
        self._labels = self._generator
        if self.fisher.draws and self.ranks.size > 1:
            self._labels = self.ranks.generator(self._common_generator())
        # Convolutions' weights in the memory format that is faster, made with the first batch.
        self._weights: dict[str, Tensor] | None = None
        self.num_data = self._num_outputs = 0
        # These stay on the device until the end, so that no batch waits for a transfer. The loss
        # has many terms, and is summed in float64.
        self._num_loss_terms = torch.zeros((), dtype=torch.long, device=self.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._late = LateChecks(self.device)

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of some data; errors are those of `add`."""
        batches = each_batch(data, description, progress)
        for batch in self.ranks.in_step(batches, self.device) if self.is_sharded else batches:
            if batch is None:
                self._run_along()
                continue
            x, y = self.task.split(batch)
            if self.precision == "auto" and not self.is_sharded and self.num_data >= LONG_PASS:
                self.precision = self._fitting_precision(x, y)
            self.add(x, y)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch: forward passes of its parts, and one backward pass per vector.

        Collective for a model under `fully_shard`: all ranks add equally many batches.

        Raises:
            torch.OutOfMemoryError: naming a batch size that fits.
            RuntimeError: after a batch that failed, until `start`.
        """
        self.check_whole()
        x, y = detached(x, self.device), detached(y, self.device)
        if isinstance(y, Tensor) and y.dim() and not len(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        # Until all of the batch is added. An error or Ctrl-C in between would leave a part of it in
        # the sums, and the caller could go on with wrong numbers.
        self.failed, kfac_approx = True, self.kfac_approx
        with full_float32(), resharded(self.model):
            if not self._fits(x, y):
                # Other ranks would have to try smaller batches, too.
                fitting = None if self.is_sharded else self._fitting_size(x, y)
                self.kfac_approx = kfac_approx  # not decided by the examples that happen to fit
                raise out_of_memory(self.model, self.device, len(y), fitting)
            if self._late.is_time():
                self._late.read(self.model, self.task.check)
        self.failed = False

    def finish(self, *, by_owners: bool = False) -> PassSums:
        """The sums over all ranks' data; the sink holds none afterwards, until `start`.

        Collective. ``by_owners`` lets each be kept by one rank alone, see `sum_over_ranks`.
        """
        self.check_whole()
        # If a check or the sum over ranks fails now, the pass must begin again.
        self.failed = bool(self.num_data)
        self._late.read(self.model, self.task.check)
        if self.kfac_approx == "auto":
            self._decide_mode()
        blocks, others = self.sink.sums() if self.num_data else ({}, {})
        sums = PassSums(
            blocks, others, self.kfac_approx,
            num_outputs=self._num_outputs, num_data=self.num_data,
            num_loss_terms=int(self._num_loss_terms), loss=self._loss.item(),
            padding=self.proof.assignment.padding,
        )  # fmt: skip
        must_agree = {"the likelihood": str(self.likelihood), "the options": repr(self.options)}
        sums = sum_over_ranks(sums, self.ranks, self.model, must_agree, by_owners=by_owners)
        # Advance the common generator, so that the next pass draws other labels.
        if self.fisher.draws and self.ranks.size > 1:
            common = self._common_generator()
            torch.rand((), generator=common, device=common.device)
        return sums

    def check_whole(self) -> None:
        """Raise a RuntimeError if a batch was added in part."""
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
        if not self._has_started:
            self.sink.start(self.proof.assignment, self.kfac_approx)
            self._has_started = True
        if self._weights is None:
            in_format = self.proof.plan.channels_last and not in_training
            self._weights = in_channels_last(self.model) if in_format else {}
        return Capture(
            self.model, self.proof.assignment, self.sink,
            constants=self._weights, in_training=in_training,
            arithmetic=partial(self._arithmetic, in_training),
        )  # fmt: skip

    def propagate(self, capture: Capture, f: Tensor, y: Tensor) -> None:
        """Propagate the Fisher's vectors back from the outputs of a capture."""
        # Autocast is for the forward pass alone: Gram matrices are summed in float32.
        with self._no_autocast(), backward_arithmetic(self.precision):
            # One backward pass for each vector v of the root of the loss Hessian, with the
            # outputs' gradient v: what reaches a layer's output is b, whose outer products are
            # B. The vectors are made one by one, so that memory never holds all of them.
            vectors = self.vectors(f if self.sink.differentiable else f.detach(), y)
            if self.is_sharded:  # terms that count for no example of a batch have no vector
                steps = self.ranks.in_step(vectors, self.device)
                vectors = (torch.zeros_like(f) if v is None else v for v in steps)
            capture.backward(f, vectors)

    def vectors(self, f: Tensor, y: Tensor) -> Iterable[Tensor]:
        """The Fisher's vectors at outputs and targets."""
        return self.fisher.vectors(
            self.likelihood, f, y, self._labels, may_ignore=self.task.may_ignore
        )

    def count(self, f: Tensor, y: Tensor) -> None:
        """Count a part's examples and loss terms, when all of it is added."""
        self.num_data += len(f)
        self._num_outputs = f.shape[-1]
        self._num_loss_terms += num_counted_terms(f, y, self.likelihood)

    def _part(self, x: Any, y: Any) -> None:
        """Add one part of a batch, of any number of examples."""
        mask = self.task.mask(x)
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
                elif self.likelihood.name in ("classification", "noisy_classification"):
                    # A label out of range, which is reported later, must not stop a GPU now.
                    y = y.long().masked_fill((y < 0) | (y >= f.shape[-1]), IGNORED)
                self.task.look_at(f)
                if not self.num_data:
                    warn_of_many_passes(self.fisher, self.likelihood, f)
                capture.runs.check_examples(len(f), self.sink, hides=mask is not None)
                self.propagate(capture, f, y)
                capture.runs.check_reached()
                masked = capture.runs.masked
            self._prove_masked(masked, x, y)
            with self._no_autocast():
                self.sink.part_done(f, y)
        if self.proof.assignment.diagonal and self.sink.takes_example_gradients:
            self._add_example_gradients(x, y)
        # Counted last: a part that failed must not count.
        self.count(f, y)
        self._loss += loss_sum(f.detach(), y, self.likelihood)

    def _add_example_gradients(self, x: Any, y: Tensor) -> None:
        """Hand over the gradients in parameters without a rule, which no hook sees."""
        # Loaded only where such parameters are.
        from kfac_backend.engine.example_gradients import gradients_of_examples

        with torch.no_grad(), forked_random_numbers(self.model):
            f = call_with(self.model, {}, x)
        vectors = torch.stack(list(self.vectors(f, y)), 1)  # (N, V, ..., C)
        for _, by_name in gradients_of_examples(
            self.model, self.proof.assignment.diagonal, x, f, vectors.__getitem__, vectors.shape[1]
        ):
            for name, g in by_name.items():
                self.sink.example_gradients(name, g)

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)

    def _arithmetic(self, in_training: bool) -> AbstractContextManager[object]:
        """The context of a sink's work: float32 in full precision, without autocast.

        In a training's own forward and backward pass also without gradients.
        """
        is_full = not in_training and self.precision in ("auto", "float32")
        if is_full and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()  # the pass as a whole has full precision
        stack = ExitStack()
        if in_training:
            stack.enter_context(torch.no_grad())
        stack.enter_context(self._no_autocast())
        stack.enter_context(full_float32())
        return stack

    # ---- What is decided before a batch is added.

    def _fits(self, x: Any, y: Any) -> bool:
        """Add the batch; False if the memory is exhausted, after which the sums are useless."""
        try:
            # First the targets, since the proof must know which loss terms count.
            if self.is_sharded:
                self._prepare_together(x, y)
            else:
                self._prepare(x, y)
            y = self.task.targets(None if self.is_sharded else self.model, x, y)
            # Parts of a batch must give what the batch gives, up to rounding. Only of one tensor of
            # inputs can that be known: the rows of a mapping's layers depend on its mask or its
            # lengths. Ranks that share a model run whole batches, one each.
            plan = self.proof.plan
            sizes = [s for s in (plan.part_size, self.sink.most_examples) if s is not None]
            splits = plan.splits and isinstance(x, Tensor) and splits_by_example(x, y)
            is_large = splits and bool(sizes) and len(y) > min(sizes) and not self.is_sharded
            if is_large and self.proof.same_in_parts(x):
                for part in parts(x, y, min(sizes)):
                    with self.proof.part(len(part[1])):
                        self._part(*part)
            else:
                self._part(x, y)
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
            self.start(self.sink)
            self.failed = True
            if self._fits(examples(x, slice(size)), y[:size]):
                return size
            size //= 2
        return None

    def _prepare(self, x: Any, y: Any) -> None:
        """Make what is missing of the proof, and decide the mode."""
        y = self.task.targets(self.model, x, y)
        self._verify(x, y)
        if self.kfac_approx == "auto":
            self._decide_mode(x, y)

    def _prepare_together(self, x: Any = None, y: Any = None) -> None:
        """The same on all ranks, on the same examples of those that miss something; collective.

        How often the model runs depends on what these examples show.
        """
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        mask = None if y is None or self.proof.holds_for_masks else self.task.mask(x)
        knows_all = self.proof.is_made(N) and self.task.knows_shift and self.kfac_approx != "auto"
        misses = y is not None and (mask is not None or not knows_all)
        if not self.ranks.any(misses, self.device):
            return
        self._common = None
        for batch in self.examples_of_ranks((x, y, mask) if misses else None):
            self._common = self._common or batch
            self._prepare(*batch)
        if self.proof.assignment.diagonal:
            raise NotImplementedError(
                f"Parameter '{self.proof.assignment.diagonal[0]}' has no K-FAC rule, and the exact "
                "diagonal of its block (unsupported='diagonal') needs whole models; this one is "
                "under fully_shard. Freeze it (requires_grad_(False)), or use "
                "DistributedDataParallel."
            )

    def examples_of_ranks(self, batch: tuple[Any, Any, Tensor | None] | None) -> list[Any]:
        """A few examples of each rank's batch, most first, for all ranks; collective."""
        some = None
        if batch is not None:
            x, y, mask = batch
            if splits_by_example(x, y):
                # One whose positions a mask hides, if there are any, those whose labels tell if the
                # model shifts them, and the first ones.
                hiding = 0 if mask is None else int(torch.argmin(mask.all(1).int()))
                telling = self.task.telling_examples(y).tolist()
                which = [hiding, *telling, *range(min(len(y), MOST_EXAMPLES))]
                which = torch.tensor(list(dict.fromkeys(which)), device=self.device)
                x, y = examples(x, which), y[which]
            some = detached(x, torch.device("cpu")), detached(y, torch.device("cpu"))
        batches = [some for some in self.ranks.gather(some) if some is not None]
        batches.sort(key=lambda some: -len(some[1]) if isinstance(some[1], Tensor) else 0)
        return [tuple(detached(value, self.device) for value in some) for some in batches]

    def _run_along(self) -> None:
        """Run the model on the common examples, as often as other ranks do on a batch."""
        with full_float32(), resharded(self.model):  # as in `add`
            self._prepare_together()
            assert self._common is not None
            x, y = self._common
            with Capture(self.model, self.proof.assignment) as capture:
                f = capture.forward(x)
                nothing = self.ranks.in_step((), self.device)
                capture.backward(f, (torch.zeros_like(f) for _ in nothing))
            self._prove_masked(set(), x, y)

    def _prove_masked(self, masked: set[TrackedLayer], x: Any, y: Any) -> None:
        """Prove that masks do no harm in layers some of whose rows they hide, unless it is."""
        is_new = bool(masked - self.proof.masked)
        batches = [(x, y)]
        if self.is_sharded:
            if not self.ranks.any(is_new, self.device):
                return
            batches = self.examples_of_ranks((x, y, self.task.mask(x)) if is_new else None)
        for x, y in batches if is_new or self.is_sharded else ():
            self.proof.make_for_masks(x, self.task.mask(x), self._ignored(y))

    def _verify(self, x: Any, y: Any) -> None:
        """Make what is missing of the proof."""
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        mask = None if self.proof.holds_for_masks else self.task.mask(x)
        if self.proof.is_made(N) and mask is None:
            return
        ignored = self._ignored(y)
        if not self.proof.is_made(N):
            check_inputs(x)
            self.proof.make(x, N, ignored)
        if mask is None:
            return
        if splits_by_example(x, y):  # the first example with a hidden position, and another one
            hiding = torch.argmin(mask.all(1).int())
            which = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, mask = examples(x, which), mask[which]
            ignored = None if ignored is None else ignored[which]
        self.proof.make_for_masks(x, mask, ignored)

    def _ignored(self, y: Any) -> Tensor | None:
        """Which labels do not count; None for other targets."""
        counted = counted_terms(y, self.likelihood) if isinstance(y, Tensor) else None
        return None if counted is None else ~counted

    def _decide_mode(self, x: Any = None, y: Any = None) -> None:
        """Decide kfac_approx="auto", by the first batch or without any; collective."""
        # Loaded only where the mode is not given.
        from kfac_backend.engine.automatic_mode import mode_of_first_batches

        # Dropout that is on must not use up the user's random numbers.
        with forked_random_numbers(self.model), self._no_autocast():
            mask = None if y is None else self.task.mask(x)
            self.kfac_approx = mode_of_first_batches(
                self.model, self.proof, self.likelihood, self.ranks, x, y, mask
            )

    def _fitting_precision(self, x: Any, y: Any) -> BackwardPrecision:
        """The precision of the rest of a long pass, for backward_precision="auto"."""
        # Loaded only where a pass is long.
        from kfac_backend.engine.automatic_precision import EXAMPLES, fitting_precision

        # Passes that keep inputs or graphs sum up no factors, by which a precision is judged.
        if self.sink.needs_inputs or self.sink.differentiable:
            return "float32"
        # A trial holds the factors twice more. Whether they fit is asked of the device's memory as
        # a whole: what happens to be free must not decide.
        memory = total_memory(self.device)
        if memory is not None and 3 * self.sink.num_bytes() > memory:
            return "float32"

        # The same examples each time, with the same labels if these are drawn. Only B is kept.
        def B_in(precision: BackwardPrecision) -> dict[str, list[Tensor]]:
            inputs, labels = detached(x, self.device), detached(y, self.device)
            labels = self.task.targets(self.model, inputs, labels)
            if self.proof.plan.splits:
                inputs, labels = examples(inputs, slice(EXAMPLES)), labels[:EXAMPLES]
            trial = copy(self)
            trial._generator = torch.Generator(self.device).manual_seed(0)
            trial.start(copy(self.sink))
            trial.precision = precision
            with full_float32(), forked_random_numbers(self.model):
                trial._part(inputs, labels)
            return {name: [use.B for use in uses] for name, uses in trial.sink.sums()[0].items()}

        return fitting_precision(self.device, B_in)

    def _common_generator(self) -> torch.Generator:
        if self._generator is not None:
            return self._generator
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator
