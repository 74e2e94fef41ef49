"""`Problem`, the task of a learner, and `LearnerState`, its learned values."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import arguments, length, split_batch, to_device
from kfac_backend.engine.model_calls import forked_random_numbers, logits_of
from kfac_backend.engine.operations.padding import padding_rows
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import Likelihood, counted_terms, likelihood_of, loss_sum
from kfac_backend.optimizer.loss_check import MeanOver
from kfac_backend.options import CurvatureOptions, check_option, check_positive
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import (
    check_part,
    check_whole,
    digest,
    is_sharded,
    local_parts,
    part_of_ranks,
)
from marglik.augmentation.learned import LearnedAugmentation
from marglik.augmentation.ranges import RangeLearner, ranges_of, set_ranges
from marglik.eval_mode import eval_mode
from marglik.loaders import Loader, check_shards, count_on_ranks
from marglik.posterior.jacobian_ggn import Structure
from marglik.posterior.jacobians import parameter_vector
from marglik.posterior.posterior import Posterior, check_structure
from marglik.posterior.prior import (
    Hyperparameters,
    PriorGroups,
    PriorStructure,
    UpdateMethod,
    precision_to_weight_decay,
    weight_decay_to_precision,
)
from marglik.training.average import WeightAverage, batch_norms
from marglik.training.decay_policy import WEIGHT_DECAY, DecayPolicy, Measures
from marglik.training.loss_agreement import warn_of_another_loss
from marglik.training.samples import FEWEST, SHARE
from marglik.training.schedule import CurvatureFrom, Schedule

_logger = logging.getLogger(__name__)

NEW_RATE = 1.25
"""Ratio of two learning rates above which they count as different."""


@dataclass(frozen=True)
class LearnerOptions:
    """Options of the learner.

    Args:
        likelihood: likelihood of the loss.
        curvature: all options of the curvature pass.
        schedule: schedule of the updates, and choice of the average.
        policy: rules that go beyond the evidence.
        weight_decay: initial weight decay of all groups.
        structure: the groups of parameters that share a weight decay, see `PriorGroups.from_model`.
        method: "adam" or "mackay".
        lr: Adam's step size on the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: fixed σ of regression. None learns it, starting from 0.1, or fixes it at 1 if
            nothing is learned, as with updates=0.
        learn_sigma_noise: True learns σ, starting from ``sigma_noise``; False fixes it, at 1 if
            ``sigma_noise`` is None.
        loss_mean_over: "examples" if the loss is a mean over examples, as for a classifier; "terms"
            if it is a mean over all loss terms, as for a language model.
        loss_scale: factor between the loss of an example, or of a term, and −log p(y|f) at σ = 1.
            For ``F.mse_loss`` of C outputs it is 2/C, because −log p is ½‖y − f‖².
        curvature_from: "pass" uses all data in each update, with the options of ``curvature``;
            "auto" may use a sample and random signs, see `marglik.training.samples`.
        hessian_structure: structure of the curvature: "kron", or, from Jacobians, "full", "diag" or
            "lowrank", as for `Posterior`, by passes over all data with the options of
            ``curvature``.

    Raises:
        ValueError: a value is not supported.
    """

    likelihood: Likelihood
    curvature: CurvatureOptions
    schedule: Schedule
    policy: DecayPolicy
    weight_decay: float = WEIGHT_DECAY
    structure: PriorStructure | Mapping[str, str] = "per_tensor"
    method: UpdateMethod = "adam"
    lr: float = 0.1
    temperature: float = 1.0
    sigma_noise: float | None = None
    learn_sigma_noise: bool | None = None
    loss_mean_over: MeanOver = "examples"
    loss_scale: float = 1.0
    curvature_from: CurvatureFrom = "auto"
    hessian_structure: Structure = "kron"

    def __post_init__(self) -> None:
        self.curvature.check(self.likelihood)
        check_option("loss_mean_over", self.loss_mean_over, MeanOver)
        check_option("curvature_from", self.curvature_from, CurvatureFrom)
        check_structure(self.curvature, self.hessian_structure, "hessian_structure")
        for name in ("weight_decay", "temperature", "loss_scale"):
            check_positive(name, getattr(self, name))
        if self.method == "mackay" and self.policy.lowering:
            raise ValueError(
                "lowering=True needs steps along the gradient in log δ, but method='mackay' takes "
                "none. Pass method='adam', or lowering=False."
            )
        if self.learn_sigma_noise and not self.likelihood.has_sigma:
            raise ValueError(
                f"learn_sigma_noise=True needs likelihood 'regression', not '{self.likelihood}'."
            )
        if self.likelihood.has_label_noise and self.likelihood.to_learn() and not self.learns:
            raise ValueError(
                f"Likelihood '{self.likelihood}' would keep a share of wrong labels of 0, because "
                "no update learns it (updates=0, or none before the end). Pass the share, for "
                "example 'noisy_classification(noise=0.2)', or choose 'classification', whose "
                "calibration fits the share."
            )

    @classmethod
    def of(
        cls,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions,
        schedule: Schedule,
        policy: DecayPolicy,
        options: Mapping[str, Any],
    ) -> "LearnerOptions":
        """Return these options with single fields from ``options``, also of the inner objects.

        Raises:
            TypeError: a name is not a field of any of them.
        """
        inside: dict[str, Any] = {"schedule": schedule, "policy": policy, "curvature": curvature}
        own = [f.name for f in fields(cls) if f.name not in ("likelihood", *inside)]
        names = {part: [f.name for f in fields(value)] for part, value in inside.items()}
        for name in options:
            if not any(name in one for one in (own, *names.values())):
                objects = " and ".join(
                    f"the options of {type(inside[part]).__name__} ({', '.join(one)})"
                    for part, one in names.items()
                )
                raise TypeError(
                    f"{name!r} is not an option of PriorLearner. Its options are {', '.join(own)} "
                    f"and {objects}."
                )
        for part, one in names.items():
            if values := {name: value for name, value in options.items() if name in one}:
                inside[part] = replace(inside[part], **values)
        of_learner = {n: v for n, v in options.items() if n in own}
        return cls(likelihood_of(likelihood), **inside, **of_learner)

    @property
    def learns(self) -> bool:
        """Whether there will be a hyperparameter step."""
        s = self.schedule
        return bool(s.updates and s.steps and (s.epochs is None or s.burn_in <= s.epochs))


@dataclass(frozen=True, eq=False)
class Part:
    """The trainable tensors of one optimiser."""

    index: int
    """Index of the optimiser in the list."""
    optimizer: torch.optim.Optimizer
    tensors: list[int]
    """Index of each tensor among all trainable tensors, in ``parameters()`` order."""
    names: list[str]
    parameters: list[nn.Parameter]
    padding: dict[int, int] = field(default_factory=dict)
    """Maps a parameter's index to its constant row, which has no weight decay."""


