"""The online loop: network steps, and every few epochs an update of the prior by the evidence.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1. The objective on a batch of M examples is
1/M Σ ℓ/σ² + ½ Σ_g (T δ_g/N) ‖θ_g‖², −T/N times the tempered log joint up to a constant. Gradient
steps are taken on σ² times it, so that learning rates do not depend on regression's noise.

A group that the data does not need gets an ever larger δ. SGD's step on its penalty would
overshoot and diverge once learning rate times weight decay exceeds about 2; such a decay is limited
to the one that takes its parameter to zero in one step, and the epoch's record names it.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from kfac_backend.batches import split_batch
from kfac_backend.loss_hessian import check_targets, loss_sum
from kfac_backend.options import Likelihood, check_option
from marglik.hyperparameters import Hyperparameters
from marglik.loaders import Loader, count_examples
from marglik.modes import kept_mode
from marglik.prior import precision_to_weight_decay
from marglik.schedule import Schedule

__all__ = ["OnlineResult", "OnlineTraining"]

Record = dict[str, Any]


@dataclass
class OnlineResult:
    """What the loop learned; the model holds the best state's parameters."""

    laplace: Any
    """Fitted at the model's parameters, with the learned hyperparameters."""
    evidence: float
    """Its evidence (nats), the best of all updates unless the last is kept."""
    epoch: int
    """The epoch of that evidence."""
    records: list[Record] = field(default_factory=list)
    """One per epoch and per update, in their order."""
    evidences: list[float] = field(default_factory=list)
    """The evidence (nats) at every hyperparameter step."""


