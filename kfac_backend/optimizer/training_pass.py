"""Compute the factors of a training step from the step's own forward pass.

Life cycle of a `TrainingPass`. It registers two hooks at the model, which stay until
`TrainingPass.detach`. In a step that needs new factors (`TrainingPass.is_due`):

1. Before the model's forward pass, `_begin` makes the proof if it is missing. It enters a
   `Capture`, which registers hooks at the layers. Their inputs are added during the forward pass.
2. After the forward pass, `_end` removes the layers' hooks and registers a hook at the model's
   output.
3. When the training's backward pass reaches that output, `_reached` propagates the vectors of the
   curvature back through the same graph, to outputs of layers only. Then the training's own
   backward pass continues.
4. `mean_blocks` sums over ranks, scales the sums, and resets the pass.

The vectors must come first, because the training's backward pass frees the graph. With
fisher="empirical" there are no vectors: the training's own backward pass gives the gradients.
Between steps 1 and 3, `_Forward` holds the state of one forward pass. With gradient accumulation
steps 1 to 3 repeat before step 4.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.engine.automatic_mode import automatic_mode
from kfac_backend.engine.batches import detached, num_examples
from kfac_backend.engine.capture import Capture
from kfac_backend.engine.driver import Driver
from kfac_backend.engine.factor_sums import FactorSums, assemble_blocks, check_memory
from kfac_backend.engine.model_calls import (
    check_output,
    explicit_forwards,
    logits_of,
    preserve_state,
    uncompiled,
)
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import (
    Operations,
    RuleAssignment,
    assign_rules,
    check_batch_norm,
)
from kfac_backend.layers.rows import counted_positions
from kfac_backend.likelihoods import Likelihood, num_counted_terms
from kfac_backend.optimizer.damped_inverse import diverging
from kfac_backend.optimizer.loss_check import LossLikelihoodCheck, MeanOver
from kfac_backend.options import CurvatureOptions
from kfac_backend.precision import full_float32
from kfac_backend.ranks import ProcessGroupOption
from kfac_backend.sharding import gathered_again, is_substituted


class TrainingPass:
    """Compute the factors of the forward passes of a step, several with gradient accumulation.

    It leaves out parameters without a rule, and parameters whose uses no hook captures. They train
    with their plain gradients. A layer whose rows belong to unknown examples is an error.

    See `KfacPreconditioner` for the arguments. ``parameters`` maps names to the parameters
    that get a block while they are trained.

    BatchNorm may be in train mode, except with fisher="exact". Vectors then go back through the
    batch's statistics, like the training's gradients. A row n of a layer affects the outputs m of
    all examples, and the factors belong to the batch's loss, B = Σ_n Σ_m J_mnᵀ Λ_m J_mn.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: CurvatureOptions,
        generator: torch.Generator,
        parameters: Mapping[str, nn.Parameter] | None = None,
        loss_mean_over: MeanOver = "terms",
        process_group: ProcessGroupOption = "default",
    ) -> None:
        parameters = dict(model.named_parameters() if parameters is None else parameters)
        self.trained = TrainedParameters(model, parameters)
        """Selects the parameters with a block."""
        self._model = model
        self._now: _Forward | None = None
        self._runs_again: ExitStack | None = None
        """Context of checkpoints, which run layers again in the backward pass."""
        self._probe = next(model.parameters(), None)
        self._is_paused = False
        self.is_scheduled = True
        """Whether this step is scheduled for new factors."""
        self.driver = Driver(
            model,
            likelihood,
            options,
            generator=generator,
            process_group=process_group,
            assignment=self.trained.assign(),
            sink=FactorSums(options, in_training=True),
        )
        self._loss = LossLikelihoodCheck(self.driver.task, loss_mean_over)
        check_memory(self.driver.proof.assignment, options, self.driver.device)
        self.covered = self.trained.assigned
        """Trained parameters of the latest factors."""
        # torch.compile traces the hook, and would swallow its error.
        self._refuse_compiled: Any = torch.compiler.disable(_refuse_compiled)
        self._handles: list[RemovableHandle] = [
            # Before FSDP's hook, which gathers for this forward pass and would also run in the
            # proof.
            model.register_forward_pre_hook(
                _ModelHook(self._begin), with_kwargs=True, prepend=self.driver.sharded is not None
            ),
            # Also called after an error in the forward pass, so that no layer keeps its hooks.
            model.register_forward_hook(_ModelHook(self._end), always_call=True),
        ]

    def detach(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # No `reset`: its new pass would fail if the process group of a sharded model has ended.
        self._forget_forward()

    def reset(self) -> None:
        """Discard the forward passes so far."""
        self._forget_forward()
        self.driver.start(FactorSums(self.driver.options, in_training=True))

    def _forget_forward(self) -> None:
        self._end_runs_again()
        if self._now is not None:
            self._now.forget()
        self._now = None

    @property
    def is_due(self) -> bool:
        """Whether this step makes factors: it is scheduled, or new parameters need some."""
        return self.is_scheduled or not self.trained.now() <= self.covered

    def _end_runs_again(self) -> None:
        """Called at the end of a backward pass, or at the next call after one that failed."""
        if self._runs_again is not None:
            self._runs_again.close()
        self._runs_again = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose forward passes are ignored."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def mean_blocks(self) -> dict[str, KroneckerBlock]:
        """Return the blocks of the mean loss by name: B divided by the number of terms or examples.

        One rank keeps each block; on the others it has only a shape. The pass is reset.

        Raises:
            RuntimeError: there was no forward pass with a backward pass.
        """
        self._finish()
        # Ranks without a batch take part, too, because the others wait for them.
        sums = None if self._now is not None else self.driver.finish(by_owners=True)
        if sums is None or not sums.num_data:
            self.reset()
            raise RuntimeError(
                "There was no backward pass through the model's output since the last step, so "
                "there is no curvature. Before step(), call the module that K-FAC was given with "
                "gradients, and loss.backward(). A copy or a module compiled from it does not "
                "work. Two K-FACs of one model also do not work: give one K-FAC all parameters."
            )
        number = max(
            sums.num_loss_terms if self._loss.loss_mean_over == "terms" else sums.num_data, 1
        )
        # The training's own gradients belong to a mean over T terms, b/T, so the mean of b bᵀ is T
        # Σ (b/T)(b/T)ᵀ. With several ranks each loss is a mean over the rank's own terms. For the
        # mean over all, its gradients are too large by the number of ranks.
        of_gradients = 1.0
        if self.driver.fisher.is_loss_gradient:
            of_gradients = (number / self.driver.ranks.size) ** 2
        # Each factor is averaged separately, so each factor, not only their product, must belong to
        # the mean loss. If a weight is stored as (d_in, d_out), A contains the gradients. If a
        # weight is used in both orientations, A has the scale of the product.
        inputs_first = {
            name
            for tracked in self.driver.proof.assignment.all
            if tracked.rule.transposed
            for name in tracked.parameters.values()
        }
        # A bias whose input is 1 is damped as any bias, with its number of positions in B.
        biases = {t.parameters.get("bias") for t in self.driver.proof.assignment.all}
        blocks = assemble_blocks(self._model, sums)
        self.reset()
        self.covered = self.trained.now()
        # Averages change in place. So a weight and its bias, which may share a B, get separate
        # ones. Rows in addition to the matrix would be useless.
        means = {}
        for name, block in blocks.items():
            B, A = block.B, block.A
            if A is not None and block.num_terms is None:
                A = A * (of_gradients / number)
            elif A is not None and name in inputs_first:
                B, A = B / number, A * of_gradients
            else:
                B = B * (of_gradients / number)
            if A is not None and name in biases:
                B, A = B * A, None
            means[name] = block.replace(B=B, A=A)
        return means

    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward pass of the model: prepare the capture if factors are due."""
        self._end_runs_again()  # after a backward pass that failed
        if self._now is not None and not self._now.is_over:
            self.reset()  # Ctrl-C ended the last one, after which torch calls no hook
        # Another pass over the model runs it with replaced parameters.
        is_itself = next(self._model.parameters()) is self._probe
        if self.driver.sharded:  # gathered parameters are other tensors, too
            is_itself = not is_substituted(self._model)
        if self._is_paused or not torch.is_grad_enabled() or not is_itself or not self.is_due:
            return
        trained = self.trained.now()
        if not trained:
            return
        self._finish()
        if self._now is not None:
            self._drop()
        if self.trained.assigned != trained:
            if self.driver.state.num_data:
                raise RuntimeError(
                    "Parameters were frozen or unfrozen between the batches of one step. Freeze "
                    "or unfreeze them between two steps."
                )
            self.driver.proof = Proof(self._model, self.trained.assign())
        if torch.compiler.is_dynamo_compiling():
            self._refuse_compiled(type(self._model).__name__)
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            self._show(_input(self._model, args, kwargs), stack)

    def _show(self, x: Any, stack: ExitStack) -> None:
        """Prove the model on x, and enter the contexts of the forward pass.

        ``stack`` closes the entered contexts if anything fails here. Otherwise they move to the
        `_Forward`, which closes them after the forward pass.
        """
        driver = self.driver
        mask = driver.task.mask(x)
        with self.paused():
            self.trained.prove(driver, x, None if driver.proof.holds_for_masks else mask)
        if not (driver.fisher.draws or driver.fisher.is_loss_gradient):
            # One vector combines columns of all examples' roots. With batch statistics the products
            # of different examples' columns would not vanish, not even on average.
            check_batch_norm(self._model, "pass fisher='mc'")
        forward = _Forward(driver.capture(), mask, x)
        stack.enter_context(explicit_forwards(driver.proof.assignment))
        stack.enter_context(counted_positions(forward.mask))
        stack.enter_context(forward.capture)
        copies = forward.capture.begin(x)
        if driver.fisher.is_loss_gradient:
            forward.capture.listens = True
        for tracked in driver.proof.assignment.own_parameters:
            (name,) = tracked.parameters.values()
            stack.enter_context(_temporary_parameter(tracked.layer, copies[name]))
        forward.context = stack.pop_all()
        # `_end` must run after the layers' hooks. If the model is itself a layer, its layer hook
        # was registered later. Moving `_end` keeps its handle; registering it again would not.
        hooks: Any = self._model._forward_hooks  # an OrderedDict
        hooks.move_to_end(self._handles[-1].id)
        self._now = forward

    def _end(self, args: tuple, output: Any) -> None:
        """Called after each forward pass: wait for the training's backward pass at its output."""
        forward = self._now
        if forward is None or forward.is_over:
            return
        forward.is_over = True
        forward.context.close()
        if output is None:  # the forward pass failed; the error is on its way
            self.reset()
            return
        f = logits_of(output)
        check_output(f)
        if not f.requires_grad:
            self._drop()
            return
        runs = forward.capture.runs
        runs.check_number(forward.capture.assignment)
        runs.check_examples(len(f), forward.capture.sink, hides=forward.mask is not None)
        is_new = self.driver.proof.needs_mask(runs.masked, forward.mask)
        if self.driver.sharded:
            is_new = self.driver.sharded.any(is_new)
        if is_new:
            with self.paused():
                self.trained.prove(self.driver, forward.x, forward.mask)
        if not (self.driver.sharded or runs.rows <= self.driver.proof.rows):
            with self.paused(), preserve_state(self._model), full_float32():
                self._model.eval()
                x = detached(forward.x, self.driver.device)
                self.driver.proof.make_for_runs(runs, x, forward.mask, None)
        forward.x = None
        # The hook refers to ``forward``, which refers to the output. This cycle keeps the graph
        # until the gradient has come, or until `_Forward.forget` breaks it.
        forward.f = f
        f.register_hook(lambda g: self._reached(forward, g))

    def _reached(self, forward: "_Forward", g: Tensor) -> None:
        """Called when the training's backward pass reaches the output with the gradient g."""
        driver = self.driver
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        if self._runs_again is None:
            # Layers in checkpoints run again in this backward pass, by the same parts. torch calls
            # queued functions at its end, and never if it fails.
            self._runs_again = explicit_forwards(driver.proof.assignment)
            queue_callback(self._end_runs_again)
        # The curvature's own vectors also begin at this output and call this hook, like the
        # backward pass of a second loss.
        if forward.is_seen and not driver.fisher.is_loss_gradient:
            return
        f, forward.f = forward.f, None
        if f is None or self._now is not forward:
            raise RuntimeError(
                "A backward pass reached an output of the model for a second time, or an output "
                "of an earlier forward pass. The curvature needs one backward pass after each "
                "forward pass. Put the examples into one batch, add the losses, or run the other "
                "passes with paused()."
            )
        # Drawing labels from NaN would end the process on a GPU.
        if not torch.isfinite(f).all():
            raise diverging("The model's output")
        y = self._loss.targets(f, g, forward.mask)
        forward.is_seen = True
        driver.state.num_data += len(f)
        driver.state.num_outputs = f.shape[-1]
        driver.state.num_loss_terms += num_counted_terms(f, y, driver.task.likelihood)
        if driver.fisher.is_loss_gradient:
            # The training's backward pass gives the gradients.
            queue_callback(forward.backward_ended)
            return
        try:
            with gathered_again(self._model):
                driver.propagate(forward.capture, f, y)
            self._finish()
        except BaseException:  # the sums contain a part of the batch
            self.reset()
            raise

    def _finish(self) -> None:
        """Close the latest forward pass, if the backward pass has reached its output.

        With fisher="empirical" the training's backward pass gives gradients after `_reached`, so
        this is called only at the next forward pass or the next step.
        """
        forward = self._now
        if forward is None or not forward.is_seen:
            return
        if self.driver.fisher.is_loss_gradient and not forward.has_gradients:
            self.reset()  # the backward pass failed, and the sums contain a part of the batch
            return
        self._now = None
        with forward.capture.arithmetic():
            forward.capture.sink.vector_done()
        forward.capture.runs.check_reached()
        forward.capture.forget()

    def _drop(self) -> None:
        """Discard a forward pass without a backward pass, such as one for evaluation.

        The sums already contain its inputs, so all sums must be dropped.

        Raises:
            RuntimeError: the sums also contain other forward passes of this step.
        """
        others = self.driver.state.num_data
        self.reset()
        if others:
            raise RuntimeError(
                "The model ran with gradients but without a backward pass, between the batches of "
                "one step. Run it under torch.no_grad(), or with paused()."
            )


class TrainedParameters:
    """Select the parameters with a block: trained ones with a rule and with hooks.

    ``parameters`` maps names to those that get a block while they are trained (``requires_grad``).
    """

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self._model, self.parameters = model, parameters
        self.assigned = frozenset[str]()
        """Trained parameters at the assignment of the present rules."""
        self._named: set[str] = set()  # parameters without a rule that a warning has named

    def now(self) -> frozenset[str]:
        """Return the parameters that are trained at present."""
        return frozenset(name for name, p in self.parameters.items() if p.requires_grad)

    def assign(self) -> RuleAssignment:
        """Return the layers with rules. Parameters without one have no block."""
        trained = self.now()
        shapes = ((name, self.parameters[name]) for name in trained)
        # If none is left, the error of assign_rules names the first one and the way out.
        only = {name for name, p in shapes if p.dim() and not p.is_complex()} or trained
        with preserve_state(self._model):
            self._model.eval()  # BatchNorm has a rule in eval mode
            assignment = assign_rules(self._model, "freeze", only)
        assignment = _only_with_hooks(assignment, assignment.unknown)
        self.assigned = trained
        without = trained.difference(assignment.names, self._named)
        if without:
            self._named |= without
            warnings.warn(
                "No K-FAC rule for "
                f"{', '.join(n for n in self.parameters if n in without)}. Steps use the plain "
                "gradient there. To turn this warning off, exclude these parameters.",
                stacklevel=2,
            )
        return assignment

    def prove(self, driver: Driver, x: Any, mask: Tensor | None) -> None:
        """Prove, in eval mode, that the hooks capture all uses and the mask fits; see `Proof`."""
        N, proof = num_examples(x), driver.proof
        misses = not proof.is_made(N) or mask is not None
        if driver.sharded:
            misses = driver.sharded.any(misses)
        if not misses:
            return
        batches = [(detached(x, driver.device), mask)]
        if driver.sharded:  # its ranks run the model equally often
            some = driver.sharded.examples_of_ranks((x, torch.zeros(N or 0), mask))
            batches = [(x, driver.task.mask(x)) for x, _ in some]
        try:
            with preserve_state(self._model), full_float32():
                self._model.eval()
                for some, its_mask in batches:
                    self._prove_on(driver, some, its_mask)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{error} Or exclude its parameters from the preconditioning (exclude). They are "
                "then trained with their plain gradients."
            ) from error

    def _prove_on(self, driver: Driver, x: Any, mask: Tensor | None) -> None:
        N, proof = num_examples(x), driver.proof
        if not proof.is_made(N):
            proof.make(x, N)
            self._leave_out_followed(proof)
            if driver.kfac_approx == "auto":
                driver.kfac_approx = automatic_mode(proof.output_dim)
        if mask is not None:
            # Positions that the mask hides have no loss term.
            proof.make_for_masks(x, mask, mask if proof.output_dim > 2 else None)

    def _leave_out_followed(self, proof: Proof) -> None:
        """Leave out parameters that the proof follows operation by operation."""
        assignment = proof.assignment
        followed = dict.fromkeys(assignment.operations.names)
        for tracked in assignment.layers:
            if "followed" in assignment.runs.get(tracked.layer, ()):
                followed |= dict.fromkeys(tracked.parameters.values())
        if followed:
            if not self._named.issuperset(followed):
                self._named.update(followed)
                warnings.warn(
                    f"No hook captures the uses of {', '.join(followed)}. Steps use the plain "
                    "gradient there. To turn this warning off, exclude these parameters.",
                    stacklevel=2,
                )
            proof.assignment = _only_with_hooks(assignment, followed)


