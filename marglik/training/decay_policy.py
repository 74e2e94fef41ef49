"""Rules for learned weight decays that go beyond the plain evidence.

With `DecayPolicy.off()`, no average and ``curvature_from="pass"`` the learner is exactly algorithm
1 of Immer et al. 2021 (arXiv:2104.04975).
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import length
from kfac_backend.options import check_option
from kfac_backend.sharding import local_part, local_parts, norms_over_parts, sum_over_parts
from marglik.posterior.prior import precision_to_weight_decay, weight_decay_to_precision
from marglik.training.samples import examples_for_gamma

if TYPE_CHECKING:
    from marglik.posterior.posterior import Posterior
    from marglik.training.state import LearnerState, Part, Problem

_logger = logging.getLogger(__name__)

LateFit = Literal["warn", "hold"]

WEIGHT_DECAY = 5e-4
"""The initial weight decay of all groups."""
OBSERVED_STEPS = 10
"""Number of first steps that `DecayPolicy.look_at_first_steps` observes."""
LARGEST_COSINE = 1e-3
"""Largest cosine between a scale-invariant weight and its gradient. Measured: below 3e-5 for
weights before BatchNorm, above 3e-3 for others."""
LARGEST_DECLINE = 0.5
"""Largest decrease of log ‖w‖ by a raised start before the first update."""
MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a standard normal variable."""
FEW_UPDATES = 10
"""Number of updates below which a falling evidence has no meaning."""
NATS_OF_NOISE = 0.5
"""Decrease of the training loss by one effective parameter that fits only noise. With 0.35 the rule
also took convolutions that fit 80 % wrong labels for a late fit, and one of two seeds lost 0.09
nats."""
RAISE_LIMIT = 1.2
"""Largest logarithm of the factor on the weight decays of all weights in
`DecayPolicy.corrected`."""
NEW_NORM = 0.02
"""Weight of a step's norm in the running mean of `clip_gradients`, which then covers about fifty
steps."""


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


