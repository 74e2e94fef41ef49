"""The network's gradient steps, an epoch at a time, under a prior that is fixed during the epoch.

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

import time
from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from kfac_backend.loss import check_targets, counted_terms, loss_sum
from kfac_backend.model.batches import Targets, each_batch, split_batch
from kfac_backend.model.calls import arguments, logits_of
from kfac_backend.model.checks import check_output
from kfac_backend.optimizer import KFAC
from kfac_backend.options import Likelihood
from kfac_backend.ranks import Ranks
from marglik.prediction.suspicious_labels import TrainingProbabilities
from marglik.training.learner import PriorLearner
from marglik.training.loaders import Loader
from marglik.training.random_state import samplers_of
from marglik.training.ranks import step_errors

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds

__all__ = ["CompileMode", "NetworkTraining", "Record"]

Record = dict[str, Any]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Of `torch.compile`; the last two record CUDA graphs on a GPU."""


class NetworkTraining:
    """Trains a network's parameters, under the weight decays that a learner has at each epoch.

    The constructor hands model and optimiser to Fabric, which moves them to the device and, with
    several ranks, wraps the model in `DistributedDataParallel`: so it happens once. Afterwards
    ``model`` is the caller's module, and only steps go through the wrapped one. What must survive
    from epoch to epoch is in model, optimiser and schedule.

    Args:
        model: the network.
        optimizer: the network's optimiser, without weight decay.
        loader: batches (x, y), or mappings.
        learner: adds the prior's gradient; started before the first epoch.
        fabric: device and precision.
        scheduler: the learning-rate schedule, stepped after every batch.
        compile_mode: mode of `torch.compile` for the steps; None does not compile.
        prior_is_damping: see `OnlineTraining`.
        progress: whether to show a bar over the batches.
        ranks: the ranks of the Fabric; the loader is this rank's shard.

    Raises:
        ValueError: K-FAC with a compiled model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        learner: PriorLearner,
        fabric: "Fabric",
        *,
        scheduler: LRScheduler | None = None,
        compile_mode: CompileMode | None = None,
        prior_is_damping: bool = True,
        progress: bool = False,
        ranks: Ranks = Ranks(None),  # noqa: B008
    ) -> None:
        if compile_mode is not None and isinstance(optimizer, KFAC):
            raise ValueError(
                "A compiled model hides its layers from K-FAC (optimizer.name=kfac). Train without "
                "compile, or with another optimiser."
            )
        self.model = model
        self.loader = loader
        self.learner = learner
        self.likelihood: Likelihood = learner.likelihood
        self.fabric = fabric
        self.scheduler = scheduler
        self._targets = Targets(self.likelihood, learner.curvature)
        self._progress = progress
        self._ranks = ranks
        self._kfac = optimizer if isinstance(optimizer, KFAC) else None
        self._preconditioner = None
        if isinstance(optimizer, KFAC) and prior_is_damping:
            options = optimizer.preconditioner.options
            if options.damping_on == "product":
                self._preconditioner = optimizer.preconditioner
                self._own_damping = options.damping
        # dynamic=False: only two batch sizes occur, the usual one and that of the last batch. Each
        # gets a graph of its own, and none has a symbolic size.
        compiled: Any = (
            model
            if compile_mode is None
            else torch.compile(model, mode=compile_mode, dynamic=False)
        )
        self._forward, self.optimizer = fabric.setup(compiled, optimizer)
        # Checking a target waits for the device, so only the first epoch does it.
        self._targets_are_checked = False
        self.probabilities = TrainingProbabilities(loader, self.likelihood, ranks)

    def epoch(self, epoch: int) -> Record:
        """Take the steps of one epoch; returns its record.

        Args:
            epoch: its number, for the record.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: targets that do not fit the outputs (checked in the first epoch), or no
                data.
            RankError: another rank is gone.
        """
        start = time.perf_counter()
        self.model.train()
        variance = self.learner.hyperparameters.sigma_noise.square().item()
        self._set_damping(variance)
        # On the device, and read once at the end: reading a loss waits for its step.
        totals = torch.zeros(4, dtype=torch.float64, device=next(self.model.parameters()).device)
        examples = 0
        self._tell_samplers(epoch)
        latest = None
        for which, batch in each_batch(self.probabilities, f"Epoch {epoch}", self._progress):
            given = split_batch(self.fabric.to_device(batch), self._targets.options.dict_key_y)
            # The last batch may be too small for this rank to have a part of it. It must take part
            # all the same, since the others wait for its gradients: it runs on its latest examples,
            # with weight zero.
            counts = self._ranks.size == 1 or len(given[1]) > 0
            latest = given if counts else latest
            if latest is None:
                raise ValueError(
                    f"Rank {self._ranks.rank} of {self._ranks.size} has no example of the first "
                    "batch; each batch but the last must have at least as many examples as there "
                    "are ranks."
                )
            x, y = latest
            y = self._targets(self.model, x, y)
            totals += self._step(x, y, which, counts)
            examples += len(y) if counts else 0
        if not examples:
            raise ValueError("The training data is empty: the loader yielded no batch.")
        self._targets_are_checked = True
        self.probabilities.end_epoch()
        if self._ranks.size > 1:
            count = totals.new_tensor([examples])
            self._ranks.sum_([totals, count], "the sums of an epoch")
            examples = int(count.item())
        loss, prior, correct, terms = (totals / examples).tolist()
        if not torch.isfinite(totals).all():
            raise FloatingPointError(
                f"The training loss is not finite in epoch {epoch}. Likely causes: NaN in the "
                "data, or too large a learning rate; try a tenth of it."
            )
        record: Record = {
            "kind": "epoch",
            "epoch": epoch,
            "loss": loss,
            "objective": loss / variance + prior,
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": time.perf_counter() - start,
        }
        if self.likelihood == "classification":
            record["accuracy"] = correct / terms if terms else 0.0
        if self.learner.limited:
            record["limited_weight_decay"] = sorted(self.learner.limited)
        if clipped := int(self.learner.clipped):
            record["clipped_steps"] = clipped
        return record

    def _step(self, x: Any, y: Tensor, which: Tensor | None, counts: bool) -> Tensor:
        """Take one step; returns the batch's sums (4,) of losses, penalties, hits and labels.

        ``which`` are the examples' indices, if they are known. ``counts`` is False where this rank
        has no example of the batch and runs on others.
        """
        self.optimizer.zero_grad()
        # A copy, since a model may change its input in place, and batches may live for many epochs.
        args, kwargs = arguments(self.model, deepcopy(x))
        unseen: Any = nullcontext()
        if self._kfac is not None and not counts:  # its factors must not count examples twice
            unseen = self._kfac.preconditioner.paused()
        with step_errors(self._ranks), unseen:
            f = logits_of(self._forward(*args, **kwargs))
            if not self._targets_are_checked:
                check_output(f)
                check_targets(f, y, self.likelihood, may_ignore=self._targets.may_ignore)
            data_loss = loss_sum(f, y, self.likelihood)
            if counts:
                self.probabilities.add(which, f)
            objective = self._objective(data_loss, len(f), counts)
            # In float16 Fabric multiplies the objective, and so all gradients, by a factor that
            # changes from step to step. The prior's gradient must get the same one: the hook
            # records it as the gradient of the objective itself, which is 1 in other precisions.
            scale: list[Tensor] = []
            objective.register_hook(scale.append)
            self.fabric.backward(objective)
        penalty = self.learner.add_to_gradients(scale[0])
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        correct = terms = torch.zeros_like(data_loss)
        if self.likelihood == "classification":
            counted = counted_terms(y, self.likelihood)
            right = f.argmax(-1) == y
            correct = (right if counted is None else right & counted).sum()
            terms = torch.full_like(data_loss, y.numel()) if counted is None else counted.sum()
        sums = (data_loss.detach(), penalty * len(f), correct, terms)
        found = torch.stack([value.double() for value in sums])
        return found if counts else torch.zeros_like(found)

    def _objective(self, data_loss: Tensor, examples: int, counts: bool) -> Tensor:
        """The loss that this rank differentiates; the ranks' average is the mean over examples."""
        if self._ranks.size == 1:
            return data_loss / examples
        of_all = data_loss.new_tensor([examples if counts else 0], dtype=torch.float64)
        self._ranks.sum_([of_all], "a step of training")
        weight = self._ranks.size / of_all[0] if counts else torch.zeros_like(of_all[0])
        return data_loss * weight.to(data_loss.dtype)

    def _tell_samplers(self, epoch: int) -> None:
        """Give samplers the epoch's number: `DistributedSampler` would else repeat its order."""
        if self._ranks.size > 1:
            for sampler in samplers_of(self.loader):
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(epoch)

    def _set_damping(self, variance: float) -> None:
        """Set K-FAC's damping to its own plus the prior's curvature σ²·T·δ/N of each tensor."""
        if self._preconditioner is None:
            return
        names = (name for name, p in self.model.named_parameters() if p.requires_grad)
        by_name = dict(zip(names, self.learner.decays_of_parameters(), strict=True))
        self._preconditioner.damping = {
            # The mean, where each entry has a precision of its own: damping in the eigenbasis of a
            # Kronecker product is one number per tensor.
            name: self._own_damping + variance * float(torch.as_tensor(by_name[name]).mean())
            for name in self._preconditioner.names
        }
