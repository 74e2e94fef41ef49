"""The rules of `DecayPolicy` for learned weight decays, beyond the plain evidence.

The rules store what they measure in `Measures`. `marglik.training.held_out` has the rules by
held-out labels.
"""

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import length
from kfac_backend.sharding import local_part, local_parts, norms_over_parts, sum_over_parts
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import precision_to_weight_decay, weight_decay_to_precision
from marglik.training.options import WEIGHT_DECAY
from marglik.training.problem import Part, Problem
from marglik.training.samples import examples_for_gamma, is_too_large
from marglik.training.state import LearnerState

_logger = logging.getLogger(__name__)

OBSERVED_STEPS = 10
"""Number of first steps that `look_at_first_steps` observes."""
LARGEST_COSINE = 1e-3
"""Largest cosine between a scale-invariant weight and its gradient. Measured: below 3e-5 for
weights before BatchNorm, above 3e-3 for others."""
LARGEST_DECLINE = 0.5
"""Largest decrease of log ‖w‖ by a raised start before the first update."""
MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a standard normal variable."""
FEW_UPDATES = 10
"""Number of updates below which a falling evidence has no meaning."""
LARGEST_FALL = 0.02
"""Difference (nats per example) between the best and the last evidence above which the last has
fallen. On nine problems where learning is at least as good as a grid, the last evidence is the
best. On 4,000 images with wrong labels, it is lower by 0.08. There a grid is better with 40 % wrong
labels."""
NATS_OF_NOISE = 0.5
"""Decrease of the training loss by one effective parameter that fits only noise. With 0.35 the rule
also took convolutions that fit 80 % wrong labels for a late fit, and one of two seeds lost 0.09
nats."""
NEW_NORM = 0.02
"""Weight of a step's norm in the running mean of `clip_gradients`, which then covers about fifty
steps."""


# --- before each step ---


def look_at_first_steps(problem: Problem, state: LearnerState, part: Part) -> None:
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
    policy = problem.options.policy
    if policy.raised_start is not None:
        _raise_start(problem, state, policy.raised_start)
    if measures.invariant and policy.invariant_limit is not None:
        _logger.info(
            "the outputs do not depend on the length of %s, because a normalisation follows. "
            "The weight decay of these weights only acts as an effective learning rate, and "
            "is limited to %.0e",
            ", ".join(measures.invariant),
            policy.invariant_limit,
        )


def _raise_start(problem: Problem, state: LearnerState, highest: float) -> None:
    """Raise the first weight decays of a classifier that SGD trains, see ``raised_start``."""
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
    start = min(highest, LARGEST_DECLINE / (rate * steps))
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
    set_decays(problem, state)


def stable_decays(problem: Problem, state: LearnerState, part: Part) -> list[float]:
    """Return an optimiser's weight decays, limited to stable values at its learning rate.

    Optimisers other than SGD accept any weight decay: Adam's steps do not grow with the
    gradient, and K-FAC's damping grows with the weight decay.
    """
    decays = [state.decays[i] for i in part.tensors]
    is_limited = problem.options.policy.stability_limit
    if not is_limited or not isinstance(part.optimizer, torch.optim.SGD):
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
        if new := [name for name in limited if name not in earlier]:
            more = f" and {len(new) - 4} more" if len(new) > 4 else ""
            warnings.warn(
                f"The weight decay of {', '.join(new[:4])}{more} has grown beyond 1 / learning "
                "rate, where SGD would diverge, and is limited to it: the data needs none of it, "
                "or training is unstable.",
                RuntimeWarning,
                stacklevel=3,
            )
        others = [name for name in earlier if name not in part.names]
        state.measures.limited = sorted(others + limited)
    return list(map(min, decays, largest))


# --- after an update ---


def set_decays(problem: Problem, state: LearnerState) -> None:
    """Compute the weight decays of the steps, once per update, and store them for `replay`."""
    options, hyper = problem.options, state.hyperparameters
    sigma, state.gradient_scale = hyper.sigma_noise, scale_of_gradients(problem, state)
    # Limit the weight decay of scale-invariant weights, once they are known.
    limit, decays = options.policy.invariant_limit, state.weight_decays(problem)
    state.decays = hyper.groups.per_tensor(decays).tolist()
    is_known = state.steps_at_update is not None and state.steps[-1] >= OBSERVED_STEPS
    if limit is not None and is_known:
        state.decays = [
            min(decay, limit) if name in state.measures.invariant else decay
            for name, decay in zip(problem.named, state.decays, strict=True)
        ]
    delta = torch.tensor(state.decays, dtype=torch.float64) * problem.num_data
    delta = delta / options.temperature
    state.decay_history[state.epoch] = (delta, sigma, str(state.likelihood))


def scale_loss(problem: Problem, state: LearnerState) -> None:
    """Let a loop multiply its loss by `Likelihood.step_scale`, for optimisers such as Adam."""
    (part,) = problem.parts
    problem.parts = [replace(part, scales_loss=part.normalizes_steps)]
    state.gradient_scale = scale_of_gradients(problem, state)


def scale_of_gradients(problem: Problem, state: LearnerState) -> float:
    """Return the factor between the loop's loss and the mean of −log p over examples."""
    # σ², because the loop's loss has no noise; also 1/R if it averages over R terms.
    scale = state.hyperparameters.sigma_noise.square().item() * problem.options.loss_scale
    scale /= problem.terms_per_example
    return scale * state.likelihood.step_scale() if problem.parts[-1].scales_loss else scale


