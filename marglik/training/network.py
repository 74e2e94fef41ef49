"""The network's gradient steps, an epoch at a time, under a prior that stays as it is meanwhile.

The objective on a batch of M examples is 1/M Σ ℓ/σ² + ½ Σ_g (T δ_g/N) ‖θ_g‖², −T/N times the
tempered log joint up to a constant. Gradient steps are taken on σ² times it, so that learning rates
do not depend on regression's noise. ℓ is an example's loss, of a sequence the sum over the
positions that count: where others take the mean over R positions, SGD needs a learning rate R times
smaller (Adam's steps do not grow with the gradient).

A group that the data does not need gets an ever larger δ. SGD's step on its penalty would
overshoot and diverge once learning rate times weight decay exceeds 2 (1.36 with Nesterov's momentum
of 0.9); a decay beyond 1 / learning rate, which takes its parameter to zero in one step, is limited
to that, and the epoch's record names it.

`KFAC` divides by curvature and damping. With damping of the product the prior's curvature, T δ_g/N
on the same scale, is a part of both, so that a step is one of natural gradient on the posterior.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from kfac_backend.loss.hessian import check_targets, counted_terms, loss_sum
from kfac_backend.model.batches import each_batch
from kfac_backend.model.calls import arguments, logits_of
from kfac_backend.model.targets import Targets, split_batch
from kfac_backend.optimizer import KFAC
from kfac_backend.options import Likelihood, TargetOptions
from marglik.training.loaders import Loader

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds

__all__ = ["CompileMode", "NetworkTraining", "Record"]

Record = dict[str, Any]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Of `torch.compile`; the last two record CUDA graphs on a GPU."""
Decay = float | Tensor
"""Weight decay of a parameter tensor: one number, or one per entry."""


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
    ) -> None:
        if any(group.get("weight_decay") for group in optimizer.param_groups):
            raise ValueError(
                "The optimiser has a weight decay of its own; the prior takes its place. "
                "Set the optimiser's weight_decay to 0."
            )
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
        # Adam's steps do not grow with the gradient.
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
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
        """
        start = time.perf_counter()
        self.model.train()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._set_damping(weight_decays, variance)
        limited: dict[str, None] = {}
        totals = torch.zeros(4, dtype=torch.float64, device=parameters[0].device)
        examples = 0
        for batch in each_batch(self.loader, f"Epoch {epoch}", self._progress):
            x, y = split_batch(self.fabric.to_device(batch), self._targets.options.dict_key_y)
            y = self._targets(self.model, x, y)
            stable, names = self._stable_decays(parameters, weight_decays, variance)
            limited |= dict.fromkeys(names)
            totals += self._step(x, y, parameters, stable, variance)
            examples += len(y)
        if not examples:
            raise ValueError("The training data is empty: the loader yielded no batch.")
        self._targets_are_checked = True
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
    ) -> Tensor:
        """One step; the batch's sums (4,) of losses, penalties, right labels and labels."""
        self.optimizer.zero_grad()
        args, kwargs = arguments(self.model, x)
        f = logits_of(self._forward(*args, **kwargs))
        if not self._targets_are_checked:  # it waits for the device
            check_targets(f, y, self.likelihood, may_ignore=self._targets.may_ignore)
        data_loss = loss_sum(f, y, self.likelihood)
        objective = data_loss / len(f)
        scale: list[Tensor] = []  # by which the gradients are multiplied, in float16
        objective.register_hook(scale.append)
        self.fabric.backward(objective)
        penalty = _add_penalty(parameters, weight_decays, variance * scale[0])
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
        return torch.stack([value.double() for value in sums])

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

    def _stable_decays(
        self, parameters: list[nn.Parameter], decays: Sequence[Decay], variance: float
    ) -> tuple[list[Decay], list[str]]:
        """The weight decay of each parameter, and the names of those limited to 1 / lr."""
        if not self._is_sgd:
            return list(decays), []
        rates = {p: g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        stable, limited = [], []
        for p, decay in zip(parameters, decays, strict=True):
            largest = 1 / (rates[p] * variance) if rates.get(p) else float("inf")
            if isinstance(decay, Tensor):
                is_limited = bool((decay > largest).any())
                stable.append(decay.clamp(max=largest))
            else:
                is_limited = decay > largest
                stable.append(min(decay, largest))
            if is_limited:
                limited += [name for name, q in self.model.named_parameters() if q is p]
        return stable, limited


@torch.no_grad()
def _add_penalty(
    parameters: list[nn.Parameter], weight_decays: list[Decay], scale: Tensor
) -> Tensor:
    """Add scale · wd · θ to the gradients; returns ½ Σ wd ‖θ‖², a scalar.

    A few launches for all tensors together; autograd would have several for each of them.
    """
    gradients = []
    for p in parameters:
        # Where the network did not use it, its prior holds.
        gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
    values: list[Tensor] = list(parameters)
    decays: Any = [d.to(values[0]) if isinstance(d, Tensor) else d for d in weight_decays]
    roots = torch._foreach_mul(values, [d**0.5 for d in decays])
    penalty = 0.5 * torch.stack(torch._foreach_norm(roots)).square().sum()
    pulls = torch._foreach_mul(values, decays)
    torch._foreach_mul_(pulls, scale)
    # Not in place: a compiled backward pass may have given two parameters one gradient.
    for p, gradient in zip(parameters, torch._foreach_add(gradients, pulls), strict=True):
        p.grad = gradient
    return penalty
