"""Run a model over batches, and pass the inputs and gradients of its layers to a sink.

Life cycle. The constructor assigns a rule to each layer. `Driver.start` begins a pass with a sink.
`Driver.add` adds one batch. First `Driver.prepare` determines its targets; on the first batches it
also makes the proof and decides kfac_approx="auto". Then a `Capture` runs the model forward, and
the sink receives the layers' inputs. Last it propagates the Fisher's vectors back, and the sink
receives the gradients. `Driver.finish` sums over ranks. Later passes reuse the proof.

A sink's sums begin with the first batch and not earlier, because the proof decides the rules of
derived layers, and the first batch decides kfac_approx="auto".

A training step makes its own forward pass (`optimizer.training_pass`), between the steps `capture`
and `propagate` of `Driver.add`.
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
from kfac_backend.engine.batches import detached, each_batch, num_examples, split_batch
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
from kfac_backend.likelihoods import IGNORED, Likelihood, counted_terms, num_counted_terms
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.precision import (
    SUPPORTED,
    arithmetic_of_sums,
    at_least_float32,
    backward_arithmetic,
    full_float32,
)
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks
from kfac_backend.sharding import resharded, sharded_modules

FAILED = (
    "The last batch of this curvature pass failed, and the sums contain a part of it. Call "
    "reset() and begin with the first batch."
)
"""Error of a pass after a failed batch."""


@dataclass(eq=False)
class PassState:
    """State of one pass over data: its counts, its checks, and the summed loss.

    The first batch of each form (shapes and dtypes) is checked before its first backward pass.
    Later batches are checked on the device. The results are read after the second, fourth, eighth
    batch and so on, and at the end, because reading waits for all work of the device. Counts stay
    on the device, too, so that no batch waits for a transfer.
    """

    model: nn.Module
    task: Task
    generator: torch.Generator | None
    """Random generator of this rank alone; None means torch's."""
    num_data: int = 0
    num_outputs: int = 0
    num_loss_terms: int | Tensor = 0
    loss: float | Tensor = 0.0
    """Σ ℓ in nats. It has many terms and is therefore in float64."""
    constants: dict[str, Tensor] | None = None
    """Convolutions' weights in the faster memory format. None until the first batch, which also
    starts the sink."""
    failed: bool = False
    """Whether a batch was added only in part, so the sums are unusable."""
    is_over: bool = False
    """Whether the sums were returned, so the next batch begins another pass."""
    _forms: set[Any] = field(default_factory=set)  # forms of targets that were checked
    _num_batches: int = 0
    # Data of batches with unread checks: the outputs' shape, the targets, and the extremes of
    # inputs and outputs.
    _unread: list[tuple[torch.Size, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def check(self, x: Any, f: Tensor, y: Any) -> Tensor:
        """Check a batch. Return its targets, without labels that would stop a GPU."""
        form = None  # None for an object that is no tensor, which is an error
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
            # The loader may reuse the memory of y.
            self._unread.append((f.shape, y.clone(), of_inputs, of_outputs))
            if self.task.likelihood.name in ("classification", "noisy_classification"):
                # A label out of range is reported later, and must not stop a GPU now.
                y = y.long().masked_fill((y < 0) | (y >= f.shape[-1]), IGNORED)
        if not self.task.knows_outputs:
            self.task.look_at(f)
        self._num_batches += 1
        # This way an error appears before the pass takes twice as long as up to the wrong batch.
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
        for shape, y, *_ in unread:  # outputs of these shapes; their values do not matter
            self.task.check(torch.empty(shape, device="meta"), y)
        if not torch.cat(of_outputs).isfinite().all():
            raise not_finite(self.model)


class Driver:
    """Run a model over batches. The parameters must not change during a pass.

    ``assignment`` lists the layers to track, by default all layers with trainable parameters.
    ``sink`` receives their inputs and gradients, until `start` sets another one. See
    `kronecker_factors` for the other arguments and the errors.
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
        """Ranks that have a shard of the data each."""
        self.model, self.options = model, options
        self.task = Task(likelihood, options)
        """Interprets the batches' targets."""
        self.fisher = options.make_fisher()
        """The matrix to compute."""
        self.generator = generator
        """Random generator that all ranks share; None means torch's."""
        # The first batches determine both for all passes.
        self.proof = Proof(model, assignment or assign_rules(model, options.unsupported))
        """Proved facts about the model and its layers."""
        self.kfac_approx: KfacApprox = options.kfac_approx
        """Mode of the layers; no longer "auto" after the first batch."""
        self.sink = sink or Sink()
        self.sharded: ShardedPass | None = None
        """Steps that ranks with a sharded model make together; None for a whole model."""
        self.start()

    def start(self, sink: Sink | None = None) -> None:
        """Begin a pass, optionally with another sink. Earlier batches are discarded."""
        self.sink = self.sink if sink is None else sink
        # Read again, because the model may have moved between two passes.
        self.device = next(self.model.parameters()).device
        if sharded_modules(self.model):
            self.sharded = self.sharded or ShardedPass(self)
            self.sharded.check_ranks()
        available = SUPPORTED.get(self.device.type, ("float32",))
        if self.options.backward_precision not in available:
            raise ValueError(
                f"backward_precision={self.options.backward_precision!r} has no effect on device "
                f"{self.device.type!r}. Choose one of {', '.join(map(repr, available))}."
            )
        # Each rank draws its own numbers. Drawing from the common generator would leave it in
        # different states on ranks with different numbers of batches. So `finish` advances it once
        # per pass, equally on all ranks.
        own = self.generator
        if self.fisher.draws and self.ranks.size > 1:
            own = self.ranks.generator(_common_generator(own, self.device))
        self.state = PassState(self.model, self.task, own)

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of the data; see `add` for the errors.

        With several ranks, some may have empty batches, or no batch at all.
        """
        batches = each_batch(data, description, progress)
        pairs = (split_batch(batch, self.options) for batch in batches)
        if self.ranks.size > 1:
            pairs = (pair for pair in pairs if num_examples(pair[1]) != 0)
        for x, y in self.sharded.with_other_ranks(pairs) if self.sharded else pairs:
            self.add(x, y)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch with a forward pass, and one backward pass per vector.

        Collective for a model under `fully_shard`: all ranks add equally many batches. After a
        batch that failed only `start` is allowed.
        """
        if self.state.is_over:
            self.start()
        if self.state.failed:
            raise RuntimeError(FAILED)
        x, y = detached(x, self.device), detached(y, self.device)
        if num_examples(y) == 0:
            raise ValueError("A batch has no examples. Drop it, or check the loader's sampler.")
        # True until the whole batch is added. After an error or Ctrl-C in between the sums contain
        # a part of it, and continuing would give wrong numbers.
        self.state.failed = True
        with full_float32(), resharded(self.model) if self.sharded else nullcontext():
            try:
                self._add_batch(x, y)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    error.add_note(
                        f"This happened in a curvature pass with a batch of {len(y)} examples. "
                        "Use smaller batches, keep only the diagonal of large factors "
                        "(diagonal_above), or freeze the largest layers (requires_grad_(False))."
                    )
                raise
        self.state.failed = False

    def finish(self, *, by_owners: bool = False) -> PassSums:
        """Return the sums over all ranks' data, and empty the sink.

        Collective. With ``by_owners`` each sum is kept by one rank alone, see `sum_over_ranks`.
        """
        if self.state.is_over:
            self.start()
        if self.state.failed:
            raise RuntimeError(FAILED)
        # If a check or the sum over ranks fails now, the pass must begin again.
        state = self.state
        state.failed = bool(state.num_data)
        state.read_checks()
        if self.kfac_approx == "auto":  # this rank had no batch to decide it
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
        """Return a batch's targets. The first batches make the proof and decide the mode.

        ``mask`` is the result of `Task.mask`.
        """
        # Targets first: the proof needs to know which loss terms count.
        y = self.task.targets(self.model, x, y, mask)
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        if not self.proof.is_made(N):
            check_inputs(x)
            if isinstance(y, Tensor) and y.dim() > 1:
                self.task.check_axis(self.model, x, y)
            self.proof.make(x, N, counted_terms(y, self.task.likelihood))
        if self.kfac_approx == "auto":
            likelihood, options = self.task.likelihood, self.options
            decision = mode_and_traces(self.model, self.proof, likelihood, options, x, y, mask)
            self.kfac_approx = common_mode(self.ranks.gather(decision))
        return y

    # ---- One batch, step by step.

    def capture(self) -> Capture:
        """Return a context that passes a batch's layer inputs and gradients to the sink."""
        proof, in_training = self.proof, self.sink.in_training
        if self.state.constants is None:
            self.sink.start(proof.assignment, self.kfac_approx)
            in_format = proof.batch.channels_last and not in_training
            self.state.constants = in_channels_last(self.model) if in_format else {}
        precision = self.options.backward_precision
        return Capture(
            self.model, proof.assignment, self.sink, constants=self.state.constants,
            arithmetic=partial(arithmetic_of_sums, self.device, precision, in_training),
        )  # fmt: skip

    def propagate(self, capture: Capture, f: Tensor, y: Tensor) -> None:
        """Propagate the Fisher's vectors back from the outputs of a capture."""
        # Autocast applies only to the forward pass: Gram matrices are summed in float32.
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with no_autocast, backward_arithmetic(self.options.backward_precision):
            # One backward pass for each vector v of the root of the loss Hessian, with the outputs'
            # gradient v. The gradient at a layer's output is then b, and B sums its outer products.
            # The vectors are made one by one, so memory never holds all of them.
            of_fisher = partial(
                self.fisher.vectors, self.task.likelihood,
                generator=self.state.generator, may_ignore=self.task.may_ignore,
            )  # fmt: skip
            vectors = self.sink.vectors(of_fisher, f, y)
            capture.backward(f, self.sharded.vectors(vectors, f) if self.sharded else vectors)

    def _add_batch(self, x: Any, y: Any) -> None:
        """Add a batch of any number of examples, already on the pass's device."""
        likelihood = self.task.likelihood
        mask = self.task.mask(x) if isinstance(x, Mapping) else None
        y = (self.sharded or self).prepare(x, y, mask)
        capture = self.capture()
        with self.sink.around_batch():
            with counted_positions(mask), capture:
                # The forward pass gives A, and keeps the graph for the gradients.
                f = capture.forward(x)
                y = self.state.check(x, f, y)
                passes = 0 if self.state.num_data else self.fisher.num_passes(likelihood, f)
                if passes > MANY_PASSES:
                    warnings.warn(
                        f"fisher={self.fisher.name!r} needs {passes} backward passes for each "
                        f"batch, because the outputs have shape {tuple(f.shape)}. fisher='mc' "
                        "needs mc_samples passes.",
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
            # Import only if there are such parameters.
            from kfac_backend.engine.operations.example_gradients import report_gradients

            vectors = partial(self.fisher.vectors, likelihood, y=y, generator=self.state.generator)
            names = self.proof.assignment.diagonal
            report_gradients(self.model, names, x, vectors, self.sink)
        # Count last: a failed batch must not count.
        self.state.num_data += len(f)
        self.state.num_outputs = f.shape[-1]
        self.state.num_loss_terms += num_counted_terms(f, y, likelihood)
        self.state.loss += likelihood.loss(at_least_float32(f.detach()), y).double()


def _extremes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the smallest and the largest number of each tensor on a device; NaN propagates."""
    extremes = [torch.stack(torch.aminmax(t)).to(device) for t in tensors if t.numel()]
    return torch.cat(extremes or [torch.zeros(0, device=device)])


def _common_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return the generator that all ranks share: the user's, or torch's on the device."""
    if generator is None and device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return generator or torch.default_generator
