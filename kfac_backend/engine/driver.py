"""The driver of a pass: it runs a model over batches, and hands a sink what the layers see.

Life cycle. The constructor assigns a rule to each layer. `Driver.start` begins a pass with a sink.
`Driver.add` takes one batch: `Driver.prepare` finds its targets, and proves and decides on the
first batches what holds for all (the proof, and kfac_approx="auto"). Then a `Capture`
runs the model forward, where the sink receives the layers' inputs, and propagates the Fisher's
vectors back, where it receives the gradients. `Driver.finish` sums over
ranks. What is proved stays proved for the next pass.

A sink's sums begin with the first batch and not earlier: only the proof decides the rules of
derived layers, and only the first batch decides kfac_approx="auto".

A step of training makes its own forward pass (`optimizer.training_pass`), and calls what `Driver`
does to a batch one by one: `capture`, `propagate`, `PassState.add`.
"""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.automatic_mode import common_mode, mode_and_traces
from kfac_backend.engine.batches import (
    detached,
    each_batch,
    num_examples,
    split_batch,
)
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.model_calls import in_channels_last, is_out_of_memory
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import RuleAssignment, assign_rules
from kfac_backend.engine.sharded_pass import ShardedPass
from kfac_backend.engine.task import (
    INPUTS_NOT_FINITE,
    Task,
    check_finite,
    check_inputs,
    not_finite,
    numbers_of,
)
from kfac_backend.fisher import MANY_PASSES
from kfac_backend.layers.rows import counted_positions
from kfac_backend.likelihoods import (
    IGNORED,
    Likelihood,
    counted_terms,
    num_counted_terms,
)
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.precision import Arithmetic, at_least_float32, full_float32
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks
from kfac_backend.sharding import resharded, sharded_modules

FAILED = (
    "The last batch of this curvature pass failed, and a part of it is in the sums. Call reset() "
    "and begin with the first batch."
)
"""The error of a pass after a batch that failed."""