@dataclass(frozen=True)
class DecayPolicy:
    """Rules of the weight decays beyond the evidence; None (null) or False turns a rule off.

    Args:
        invariant_limit: largest weight decay of scale-invariant weights during the training. A
            normalisation follows such a weight, so its norm does not affect the outputs. The rule
            finds these weights in the first ten steps: the gradient is orthogonal to the weight,
            alone or with its bias. A weight decay λ only turns the direction of the weight, by up
            to sqrt(2 η λ) in a step. The evidence does not include this effect, and raises δ as ‖w‖
            falls. Without the limit three of ten networks broke down after some updates, on clean
            labels. A limit of 1e-3 instead costs 0.2 nats after LayerNorm with wrong labels
            (`experiments.weight_decay.default_options`).
        raised_start: initial weight decay of a classifier's weights, if SGD trains them and they
            have the default 5e-4. The weight decays then decrease to their learned values instead
            of increasing to them. A high start keeps the network from fitting wrong labels early.
            Once it has fitted a label, the label has no curvature, and the evidence cannot
            distinguish right labels from wrong ones. Scale-invariant weights keep 5e-4. The rule
            limits the start, so that log ‖w‖ decreases by at most 0.5 before the first update. It
            lowers the NLL by 0.005 on average. The largest decrease is 0.035, and the largest
            increase is 0.007. With Adam it would raise the NLL of a transformer by 0.02
            (`experiments.weight_decay.default_options`).
        stability_limit: whether SGD's weight decays are limited to 1 / learning rate, at which a
            plain step sets the parameter to zero. Without the limit, the δ of a group that the data
            does not need grows without bound, and SGD diverges. Its step on the penalty overshoots
            if rate times weight decay exceeds 2 (1.36 with Nesterov's momentum of 0.9). A warning
            names the parameters.
        clip: largest norm of a step's gradient, including the prior's, relative to the running mean
            of this norm. A high, constant rate is close to instability, and a change of a weight
            decay sometimes makes a network unstable. Without the limit this causes a few large
            steps, from which the network may never recover.
        settles_noise: whether the last update sets a learned σ to its fixed point.
        rest: size of an update below which the learner skips the next one, because the weight
            decays have converged. After the second small update in a row it skips two, then four,
            and so on, until the weight decays change again. The size is the mean of |Δ log δ| over
            the groups, weighted by their effective parameters γ. An update is also small if it
            nearly cancels the update before it, as the noise of samples does. The rule applies only
            if ``updates`` determines the number of updates and they learn nothing else.
        fallen_evidence: largest difference (nats per example) between the best and the last
            evidence, after ten updates or more. For samples, the error of the best estimate is
            added. With a larger difference, the learner warns at the end: the network fits data
            that its weight decays prevented at first. On nine problems where learning is at least
            as good as a grid, the last evidence is the best. On 4,000 images with wrong labels, it
            is lower by 0.08. There a grid is better with 40 % wrong labels.
        late_fit: rule for a network that does not fit yet, because large weight decays keep it from
            fitting. From the second update on, the rule checks two conditions. At least half of the
            decrease of the training loss came in the second half of the epochs so far. The whole
            decrease (nats, a sum over the data) exceeds γ/2, by which γ parameters that fit only
            noise lower the loss. "warn" logs a warning at the first update in the second half of
            the epochs, if both hold. "hold" also lets no weight decay rise while both hold, and
            reverts a raised start. It is not the default, because it raises the NLL by 0.01 with
            BatchNorm and wrong labels. It lowers the NLL by 0.04 for convolutions with GroupNorm in
            batches of 128 (`experiments.weight_decay.late_fit`).
        raise_limit: largest c of a common factor e^c on the decays of all weights, chosen by the
            held-out labels of a classifier; None for no such factor. At each update except the
            last, the rule evaluates the average of the parameters on the held-out data, with τ and
            ε fitted there. c rises by 0.5 if three conditions hold, and falls by a tenth otherwise.
            A third of the epochs have ended. The mean loss exceeds its best value so far by more
            than a standard error. The gradient shows that higher decays would lower the loss, by
            more than its standard error over ten parts of the data (`held_out`). The evidence alone
            cannot show this, because it is higher for a network that memorises wrong labels. Off by
            default. On ten problems with 20 % wrong labels, this rule and ``lowering`` lower the
            NLL by 0.018 ± 0.006 (`experiments.weight_decay.held_out_labels`).
        lowering: whether, at updates that do not raise c, the held-out gradient in log δ is added
            to the gradient of the evidence. Only its part towards lower decays is added, as far as
            ten parts of the held-out data agree. Large decays can keep a network from fitting. The
            rule lowers the NLL of a transformer trained by Adam by 0.09, with and without wrong
            labels. It raises the NLL by 0.006 on convolutions with structured noise. Off by
            default.

    Raises:
        ValueError: a clip that is not above 1, a limit that is not above 0, or another
            ``late_fit``.
    """

    invariant_limit: float | None = 0.1
    raised_start: float | None = 1e-2
    stability_limit: bool = True
    clip: float | None = 2.0
    settles_noise: bool = True
    rest: float | None = 0.1
    fallen_evidence: float | None = 0.02
    late_fit: LateFit | None = "warn"
    raise_limit: float | None = None
    lowering: bool = False

    @property
    def uses_held_out(self) -> bool:
        """Whether held-out labels correct the decays."""
        return self.raise_limit is not None or self.lowering

    def __post_init__(self) -> None:
        if self.raise_limit is not None and not self.raise_limit > 0:
            raise ValueError(
                f"raise_limit must be above 0, such as 1.2, or None for no factor, not "
                f"{self.raise_limit}."
            )
        if self.clip is not None and not self.clip > 1:
            raise ValueError(f"clip must be above 1, or None for no limit, not {self.clip}.")
        if self.late_fit is not None:
            check_option("late_fit", self.late_fit, LateFit)

    @classmethod
    def off(cls) -> Self:
        """Return a policy without rules: only the evidence determines the weight decays."""
        return cls(None, None, False, None, False, None, None, None, None, False)

    @classmethod
    def corrected(cls) -> Self:
        """Return a policy with the default rules and both corrections by held-out labels."""
        return cls(raise_limit=RAISE_LIMIT, lowering=True)

    # --- before each step ---

    def look_at_first_steps(self, problem: "Problem", state: "LearnerState", part: "Part") -> None:
        """Measure the gradients of the data in the first steps; afterwards raise the start."""
        measures, step = state.measures, state.steps[part.index]
        if step > OBSERVED_STEPS:
            return
        tensors = dict(zip(part.names, part.parameters, strict=True))
        measures.invariant = [
            name
            for name in measures.invariant
            if name not in tensors or _may_be_invariant(name, tensors)
        ]
        if step < OBSERVED_STEPS or part is not problem.parts[-1]:
            return
        if self.raised_start is not None:
            self._raise_start(problem, state)
        if measures.invariant and self.invariant_limit is not None:
            _logger.info(
                "the outputs do not depend on the length of %s, because a normalisation follows. "
                "The weight decay of these weights only acts as an effective learning rate, and "
                "is limited to %.0e",
                ", ".join(measures.invariant),
                self.invariant_limit,
            )

    def _raise_start(self, problem: "Problem", state: "LearnerState") -> None:
        options, hyper = problem.options, state.hyperparameters
        optimizers = [part.optimizer for part in problem.parts]
        # Skip optimisers that divide gradients by their size, including the prior's gradient.
        if (
            state.likelihood.kind != "classes"
            or not all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers)
            or not (problem.steps_per_epoch or length(problem.loader))
        ):
            return
        schedule = options.schedule
        last = schedule.epochs or schedule.burn_in + (schedule.every or 1)
        first = next((epoch for epoch in range(1, last + 1) if schedule.is_due(epoch)), None)
        if first is None:
            return
        # Limit the raise, so that the weights do not vanish before the first update.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        momentum = max(float(group["momentum"]) for group in groups)
        rate = problem.rate / max(1 - momentum, 1e-3)
        steps = first * (problem.steps_per_epoch or length(problem.loader) or 1)
        assert self.raised_start is not None
        start = min(self.raised_start, LARGEST_DECLINE / (rate * steps))
        N, T = problem.num_data, options.temperature
        raised = precision_to_weight_decay(hyper.prior_precision, N, T)
        state.measures.raised = []
        for g, decay in enumerate(raised.tolist()):
            members = [
                name
                for name, index in zip(problem.named, hyper.groups.index, strict=True)
                if index == g
            ]
            # Leave out scale-invariant weights, whose decay acts only on the learning rate.
            if abs(decay / WEIGHT_DECAY - 1) < 1e-6 and all(
                problem.named[name].dim() > 1 and name not in state.measures.invariant
                for name in members
            ):
                raised[g] = max(start, WEIGHT_DECAY)
                state.measures.raised.append(hyper.groups.names[g])
        hyper.set(weight_decay_to_precision(raised, N, T), hyper.sigma_noise)
        state.set_decays(problem)

    def stable_decays(self, state: "LearnerState", part: "Part") -> list[float]:
        """Return an optimiser's weight decays, limited to stable values at its learning rate.

        Optimisers other than SGD accept any weight decay: Adam's steps do not grow with the
        gradient, and K-FAC's damping grows with the weight decay.
        """
        decays = [state.decays[i] for i in part.tensors]
        if not self.stability_limit or not isinstance(part.optimizer, torch.optim.SGD):
            return decays
        groups = part.optimizer.param_groups
        highest_rate = max(float(group["lr"]) for group in groups) * state.gradient_scale
        if highest_rate * max(decays) <= 1 and not state.measures.limited:
            return decays
        rates = {p: float(g["lr"]) for g in groups for p in g["params"]}
        scaled = [rates[p] * state.gradient_scale for p in part.parameters]
        largest = [1 / rate if rate else torch.inf for rate in scaled]
        limited = [n for n, wd, most in zip(part.names, decays, largest, strict=True) if wd > most]
        earlier = state.measures.limited
        if limited or earlier:
            warn_of(
                [name for name in limited if name not in earlier],
                "The weight decay of {} has grown beyond 1 / learning rate, where SGD would "
                "diverge, and is limited to it: the data needs none of it, or training is "
                "unstable.",
            )
            others = [name for name in earlier if name not in part.names]
            state.measures.limited = sorted(others + limited)
        return list(map(min, decays, largest))

    def limit_gradients(self, state: "LearnerState", part: "Part", scale: Tensor | float) -> None:
        """Limit the common norm of an optimiser's gradients, see ``clip``."""
        if self.clip is None:
            return
        measures = state.measures
        after_start = state.steps[part.index] > OBSERVED_STEPS
        measures.gradient_norms[part.index] = clip_gradients(
            part.parameters,
            measures.gradient_norms[part.index],
            self.clip if after_start else None,
            scale,
        )

    # --- around an update ---

    def limited_decays(self, problem: "Problem", state: "LearnerState") -> list[float]:
        """Return T·δ/N of each tensor, with the limit of invariant weights after an update."""
        decays = state.weight_decays(problem)
        values = state.hyperparameters.groups.per_tensor(decays).tolist()
        is_known = state.steps_at_update is not None and state.steps[-1] >= OBSERVED_STEPS
        if self.invariant_limit is None or not is_known:
            return values
        return [
            min(decay, self.invariant_limit) if name in state.measures.invariant else decay
            for name, decay in zip(problem.named, values, strict=True)
        ]

    def limits(
        self, problem: "Problem", state: "LearnerState", is_last: bool
    ) -> "Callable[[Posterior], Tensor | None] | None":
        """Return the limits of the decays in an update, see `update_prior`.

        No step follows the last update, so its weight decays cannot keep the network from fitting.
        """
        return None if is_last else partial(self.largest_precisions, problem, state)

    def largest_precisions(
        self, problem: "Problem", state: "LearnerState", posterior: "Posterior"
    ) -> Tensor | None:
        """Return the largest δ of each group in an update, see ``late_fit``; None for no limit.

        It also records whether the network fits late.
        """
        hyper, measures, N = state.hyperparameters, state.measures, problem.num_data
        if self.late_fit is None or not state.losses:
            return None
        T, loss = problem.options.temperature, posterior.loss.item() / N
        fall = N * (measures.first_loss - loss) / (T * hyper.sigma_noise.square().item())
        half = half_time([(0, measures.first_loss), *state.losses, (state.epoch, loss)])
        terms, delta = posterior.evidence_terms, hyper.prior_precision
        block_precision = hyper.groups.per_tensor(delta).to(terms.tensors.device)[terms.tensors]
        gamma = terms.effective_parameters(block_precision, hyper.sigma_noise, T).sum().item()
        is_late = half >= state.epoch / 2 and fall > NATS_OF_NOISE * gamma
        measures.fits_late = problem.ranks.gather(is_late)[0]  # all ranks must decide alike
        if self.late_fit != "hold" or not measures.fits_late:
            return None
        start = weight_decay_to_precision(WEIGHT_DECAY, N, T)
        is_raised = torch.tensor([name in measures.raised for name in hyper.groups.names])
        return torch.where(is_raised, delta.clamp(max=start), delta)

    def look_at_update(self, problem: "Problem", state: "LearnerState", before: Tensor) -> None:
        """Record the change of the weight decays; plan the next update and its sample size.

        It warns if the network does not fit yet.
        """
        hyper, measures = state.hyperparameters, state.measures
        assert state.posterior is not None
        of_tensors = state.record["effective_parameters"]
        gamma = hyper.groups.sum_over_tensors(
            torch.tensor([*of_tensors.values()], dtype=torch.float64)
        )
        needed = examples_for_gamma(state.posterior, of_tensors)
        gamma, needed = problem.ranks.gather((gamma, needed))[0]  # all ranks must decide alike
        measures.examples_for_gamma = needed
        changes = (hyper.prior_precision / before).log()
        moves = changes.abs()
        # If the data determines nothing of a group, its decay does not converge. Nor does a
        # scale-invariant weight's: the evidence fixes only δ‖w‖².
        settles = torch.tensor([name not in measures.invariant for name in hyper.groups.names])
        settles &= gamma >= 1
        weights = gamma * settles
        number = weights.sum().clamp(min=1)
        # Decays that are held, or from a sample that is too small, have not converged.
        is_held = measures.fits_late and self.late_fit == "hold"
        is_too_small = state.record["num_examples"] < min(needed, problem.num_data)
        if is_held or is_too_small:
            measures.rest = measures.left_out = 0
        elif self.rest is not None and problem.may_rest(state):
            sizes = [moves]
            if measures.last_changes:
                sizes.append((changes + changes.new_tensor(measures.last_changes)).abs() / 2)
            smallest = min((size * weights).sum() / number for size in sizes)
            measures.rest = (
                max(1, 2 * measures.rest) if settles.any() and smallest < self.rest else 0
            )
            measures.left_out = 0
        measures.last_changes = changes.tolist()
        self.warn_of_late_fit(problem, state)

    def skips_update(self, state: "LearnerState") -> bool:
        """Return whether to skip a due update because weight decays have converged; count it."""
        measures = state.measures
        if measures.left_out >= measures.rest:
            return False
        measures.left_out, measures.all_left_out = measures.left_out + 1, measures.all_left_out + 1
        return True

    def warn_of_late_fit(self, problem: "Problem", state: "LearnerState") -> None:
        """Warn once, while the training can still be stopped, if the network does not fit yet."""
        epochs, passed = problem.options.schedule.epochs, [epoch for epoch, _ in state.losses]
        if epochs is None or not state.measures.fits_late:
            return
        if passed[-2] < epochs / 2 <= passed[-1] < epochs:
            warnings.warn(
                "The network does not fit yet: half of the fall of the training loss up to epoch "
                f"{passed[-1]} came in the second half of these epochs. The present weight decays "
                "can keep it from fitting. Compare with a training that learns no weight decays "
                "(updates=0, or --prior.method fixed). Train longer, with smaller batches, or "
                "with a higher learning rate. In Python, late_fit='hold' lets no weight decay "
                "rise until the network fits.",
                RuntimeWarning,
                stacklevel=4,
            )

    def warn_at_the_end(self, problem: "Problem", state: "LearnerState") -> None:
        """Warn if the evidence has fallen."""
        # After few updates the network does not fit yet, and its evidence is not informative.
        passed = len(state.evidences) + state.measures.all_left_out
        if self.fallen_evidence is None or passed < FEW_UPDATES:
            return
        evidences = torch.tensor(state.evidences) / problem.num_data
        best, last = evidences.max().item(), evidences[-1].item()
        error = largest_error(evidences) if state.measures.has_estimates else 0.0
        if last < best - self.fallen_evidence - error:
            warnings.warn(
                f"The evidence per example fell from {best:.3f} to {last:.3f}. Either the network "
                "fits wrong labels, which its weight decays prevented at first, or its steps are "
                "too large. Try a larger initial weight decay, such as 0.1, or a lower learning "
                "rate, and keep the run with the higher last evidence.",
                RuntimeWarning,
                stacklevel=3,
            )


