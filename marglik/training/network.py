"""The network's gradient steps, an epoch at a time, under a prior that stays as it is meanwhile.

The objective on a batch of M examples is 1/M Σ ℓ/σ² + ½ Σ_g (T δ_g/N) ‖θ_g‖², −T/N times the
tempered log joint up to a constant. Gradient steps are taken on σ² times it, so that learning rates
do not depend on regression's noise. ℓ is an example's loss, of a sequence the sum over the
positions that count: where others take the mean over R positions, SGD needs a learning rate R times
smaller (Adam's steps do not grow with the gradient).

`KFAC` divides by curvature and damping. With damping of the product the prior's curvature, T δ_g/N
on the same scale, is a part of both, so that a step is one of natural gradient on the posterior.

With several ranks the M examples of a batch are spread over them. Each takes its own sum of losses
times (ranks / M), of which `DistributedDataParallel` averages the gradients, and adds the prior's
after that: the step is that of one process with the whole batch, up to the order of sums.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from kfac_backend.distributed import Ranks
from kfac_backend.loss.hessian import check_targets, counted_terms, loss_sum
from kfac_backend.model.batches import each_batch
from kfac_backend.model.calls import arguments, logits_of
from kfac_backend.model.targets import Targets, split_batch
from kfac_backend.optimizer import KFAC
from kfac_backend.options import Likelihood, TargetOptions
from marglik.training.loaders import Loader
from marglik.training.penalty import Decay, add_penalty, check_no_weight_decay, stable_decays
from marglik.training.random_state import samplers_of
from marglik.training.ranks import step_errors

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds

__all__ = ["CompileMode", "NetworkTraining", "Record"]

Record = dict[str, Any]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Of `torch.compile`; the last two record CUDA graphs on a GPU."""


