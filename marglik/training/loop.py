"""The online loop: network steps, and now and then an update of the prior by the evidence.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1. The method is in
`marglik.training.learner`, the network's steps and their objective in `marglik.training.network`.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from kfac_backend.model.checks import check_module
from marglik.eval_mode import eval_mode, kept_mode
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.prediction.suspicious_labels import TrainingProbabilities
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.provenance import versions
from marglik.training.learner import PriorLearner
from marglik.training.loaders import Loader
from marglik.training.network import CompileMode, NetworkTraining, Record
from marglik.training.random_state import (
    check_workers,
    generators_of,
    random_state,
    set_random_state,
)
from marglik.training.ranks import check_shards, own_random_numbers, ranks_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["OnlineResult", "OnlineTraining"]

_logger = logging.getLogger(__name__)


@dataclass
class OnlineResult:
    """What the loop learned. The model holds the parameters that the schedule ends with."""

    laplace: Any
    """The Laplace approximation at the model's parameters, with the learned hyperparameters; None
    with Schedule(updates=0)."""
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
    kept: Hyperparameters | None = None
    """The decays and σ at the end, for other networks; see `PriorLearner.kept_hyperparameters`."""


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
            `marglik.settling_rate`. None keeps the rate.
        curvature_loader: data of the curvature pass; None takes the training loader.
        fabric: devices and precision, launched; None takes the model's device, in full precision.
        compile_mode: mode of `torch.compile` for the network's steps; None does not compile.
        prior_is_damping: whether `KFAC`, damped on the product, adds each tensor's weight decay
            T·δ/N to its damping; no effect on other optimisers.
        monitor: called with the epoch's number after each epoch, with the model in eval mode; the
            numbers that it returns become part of the epoch's record. Called on all ranks.
        on_record: called with the record of each epoch and each update when it is made; after a
            resume, first with all earlier ones. Called on rank 0 alone.
        progress: whether to show progress bars, on rank 0 alone.

    Raises:
        ValueError: no number of epochs; no data; several processes of torch.distributed without a
            Fabric of them; shards that do not fit together.
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
        fabric: "Fabric | None" = None,
        compile_mode: CompileMode | None = None,
        prior_is_damping: bool = True,
        monitor: Callable[[int], Mapping[str, float]] | None = None,
        on_record: Callable[[Record], None] | None = None,
        progress: bool = False,
    ) -> None:
        check_module(model)
        epochs = learner.schedule.epochs
        if epochs is None:
            raise ValueError("The loop needs a number of epochs; pass Schedule(epochs=...).")
        self.model = model
        self.train_loader = train_loader
        self.curvature_loader = train_loader if curvature_loader is None else curvature_loader
        self.scheduler = scheduler
        self.fabric = fabric or _fabric_of(model)
        self.ranks = ranks_of(self.fabric)
        """The processes that train together, each on its shard of the data."""
        self.monitor = monitor
        self.on_record = on_record
        self.progress = progress and self.ranks.rank == 0
        self.learner = learner
        """Holds the method and its state; network, optimiser and data are this object's."""
        learner.progress = self.progress
        # Before the network is wrapped in DDP, so that ranks which differ end with an error that
        # names the difference.
        self._agree()
        self.network = NetworkTraining(
            model,
            optimizer,
            train_loader,
            learner,
            self.fabric,
            scheduler=scheduler,
            compile_mode=compile_mode,
            prior_is_damping=prior_is_damping,
            progress=self.progress,
            ranks=self.ranks,
        )
        self._start = (model, optimizer, self.curvature_loader, epochs)
        learner.start(*self._start, ranks=self.ranks, sums_terms=True)
        self._epoch = 0
        """Number of epochs of network steps; an update may still have to follow the last."""
        self._records: list[Record] = []
        self._seconds = 0.0

    @property
    def hyperparameters(self) -> Hyperparameters:
        """δ of the groups, and σ."""
        return self.learner.hyperparameters

    @property
    def num_data(self) -> int:
        """N, the number of examples of all ranks."""
        return self.learner.num_data

    def weight_decays(self) -> Tensor:
        """The weight decay T·δ/N of each group at present, (groups,)."""
        return self.learner.weight_decays()

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
        epochs = self._start[-1]
        if checkpoints is not None:
            check_workers(self.train_loader, self.curvature_loader)
            checkpoints.ranks = self.ranks
            if checkpoints.exists():
                self.load_state_dict(checkpoints.load(self.fabric.device))
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
        with bar, kept_mode(self.model):
            bar.update(self._epoch)
            while self.learner.ended_epochs < epochs:
                # Algorithm 1: the network's steps on the objective of the present prior, ...
                if self._epoch == self.learner.ended_epochs:
                    bar.set_postfix(loss=f"{self._train_epoch()['loss']:.3f}")
                    bar.update()
                    save(self.learner.is_due(self._epoch))  # an update may take as long
                # ... then the prior's steps on the evidence of the present parameters.
                self._report_update(self.learner.end_of_epoch(self._epoch))
                save(self._epoch == epochs)
            self._report_update(self.learner.end_of_training())
        self._seconds = earlier + time.perf_counter() - started
        return OnlineResult(
            self.learner.posterior,
            self.learner.evidences[-1] if self.learner.evidences else math.nan,
            self.learner.kept_epoch,
            self._records,
            self.learner.evidences_of_steps,
            self.network.probabilities,
            self._seconds,
            self.learner.kept_hyperparameters(),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: plain data and tensors.

        Collective. The state is the same on all ranks, except for their seconds, and can be loaded
        with any number of ranks.
        """
        return {
            "epoch": self._epoch,
            "model": self.model.state_dict(),
            "optimizer": self.network.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "learner": self.learner.state_dict(),
            "random": self._random_states(),
            "records": self._records,
            "probabilities": self.network.probabilities.state_dict(),
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: the state of another run.
        """
        self.learner.load_state_dict(state["learner"])
        self.learner.start(*self._start, ranks=self.ranks, sums_terms=True)
        self._epoch, self._seconds, self._records = state["epoch"], state["seconds"], []
        self.model.load_state_dict(state["model"])
        self.network.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        self.network.probabilities.load_state_dict(state["probabilities"])
        for record in state["records"]:  # the log is written again from its start
            self._report(record)
        # Last, so that nothing above draws from the restored generators. Another number of ranks
        # goes on from the first one's state, which ranks of one seed have in common.
        random = state["random"]
        own = random[self.ranks.rank if len(random) == self.ranks.size else 0]
        set_random_state(own, self._generators)

    def _random_states(self) -> list[dict[str, Any]]:
        """Each rank's random state; usually all are the same, see `own_random_numbers`."""
        own = random_state(self._generators, own_device=self.ranks.size > 1)
        return self.ranks.gather(own, "random states") if self.ranks.size > 1 else [own]

    @property
    def _generators(self) -> list[torch.Generator]:
        return generators_of(self.train_loader, self.curvature_loader)

    def _agree(self) -> None:
        """Raise an error on all ranks if their models, options or loaders do not fit together."""
        if self.ranks.size == 1:
            return
        parameters, learner = self.model.named_parameters(), self.learner
        self.ranks.agree(
            {
                **{f"the version of {name}": value for name, value in versions().items()},
                "the likelihood": learner.likelihood,
                "the temperature": learner.temperature,
                "the schedule": repr(learner.schedule),
                "the curvature": repr(learner.curvature),
                "the precision": str(getattr(self.fabric.strategy.precision, "precision", "")),
                "the parameters": {n: (tuple(p.shape), p.requires_grad) for n, p in parameters},
            },
            "the start of training",
        )
        loaders = {"train_loader": self.train_loader}
        if self.curvature_loader is not self.train_loader:
            loaders["curvature_loader"] = self.curvature_loader
        check_shards(self.ranks, **loaders)
        _warn_of_batch_norm(self.model)

    def _train_epoch(self) -> Record:
        with own_random_numbers(self.ranks):
            record = self.network.epoch(self._epoch + 1)
        self._epoch += 1
        if self.monitor is not None:
            with eval_mode(self.model), torch.no_grad():
                record |= self.monitor(self._epoch)
        self._report(record)
        metrics = "".join(
            f", {key} {record[key]:.4g}"
            for key in record
            if key == "accuracy" or key.startswith(("test/", "validation/"))
        )
        _logger.info(
            "epoch %d of %d: loss %.4g%s (%.1f s)",
            self._epoch, self._start[-1], record["loss"], metrics, record["seconds"],
        )  # fmt: skip
        return record

    def _report_update(self, found: Mapping[str, float]) -> None:
        """Report the learner's latest update, if it has made one."""
        if not found:
            return
        record = {"kind": "update", "epoch": self._epoch, **self.learner.record}
        self._report(record)
        _logger.info(
            "update after epoch %d: log marginal likelihood per example %.4f (%.1f s)",
            self._epoch, record["evidence_per_example"], sum(record["seconds"].values()),
        )  # fmt: skip

    def _report(self, record: Record) -> None:
        self._records.append(record)
        if self.on_record is not None and self.ranks.rank == 0:
            self.on_record(record)


def _warn_of_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            warnings.warn(
                f"Layer '{name}' ({type(module).__name__}) normalises the examples of each rank "
                "separately, so that steps differ from those of one process. On GPUs, "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) normalises over all ranks.",
                stacklevel=4,
            )
            return


def _fabric_of(model: nn.Module) -> "Fabric":
    """A Fabric on the model's own device, in full precision."""
    from lightning.fabric import Fabric  # here, since importing Lightning takes seconds

    device = next(model.parameters()).device
    devices: Any = [device.index or 0] if device.type != "cpu" else 1
    return Fabric(accelerator=device.type, devices=devices, precision="32-true")