@torch.no_grad()
def _may_be_invariant(name: str, tensors: dict[str, nn.Parameter]) -> bool:
    """Return whether f(cw) = f(w) for a weight, alone or with its bias: f(cw, cb) = f(w, b).

    The gradient is then orthogonal to them in each step. If this holds for the weight alone,
    BatchNorm follows or the weight itself is normalised. If it holds with the bias, GroupNorm or
    LayerNorm follows.
    """
    weight, bias = tensors[name], tensors.get(f"{name.removesuffix('weight')}bias")
    if weight.dim() < 2 or weight.grad is None:
        return False
    inner = squares = lengths = torch.zeros((), device=weight.device)
    for p in (weight, bias):
        if p is None or p.grad is None:
            continue
        part, gradient = local_part(p), local_part(p.grad)
        products = (gradient * part).sum(), gradient.square().sum(), part.square().sum()
        of_p = sum_over_parts(products, [p, p, p])
        inner, squares, lengths = inner + of_p[0], squares + of_p[1], lengths + of_p[2]
        if inner.abs() <= LARGEST_COSINE * (squares * lengths).sqrt().clamp(min=1e-30):
            return True
    return False


@torch.no_grad()
def clip_gradients(
    parameters: list[nn.Parameter],
    running: Tensor | float | None,
    clip: float | None,
    scale: Tensor | float,
) -> Tensor | float:
    """Limit the common norm of all gradients to ``clip`` times its running mean.

    The running mean follows the gradients, so no limit needs to be chosen. The idea is from
    Seetharaman et al. 2020 (arXiv:2007.14469), who use a quantile of all earlier norms.

    Args:
        parameters: their gradients are changed in place.
        running: the running mean of the norms; None before the first step.
        clip: None only updates the running mean.
        scale: factor in the gradients, as of a gradient scaler.

    Returns:
        The new running mean; on a GPU a tensor, because reading a number would wait for it.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = local_parts(p.grad for p in with_gradient if p.grad is not None)
    norms = norms_over_parts(torch._foreach_norm(gradients), with_gradient)
    norm: Any
    if norms[0].device.type == "cpu":  # operations on tensors would take longer than the norms
        norm, scale = math.hypot(*map(float, norms)), float(scale)
        running = None if running is None else float(running)
    else:
        norm = torch.linalg.vector_norm(torch.stack(norms)).float()
        if running is not None:  # a float after a run on a CPU
            running = torch.as_tensor(running, device=norm.device)
    norm = norm / scale
    mean: Any = norm if running is None else running
    where: Any = torch.where
    if not isinstance(norm, Tensor):
        where = lambda is_so, yes, no: yes if is_so else no  # noqa: E731
    # The mean starts later if a scaler skips its first step, or if the first gradient is zero.
    mean = where((mean > 0) & (mean < torch.inf), mean, norm)
    # A gradient scaler skips a step whose gradients are not finite, and so does the mean.
    is_finite = norm < torch.inf
    is_large = clip is not None and is_finite & (norm > clip * mean)
    if clip is not None and is_large is not False:
        factor = where(is_large, clip * mean / norm, 1.0)
        widest = max((g.dtype for g in gradients), key=lambda dtype: dtype.itemsize)
        torch._foreach_mul_(gradients, torch.as_tensor(factor, dtype=widest))
        norm = norm * factor
    return mean + NEW_NORM * (where(is_finite, norm, mean) - mean)


def half_time(losses: Sequence[tuple[int, float]]) -> float:
    """Return the epoch at which half of a loss's fall had occurred, between two updates."""
    middle = (losses[0][1] + losses[-1][1]) / 2
    above = [i for i, (_, loss) in enumerate(losses[:-1]) if loss > middle]
    last = above[-1] if above else 0  # the first one for a loss that has risen
    return (losses[last][0] + losses[last + 1][0]) / 2


def largest_error(estimates: Tensor) -> float:
    """Return the expected excess of the largest of n estimates over the true value, σ √(2 ln n).

    σ is the standard deviation of independent normal errors, from the median difference of
    neighbours, because most updates change little compared with the noise of a sample.
    """
    differences = estimates.diff().abs()
    sigma = differences.median().item() / (MEDIAN_OF_NORMAL * math.sqrt(2))
    return sigma * math.sqrt(2 * math.log(len(estimates)))


def warn_of(names: Sequence[str], text: str) -> None:
    """Warn of names, if any, with the first four of them in place of {}."""
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        warnings.warn(text.format(", ".join(names[:4]) + more), RuntimeWarning, stacklevel=4)
