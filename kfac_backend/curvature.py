"""`kronecker_factors`, and the pass over the data that it makes: batches in, factors out.

Life cycle of a `CurvaturePass`. The constructor assigns a rule to each layer and checks that the
factors fit into memory, before any data is read. `CurvaturePass.add` takes one batch: it finds the
targets, lets the `Proof` run on the first batches, and then adds the batch, whole or part by part.
For each part a `Capture` runs the model forward (rules add inputs), and propagates the loss
Hessian's vectors back (rules add gradients). `CurvaturePass.factors` sums over ranks, scales the
sums, and calls `CurvaturePass.reset`, which drops all sums and keeps the proof. So a pass can be
used again for the same model, without another proof.

The rules hold the sums. They are made with the first batch and not earlier: only the proof decides
the rules of derived layers, and only the first batch decides kfac_approx="auto".
"""

import logging
from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.block_assembly import (
    assemble_blocks,
    bytes_of_factors,
    check_memory,
    collect_sums,
    make_rules,
    tie,
)
from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.layers import Rule, Use
from kfac_backend.layers.rule import BlockSums
from kfac_backend.likelihoods import likelihood_of
from kfac_backend.loss import (
    IGNORED,
    BackwardVectors,
    check_targets,
    counted_terms,
    loss_sum,
    num_counted_terms,
)
from kfac_backend.model.batches import (
    Targets,
    counting,
    detached,
    each_batch,
    examples,
    mask_of,
    parts,
    split_batch,
    splits_by_example,
)
from kfac_backend.model.calls import call_with, forked_random_numbers, in_channels_last
from kfac_backend.model.capture import Capture, unknown_examples
from kfac_backend.model.checks import (
    LateChecks,
    check_finite,
    check_inputs,
    is_out_of_memory,
    out_of_memory,
    total_memory,
)
from kfac_backend.model.proof import Proof
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer, assign_rules
from kfac_backend.options import BackwardPrecision, CurvatureOptions, KfacApprox
from kfac_backend.precision import (
    FASTER,
    LARGEST_ERROR,
    LONG_PASS,
    TRIED_EXAMPLES,
    backward_arithmetic,
    check_precision,
    exact_arithmetic,
    full_float32,
)
from kfac_backend.ranks import PassSums, ProcessGroupOption, Ranks, sum_over_ranks

_logger = logging.getLogger(__name__)


@torch.inference_mode(False)  # gradients are needed, whatever the caller needs
def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: str,
    options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: ProcessGroupOption = "default",
    **keywords: Any,
) -> KroneckerFactors:
    """Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position;
    reduce where positions are summed or averaged into one output per example. Source: Eschenhagen
    et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in the mode (train or eval) it is in; dropout that is on stays on. No other
    thread may use the model meanwhile.

    Before the pass, up to eight examples of the first batch run a few times through the model (the
    whole batch, if the model takes no smaller one). They prove that the hooks see all uses of the
    parameters and that no examples mix. (If the first batch has one example, a part of the proof
    waits for the first batch of several.)

    Args:
        model: any model of the supported layers (`kfac_backend.layers`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``, which go to the model
            whole, or by their entries' names if its forward has those; they are moved to the
            model's device. Examples come first; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1]. Or another of `kfac_backend.likelihoods`.
        options: all choices of the pass: mode, Fisher, which targets count; see `CurvatureOptions`.
        generator: source of fisher="mc"'s labels, on the model's device.
        progress: whether to show a progress bar over the batches.
        process_group: the ranks of `torch.distributed` that have a shard of the data each. Every
            rank must call this function, and gets the factors of all the data. Shards may differ in
            size, or be empty, but must not overlap (``DistributedSampler`` repeats examples where
            the ranks do not divide their number). None: this process alone.
        keywords: single options, in place of those of ``options``: ``kfac_approx="reduce"``.

    With fisher="mc" each rank draws its own labels, from the generator's state and its rank. If all
    ranks have the same seed, the same seed and number of ranks give the same factors.

    The factors are the sum over the batches as they are given; larger ones are faster. Where the
    number of positions R depends on a batch's padding, so do the factors: a mask, or
    `counted_positions`, makes R each example's own.

    On a CPU a large batch that is one tensor runs in parts, if it is shown that they have the same
    outputs and the same R, and convolutions run in channels_last. That changes only rounding, and
    the order in which labels are drawn.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, a model whose own loss
            differs from ours, NaN or infinity in outputs (it names the parameter or the inputs that
            have it, too), BatchNorm in train mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a parameter without a rule, or used in a way that cannot be followed; a
            part of a batch with another R than the first batch had.
        torch.OutOfMemoryError: a batch that is too large, with a batch size that fits; factors that
            do not fit whatever the batch size, before the first batch.
        RankError: another rank has another model or other options.
    """
    curvature = CurvaturePass(
        model, likelihood, options, generator=generator, process_group=process_group, **keywords
    )
    return curvature.factors_of(data, progress)


