"""`PriorLearner`: learn weight decays while a network trains, with two calls in a training loop.

`marglik.training.algorithm` has the method; all training loops and callbacks call its functions.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import check_read_twice
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import CurvatureOptions, check_keys
from kfac_backend.ranks import Ranks
from marglik.augmentation.ranges import ranges_of
from marglik.loaders import Loader, steps_in_epoch
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import Hyperparameters, PriorGroups
from marglik.training import algorithm
from marglik.training.average import averaged
from marglik.training.hooks import StepHooks, active_hooks
from marglik.training.learned_numbers import validation_loss
from marglik.training.loss_agreement import FirstStepLossCheck
from marglik.training.options import DecayPolicy, LearnerOptions, Schedule
from marglik.training.problem import Problem, optimizers_of
from marglik.training.state import SAVED, LearnerState, Measures, numbers_to_log, state_dict_of

_logger = logging.getLogger(__name__)


class PriorLearner:
    """Learns weight decays, one per parameter tensor, while a network trains.

    A training loop calls `start` before it begins and `finish` after it ends. Hooks on the
    optimiser add the prior's gradient before each step, after the loop's own clipping. They update
    the prior after the last step of an epoch. Keep the learning rate constant: if it decays to
    zero, the network cannot follow changes of the weight decays.

    Args:
        likelihood: likelihood of the loss: "classification", "regression", "bernoulli", or another
            of `kfac_backend.likelihoods`. Likelihoods with parameters, such as the scale of
            "student_t(df=4)", learn these, too. The loop's loss must then be
            ``learner.likelihood.loss(f, y)``, which changes with each update.
        curvature: all options of the curvature pass.
        schedule: schedule of the updates, and choice of the average.
        policy: rules that go beyond the evidence.
        hyperparameters: initial hyperparameters that replace weight decay, groups and noise of
            ``options``. Each start copies them.
        options: fields of `LearnerOptions`, such as ``weight_decay``, ``structure``, ``method``,
            ``temperature`` or ``loss_mean_over``, and single fields of `Schedule`, `DecayPolicy`
            and `CurvatureOptions`, such as ``updates``, ``average``, ``clip`` or ``kfac_approx``.

    Raises:
        TypeError, ValueError: a keyword is not an option, or a value is not supported.
    """

    def __init__(
        self,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        schedule: Schedule = Schedule(),  # noqa: B008
        policy: DecayPolicy = DecayPolicy(),  # noqa: B008
        hyperparameters: Hyperparameters | None = None,
        **options: Any,
    ) -> None:
        self.options = LearnerOptions.of(likelihood, curvature, schedule, policy, options)
        self._hyperparameters = hyperparameters
        self._replayed: tuple[Mapping[int, Any], Mapping[str, float], list[str]] = {}, {}, []
        self._saved: Mapping[str, Any] | None = None  # loaded state, which the start uses
        self._hooks: StepHooks | None = None
        self._averages = True  # default of finish(average=None)
        self.problem: Problem  # set by the start: the training problem,
        self.state: LearnerState  # and the learned values

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loader: Loader,
        epochs: int | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        steps_per_epoch: int | None = None,
        ranks: Ranks | None = None,
        sums_terms: bool = False,
        held_out: Iterable[Any] | None = None,
        hooks: Literal["all", "gradients", "none"] = "all",
    ) -> None:
        """Count the data, make the hyperparameters, and put the hooks on the optimiser.

        Args:
            model: the network, whose outputs are logits, or means for regression. For a
                `DistributedDataParallel`, pass its ``module``.
            optimizer: the network's optimiser, without weight decay. Or a list of optimisers that
                together hold all trainable parameters; a step of the last one ends a batch.
            loader: batches (x, y), or mappings, of the training, also for the curvature pass; with
                several ranks this rank's shard.
            epochs: number of passes over the data, if it is known; updates are spread over them.
            loss: the loop's loss(outputs, targets), compared with the likelihood's loss on a batch.
                None compares the gradient of the first step's loss in the outputs, for classes and
                Bernoulli outputs.
            steps_per_epoch: the optimiser's steps in an epoch, without steps that a gradient scaler
                skips; None counts a step for each batch of the loader. For a stream of unknown
                length, an "epoch" of the schedule is then a round of steps with 2,560 examples, or
                N. The learner computes the number of rounds from ``epochs``.
            ranks: the ranks that train together; None takes all of `torch.distributed`.
            sums_terms: whether the loss is a mean over examples of sums over their terms.
            held_out: held-out batches, for classifiers. The learner reads them at the start, as a
                check, and at each update, to correct the weight decays (`DecayPolicy`). With
                "noisy_classification" it also reads them after each epoch of the last third, to
                learn the share of wrong labels. None estimates this share from the training labels,
                which is less accurate. With several ranks, pass this rank's part of each batch.
            hooks: "gradients" if the caller ends the epochs; "none" if it also adds the prior's
                gradient, with the functions of `marglik.training.algorithm`.

        Raises:
            ValueError: an optimiser, loss terms, shards or a loaded state do not fit; a loaded
                state belongs to another rank; or there is no data.
            RuntimeError: an optimiser that another learner has started with.
            RankError: ranks that differ, or that have loaded different states.
        """
        self.detach()
        options = replace(self.options, schedule=replace(self.options.schedule, epochs=epochs))
        steps = steps_in_epoch(loader, steps_per_epoch) if hooks == "all" else steps_per_epoch
        optimizers = optimizers_of(optimizer)
        problem = Problem.of(options, model, optimizers, loader, ranks, steps, held_out)
        problem.has_rounds = hooks == "all" and steps is None
        counts_batches = hooks == "all" and steps_per_epoch is None and steps is not None
        if any(active_hooks(one) is not None for one in optimizers):
            raise RuntimeError(
                "Another PriorLearner has started with this optimiser and has not finished. Both "
                "priors would act at once. Call finish() or detach() of the other learner, or "
                "create a new optimiser."
            )
        problem.replay(*self._replayed)
        # A copy, because learning changes them, and a later start must begin with the same ones.
        hyper = deepcopy(self._hyperparameters) or problem.initial_hyperparameters()
        saved = self._saved
        self.state = algorithm.start(problem, hyper, saved, loss=loss, sums_terms=sums_terms)
        self.problem, self._saved = problem, None
        self._averages = True
        if hooks != "none":
            compares, check = loss is None and not saved, None
            if compares or problem.has_rounds or counts_batches:
                check = FirstStepLossCheck(
                    model, self.likelihood, options, only_counts=not compares
                )
            self._hooks = StepHooks(
                problem, self.state, optimizers, check, counts_batches=counts_batches
            )

    @property
    def loss_check(self) -> FirstStepLossCheck | None:
        """Compares the first step's loss with the likelihood's; None after that step."""
        return self._hooks and self._hooks.loss_check

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for pickle and copies.

        Raises:
            TypeError: the learner is in training; a copy of the optimiser would lack the hooks.
        """
        if self._hooks is not None:
            raise TypeError(
                "A PriorLearner in training cannot be pickled or copied, because its hooks belong "
                "to the optimiser. Save learner.state_dict() and load it into a new learner "
                "before its start. Or copy the learner after finish() or detach()."
            )
        return vars(self)

    def detach(self) -> None:
        """Remove the hooks, as `finish` does, to abandon a training."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Context manager with the network that `finish` would return, see `average.averaged`."""
        if not hasattr(self, "state"):
            raise RuntimeError("The learner has no network yet. Call start before averaged.")
        if self._are_replaced():
            return nullcontext(self.problem.model)
        return averaged(self.problem, self.state)

    def validation_loss(self, batches: Iterable[Any]) -> float:
        """Return the NLL (nats per loss term) of validation data, for early stopping.

        It uses the network of `averaged`, at the temperature τ that makes the data most likely. For
        classes it also fits the share ε of wrong labels, and for regression σ. These are the
        choices of a calibration after the training, so overconfidence does not stop a training.

        Args:
            batches: validation batches (x, y), or mappings; with several ranks this rank's part of
                each.

        Raises:
            RuntimeError: `start` was not called.
            ValueError: there is no batch, or targets do not fit the outputs.
        """
        if not hasattr(self, "state"):
            raise RuntimeError("The learner has no network yet. Call start before validation_loss.")
        check_read_twice(batches)
        with self.averaged():
            return validation_loss(self.problem, self.state, batches)

    def finish(self, average: bool | None = None) -> dict[str, float]:
        """Set the network to the average of its parameters and fit the posterior there.

        It can be called after any step; the average includes all steps so far. If the parameters
        have changed since the last step, for example by ``load_state_dict`` of the best epoch, the
        network keeps them without an average, and the posterior is fitted there. If the loop
        changes the parameters after each step, for example by clipping them, this counts as a part
        of the step. `finish` can be called again after an error.

        Args:
            average: whether to take the average. None takes it, unless the parameters have changed
                since the last step. True also takes it then, from the steps before the last one, if
                the learner has not stored the parameters of the last step. False keeps the
                network's parameters.

        Returns:
            The numbers of the last update, by name, and ``"averaged"``: 1 if the network has the
            average, 0 if it keeps its parameters.

        Raises:
            FloatingPointError: the evidence is not finite.
            RuntimeError: `start` was not called, or an optimiser has made no step since; a call
                within `averaged`; parameters that changed since the last step, in a loop that
                changed them after some of its steps only.
        """
        if not hasattr(self, "state") or (self._hooks and 0 in self.state.steps):
            raise RuntimeError(
                "The optimiser made no step since start, so no weight decay acted. Call start "
                "with the optimiser whose step() the loop calls, or with a list of all "
                "optimisers."
            )
        if self.state.averages[0].is_temporary:
            raise RuntimeError(
                "finish() was called within averaged(). At its end the parameters are restored. "
                "Call finish() after the context."
            )
        if average is None:
            average = self._takes_average()
        elif average and self._are_replaced():
            for average_of_part in self.state.averages:
                average_of_part.leave_out_latest()
        self._averages = average  # also for a second call after an error
        self.detach()
        numbers = algorithm.finish(self.problem, self.state, average)
        self._averages = False  # another call has no average to take
        return numbers | {"averaged": float(average and self.state.averages[0].is_written)}

    def _are_replaced(self) -> bool:
        """Return whether the loop has replaced the parameters of the latest step; collective."""
        return self._hooks is not None and self._hooks.weights_since_steps() == "changed"

    def _takes_average(self) -> bool:
        """Return whether the parameters come from the loop's steps, not from a restored state."""
        since = "unchanged" if self._hooks is None else self._hooks.weights_since_steps()
        if not self.state.has_average and self.problem.options.schedule.keep == "last":
            since = "unchanged"  # finish keeps the parameters either way
        if since == "unclear":
            raise RuntimeError(
                "finish() cannot decide whether the parameters are a restored state: they have "
                "changed since the optimiser's last step, and also after some of the earlier "
                "steps, but not after others. Call finish(average=False) to keep them, or "
                "finish(average=True) to take the average of the steps."
            )
        if since == "changed":
            _logger.info(
                "finish keeps the parameters, because they have changed since the optimiser's "
                "last step, and takes no average. finish(average=True) takes the average"
            )
        return self._averages and since != "changed"

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with its present parameters."""
        return self.state.likelihood if hasattr(self, "state") else self.options.likelihood

    @property
    def posterior(self) -> Posterior | None:
        """The posterior of the latest update; after `finish` at the network's final parameters."""
        return self.state.posterior if hasattr(self, "state") else None

    @property
    def evidences(self) -> list[float]:
        """The evidence (nats) after each update."""
        return self.state.evidences

    def weight_decays(self) -> Tensor:
        """Return the current weight decay of each group, (groups,).

        It is T·δ/N, times the factor e^c by which held-out labels raise it, see `DecayPolicy`.
        """
        return self.state.weight_decays(self.problem)

    def latest_numbers(self) -> dict[str, float]:
        """Return the numbers to log if an update followed the latest step; otherwise empty."""
        state, is_logged = self.state, self._hooks is None or not self.problem.has_rounds
        if is_logged or state.steps_at_update != state.steps[-1]:
            return {}
        return numbers_to_log(state, self.problem.model)

    def replay(self) -> "PriorLearner":
        """Return a learner that gives another network the same weight decays over time.

        Use it to train the members of an `Ensemble`. Each member costs one training run, without
        updates and without a posterior. Starting with the final weight decays would be worse: they
        belong to a network that fits the data, and can prevent another network from fitting them.
        Call it after `finish`.
        """
        delta, sigma, likelihood = self.state.decay_history[0]
        groups = PriorGroups.from_model(self.problem.model)
        hyper = Hyperparameters(groups, delta, sigma_noise=sigma.item())
        learner = PriorLearner(likelihood, hyperparameters=hyper)
        schedule = replace(self.problem.options.schedule, updates=0)
        learner.options = replace(self.options, likelihood=learner.likelihood, schedule=schedule)
        ranges, names = ranges_of(self.problem.model), [*self.problem.named]
        learner._replayed = dict(self.state.decay_history), ranges, names
        return learner

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume: tensors, numbers and strings; empty before the start."""
        return state_dict_of(self.problem, self.state) if hasattr(self, "state") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; it takes effect at the next `start`."""
        if self._hooks is not None:
            raise RuntimeError(
                "The learner has already started. Call load_state_dict(state) before start."
            )
        check_keys("PriorLearner", state, ["identity", "part", *SAVED])
        names = (field.name for field in fields(Measures))
        check_keys("PriorLearner's measures", state["measures"], names)
        self._saved = dict(state)