@dataclass(eq=False)
class PassState:
    """One pass over some data: what it has counted and checked, and the loss that it has summed.

    The first batch of a form (shapes and dtypes) is checked before its first backward pass. Later
    ones are checked on the device, and the result is read after the second, fourth, eighth batch
    and so on, and at the end, since reading waits for all that the device has to do. Counts stay
    there, too, so that no batch waits for a transfer.
    """

    model: nn.Module
    task: Task
    generator: torch.Generator | None
    """The source of drawn numbers, of this rank alone; None is torch's."""
    num_data: int = 0
    num_outputs: int = 0
    num_loss_terms: int | Tensor = 0
    loss: float | Tensor = 0.0
    """Σ ℓ of many terms, and so in float64."""
    constants: dict[str, Tensor] | None = None
    """Convolutions' weights in the memory format that is faster; None until the first batch, with
    which the sink starts, too."""
    failed: bool = False
    """Whether a batch was added in part, so that the sums are useless."""
    is_over: bool = False
    """Whether the sums were taken, so that a batch begins another pass."""
    _forms: set[Any] = field(default_factory=set)  # of which targets were checked
    _num_batches: int = 0
    # Of batches whose checks were not read: the outputs' shape, targets, and the smallest and
    # largest number of inputs and outputs.
    _unread: list[tuple[torch.Size, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def check(self, x: Any, f: Tensor, y: Any) -> Tensor:
        """Check a batch; returns its targets, without labels that stop a GPU."""
        form = None  # of what is no tensor, which is an error
        if isinstance(y, Tensor):
            form = f.shape[1:], y.shape[1:], y.dtype, f.shape[:1] == y.shape[:1]
        if form not in self._forms:
            self.task.check(f, y)
            check_finite(self.model, f, x)
            self._forms.add(form)
        else:
            of_inputs, of_outputs = (
                _extremes(values, f.device) for values in (numbers_of(x), [f.detach()])
            )
            # A loader may use the memory of y again.
            self._unread.append((f.shape, y.clone(), of_inputs, of_outputs))
            if self.task.likelihood.name in ("classification", "noisy_classification"):
                # A label out of range, which is reported later, must not stop a GPU now.
                y = y.long().masked_fill((y < 0) | (y >= f.shape[-1]), IGNORED)
        if not self.task.knows_outputs:
            self.task.look_at(f)
        self._num_batches += 1
        # What is wrong is found before the pass has taken twice as long as it needed to meet it.
        if self._num_batches & (self._num_batches - 1) == 0:
            self.read_checks()
        return y

    def read_checks(self) -> None:
        """Raise the error of an earlier batch, if any."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        _, _, of_inputs, of_outputs = zip(*unread, strict=True)
        if not torch.cat(of_inputs).isfinite().all():
            raise ValueError(INPUTS_NOT_FINITE)
        for shape, y, *_ in unread:  # outputs of these shapes, whose values do not count
            self.task.check(torch.empty(shape, device="meta"), y)
        if not torch.cat(of_outputs).isfinite().all():
            raise not_finite(self.model)


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
        if sharded_modules(self.model):
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
        self.state = PassState(self.model, self.task, own)

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of some data; errors are those of `add`.

        Of several ranks some may have no example of a batch, or no batch at all.
        """
        batches = each_batch(data, description, progress)
        pairs = (split_batch(batch, self.options) for batch in batches)
        if self.ranks.size > 1:
            pairs = (pair for pair in pairs if num_examples(pair[1]) != 0)
        for x, y in self.sharded.with_other_ranks(pairs) if self.sharded else pairs:
            self.add(x, y)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch: a forward pass, and one backward pass per vector.

        Collective for a model under `fully_shard`: all ranks add equally many batches.

        Raises:
            torch.OutOfMemoryError: a batch that is too large; a note names the ways out.
            RuntimeError: after a batch that failed, until `start`.
        """
        if self.state.is_over:
            self.start()
        if self.state.failed:
            raise RuntimeError(FAILED)
        x, y = detached(x, self.device), detached(y, self.device)
        if num_examples(y) == 0:
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        # Until all of the batch is added. An error or Ctrl-C in between would leave a part of it in
        # the sums, and the caller could go on with wrong numbers.
        self.state.failed = True
        with full_float32(), resharded(self.model) if self.sharded else nullcontext():
            try:
                self._add_batch(x, y)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    error.add_note(
                        f"That was a curvature pass with a batch of {len(y)} examples. Use smaller "
                        "batches, keep large factors by their diagonal (diagonal_above), or freeze "
                        "the largest layers (requires_grad_(False))."
                    )
                raise
        self.state.failed = False

    def finish(self, *, by_owners: bool = False) -> PassSums:
        """The sums over all ranks' data; the sink holds none afterwards.

        Collective. ``by_owners`` lets each be kept by one rank alone, see `sum_over_ranks`.
        """
        if self.state.is_over:
            self.start()
        if self.state.failed:
            raise RuntimeError(FAILED)
        # If a check or the sum over ranks fails now, the pass must begin again.
        state = self.state
        state.failed = bool(state.num_data)
        state.read_checks()
        if self.kfac_approx == "auto":  # no batch of this rank has decided it
            self.kfac_approx = common_mode(self.ranks.gather(None))
        blocks, others = self.sink.sums() if state.num_data else ({}, {})
        sums = PassSums(
            blocks, others, self.kfac_approx,
            num_outputs=state.num_outputs, num_data=state.num_data,
            num_loss_terms=int(state.num_loss_terms), loss=float(state.loss),
            padding=self.proof.assignment.padding,
        )  # fmt: skip
        must_agree = {"the likelihood": self.task.likelihood, "the options": self.options}
        if self.ranks.size > 1:
            sums = sum_over_ranks(sums, self.ranks, self.model, must_agree, by_owners=by_owners)
            if self.fisher.draws:  # so that the next pass draws other labels
                common = _common_generator(self.generator, self.device)
                torch.rand((), generator=common, device=common.device)
        state.is_over, state.constants = True, None
        return sums

    def prepare(self, x: Any, y: Any, mask: Tensor | None) -> Any:
        """A batch's targets; the first batches make the proof, and decide the mode, for all.

        ``mask`` is that of `Task.mask`.
        """
        # First the targets, since the proof must know which loss terms count.
        y = self.task.targets(self.model, x, y, mask)
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        if not self.proof.is_made(N):
            check_inputs(x)
            if isinstance(y, Tensor) and y.dim() > 1:
                self.task.check_axis(self.model, x, y)
            self.proof.make(x, N, counted_terms(y, self.task.likelihood))
        if self.kfac_approx == "auto":
            proof = self.proof
            of_this_rank = mode_and_traces(
                self.model, proof.assignment, self.task.likelihood, x, y, mask,
                num_dimensions=proof.output_dim, can_split=proof.batch.can_split,
                per_example=self.options.expand_scaling == "examples",
            )  # fmt: skip
            self.kfac_approx = common_mode(self.ranks.gather(of_this_rank))
        return y

    # ---- One batch, step by step.

    def capture(self) -> Capture:
        """A context that hands the sink what the layers see of one batch.

        The sink starts with the first batch of a pass.
        """
        proof, in_training = self.proof, self.sink.in_training
        if self.state.constants is None:
            self.sink.start(proof.assignment, self.kfac_approx)
            in_format = proof.batch.channels_last and not in_training
            self.state.constants = in_channels_last(self.model) if in_format else {}
        arithmetic = partial(self.arithmetic.of_sums, in_training)
        return Capture(
            self.model, proof.assignment, self.sink,
            constants=self.state.constants, arithmetic=arithmetic,
        )  # fmt: skip

    def propagate(self, capture: Capture, f: Tensor, y: Tensor) -> None:
        """Propagate the Fisher's vectors back from the outputs of a capture."""
        # Autocast is for the forward pass alone: Gram matrices are summed in float32.
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with no_autocast, self.arithmetic.of_backward():
            # One backward pass for each vector v of the root of the loss Hessian, with the
            # outputs' gradient v: what reaches a layer's output is b, whose outer products are
            # B. The vectors are made one by one, so that memory never holds all of them.
            of_fisher = partial(
                self.fisher.vectors, self.task.likelihood,
                generator=self.state.generator, may_ignore=self.task.may_ignore,
            )  # fmt: skip
            vectors = self.sink.vectors(of_fisher, f, y)
            capture.backward(f, self.sharded.vectors(vectors, f) if self.sharded else vectors)

    def _add_batch(self, x: Any, y: Any) -> None:
        """Add a batch of any number of examples on the pass's device."""
        likelihood = self.task.likelihood
        mask = self.task.mask(x) if isinstance(x, Mapping) else None
        y = (self.sharded or self).prepare(x, y, mask)
        capture = self.capture()
        with self.sink.around_batch():
            with counted_positions(mask), capture:
                # One forward pass: A, and all that a gradient will need.
                f = capture.forward(x)
                y = self.state.check(x, f, y)
                passes = 0 if self.state.num_data else self.fisher.num_passes(likelihood, f)
                if passes > MANY_PASSES:
                    warnings.warn(
                        f"fisher={self.fisher.name!r} takes {passes} backward passes for each "
                        f"batch: outputs have shape {tuple(f.shape)}. fisher='mc' takes mc_samples "
                        "passes.",
                        stacklevel=2,
                    )
                capture.runs.check_examples(len(f), self.sink, hides=mask is not None)
                self.propagate(capture, f, y)
                capture.runs.check_reached()
                runs = capture.runs
            if self.sharded:
                self.sharded.prove_masked(runs.masked, x, y, mask)
            elif mask is not None or runs.masked or runs.rows:
                self.proof.make_for_runs(runs, x, mask, counted_terms(y, likelihood))
            with torch.autocast(self.device.type, enabled=False):
                self.sink.batch_done(f, y)
        if self.proof.assignment.diagonal and self.sink.takes_example_gradients:
            # Loaded only where such parameters are.
            from kfac_backend.engine.operations.example_gradients import report_gradients

            vectors = partial(self.fisher.vectors, likelihood, y=y, generator=self.state.generator)
            names = self.proof.assignment.diagonal
            report_gradients(self.model, names, x, vectors, self.sink)
        # Counted last: a batch that failed must not count.
        self.state.num_data += len(f)
        self.state.num_outputs = f.shape[-1]
        self.state.num_loss_terms += num_counted_terms(f, y, likelihood)
        self.state.loss += likelihood.loss(at_least_float32(f.detach()), y).double()


def _extremes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The smallest and the largest number of each tensor, to which NaN spreads, on a device."""
    extremes = [torch.stack(torch.aminmax(t)).to(device) for t in tensors if t.numel()]
    return torch.cat(extremes or [torch.zeros(0, device=device)])


def _common_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator that all ranks have alike: the user's, or torch's on the device."""
    if generator is None and device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return generator or torch.default_generator
