"""`LearnerState`: all that learning changes, how it is saved, and how an error leaves it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.sharding import (
    check_part,
    digest,
    is_part,
    local_part,
    local_parts,
    part_of_ranks,
    part_of_whole,
    with_local_parts,
)
from marglik.augmentation.learned import LearnedAugmentation
from marglik.augmentation.ranges import RangeLearner, ranges_of, set_ranges
from marglik.posterior.jacobians import parameter_vector
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import Hyperparameters, precision_to_weight_decay
from marglik.training.problem import Problem

ETA = 4
"""η. The average has the same mean age and effective number of steps as a mean over the last third:
.166 and .36 of the steps so far."""


class WeightAverage:
    """The average of parameters over their steps so far.

    A step's parameters are added when the average is next needed, or before the next step. Changes
    by the loop after the step, such as a projection, are therefore included.

    Args:
        parameters: the parameters to average.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.values: list[Tensor] = []
        """The averages, at least in float32, because lower precisions would round small changes
        away; for sharded parameters this rank's parts. Empty before the first step."""
        self.count = 0
        """Number of averaged steps."""
        self.has_latest = True
        """Whether the average includes the latest step."""
        self.is_written = False
        """Whether the parameters have been set to their averages at the training's end."""
        self.is_temporary = False
        """Whether the parameters are temporarily set to their averages, within `written`."""

    def begin_step(self) -> None:
        """Add the parameters of the previous step, before a new one."""
        self.include_latest()
        self.has_latest = self.is_written = False

    def include_latest(self) -> None:
        """Add the present values, unless the average already includes the latest step."""
        if self.has_latest:
            return
        self.count += 1
        parts = local_parts(self._parameters)
        if [part.dtype for part in parts] != [value.dtype for value in self.values]:
            dtypes = [torch.promote_types(part.dtype, torch.float32) for part in parts]
            parts = [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        if self.count == 1:
            self.values = [part.clone() for part in parts]
        else:
            torch._foreach_lerp_(self.values, parts, (ETA + 1) / (self.count + ETA))
        self.has_latest = True

    def leave_out_latest(self) -> None:
        """Omit the latest step, whose parameters no longer exist, unless they are included."""
        self.has_latest = True

    def clear(self) -> None:
        """Start again with the next step."""
        self.values, self.count = [], 0

    @torch.no_grad()
    def write(self) -> None:
        """Set the parameters to their averages."""
        torch._foreach_copy_(local_parts(self._parameters), self.values)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Context manager in which the parameters have their averages."""
        present = [part.clone() for part in local_parts(self._parameters)]
        self.write()
        self.is_temporary = True
        try:
            yield
        finally:
            self.is_temporary = False
            with torch.no_grad():
                torch._foreach_copy_(local_parts(self._parameters), present)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their number of steps; sharded like the parameters."""
        parameters = self._parameters if self.count else []
        values = with_local_parts(parameters, [value.clone() for value in self.values])
        return {"values": values, "count": self.count, "has_latest": self.has_latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, onto the parameters' devices.

        For sharded parameters the state may be sharded alike, or whole (`gathered_state`).

        Raises:
            ValueError: the tensors of the state were cast.
        """
        values = [*zip(state["values"], self._parameters)]  # noqa: B905  # none before it begins
        for value, p in values:
            if value.dtype != (dtype := torch.promote_types(p.dtype, torch.float32)):
                raise ValueError(
                    f"The state's averages are in {value.dtype}, but parameters in {p.dtype} need "
                    f"averages in {dtype}. Load the state as it was saved, with the same model and "
                    "dtype."
                )
        self.count, self.has_latest = state["count"], state["has_latest"]
        self.values = [
            local_part(value).to(p.device, copy=True)
            if is_part(value) or not is_part(p)
            else part_of_whole(value.to(p.device), p).clone()
            for value, p in values
        ]


@dataclass
class Measures:
    """Measurements of the rules; a part of the learner's state."""

    invariant: list[str]
    """Names of the weights whose length seems to have no effect; at first all names."""
    gradient_norms: list[Tensor | float | None]
    """The running mean of each optimiser's gradient norm."""
    first_loss: float = 0.0
    """The loss per example of the first batch, before the first step."""
    rate: float = 0.0
    """The learning rate at the last update; 0 before the first."""
    raised: list[str] = field(default_factory=list)
    """Names of the groups whose weight decays start higher."""
    fits_late: bool = False
    """Whether the network does not fit yet, see ``late_fit``, as of the last update."""
    limited: list[str] = field(default_factory=list)
    """Names of the parameters whose weight decay is too high for SGD."""
    last_changes: list[float] = field(default_factory=list)
    """Δ log δ of each group in the last update; empty before the first."""
    rest: int = 0
    """Number of updates to skip after the last one, which hardly changed the weight decays."""
    left_out: int = 0
    """Number of these updates that have been skipped."""
    all_left_out: int = 0
    """Number of skipped updates in the whole training."""
    frozen_norms: list[str] = field(default_factory=list)
    """Names of the BatchNorms that the latest averaged step ran in eval mode."""
    has_estimates: bool = False
    """Whether evidences are estimates, from samples or from random vectors."""
    best_losses: Tensor | None = None
    """Losses of the held-out terms, (M,), at the update with the lowest mean; see `held_out`."""
    rise: float = 0.0
    """z: standard errors by which the held-out loss exceeded its best at the last update."""
    log_factor: float = 0.0
    """c: the weight decays of groups with weights are e^c times the evidence's, see
    ``raise_limit``."""
    examples_for_gamma: int = 0
    """Minimum number of examples in the next sample, see `samples.examples_for_gamma`."""


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
        cls,
        problem: Problem,
        hyperparameters: Hyperparameters,
        likelihood: Likelihood,
        first_loss: float,
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
            Measures(sorted(problem.named), [None for _ in problem.parts], first_loss),
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
        decays = precision_to_weight_decay(delta, problem.num_data, T)
        return decays * common_factors(problem, self)

    def holds_weights(self, problem: Problem) -> Tensor:
        """Return whether each group has a tensor with two axes or more, (G,)."""
        is_weight = torch.tensor([p.dim() > 1 for p in problem.named.values()])
        return self.hyperparameters.groups.sum_over_tensors(is_weight.long()) > 0


def common_factors(problem: Problem, state: LearnerState) -> Tensor:
    """Return e^c for groups with a weight, else 1, (G,); see `DecayPolicy.raise_limit`."""
    factor = torch.tensor(math.exp(state.measures.log_factor), dtype=torch.float64)
    return factor.where(state.holds_weights(problem), 1.0)


def numbers_to_log(state: LearnerState, model: nn.Module) -> dict[str, float]:
    """Return the numbers of the latest update by name, and add the ranges to its record."""
    record, ranges = state.record, {} if state.ranges is None else ranges_of(model)
    numbers = {"log_marginal_likelihood_per_example": record["evidence_per_example"]}
    numbers |= {f"weight_decay/{name}": wd for name, wd in record["weight_decay"].items()}
    if ranges:
        record["ranges"] = ranges
    numbers |= {f"range/{name}": value for name, value in ranges.items()}
    if "sigma_noise" in record:
        numbers["sigma_noise"] = record["sigma_noise"]
    if state.measures.log_factor:
        numbers["log_factor_of_decays"] = state.measures.log_factor
    if state.likelihood.has_label_noise:
        numbers["label_noise"] = state.likelihood.parameters["noise"].item()
    return numbers


@contextmanager
def unchanged_by_errors(
    state: LearnerState, model: nn.Module, *, parameters: bool = False
) -> Iterator[None]:
    """Context manager that restores the state after an error.

    With ``parameters`` it also copies and restores the network's parameters and buffers.
    """
    before = {k: copy(v) if isinstance(v, list | dict) else v for k, v in vars(state).items()}
    measures = copy(state.measures)
    parts: list[Any] = [state.hyperparameters]
    if state.ranges is not None:
        parts.append(state.ranges)
    states = [deepcopy(part.state_dict()) for part in parts]
    ranges = {} if state.ranges is None else ranges_of(model)
    network = deepcopy(model.state_dict()) if parameters else {}
    try:
        yield
    except BaseException:
        vars(state).update(before, measures=measures)
        for part, before_part in zip(parts, states, strict=True):
            part.load_state_dict(before_part)
        if ranges:
            set_ranges(model, ranges)
        if network:
            model.load_state_dict(network)
        raise


# --- saved states ---

SAVED = [field.name for field in fields(LearnerState)][:-2]


def _identity(problem: Problem, hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Return the values that must agree to continue from a state, without the epochs."""
    options, hyper = problem.options, hyperparameters
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
        "num_data": problem.num_data,
        # Rounds of a stream are counted after the start.
        "steps_per_epoch": None if problem.has_rounds else problem.steps_per_epoch,
        "optimisers": [part.names for part in problem.parts],
        "held-out labels": problem.learns_label_noise and problem.held_out is not None,
        "held-out labels correct decays": problem.corrects_decays,
        **{f"parameter '{n}'": f"{[*p.shape]}, {p.dtype}" for n, p in problem.named.items()},
        **{k: v for k, v in asdict(options.schedule).items() if k != "epochs"},
        **asdict(options.policy),
        **{f"curvature.{k}": v for k, v in options.curvature.to_json().items()},
    }


def state_dict_of(problem: Problem, state: LearnerState) -> dict[str, Any]:
    """Return plain data and tensors by field name, with the identity of the problem."""
    fields_saved = {name: _to_plain(getattr(state, name)) for name in SAVED}
    ranks = problem.ranks
    part = part_of_ranks(problem.named.values(), ranks.rank, ranks.size, state.steps[-1])
    identity = _identity(problem, state.hyperparameters)
    return {"identity": identity, "part": part} | fields_saved


def load_saved(state: LearnerState, saved: Mapping[str, Any]) -> None:
    """Load a result of `PriorLearner.state_dict`, checked by `check_saved`.

    Raises:
        ValueError: the tensors of the state were cast.
    """
    for name in SAVED:
        setattr(state, name, _from_plain(getattr(state, name), saved[name]))


def check_saved(
    saved: Mapping[str, Any] | None, problem: Problem, hyperparameters: Hyperparameters
) -> dict[str, Any]:
    """Return the values that all ranks must share to continue, or to start without a state.

    Raises:
        ValueError: the state belongs to another problem, or to another rank.
    """
    ours = _identity(problem, hyperparameters)
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
    # The best network has this rank's running statistics.
    same = {name: saved[name] for name in SAVED if name != "best"}
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