def largest_precisions(
    problem: Problem, state: LearnerState, posterior: Posterior
) -> Tensor | None:
    """Return the largest δ of each group in an update, see ``late_fit``; None for no limit.

    It also records whether the network fits late. No step follows the last update, so its weight
    decays cannot keep the network from fitting, and need no limit.
    """
    rule, hyper = problem.options.policy.late_fit, state.hyperparameters
    measures, N = state.measures, problem.num_data
    if rule is None or not state.losses:
        return None
    terms, delta = posterior.evidence_terms, hyper.prior_precision
    T, loss = problem.options.temperature, terms.loss / N
    fall = N * (measures.first_loss - loss) / (T * hyper.sigma_noise.square().item())
    half = half_time([(0, measures.first_loss), *state.losses, (state.epoch, loss)])
    block_precision = hyper.groups.per_tensor(delta).to(terms.tensors.device)[terms.tensors]
    gamma = terms.effective_parameters(block_precision, hyper.sigma_noise, T).sum().item()
    is_late = half >= state.epoch / 2 and fall > NATS_OF_NOISE * gamma
    measures.fits_late = problem.ranks.gather(is_late)[0]  # all ranks must decide alike
    if rule != "hold" or not measures.fits_late:
        return None
    start = weight_decay_to_precision(WEIGHT_DECAY, N, T)
    is_raised = torch.tensor([name in measures.raised for name in hyper.groups.names])
    return torch.where(is_raised, delta.clamp(max=start), delta)


def look_at_update(problem: Problem, state: LearnerState, before: Tensor) -> None:
    """Record the change of the weight decays; plan the next update and its sample size.

    It warns if the network does not fit yet.
    """
    hyper, measures = state.hyperparameters, state.measures
    policy, schedule = problem.options.policy, problem.options.schedule
    assert state.posterior is not None
    of_tensors = state.record["effective_parameters"]
    gamma = hyper.groups.sum_over_tensors(torch.tensor([*of_tensors.values()], dtype=torch.float64))
    needed = examples_for_gamma(state.posterior, of_tensors)
    gamma, needed = problem.ranks.gather((gamma, needed))[0]  # all ranks must decide alike
    measures.examples_for_gamma = needed
    changes = (hyper.prior_precision / before).log()
    # Step 1: choose the groups whose weight decays converge. If the data determines nothing of a
    # group, its decay does not. Nor does a scale-invariant weight's: the evidence fixes only δ‖w‖².
    settles = torch.tensor([name not in measures.invariant for name in hyper.groups.names])
    weights = gamma * (settles & (gamma >= 1))
    # Step 2: set the number of updates to skip, see ``rest``. Updates may be skipped with a budget,
    # if they learn only weight decays. (Held-out labels determine the share of wrong labels.)
    learns_more = hyper.learn_sigma_noise or problem.learned_by_evidence or state.ranges is not None
    is_budget = schedule.every is None and schedule.keep == "last" and schedule.steps > 0
    is_held = measures.fits_late and policy.late_fit == "hold"
    if is_held or state.record["num_examples"] < min(needed, problem.num_data):
        # Decays that are held, or from a sample that is too small, have not converged.
        measures.rest = measures.left_out = 0
    elif policy.rest is not None and is_budget and not learns_more:
        sizes = [changes.abs()]
        if measures.last_changes:
            sizes.append((changes + changes.new_tensor(measures.last_changes)).abs() / 2)
        number = weights.sum().clamp(min=1)
        smallest = min((size * weights).sum() / number for size in sizes)
        rests = bool(weights.any()) and smallest < policy.rest
        measures.rest = max(1, 2 * measures.rest) if rests else 0
        measures.left_out = 0
    measures.last_changes = changes.tolist()
    warn_of_late_fit(problem, state)


def skips_update(problem: Problem, state: LearnerState) -> bool:
    """Return whether to skip a due update, see ``rest``; count it."""
    measures, options = state.measures, problem.options
    may_wait = options.policy.rest is not None and options.schedule.every is None
    waits = may_wait and is_too_large(problem, state)
    if measures.left_out >= measures.rest and not waits:
        return False
    measures.left_out, measures.all_left_out = measures.left_out + 1, measures.all_left_out + 1
    return True


def warn_of_late_fit(problem: Problem, state: LearnerState) -> None:
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


def warn_at_the_end(problem: Problem, state: LearnerState) -> None:
    """Warn if the evidence has fallen: the network fits what its weight decays prevented at first.

    For evidences of samples, the error of the best estimate is added to `LARGEST_FALL`.
    """
    # After few updates the network does not fit yet, and its evidence is not informative.
    passed = len(state.evidences) + state.measures.all_left_out
    if passed < FEW_UPDATES:
        return
    evidences = torch.tensor(state.evidences) / problem.num_data
    best, last = evidences.max().item(), evidences[-1].item()
    error = largest_error(evidences) if state.measures.has_estimates else 0.0
    if last < best - LARGEST_FALL - error:
        warnings.warn(
            f"The evidence per example fell from {best:.3f} to {last:.3f}. Either the network "
            "fits wrong labels, which its weight decays prevented at first, or its steps are "
            "too large. Try a larger initial weight decay, such as 0.1, or a lower learning "
            "rate, and keep the run with the higher last evidence.",
            RuntimeWarning,
            stacklevel=3,
        )


# --- what the rules compute ---


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
    present = [p.grad for p in parameters if p.grad is not None]
    gradients = local_parts(present)
    norms = norms_over_parts(torch._foreach_norm(gradients), present)
    norm: Any
    if norms[0].is_cpu:  # operations on tensors would take longer than the norms
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
