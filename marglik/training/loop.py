"""The online loop: network steps, and every few epochs an update of the prior by the evidence.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1. The network's steps and their objective
are in `marglik.training.network`, a single update in `marglik.training.update`.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.model.checks import check_module
from kfac_backend.optimizer import KFAC, KfacPreconditioner
from kfac_backend.options import Likelihood, TargetOptions, check_option, check_positive
from marglik.eval_mode import eval_mode, kept_mode
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.prior import precision_to_weight_decay
from marglik.storage.checkpoint import Checkpoints, CheckpointsOfRanks
from marglik.storage.provenance import versions
from marglik.training.loaders import Loader
from marglik.training.network import CompileMode, NetworkTraining, Record
from marglik.training.random_state import (
    check_workers,
    fingerprint,
    generators_of,
    random_state,
    set_random_state,
)
from marglik.training.ranks import check_shards, count_on_ranks, own_random_numbers, ranks_of
from marglik.training.update import fit, update_prior
from marglik.training.update_schedule import CurvatureFrom, Schedule

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["OnlineResult", "OnlineTraining"]

_logger = logging.getLogger(__name__)


@dataclass
class OnlineResult:
    """What the loop learned. The model holds the parameters of the update that was kept."""

    laplace: Any
    """The Laplace approximation at the model's parameters, with the learned hyperparameters."""
    evidence: float
    """The log marginal likelihood (nats, a sum over the data) of the update that was kept: of the
    last one, or of the one with the highest evidence if the schedule keeps the best."""
    epoch: int
    """The epoch after which that evidence was computed."""
    records: list[Record] = field(default_factory=list)
    """One record per epoch and per update, in the order in which they were made."""
    evidences: list[float] = field(default_factory=list)
    """The evidence (nats) before every hyperparameter step."""
    seconds: float = 0.0
    """Wall-clock time of the loop; of a run that was resumed, the sum over its parts."""


