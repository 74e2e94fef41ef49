"""`Problem`: a network, its data, its optimisers and the options of the learner.

It is complete before the first step and does not change with learning, see `LearnerState`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfac_backend.engine.batches import NO_BATCH, arguments, length, split_batch, to_device
from kfac_backend.engine.model_calls import forked_random_numbers, logits_of
from kfac_backend.engine.operations.padding import padding_rows
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import Likelihood, counted_terms, loss_sum
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import check_whole, is_sharded
from marglik.augmentation.ranges import set_ranges
from marglik.eval_mode import eval_mode
from marglik.loaders import Loader, check_shards, count_on_ranks
from marglik.posterior.prior import Hyperparameters, PriorGroups, weight_decay_to_precision
from marglik.training.loss_agreement import warn_of_another_gradient
from marglik.training.options import LearnerOptions

SHARE = 0.1
"""Cost of an update as a share of the steps since the last update, in passes over one example."""
FEWEST = 256
"""Minimum number of examples in a sample."""
NORMALIZING = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop,
)  # fmt: skip
"""Optimisers that divide gradients by their size."""


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
    scales_loss: bool = False
    """Whether the loop multiplies the loss by `Likelihood.step_scale`."""

    @property
    def normalizes_steps(self) -> bool:
        """Whether the optimiser divides gradients by their size, as Adam does.

        It is False for optimisers that are not known, and for K-FAC.
        """
        return isinstance(self.optimizer, NORMALIZING)


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
    """Whether hooks count the steps of a stream, whose epochs, also in the schedule, are rounds of
    steps."""
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
        lacks = _lacking_for_corrections(problem)
        if options.policy.lowering and options.learns and lacks:
            raise ValueError(
                f"DecayPolicy(lowering=True) needs {lacks}. Omit it to learn the weight decays "
                "from the evidence."
            )
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
    def norms(self) -> dict[str, _BatchNorm]:
        """The network's BatchNorms with running statistics, by name."""
        return batch_norms(self.model)

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

    def check_trainable(self, may_freeze: bool = False) -> None:
        """Raise a ValueError if other parameters are trainable than at the start.

        With ``may_freeze``, fewer parameters are no error.
        """
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        unfrozen = trainable - self.named.keys()
        if changed := sorted(unfrozen if may_freeze else trainable ^ self.named.keys()):
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

    @cached_property
    def corrects_decays(self) -> bool:
        """Whether held-out labels correct the weight decays, see `marglik.training.held_out`."""
        policy = self.options.policy
        is_on = policy.lowering or policy.raise_limit is not None
        return is_on and self.options.learns and not _lacking_for_corrections(self)


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


def _lacking_for_corrections(problem: Problem) -> str:
    """Return what a correction by held-out labels lacks; empty if nothing is missing."""
    options = problem.options
    if options.likelihood.name not in ("classification", "noisy_classification"):
        return f"a classifier, not likelihood '{options.likelihood}'"
    if options.hessian_structure != "kron":
        return f"hessian_structure='kron', not {options.hessian_structure!r}"
    if is_sharded(problem.model):
        return "whole parameters, not a model under fully_shard"
    if problem.held_out is None:
        return "held-out batches: pass held_out, or hold out a share of the data"
    return ""


# --- the data, before the first step ---


class _Counts(NamedTuple):
    """Counts of a rank's data; all but the first two are of its first batch."""

    terms: int
    examples: int
    vectors: int
    """Backward passes per example of an exact pass."""
    padding: dict[str, int]
    """Maps a parameter's name to its constant row."""
    loss: float
    """Σ ℓ (nats)."""
    batch_size: int


