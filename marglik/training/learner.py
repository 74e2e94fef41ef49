"""The learner of weight decays: all of the method but the network's own steps.

Source: Immer et al. 2021 (arXiv:2104.04975), algorithm 1; the phases are in
`marglik.training.schedule`. `OnlineTraining`, `marglik_training`, the command and the callbacks are
loops around a `PriorLearner`, and so learn the same decays on the same batches, to the bit.

On several ranks of `torch.distributed` every method is collective. The loop must average gradients
over ranks, as `DistributedDataParallel` does, and each rank must have a shard of the data with the
same number of examples in each batch: only then is that average the gradient of the mean over all
examples.
"""

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import to_device
from kfac_backend.engine.calls import arguments, forked_random_numbers, logits_of
from kfac_backend.engine.checks import check_module
from kfac_backend.engine.padding import padding_rows
from kfac_backend.engine.task import Task, split_batch
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.loss import counted_terms
from kfac_backend.optimizer.training_pass import MeanOver
from kfac_backend.options import CurvatureOptions, check_keys, check_option, check_positive
from kfac_backend.ranks import Ranks
from marglik.augmentation.ranges import RangeLearner, evidence_gradient, ranges_of, set_ranges
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior, parameter_vector
from marglik.posterior.prior import (
    Hyperparameters,
    PriorGroups,
    PriorStructure,
    UpdateMethod,
    precision_to_weight_decay,
    weight_decay_to_precision,
)
from marglik.training.label_noise import held_out_label_noise
from marglik.training.loaders import (
    Loader,
    WithExamples,
    check_shards,
    count_examples,
    count_on_ranks,
)
from marglik.training.loss_agreement import warn_of_another_loss
from marglik.training.random_state import own_random_numbers
from marglik.training.schedule import CurvatureFrom, Schedule
from marglik.training.steps import (
    StepWatch,
    WeightAverage,
    add_penalty,
    clip_gradients,
    optimizers_of,
    renew_batch_norm,
    stable_decays,
    watches_of,
)

_logger = logging.getLogger(__name__)

WEIGHT_DECAY = 5e-4
"""The initial weight decay of all groups."""
LARGEST_COSINE = 1e-3
"""Between a scale-invariant weight and its gradient, in the first steps. Measured: below 3e-5 for
weights before BatchNorm, above 3e-3 for others."""
LARGEST_INVARIANT_DECAY = 0.1
"""Of scale-invariant weights in training. Measured in `experiments.weight_decay.default_options`:
without a limit three of ten networks broke down after some updates, on clean labels; a limit of
1e-3 instead costs 0.2 nats after LayerNorm with wrong labels."""
LARGEST_START = 1e-2
"""Of weights trained by SGD for classification, see `PriorLearner._raise_start`. Measured in
`experiments.weight_decay.default_options`: it changes the NLL by -0.035 (convolutions, wrong
labels) to +0.007, by -0.005 on average; a transformer trained by Adam would lose 0.02."""
LARGEST_DECLINE = 0.5
"""By how much that decay may shrink log ‖w‖ before the first update."""
OBSERVED_STEPS = 10
"""Number of steps in which that cosine is looked at."""
FEW_VECTORS = 3_000
"""Backward passes of one example each, of an exact pass over all of the data."""
FEW_UPDATES = 10
"""Fewer do not show that the evidence falls."""
STILL_MOVING = 1.5
"""The factor by which a weight decay that has settled does not change in one update."""
FALLEN_EVIDENCE = 0.02
"""By how much (nats per example) the evidence may end below its best. Measured: on nine
problems where learning is as good as a grid or better it ends at its best; 0.08 below it on 4,000
images with wrong labels, where a grid is better with 40 %."""


