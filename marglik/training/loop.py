"""The online loop: steps of the network, with updates of the prior by the evidence in between.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1. `marglik.training.algorithm` has the
method; this module has the network's steps, checkpoints and records.

The objective on a batch of M examples is 1/M Σ ℓ/σ² + ½ Σ_g (T δ_g/N) ‖θ_g‖². Over the data it is
−T/N times the tempered log joint, up to a constant. Gradient steps minimise σ² times the objective,
so that learning rates do not depend on the noise of regression. ℓ is the loss of an example. For a
sequence it is the sum over the positions that count. Code that takes the mean over R positions
instead has gradients that are R times smaller. With SGD, this loop therefore needs a learning rate
that is R times smaller than there. (Adam's steps do not grow with the gradient.)

`KFAC` divides the gradient by damped curvature. With damping on the product, the prior's curvature
σ² T δ_g/N is added to the damping. A step is then a natural-gradient step on the posterior.

With several ranks, the M examples of a batch are spread over them. Each rank multiplies its own sum
of losses by (ranks / M), and `DistributedDataParallel` averages the gradients over ranks. Then the
prior's gradient is added. The step equals the step of one process with the whole batch, up to the
order of sums.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler, PolynomialLR
from torch.utils.data import DistributedSampler
from tqdm.auto import tqdm

from kfac_backend.engine.batches import (
    NO_BATCH,
    arguments,
    each_batch,
    length,
    split_batch,
    to_device,
)
from kfac_backend.engine.model_calls import check_output, logits_of
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import StudentT, counted_terms, likelihood_of, loss_sum
from kfac_backend.optimizer import KFAC
from kfac_backend.options import check_keys
from kfac_backend.ranks import Ranks
from marglik.eval_mode import preserve_mode
from marglik.loaders import (
    Loader,
    check_shards,
    check_workers,
    count_on_ranks,
    generators_of,
    samplers_of,
)
from marglik.prediction.suspicious_labels import TrainingProbabilities
from marglik.prediction.verdict import verdict
from marglik.random_state import own_random_numbers, random_state, set_random_state
from marglik.storage.checkpoint import Checkpoints
from marglik.training import algorithm
from marglik.training.average import LARGEST_NOISE, noise_of_steps
from marglik.training.decay_policy import scale_loss
from marglik.training.learner import PriorLearner
from marglik.training.problem import Problem
from marglik.training.state import LearnerState

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds

_logger = logging.getLogger(__name__)

Record = dict[str, Any]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Mode of `torch.compile`; the last two record CUDA graphs on a GPU."""


@dataclass
class OnlineResult:
    """Result of the loop. The model has the final parameters of the schedule."""

    laplace: Any
    """The `Posterior` at the model's parameters, with the learned hyperparameters; None with
    Schedule(updates=0)."""
    evidence: float
    """The log marginal likelihood (nats, a sum over the data) of ``laplace``; NaN without it."""
    epoch: int
    """The epoch of the parameters: the last one, or the epoch of the best update."""
    records: list[Record] = field(default_factory=list)
    """One record per epoch and per update, in chronological order."""
    evidences: list[float] = field(default_factory=list)
    """The evidence (nats) before every hyperparameter step."""
    training_probabilities: TrainingProbabilities | None = None
    """Predictions of the steps for each training example; see `marglik.suspicious_labels`."""
    seconds: float = 0.0
    """Wall-clock time of the loop; after a resume, the sum over its parts."""
    learner: PriorLearner | None = None
    """The learner; its `PriorLearner.replay` gives other networks the same weight decays."""

    def verdict(self, plain: nn.Module, test: Iterable[Any], **options: Any) -> str:
        """Compare the network with a plain network on test data, in a few lines.

        Args:
            plain: the same network, trained with a fixed weight decay, a learning rate that falls
                to zero, and no average.
            test: test data (x, y), or mappings.
            options: further arguments of `marglik.verdict`, such as ``held_out`` to calibrate both
                networks first.
        """
        posterior = self.laplace
        own = posterior.model, plain, test, posterior.likelihood
        return verdict(*own, targets=posterior.options, **options)


