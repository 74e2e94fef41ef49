"""`PriorLearner`: learns weight decays while a network trains, in two lines of a loop.

What it does is in `marglik.training.algorithm`; `OnlineTraining`, `marglik_training`, the command
and the callbacks call its functions, and so learn the same decays on the same batches, to the bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfac_backend.engine.checks import check_module
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.optimizer.training_pass import MeanOver
from kfac_backend.options import CurvatureOptions, check_keys, check_positive
from kfac_backend.ranks import Ranks
from marglik.augmentation.ranges import ranges_of, set_ranges
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import (
    Hyperparameters,
    PriorGroups,
    PriorStructure,
    UpdateMethod,
    precision_to_weight_decay,
)
from marglik.training import algorithm
from marglik.training.decay_policy import WEIGHT_DECAY, DecayPolicy
from marglik.training.hooks import StepHooks, optimizers_of, remove_hooks
from marglik.training.loaders import Loader
from marglik.training.schedule import CurvatureFrom, Schedule
from marglik.training.state import (
    SAVED,
    LearnerOptions,
    LearnerState,
    Problem,
    initial_hyperparameters,
)


class PriorLearner:
    """Learns weight decays, one per parameter tensor, while a network trains.

    `start` before the loop and `finish` after it are all that a loop calls: hooks on the optimiser
    add the prior's gradient before each step, after the loop's own clipping, and update the prior
    after an epoch's last step. A rate that falls to zero freezes the decays; `settling_rate` suits.

    Args:
        likelihood: likelihood of the loss: "classification", "regression", "bernoulli", or another
            of `kfac_backend.likelihoods`. Of "student_t(df=4)", say, the scale is learned, too. The
            loop's loss then changes with each update: it is ``learner.likelihood.loss(f, y)``.
        curvature: all options of the curvature pass.
        weight_decay: initial weight decay of all groups.
        structure: the groups of parameters that share a weight decay, see `PriorGroups.from_model`.
        method: "adam" or "mackay".
        lr: Adam's step size on the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: σ of regression, held fixed. None learns it, from 0.1, or is 1 where nothing
            is learned, as with updates=0.
        learn_sigma_noise: True learns σ from ``sigma_noise``; False fixes it, at 1 if it is None.
        mean_over: "examples" if the loss is a mean over examples, as for a classifier; "terms" if
            it is a mean over all loss terms, as for a language model.
        loss_scale: factor by which the loss of an example, or of a term, exceeds −log p(y|f) at
            σ = 1. For ``F.mse_loss`` of C outputs it is 2/C, as −log p is ½‖y − f‖².
        curvature_from: "pass" makes the pass of each update as ``curvature`` says; "auto" draws
            labels in all but the last, if exact ones would take longer than the training.
        schedule: when updates happen, and what is averaged.
        policy: in what training departs from plain evidence.
        hyperparameters: your own, in place of weight_decay, structure, method, lr and the noise.
        options: single fields of `Schedule`, `DecayPolicy` and `CurvatureOptions`, such as
            ``updates``, ``every``, ``average``, ``clip``, ``kfac_approx`` or ``dict_key_y``.

    Raises:
        TypeError, ValueError: a keyword that is no option, a value that is not supported.
    """

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
        policy: DecayPolicy = DecayPolicy(),  # noqa: B008
        hyperparameters: Hyperparameters | None = None,
        **options: Any,
    ) -> None:
        schedule, policy, curvature = _with_options((schedule, policy, curvature), options)
        self.options = LearnerOptions(
            likelihood_of(likelihood), curvature, schedule, policy, temperature, mean_over,
            loss_scale, curvature_from,
        )  # fmt: skip
        """All but the initial hyperparameters."""
        check_positive("weight_decay", weight_decay)
        if learn_sigma_noise and not self.likelihood.has_sigma:
            raise ValueError(
                f"learn_sigma_noise=True is for likelihood 'regression', not '{self.likelihood}'."
            )
        self._hyperparameters = hyperparameters or partial(
            initial_hyperparameters, weight_decay=weight_decay, structure=structure,
            sigma_noise=sigma_noise, learn_sigma_noise=learn_sigma_noise, method=method, lr=lr,
        )  # fmt: skip
        self._replayed: tuple[Mapping[int, Any], Mapping[str, float]] | None = None
        self._saved: Mapping[str, Any] | None = None  # loaded, and applied by the start
        self._hooks: StepHooks | None = None
        self.problem: Problem  # from the start on: what is trained,
        self.state: LearnerState  # and what the learning has come to

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
            model: the network, whose outputs are logits, or means for regression. Of a
                `DistributedDataParallel`, pass its ``module``.
            optimizer: the network's optimiser, without weight decay; or a list of several, which
                hold all trainable parameters, the last being the one whose step ends a batch.
            loader: batches (x, y), or mappings, of training and of the curvature pass; with several
                ranks this rank's shard.
            epochs: number of epochs, if it is known.
            loss: the loop's loss as a function of outputs and the batch's targets, which is
                compared with the likelihood's on the first batch.
            steps_per_epoch: number of the optimiser's steps in an epoch; None takes a step for each
                batch of the loader. Steps that a gradient scaler skips do not count.
            ranks: the ranks that train together; None takes all of `torch.distributed`.
            sums_terms: whether the loss is a mean over examples of sums over their terms.
            held_out: batches that the network is not trained on, read after each epoch, from which
                the share of wrong labels is learned; with several ranks this rank's part of each.
            hooks: "gradients" where the caller ends the epochs, "none" where it adds the prior's
                gradient, too, by the functions of `marglik.training.algorithm`.

        Raises:
            ValueError: an optimiser with a weight decay, or without some parameter; no data, or
                shards of different lengths; examples of several loss terms with
                mean_over="examples"; the state of another training; wrong labels to be learned
                without held-out data. RankError: ranks that differ.
        """
        self.detach()
        options = replace(self.options, schedule=replace(self.options.schedule, epochs=epochs))
        if hooks == "all":
            steps_per_epoch = _steps_per_epoch(loader, steps_per_epoch)
        check_module(model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizers = optimizers_of(optimizer, trainable)
        for one in optimizers:
            remove_hooks(one)
        problem = Problem.of(options, model, optimizers, loader, ranks, steps_per_epoch)
        problem.set_held_out(held_out)
        if self._replayed:
            problem.replayed, ranges = self._replayed
            set_ranges(model, ranges)
        initial = self._hyperparameters
        hyper = initial if isinstance(initial, Hyperparameters) else initial(problem)
        self.state = algorithm.start(problem, hyper, self._saved, loss=loss, sums_terms=sums_terms)
        self.problem, self._saved = problem, None
        if hooks != "none":
            self._hooks = StepHooks(problem, self.state)

    def detach(self) -> None:
        """Remove the hooks, as `finish` does: for a loop that was given up."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """A context in which the network has the average of its parameters so far: to validate it.

        It is the network that `finish` would leave: the validation loss, early stopping and "keep
        the best" are about the average, and not about the last step's parameters. Its BatchNorm
        statistics are renewed by a pass over the training data. Afterwards, also after an error,
        parameters and statistics are what they were. As long as fewer than a sixth of the steps are
        averaged, `finish` takes no average, and this changes nothing. With several ranks it is
        collective.

        Yields:
            The network.

        Raises:
            RuntimeError: `start` was not called.
        """
        if not hasattr(self, "state"):
            raise RuntimeError("The learner has no network yet; call start before averaged.")
        with self.state.averaged(self.problem):
            yield self.problem.model

    def finish(self, average: bool = True) -> dict[str, float]:
        """Take the average of the parameters and fit the posterior there; returns what to log.

        Of an early end, the average is that of about the last third of the steps that were made,
        or there is none and a warning says so. After an error it can be called again.

        Args:
            average: False keeps the parameters that the network has now, such as those of the
                best epoch.

        Raises:
            FloatingPointError: the evidence is not finite.
            RuntimeError: `start` was not called, or an optimiser has made no step since.
        """
        if not hasattr(self, "state") or (self._hooks and 0 in self.state.steps):
            raise RuntimeError(
                "The learner has seen no step of the optimiser, and no weight decay acted. Call "
                "start with the optimiser, or the list of all, whose step() the loop calls."
            )
        self.detach()
        return algorithm.finish(self.problem, self.state, average)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the numbers that it has come to."""
        return self.state.likelihood if hasattr(self, "state") else self.options.likelihood

    @property
    def posterior(self) -> Posterior | None:
        """That of the latest update; after `finish` it is at the network's final parameters."""
        return self.state.posterior if hasattr(self, "state") else None

    @property
    def evidences(self) -> list[float]:
        """The evidence (nats) after each update."""
        return self.state.evidences

    def weight_decays(self) -> Tensor:
        """The current weight decay T·δ/N of each group, (groups,)."""
        delta = self.state.hyperparameters.prior_precision
        return precision_to_weight_decay(delta, self.problem.num_data, self.options.temperature)

    def replay(self) -> "PriorLearner":
        """A learner for another network of this kind, whose decays take the course of this one's.

        For the members of an `Ensemble`, each of which then costs one training, without updates
        and without a posterior. Not the last decays from the start: they belong to a network that
        fits, and can keep one from ever fitting. Call it after `finish`.
        """
        delta, sigma, likelihood = self.state.decay_history[0]
        groups = PriorGroups.from_model(self.problem.model)
        hyper = Hyperparameters(groups, delta, sigma_noise=sigma.item())
        learner = PriorLearner(likelihood, hyperparameters=hyper)
        schedule = replace(self.problem.options.schedule, updates=0)
        learner.options = replace(self.options, likelihood=learner.likelihood, schedule=schedule)
        learner._replayed = dict(self.state.decay_history), ranges_of(self.problem.model)
        return learner

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: tensors, numbers and strings; empty before the start."""
        return self.state.state_dict(self.problem) if hasattr(self, "state") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; takes effect at the next `start`.

        Raises:
            ValueError: a state that lacks entries.
            RuntimeError: it has started already.
        """
        if self._hooks is not None:
            raise RuntimeError("The learner has started; call load_state_dict(state) before start.")
        check_keys("PriorLearner", state, ["identity", *SAVED])
        self._saved = dict(state)


def _with_options(objects: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """Objects of options with single fields changed.

    Raises:
        TypeError: a name that is a field of none of them.
    """
    names = [[field.name for field in fields(one)] for one in objects]
    for name in options:
        if not any(name in own for own in names):
            there = " and ".join(
                f"those of {type(one).__name__} ({', '.join(own)})"
                for one, own in zip(objects, names, strict=True)
            )
            raise TypeError(
                f"{name!r} is not an option of PriorLearner; beside its arguments there are "
                f"{there}."
            )
    return [
        replace(one, **{name: value for name, value in options.items() if name in own})
        for one, own in zip(objects, names, strict=True)
    ]


def _steps_per_epoch(loader: Loader, number: int | None) -> int:
    """The number that was given, or that of the loader's batches."""
    if number is None and not isinstance(loader, Sized):
        raise ValueError(
            f"The loader, {type(loader).__name__}, has no length. Pass steps_per_epoch=, the "
            "number of the optimiser's steps in an epoch."
        )
    number = len(loader) if number is None else number  # pyright: ignore[reportArgumentType]
    check_positive("steps_per_epoch", number)
    return number