class OnlineTraining:
    """Trains a network and its prior together.

    Args:
        model: the network; frozen parameters have neither prior nor curvature.
        optimizer: the network's optimiser, without weight decay of its own.
        train_loader: batches (x, y), or mappings, for the network's steps.
        likelihood: "classification", "regression" or "bernoulli".
        hyperparameters: what is learned, and how.
        make_laplace: returns an unfitted Laplace approximation, from (δ for laplace, σ).
        schedule: when updates happen.
        temperature: T of the likelihood.
        scheduler: the optimiser's schedule, stepped after every batch.
        curvature_loader: data of the curvature pass; the training loader itself if None.
        fabric: device and precision; the model's own device, in full precision, if None.
        dict_key_y: the targets' key in batches that are mappings.
        on_record: called with each epoch's and each update's record as it is made.
        progress: whether to show progress bars.
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
        fabric: Fabric | None = None,
        dict_key_y: str = "labels",
        on_record: Callable[[Record], None] | None = None,
        progress: bool = False,
    ) -> None:
        check_option("likelihood", likelihood, Likelihood)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}.")
        if any(group.get("weight_decay") for group in optimizer.param_groups):
            raise ValueError(
                "The optimiser has a weight decay of its own; the prior takes its place. "
                "Set the optimiser's weight_decay to 0."
            )
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
        self.dict_key_y = dict_key_y
        self.on_record = on_record
        self.progress = progress
        self._hidden = None if progress else True  # None: bars are shown on a terminal only
        self.num_data = count_examples(self.curvature_loader)
        if self.num_data == 0:
            raise ValueError("The data is empty: the loader yields no batch.")
        # Adam's steps do not grow with the gradient.
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._forward, self.optimizer = self.fabric.setup(model, optimizer)
        self._result = OnlineResult(None, float("-inf"), 0)
        self._best_state: dict[str, Tensor] | None = None
        self._best_hyperparameters = (hyperparameters.prior_precision, hyperparameters.sigma_noise)

    def run(self) -> OnlineResult:
        """Train for all epochs, and put the best evidence's parameters back into the model.

        The model comes back in the mode (train or eval) that it was in.

        Raises:
            FloatingPointError: the loss or the evidence is not finite.
        """
        epochs = range(1, self.schedule.epochs + 1)
        bar = tqdm(epochs, desc="Training", unit="epoch", disable=self._hidden)
        with kept_mode(self.model):
            for epoch in bar:
                record = self._train_epoch(epoch)
                shown = {"loss": f"{record['loss']:.3f}"}
                if self.schedule.is_due(epoch):
                    self._update(epoch)
                if self._best_state is not None:
                    shown["evidence"] = f"{self._result.evidence / self.num_data:.4f}/N"
                bar.set_postfix(shown)
            return self._finish()

    def weight_decays(self) -> Tensor:
        """The present weight decay T·δ/N per group."""
        delta = self.hyperparameters.prior_precision
        return precision_to_weight_decay(delta, self.num_data, self.temperature)

    def _train_epoch(self, epoch: int) -> Record:
        start = time.perf_counter()
        self.model.train()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        device = parameters[0].device
        variance = self.hyperparameters.sigma_noise.square().item()
        decays = self.hyperparameters.groups.for_parameters(self.weight_decays())
        limited: dict[str, None] = {}
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, penalty, correct
        examples = terms = 0
        bar = tqdm(self.train_loader, desc=f"Epoch {epoch}", leave=False, disable=self._hidden)
        for batch in bar:
            x, y = split_batch(self.fabric.to_device(batch), self.dict_key_y)
            self.optimizer.zero_grad()
            f = self._forward(x)
            check_targets(f, y, self.likelihood)
            data_loss = loss_sum(f, y, self.likelihood)
            stable, names = self._stable_decays(parameters, decays, variance)
            limited |= dict.fromkeys(names)
            prior_loss = _penalty(parameters, stable)
            self.fabric.backward(data_loss / len(f) + variance * prior_loss)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            sums = [data_loss.detach(), prior_loss.detach() * len(f), torch.zeros_like(data_loss)]
            if self.likelihood == "classification":
                sums[2] = (f.argmax(-1) == y).sum()
            totals += torch.stack([value.double() for value in sums])
            examples += len(f)
            terms += f.shape[:-1].numel()
        if not examples:
            raise ValueError("The training data is empty: the loader yielded no batch.")
        loss, prior, correct = (totals / examples).tolist()
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
            record["accuracy"] = correct * examples / terms
        if limited:
            record["limited_weight_decay"] = list(limited)
        self._report(record)
        return record

    def _stable_decays(
        self, parameters: list[nn.Parameter], decays: list[Tensor], variance: float
    ) -> tuple[list[Tensor], list[str]]:
        """The weight decay of each parameter, and the names of those limited to 1 / lr."""
        rates = {p: g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        stable, limited = [], []
        for p, decay in zip(parameters, decays, strict=True):
            largest = 1 / (rates[p] * variance) if self._is_sgd and rates.get(p) else float("inf")
            if (decay > largest).any():
                limited += [name for name, q in self.model.named_parameters() if q is p]
            stable.append(decay.clamp(max=largest).to(p.device, p.dtype))
        return stable, limited

    def _update(self, epoch: int) -> None:
        hyper = self.hyperparameters
        start = time.perf_counter()
        delta = hyper.groups.for_laplace(hyper.prior_precision)
        laplace = self.make_laplace(delta, hyper.sigma_noise)
        laplace.fit(self.curvature_loader, progress_bar=self.progress)
        if laplace.n_data != self.num_data:
            raise ValueError(
                f"The curvature pass saw {laplace.n_data} examples, but the loader promised "
                f"{self.num_data}; its length must be what it yields."
            )
        fitted = time.perf_counter()
        before = float(laplace.log_marginal_likelihood())
        decomposed = time.perf_counter()
        evidences = hyper.update(laplace, self.schedule.steps)
        end = time.perf_counter()

        self._result.evidences += evidences[:-1]
        better = self._best_state is None or evidences[-1] > self._result.evidence
        if better or self.schedule.keep == "last":
            self._result.laplace = laplace
            self._result.evidence = evidences[-1]
            self._result.epoch = epoch
            self._best_state = deepcopy(self.model.state_dict())
            self._best_hyperparameters = (hyper.prior_precision, hyper.sigma_noise)
        record: Record = {
            "kind": "update",
            "epoch": epoch,
            "evidence_before": before,
            "evidence": evidences[-1],
            "evidence_per_example": evidences[-1] / self.num_data,
            "prior_precision": hyper.groups.summary(hyper.prior_precision),
            "weight_decay": hyper.groups.summary(self.weight_decays()),
            "seconds": {
                "pass": fitted - start,
                "eigenvalues": decomposed - fitted,
                "steps": end - decomposed,
            },
        }
        if self.likelihood == "regression":
            record["sigma_noise"] = hyper.sigma_noise.item()
        if getattr(laplace, "factors", None) is not None:
            names = laplace.factors.blocks
            gamma = laplace.effective_parameters()
            record["effective_parameters"] = dict(zip(names, gamma.tolist(), strict=True))
            record["clipped_eigenvalues"] = laplace.factors.num_clipped()
            record["left_out_share"] = laplace.factors.left_out_share
        self._report(record)

    def _finish(self) -> OnlineResult:
        hyper = self.hyperparameters
        if self._best_state is None:
            # No update was due: the hyperparameters are the initial ones.
            delta = hyper.groups.for_laplace(hyper.prior_precision)
            laplace = self.make_laplace(delta, hyper.sigma_noise)
            laplace.fit(self.curvature_loader, progress_bar=self.progress)
            self._result.laplace = laplace
            self._result.evidence = float(laplace.log_marginal_likelihood())
            self._result.epoch = self.schedule.epochs
            return self._result
        self.model.load_state_dict(self._best_state)
        hyper.set(*self._best_hyperparameters)
        laplace = self._result.laplace
        laplace.prior_precision = hyper.groups.for_laplace(hyper.prior_precision)
        if self.likelihood == "regression":
            laplace.sigma_noise = hyper.sigma_noise
        return self._result

    def _report(self, record: Record) -> None:
        self._result.records.append(record)
        if self.on_record is not None:
            self.on_record(record)


def _penalty(parameters: list[nn.Parameter], weight_decays: list[Tensor]) -> Tensor:
    """½ Σ_g wd_g ‖θ_g‖², the prior's part of the loss."""
    terms = [(wd * p.square()).sum() for p, wd in zip(parameters, weight_decays, strict=True)]
    return 0.5 * torch.stack(terms).sum()


def _fabric_of(model: nn.Module) -> Fabric:
    """A Fabric on the model's own device, in full precision."""
    device = next(model.parameters()).device
    devices: Any = [device.index or 0] if device.type != "cpu" else 1
    return Fabric(accelerator=device.type, devices=devices, precision="32-true")
