"""Learning the prior within a training loop that is not ours, such as a trainer's.

The steps are those of `OnlineTraining`: the prior's gradient is added before each step of the
optimiser, and every few epochs an update of the prior raises the evidence of a Laplace
approximation. On the same batches the weight decays are the same to the bit.

On several ranks of `torch.distributed` every method is collective. The loop must average gradients
over ranks, as `DistributedDataParallel` does, and each rank must have a shard of the data with the
same number of examples in each batch: only then is that average the gradient of the mean over all
examples.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.loss import counted_terms
from kfac_backend.model.checks import check_module
from kfac_backend.model.targets import Targets, split_batch
from kfac_backend.optimizer.training_pass import MeanOver
from kfac_backend.options import CurvatureOptions, Likelihood, check_option, check_positive
from kfac_backend.ranks import Ranks
from marglik.posterior.hyperparameters import Hyperparameters, UpdateMethod
from marglik.posterior.posterior import Posterior, parameter_vector
from marglik.posterior.prior import (
    PriorGroups,
    PriorStructure,
    precision_to_weight_decay,
    weight_decay_to_precision,
)
from marglik.training.loaders import Loader
from marglik.training.penalty import add_penalty, check_no_weight_decay, stable_decays
from marglik.training.ranks import check_shards, count_on_ranks
from marglik.training.update import update_prior
from marglik.training.update_schedule import Schedule

__all__ = ["PriorLearner"]


class PriorLearner:
    """Learns weight decays, one per parameter tensor, in another library's training loop.

    The loop calls `start` once, before its first step; `add_to_gradients` once before each step of
    the optimiser, after its backward passes; `end_of_epoch` after each epoch; and `end_of_training`
    after the last step. `start` makes the hyperparameters, since only then model and data are
    known. In between the learner holds them, the latest posterior and the evidences; network and
    optimiser remain the loop's. `state_dict` can be taken at any time after `start`. A state that
    is loaded waits for the next `start`, because before that there are no hyperparameters to put it
    into.

    Args:
        likelihood: likelihood of the loss: "classification", "regression" or "bernoulli".
        curvature: all options of the curvature pass.
        weight_decay: initial weight decay of all groups.
        structure: the groups of parameters that share a weight decay, see `PriorGroups.from_model`.
        every: epochs between updates; the training ends with an update, wherever it ends.
        burn_in: no update before the end of this epoch.
        steps: hyperparameter steps in each update.
        method: "adam" or "mackay".
        lr: Adam's step size on the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        learn_sigma_noise: whether σ of regression is learned.
        mean_over: "examples" if the loss is a mean over examples, as for a classifier; "terms" if
            it is a mean over all loss terms, as for a language model.
        loss_scale: factor by which the loss of an example, or of a term, exceeds −log p(y|f) at
            σ = 1. For ``F.mse_loss`` of C outputs it is 2/C, as −log p is ½‖y − f‖².

    Raises:
        ValueError: an option that is not supported.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        weight_decay: float = 5e-4,
        structure: PriorStructure | Mapping[str, str] = "layerwise",
        every: int = 5,
        burn_in: int = 0,
        steps: int = 100,
        method: UpdateMethod = "adam",
        lr: float = 0.1,
        temperature: float = 1.0,
        learn_sigma_noise: bool = False,
        mean_over: MeanOver = "examples",
        loss_scale: float = 1.0,
    ) -> None:
        curvature.check(likelihood)
        check_option("mean_over", mean_over, MeanOver)
        for name, value in (
            ("weight_decay", weight_decay),
            ("temperature", temperature),
            ("loss_scale", loss_scale),
        ):
            check_positive(name, value)
        if learn_sigma_noise and likelihood != "regression":
            raise ValueError(
                f"learn_sigma_noise=True is for likelihood 'regression', not {likelihood!r}."
            )
        self.likelihood: Likelihood = likelihood
        self.curvature = curvature
        self.temperature = temperature
        self.mean_over: MeanOver = mean_over
        self.loss_scale = loss_scale
        self.posterior: Posterior | None = None
        """The posterior of the latest update, with the hyperparameters that it learned; after
        `end_of_training` it is fitted at the network's final parameters."""
        self.evidences: list[float] = []
        """The evidence (nats) after each update."""
        self._schedule = Schedule(every=every, burn_in=burn_in, steps=steps, keep="last")
        self._initial = weight_decay
        self._structure: PriorStructure | Mapping[str, str] = structure
        self._hyperparameter_options: dict[str, Any] = {
            "method": method,
            "lr": lr,
            "learn_sigma_noise": learn_sigma_noise,
        }
        # Loaded before `start`, and applied by it.
        self._state: Mapping[str, Any] | None = None
        # R of sequences, on average. Known exactly after a curvature pass, and counted before the
        # first one, since with mean_over="terms" already the first step needs it.
        self._terms_per_example = 1.0
        self._epoch = 0
        self._is_trained = False

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        epochs: int | None = None,
    ) -> None:
        """Count the data and make the hyperparameters; call it before the first step.

        Args:
            model: the network, whose outputs are logits, or means for regression. Of a
                `DistributedDataParallel`, pass its ``module``.
            optimizer: the network's optimiser, without weight decay.
            loader: batches (x, y), or mappings, of training and of the curvature pass; with several
                ranks this rank's shard.
            epochs: number of epochs, if it is known.

        Raises:
            ValueError: an optimiser with weight decay, no data, the state of another model, or
                loaders that are not shards of one data set.
            RankError: another rank has failed, or is gone.
        """
        check_module(model)
        check_no_weight_decay(optimizer)
        self._ranks = Ranks()
        check_shards(self._ranks, loader=loader)
        self._model, self._optimizer, self._loader = model, optimizer, loader
        # Of unknown length: no epoch is then the last, and `end_of_training` makes the last update.
        self._schedule = replace(self._schedule, epochs=epochs or sys.maxsize)
        self._is_trained = False
        self._num_data = count_on_ranks(loader, self._ranks)
        self.hyperparameters = Hyperparameters(
            PriorGroups.from_model(model, self._structure),
            weight_decay_to_precision(self._initial, self._num_data, self.temperature),
            **self._hyperparameter_options,
        )
        if self.mean_over == "terms" and self._state is None:
            self._terms_per_example = self._count_terms()
        if self._state is not None:
            self._terms_per_example = self._state["terms_per_example"]
            self.evidences = list(self._state["evidences"])
            self.hyperparameters.load_state_dict(self._state["hyperparameters"])
            self._state = None

    def _count_terms(self) -> float:
        """Loss terms per example, on average over all ranks; reads the targets of all batches."""
        targets = Targets(self.likelihood, self.curvature)
        terms = examples = 0
        for batch in self._loader:
            x, y = split_batch(batch, self.curvature.dict_key_y)
            y = targets(self._model, x, y)
            counted = counted_terms(y, self.likelihood)
            terms += y.shape[:-1].numel() if counted is None else int(counted.sum())
            examples += len(y)
        of_ranks = self._ranks.gather((terms, examples), "counting the loss terms")
        terms, examples = (sum(of_rank) for of_rank in zip(*of_ranks, strict=True))
        return max(terms, 1) / examples

    def add_to_gradients(self) -> Tensor:
        """Add the prior's gradient to the parameters' gradients; returns ½ Σ wd ‖θ‖², a scalar.

        Call it once before each step of the optimiser, after the backward passes.

        Raises:
            RuntimeError: `start` was not called.
        """
        if not hasattr(self, "hyperparameters"):
            raise RuntimeError(
                "The prior has no parameters yet; call start(model, optimizer, loader) before the "
                "first step."
            )
        self._is_trained = True
        hyper = self.hyperparameters
        groups, decays = hyper.groups, self.weight_decays()
        by_parameter = (
            groups.for_parameters(decays)
            if groups.diagonal
            else groups.for_laplace(decays).tolist()
        )
        # The objective of `marglik.training.network` is a mean over examples of −log p/σ², plus the
        # penalty. The user's loss is this many times its first part, and so must the prior's
        # gradient be: σ² since his loss has no noise, 1/R where he averages over R terms, too.
        scale = hyper.sigma_noise.square().item() * self.loss_scale
        if self.mean_over == "terms":
            scale /= self._terms_per_example
        stable, _ = stable_decays(self._model, self._optimizer, by_parameter, scale)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        return add_penalty(parameters, stable, torch.tensor(scale, device=parameters[0].device))

    def end_of_epoch(self, epoch: int) -> dict[str, float]:
        """Update the prior if an update is due; returns the numbers to log, by name.

        Args:
            epoch: number of the epoch that has ended, from 1.

        Raises:
            ValueError: mean_over="examples", but examples have several loss terms.
            FloatingPointError: the evidence is not finite.
        """
        self._epoch = epoch
        return self._update(self._schedule.steps) if self._schedule.is_due(epoch) else {}

    def end_of_training(self) -> dict[str, float]:
        """Update the prior unless the latest update was at these parameters; returns what to log.

        Call it after the last step. A run may end within an epoch (after a number of steps, or by
        early stopping), or with other parameters than its last ones (those of the best epoch).
        Before the end of the burn-in, and if nothing was trained, the posterior is fitted without
        changing the weight decays.

        Raises:
            ValueError, FloatingPointError: see `end_of_epoch`.
        """
        # By the parameters themselves and not by the epoch's number, as the loop may have loaded
        # others since.
        known = self.posterior
        if known is not None and known.model is self._model:
            if torch.equal(parameter_vector(known.params), known.mean):
                return {}
        learns = self._is_trained and self._epoch >= self._schedule.burn_in
        return self._update(self._schedule.steps if learns else 0)

    def _update(self, steps: int) -> dict[str, float]:
        hyper = self.hyperparameters
        laplace = Posterior(
            self._model,
            self.likelihood,
            self.curvature,
            prior_precision=hyper.groups.for_laplace(hyper.prior_precision),
            sigma_noise=hyper.sigma_noise,
            temperature=self.temperature,
        )
        evidences, record = update_prior(
            hyper,
            laplace,
            self._loader,
            self._num_data,
            steps,
            temperature=self.temperature,
            ranks=self._ranks,
            dict_key_y=self.curvature.dict_key_y,
        )
        factors = laplace.factors
        assert factors is not None
        terms = factors.num_loss_terms / factors.num_data
        if self.mean_over == "examples" and terms != 1:
            raise ValueError(
                f"The examples have {terms:.4g} loss terms each. If the loss is a mean over all "
                "terms, the prior's gradient must be smaller by this factor: pass "
                "mean_over='terms'. If the loss is a mean over examples of sums over terms, pass "
                f"mean_over='terms' and loss_scale={terms:.4g}."
            )
        self._terms_per_example = terms
        laplace.prior_precision = hyper.groups.for_laplace(hyper.prior_precision)
        if self.likelihood == "regression":
            laplace.sigma_noise = hyper.sigma_noise
        self.posterior = laplace
        self.evidences.append(evidences[-1])
        found = {"log_marginal_likelihood_per_example": record["evidence_per_example"]}
        found |= {f"weight_decay/{name}": wd for name, wd in record["weight_decay"].items()}
        if "sigma_noise" in record:
            found["sigma_noise"] = record["sigma_noise"]
        return found

    def weight_decays(self) -> Tensor:
        """The current weight decay T·δ/N of each group, (groups,)."""
        delta = self.hyperparameters.prior_precision
        return precision_to_weight_decay(delta, self._num_data, self.temperature)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: tensors, numbers and strings."""
        return {
            "hyperparameters": self.hyperparameters.state_dict(),
            "terms_per_example": self._terms_per_example,
            "evidences": list(self.evidences),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; takes effect at the next `start`."""
        self._state = dict(state)