def _refuse_compiled(name: str) -> None:
    raise NotImplementedError(
        f"The model ({name}) runs in code made by torch.compile, in which hooks on its layers have "
        "no effect. Give K-FAC the compiled model (torch.compile(model), not model.compile()), or "
        "compile parts of the model. Steps with new factors then run as Python, and all other "
        "steps run compiled."
    )


def _only_with_hooks(assignment: RuleAssignment, others: Mapping[str, object]) -> RuleAssignment:
    """Return the assignment without parameters that need to be followed by operations.

    Following would replace the parameters by other leaves, which a training step cannot use.
    """
    return replace(assignment.with_constants(others), unknown={}, operations=Operations())


@dataclass(eq=False)
class _Forward:
    """One forward pass of the training, until its backward pass."""

    capture: Capture
    mask: Tensor | None
    x: Any
    context: ExitStack = field(default_factory=ExitStack)
    """Contexts of the forward pass."""
    f: Tensor | None = None
    """Output, until its gradient has come."""
    is_over: bool = False
    """Whether the forward pass has ended."""
    is_seen: bool = False
    """Whether the backward pass has reached the output."""
    has_gradients: bool = False
    """Whether the backward pass has finished; set only with fisher="empirical"."""

    def backward_ended(self) -> None:
        """Called at the end of the training's backward pass."""
        self.has_gradients = True

    def forget(self) -> None:
        """Drop the graph, and remove the hooks from the layers."""
        self.context.close()
        self.capture.forget()
        self.f = None


class _ModelHook:
    """Hook at the model that does nothing in a copy of the model (deepcopy, pickle)."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, model: nn.Module, *values: Any) -> None:
        """Call the function with the arguments of a forward hook, without the model."""
        if self._call is not None:
            self._call(*values)

    def __reduce__(self) -> tuple:
        return (_ModelHook, ())


@contextmanager
def _temporary_parameter(layer: Any, copies: Tensor) -> Iterator[None]:
    """Context in which the copies replace a module's own parameter."""
    parameters, own = layer.holder._parameters, layer.value
    parameters[layer.name] = copies
    try:
        yield
    finally:
        parameters[layer.name] = own


def _input(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the input of a model's call: its one argument, or a mapping of tensors by name."""
    if len(args) == 1 and not kwargs:
        return args[0]
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {name: value for name, value in bound.items() if isinstance(value, Tensor)}
