"""`kronecker_factors`, and the pass over the data that it makes: batches in, factors out."""

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from kfac_backend.assembly import assemble_blocks, check_memory, collect_sums, make_rules
from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.distributed import ProcessGroupOption, Ranks
from kfac_backend.layers import Rule, Use
from kfac_backend.layers.uses import PositionSums
from kfac_backend.loss.hessian import check_targets, counted_terms, loss_sum, num_counted_terms
from kfac_backend.loss.vectors import BackwardVectors
from kfac_backend.model.batches import (
    detached,
    each_batch,
    examples,
    parts,
    splits_by_example,
    to_device,
)
from kfac_backend.model.calls import call_with, forked_random_numbers, restoration
from kfac_backend.model.capture import Capture
from kfac_backend.model.diagonals import squared_gradients
from kfac_backend.model.finite import check_finite
from kfac_backend.model.memory import give_back_free_memory, is_out_of_memory, out_of_memory
from kfac_backend.model.proof.verification import Proof, verify_independence
from kfac_backend.model.rule_assignment import (
    RuleAssignment,
    TrackedLayer,
    assign_rules,
    check_module,
)
from kfac_backend.model.targets import Targets, counting, mask_of, split_batch
from kfac_backend.options import (
    Approximation,
    CurvatureKeywords,
    CurvatureOptions,
    KfacApprox,
    Likelihood,
    automatic_mode,
    modes_of_layers,
)
from kfac_backend.precision import (
    backward_arithmetic,
    check_precision,
    exact_arithmetic,
    full_float32,
)
from kfac_backend.reduction import PassSums, sum_over_ranks
from kfac_backend.threads import turn_of

__all__ = [
    "CurvaturePass",
    "ggn_diagonal",
    "kronecker_factors",
]


def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    options: CurvatureOptions = CurvatureOptions(),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: ProcessGroupOption = "default",
    **keywords: Unpack[CurvatureKeywords],
) -> KroneckerFactors:
    """Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position;
    reduce where positions are summed or averaged into one output per example. Source: Eschenhagen
    et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in the mode (train or eval) it is in; dropout that is on stays on. Some eight
    examples of the first batch run twice before the pass, to prove that the hooks see all and that
    no examples mix. (After a first batch of one example, so do those of the first that has
    several.) One and two run before that, to see which layers run once for all examples, and how
    batches may be split; further runs prove that attention by parts and copies of a module's own
    parameters, where there are any, are what the model computes. Later passes over the same model
    prove on two examples that this still holds, and all of it again if the model's structure has
    changed (a layer, a mode, a hook, a setting) or examples have another shape.

    Args:
        model: any model of the supported layers (`kfac_backend.layers`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``, which go to the model
            whole, or by their entries' names if its forward has those; they are moved to the
            model's device. Examples come first; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1].
        options: all choices of the pass: mode, Fisher, which targets count; see `CurvatureOptions`.
        generator: source of fisher="mc"'s labels, on the model's device.
        progress: whether to show a progress bar over the batches.
        process_group: the ranks of `torch.distributed` that have a shard of the data each; the
            factors are those of all the data, on each rank, and all ranks must call this. Shards
            may differ in size, or be empty; none of the data may be in two (as a
            ``DistributedSampler`` puts some that do not divide). None: this process alone.
        keywords: single options, in place of those of ``options``: ``kfac_approx="reduce"``.

    With fisher="mc" each rank draws labels of its own, by the generator's state and its number;
    where all have the same seed, the same seed and number of ranks give the same factors.

    On a CPU batches are split inside where parts are faster, and convolutions run in channels_last.
    That changes nothing but rounding and the order in which labels are drawn.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, a loss of the model's
            own that is another one, NaN or infinity in outputs (naming the parameter or the inputs
            that have it, too), BatchNorm in train mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a parameter without a rule, or used in a way that cannot be followed.
        torch.OutOfMemoryError: naming a batch size that fits; before the first batch, factors that
            no batch size would make fit.
        RankError: another rank has failed or is gone, or has another model or other options.
    """
    options = options.but(**keywords)
    curvature = CurvaturePass(
        model, likelihood, options, generator=generator, process_group=process_group
    )
    with curvature.ranks.failing_together("a curvature pass"):
        for batch in each_batch(data, "Curvature", progress):
            curvature.add(*split_batch(batch, options.dict_key_y))
            curvature.ranks.beat()
    return curvature.factors()


