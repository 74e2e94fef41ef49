"""`PriorLearner`: learns weight decays while a network trains, in two lines of a loop.

What it does is in `marglik.training.algorithm`; `OnlineTraining`, `marglik_training`, the command
and the callbacks call its functions, and so learn the same decays on the same batches, to the bit.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.model.checks import check_module
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
    weight_decay_to_precision,
)
from marglik.training import algorithm
from marglik.training.decay_policy import WEIGHT_DECAY, DecayPolicy
from marglik.training.hooks import StepHooks, optimizers_of, remove_hooks
from marglik.training.loaders import Loader, check_shards, count_on_ranks
from marglik.training.schedule import CurvatureFrom, Schedule
from marglik.training.state import SAVED, LearnerOptions, LearnerState, Problem, parts_of


class PriorLearner:
    """Learns weight decays, one per parameter tensor, while a network trains.

    `start` before the loop and `finish` after it are all that a loop calls. In between hooks on the
    optimiser add the prior's gradient before each step, after the loop's own clipping of gradients,
    and update the prior when an epoch's last step is made. Network and optimiser remain the loop's.
    `state_dict` can be taken at any time after `start`; a state is loaded before it.

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
        policy: in what training departs from plain evidence.
        hyperparameters: your own, in place of weight_decay, structure, method, lr and the noise.
        options: single fields of `Schedule`, such as ``updates``, ``every``, ``burn_in``, ``steps``
            and ``average``, of `DecayPolicy`, such as ``clip``, and of `CurvatureOptions`, such as
            ``kfac_approx`` or ``dict_key_y``.

    Raises:
        ValueError: an option that is not supported.
        TypeError: a keyword that is no option.
    """

    def __init__(
        self,
        likelihood: str,
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
        schedule, policy, curvature = with_options((schedule, policy, curvature), options)
        self.options = LearnerOptions(
            likelihood_of(likelihood), curvature, schedule, policy, temperature, mean_over,
            loss_scale, curvature_from,
        )  # fmt: skip
        """All but the initial hyperparameters."""
        initial = InitialPrior(weight_decay, structure, method, lr, sigma_noise, learn_sigma_noise)
        initial.check(self.options.likelihood)
        self._initial = hyperparameters or initial
        self._replayed: Mapping[int, tuple[Tensor, Tensor, str]] = {}
        self._ranges: dict[str, float] = {}
        self._saved: Mapping[str, Any] | None = None  # loaded, and applied by the start
        self._hooks: StepHooks | None = None
        self.problem: Problem
        """What is trained, from the start on."""
        self.state: LearnerState
        """What the learning has come to, from the start on."""

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
    ) -> None:
        """Count the data, make the hyperparameters and put hooks on the optimiser.

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
            sums_terms: whether the loss is a mean over examples of sums over their terms; with it,
                mean_over must be "examples".

        Raises:
            ValueError: an optimiser with weight decay, or without some trainable parameter; no
                data, a state of another model or of other options, loaders that are not shards of
                one data set, or mean_over="examples" for examples with several loss terms.
            RankError: ranks with different models or options.
        """
        if steps_per_epoch is None:
            if not isinstance(loader, Sized):
                raise ValueError(
                    f"The loader, {type(loader).__name__}, has no length. Pass steps_per_epoch=, "
                    "the number of the optimiser's steps in an epoch."
                )
            steps_per_epoch = len(loader)
        check_positive("steps_per_epoch", steps_per_epoch)
        self.prepare(
            model, optimizer, loader, epochs, loss=loss, steps_per_epoch=steps_per_epoch,
            ranks=ranks, sums_terms=sums_terms,
        )  # fmt: skip
        self.add_hooks()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loader: Loader,
        epochs: int | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        ranks: Ranks | None = None,
        sums_terms: bool = False,
        **of_problem: Any,
    ) -> None:
        """As `start`, without hooks: for loops that call the functions of the algorithm."""
        self.detach()
        options = replace(self.options, schedule=replace(self.options.schedule, epochs=epochs))
        problem = make_problem(options, model, optimizer, loader, ranks or Ranks(), **of_problem)
        problem.replayed = self._replayed
        initial = self._initial
        hyper = initial if isinstance(initial, Hyperparameters) else initial.make(problem)
        # A rank with another model or other options would learn something else, or wait forever.
        problem.ranks.agree(problem.identity(hyper) | {"the number of epochs": epochs})
        if self._ranges:
            set_ranges(model, self._ranges)
        state = algorithm.start(problem, hyper, loss=loss, sums_terms=sums_terms)
        if self._saved is not None:
            state.load_state_dict(self._saved, problem)
        self.problem, self.state, self._saved = problem, state, None

    def add_hooks(self) -> None:
        """Put the hooks on the optimisers; they end epochs if their steps are known."""
        self._hooks = StepHooks(self.problem, self.state)

    def detach(self) -> None:
        """Remove the hooks, as `finish` does: for a loop that was given up while this lives on."""
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None

    def finish(self) -> dict[str, float]:
        """Take the average of the parameters and fit the posterior there; returns what to log.

        Call it after the last step, or earlier: the average is that of the last third of the steps
        that were made, or there is none, and a warning says so. After an error, as of the data, it
        can be called again.

        Raises:
            FloatingPointError: the evidence is not finite.
            RuntimeError: `start` was not called, or an optimiser has made no step since.
        """
        if not hasattr(self, "state"):
            raise RuntimeError(
                "The learner has not started; call start(model, optimizer, loader, epochs) before "
                "the loop."
            )
        problem, state = self.problem, self.state
        if self._hooks is not None and 0 in state.steps:
            optimizer = problem.parts[state.steps.index(0)].optimizer
            raise RuntimeError(
                f"{type(optimizer).__name__} has made no step since start, so that no weight decay "
                "has acted. Pass start the optimiser whose step() the loop calls."
            )
        self.detach()
        per_epoch = problem.steps_per_epoch
        if per_epoch and state.steps[-1] > state.epoch * per_epoch:
            state.epoch += 1  # which was cut short
        return algorithm.finish(problem, state)

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

        For the members of an `Ensemble`: in each epoch their decays, noises and the average are
        those that this learner had in it, so that a member costs one training, without updates and
        without a posterior. Not the last decays from the start: they belong to a network that fits,
        and can keep one from ever fitting. Call it after `finish`.
        """
        delta, sigma, likelihood = self.state.decay_history[0]
        groups, options = PriorGroups.from_model(self.problem.model), self.options
        learner = PriorLearner(
            likelihood,
            options.curvature,
            temperature=options.temperature,
            mean_over=options.mean_over,
            loss_scale=options.loss_scale,
            schedule=replace(self.problem.options.schedule, updates=0),
            policy=options.policy,
            hyperparameters=Hyperparameters(groups, delta, sigma_noise=sigma.item()),
        )
        learner._replayed = dict(self.state.decay_history)
        learner._ranges = ranges_of(self.problem.model)
        return learner

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: tensors, numbers and strings; empty before the start."""
        if not hasattr(self, "state"):
            return {}
        identity = self.problem.identity(self.state.hyperparameters)
        return {"identity": identity} | self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; takes effect at the next `start`.

        Raises:
            ValueError: a state that lacks entries.
            RuntimeError: `start` was called already.
        """
        if self._hooks is not None:
            raise RuntimeError(
                "The learner has started, and a state takes effect at its start alone. Call "
                "load_state_dict(state) before start(...); here, detach(), then both."
            )
        check_keys("PriorLearner", state, ["identity", *SAVED])
        self._saved = dict(state)