class OnlineTraining:
    """Trains a network and its prior together: a training loop around a `PriorLearner`.

    One object makes one `run`. The constructor checks the options and counts the data. `run`
    alternates epochs of network steps with updates of the prior, by the schedule. The next epoch
    uses the new weight decays T·δ/N. After each epoch and update it may write a checkpoint of
    `state_dict`. At its end the model has the average of its parameters.

    With a Fabric of several devices, all ranks create and run this object in the same way. All
    start from the same parameters. Each has a shard of the data with the same number of batches,
    and the shards do not overlap. N is the number of all examples. Steps and updates equal the
    steps and updates of one process with the concatenated batches, up to the order of sums. Only
    BatchNorm in train mode uses the examples of its own rank alone. Dropout, labels drawn from the
    model, and random numbers of loaders without their own generator differ between ranks. Seed and
    number of ranks determine them. Code that shuffles before it shards therefore needs its own
    seed, as in ``DistributedSampler(drop_last=True)``.

    Args:
        model: the network; frozen parameters have neither prior nor curvature.
        optimizer: the network's optimiser, without weight decay, because the loop adds the prior's
            gradient.
        train_loader: batches (x, y), or mappings, for the network's steps.
        learner: the learner of the weight decays, with likelihood and targets; not started, with
            the number of epochs in its schedule.
        scheduler: the optimiser's learning-rate schedule, stepped after every batch. None keeps the
            rate constant, with one exception: for "regression" and "student_t", if the targets have
            little noise, the rate falls linearly to zero in the last third of the epochs, see
            `marglik.training.average`.
        curvature_loader: data of the curvature pass, with the same examples, for example without
            augmentation; None uses the training loader.
        held_out: held-out batches, for classifiers: they correct the weight decays, and
            "noisy_classification" learns the share of wrong labels from them, see
            `PriorLearner.start`.
        fabric: devices and precision, launched; None uses the model's device in full precision.
        compile_mode: mode of `torch.compile` for the network's steps; None does not compile.
        on_record: function that gets the record of each epoch and each update, and after a resume
            first all earlier records; called only on rank 0.
        progress: whether to show progress bars; only on rank 0.
        keep_probabilities: whether to store the steps' predictions for each training example, see
            `marglik.suspicious_labels`.

    Raises:
        ValueError: there is no number of epochs or no data; K-FAC with a compiled model; several
            processes of torch.distributed without a matching Fabric; shards that do not fit
            together.
        NotImplementedError: the Fabric has another strategy than DDP.
        RankError: ranks have different models or options.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_loader: Loader,
        learner: PriorLearner,
        *,
        scheduler: LRScheduler | None = None,
        curvature_loader: Loader | None = None,
        held_out: Iterable[Any] | None = None,
        fabric: "Fabric | None" = None,
        compile_mode: CompileMode | None = None,
        on_record: Callable[[Record], None] | None = None,
        progress: bool = False,
        keep_probabilities: bool = True,
    ) -> None:
        kfac = optimizer if isinstance(optimizer, KFAC) else None
        self._epochs = _checked_epochs(model, learner, kfac, compile_mode)
        self.model = model
        self.train_loader = train_loader
        self.curvature_loader = train_loader if curvature_loader is None else curvature_loader
        self.scheduler = scheduler
        self.fabric = fabric
        self.device = next(model.parameters()).device if fabric is None else fabric.device
        self.ranks = ranks_of(fabric)
        """The processes that train together, each with its shard of the data."""
        self._is_alone = self.ranks.size == 1
        self.on_record = on_record
        self.progress = progress and self.ranks.rank == 0
        self.learner = learner
        """The learner with the method and its state."""
        # Before Fabric wraps the network in DDP, so that ranks which differ end with an error that
        # names the difference.
        check_shards(train_loader, self.ranks)
        self._start = partial(
            learner.start,
            model,
            optimizer,
            self.curvature_loader,
            self._epochs,
            steps_per_epoch=length(train_loader),
            ranks=self.ranks,
            sums_terms=True,
            held_out=held_out,
            hooks="none",
        )
        self._start()
        if curvature_loader is not None:
            self._warn_of_fewer_examples()
        scale_loss(learner.problem, learner.state)
        if not self._is_alone:
            _warn_of_batch_norm(model)
        compiled: Any = model
        if compile_mode is not None:
            # dynamic=False: only two batch sizes occur, the usual one and the last batch's. Each
            # gets a separate graph, without symbolic sizes.
            compiled = torch.compile(model, mode=compile_mode, dynamic=False)
        # Only steps use the wrapped network; everything else uses the caller's module.
        self._forward, self.optimizer = compiled, optimizer
        if fabric is not None:
            wrapped: Any = fabric.setup(compiled, optimizer)
            self._forward, self.optimizer = wrapped
        self._kfac = kfac
        self._own_damping: float | None = None
        if kfac is not None and kfac.preconditioner.options.damping_on == "product":
            self._own_damping = kfac.preconditioner.options.damping
        self._task = Task(learner.likelihood, learner.options.curvature)
        # Checking a target waits for the device, so only the first epoch does it.
        self._targets_are_checked = False
        self.probabilities: TrainingProbabilities | None = None
        if keep_probabilities:
            self.probabilities = TrainingProbabilities(train_loader, learner.likelihood, self.ranks)
        self._falls = False
        """Whether the loop itself has created the schedule, because the rate falls."""
        self._first_late = learner.options.schedule.num_early + 1
        """Number of epochs after which the noise of the steps decides whether the rate falls."""
        self._epoch = 0
        """Number of epochs of network steps; an update may still have to follow the last."""
        self._records: list[Record] = []
        self._seconds = 0.0

    def run(self, checkpoints: Checkpoints | None = None) -> OnlineResult:
        """Train for all epochs; the model then has the schedule's final parameters.

        The model's mode (train or eval) is restored.

        Args:
            checkpoints: folder of the checkpoints, written at the start, before each update of the
                prior, at the end, and whenever one is due. If there is a checkpoint, training
                continues from it. On a CPU with the same number of threads the result is then
                exactly the same.

        Raises:
            FloatingPointError: the loss or the evidence is not finite.
            ValueError: the loader has persistent workers, or `load_state_dict` cannot load the
                checkpoint.
        """
        started = time.perf_counter()
        epochs = self._epochs
        if checkpoints is not None:
            check_workers(self.train_loader, self.curvature_loader)
            checkpoints.ranks = self.ranks
            if checkpoints.exists():
                self.load_state_dict(checkpoints.load())
                _logger.info("going on after epoch %d", self._epoch)
            else:
                # So a run that is killed within its first epoch can be resumed like any other.
                checkpoints.save(self.state_dict())
        earlier = self._seconds

        def save(needed: bool) -> None:
            self._seconds = earlier + time.perf_counter() - started
            if checkpoints is not None and (needed or checkpoints.is_due):
                checkpoints.save(self.state_dict())

        hidden = None if self.progress else True  # None shows it on a terminal only
        bar = tqdm(desc="Training", unit="epoch", disable=hidden, total=epochs)
        problem, state = self.learner.problem, self.learner.state
        problem.progress, schedule = self.progress, problem.options.schedule
        with bar, preserve_mode(self.model):
            bar.update(self._epoch)
            while state.epoch < epochs:
                # Algorithm 1: the network's steps on the objective with the present prior, ...
                if self._epoch == state.epoch:
                    bar.set_postfix(loss=f"{self.train_epoch()['loss']:.3f}")
                    bar.update()
                    save(schedule.is_due_within(self._epoch))  # updates may take long
                # ... then the prior's steps on the evidence at the present parameters.
                self._report_update(algorithm.end_of_epoch(problem, state, self._epoch))
                save(self._epoch == epochs)
            self._report_update(algorithm.finish(problem, state))
        self._seconds = earlier + time.perf_counter() - started
        return OnlineResult(
            state.posterior,
            state.evidences[-1] if state.evidences else math.nan,
            state.kept_epoch,
            self._records,
            state.evidences_of_steps,
            self.probabilities,
            self._seconds,
            self.learner,
        )

    def _warn_of_fewer_examples(self) -> None:
        """Warn if the curvature's loader has fewer examples by a batch or more; collective."""
        N, options = self.learner.problem.num_data, self.learner.options.curvature
        number = count_on_ranks(self.train_loader, self.ranks, options)
        if (number - N) * (length(self.train_loader) or N) >= number:  # drop_last omits fewer
            warnings.warn(
                f"The curvature_loader has {N} examples, and the train_loader {number}. The weight "
                f"decays T·δ/N are those of {N} examples, and too large if the training data has "
                "more. Pass a loader of all training data: by default, updates use a sample of it.",
                RuntimeWarning,
                stacklevel=3,
            )

    # --- an epoch of network steps ---

    def train_epoch(self) -> Record:
        """Make the steps of the next epoch and return its record.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: targets do not fit the outputs (checked in the first epoch), or there is no
                data.
        """
        with own_random_numbers(self.ranks):
            if self.scheduler is None:
                self._let_rate_fall()
            record = self._take_steps(self._epoch + 1)
        self._epoch += 1
        self._report(record)
        accuracy = f", accuracy {record['accuracy']:.4g}" if "accuracy" in record else ""
        _logger.info(
            "epoch %d of %d: loss %.4g%s (%.1f s)",
            self._epoch, self._epochs, record["loss"], accuracy, record["seconds"],
        )  # fmt: skip
        return record

    def _let_rate_fall(self) -> None:
        """Let the rate fall, if the last third of a regression begins after much noise."""
        problem, state = self.learner.problem, self.learner.state
        if self._epoch != self._first_late or not problem.averages:
            return
        if not _learns_noise(problem, state):
            return
        losses = [record["loss"] for record in self._records if record["kind"] == "epoch"]
        data = self.train_loader
        noise = noise_of_steps(problem, state, losses, data, self._in_precision_of_steps)
        self._falls = noise > LARGEST_NOISE
        if self._falls:
            _logger.info(
                "the noise of the steps is %.2f nats per target: the learning rate falls to zero "
                "in the last third of the epochs",
                noise,
            )
            self.scheduler = self._falling_rate()

    def _in_precision_of_steps(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as the steps do, but without DDP, whose calls are collective."""
        if self.fabric is None:
            return self.model(*args, **kwargs)
        precision = self.fabric.strategy.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            return precision.convert_output(self.model(*args, **kwargs))

    def _falling_rate(self) -> LRScheduler:
        steps = self.learner.state.steps[-1] / self._epoch * (self._epochs - self._epoch)
        return PolynomialLR(self.learner.problem.parts[0].optimizer, round(steps))

    def _end_fall_with_training(self) -> None:
        """Let a restored falling rate reach zero after another number of epochs."""
        assert isinstance(self.scheduler, PolynomialLR)
        steps = self.learner.state.steps[-1] / self._epoch * (self._epochs - self._epoch)
        self.scheduler.total_iters = self.scheduler.last_epoch + round(steps)

    def _take_steps(self, epoch: int) -> Record:
        start = time.perf_counter()
        self.model.train()
        state = self.learner.state
        variance = state.hyperparameters.sigma_noise.square().item()
        if self._own_damping is not None:
            self._set_damping(self._own_damping, variance)
        for sampler in () if self._is_alone else samplers_of(self.train_loader):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)  # otherwise it would repeat its order
        # On the device; summed and read once at the end, because reading a loss waits for its step.
        # Losses, penalties, hits and labels of each step, and the number of examples.
        values: list[tuple[Tensor | float, ...]] = []
        examples, latest = 0, None
        source = self.train_loader if self.probabilities is None else self.probabilities
        for item in each_batch(source, f"Epoch {epoch}", self.progress):
            indices, batch = (None, item) if self.probabilities is None else item
            x, y = split_batch(batch, self._task.options)
            own = to_device(x, self.device), to_device(y, self.device)
            # The last batch may be too small for this rank to have a part of it. It must still take
            # part, because the others wait for its gradients. So it runs on its latest examples,
            # with weight zero.
            counts = self._is_alone or len(own[1]) > 0
            latest = own if counts else latest
            if latest is None:
                raise ValueError(
                    f"Rank {self.ranks.rank} of {self.ranks.size} has no example of the first "
                    "batch. Each batch except the last needs at least as many examples as there "
                    "are ranks."
                )
            x, y = latest
            of_step = self._step(x, self._task.targets(self.model, x, y), indices, counts)
            if counts:
                values.append(of_step)
                examples += len(y)
        self._targets_are_checked = True
        if self.probabilities is not None:
            self.probabilities.end_epoch()
        totals = self._totals_over_ranks(values, examples)
        if not totals[-1]:
            raise ValueError(f"Epoch {epoch} had no training examples. {NO_BATCH}")
        if not all(map(math.isfinite, totals)):
            raise FloatingPointError(
                f"The training loss is not finite in epoch {epoch}. Likely causes: NaN in the "
                "data, or a learning rate that is too large. Try a tenth of the learning rate."
            )
        loss, prior, correct, terms, examples = totals
        record: Record = {
            "kind": "epoch",
            "epoch": epoch,
            "loss": loss / examples,
            "objective": loss / examples / variance + prior / examples,
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": time.perf_counter() - start,
        }
        if state.likelihood.has_labels:
            record["accuracy"] = correct / terms if terms else 0.0
        return record

    def _totals_over_ranks(
        self, values: Sequence[tuple[Tensor | float, ...]], examples: int
    ) -> list[float]:
        """Return the sums of the steps' numbers and of the examples, over all ranks; collective."""
        totals = torch.zeros(5, dtype=torch.float64, device=next(self.model.parameters()).device)
        for total, of_steps in zip(totals, zip(*values, strict=True), strict=False):
            if isinstance(of_steps[0], Tensor):
                total += torch.stack(of_steps).double().sum()
            else:
                total += math.fsum(of_steps)
        totals[4] = examples
        self.ranks.sum_([totals])
        return totals.tolist()

    def _step(
        self, x: Any, y: Tensor, indices: Tensor | None, counts: bool
    ) -> tuple[Tensor | float, ...]:
        """Take one step and return the batch's four sums, see `_take_steps`.

        ``indices`` are the examples' indices, if known. ``counts`` is False if this rank has no
        example of the batch and runs on others.
        """
        likelihood = self.learner.state.likelihood
        self.optimizer.zero_grad()
        # A copy, because a model may change its input in place, and batches may live for many
        # epochs.
        args, kwargs = arguments(self.model, x.clone() if isinstance(x, Tensor) else deepcopy(x))
        unseen: Any = nullcontext()
        if self._kfac is not None and not counts:  # its factors must not count examples twice
            unseen = self._kfac.preconditioner.paused()
        with unseen:
            f = logits_of(self._forward(*args, **kwargs))
            if not self._targets_are_checked:
                check_output(f)
                self._task.check(f, y)
            data_loss = loss_sum(f, y, likelihood)
            if counts and self.probabilities is not None:
                self.probabilities.add(indices, f)
            objective = data_loss / len(f)
            if not self._is_alone:
                objective = self._mean_over_ranks(data_loss, len(f), counts)
            if self.learner.problem.parts[-1].scales_loss:
                objective = objective * likelihood.step_scale()
            scale: list[Tensor | float] = [1.0]
            if self.fabric is None:
                objective.backward()
            else:
                # In float16 Fabric multiplies the objective, and so all gradients, by a factor that
                # changes from step to step. The prior's gradient needs the same factor: the hook
                # records it as the gradient of the objective itself.
                objective.register_hook(lambda factor: scale.insert(0, factor))
                self.fabric.backward(objective)
        problem, state = self.learner.problem, self.learner.state
        penalty = algorithm.penalty(problem, state, scale[0], with_value=True)
        assert penalty is not None  # its value was requested
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        correct = terms = data_loss = data_loss.detach()
        if (counted := counted_terms(y, likelihood)) is not None:
            correct, terms = (likelihood.predicted(f) == y).sum(), counted.sum()  # none is IGNORED
        return data_loss, penalty * len(f), correct, terms

    def _mean_over_ranks(self, data_loss: Tensor, examples: int, counts: bool) -> Tensor:
        """Return this rank's loss; its average over ranks is the mean over examples."""
        of_all = data_loss.new_tensor([examples if counts else 0], dtype=torch.float64)
        self.ranks.sum_([of_all])
        weight = self.ranks.size / of_all[0] if counts else torch.zeros_like(of_all[0])
        return data_loss * weight.to(data_loss.dtype)

    def _set_damping(self, own_damping: float, variance: float) -> None:
        """Set K-FAC's damping to its own plus the prior's curvature σ²·T·δ/N of each tensor."""
        assert self._kfac is not None
        decays = dict(zip(self.learner.problem.named, self.learner.state.decays, strict=True))
        preconditioner = self._kfac.preconditioner
        preconditioner.damping = {
            name: own_damping + variance * decays[name] for name in preconditioner.names
        }

    # --- records ---

    def _report_update(self, numbers: Mapping[str, float]) -> None:
        """Report the learner's latest update, if there was one."""
        if not numbers:
            return
        record = {"kind": "update", "epoch": self._epoch, **self.learner.state.record}
        self._report(record)
        _logger.info(
            "update after epoch %d: log marginal likelihood per example %.4f, of %d examples "
            "(%.1f s)",
            self._epoch, record["evidence_per_example"], record["num_examples"],
            sum(record["seconds"].values()),
        )  # fmt: skip

    def _report(self, record: Record) -> None:
        self._records.append(record)
        if self.on_record is not None and self.ranks.rank == 0:
            self.on_record(record)

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume: plain data and tensors.

        Collective. The state is the same on all ranks, except for their seconds. Any number of
        ranks can load it.
        """
        random = random_state(generators_of(self.train_loader, self.curvature_loader))
        probabilities = None if self.probabilities is None else self.probabilities.state_dict()
        return {
            "epoch": self._epoch,
            "epochs": self._epochs,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "falls": self._falls,
            "precision": self.fabric.strategy.precision.state_dict() if self.fabric else {},
            "learner": self.learner.state_dict(),
            # Usually the same on all ranks, see `own_random_numbers`.
            "random": self.ranks.gather(random),
            "records": self._records,
            "probabilities": probabilities,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ValueError: the state belongs to another run, lacks entries, or has a schedule where
                this loop has none, or the reverse; or the learning rate of the saved run has
                fallen to zero, and there are more epochs now.
        """
        parts = "model", "optimizer", "scheduler", "precision", "learner", "probabilities"
        others = "falls", "epoch", "epochs", "random", "records", "seconds"
        check_keys("OnlineTraining", state, [*parts, *others])
        own, saved = None if self._falls else self.scheduler, state["scheduler"]
        if state["falls"] and own is not None:
            raise ValueError(
                "The saved run has no schedule of yours: OnlineTraining lets its learning rate "
                "fall. To resume it, pass scheduler=None."
            )
        if not state["falls"] and (saved is None) != (own is None):
            has, way = ("no", "None") if saved is None else ("a", "the same schedule")
            raise ValueError(
                f"The saved run has {has} learning-rate schedule. To resume it, pass {way} as "
                "scheduler=."
            )
        # Whether epochs follow, and the last one has another number than in the saved run.
        has_new_end = state["epoch"] < self._epochs != state["epochs"]
        if state["falls"] and has_new_end and saved["last_epoch"] >= saved["total_iters"]:
            raise ValueError(
                f"The learning rate of the saved run has fallen to zero after {state['epoch']} "
                f"epochs. It cannot train for {self._epochs} epochs. Start a new run with this "
                "number."
            )
        self.scheduler = own
        self.learner.load_state_dict(state["learner"])
        self._start()  # start again, from this state
        scale_loss(self.learner.problem, self.learner.state)
        self._epoch, self._seconds, self._records = state["epoch"], state["seconds"], []
        self.model.load_state_dict(state["model"])
        self._falls = state["falls"]
        if self._falls:  # before the optimiser's state, because a schedule changes the rate
            self.scheduler = self._falling_rate()
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self._falls and has_new_end:
            self._end_fall_with_training()
        elif has_new_end:  # the last third may have begun already
            self._first_late = max(self.learner.options.schedule.num_early + 1, self._epoch)
        if self.fabric is not None:
            self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.probabilities is not None:
            self.probabilities.load_state_dict(state["probabilities"])
        for record in state["records"]:  # write the log again from its start
            self._report(record)
        # Last, so that nothing above draws from the restored generators. Another number of ranks
        # continues from the first rank's state, which ranks with one seed have in common.
        random = state["random"]
        own = random[self.ranks.rank if len(random) == self.ranks.size else 0]
        set_random_state(own, generators_of(self.train_loader, self.curvature_loader))


def _checked_epochs(
    model: nn.Module, learner: PriorLearner, kfac: KFAC | None, compile_mode: CompileMode | None
) -> int:
    """Return the number of epochs.

    Raises:
        ValueError: the learner has none, or K-FAC should train a compiled model.
    """
    check_module(model)
    epochs = learner.options.schedule.epochs
    if epochs is None:
        raise ValueError("The loop needs a number of epochs. Pass Schedule(epochs=...).")
    if compile_mode is not None and kfac is not None:
        raise ValueError(
            "K-FAC (optimizer.name=kfac) cannot place hooks in a compiled model. Train without "
            "compile, or with another optimiser."
        )
    return epochs


def _learns_noise(problem: Problem, state: LearnerState) -> bool:
    """Return whether the noise of a "regression" or the scale of a "student_t" is learned.

    A member of an ensemble replays the noise that another network has learned.
    """
    history = problem.replayed.values()
    if state.likelihood.has_sigma:
        return state.hyperparameters.learn_sigma_noise or len({float(s) for _, s, _ in history}) > 1
    if not isinstance(getattr(state.likelihood, "of", state.likelihood), StudentT):
        return False
    scales = {float(likelihood_of(text).parameters["scale"]) for *_, text in history}
    return "scale" in problem.learned_by_evidence or len(scales) > 1


def _warn_of_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            warnings.warn(
                f"Layer '{name}' ({type(module).__name__}) normalises the examples of each rank "
                "separately, so the steps differ from the steps of one process. On GPUs, "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) normalises over all ranks.",
                stacklevel=3,
            )
            return


