"""The online loop: network steps, and now and then an update of the prior by the evidence.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1. The method is in
`marglik.training.algorithm`; here are the network's steps, checkpoints and records.

The objective on a batch of M examples is 1/M Σ ℓ/σ² + ½ Σ_g (T δ_g/N) ‖θ_g‖². Over the data it is
−T/N times the tempered log joint, up to a constant. Gradient steps are taken on σ² times the
objective, so that learning rates do not depend on the noise of regression. ℓ is the loss of an
example, for a sequence the sum over the positions that count. Code that takes the mean over R
positions instead has gradients R times smaller: here SGD needs a learning rate R times smaller
than there (Adam's steps do not grow with the gradient).

`KFAC` divides the gradient by damped curvature. With damping on the product, the prior's curvature
σ² T δ_g/N is added to the damping, so that a step is a natural-gradient step on the posterior.

With several ranks, the M examples of a batch are spread over them. Each rank multiplies its own sum
of losses by (ranks / M); `DistributedDataParallel` averages the gradients over ranks; then the
prior's gradient is added. The step equals that of one process with the whole batch, up to the order
of sums.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler
from tqdm.auto import tqdm

from kfac_backend.engine.batches import arguments, each_batch, length, split_batch, to_device
from kfac_backend.engine.model_calls import check_output, logits_of
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import counted_terms, loss_sum
from kfac_backend.optimizer import KFAC
from kfac_backend.options import check_keys
from kfac_backend.ranks import Ranks
from marglik.eval_mode import preserve_mode
from marglik.loaders import (
    Loader,
    check_shards,
    check_workers,
    generators_of,
    samplers_of,
)
from marglik.prediction.suspicious_labels import TrainingProbabilities
from marglik.prediction.verdict import verdict
from marglik.storage.checkpoint import Checkpoints
from marglik.training import algorithm
from marglik.training.learner import PriorLearner
from marglik.training.random_state import own_random_numbers, random_state, set_random_state

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds

_logger = logging.getLogger(__name__)

Record = dict[str, Any]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Of `torch.compile`; the last two record CUDA graphs on a GPU."""


@dataclass
class OnlineResult:
    """What the loop learned. The model holds the parameters that the schedule ends with."""

    laplace: Any
    """The `Posterior` at the model's parameters, with the learned hyperparameters; None with
    Schedule(updates=0)."""
    evidence: float
    """The log marginal likelihood (nats, a sum over the data) there; NaN without ``laplace``."""
    epoch: int
    """The epoch that the parameters are of: the last one, or that of the best update."""
    records: list[Record] = field(default_factory=list)
    """One record per epoch and per update, in the order in which they were made."""
    evidences: list[float] = field(default_factory=list)
    """The evidence (nats) before every hyperparameter step."""
    training_probabilities: TrainingProbabilities | None = None
    """What the steps predicted for each training example; see `marglik.suspicious_labels`."""
    seconds: float = 0.0
    """Wall-clock time of the loop; of a run that was resumed, the sum over its parts."""
    learner: PriorLearner | None = None
    """What learned them; `PriorLearner.replay` gives other networks their course."""

    def verdict(self, plain: nn.Module, test: Iterable[Any], **options: Any) -> str:
        """What the learned weight decays gained against a plain network, in one sentence.

        Args:
            plain: the same network trained without them: with a fixed weight decay, a learning rate
                that falls to zero, and no average.
            test: (x, y), or mappings, that neither was trained on.
            options: further arguments of `marglik.verdict`, such as ``held_out`` to scale the
                temperatures of both first.
        """
        posterior = self.laplace
        own = posterior.model, plain, test, posterior.likelihood
        return verdict(*own, targets=posterior.options, **options)