@dataclass(frozen=True)
class InitialPrior:
    """The hyperparameters that learning begins with; `PriorLearner` describes each."""

    weight_decay: float
    structure: PriorStructure | Mapping[str, str]
    method: UpdateMethod
    lr: float
    sigma_noise: float | None
    learn_sigma_noise: bool | None

    def check(self, likelihood: Likelihood) -> None:
        """Raise a ValueError for what does not fit the likelihood."""
        check_positive("weight_decay", self.weight_decay)
        if self.learn_sigma_noise and not likelihood.has_sigma:
            raise ValueError(
                f"learn_sigma_noise=True is for likelihood 'regression', not '{likelihood}'."
            )

    def make(self, problem: Problem) -> Hyperparameters:
        """The hyperparameters of a network and of N examples."""
        options, sigma, learns = problem.options, self.sigma_noise, self.learn_sigma_noise
        if learns is None:
            learns = options.likelihood.has_sigma and sigma is None and options.learns
        if sigma is None:
            sigma = 0.1 if learns else 1.0
        return Hyperparameters(
            PriorGroups.from_model(problem.model, self.structure),
            weight_decay_to_precision(self.weight_decay, problem.num_data, options.temperature),
            sigma_noise=sigma,
            learn_sigma_noise=learns,
            method=self.method,
            lr=self.lr,
        )


def with_options(objects: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """Objects of options with single fields changed.

    Raises:
        TypeError: a name that is a field of none of them.
    """
    names = [[field.name for field in fields(of)] for of in objects]
    for name in options:
        if not any(name in own for own in names):
            there = " and ".join(
                f"those of {type(of).__name__} ({', '.join(own)})"
                for of, own in zip(objects, names, strict=True)
            )
            raise TypeError(
                f"{name!r} is not an option of PriorLearner; beside its arguments there are "
                f"{there}."
            )
    return [
        replace(of, **{name: value for name, value in options.items() if name in own})
        for of, own in zip(objects, names, strict=True)
    ]


def make_problem(
    options: LearnerOptions,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: Loader,
    ranks: Ranks,
    **of_problem: Any,
) -> Problem:
    """Check a network, its optimisers and its data, and count the examples; collective."""
    check_module(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = optimizers_of(optimizer, named)
    for of in optimizers:
        remove_hooks(of)
    check_shards(loader, ranks)
    schedule = options.schedule
    if schedule.epochs is None and schedule.average == "last":
        warnings.warn(
            "The parameters are not averaged, since the number of epochs is unknown: call "
            "start(..., epochs), or pass average=None.",
            RuntimeWarning,
            stacklevel=4,
        )
    num_data = count_on_ranks(loader, ranks)
    return Problem(
        options, model, parts_of(optimizers, named), loader, ranks, num_data, **of_problem
    )