class CurvaturePass:
    """Sums over batches, scaled at the end; the parameters must not change between its batches.

    Arguments are those of `kronecker_factors`.

    Raises:
        ValueError: options that are not for the likelihood, the device or the model's layers.
        NotImplementedError: a layer without a rule.
        torch.OutOfMemoryError: factors that the device cannot hold.
    """

    _keeps_inputs = False
    """Whether gradients come with their layer's inputs, also where its rule does not need them."""

    _differentiable = False
    """Whether inputs and gradients keep their graphs, so that they can be differentiated again."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        **keywords: Any,
    ) -> None:
        options = options.but(**keywords)
        self.ranks = Ranks(process_group)
        """The ranks that have a shard of the data each."""
        self._likelihood = likelihood_of(likelihood)
        self._options = options
        self._generator = generator
        self._targets = Targets(likelihood, options)
        self._model = model
        self._kfac_approx: KfacApprox = options.kfac_approx
        self._proof = Proof(model, self._assign())
        # Wrong names of layers and factors that cannot fit are reported before any data is read.
        # With "auto" the mode is not known yet; except those of embeddings, factors have the same
        # size in both modes.
        kfac_approx = "expand" if self._kfac_approx == "auto" else self._kfac_approx
        rules = make_rules(self._proof.assignment, kfac_approx, options)
        check_memory(rules, next(model.parameters()).device)
        self.reset()

    def factors_of(
        self, data: Iterable[Any], progress: bool = False, likelihood: str | None = None
    ) -> KroneckerFactors:
        """The factors of some data at the model's present parameters; see `kronecker_factors`.

        A pass that is used again proves again, on two examples, only what other values of the
        parameters can change, as long as the model's structure is the same. ``likelihood`` is the
        same with other options, such as noises.
        """
        if likelihood is not None:
            self._likelihood = likelihood_of(likelihood)
        self.reset()
        if not self._proof.renew():
            self._proof = Proof(self._model, self._assign())
        self._kfac_approx = self._options.kfac_approx
        self.add_all(data, "Curvature", progress)
        return self.factors()

    def add_all(self, data: Iterable[Any], description: str, progress: bool = False) -> None:
        """Add all batches of some data; errors are those of `add`."""
        for batch in each_batch(data, description, progress):
            x, y = split_batch(batch, self._options.dict_key_y)
            if self._precision == "auto" and self._num_data >= LONG_PASS:
                self._precision = self._fitting_precision(x, y)
            self.add(x, y)

    def _fitting_precision(self, x: Any, y: Any) -> BackwardPrecision:
        """The device's faster precision if B of some examples is the same up to `LARGEST_ERROR`."""
        faster = FASTER.get(self._device.type)
        # Passes that keep inputs or graphs sum up no factors, by which a precision is judged.
        if faster is None or self._keeps_inputs or self._differentiable:
            return "float32"
        # A trial holds the factors twice more. Whether they fit is asked of the device's memory as
        # a whole: what happens to be free must not decide.
        memory = total_memory(self._device)
        if memory is not None and 3 * bytes_of_factors(self._rules) > memory:
            return "float32"
        x, y = detached(x, self._device), detached(y, self._device)
        y = self._targets(self._model, x, y)
        if self._proof.plan.splits:
            x, y = examples(x, slice(TRIED_EXAMPLES)), y[:TRIED_EXAMPLES]

        # Twice the same examples, with the same labels if these are drawn. Only B is kept.
        def B_in(precision: BackwardPrecision) -> dict[str, list[Tensor]]:
            trial = copy(self)
            trial._generator = torch.Generator(self._device).manual_seed(0)
            trial.reset()
            trial._precision = precision
            with full_float32(), forked_random_numbers(self._model):
                trial._add(x, y)
            sums = collect_sums(trial._rules).items()
            return {name: [use.B for use in of_name] for name, of_name in sums}

        try:
            exact, rounded = B_in("float32"), B_in(faster)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise torch.OutOfMemoryError(
                f"Out of memory on {self._device} where backward_precision='auto' tries "
                f"{faster!r}, which takes the factors' memory twice more. Choose one of "
                f"backward_precision='float32' and {faster!r}."
            ) from error
        errors = {
            name: max(
                float((low - B).norm() / B.norm())
                for low, B in zip(rounded[name], of_name, strict=True)
            )
            for name, of_name in exact.items()
            if all(B.any() for B in of_name)
        }
        if not errors:  # nothing to judge by
            return "float32"
        worst = max(errors, key=lambda name: errors[name])
        fits = errors[worst] <= LARGEST_ERROR
        _logger.info(
            "backward_precision='auto' takes %s: in %s, B of '%s' differs by %.2g (up to %g is "
            "taken)", faster if fits else "float32", faster, worst, errors[worst], LARGEST_ERROR,
        )  # fmt: skip
        return faster if fits else "float32"

    def reset(self) -> None:
        """Forget the batches seen so far, and any failure; what is proved stays proved."""
        # Asked anew, since the model may have moved between two passes.
        self._device = next(self._model.parameters()).device
        self._precision: BackwardPrecision = self._options.backward_precision
        check_precision(self._precision, self._device)
        self._failed = False  # whether a batch was added in part, so that the sums are useless
        # The rules hold the sums. They are made with the first part of a batch, after the proof.
        self._rules: dict[TrackedLayer, Rule] = {}
        # With several ranks each draws labels of its own, from a generator that is derived from the
        # common one's state without changing that. Drawing from the common one would leave it in
        # different states on ranks with different numbers of batches; `_total_sums` advances it
        # once per pass instead, on all ranks alike.
        self._labels = self._generator
        if self._options.fisher == "mc" and self.ranks.size > 1:
            self._labels = self.ranks.generator(self._common_generator())
        self._vectors = BackwardVectors(
            self._likelihood, self._options, self._labels, self._differentiable
        )
        # Convolutions' weights in the memory format that is faster, made with the first batch.
        self._weights: dict[str, Tensor] | None = None
        self._diagonal: dict[str, Tensor] = {}
        self._num_data = self._num_outputs = 0
        # These stay on the device until the end, so that no batch waits for a transfer. The loss
        # has many terms, and is summed in float64.
        self._num_loss_terms = torch.zeros((), dtype=torch.long, device=self._device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._late = LateChecks(self._device)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch: forward passes of its parts, and one backward pass per vector.

        Raises:
            torch.OutOfMemoryError: naming a batch size that fits.
            RuntimeError: after a batch that failed, until `reset`.
        """
        self._check_whole()
        x, y = detached(x, self._device), detached(y, self._device)
        if isinstance(y, Tensor) and y.dim() and not len(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        # Until all of the batch is added. An error or Ctrl-C in between would leave a part of it in
        # the sums, and the caller could go on with wrong numbers.
        self._failed, kfac_approx = True, self._kfac_approx
        with full_float32():
            if not self._fits(x, y):
                fitting = self._fitting_size(x, y)
                self._kfac_approx = kfac_approx  # not decided by the examples that happen to fit
                raise out_of_memory(self._model, self._device, len(y), fitting)
            if self._late.is_time():
                self._late.read(self._model, self._check_targets)
        self._failed = False

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        check_targets(f, y, self._likelihood, may_ignore=self._targets.may_ignore)

    def _check_whole(self) -> None:
        if self._failed:
            raise RuntimeError(
                "The last batch of this curvature pass failed, and a part of it is in the sums. "
                "Call reset() and begin with the first batch."
            )

    def _fits(self, x: Any, y: Any) -> bool:
        """Add the batch; False if the memory is exhausted, after which the sums are useless."""
        try:
            # First the targets, since the proof must know which loss terms count.
            y = self._targets(self._model, x, y)
            self._verify(x, y)
            if self._kfac_approx == "auto":
                self._decide_mode(x, y)
            size = self._part_size
            if size is None or not self._may_split(x, y, size):
                self._add(x, y)
            else:
                for part in parts(x, y, size):
                    with self._proof.part(len(part[1])):
                        self._add(*part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # No error leaves here: its traceback would keep the memory that the next try needs.
            return False
        return True

    def _may_split(self, x: Any, y: Any, size: int) -> bool:
        """Whether parts of a batch give what the batch gives, up to rounding.

        Only of one tensor of inputs can that be known. The rows of a mapping's layers depend on its
        mask or its lengths.
        """
        tensor = isinstance(x, Tensor) and splits_by_example(x, y) and len(y) > size
        return tensor and self._proof.same_in_parts(x)

    def _fitting_size(self, x: Any, y: Any) -> int | None:
        """The largest of half the examples, a quarter, ..., that fits; None if not even one."""
        size = len(y) // 2 if self._proof.plan.splits else 0
        while size:
            self.reset()
            self._failed = True
            if self._fits(examples(x, slice(size)), y[:size]):
                return size
            size //= 2
        return None

    def _add(self, x: Any, y: Any) -> None:
        """Add one part of a batch, of any number of examples."""
        self._begin_part()
        mask = mask_of(x, self._options.dict_key_mask)
        if self._weights is None:
            self._weights = in_channels_last(self._model) if self._proof.plan.channels_last else {}
        capture = Capture(
            self._model,
            self._proof.assignment,
            self._add_input,
            self._add_gradient,
            constants=self._weights,
            keep_inputs=self._keeps_inputs,
            differentiable=self._differentiable,
        )
        with counting(mask), capture:
            # One forward pass: A, and all that a gradient will need.
            f = capture.forward(x)
            # Steady batches are checked on the device, and the result is read later. The first of
            # its form is checked before the first backward pass: an error is cheap now.
            if not isinstance(y, Tensor) or not self._late.see(x, f, y):
                self._check_targets(f, y)
                check_finite(self._model, f, x)
            elif self._likelihood.name == "classification":
                # A label out of range, which is reported later, must not stop a GPU now.
                y = y.long().masked_fill((y < 0) | (y >= f.shape[-1]), IGNORED)
            if not self._num_data:
                self._vectors.warn_of_many(f)
            self._check_rows(len(f), hides=mask is not None)
            # Autocast is for the forward pass alone: Gram matrices are summed in float32.
            with self._no_autocast(), backward_arithmetic(self._precision):
                # Sums over several uses of a tensor are complete only after the whole forward pass.
                # Gradients need them: under reduce √R_n over all uses divides both sums.
                self._end_forward()
                # One backward pass for each vector v of the root of the loss Hessian, with the
                # outputs' gradient v: what reaches a layer's output is b, whose outer products are
                # B. The vectors are made one by one, so that memory never holds all of them.
                self._vectors.may_ignore = self._targets.may_ignore
                capture.backward(f, self._vectors(f, y), self._end_vector)
                capture.check_runs()
            self._end_part(f, y)
        if self._proof.assignment.diagonal:
            self._add_diagonal(x, y)
        # Counted last: a part that failed must not count.
        self._count(f, y)
        self._loss += loss_sum(f.detach(), y, self._likelihood)

    def _count(self, f: Tensor, y: Tensor) -> None:
        self._num_data += len(f)
        self._num_outputs = f.shape[-1]
        self._num_loss_terms += num_counted_terms(f, y, self._likelihood)

    def factors(self) -> KroneckerFactors:
        """The factors of all batches: A is a mean over its terms, B a sum over the data.

        The sums become the factors in place, and the pass is reset.
        """
        self._check_whole()
        # Over ranks first: means and scalings of single shards would weigh them by their sizes.
        # Until then A is a sum over terms, too, and all sums of all ranks and batches just add.
        sums = self._total_sums()
        if not sums.num_data:
            raise ValueError(
                "The data is empty: no batch was added since the pass began, or since the last "
                "factors()."
            )
        factors = KroneckerFactors(
            self._blocks(sums),
            num_data=sums.num_data,
            num_outputs=sums.num_outputs,
            num_loss_terms=sums.num_loss_terms,
            loss=sums.loss,
            likelihood=self._likelihood,
            options=self._options.but(kfac_approx=sums.kfac_approx),
        )
        self.reset()
        return factors

    def _blocks(self, sums: PassSums) -> dict[str, KroneckerBlock]:
        """Parameter name -> block, in the model's order; the sums become the blocks in place."""
        blocks = assemble_blocks(sums.blocks) | {
            name: KroneckerBlock(name, d.reshape(-1, 1, 1)) for name, d in sums.others.items()
        }
        # The names are those of the blocks, not of this rank's assignment: a rank without data has
        # made no proof, and the other ranks may have given parameters up.
        return {name: blocks[name] for name, _ in self._model.named_parameters() if name in blocks}

    def _total_sums(self) -> PassSums:
        """The sums over all ranks' data; this pass holds none afterwards, until `reset`."""
        # If a check or the sum over ranks fails now, the pass must be reset.
        self._failed = bool(self._num_data)
        self._late.read(self._model, self._check_targets)
        if self._kfac_approx == "auto":
            self._decide_mode()
        sums = PassSums(
            {}, {}, self._kfac_approx,
            num_outputs=self._num_outputs, num_data=self._num_data,
            num_loss_terms=int(self._num_loss_terms), loss=self._loss.item(),
        )  # fmt: skip
        if self._num_data:
            sums.blocks, sums.others = self._sums()
        same = {"the likelihood": self._likelihood, "the options": repr(self._options)}
        sums = sum_over_ranks(sums, self.ranks, self._model, same)
        # Advance the common generator, so that the next pass draws other labels.
        if self._options.fisher == "mc" and self.ranks.size > 1:
            common = self._common_generator()
            torch.rand((), generator=common, device=common.device)
        return sums

    def _sums(self) -> tuple[dict[str, list[BlockSums]], dict[str, Tensor]]:
        """This process's sums, taken out of the rules: those of blocks, and others by name."""
        return collect_sums(self._rules), self._diagonal

    def _assign(self) -> RuleAssignment:
        """The layers and parameters that the pass covers."""
        return assign_rules(self._model, self._options.unsupported)

    @property
    def _part_size(self) -> int | None:
        """How many examples of a batch at once; None: batches stay whole."""
        return self._proof.plan.part_size

    def _make_rules(self) -> dict[TrackedLayer, Rule]:
        rules = make_rules(self._proof.assignment, self._kfac_approx, self._options)
        tie(rules)
        return rules

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, enabled=False)

    def _verify(self, x: Any, y: Any) -> None:
        """Make what is missing of the proof."""
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        holds, key = self._proof.holds_for_masks, self._options.dict_key_mask
        mask = None if holds else mask_of(x, key)
        if self._proof.is_made(N) and mask is None:
            return
        counted = counted_terms(y, self._likelihood) if isinstance(y, Tensor) else None
        ignored = None if counted is None else ~counted
        if not self._proof.is_made(N):
            check_inputs(x)
            self._proof.make(x, N, ignored)
        if mask is None:
            return
        if splits_by_example(x, y):  # the first example with a hidden position, and another one
            hiding = torch.argmin(mask.all(1).int())
            which = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, mask = examples(x, which), mask[which]
            ignored = None if ignored is None else ignored[which]
        self._proof.make_for_masks(x, mask, ignored)

    def _decide_mode(self, x: Any = None, y: Any = None) -> None:
        """Decide kfac_approx="auto" by the first batch of each rank; collective.

        Called without data at the end of a pass that had none.
        """
        # Loaded only where the mode is not given.
        from kfac_backend.automatic_mode import (
            EXAMPLES,
            automatic_mode,
            block_traces,
            nearest_modes,
        )

        seen = None
        if y is not None:
            mode, traces = automatic_mode(self._proof.output_dim), {}
            if mode == "reduce":
                # All of them where the model needs a whole batch, of which the first decide, too.
                splits = self._proof.plan.splits
                some = (examples(x, slice(EXAMPLES)), y[:EXAMPLES]) if splits else (x, y)
                # Dropout that is on must not use up the user's random numbers.
                with forked_random_numbers(self._model), self._no_autocast():
                    traces = block_traces(
                        self._model, self._proof.assignment, self._likelihood, *some
                    )
            seen = mode, traces
        of_ranks = [of_rank for of_rank in self.ranks.gather(seen) if of_rank]
        if of_ranks:
            mode = of_ranks[0][0]
            by_trace = nearest_modes([traces for _, traces in of_ranks])
            self._kfac_approx = by_trace if mode == "reduce" else mode

    def _check_rows(self, examples: int, hides: bool) -> None:
        """Raise an error where each example's rows are needed and not known.

        They are needed where positions are summed (reduce), where a rule or the pass forms an
        example's gradient in any mode, and where a mask hides positions, which would count.
        """
        for tracked in self._proof.assignment.layers:
            wrong = self._rows_seen.get(tracked, set()) - {examples}
            rule = self._rules[tracked]
            sums = rule.mode != "expand" or rule.needs_examples or self._keeps_inputs
            if wrong and (sums or hides):
                error = unknown_examples(tracked, wrong.pop(), examples)
                way_out = " Or let all positions count (dict_key_mask=None)." if hides else ""
                raise NotImplementedError(f"{error}{way_out}")

    def _begin_part(self) -> None:
        self._rules = self._rules or self._make_rules()
        self._rows_seen: dict[TrackedLayer, set[int]] = {}

    def _see_rows(self, tracked: TrackedLayer, use: Use) -> None:
        """Remember how many rows a layer got, for `_check_rows`."""
        rows = use.a.shape[:1].numel() if use.rows is None else use.rows.num_examples
        self._rows_seen.setdefault(tracked, set()).add(rows if use.a.dim() else 0)

    def _add_input(self, tracked: TrackedLayer, use: Use) -> None:
        self._see_rows(tracked, use)
        with self._no_autocast():
            self._rules[tracked].add_input(use)

    def _end_forward(self) -> None:
        with exact_arithmetic(self._precision):
            for rule in self._rules.values():
                for total in rule.A.values():
                    total.end()

    def _add_gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        with exact_arithmetic(self._precision):
            self._rules[tracked].add_gradient(use, b)

    def _common_generator(self) -> torch.Generator:
        if self._generator is not None:
            return self._generator
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def _end_vector(self) -> None:
        with exact_arithmetic(self._precision):
            for rule in self._rules.values():
                for total in rule.B.values():
                    total.end()

    def _end_part(self, f: Tensor, y: Tensor) -> None:
        """Called when a part's last vector has been propagated back, with outputs and targets."""

    def _add_diagonal(self, x: Any, y: Tensor) -> None:
        # Loaded only where parameters without a rule ask for it.
        from kfac_backend.model.example_gradients import gradients_of_examples

        with torch.no_grad(), forked_random_numbers(self._model):
            f = call_with(self._model, {}, x)
        vectors = torch.stack(list(self._vectors(f, y)), 1)  # (N, V, ..., C)
        for _, by_name in gradients_of_examples(
            self._model,
            self._proof.assignment.diagonal,
            x,
            f,
            vectors.__getitem__,
            vectors.shape[1],
        ):
            for name, g in by_name.items():
                self._diagonal[name] = self._diagonal.get(name, 0) + g.square().sum((0, 1))