def ranks_of(fabric: "Fabric | None") -> Ranks:
    """Return the ranks that a Fabric has launched; this process alone for None.

    Raises:
        NotImplementedError: a strategy that splits a model over ranks, or copies it to several
            devices of one process.
        RuntimeError: the Fabric was not launched.
        ValueError: the Fabric has one device, but there are several processes.
    """
    running, world_size = Ranks().size, 1 if fabric is None else fabric.world_size
    if world_size == running == 1:
        return Ranks(None)
    if fabric is None or world_size == 1:
        raise ValueError(
            f"This is one of {running} processes of torch.distributed, but the Fabric has a single "
            "device. Each process would train its own network on its part of the data. Pass "
            f'fabric=Fabric(devices={running}, strategy="ddp") after its launch(), or leave the '
            "process group (torch.distributed.destroy_process_group())."
        )
    if (strategy := type(fabric.strategy).__name__) != "DDPStrategy":
        raise NotImplementedError(
            f"The Fabric's strategy is {strategy}, but the curvature needs the whole network on "
            'each rank. Pass Fabric(strategy="ddp").'
        )
    if running != world_size:
        raise RuntimeError(
            f"The Fabric is for {world_size} processes, but this is one of {running}. Call "
            "fabric.launch() first."
        )
    return Ranks()