class PriorLearner:
    """Learns weight decays, one per parameter tensor, while a network trains.

    The loop calls `start` once, before its first step; `add_to_gradients` once before each step of
    the optimiser, after its backward passes; `end_of_epoch` after each epoch; and `end_of_training`
    after the last step. A call that is left out, or made twice, is an error that says so: hooks on
    the optimiser see its steps until `end_of_training`. After an error in the data `end_of_epoch`
    and `end_of_training` can be called again. The learner holds the hyperparameters, the latest
    posterior, the evidences and the average of the parameters; network and optimiser remain the
    loop's. `state_dict` can be taken at any time after `start`. A state is loaded before `start`,
    which makes the hyperparameters that it is put into.

    Keep the learning rate high enough for the parameters to follow the decays; a rate that falls to
    zero freezes them where they are. `marglik.settling_rate` suits.

    Args:
        likelihood: likelihood of the loss: "classification", "regression", "bernoulli", or another
            of `kfac_backend.likelihoods`. Of "student_t", say, degrees of freedom and scale are
            learned, too; of "student_t(df=4)" the scale alone. The loop's loss then changes with
            each update: it is ``learner.likelihood.loss(f, y)``.
        curvature: all options of the curvature pass.
        weight_decay: initial weight decay of all groups. From the default SGD goes on with up to
            1e-2 for a classifier's weights, once it is known which of them matter in length.
        structure: the groups of parameters that share a weight decay, see `PriorGroups.from_model`.
        method: "adam" or "mackay".
        lr: Adam's step size on the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: σ of regression, which is held fixed. None learns it, from 0.1; where nothing
            is learned, as with updates=0, it is then 1.
        learn_sigma_noise: True learns σ from ``sigma_noise``; False holds it fixed at 1 if
            ``sigma_noise`` is None.
        mean_over: "examples" if the loss is a mean over examples, as for a classifier; "terms" if
            it is a mean over all loss terms, as for a language model.
        loss_scale: factor by which the loss of an example, or of a term, exceeds −log p(y|f) at
            σ = 1. For ``F.mse_loss`` of C outputs it is 2/C, as −log p is ½‖y − f‖².
        curvature_from: "auto" makes a pass over the data for each update, with a label drawn from
            the model for each loss term if all updates with the exact Fisher would take longer than
            the training; the last pass is exact. "pass" makes each as ``curvature`` says.
        schedule: when updates happen, and what is averaged.
        hyperparameters: your own, in place of weight_decay, structure, method, lr and the noise.
        options: single fields of `Schedule`, such as ``updates``, ``every``, ``burn_in``, ``steps``
            and ``average``, and of `CurvatureOptions`, such as ``kfac_approx`` or ``dict_key_y``.

    Raises:
        ValueError: an option that is not supported.
        TypeError: a keyword that is no option.
    """

    STATE = (
        "_epoch", "_steps", "_steps_at_update", "_highest_rate", "evidences", "evidences_of_steps",
        "_best", "_invariant", "_moves", "_gradient_norm", "_course",
    )  # fmt: skip
    """Attributes of plain data and tensors that change from step to step; see `state_dict`."""

    def __init__(
        self,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        weight_decay: float = WEIGHT_DECAY,
        structure: PriorStructure | Mapping[str, str] = "layerwise",
        method: UpdateMethod = "adam",
        lr: float = 0.1,
        temperature: float = 1.0,
        sigma_noise: float | None = None,
        learn_sigma_noise: bool | None = None,
        mean_over: MeanOver = "examples",
        loss_scale: float = 1.0,
        curvature_from: CurvatureFrom = "auto",
        schedule: Schedule = Schedule(),  # noqa: B008
        hyperparameters: Hyperparameters | None = None,
        **options: Any,
    ) -> None:
        of_schedule, of_curvature = (
            [field.name for field in fields(kind)] for kind in (Schedule, CurvatureOptions)
        )
        for name in options:
            if name not in of_schedule + of_curvature:
                raise TypeError(
                    f"{name!r} is not an option of PriorLearner; beside its arguments there are "
                    f"those of Schedule ({', '.join(of_schedule)}) and those of CurvatureOptions "
                    f"({', '.join(of_curvature)})."
                )
        curvature = curvature.replace(**{k: v for k, v in options.items() if k in of_curvature})
        likelihood = likelihood_of(likelihood)
        curvature.check(likelihood)
        check_option("mean_over", mean_over, MeanOver)
        check_option("curvature_from", curvature_from, CurvatureFrom)
        check_positive("weight_decay", weight_decay)
        check_positive("temperature", temperature)
        check_positive("loss_scale", loss_scale)
        if learn_sigma_noise and not likelihood.has_sigma:
            raise ValueError(
                f"learn_sigma_noise=True is for likelihood 'regression', not '{likelihood}'."
            )
        self._asked = likelihood
        self.curvature = curvature
        s = replace(schedule, **{k: v for k, v in options.items() if k in of_schedule})
        self.schedule = s
        learns = bool(s.updates and s.steps and (s.epochs is None or s.burn_in <= s.epochs))
        self._to_learn = self._asked.to_learn() if learns else {}
        self.likelihood = likelihood.replace(**self._to_learn) if self._to_learn else likelihood
        """The likelihood, with the noises that it has come to."""
        self.temperature = temperature
        self.mean_over: MeanOver = mean_over
        self.loss_scale = loss_scale
        self.posterior: Posterior | None = None
        """The posterior of the latest update, with the hyperparameters that it learned; after
        `end_of_training` it is fitted at the network's final parameters."""
        self.evidences: list[float] = []
        """The evidence (nats) after each update."""
        self.evidences_of_steps: list[float] = []
        """The evidence (nats) before each hyperparameter step."""
        self.record: dict[str, Any] = {}
        """What `update_prior` recorded in the latest update."""
        self.kept_epoch = 0
        """The epoch that the final parameters are of."""
        self.limited: set[str] = set()
        """Names of the parameters whose weight decay SGD could not take, see `stable_decays`."""
        self.progress = False
        self._curvature_from: CurvatureFrom = curvature_from
        self._given = hyperparameters
        self._structure: PriorStructure | Mapping[str, str] = structure
        self._weight_decay = weight_decay
        self._replayed: Mapping[int, tuple[Tensor, Tensor, str]] = {}
        self._given_ranges: dict[str, float] = {}
        if learn_sigma_noise is None:
            learn_sigma_noise = self._asked.has_sigma and sigma_noise is None and learns
        if sigma_noise is None:
            sigma_noise = 0.1 if learn_sigma_noise else 1.0
        self._make_hyperparameters = partial(
            Hyperparameters,
            method=method,
            lr=lr,
            learn_sigma_noise=learn_sigma_noise,
            sigma_noise=sigma_noise,
        )
        # Loaded before `start`, and applied by it.
        self._state: Mapping[str, Any] | None = None
        self._watches: list[StepWatch] = []  # from `start` to `end_of_training`
        self.clipped: Tensor | int = 0
        """Number of steps of this epoch whose gradients were limited, see `Schedule`."""

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loader: Loader,
        epochs: int | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        ranks: Ranks | None = None,
        sums_terms: bool = False,
        held_out: Iterable[Any] | None = None,
    ) -> None:
        """Count the data and make the hyperparameters; call it before the first step.

        Args:
            model: the network, whose outputs are logits, or means for regression. Of a
                `DistributedDataParallel`, pass its ``module``.
            optimizer: the network's optimiser, without weight decay, or a list of several, which
                hold all trainable parameters.
            loader: batches (x, y), or mappings, of training and of the curvature pass; with several
                ranks this rank's shard.
            epochs: number of epochs, if it is known.
            loss: the loop's loss as a function of outputs and the batch's targets, which is
                compared with the likelihood's on the first batch; see `compare_loss`.
            ranks: the ranks that train together; None takes all of `torch.distributed`.
            sums_terms: whether the loss is a mean over examples of sums over their terms; with it,
                mean_over must be "examples".
            held_out: batches that the network is not trained on, read after each epoch, from which
                the share of wrong labels is learned; with several ranks this rank's part of each.

        Raises:
            ValueError: an optimiser with weight decay, or without some trainable parameter; no
                data, a state of another model or of other options, loaders that are not shards of
                one data set, or mean_over="examples" for examples with several loss terms.
            RankError: ranks with different models or options.
        """
        check_module(model)
        self.detach()
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizers = optimizers_of(optimizer, self._named)
        self._ranks = Ranks() if ranks is None else ranks
        check_shards(loader, self._ranks)
        if self._to_learn and self.likelihood.has_label_noise and held_out is None:
            raise ValueError(
                f"Likelihood '{self._asked}' learns the share of wrong labels from labels that the "
                "network is not trained on. Pass held_out=batches, a tenth of the data, or give "
                "the share: 'noisy_classification(noise=0.2)'."
            )
        self._model, self._loader, self._held_out = model, loader, held_out
        self.schedule = replace(self.schedule, epochs=epochs)
        if epochs is None and self.schedule.average == "last":
            warnings.warn(
                "The parameters are not averaged, since the number of epochs is unknown: call "
                "start(..., epochs), or pass average=None.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.num_data = count_on_ranks(loader, self._ranks, self.curvature)
        """N, the number of examples of all ranks."""
        self.hyperparameters = self._given or self._make_hyperparameters(
            PriorGroups.from_model(model, self._structure),
            weight_decay_to_precision(self._weight_decay, self.num_data, self.temperature),
        )
        self._epoch = 0  # the number of epochs that have ended
        self._steps = 0
        self._steps_at_update: int | None = None
        self._highest_rate = 0.0
        self._average = WeightAverage()
        self._best: dict[str, Any] | None = None
        self._moves: dict[str, float] = {}
        self._gradient_norm: Tensor | None = None
        self._invariant = sorted(self._named)  # of scale, as far as is known
        self._course: dict[int, tuple[Tensor, Tensor, str]] = {}
        # A rank with another model or other options would learn something else, or wait forever.
        self._ranks.agree(self._identity() | {"the number of epochs": epochs})
        if self._given_ranges:
            set_ranges(model, self._given_ranges)
        self._ranges = RangeLearner(model)
        self._terms_per_example = self._look_at_data(sums_terms, loss)
        if self._state is not None:
            self._load(self._state)
            self._state = None
        self._set_decays()
        self._watches = watches_of(self._optimizers, list(self._named.values()))

    def detach(self) -> None:
        """Remove the hooks from the optimiser, as `end_of_training` does: nothing is checked then.

        For a loop that was given up while the learner and the optimiser live on.
        """
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _look_at_data(self, sums_terms: bool, loss: Callable[[Any, Any], Tensor] | None) -> float:
        """Loss terms per example, which the share of the prior in a mean over terms depends on.

        Reads the first batch: its targets and outputs also tell the cost of an exact pass. With
        mean_over="terms" it reads all targets, since already the first step needs their number.
        """
        task, terms, examples = Task(self.likelihood, self.curvature), 0, 0
        device = next(self._model.parameters()).device
        self._vectors = 1
        self._padding: dict[str, int] = {}  # rows that are constants, and so have no decay
        with forked_random_numbers(self._model), eval_mode(self._model), torch.no_grad():
            for index, batch in enumerate(self._loader):
                x, labels = task.split(batch)
                if index == 0:  # a copy, since a model may change its input in place
                    x, labels = deepcopy(to_device(x, device)), to_device(labels, device)
                y = task.targets(self._model, x, labels)
                counted = counted_terms(y, self.likelihood)
                terms += y.shape[:-1].numel() if counted is None else int(counted.sum())
                examples += len(y)
                if index == 0 and len(y):
                    self._padding = padding_rows(self._model, x)
                    args, kwargs = arguments(self._model, x)
                    f = logits_of(self._model(*args, **kwargs))
                    of_position = self.likelihood.num_vectors(f.shape[-1])
                    self._vectors = f.shape[1:-1].numel() * of_position
                    if loss is not None:
                        with torch.enable_grad():
                            f = f.detach().requires_grad_()
                            self.compare_loss(loss(f, labels), f, y)
                if self.mean_over == "examples":
                    break
        self._padding = next(filter(None, self._ranks.gather(self._padding)), {})
        of_ranks = self._ranks.gather((terms, examples, self._vectors))
        found = max(sum(r[0] for r in of_ranks), 1) / max(sum(r[1] for r in of_ranks), 1)
        self._vectors = max(r[2] for r in of_ranks)
        if self.mean_over == "examples" and found != 1 and not sums_terms:
            raise ValueError(
                f"The examples have {found:.4g} loss terms each. If the loss is a mean over all "
                "terms, the prior's gradient must be smaller by this factor: pass "
                "mean_over='terms'. If the loss is a mean over examples of sums over terms, call "
                "start(..., sums_terms=True)."
            )
        return 1.0 if sums_terms else found

    def compare_loss(self, loss: Tensor, f: Tensor, y: Tensor) -> None:
        """Warn, with the likely cause, if the loop's loss is not that of the likelihood.

        That is ``loss_scale`` times the mean of −log p(y|f) over examples or terms, up to a
        constant. Call it once, with the first batch.

        Args:
            loss: the loop's loss, with its graph.
            f: outputs, with their graph.
            y: targets of the outputs.
        """
        warn_of_another_loss(
            loss,
            f,
            y,
            self.likelihood,
            is_mean_over_terms=self.mean_over == "terms",
            scale=self.loss_scale,
        )

    @property
    def _draws_labels(self) -> bool:
        """Whether updates draw labels, as exact passes would take longer than the training.

        In passes over one example: a training step is a forward pass and a backward pass of twice
        its cost; an exact pass is a forward pass and V backward passes. With few examples the noise
        of drawn labels is larger, and an exact pass takes no time to speak of.
        """
        schedule, V = self.schedule, self._vectors
        if self._curvature_from != "auto" or self.curvature.fisher != "exact":
            return False
        # With keep="best", noise would choose among the evidences.
        if schedule.epochs is None or schedule.keep == "best":
            return False
        every = schedule.every
        updates = schedule.updates if every is None else schedule.epochs // every
        is_long = updates * (1 + 2 * V) > 3 * schedule.epochs
        return is_long and V > 1 and V * self.num_data > FEW_VECTORS

    # --- in the network's steps ---

    def add_to_gradients(self, scale: Tensor | float = 1.0) -> Tensor:
        """Add the prior's gradient to the parameters' gradients; returns ½ Σ wd ‖θ‖², a scalar.

        Call it once before each step of the optimiser, after the backward passes.

        Args:
            scale: what the loss was multiplied with, as gradient scalers do.

        Raises:
            RuntimeError: `start` was not called, or this was called for the same step before.
        """
        if not hasattr(self, "hyperparameters"):
            raise RuntimeError(
                "The prior has no parameters yet; call start(model, optimizer, loader) before the "
                "first step."
            )
        for watch in self._watches:
            watch.check_not_added()
        parameters = list(self._named.values())
        if self.schedule.is_averaged(self._epoch + 1):
            self._average.add(parameters)  # what the steps before this one have come to
        if self._steps < OBSERVED_STEPS:
            self._invariant = [name for name in self._invariant if self._may_be_invariant(name)]
        self._steps += 1
        if self._steps == OBSERVED_STEPS:
            self._raise_start()
            if self._invariant:
                _logger.info(
                    "the outputs do not depend on the length of %s (a normalisation follows): "
                    "their weight decay acts on the learning rate of their direction alone, and "
                    "training takes at most %.0e of it",
                    ", ".join(self._invariant),
                    LARGEST_INVARIANT_DECAY,
                )
        self._highest_rate = max(self._highest_rate, self._rate)
        padding = {i: self._padding[n] for i, n in enumerate(self._named) if n in self._padding}
        scaled = self._gradient_scale * scale
        penalty = add_penalty(parameters, self._stable_decays(), scaled, padding)
        clip = self.schedule.clip if self._steps > OBSERVED_STEPS else None
        self._gradient_norm, is_clipped, finite = clip_gradients(
            parameters, self._gradient_norm, clip, scale
        )
        self.clipped = self.clipped + is_clipped
        for watch in self._watches:
            watch.added(finite)
        return penalty

    @property
    def ended_epochs(self) -> int:
        """The number of epochs after which `end_of_epoch` was called."""
        return self._epoch

    def _stable_decays(self) -> list[float]:
        """The decays that the optimiser takes at its present rates, one for each tensor."""
        rates = [float(group["lr"]) for of in self._optimizers for group in of.param_groups]
        if rates != self._stable_at:
            self._stable_at = rates
            self._stable, limited = stable_decays(
                self._named, self._optimizers, self._decays, self._gradient_scale
            )
            _warn_of(
                [name for name in limited if name not in self.limited],
                "The weight decay of {} has grown beyond 1 / learning rate, where SGD would "
                "diverge, and is limited to it: the data needs none of it, or training is "
                "unstable.",
            )
            self.limited = set(limited)
        return self._stable

    def decays_of_parameters(self) -> list[float]:
        """T·δ/N of each trainable tensor, in ``parameters()`` order."""
        return self._decays

    def weight_decays(self) -> Tensor:
        """The current weight decay T·δ/N of each group, (groups,)."""
        delta = self.hyperparameters.prior_precision
        return precision_to_weight_decay(delta, self.num_data, self.temperature)

    def replay(self) -> "PriorLearner":
        """A learner for another network of this kind, whose decays take the course of this one's.

        For the members of an `Ensemble`: in each epoch their decays, noises and the average are
        those that this learner had in it, so that a member costs one training, without updates and
        without a posterior. Not the last decays from the start: they belong to a network that fits,
        and can keep one from ever fitting. Call it after `end_of_training`.
        """
        delta, sigma, likelihood = self._course[0]
        learner = PriorLearner(
            likelihood,
            self.curvature,
            temperature=self.temperature,
            mean_over=self.mean_over,
            loss_scale=self.loss_scale,
            schedule=replace(self.schedule, updates=0),
            hyperparameters=Hyperparameters(
                PriorGroups.from_model(self._model), delta, sigma_noise=sigma.item()
            ),
        )
        learner._replayed = dict(self._course)
        learner._given_ranges = ranges_of(self._model)
        return learner

    def _set_decays(self) -> None:
        """Computed once per update, since the steps read them; remembered for `replay`."""
        # How many times the loop's loss is the mean over examples of −log p/σ² plus the penalty:
        # σ², since the loop's loss has no noise; 1/R where it averages over R terms, too.
        sigma, likelihood = self.hyperparameters.sigma_noise, str(self.likelihood)
        self._gradient_scale = sigma.square().item() * self.loss_scale
        if self.mean_over == "terms":
            self._gradient_scale /= self._terms_per_example
        self._stable_at: list[float] = []  # to be found again, see `_stable_decays`
        of_groups = self.weight_decays()
        self._decays: list[float] = self.hyperparameters.groups.of_tensors(of_groups).tolist()
        # A decay λ of a scale-invariant weight w acts on its direction alone, which turns by up to
        # sqrt(2 η λ) in a step. The evidence knows of no such rate: it raises δ as ‖w‖ falls, and
        # training breaks down once the direction turns too far. So these decays have a limit.
        if self._steps_at_update is not None and self._steps >= OBSERVED_STEPS:
            self._decays = [
                min(decay, LARGEST_INVARIANT_DECAY) if name in self._invariant else decay
                for name, decay in zip(self._named, self._decays, strict=True)
            ]
        decays = torch.tensor(self._decays, dtype=torch.float64)
        delta = weight_decay_to_precision(decays, self.num_data, self.temperature)
        for last in [*self._course.values()][-1:]:
            if torch.equal(last[0], delta) and last[1:] == (sigma, likelihood):
                return  # a resume sets what was set before
        self._course[self._epoch] = (delta, sigma, likelihood)

    def _raise_start(self) -> None:
        """Raise decays that begin at the default, where the network could fit wrong labels.

        A label that is fitted has no curvature, whether it is right or wrong, and then the evidence
        cannot tell. So a classifier's decays come down to their values rather than up to them.
        """
        groups, schedule = self.hyperparameters.groups, self.schedule
        # Not with optimisers that divide gradients by their size, and the decays' pull with them.
        if (
            self.likelihood.kind != "classes"
            or not all(isinstance(of, torch.optim.SGD) for of in self._optimizers)
            or not isinstance(self._loader, Sized)
        ):
            return
        epochs = range(1, (schedule.epochs or 1) + 1)
        first = next((epoch for epoch in epochs if schedule.is_due(epoch)), None)
        if first is None:
            return
        # Not so far that the weights would have vanished before the first update.
        momenta = [group["momentum"] for of in self._optimizers for group in of.param_groups]
        momentum = float(max(momenta))
        rate = self._rate / max(1 - momentum, 1e-3)
        start = min(LARGEST_START, LARGEST_DECLINE / (rate * first * len(self._loader)))
        decays = self.weight_decays()
        raised = decays.clone()
        for g in range(len(decays)):
            members = [p for p, group in zip(self._named, groups.index, strict=True) if group == g]
            # Not of scale-invariant weights, whose decay acts on the learning rate alone.
            if abs(decays[g].item() / WEIGHT_DECAY - 1) < 1e-6 and all(
                self._named[name].dim() > 1 and name not in self._invariant for name in members
            ):
                raised[g] = max(start, WEIGHT_DECAY)
        delta = weight_decay_to_precision(raised, self.num_data, self.temperature)
        self.hyperparameters.set(delta, self.hyperparameters.sigma_noise)
        self._set_decays()

    @property
    def _rate(self) -> float:
        return float(self._optimizers[0].param_groups[0]["lr"])

    @torch.no_grad()
    def _may_be_invariant(self, name: str) -> bool:
        """Whether f(cw) = f(w) for a weight, alone or with its bias: f(cw, cb) = f(w, b).

        The gradient is orthogonal to them in each step. A weight is followed by BatchNorm or is
        normed itself where it is so alone, and by GroupNorm or LayerNorm where it is with its bias.
        """
        weight, bias = self._named[name], self._named.get(f"{name.removesuffix('weight')}bias")
        if weight.dim() < 2 or weight.grad is None:
            return False
        inner = squares = lengths = torch.zeros((), device=weight.device)
        for p in (weight, bias):
            if p is None or p.grad is None:
                continue
            inner = inner + (p.grad * p).sum()
            squares, lengths = squares + p.grad.square().sum(), lengths + p.square().sum()
            if inner.abs() <= LARGEST_COSINE * (squares * lengths).sqrt().clamp(min=1e-30):
                return True
        return False

    # --- between epochs ---

    def is_due(self, epoch: int) -> bool:
        """Whether `end_of_epoch` makes an update; after the last epoch `end_of_training` does."""
        return self.schedule.is_due(epoch) and epoch != self.schedule.epochs

    def end_of_epoch(self, epoch: int) -> dict[str, float]:
        """Update the prior if an update is due; returns the numbers to log, by name.

        Args:
            epoch: number of the epoch that has ended, from 1; one that has ended before, as after a
                resume, is ignored. After an error it has not, and can be given again.

        Raises:
            FloatingPointError: the evidence is not finite.
        """
        if epoch <= self._epoch:
            return {}
        with self._unchanged_by_errors():
            self._epoch = epoch
            self.clipped = 0
            if epoch in self._replayed:
                delta, sigma, likelihood = self._replayed[epoch]
                self.likelihood = likelihood_of(likelihood)
                self.hyperparameters.set(delta, sigma)
                self._set_decays()
            self._learn_label_noise()
            return self._update(self.schedule.steps) if self.is_due(epoch) else {}

    def _learn_label_noise(self) -> None:
        """Learn the share of wrong labels at the present parameters."""
        if not self._to_learn or not self.likelihood.has_label_noise:
            return
        assert self._held_out is not None  # `start` checks it
        self.likelihood = held_out_label_noise(
            self.likelihood, self._model, self._held_out, self.curvature, self._ranks
        )
        self._set_decays()

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """A context after which an error, as of the data, has left the learner as it was."""
        before = {k: copy(v) if isinstance(v, list | dict) else v for k, v in vars(self).items()}
        parts = self.hyperparameters, self._ranges
        states, ranges = [deepcopy(part.state_dict()) for part in parts], ranges_of(self._model)
        try:
            yield
        except BaseException:
            vars(self).update(before)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
            if ranges:
                set_ranges(self._model, ranges)
            raise

    def end_of_training(self) -> dict[str, float]:
        """Take the average, and update the prior there; returns what to log.

        Call it after the last step. A run may end within an epoch (after a number of steps, or by
        early stopping), or with other parameters than its last ones (those of the best epoch; then
        pass average=None). Before the end of the burn-in, and if nothing was trained, the posterior
        is fitted without changing the weight decays.

        Raises:
            FloatingPointError: see `end_of_epoch`.
            RuntimeError: `end_of_epoch` was never called.
        """
        if self._steps and not self._epoch:
            raise RuntimeError(
                f"end_of_epoch was not called in {self._steps} steps, so that no update was made. "
                "Call end_of_epoch(epoch) after each epoch, with epoch = 1, 2, ...; also after one "
                "that is cut short."
            )
        self.detach()
        # Step 1: the average, if there is one, takes the place of the last step's parameters.
        if self._average.count:
            parameters = list(self._named.values())
            self._average.add(parameters)
            self._average.write(parameters)
            self._steps_at_update = None
            with forked_random_numbers(self._model):
                renew_batch_norm(self._model, self._loader, self.curvature, self._ranks)
            self._average = WeightAverage()
        self.kept_epoch = self._epoch
        schedule = self.schedule
        if not schedule.updates:
            return {}
        # Step 2: the last update, or else a posterior, at the parameters that are there now. They
        # are compared by value, as the loop may have loaded others since; and an update at them,
        # perhaps before a resume, is not made again.
        found: dict[str, float] = {}
        here = parameter_vector(self._named.values())
        with self._unchanged_by_errors():
            is_fitted = self.posterior is not None and torch.equal(here, self.posterior.mean)
            is_updated = self._steps == self._steps_at_update and (
                self.posterior is None or is_fitted
            )
            learns = self._steps > 0 and self._epoch >= schedule.burn_in and not is_updated
            if learns and (schedule.keep == "last" or schedule.is_due(self._epoch)):
                self._learn_label_noise()
                found = self._update(schedule.steps, is_last=True)
            elif not is_fitted or self._draws_labels:
                if is_updated:
                    self.evidences.pop()  # the same update's, of drawn labels or before a resume
                self.evidences.append(self._fit(0, is_last=True)[0][-1])
            # Step 3: back to the best update, if that is asked for.
            if self._best is not None and self._best["evidence"] > self.evidences[-1]:
                self._model.load_state_dict(self._best["model"])
                self.hyperparameters.set(self._best["prior_precision"], self._best["sigma_noise"])
                self.likelihood = likelihood_of(self._best["likelihood"])
                self.kept_epoch = self._best["epoch"]
                self.evidences.append(self._fit(0, is_last=True)[0][-1])
        _warn_of(
            [f"{name} (a factor of {move:.1f})" for name, move in self._moves.items()],
            "The training ended before its weight decays settled: the last update during steps at "
            "a high learning rate still changed {}. Train longer, or keep the rate high for longer "
            "(marglik.settling_rate).",
        )
        best, last = (e / self.num_data for e in (max(self.evidences), self.evidences[-1]))
        # After a few updates alone the network does not fit yet, and its evidence says little.
        if last < best - FALLEN_EVIDENCE and len(self.evidences) >= FEW_UPDATES:
            warnings.warn(
                f"The evidence per example fell from {best:.3f} to {last:.3f}: the network has "
                "come to fit what its weight decays kept it from at first (wrong labels?), or its "
                "steps are too large. Try a larger initial weight decay, such as 0.1, or a lower "
                "learning rate, and keep the run whose last evidence is higher.",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def _update(self, steps: int, is_last: bool = False) -> dict[str, float]:
        """Raise the evidence at the present parameters; returns what to log."""
        hyper = self.hyperparameters
        before = hyper.prior_precision
        evidences, self.record = self._fit(steps, is_last)
        # Decays that still move while steps are large; at a low rate no update moves them much.
        if self.posterior is not None and self._rate >= 0.1 * self._highest_rate:
            gamma = hyper.groups.sum_over_tensors(self.posterior.effective_parameters()).tolist()
            moves = (hyper.prior_precision / before).log().abs().exp().tolist()
            self._moves = {
                name: move
                for name, move, number in zip(hyper.groups.names, moves, gamma, strict=True)
                # A group of which the data determines nothing has no decay to settle at, nor has
                # a scale-invariant weight: the evidence fixes δ‖w‖² alone.
                if move > STILL_MOVING and number >= 1 and name not in self._invariant
            }
        self._steps_at_update = self._steps
        self._set_decays()
        self.evidences.append(evidences[-1])
        self.evidences_of_steps += evidences[:-1]  # the last one follows the last step
        best = self._best
        if self.schedule.keep == "best" and (best is None or evidences[-1] > best["evidence"]):
            self._best = {
                "evidence": evidences[-1],
                "epoch": self._epoch,
                "model": deepcopy(self._model.state_dict()),
                "prior_precision": hyper.prior_precision,
                "sigma_noise": hyper.sigma_noise,
                "likelihood": str(self.likelihood),
            }
        found = {"log_marginal_likelihood_per_example": self.record["evidence_per_example"]}
        found |= {f"weight_decay/{name}": wd for name, wd in self.record["weight_decay"].items()}
        ranges = ranges_of(self._model)
        if ranges:
            self.record["ranges"] = ranges
        found |= {f"range/{name}": value for name, value in ranges.items()}
        if "sigma_noise" in self.record:
            found["sigma_noise"] = self.record["sigma_noise"]
        if self.likelihood.has_label_noise:
            found["label_noise"] = self.likelihood.parameters["noise"].item()
        return found

    def _fit(self, steps: int, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """A posterior at the present parameters, and steps on its evidence; see `update_prior`.

        The last one has the curvature that was asked for, and not a cheaper one.
        """
        hyper, options = self.hyperparameters, self.curvature
        if self._draws_labels and not is_last:
            options = options.replace(fisher="mc", mc_samples=1)
        former = self.posterior
        self.posterior = posterior = Posterior(
            self._model,
            self.likelihood,
            options,
            prior_precision=hyper.groups.of_tensors(hyper.prior_precision),
            sigma_noise=hyper.sigma_noise,
            temperature=self.temperature,
            process_group=self._ranks.process_group,
        )
        if former is not None:
            posterior.passes = former.passes
        # Its own random numbers, so that neither the loop's depend on when updates happen, nor
        # updates on what the loop has drawn.
        with forked_random_numbers(self._model):
            torch.manual_seed(self._epoch)
            data = self._loader
            found = update_prior(
                hyper, posterior, data, self.num_data, steps, progress=self.progress
            )
            if not is_last:  # the last posterior is that of the ranges as they are
                self._ranges.learn(posterior, self._loader, self.num_data)
            if not self._to_learn or not steps or self.likelihood.has_label_noise:
                return found
            self.likelihood, sigma = likelihood_step(posterior, data, self._to_learn)
            if hyper.learn_sigma_noise:
                hyper.set(hyper.prior_precision, sigma)
        # The last posterior is that of the numbers as they are.
        return self._fit(0, is_last) if is_last else found

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: tensors, numbers and strings; empty before `start`."""
        if not hasattr(self, "hyperparameters"):
            return {}
        return {
            "identity": self._identity(),
            "hyperparameters": self.hyperparameters.state_dict(),
            "average": self._average.state_dict(),
            "ranges": self._ranges.state_dict(),
            "likelihood": str(self.likelihood),
            **{name.strip("_"): copy(getattr(self, name)) for name in self.STATE},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; takes effect at the next `start`.

        Raises:
            ValueError: a state that lacks entries.
            RuntimeError: `start` was called already.
        """
        if self._watches:
            raise RuntimeError(
                "The learner has started, and a state takes effect at its start alone. Call "
                "load_state_dict(state) before start(...); here, detach(), then both."
            )
        parts = "identity", "hyperparameters", "average", "ranges", "likelihood"
        check_keys("PriorLearner", state, [*parts, *(name.strip("_") for name in self.STATE)])
        self._state = dict(state)

    def _identity(self) -> dict[str, Any]:
        """What must agree for a state to be continued; the number of epochs may change."""
        schedule = {k: v for k, v in asdict(self.schedule).items() if k != "epochs"}
        hyper = self.hyperparameters
        return {
            "groups": list(hyper.groups.names),
            "method": hyper.method,
            "lr": hyper.lr,
            "learn_sigma_noise": hyper.learn_sigma_noise,
            "likelihood": str(self._asked),
            "temperature": self.temperature,
            "mean_over": self.mean_over,
            "loss_scale": self.loss_scale,
            "curvature_from": self._curvature_from,
            "num_data": self.num_data,
            **{f"parameter '{n}'": f"{[*p.shape]}, {p.dtype}" for n, p in self._named.items()},
            **schedule,
            **{f"curvature.{k}": v for k, v in self.curvature.to_json().items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        theirs, ours = state["identity"], self._identity()
        for name in dict.fromkeys([*ours, *theirs]):
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"The state of the prior is of another run: {name} is {theirs.get(name)!r} "
                    f"there, {ours.get(name)!r} here. Continue with the same model, data and "
                    "options, or start anew."
                )
        self._average.load_state_dict(state["average"], list(self._named.values()))
        self.hyperparameters.load_state_dict(state["hyperparameters"])
        self._ranges.load_state_dict(state["ranges"])
        self.likelihood = likelihood_of(state["likelihood"])
        for name in self.STATE:
            setattr(self, name, copy(state[name.strip("_")]))


def update_prior(
    hyperparameters: Hyperparameters,
    posterior: Posterior,
    data: Loader,
    num_data: int | None = None,
    steps: int = 10,
    *,
    progress: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """Fit a posterior, then take hyperparameter steps that raise its evidence.

    `PriorLearner` calls it; call it yourself where you hold the hyperparameters. Collective where
    there are several ranks.

    Args:
        hyperparameters: prior precisions and noise; changed in place.
        posterior: fitted here, and given the new hyperparameters.
        data: batches for the curvature pass; with several ranks this rank's shard.
        num_data: N, the number of examples that all ranks together should see; None counts them.
        steps: number of hyperparameter steps.
        progress: whether to show a bar over the batches.

    Returns:
        The evidence (nats, a sum over the data) before each step and after the last; and the record
        of the update, with the seconds of the pass, of the eigenvalues and of the steps.

    Raises:
        ValueError: the pass saw another number of examples than ``num_data``.
        FloatingPointError: the evidence is not finite.
    """
    ranks, device = posterior.ranks, posterior.params[0].device
    num_data = count_examples(data, posterior.options) if num_data is None else num_data
    start = _now(device)
    with own_random_numbers(ranks):
        own = data if ranks.size == 1 else WithExamples(data, posterior.options)
        posterior.fit(own, progress_bar=progress)
    # The weight decays T·δ/N of the steps and the evidence must be of the same N.
    if posterior.n_data != num_data:
        raise ValueError(
            f"The curvature pass saw {posterior.n_data} examples, but the loader promised "
            f"{num_data}; its length must be what it yields."
        )
    fitted = _now(device)
    # The first evidence computes the eigenvalues (unless `fit` has), which all steps share.
    before = float(posterior.log_marginal_likelihood())
    decomposed = _now(device)
    evidences = hyperparameters.update(posterior, steps)
    if ranks.size > 1:
        # Each rank has taken the same steps, but on another processor they may round otherwise, and
        # ranks with different weight decays would drift apart.
        mine = before, evidences, hyperparameters.state_dict()
        before, evidences, state = ranks.gather(mine)[0]
        hyperparameters.load_state_dict(state)
    groups, delta = hyperparameters.groups, hyperparameters.prior_precision
    posterior.prior_precision = groups.of_tensors(delta)
    posterior.sigma_noise = hyperparameters.sigma_noise
    end = _now(device)

    weight_decay = precision_to_weight_decay(delta, num_data, posterior.temperature)
    factors, gamma = posterior.fitted_factors(), posterior.effective_parameters().tolist()
    record: dict[str, Any] = {
        "evidence_before": before,
        "evidence": evidences[-1],
        "evidence_per_example": evidences[-1] / num_data,
        "prior_precision": groups.summary(delta),
        "weight_decay": groups.summary(weight_decay),
        "effective_parameters": dict(zip(factors.blocks, gamma, strict=True)),
        "clipped_eigenvalues": factors.num_clipped(),
        "seconds": {
            "pass": fitted - start,
            "eigenvalues": decomposed - fitted,
            "steps": end - decomposed,
        },
    }
    if posterior.likelihood.has_sigma:
        record["sigma_noise"] = hyperparameters.sigma_noise.item()
    if posterior.likelihood.parameters:
        record["likelihood"] = str(posterior.likelihood)
    return evidences, record


def likelihood_step(
    posterior: Posterior, data: Loader, names: Collection[str]
) -> tuple[Likelihood, Tensor]:
    """A step of parameters ξ of the likelihood on the evidence at fixed θ and δ; and σ.

    The evidence is log p(D|θ, ξ)/T − ½ log det(H(ξ)/T + P₀). Its first part is known from the
    outputs at θ. The second is replaced by its tangent in log ξ, which takes one more pass over
    the data, and the sum is maximised, within a factor e of the present ξ. A fixed point is a
    stationary point of the evidence: of the noise of an output MacKay's σ² = SSE/(N − T γ).

    Args:
        posterior: fitted.
        data: batches of all its data.
        names: keys of `Likelihood.parameters`.
    """
    factors, T = posterior.fitted_factors(), posterior.temperature
    likelihood, sigma = factors.likelihood, posterior.sigma_noise.double().cpu()
    # Leaves with an entry for each output, where there are several, which the pass reads.
    present = [
        xi.expand(posterior.n_outputs).clone() if xi.dim() else xi.clone()
        for xi in (likelihood.parameters[name] for name in names)
    ]
    bounds = [likelihood.lower_bounds()[name] for name in names]

    def at(values: Sequence[Tensor]) -> Likelihood:
        return likelihood.with_parameters(dict(zip(names, values, strict=True)))

    # Step 1: the gradient of −½ log det, and the outputs.
    (of_det,) = evidence_gradient(posterior, [data], present, of_loss=0.0, likelihood=at(present))
    tangent = [g.cpu() * (xi - low) for g, xi, low in zip(of_det, present, bounds, strict=True)]
    outputs, device = [], posterior.params[0].device
    with torch.no_grad(), eval_mode(posterior.model):
        for batch in data:
            x, y = split_batch(batch, posterior.options)
            args, kwargs = arguments(posterior.model, to_device(x, device))
            outputs.append((logits_of(posterior.model(*args, **kwargs)).double().cpu(), y.cpu()))
    of_ranks = posterior.ranks.gather(outputs)
    outputs = [pair for own in of_ranks for pair in own]

    def log_p(likelihood: Likelihood) -> Tensor:
        losses = torch.stack([likelihood.losses(f, y).sum() for f, y in outputs]).sum()
        # A noise beside σ is a part of σ, whose normaliser the loss leaves out.
        scale = likelihood.parameters["noise"].log().mean() if likelihood.has_sigma else 0.0
        count = factors.num_loss_terms * factors.num_outputs
        return -(losses / sigma.square() + count * scale) / T

    # Step 2: the maximum, in the logarithms of what ξ exceeds its least value by.
    moves = [torch.zeros_like(xi, requires_grad=True) for xi in present]

    def moved() -> list[Tensor]:
        return [
            low + (xi - low) * move.tanh().exp()
            for xi, low, move in zip(present, bounds, moves, strict=True)
        ]

    optimizer = torch.optim.LBFGS(moves, max_iter=100, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = -log_p(at(moved())) - sum(
            (g * m.tanh()).sum() for g, m in zip(tangent, moves, strict=True)
        )
        value.backward()
        return value

    optimizer.step(objective)
    found = dict(zip(names, (xi.detach().tolist() for xi in moved()), strict=True))
    taken = torch.tensor(found["noise"]).double() if likelihood.has_sigma else torch.ones(1)
    return likelihood.replace(**found), sigma * taken.log().mean().exp()


def _warn_of(names: Sequence[str], text: str) -> None:
    """Warn of names, if there are any: the first four in place of {}, and how many more."""
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        text = text.format(", ".join(names[:4]) + more)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _now(device: torch.device) -> float:
    """Seconds on a clock, read once the device has finished its work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