class OnlineTraining:
    """Trains a network and its prior together.

    Epochs of network steps alternate with updates of the prior, after the epochs that the schedule
    names. An update fits a Laplace approximation at the current parameters, and takes steps on the
    hyperparameters that raise its evidence. The next epoch uses the new weight decays T·δ/N.

    An object serves one `run`. The constructor checks the options and counts the data. Then `run`
    repeats: an epoch (`NetworkTraining.epoch`), then, if the schedule says so, an update
    (`update_prior`). After each of the two it may write a checkpoint of `state_dict`. What it holds
    in between is the number of the epoch, whether an update is still to follow it, the records so
    far, and a copy of the parameters and hyperparameters of the update to be kept. At its end it
    puts these back into the model.

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
        likelihood: "classification", "regression" or "bernoulli".
        hyperparameters: prior precisions and noise, and how they are learned.
        make_laplace: returns an unfitted Laplace approximation, given δ (a scalar, or one per
            trainable tensor or parameter, depending on the groups) and σ.
        schedule: when updates happen, and whether the best or the last is kept.
        temperature: T; the likelihood is raised to the power 1/T.
        scheduler: the optimiser's learning-rate schedule, stepped after every batch.
        curvature_loader: data of the curvature pass; None takes the training loader.
        fabric: devices and precision, launched; None takes the model's device, in full precision.
        compile_mode: mode of `torch.compile` for the network's steps; None does not compile.
        prior_is_damping: whether `KFAC`, damped on the product, adds each tensor's weight decay
            T·δ/N to its damping; no effect on other optimisers.
        curvature_from: "pass" makes a pass over the data for each update; "optimizer" takes the
            moving averages of `KFAC`'s factors and the loss of the latest epoch instead, neither of
            which is computed at the current parameters, and makes one pass at the end.
        targets: how batches give their targets; the options of what ``make_laplace`` returns must
            agree.
        monitor: called with the epoch's number after each epoch, with the model in eval mode; the
            numbers that it returns become part of the epoch's record. Called on all ranks.
        on_record: called with the record of each epoch and each update when it is made; after a
            resume, first with all earlier ones. Called on rank 0 alone.
        progress: whether to show progress bars, on rank 0 alone.

    Raises:
        ValueError: no data; a likelihood or a temperature that is not supported; several processes
            of torch.distributed without a Fabric of them; shards that do not fit together;
            curvature_from="optimizer" without `KFAC`, or with a parameter that `KFAC` has no
            factors of.
        NotImplementedError: a Fabric's strategy other than DDP.
        RankError: ranks with different models or options.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_loader: Loader,
        likelihood: Likelihood,
        hyperparameters: Hyperparameters,
        make_laplace: Callable[[Tensor, Tensor], Any],
        schedule: Schedule,
        *,
        temperature: float = 1.0,
        scheduler: LRScheduler | None = None,
        curvature_loader: Loader | None = None,
        fabric: "Fabric | None" = None,
        compile_mode: CompileMode | None = None,
        prior_is_damping: bool = True,
        curvature_from: CurvatureFrom = "pass",
        targets: TargetOptions = TargetOptions(),  # noqa: B008
        monitor: Callable[[int], Mapping[str, float]] | None = None,
        on_record: Callable[[Record], None] | None = None,
        progress: bool = False,
    ) -> None:
        check_module(model)
        check_option("likelihood", likelihood, Likelihood)
        check_positive("temperature", temperature)
        check_option("curvature_from", curvature_from, CurvatureFrom)
        self._preconditioner = None
        if curvature_from == "optimizer":
            self._preconditioner = _preconditioner_of(model, optimizer)
        self.model = model
        self.train_loader = train_loader
        self.likelihood: Likelihood = likelihood
        self.hyperparameters = hyperparameters
        self.make_laplace = make_laplace
        self.schedule = schedule
        self.temperature = temperature
        self.scheduler = scheduler
        self.curvature_loader = train_loader if curvature_loader is None else curvature_loader
        self.fabric = fabric or _fabric_of(model)
        self.ranks = ranks_of(self.fabric)
        """The processes that train together, each on its shard of the data."""
        self.monitor = monitor
        self.on_record = on_record
        self.progress = progress and self.ranks.rank == 0
        self._targets = targets
        # Before the network is wrapped in DDP, so that ranks which differ end with an error that
        # names the difference.
        self._agree()
        self.network = NetworkTraining(
            model,
            optimizer,
            train_loader,
            likelihood,
            self.fabric,
            scheduler=scheduler,
            compile_mode=compile_mode,
            prior_is_damping=prior_is_damping,
            targets=targets,
            progress=self.progress,
            ranks=self.ranks,
        )
        self.num_data = count_on_ranks(self.curvature_loader, self.ranks)
        """N, the number of examples of all ranks."""
        self._epoch = 0
        # Kept as state, and not decided when the update starts, because a checkpoint is written
        # between an epoch and its update: a resumed run then starts with the update.
        self._update_follows = False
        self._result = OnlineResult(None, float("-inf"), 0)
        # The parameters and hyperparameters of the update that is kept, as `_result.laplace` was
        # fitted there: network steps go on changing the model, and `_finish` puts these back.
        self._best: dict[str, Any] | None = None

    def run(self, checkpoints: Checkpoints | None = None) -> OnlineResult:
        """Train for all epochs, then load the parameters of the update that is kept.

        The model is left in the mode (train or eval) that it was in.

        Args:
            checkpoints: where checkpoints are written: at the start, before each update of the
                prior, at the end, and whenever one is due. If there is one already, training
                continues from it; on a CPU with the same number of threads the result is the same
                to the bit.

        Raises:
            FloatingPointError: the loss or the evidence is not finite.
            TypeError: curvature_from="optimizer" with another Laplace approximation than marglik's.
            ValueError: a checkpoint of another run; checkpoints with a loader that has persistent
                workers; ``make_laplace`` with other options for targets than this object.
        """
        started = time.perf_counter()
        self._check_targets()
        states = None
        if checkpoints is not None:
            check_workers(self.train_loader, self.curvature_loader)
            states = CheckpointsOfRanks(checkpoints, self.ranks)
            if states.exists():
                self.load_state_dict(states.load(self.fabric.device))
                _logger.info("going on after epoch %d", self._epoch)
            else:
                # A run that is killed within its first epoch can then be resumed like any other.
                states.save(self.state_dict())
        earlier = self._result.seconds
        hidden = None if self.progress else True  # None: shown on a terminal only
        bar = tqdm(desc="Training", unit="epoch", disable=hidden, total=self.schedule.epochs)
        with bar, kept_mode(self.model):
            bar.update(self._epoch)
            while not self._is_done:
                if self._update_follows:
                    self._update(self._epoch)
                    self._update_follows = False
                else:
                    bar.set_postfix(loss=f"{self._train_epoch()['loss']:.3f}")
                    bar.update()
                self._result.seconds = earlier + time.perf_counter() - started
                if states is not None and (
                    states.is_due
                    or self._update_follows  # an update may take longer than an epoch
                    or self._is_done
                ):
                    states.save(self.state_dict())
            self._finish()
            self._result.seconds = earlier + time.perf_counter() - started
        return self._result

    def weight_decays(self) -> Tensor:
        """The weight decay T·δ/N of each group at present, (groups,)."""
        delta = self.hyperparameters.prior_precision
        return precision_to_weight_decay(delta, self.num_data, self.temperature)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: plain data, tensors and `KroneckerFactors`.

        Collective. The state is the same on all ranks, except for their seconds. It can be loaded
        with any number of ranks, unless their random numbers were seeded differently.

        Raises:
            TypeError: a Laplace approximation without factors, such as laplace-torch's.
        """
        if self._best is not None and getattr(self._result.laplace, "factors", None) is None:
            raise TypeError(
                f"{type(self._result.laplace).__name__} has no state that can be saved during "
                "training; use marglik.KronLaplace."
            )
        result = self._result
        return {
            "epoch": self._epoch,
            "update_follows": self._update_follows,
            "model": self.model.state_dict(),
            "optimizer": self.network.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "hyperparameters": self.hyperparameters.state_dict(),
            **self._random_states(),
            "best": self._best,
            "factors": None if self._best is None else result.laplace.factors,
            "evidence": (result.evidence, result.epoch),
            "records": result.records,
            "evidences": result.evidences,
            "seconds": result.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: a state of another number of ranks, whose random numbers were seeded
                differently.
        """
        others = state.get("random_of_ranks", [])
        if others and len(others) != self.ranks.size:
            raise ValueError(
                f"The state is of {len(others)} ranks whose random numbers, or loaders' "
                f"generators, were seeded differently; there are {self.ranks.size} ranks now. "
                f"Continue with {len(others)} ranks, or give all ranks the same seed: each rank "
                "then makes its own numbers from the common state."
            )
        self._epoch, self._update_follows = state["epoch"], state["update_follows"]
        self.network.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        self.hyperparameters.load_state_dict(state["hyperparameters"])
        laplace, self._best = None, state["best"]
        if self._best is not None:
            # `restore` takes the mean from the model, which must hold the kept parameters then.
            self.model.load_state_dict(self._best["model"])
            laplace = self._make_laplace()
            laplace.restore(state["factors"])
        self.model.load_state_dict(state["model"])
        evidence, epoch = state["evidence"]
        self._result = OnlineResult(laplace, evidence, epoch, [], state["evidences"])
        self._result.seconds = state["seconds"]
        for record in state["records"]:  # the log is written again from its start
            self._report(record)
        # Last, so that nothing above draws from the restored generators.
        random = others[self.ranks.rank] if others else state["random"]
        set_random_state(random, generators_of(self.train_loader, self.curvature_loader))

    def _random_states(self) -> dict[str, Any]:
        """The random state that all ranks share, or each rank's if they differ.

        Between epochs they are usually the same, since `own_random_numbers` goes back to the common
        state. Storing that one alone is what lets another number of ranks continue.
        """
        generators = generators_of(self.train_loader, self.curvature_loader)
        state = random_state(generators, own_device=self.ranks.size > 1)
        if self.ranks.size == 1:
            return {"random": state}
        states = self.ranks.gather(state, "random states")
        alike = len(set(map(fingerprint, states))) == 1
        return {"random": states[0], "random_of_ranks": [] if alike else states}

    def _agree(self) -> None:
        """Raise an error on all ranks if their models, options or loaders do not fit together."""
        if self.ranks.size == 1:
            return
        parameters = self.model.named_parameters()
        self.ranks.agree(
            {
                **{f"the version of {name}": value for name, value in versions().items()},
                "the likelihood": self.likelihood,
                "the temperature": self.temperature,
                "the schedule": repr(self.schedule),
                "the targets": repr(self._targets),
                "the precision": str(getattr(self.fabric.strategy.precision, "precision", "")),
                "the parameters": {n: (tuple(p.shape), p.requires_grad) for n, p in parameters},
                "the prior precision": self.hyperparameters.prior_precision.tolist(),
                "sigma_noise": self.hyperparameters.sigma_noise.item(),
            },
            "the start of training",
        )
        loaders = {"train_loader": self.train_loader}
        if self.curvature_loader is not self.train_loader:
            loaders["curvature_loader"] = self.curvature_loader
        check_shards(self.ranks, **loaders)
        _warn_of_batch_norm(self.model)

    @property
    def _is_done(self) -> bool:
        return self._epoch >= self.schedule.epochs and not self._update_follows

    def _make_laplace(self) -> Any:
        hyper = self.hyperparameters
        delta = hyper.groups.for_laplace(hyper.prior_precision)
        return self.make_laplace(delta, hyper.sigma_noise)

    def _check_targets(self) -> None:
        laplace = self._make_laplace()
        options = getattr(laplace, "options", None)
        if options is None:  # laplace-torch's classes have no options for targets
            if self._preconditioner is not None:
                raise TypeError(
                    f"curvature_from='optimizer' needs marglik.Posterior, not "
                    f"{type(laplace).__name__}; use that, or pass curvature_from='pass'."
                )
            return
        for name in (option.name for option in fields(TargetOptions)):
            ours, theirs = (getattr(o, name) for o in (self._targets, options))
            if ours != theirs:
                raise ValueError(
                    f"make_laplace has {name}={theirs!r}, OnlineTraining {ours!r}: curvature and "
                    "loss would use different targets. Give both the same."
                )

    def _train_epoch(self) -> Record:
        self._epoch += 1
        groups, decays = self.hyperparameters.groups, self.weight_decays()
        with own_random_numbers(self.ranks):
            record = self.network.epoch(
                self._epoch,
                groups.for_parameters(decays)
                if groups.diagonal
                else groups.for_laplace(decays).tolist(),
                self.hyperparameters.sigma_noise.square().item(),
            )
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
            self._epoch, self.schedule.epochs, record["loss"], metrics, record["seconds"],
        )  # fmt: skip
        self._update_follows = self.schedule.is_due(self._epoch)
        return record

    def _update(self, epoch: int) -> None:
        hyper, laplace = self.hyperparameters, self._make_laplace()
        evidences, record = update_prior(
            hyper,
            laplace,
            self.curvature_loader,
            self.num_data,
            self.schedule.steps,
            temperature=self.temperature,
            progress=self.progress,
            ranks=self.ranks,
            dict_key_y=self._targets.dict_key_y,
            factors=self._factors_of_training(),
        )
        self._result.evidences += evidences[:-1]  # the last one follows the last step
        better = self._best is None or evidences[-1] > self._result.evidence
        if better or self.schedule.keep == "last":
            self._result.laplace = laplace
            self._result.evidence = evidences[-1]
            self._result.epoch = epoch
            self._best = {
                "model": deepcopy(self.model.state_dict()),
                "prior_precision": hyper.prior_precision,
                "sigma_noise": hyper.sigma_noise,
            }
        self._report({"kind": "update", "epoch": epoch, **record})
        _logger.info(
            "update after epoch %d: log marginal likelihood per example %.4f (%.1f s)",
            epoch, record["evidence_per_example"], sum(record["seconds"].values()),
        )  # fmt: skip

    def _factors_of_training(self) -> KroneckerFactors | None:
        """The preconditioner's factors, if updates take them, with the loss of the latest epoch."""
        if self._preconditioner is None:
            return None
        epochs = [record for record in self._result.records if record["kind"] == "epoch"]
        # The evidence needs Σ ℓ over the data, and the record has the mean over the epoch.
        return self._preconditioner.factors(self.num_data, self.num_data * epochs[-1]["loss"])

    def _finish(self) -> None:
        """Make the result that of the update to be kept: model, hyperparameters, posterior."""
        hyper = self.hyperparameters
        if self._best is None:
            # No update was due: the hyperparameters are the initial ones.
            laplace = self._make_laplace()
            data, key = self.curvature_loader, self._targets.dict_key_y
            fit(laplace, data, self.ranks, self.progress, key)
            self._result.laplace = laplace
            self._result.evidence = float(laplace.log_marginal_likelihood())
            self._result.epoch = self.schedule.epochs
            return
        self.model.load_state_dict(self._best["model"])
        hyper.set(self._best["prior_precision"], self._best["sigma_noise"])
        laplace = self._result.laplace
        # A posterior that was restored from a checkpoint was made with the latest hyperparameters,
        # which need not be those of the kept update.
        laplace.prior_precision = hyper.groups.for_laplace(hyper.prior_precision)
        if self.likelihood == "regression":
            laplace.sigma_noise = hyper.sigma_noise
        if self._preconditioner is not None:
            # The moving averages drove the updates; the posterior needs the curvature at the kept
            # parameters themselves.
            data, key = self.curvature_loader, self._targets.dict_key_y
            fit(laplace, data, self.ranks, self.progress, key)
            self._result.evidence = float(laplace.log_marginal_likelihood())

    def _report(self, record: Record) -> None:
        self._result.records.append(record)
        if self.on_record is not None and self.ranks.rank == 0:
            self.on_record(record)


def _preconditioner_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> KfacPreconditioner:
    """The optimiser's preconditioner, if it has factors of all trainable parameters."""
    if not isinstance(optimizer, KFAC):
        raise ValueError(
            f"curvature_from='optimizer' takes K-FAC's factors, and {type(optimizer).__name__} has "
            "none. Train with KFAC (optimizer.name=kfac), or pass curvature_from='pass'."
        )
    known = set(optimizer.preconditioner.names)
    missing = [n for n, p in model.named_parameters() if p.requires_grad and n not in known]
    if missing:
        raise ValueError(
            f"curvature_from='optimizer' needs K-FAC's factors of all trainable parameters, and "
            f"'{missing[0]}' has none (no rule, or excluded). Freeze it (requires_grad_(False)), "
            "or pass curvature_from='pass'."
        )
    return optimizer.preconditioner


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