class OnlineTraining:
    """Trains a network and its prior together: the loop around a `PriorLearner`.

    An object serves one `run`. The constructor checks the options and counts the data. Then `run`
    repeats: an epoch of network steps, then, if the schedule says so, an update of the prior; the
    next epoch uses the new weight decays T·δ/N. It may write a checkpoint of `state_dict` after
    each. At its end the model holds the average of its parameters.

    With a Fabric of several devices, all ranks create and run this object in the same way. Each
    starts from the same parameters and has a shard of the data, of the same number of batches, and
    no example is in two shards. N is the number of all examples. Steps and updates equal those of
    one process whose batches are the ranks' batches together, up to the order of sums; only
    BatchNorm in train mode sees the examples of its own rank alone. Dropout, labels drawn from the
    model, and what loaders draw without a generator of their own, differ between ranks; seed and
    number of ranks determine them. So code that shuffles before it shards needs a seed of its own,
    as ``DistributedSampler(drop_last=True)`` has.

    Args:
        model: the network; frozen parameters have neither prior nor curvature.
        optimizer: the network's optimiser, without weight decay: the loop adds the prior's.
        train_loader: batches (x, y), or mappings, for the network's steps.
        learner: learns the weight decays, and says with which likelihood and targets; not started,
            with the number of epochs in its schedule.
        scheduler: the optimiser's learning-rate schedule, stepped after every batch; see
            `marglik.averaging_schedule`. None keeps the rate.
        curvature_loader: data of the curvature pass; None takes the training loader.
        held_out: batches that the network is not trained on, from which the share of wrong labels
            is learned, or which correct the decays, see `PriorLearner.start`.
        fabric: devices and precision, launched; None takes the model's device, in full precision.
        compile_mode: mode of `torch.compile` for the network's steps; None does not compile.
        on_record: called with the record of each epoch and each update when it is made; after a
            resume, first with all earlier ones. Called on rank 0 alone.
        progress: whether to show progress bars, on rank 0 alone.
        keep_probabilities: whether to keep what the steps predict for each training example, see
            `marglik.suspicious_labels`.

    Raises:
        ValueError: no number of epochs; no data; K-FAC with a compiled model; several processes of
            torch.distributed without a Fabric of them; shards that do not fit together.
        NotImplementedError: a Fabric's strategy other than DDP.
        RankError: ranks with different models or options.
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
        fabric: "Fabric | OneDevice | None" = None,
        compile_mode: CompileMode | None = None,
        on_record: Callable[[Record], None] | None = None,
        progress: bool = False,
        keep_probabilities: bool = True,
    ) -> None:
        check_module(model)
        epochs = learner.options.schedule.epochs
        if epochs is None:
            raise ValueError("The loop needs a number of epochs; pass Schedule(epochs=...).")
        kfac = optimizer if isinstance(optimizer, KFAC) else None
        if compile_mode is not None and kfac is not None:
            raise ValueError(
                "A compiled model hides its layers from K-FAC (optimizer.name=kfac). Train without "
                "compile, or with another optimiser."
            )
        self.model = model
        self.train_loader = train_loader
        self.curvature_loader = train_loader if curvature_loader is None else curvature_loader
        self.scheduler = scheduler
        self.fabric: Any = fabric or OneDevice(next(model.parameters()).device)
        self.ranks = ranks_of(self.fabric)
        """The processes that train together, each on its shard of the data."""
        self._is_alone = self.ranks.size == 1
        self.on_record = on_record
        self.progress = progress and self.ranks.rank == 0
        self.learner = learner
        """Holds the method and its state; network, optimiser and data are this object's."""
        # Before Fabric wraps the network in DDP, so that ranks which differ end with an error that
        # names the difference.
        check_shards(train_loader, self.ranks)
        self._epochs = epochs
        self._start = partial(
            learner.start,
            model,
            optimizer,
            self.curvature_loader,
            epochs,
            steps_per_epoch=length(train_loader),
            ranks=self.ranks,
            sums_terms=True,
            held_out=held_out,
            hooks="none",
        )
        self._start()
        if not self._is_alone:
            _warn_of_batch_norm(model)
        # dynamic=False: only two batch sizes occur, the usual one and that of the last batch. Each
        # gets a graph of its own, and none has a symbolic size.
        compiled: Any = (
            model
            if compile_mode is None
            else torch.compile(model, mode=compile_mode, dynamic=False)
        )
        # Only steps go through the wrapped network; all else uses the caller's module.
        self._forward, self.optimizer = self.fabric.setup(compiled, optimizer)
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
        self._epoch = 0
        """Number of epochs of network steps; an update may still have to follow the last."""
        self._records: list[Record] = []
        self._seconds = 0.0

    def run(self, checkpoints: Checkpoints | None = None) -> OnlineResult:
        """Train for all epochs; the model ends with the parameters that the schedule names.

        The model is left in the mode (train or eval) that it was in.

        Args:
            checkpoints: where checkpoints are written: at the start, before each update of the
                prior, at the end, and whenever one is due. If there is one already, training
                continues from it; on a CPU with the same number of threads the result is the same
                to the bit.

        Raises:
            FloatingPointError: the loss or the evidence is not finite.
            ValueError: a checkpoint of another run; checkpoints with a loader that has persistent
                workers.
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
                # A run that is killed within its first epoch can then be resumed like any other.
                checkpoints.save(self.state_dict())
        earlier = self._seconds

        def save(needed: bool) -> None:
            self._seconds = earlier + time.perf_counter() - started
            if checkpoints is not None and (needed or checkpoints.is_due):
                checkpoints.save(self.state_dict())

        hidden = None if self.progress else True  # None: shown on a terminal only
        bar = tqdm(desc="Training", unit="epoch", disable=hidden, total=epochs)
        problem, state = self.learner.problem, self.learner.state
        problem.progress, schedule = self.progress, problem.options.schedule
        with bar, preserve_mode(self.model):
            bar.update(self._epoch)
            while state.epoch < epochs:
                # Algorithm 1: the network's steps on the objective of the present prior, ...
                if self._epoch == state.epoch:
                    bar.set_postfix(loss=f"{self.train_epoch()['loss']:.3f}")
                    bar.update()
                    save(schedule.is_due_within(self._epoch))  # an update may take as long
                # ... then the prior's steps on the evidence of the present parameters.
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

    # --- an epoch of network steps ---

    def train_epoch(self) -> Record:
        """Take the steps of the next epoch; returns its record.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: targets that do not fit the outputs (checked in the first epoch), or no
                data.
        """
        with own_random_numbers(self.ranks):
            record = self._take_steps(self._epoch + 1)
        self._epoch += 1
        self._report(record)
        accuracy = f", accuracy {record['accuracy']:.4g}" if "accuracy" in record else ""
        _logger.info(
            "epoch %d of %d: loss %.4g%s (%.1f s)",
            self._epoch, self._epochs, record["loss"], accuracy, record["seconds"],
        )  # fmt: skip
        return record

    def _take_steps(self, epoch: int) -> Record:
        start = time.perf_counter()
        self.model.train()
        state = self.learner.state
        variance = state.hyperparameters.sigma_noise.square().item()
        if self._own_damping is not None:
            self._set_damping(self._own_damping, variance)
        for sampler in () if self._is_alone else samplers_of(self.train_loader):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)  # it would else repeat its order
        # On the device, and summed and read once at the end: reading a loss waits for its step.
        # Losses, penalties, hits and labels of each step, and the number of examples.
        values: list[tuple[Tensor | float, ...]] = []
        examples, latest = 0, None
        source = self.train_loader if self.probabilities is None else self.probabilities
        for item in each_batch(source, f"Epoch {epoch}", self.progress):
            indices, batch = (None, item) if self.probabilities is None else item
            x, y = split_batch(batch, self._task.options)
            own = to_device(x, self.fabric.device), to_device(y, self.fabric.device)
            # The last batch may be too small for this rank to have a part of it. It must take part
            # all the same, since the others wait for its gradients: it runs on its latest examples,
            # with weight zero.
            counts = self._is_alone or len(own[1]) > 0
            latest = own if counts else latest
            if latest is None:
                raise ValueError(
                    f"Rank {self.ranks.rank} of {self.ranks.size} has no example of the first "
                    "batch; each batch but the last must have at least as many examples as there "
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
        totals = torch.zeros(5, dtype=torch.float64, device=next(self.model.parameters()).device)
        for total, of_steps in zip(totals, zip(*values, strict=True), strict=False):
            if isinstance(of_steps[0], Tensor):
                total += torch.stack(of_steps).double().sum()
            else:
                total += math.fsum(of_steps)
        totals[4] = examples
        self.ranks.sum_([totals])
        loss, prior, correct, terms, examples = totals.tolist()
        if not examples:
            raise ValueError("The training data is empty: the loader yielded no batch.")
        if not torch.isfinite(totals).all():
            raise FloatingPointError(
                f"The training loss is not finite in epoch {epoch}. Likely causes: NaN in the "
                "data, or too large a learning rate; try a tenth of it."
            )
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

    def _step(
        self, x: Any, y: Tensor, indices: Tensor | None, counts: bool
    ) -> tuple[Tensor | float, ...]:
        """Take one step; returns the batch's four sums, see `_take_steps`.

        ``indices`` are the examples', if they are known. ``counts`` is False where this rank has no
        example of the batch and runs on others.
        """
        likelihood = self.learner.state.likelihood
        self.optimizer.zero_grad()
        # A copy, since a model may change its input in place, and batches may live for many epochs.
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
            # In float16 Fabric multiplies the objective, and so all gradients, by a factor that
            # changes from step to step. The prior's gradient must get the same one: the hook
            # records it as the gradient of the objective itself.
            scale: list[Tensor | float] = [1.0]
            if not isinstance(self.fabric, OneDevice):
                objective.register_hook(lambda factor: scale.insert(0, factor))
            self.fabric.backward(objective)
        problem, state = self.learner.problem, self.learner.state
        penalty = algorithm.penalty(problem, state, scale[0], with_value=True)
        assert penalty is not None  # its value is asked for
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        correct = terms = data_loss = data_loss.detach()
        if (counted := counted_terms(y, likelihood)) is not None:
            correct, terms = (likelihood.predicted(f) == y).sum(), counted.sum()  # IGNORED is none
        return data_loss, penalty * len(f), correct, terms

    def _mean_over_ranks(self, data_loss: Tensor, examples: int, counts: bool) -> Tensor:
        """The loss that this rank differentiates; the ranks' average is the mean over examples."""
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
        """Report the learner's latest update, if it has made one: there are then numbers to log."""
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
        """All that is needed to continue: plain data and tensors.

        Collective. The state is the same on all ranks, except for their seconds, and can be loaded
        with any number of ranks.
        """
        random = random_state(generators_of(self.train_loader, self.curvature_loader))
        probabilities = None if self.probabilities is None else self.probabilities.state_dict()
        return {
            "epoch": self._epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "learner": self.learner.state_dict(),
            # Usually the same on all ranks, see `own_random_numbers`.
            "random": self.ranks.gather(random),
            "records": self._records,
            "probabilities": probabilities,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: the state of another run, or one that lacks entries.
        """
        parts = "model", "optimizer", "scheduler", "precision", "learner", "probabilities"
        check_keys("OnlineTraining", state, [*parts, "epoch", "random", "records", "seconds"])
        self.learner.load_state_dict(state["learner"])
        self._start()  # again, from this state
        self._epoch, self._seconds, self._records = state["epoch"], state["seconds"], []
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.probabilities is not None:
            self.probabilities.load_state_dict(state["probabilities"])
        for record in state["records"]:  # the log is written again from its start
            self._report(record)
        # Last, so that nothing above draws from the restored generators. Another number of ranks
        # goes on from the first one's state, which ranks of one seed have in common.
        random = state["random"]
        own = random[self.ranks.rank if len(random) == self.ranks.size else 0]
        set_random_state(own, generators_of(self.train_loader, self.curvature_loader))


def _warn_of_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            warnings.warn(
                f"Layer '{name}' ({type(module).__name__}) normalises the examples of each rank "
                "separately, so that steps differ from those of one process. On GPUs, "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) normalises over all.",
                stacklevel=3,
            )
            return


class OneDevice:
    """What the loop asks of a Fabric, for one device in full precision: Lightning loads slowly."""

    world_size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Full precision has no state; a scaler that is off has the methods.
        self.strategy: Any = SimpleNamespace(precision=GradScaler(enabled=False))

    def setup(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Both as they are."""
        return model, optimizer

    def backward(self, objective: Tensor) -> None:
        """Add the gradients."""
        objective.backward()


def ranks_of(fabric: "Fabric | OneDevice") -> Ranks:
    """The ranks that a Fabric has launched; this process alone if it has one device.

    Raises:
        NotImplementedError: a strategy that splits a model over ranks, or copies it to several
            devices of one process.
        RuntimeError: a Fabric that was not launched.
        ValueError: a Fabric of one device in one of several processes.
    """
    running, strategy = Ranks().size, type(fabric.strategy).__name__
    if fabric.world_size == running == 1:
        return Ranks(None)
    if fabric.world_size == 1:
        raise ValueError(
            f"This is one of {running} processes of torch.distributed, but the Fabric has a "
            "single device: each process would train a network of its own on its part of the "
            f'data. Pass fabric=Fabric(devices={running}, strategy="ddp"), after its launch(), '
            "or leave the process group (torch.distributed.destroy_process_group())."
        )
    if strategy != "DDPStrategy":
        raise NotImplementedError(
            f"The Fabric's strategy is {strategy}; the curvature needs the whole network on each "
            'rank. Pass Fabric(strategy="ddp").'
        )
    if running != fabric.world_size:
        raise RuntimeError(
            f"The Fabric is for {fabric.world_size} processes, but this is one of {running}: call "
            "fabric.launch() first."
        )
    return Ranks()