class NetworkTraining:
    """Trains a network's parameters.

    Args:
        model: the network.
        optimizer: without weight decay of its own.
        loader: batches (x, y), or mappings.
        likelihood: "classification", "regression" or "bernoulli".
        fabric: device and precision.
        scheduler: stepped after every batch.
        compile_mode: `torch.compile`'s mode for the steps, not compiled if None.
        prior_is_damping: see `OnlineTraining`.
        targets: how batches give their targets; as for the curvature.
        progress: whether to show a bar over the batches.
        ranks: those of the Fabric; the loader is this one's shard.

    Raises:
        ValueError: an optimiser with a weight decay, K-FAC with a compiled model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        likelihood: Likelihood,
        fabric: "Fabric",
        *,
        scheduler: LRScheduler | None = None,
        compile_mode: CompileMode | None = None,
        prior_is_damping: bool = True,
        targets: TargetOptions = TargetOptions(),  # noqa: B008
        progress: bool = False,
        ranks: Ranks = Ranks(None),  # noqa: B008
    ) -> None:
        check_no_weight_decay(optimizer)
        if compile_mode is not None and isinstance(optimizer, KFAC):
            raise ValueError(
                "A compiled model hides its layers from K-FAC (optimizer.name=kfac). Train without "
                "compile, or with another optimiser."
            )
        self.model = model
        self.loader = loader
        self.likelihood: Likelihood = likelihood
        self.fabric = fabric
        self.scheduler = scheduler
        self._targets = Targets(likelihood, targets)
        self._progress = progress
        self._ranks = ranks
        self._kfac = optimizer if isinstance(optimizer, KFAC) else None
        self._preconditioner = None
        if isinstance(optimizer, KFAC) and prior_is_damping:
            options = optimizer.preconditioner.options
            if options.damping_on == "product":
                self._preconditioner = optimizer.preconditioner
                self._own_damping = options.damping
        # Two shapes of batches, the usual one and the last, are compiled; none is made symbolic.
        compiled: Any = (
            model
            if compile_mode is None
            else torch.compile(model, mode=compile_mode, dynamic=False)
        )
        self._forward, self.optimizer = fabric.setup(compiled, optimizer)
        self._targets_are_checked = False

    def epoch(self, epoch: int, weight_decays: Sequence[Decay], variance: float) -> Record:
        """Take the steps of one epoch; returns its record.

        Args:
            epoch: its number, for the record.
            weight_decays: T·δ/N of each trainable tensor, in ``parameters()`` order.
            variance: σ² of regression, else 1.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: targets that do not fit (looked at in the first epoch), no data.
            RankError: another rank is gone.
        """
        start = time.perf_counter()
        self.model.train()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._set_damping(weight_decays, variance)
        limited: dict[str, None] = {}
        totals = torch.zeros(4, dtype=torch.float64, device=parameters[0].device)
        examples = 0
        self._tell_samplers(epoch)
        latest = None
        for batch in each_batch(self.loader, f"Epoch {epoch}", self._progress):
            given = split_batch(self.fabric.to_device(batch), self._targets.options.dict_key_y)
            # Where others alone have examples, this rank runs on its last ones, for nothing.
            counts = self._ranks.size == 1 or len(given[1]) > 0
            latest = given if counts else latest
            if latest is None:
                raise ValueError(
                    f"Rank {self._ranks.rank} of {self._ranks.size} has no example of the first "
                    "batch; each batch but the last must have as many examples as there are ranks."
                )
            x, y = latest
            y = self._targets(self.model, x, y)
            stable, names = stable_decays(self.model, self.optimizer, weight_decays, variance)
            limited |= dict.fromkeys(names)
            totals += self._step(x, y, parameters, stable, variance, counts)
            examples += len(y) if counts else 0
        if not examples:
            raise ValueError("The training data is empty: the loader yielded no batch.")
        self._targets_are_checked = True
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
        if limited:
            record["limited_weight_decay"] = list(limited)
        return record

    def _step(
        self,
        x: Any,
        y: Tensor,
        parameters: list[nn.Parameter],
        weight_decays: list[Decay],
        variance: float,
        counts: bool = True,
    ) -> Tensor:
        """One step; the batch's sums (4,) of losses, penalties, right labels and labels.

        Where this rank has no example of the batch, it takes part with some that do not count.
        """
        self.optimizer.zero_grad()
        args, kwargs = arguments(self.model, x)
        unseen: Any = nullcontext()
        if self._kfac is not None and not counts:
            unseen = self._kfac.preconditioner.paused()
        with step_errors(self._ranks), unseen:
            f = logits_of(self._forward(*args, **kwargs))
            if not self._targets_are_checked:  # it waits for the device
                check_targets(f, y, self.likelihood, may_ignore=self._targets.may_ignore)
            data_loss = loss_sum(f, y, self.likelihood)
            objective = self._objective(data_loss, len(f), counts)
            scale: list[Tensor] = []  # by which the gradients are multiplied, in float16
            objective.register_hook(scale.append)
            self.fabric.backward(objective)
        penalty = add_penalty(parameters, weight_decays, variance * scale[0])
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
        """What this rank's gradients are of: their average over ranks is that of the mean loss."""
        if self._ranks.size == 1:
            return data_loss / examples
        of_all = data_loss.new_tensor([examples if counts else 0], dtype=torch.float64)
        self._ranks.sum_([of_all], "a step of training")
        weight = self._ranks.size / of_all[0] if counts else torch.zeros_like(of_all[0])
        return data_loss * weight.to(data_loss.dtype)

    def _tell_samplers(self, epoch: int) -> None:
        """Let each epoch have another order, where ranks draw theirs by the epoch's number."""
        if self._ranks.size > 1:
            for sampler in samplers_of(self.loader):
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(epoch)

    def _set_damping(self, decays: Sequence[Decay], variance: float) -> None:
        """The prior's curvature, on the scale of the objective, beside K-FAC's own damping."""
        if self._preconditioner is None:
            return
        names = (name for name, p in self.model.named_parameters() if p.requires_grad)
        by_name = dict(zip(names, decays, strict=True))
        self._preconditioner.damping = {
            # Of one precision for each entry, their mean: a Kronecker product has no room for more.
            name: self._own_damping + variance * float(torch.as_tensor(by_name[name]).mean())
            for name in self._preconditioner.names
        }