@dataclass(eq=False)
class Problem:
    """A network, its data, its optimisers, and the options of the learner."""

    options: LearnerOptions
    model: nn.Module
    named: dict[str, nn.Parameter]
    """The trainable tensors, by name."""
    parts: list[Part]
    """One part per optimiser, in the order of their steps; the steps of the last one are
    counted."""
    loader: Loader
    """The data of the curvature passes."""
    ranks: Ranks
    num_data: int
    """N, the number of examples of all ranks."""
    steps_per_epoch: int | None = None
    """Steps of the last optimiser in an epoch, if hooks count them."""
    has_rounds: bool = False
    """Whether hooks count the steps of a stream, whose epochs are rounds of steps."""
    examples_per_epoch: int = 0
    """Number of examples of all ranks in an epoch: N, or the examples of a round."""
    replayed: Mapping[int, tuple[Tensor, Tensor, str]] = field(default_factory=dict)
    """Weight decays of another training by epoch, see `PriorLearner.replay`."""
    progress: bool = False
    """Whether passes over the data show a progress bar."""
    terms_per_example: float = 1.0
    """Loss terms per example, if the loss is a mean over terms."""
    held_out: Iterable[Any] | None = None
    """Held-out batches, from which the share of wrong labels is learned."""
    first_loss: float = 0.0
    """The loss per example, of all ranks' first batches at the start."""
    vectors: int = 1
    """Backward passes per example of a pass with the curvature's options."""

    @classmethod
    def of(
        cls,
        options: LearnerOptions,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: Loader,
        ranks: Ranks | None,
        steps_per_epoch: int | None,
        held_out: Iterable[Any] | None,
    ) -> "Problem":
        """Check the arguments of `PriorLearner.start` and count the examples; collective."""
        check_module(model)
        if options.hessian_structure != "kron":
            check_whole(model, f"hessian_structure {options.hessian_structure!r}")
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        parts = parts_of(optimizers, trainable)
        ranks = Ranks() if ranks is None else ranks
        check_shards(loader, ranks)
        N = count_on_ranks(loader, ranks, options.curvature)
        problem = cls(
            options, model, trainable, parts, loader, ranks, N, steps_per_epoch, held_out=held_out
        )
        problem.check_corrections()
        return problem

    def initial_hyperparameters(self) -> Hyperparameters:
        """Return the initial hyperparameters."""
        options = self.options
        sigma, learns = options.sigma_noise, options.learn_sigma_noise
        if learns is None:
            learns = options.likelihood.has_sigma and sigma is None and options.learns
        if sigma is None:
            sigma = 0.1 if learns else 1.0
        delta = weight_decay_to_precision(options.weight_decay, self.num_data, options.temperature)
        groups, method = PriorGroups.from_model(self.model, options.structure), options.method
        return Hyperparameters(
            groups, delta, sigma_noise=sigma, learn_sigma_noise=learns, method=method, lr=options.lr
        )

    @cached_property
    def norms(self) -> dict[str, nn.Module]:
        """The network's BatchNorms with running statistics, by name."""
        return {**batch_norms(self.model)}

    def replay(
        self,
        decays: Mapping[int, tuple[Tensor, Tensor, str]],
        ranges: Mapping[str, float],
        names: list[str],
    ) -> None:
        """Use the weight decays and ranges of a training of parameters with these names.

        Raises:
            ValueError: this network has other parameters.
        """
        if decays and names != [*self.named]:
            raise ValueError(
                f"The weight decays to replay belong to the parameters {', '.join(names)}, but "
                f"this network has {', '.join(self.named)}. All members of an ensemble need the "
                "same architecture."
            )
        self.replayed = decays
        if ranges:
            set_ranges(self.model, ranges)

    def check_trainable(self) -> None:
        """Raise a ValueError if other parameters are trainable than at the start."""
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if changed := sorted(trainable ^ self.named.keys()):
            raise ValueError(
                f"Parameter '{changed[0]}' was frozen or unfrozen after start, which stores the "
                "trainable parameters. Change requires_grad before start. To train other "
                "parameters, call start again, which begins a new learning."
            )

    @property
    def rate(self) -> float:
        """The learning rate of the first optimiser."""
        return float(self.parts[0].optimizer.param_groups[0]["lr"])

    @cached_property
    def averages(self) -> bool:
        """Whether the parameters are averaged, which needs several steps per epoch.

        If an epoch is a single step, there is no noise, and an average would only lag behind.
        """
        num_batches, of_step = length(self.loader), getattr(self.loader, "batches_per_step", 1)
        num_steps = self.steps_per_epoch or (num_batches and math.ceil(num_batches / of_step))
        return self.options.schedule.averages and num_steps != 1

    def has_new_rate(self, state: "LearnerState") -> bool:
        """Return whether the learning rate has changed since the last update, which makes one due.

        If the end is known, updates are frequent enough without this rule.
        """
        schedule, rates = self.options.schedule, sorted((state.measures.rate, self.rate))
        is_open = schedule.epochs is None or state.epoch > schedule.epochs
        may_update = is_open and schedule.every is None and state.measures.rate > 0
        return may_update and rates[1] > NEW_RATE * rates[0]

    def may_rest(self, state: "LearnerState") -> bool:
        """Return whether updates may be skipped: with a budget, learning only weight decays."""
        schedule = self.options.schedule
        # Held-out labels determine the share of wrong labels, not updates.
        learns_more = state.hyperparameters.learn_sigma_noise or self.learned_by_evidence
        learns_more = learns_more or state.ranges is not None
        is_budget = schedule.every is None and schedule.keep == "last" and schedule.steps > 0
        return is_budget and not learns_more

    @cached_property
    def learned_by_evidence(self) -> dict[str, Any]:
        """Parameters of the likelihood that the evidence learns, with their initial values."""
        if not self.options.learns or self.learns_label_noise:
            return {}
        return self.options.likelihood.to_learn()

    @cached_property
    def learns_label_noise(self) -> bool:
        """Whether the share of wrong labels is learned, from held-out or from training labels."""
        likelihood = self.options.likelihood
        return self.options.learns and likelihood.has_label_noise and bool(likelihood.to_learn())

    @property
    def corrects_decays(self) -> bool:
        """Whether held-out labels correct the weight decays, see `marglik.training.held_out`."""
        return self.options.policy.uses_held_out and self.options.learns

    def check_corrections(self) -> None:
        """Raise a ValueError if held-out labels should correct the weight decays but cannot."""
        options, lacks = self.options, None
        if options.likelihood.name not in ("classification", "noisy_classification"):
            lacks = f"a classifier, not likelihood '{options.likelihood}'"
        elif options.hessian_structure != "kron":
            lacks = f"hessian_structure='kron', not {options.hessian_structure!r}"
        elif is_sharded(self.model):
            lacks = "whole parameters, not a model under fully_shard"
        elif self.held_out is None:
            lacks = "held-out batches: pass held_out, or hold out a share of the data"
        if self.corrects_decays and lacks:
            raise ValueError(
                "The correction of weight decays (raise_limit, lowering, correct_decays) needs "
                f"{lacks}. Omit it to learn the weight decays only from the evidence."
            )

    def look_at_data(
        self,
        likelihood: Likelihood,
        sums_terms: bool,
        loss: Callable[[Any, Any], Tensor] | None,
    ) -> Any:
        """Count the loss terms per example, by which a mean over terms divides the prior.

        It reads the first batch, whose targets and outputs also determine the cost of an exact
        pass. With loss_mean_over="terms" it reads all targets, because the first step already needs
        their number.

        Returns:
            The first batch.

        Raises:
            TypeError, ValueError: targets do not fit the outputs, or examples have several terms in
                a loss that is a mean over examples, without ``sums_terms``.
        """
        options = self.options
        task, terms, examples, first = Task(likelihood, options.curvature), 0, 0, None
        padding: dict[str, int] = {}
        first_loss, num_first = 0.0, 0
        device = next(self.model.parameters()).device
        with forked_random_numbers(self.model), eval_mode(self.model), torch.no_grad():
            for index, batch in enumerate(self.loader):
                x, labels = split_batch(batch, task.options)
                if index == 0:  # a copy: a model may change its input in place
                    first = deepcopy(batch)
                    x, labels = deepcopy(to_device(x, device)), to_device(labels, device)
                y = task.targets(self.model, x, labels)
                counted = counted_terms(y, likelihood)
                terms += y.shape[:-1].numel() if counted is None else int(counted.sum())
                examples += len(y)
                if index == 0 and len(y):
                    task.check_axis(self.model, x, y)
                    padding = padding_rows(self.model, x)
                    args, kwargs = arguments(self.model, x)
                    f = logits_of(self.model(*args, **kwargs))
                    task.check(f, y)
                    first_loss, num_first = loss_sum(f, y, likelihood).item(), len(y)
                    fisher = options.curvature.make_fisher()
                    self.vectors = fisher.num_passes(likelihood, f)
                    if loss is not None:
                        with torch.enable_grad():
                            f = f.detach().requires_grad_()
                            warn_of_another_loss(loss(f, labels), f, y, likelihood, options)
                if options.loss_mean_over == "examples":
                    break
        own = terms, examples, self.vectors, padding, first_loss, num_first
        of_ranks = self.ranks.gather(own)
        self.vectors = max(rank[2] for rank in of_ranks)
        batch_size = max(sum(rank[5] for rank in of_ranks), 1)
        self.first_loss = sum(rank[4] for rank in of_ranks) / batch_size
        self.examples_per_epoch = self.num_data
        step_size = batch_size * getattr(self.loader, "batches_per_step", 1)
        if self.has_rounds:  # long enough that an update of a sample takes a tenth of the time
            self.steps_per_epoch = math.ceil(min(self.num_data, FEWEST / SHARE) / step_size)
        if self.steps_per_epoch and length(self.loader) is None:
            self.examples_per_epoch = self.steps_per_epoch * step_size
        padding = next((rank[3] for rank in of_ranks if rank[3]), {})
        for part in self.parts:
            rows = {i: padding[name] for i, name in enumerate(part.names) if name in padding}
            part.padding.update(rows)
        number = max(sum(r[0] for r in of_ranks), 1) / max(sum(r[1] for r in of_ranks), 1)
        if options.loss_mean_over == "examples" and number != 1 and not sums_terms:
            raise ValueError(
                f"The examples have {number:.4g} loss terms each. If the loss is a mean over all "
                "terms, the gradient of the prior must be divided by this number: pass "
                "loss_mean_over='terms'. If the loss is a mean over examples of sums over terms, "
                "call start(..., sums_terms=True)."
            )
        if options.loss_mean_over == "terms" and not sums_terms:
            self.terms_per_example = number
        return first

    def count_batches_of_step(self, number: int) -> None:
        """Shorten the rounds of a stream if each step accumulates this number of batches.

        A trainer's loader gives the number at the start.
        """
        if not self.has_rounds or hasattr(self.loader, "batches_per_step"):
            return
        assert self.steps_per_epoch
        step_size = number * self.examples_per_epoch // self.steps_per_epoch
        self.steps_per_epoch = math.ceil(min(self.num_data, FEWEST / SHARE) / step_size)
        self.examples_per_epoch = self.steps_per_epoch * step_size
        vars(self).pop("averages", None)  # it depends on the number of steps

    def identity(self, hyperparameters: Hyperparameters) -> dict[str, Any]:
        """Return the values that must agree to continue from a state, without the epochs."""
        options, hyper = self.options, hyperparameters
        return {
            "groups": list(hyper.groups.names),
            "method": hyper.method,
            "lr": hyper.lr,
            "learn_sigma_noise": hyper.learn_sigma_noise,
            "likelihood": str(options.likelihood),
            "temperature": options.temperature,
            "loss_mean_over": options.loss_mean_over,
            "loss_scale": options.loss_scale,
            "curvature_from": options.curvature_from,
            "hessian_structure": options.hessian_structure,
            "num_data": self.num_data,
            # Rounds of a stream are counted after the start.
            "steps_per_epoch": None if self.has_rounds else self.steps_per_epoch,
            "optimisers": [part.names for part in self.parts],
            "held-out labels": self.learns_label_noise and self.held_out is not None,
            "held-out labels correct decays": self.corrects_decays,
            **{f"parameter '{n}'": f"{[*p.shape]}, {p.dtype}" for n, p in self.named.items()},
            **{k: v for k, v in asdict(options.schedule).items() if k != "epochs"},
            **asdict(options.policy),
            **{f"curvature.{k}": v for k, v in options.curvature.to_json().items()},
        }