class CurvaturePass:
    """Sums over batches, scaled at the end.

    Args:
        model: see `kronecker_factors`.
        likelihood: of the targets.
        options: all choices of the pass.
        generator: source of fisher="mc"'s labels, on the model's device.
        process_group: the ranks that have a shard of the data each, see `kronecker_factors`.
        keywords: single options, in place of those of ``options``.

    Raises:
        ValueError: options that are not for the likelihood, the device or the model's layers.
        NotImplementedError: a layer without a rule.
        torch.OutOfMemoryError: factors that the device cannot hold.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        options: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        **keywords: Unpack[CurvatureKeywords],
    ) -> None:
        check_module(model)
        options = options.but(**keywords)
        options.check(likelihood)
        self.ranks = Ranks(process_group)
        """Those that have a shard of the data each."""
        self._likelihood: Likelihood = likelihood
        self._options = options
        self._generator = generator
        self._targets = Targets(likelihood, options)
        self._model = model
        self._kfac_approx: KfacApprox = options.kfac_approx
        with turn_of(model):
            self._proof = Proof(model, self._assign())
        self._mask_verified = False
        # Complains of names, and of factors that cannot fit, before any data. With "auto" the mode
        # is not known yet; the large factors are the same in both but for embeddings'.
        kfac_approx = "expand" if self._kfac_approx == "auto" else self._kfac_approx
        device = next(model.parameters()).device
        check_memory(self._assignment, self._modes(kfac_approx), self._options, device)
        self.reset()

    def reset(self) -> None:
        """Forget the batches seen so far, and any failure."""
        self._device = next(self._model.parameters()).device
        check_precision(self._options.backward_precision, self._device)
        self._failed = False
        self._made_rules: dict[TrackedLayer, Rule] | None = None
        self._labels = self._own_labels()
        self._vectors = self._new_vectors()
        self._diagonal: dict[str, Tensor] = {}
        self._num_data = self._num_outputs = self._num_loss_terms = 0
        # A sum over examples, in float64 since it has many terms; moved to the host at the end.
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)

    def add(self, x: Any, y: Any) -> None:
        """Add one batch: forward passes of its parts, and one backward pass per vector.

        It waits for other threads' passes over layers of this model, and for all of them if one has
        another backward_precision than float32.

        Raises:
            torch.OutOfMemoryError: naming a batch size that fits.
            RuntimeError: after a batch that failed, until `reset`.
        """
        self._check_whole()
        y = to_device(y, self._device)
        if isinstance(y, Tensor) and y.dim() and not len(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        x = detached(x, self._device)
        if isinstance(y, Tensor) and y.is_inference():
            y = y.clone()
        self._failed = True  # until all of the batch is added
        with turn_of(self._model, self._options.backward_precision != "float32"), full_float32():
            layers = (tracked.layer for tracked in self._assignment.layers)
            restore = restoration(self._model, *layers)
            try:
                if not self._fits(x, y):
                    fitting = self._fitting_size(x, y)
                    raise out_of_memory(self._model, self._device, len(y), fitting)
            finally:
                restore()
        self._failed = False
        give_back_free_memory()

    def _check_whole(self) -> None:
        if self._failed:
            raise RuntimeError(
                "The last batch of this curvature pass failed, and a part of it is in the sums. "
                "Call reset() and begin with the first batch."
            )

    def _fits(self, x: Any, y: Any) -> bool:
        """Add the batch; False if the memory is exhausted, which leaves the sums useless."""
        try:
            y = self._targets(self._model, x, y)
            self._verify(x, y)
            if not self._mask_verified:
                self._mask_verified = self._verify_mask(x, y)
            for part in parts(x, y, self._part_size):
                self._add(*part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _fitting_size(self, x: Any, y: Any) -> int | None:
        """The largest of half the examples, a quarter, ..., that fits; None if not even one does.

        Called outside of any except clause, whose traceback would keep the memory.
        """
        if not splits_by_example(x, y):
            return None
        size = len(y) // 2
        while size:
            self.reset()
            self._failed = True
            try:
                if self._fits(examples(x, slice(size)), y[:size]):
                    return size
            except (RuntimeError, ValueError, IndexError):
                return None  # the model takes whole batches only
            size //= 2
        return None

    def _add(self, x: Any, y: Any) -> None:
        """Add one part of a batch, of any number of examples."""
        self._rows_seen: dict[TrackedLayer, set[int]] = {}
        self._begin_part()
        mask = mask_of(x, self._options.dict_key_mask)
        with counting(mask), self._capture() as capture:
            f = capture.forward(x)
            check_targets(f, y, self._likelihood, may_ignore=self._targets.may_ignore)
            check_finite(self._model, f, x)
            if not self._num_data:
                self._vectors.warn_of_many(f)
            self._check_rows(len(f), hides=mask is not None)
            # Autocast has done its part in the forward pass; Gram matrices need none of it.
            with self._no_autocast(), backward_arithmetic(self._options.backward_precision):
                self._end_forward()
                capture.backward(f, self._vectors(f, y), self._end_vector)
                capture.check_runs()
            self._end_part()
        if self._assignment.diagonal:
            self._add_diagonal(x, y)
        self._num_data += len(f)
        self._num_outputs = f.shape[-1]
        self._num_loss_terms += num_counted_terms(f, y, self._likelihood)
        self._loss += loss_sum(f.detach(), y, self._likelihood)

    def factors(self) -> KroneckerFactors:
        """The factors of all batches: A a mean over its terms, B a sum over the data.

        The sums become the factors in place, and the pass starts anew.
        """
        self._check_whole()
        sums = self._total_sums()
        if not sums.num_data:
            raise ValueError(
                "The data is empty: no batch was added since the pass began, or since the last "
                "factors()."
            )
        blocks = assemble_blocks(sums.blocks) | {
            name: KroneckerBlock(name, d.reshape(-1, 1, 1)) for name, d in sums.others.items()
        }
        names = self._assignment.names
        if not self._num_data:  # this rank has proved nothing, and others may have found more out
            names = [name for name, _ in self._model.named_parameters() if name in blocks]
        factors = KroneckerFactors(
            {name: blocks[name] for name in names},
            num_data=sums.num_data,
            num_outputs=sums.num_outputs,
            num_loss_terms=sums.num_loss_terms,
            loss=sums.loss,
            likelihood=self._likelihood,
            options=self._options.but(kfac_approx=sums.kfac_approx),
            trace=sums.trace,
            trace_left_out=sums.trace_left_out,
        )
        self.reset()
        return factors

    def _total_sums(self) -> PassSums:
        """The sums over all ranks' data, of which this pass has none left until `reset`."""
        sums = self._sums() if self._num_data else self._without_data()
        same = {"the likelihood": self._likelihood, "the options": repr(self._options)}
        sums = sum_over_ranks(sums, self.ranks, self._model, same)
        self._draw_on()
        return sums

    def _sums(self) -> PassSums:
        """What this process has summed up; the rules are used up."""
        self._failed = True
        sums = self._without_data()
        sums.blocks, sums.others = collect_sums(self._rules), self._diagonal
        sums.trace = float(self._vectors.trace)
        sums.trace_left_out = float(self._vectors.trace_left_out)
        return sums

    def _without_data(self) -> PassSums:
        """The counts alone."""
        return PassSums(
            {}, {}, self._kfac_approx,
            num_outputs=self._num_outputs, num_data=self._num_data,
            num_loss_terms=self._num_loss_terms, loss=self._loss.item(),
        )  # fmt: skip

    def _assign(self) -> RuleAssignment:
        """The layers and parameters that the pass is about."""
        return assign_rules(self._model, self._options.unsupported)

    @property
    def _part_size(self) -> int | None:
        """How many examples of a batch at once; None: batches stay whole."""
        return self._proof.plan.part_size

    @property
    def _rules(self) -> dict[TrackedLayer, Rule]:
        """All layers' rules, which hold the sums; made with the first batch."""
        if self._made_rules is None:
            modes = self._modes(self._kfac_approx)
            self._made_rules = make_rules(self._assignment, modes, self._options)
        return self._made_rules

    def _modes(self, kfac_approx: KfacApprox) -> dict[str, Approximation]:
        """Each layer's mode."""
        assert kfac_approx != "auto"
        return modes_of_layers(kfac_approx, self._layer_names)

    @property
    def _layer_names(self) -> list[str]:
        """The names of layers that have a mode."""
        return [tracked.name for tracked in self._assignment.layers]

    def _capture(self) -> Capture:
        return Capture(
            self._model,
            self._assignment,
            self._add_input,
            self._add_gradient,
            channels_last=self._proof.plan.channels_last,
            batched=self._options.batched,
        )

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, enabled=False)

    def _verify(self, x: Any, y: Any) -> None:
        """Once per pass, and again on the first batch that has several examples."""
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        if self._proof.is_made(N):
            return
        which = self._proof.some(x, N)
        if which is not None:
            x, y, N = examples(x, which), y[which], len(which)
        counted = counted_terms(y, self._likelihood) if isinstance(y, Tensor) else None
        self._proof.make(x, N, None if counted is None else ~counted)
        if self._kfac_approx == "auto":
            self._kfac_approx = automatic_mode(self._proof.output_dim)

    @property
    def _assignment(self) -> RuleAssignment:
        return self._proof.assignment

    def _verify_mask(self, x: Any, y: Any) -> bool:
        """Prove, on the first batch with such, that hidden positions reach no output that counts.

        Where that holds the gradients at these positions are zero: they add nothing to B, and only
        their inputs would be in A. False if the mask hides none.
        """
        mask = mask_of(x, self._options.dict_key_mask)
        if mask is None:
            return False
        if splits_by_example(x, y):
            hiding = torch.argmin(mask.all(1).int())  # the first example that has such a position
            which = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, y = examples(x, which), y[which]
        counted = counted_terms(y, self._likelihood)
        with counting(mask_of(x, self._options.dict_key_mask)):
            verify_independence(
                self._model,
                self._assignment,
                x,
                channels_last=self._proof.plan.channels_last,
                ignored=None if counted is None else ~counted,
            )
        return True

    def _check_rows(self, examples: int, hides: bool) -> None:
        """Each example's rows must be known, where positions are summed or a layer needs it.

        So they must where a mask hides positions, lest these count.
        """
        for tracked in self._assignment.layers:
            wrong = self._rows_seen.get(tracked, set()) - {examples}
            rule = self._rules[tracked]
            if wrong and hides:
                raise NotImplementedError(
                    f"Layer {tracked} got {wrong.pop()} rows in a batch of {examples} examples, so "
                    f"that it cannot be told which of them '{self._options.dict_key_mask}' hides. "
                    "Keep the positions apart, (N, R, ..., d), say which example each row belongs "
                    "to, -1 for none (examples_of_rows), or let all positions count "
                    "(dict_key_mask=None)."
                )
            if wrong and (rule.mode != "expand" or rule.needs_examples):
                raise NotImplementedError(
                    f"Layer {tracked} got {wrong.pop()} rows in a batch of {examples} examples; "
                    "its block must know each example's rows. Keep the batch axis first and the "
                    "shared axes apart, (N, ..., d), or say which example each row belongs to "
                    "(examples_of_rows)."
                )

    def _begin_part(self) -> None:
        self._position_sums = PositionSums()
        for rule in self._rules.values():
            rule.begin_forward()

    def _see_rows(self, tracked: TrackedLayer, use: Use) -> None:
        """Remember how many rows a layer got, for `_check_rows`."""
        rows = use.a.shape[:1].numel() if use.rows is None else use.rows.num_examples
        self._rows_seen.setdefault(tracked, set()).add(rows if use.a.dim() else 0)

    def _add_input(self, tracked: TrackedLayer, use: Use) -> None:
        self._see_rows(tracked, use)
        with self._no_autocast():
            self._rules[tracked].add_input(use)

    def _end_forward(self) -> None:
        for rule in self._rules.values():
            rule.end_forward()

    def _add_gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        with exact_arithmetic(self._options.backward_precision):
            self._rules[tracked].add_gradient(use, b, self._position_sums)

    def _new_vectors(self) -> BackwardVectors:
        return BackwardVectors(self._likelihood, self._options, self._labels)

    def _own_labels(self) -> torch.Generator | None:
        """The source of labels of one pass: with several ranks, this rank's own.

        It comes from the state of the common one without changing it, so that ranks with more
        batches than others leave the common one as the others do; see `_draw_on`.
        """
        if self._options.fisher != "mc" or self.ranks.size == 1:
            return self._generator
        return self.ranks.generator(self._common_generator())

    def _draw_on(self) -> None:
        """Let the next pass draw other labels, on all ranks alike."""
        if self._options.fisher == "mc" and self.ranks.size > 1:
            common = self._common_generator()
            torch.rand((), generator=common, device=common.device)

    def _common_generator(self) -> torch.Generator:
        if self._generator is not None:
            return self._generator
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def _end_vector(self) -> None:
        for rule in self._rules.values():
            rule.end_vector()

    def _end_part(self) -> None:
        self._position_sums.clear()

    def _add_diagonal(self, x: Any, y: Tensor) -> None:
        diagonals = ggn_diagonal(
            self._model,
            self._assignment.diagonal,
            x,
            y,
            self._new_vectors(),
        )
        for name, diagonal in diagonals.items():
            self._diagonal[name] = self._diagonal.get(name, 0) + diagonal


def ggn_diagonal(
    model: nn.Module,
    names: Sequence[str],
    x: Any,
    y: Tensor,
    vectors: BackwardVectors,
) -> dict[str, Tensor]:
    """Σ_n Σ_v (∂ v_nᵀf_n / ∂θ_i)² of each named parameter, in its shape.

    Right for any layer that does not mix examples; see `squared_gradients`.
    """
    with torch.no_grad(), forked_random_numbers(model):
        f = call_with(model, {}, x)
    return squared_gradients(model, names, x, f, vectors(f, y))