def look_at_data(
    problem: Problem,
    likelihood: Likelihood,
    sums_terms: bool,
    loss: Callable[[Any, Any], Tensor] | None,
) -> tuple[Any, float]:
    """Count the loss terms per example, by which a mean over terms divides the prior.

    It reads the first batch, whose targets and outputs also determine the cost of an exact pass.
    With loss_mean_over="terms" it reads all targets, because the first step already needs their
    number.

    Returns:
        The first batch, and the loss per example of all ranks' first batches.

    Raises:
        TypeError, ValueError: targets do not fit the outputs, or examples have several terms in a
            loss that is a mean over examples, without ``sums_terms``; or the data can be read
            only once.
    """
    first, counts = _read_data(problem, likelihood, loss)
    if first is None:  # a stream that has been read when its examples were counted
        raise ValueError(NO_BATCH)
    of_ranks = problem.ranks.gather(counts)
    problem.vectors = max(rank.vectors for rank in of_ranks)
    batch_size = max(sum(rank.batch_size for rank in of_ranks), 1)
    problem.examples_per_epoch = problem.num_data
    step_size = batch_size * getattr(problem.loader, "batches_per_step", 1)
    if problem.has_rounds:
        _set_rounds(problem, step_size, problem.options.schedule.epochs)
    if problem.steps_per_epoch and length(problem.loader) is None:
        problem.examples_per_epoch = problem.steps_per_epoch * step_size
    padding = next((rank.padding for rank in of_ranks if rank.padding), {})
    for part in problem.parts:
        rows = {i: padding[name] for i, name in enumerate(part.names) if name in padding}
        part.padding.update(rows)
    num_terms, num_examples = sum(r.terms for r in of_ranks), sum(r.examples for r in of_ranks)
    number, loss_mean_over = (
        max(num_terms, 1) / max(num_examples, 1),
        problem.options.loss_mean_over,
    )
    if loss_mean_over == "examples" and number != 1 and not sums_terms:
        raise ValueError(
            f"The examples have {number:.4g} loss terms each. If the loss is a mean over all "
            "terms, the gradient of the prior must be divided by this number: pass "
            "loss_mean_over='terms'. If the loss is a mean over examples of sums over terms, "
            "call start(..., sums_terms=True)."
        )
    if loss_mean_over == "terms" and not sums_terms:
        problem.terms_per_example = number
    return first, sum(rank.loss for rank in of_ranks) / batch_size


def _read_data(
    problem: Problem, likelihood: Likelihood, loss: Callable[[Any, Any], Tensor] | None
) -> tuple[Any, _Counts]:
    """Return the first batch, and the counts of this rank's data."""
    options, model = problem.options, problem.model
    task, terms, examples, first = Task(likelihood, options.curvature), 0, 0, None
    vectors, padding, first_loss, batch_size = problem.vectors, dict[str, int](), 0.0, 0
    device = next(model.parameters()).device
    with forked_random_numbers(model), eval_mode(model), torch.no_grad():
        for index, batch in enumerate(problem.loader):
            x, labels = split_batch(batch, task.options)
            if index == 0:  # a copy: a model may change its input in place
                first = deepcopy(batch)
                x, labels = deepcopy(to_device(x, device)), to_device(labels, device)
            y = task.targets(model, x, labels)
            counted = counted_terms(y, likelihood)
            terms += y.shape[:-1].numel() if counted is None else int(counted.sum())
            examples += len(y)
            if index == 0 and len(y):
                task.check_axis(model, x, y)
                padding = padding_rows(model, x)
                args, kwargs = arguments(model, x)
                f = logits_of(model(*args, **kwargs))
                task.check(f, y)
                first_loss, batch_size = loss_sum(f, y, likelihood).item(), len(y)
                vectors = options.curvature.make_fisher().num_passes(likelihood, f)
                if loss is not None:
                    with torch.enable_grad():
                        f = f.detach().requires_grad_()
                        total = loss(f, labels).sum()
                        (gradient,) = torch.autograd.grad(total, f, allow_unused=True)
                    if gradient is not None:
                        warn_of_another_gradient(gradient, f, y, likelihood, options)
            if options.loss_mean_over == "examples":
                break
    return first, _Counts(terms, examples, vectors, padding, first_loss, batch_size)


def _set_rounds(problem: Problem, step_size: int, passes: int | None) -> None:
    """Set the steps of a round, so that an update of a sample takes a tenth of its time.

    If the number of passes over the stream is known, it also sets the number of rounds.
    """
    steps = math.ceil(min(problem.num_data, FEWEST / SHARE) / step_size)
    problem.steps_per_epoch, problem.examples_per_epoch = steps, steps * step_size
    if passes is not None:
        rounds = math.ceil(passes * math.ceil(problem.num_data / step_size) / steps)
        schedule = replace(problem.options.schedule, epochs=rounds)
        problem.options = replace(problem.options, schedule=schedule)


def count_batches_of_step(problem: Problem, number: int) -> None:
    """Shorten the rounds of a stream if each step accumulates this number of batches.

    A trainer's loader gives the number at the start.
    """
    if not problem.has_rounds or hasattr(problem.loader, "batches_per_step"):
        return
    steps, passes = problem.steps_per_epoch, problem.options.schedule.epochs
    assert steps
    batch_size = problem.examples_per_epoch // steps
    if passes is not None:  # exactly, because a round has at most the steps of a pass
        passes = passes * steps // math.ceil(problem.num_data / batch_size)
    _set_rounds(problem, number * batch_size, passes)
    vars(problem).pop("averages", None)  # it depends on the number of steps


# --- the network and its optimisers ---


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers with running statistics, by name."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


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