@dataclass(eq=False)
class LearnerState:
    """The learned values. All fields but the last two are saved and loaded."""

    hyperparameters: Hyperparameters
    """δ of each group and σ."""
    likelihood: Likelihood
    """The likelihood with its present parameters."""
    ranges: RangeLearner | None
    """The learned ranges of augmentations; None without."""
    averages: list[WeightAverage]
    """The average of each optimiser's parameters over its steps so far."""
    steps: list[int]
    """Number of steps of each optimiser."""
    measures: Measures
    """Measurements of the policy."""
    decays: list[float] = field(default_factory=list)
    """The weight decay of each tensor in the steps."""
    gradient_scale: float = 1.0
    """Ratio of the loop's loss to the mean over examples of −log p/σ² plus the penalty."""
    epoch: int = 0
    """Number of epochs that have ended."""
    kept_epoch: int = 0
    """The epoch of the final parameters."""
    steps_at_update: int | None = None
    """Number of steps before the latest update, if it was made at the present parameters."""
    evidences: list[float] = field(default_factory=list)
    """The evidence (nats) after each update."""
    kfac_approx: Any = None
    """The modes of the layers in the latest update, which later samples use."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Epoch and training loss per example of each update."""
    evidences_of_steps: list[float] = field(default_factory=list)
    """The evidence (nats) before each hyperparameter step."""
    best: dict[str, Any] | None = None
    """The update with the highest evidence, with keep="best"."""
    shown_noise: list[float] = field(default_factory=list)
    """The estimate of ε after each epoch, from held-out labels or else from training labels."""
    decay_history: dict[int, tuple[Tensor, Tensor, str]] = field(default_factory=dict)
    """Maps an epoch to δ of each tensor, σ and likelihood after its end; see
    `PriorLearner.replay`."""
    record: dict[str, Any] = field(default_factory=dict)
    """Record of `update_prior` in the latest update, or of a fit without update, with its
    seconds."""
    posterior: Posterior | None = None
    """Posterior of the latest update; not saved, because `finish` fits another one."""

    @property
    def has_average(self) -> bool:
        """Whether all optimisers have made a step since the start whose parameters are averaged."""
        return all(average.count or not average.has_latest for average in self.averages)

    @classmethod
    def initial(
        cls, problem: Problem, hyperparameters: Hyperparameters, likelihood: Likelihood
    ) -> "LearnerState":
        """Return the state before any learning."""
        modules = problem.model.modules()
        learned = [m for m in modules if isinstance(m, LearnedAugmentation) and m.learns]
        return cls(
            hyperparameters,
            likelihood,
            RangeLearner(learned) if learned and problem.options.learns else None,
            [WeightAverage(part.parameters) for part in problem.parts],
            [0 for _ in problem.parts],
            Measures(sorted(problem.named), [None for _ in problem.parts], problem.first_loss),
        )

    def posterior_is_current(self, problem: Problem) -> bool:
        """Return whether the posterior belongs to the present parameters; collective.

        The parameters are compared by value, because the loop may have loaded others.
        """
        vector, posterior = parameter_vector(local_parts(problem.named.values())), self.posterior
        is_current = posterior is not None and torch.equal(vector, posterior.mean)
        # For sharded parameters each rank compares its own part.
        return not problem.ranks.any(not is_current, vector.device)

    def weight_decays(self, problem: Problem) -> Tensor:
        """Return T·δ/N of each group, (G,), times its factor."""
        delta, T = self.hyperparameters.prior_precision, problem.options.temperature
        return precision_to_weight_decay(delta, problem.num_data, T) * self.factors(problem)

    def factors(self, problem: Problem) -> Tensor:
        """Return e^c for groups with a weight, else 1, (G,); see `DecayPolicy.raise_limit`."""
        factor = torch.tensor(math.exp(self.measures.log_factor), dtype=torch.float64)
        return factor.where(self.holds_weights(problem), 1.0)

    def holds_weights(self, problem: Problem) -> Tensor:
        """Return whether each group has a tensor with two axes or more, (G,)."""
        is_weight = torch.tensor([p.dim() > 1 for p in problem.named.values()])
        return self.hyperparameters.groups.sum_over_tensors(is_weight.long()) > 0

    def set_decays(self, problem: Problem) -> None:
        """Compute the weight decays of the steps, once per update, and store them for `replay`."""
        options, hyper = problem.options, self.hyperparameters
        # σ², because the loop's loss has no noise; also 1/R if it averages over R terms.
        sigma = hyper.sigma_noise
        self.gradient_scale = sigma.square().item() * options.loss_scale
        self.gradient_scale /= problem.terms_per_example
        self.decays = options.policy.limited_decays(problem, self)
        delta = torch.tensor(self.decays, dtype=torch.float64) * problem.num_data
        delta = delta / options.temperature
        self.decay_history[self.epoch] = (delta, sigma, str(self.likelihood))

    def state_dict(self, problem: Problem) -> dict[str, Any]:
        """Return plain data and tensors by field name, with the identity of the problem."""
        fields_saved = {name: _to_plain(getattr(self, name)) for name in SAVED}
        ranks = problem.ranks
        part = part_of_ranks(problem.named.values(), ranks.rank, ranks.size, self.steps[-1])
        identity = problem.identity(self.hyperparameters)
        return {"identity": identity, "part": part} | fields_saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a result of `PriorLearner.state_dict`, checked by `check_saved`.

        Raises:
            ValueError: the tensors of the state were cast.
        """
        for name in SAVED:
            setattr(self, name, _from_plain(getattr(self, name), saved[name]))

    def take_replayed_decays(self, problem: Problem) -> None:
        """Use the weight decays that another training had from this epoch on."""
        if self.epoch in problem.replayed:
            delta, sigma, likelihood = problem.replayed[self.epoch]
            self.likelihood = likelihood_of(likelihood)
            self.hyperparameters.set(delta, sigma)
            self.set_decays(problem)

    def remember_if_best(self, model: nn.Module) -> None:
        """Store the network and the learned values if no update had a higher evidence."""
        hyper, value = self.hyperparameters, self.evidences[-1]
        if self.best is None or value > self.best["evidence"]:
            self.best = {
                "evidence": value,
                "epoch": self.epoch,
                "model": deepcopy(model.state_dict()),
                "prior_precision": hyper.prior_precision,
                "sigma_noise": hyper.sigma_noise,
                "likelihood": str(self.likelihood),
            }

    def go_back_to_best(self, model: nn.Module) -> bool:
        """Restore the network of the best update; return False if this is the last update."""
        best = self.best
        if best is None or best["evidence"] <= self.evidences[-1]:
            return False
        model.load_state_dict(best["model"])
        self.hyperparameters.set(best["prior_precision"], best["sigma_noise"])
        self.likelihood = likelihood_of(best["likelihood"])
        self.kept_epoch = best["epoch"]
        return True

    def numbers_to_log(self, model: nn.Module) -> dict[str, float]:
        """Return the numbers of the latest update by name, and add the ranges to its record."""
        record, ranges = self.record, {} if self.ranges is None else ranges_of(model)
        numbers = {"log_marginal_likelihood_per_example": record["evidence_per_example"]}
        numbers |= {f"weight_decay/{name}": wd for name, wd in record["weight_decay"].items()}
        if ranges:
            record["ranges"] = ranges
        numbers |= {f"range/{name}": value for name, value in ranges.items()}
        if "sigma_noise" in record:
            numbers["sigma_noise"] = record["sigma_noise"]
        if self.measures.log_factor:
            numbers["log_factor_of_decays"] = self.measures.log_factor
        if self.likelihood.has_label_noise:
            numbers["label_noise"] = self.likelihood.parameters["noise"].item()
        return numbers

    @contextmanager
    def unchanged_by_errors(self, model: nn.Module, *, parameters: bool = False) -> Iterator[None]:
        """Context manager that restores the state after an error.

        With ``parameters`` it also copies and restores the network's parameters and buffers.
        """
        before = {k: copy(v) if isinstance(v, list | dict) else v for k, v in vars(self).items()}
        measures = copy(self.measures)
        parts: list[Any] = [self.hyperparameters]
        if self.ranges is not None:
            parts.append(self.ranges)
        states = [deepcopy(part.state_dict()) for part in parts]
        ranges = {} if self.ranges is None else ranges_of(model)
        network = deepcopy(model.state_dict()) if parameters else {}
        try:
            yield
        except BaseException:
            vars(self).update(before, measures=measures)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
            if ranges:
                set_ranges(model, ranges)
            if network:
                model.load_state_dict(network)
            raise


SAVED = [field.name for field in fields(LearnerState)][:-2]


def check_saved(
    saved: Mapping[str, Any] | None, problem: Problem, hyperparameters: Hyperparameters
) -> dict[str, Any]:
    """Return the values that all ranks must share to continue, or to start without a state.

    Raises:
        ValueError: the state belongs to another problem, or to another rank.
    """
    ours = problem.identity(hyperparameters)
    common = ours | {"the number of epochs": problem.options.schedule.epochs}
    if saved is None:
        return common
    theirs = saved["identity"]
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"The state of the prior belongs to another run: {name} is {theirs.get(name)!r} "
                f"there and {ours.get(name)!r} here. Continue with the same model, data and "
                "options, or start a new run."
            )
    ranks = problem.ranks
    check_part(saved, ranks.rank, ranks.size)
    if ranks.size == 1:
        return common
    # A record has this rank's seconds, and the best network has this rank's running statistics.
    same = {name: saved[name] for name in SAVED if name not in ("record", "best")}
    best = saved["best"] and {name: v for name, v in saved["best"].items() if name != "model"}
    steps = {f"the loaded {name}": saved[name] for name in ("epoch", "steps")}
    return common | steps | {"the loaded state of the prior": digest([same, best])}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Hyperparameters | RangeLearner | WeightAverage):
        return value.state_dict()
    if isinstance(value, Measures):
        return {name: copy(part) for name, part in vars(value).items()}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Likelihood) else copy(value)


def _from_plain(value: Any, saved: Any) -> Any:
    if isinstance(value, Hyperparameters | RangeLearner | WeightAverage):
        value.load_state_dict(saved)
        return value
    if isinstance(value, Measures):
        return Measures(**saved)
    if isinstance(value, list) and any(isinstance(item, WeightAverage) for item in value):
        return [_from_plain(*pair) for pair in zip(value, saved, strict=True)]
    return likelihood_of(saved) if isinstance(value, Likelihood) else copy(saved)


def optimizers_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimisers that make the steps, without wrappers such as Fabric's.

    Raises:
        TypeError: an object is not an optimiser of torch.
        ValueError: an optimiser is L-BFGS.
    """
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for index, inner in enumerate(optimizers):
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                f"The optimiser is {type(inner).__name__}. Pass a torch.optim.Optimizer, or a list "
                "of them."
            )
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss several times per step and stores the curvature of the "
                "objective, which each update of the prior changes. Pass SGD, Adam or another "
                "optimiser with one evaluation per step."
            )
        optimizers[index] = inner
    return optimizers


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError for optimiser options with which the prior's gradient would be wrong."""
    for group in optimizer.param_groups:
        if group.get("weight_decay"):
            raise ValueError(
                "The optimiser has its own weight decay, but the prior replaces it. Set the "
                "optimiser's weight_decay to 0."
            )
        if group.get("maximize"):
            raise ValueError(
                "The optimiser maximises, so the gradient of the prior would increase the "
                "parameters. Minimise the negative loss (maximize=False)."
            )


def parts_of(
    optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]
) -> list[Part]:
    """Return the tensors in ``named`` of each optimiser; each tensor belongs to the first one.

    Raises:
        ValueError: an optimiser has its own weight decay, or no optimiser has a parameter.
    """
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        check_optimizer(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                owners.setdefault(id(p), index)
    if missing := [name for name, p in named.items() if id(p) not in owners]:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"The optimiser does not have {', '.join(missing[:4])}{more}. Their weight decays "
            "would be learned without an effect. Pass the optimiser of this model, created after "
            "the last change of its parameters, or a list of all optimisers. Or freeze the "
            "parameters that are not trained (requires_grad_(False))."
        )
    parts: list[Part] = []
    for index, optimizer in enumerate(optimizers):
        own = [(i, n, p) for i, (n, p) in enumerate(named.items()) if owners[id(p)] == index]
        if own:
            tensors, names, parameters = map(list, zip(*own, strict=True))
            parts.append(Part(len(parts), optimizer, tensors, names, parameters))  # pyright: ignore[reportArgumentType]
    return parts
