"""Algorithm 1 of Immer et al. 2021 (arXiv:2104.04975), as functions over a problem and a state.

    state = start(problem, hyperparameters)
    for epoch in 1, 2, ..., epochs:
        for batch in data:
            loss(batch).backward()
            penalty(problem, state)          # adds the prior's gradient, T·δ/N · θ at σ = 1
            optimizer.step()
        end_of_epoch(problem, state, epoch)  # where due: curvature, evidence, steps on log δ
    finish(problem, state)                   # the average of θ, and the last update at it

The lines of the paper's algorithm, with its symbols, and where they are:

    first δ and σ             `Problem.initial_hyperparameters`; δ = 5e-4 N/T by default
    MAP step on θ             the loop's own step, whose gradient `penalty` completes
    burn-in B, frequency F    `Schedule.is_due_within`, asked by `end_of_epoch`
    curvature H of the data   `Posterior.fit`: K-FAC, called by `update_prior`, which `fit` calls
    K steps on log p(D | M)   `Hyperparameters.update`, from `update_prior`: Adam on log δ and log σ
    the best model            keep="best", as laplace-torch: `remember_if_best`

By default the result is instead the average of θ (`average`), and updates see samples
(`samples.curvature_plan`). All other departures are in `decay_policy`, learned likelihoods in
`learned_numbers`, invariances in `marglik.augmentation`.

On several ranks every function is collective. The loop averages gradients over ranks, whose batches
have equally many examples: only then is that the gradient of the mean over all examples.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.likelihoods import likelihood_of
from kfac_backend.sharding import is_sharded
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import Hyperparameters, add_penalty, update_prior
from marglik.random_state import own_random_numbers, seeded_random_numbers
from marglik.training import decay_policy, held_out
from marglik.training.average import take_average
from marglik.training.decay_policy import set_decays
from marglik.training.learned_numbers import (
    check_learned_numbers,
    learn_label_noise,
    likelihood_step,
    log_benefit_of_held_out,
    log_lost_strength,
)
from marglik.training.problem import Problem, check_optimizer, look_at_data
from marglik.training.samples import (
    CurvaturePlan,
    check_sample,
    curvature_plan,
    pass_of_update,
)
from marglik.training.state import (
    LearnerState,
    check_saved,
    load_saved,
    numbers_to_log,
    unchanged_by_errors,
)

NEW_RATE = 1.25
"""Ratio of two learning rates above which they count as different."""


def start(
    problem: Problem,
    hyperparameters: Hyperparameters,
    saved: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    sums_terms: bool = False,
) -> LearnerState:
    """Return the state before the first step, and complete the problem from its data.

    Args:
        problem: the training problem.
        hyperparameters: δ of each group, and σ; they become a part of the state.
        saved: a state of `PriorLearner.state_dict` to continue from.
        loss: see `PriorLearner.start`.
        sums_terms: see `PriorLearner.start`.
    """
    likelihood = problem.options.likelihood
    # A rank with another model, state or other options would learn something else, or wait forever.
    problem.ranks.agree_on_state(lambda: check_saved(saved, problem, hyperparameters))
    # Gradients of a small noise are large, and so are the steps of SGD.
    normalized = all(part.normalizes_steps for part in problem.parts)
    to_learn = likelihood.to_learn(normalized) if problem.options.learns else {}
    likelihood = likelihood.replace(**to_learn) if to_learn else likelihood
    first_batch, first_loss = look_at_data(problem, likelihood, sums_terms, loss)
    state = LearnerState.initial(problem, hyperparameters, likelihood, first_loss)
    set_decays(problem, state)
    check_learned_numbers(problem, state, first_batch)  # check before any work is lost
    if saved is not None:
        load_saved(state, saved)
    return state


@torch.no_grad()
def penalty(
    problem: Problem,
    state: LearnerState,
    scale: Tensor | float = 1.0,
    index: int = 0,
    *,
    with_value: bool = False,
) -> Tensor | float | None:
    """Add the prior's gradient to the gradients of an optimiser's parameters.

    Call it once before each step of the optimiser, after the backward passes and after gradients
    were clipped. The loop then clips only the gradient of the data.

    Args:
        problem: the training problem.
        state: its step count, average and measures are updated.
        scale: factor on the loss, as of gradient scalers.
        index: index of the optimiser in the list.
        with_value: whether to return ½ Σ wd ‖θ‖², see `add_penalty`.
    """
    part = problem.parts[index]
    check_optimizer(part.optimizer)
    # Step 1: count the step.
    average = state.averages[index] if problem.averages else None
    if average is not None:
        if average.is_temporary:
            raise RuntimeError(
                "The optimiser stepped within averaged(). At its end the parameters are restored, "
                "so this step would be lost. Train outside of the context."
            )
        state.measures.frozen_norms = [n for n, norm in problem.norms.items() if not norm.training]
    state.steps[index] += 1
    # Step 2: in the first ten steps, find scale-invariant weights; after the tenth, raise δ once.
    decay_policy.look_at_first_steps(problem, state, part)
    # Step 3: add the prior's gradient.
    decays = decay_policy.stable_decays(problem, state, part)
    prior_scale = state.gradient_scale * scale
    value = add_penalty(part.parameters, decays, prior_scale, part.padding, with_value=with_value)
    # Step 4: limit the norm of all gradients, from the eleventh step.
    if (clip := problem.options.policy.clip) is not None:
        clip = clip if state.steps[index] > decay_policy.OBSERVED_STEPS else None
        norms = state.measures.gradient_norms
        norms[index] = decay_policy.clip_gradients(part.parameters, norms[index], clip, scale)
    # Step 5: average θ of the previous step, after the operations whose gradients are in the cache.
    if average is not None:
        average.begin_step()
    return value


def end_of_epoch(problem: Problem, state: LearnerState, epoch: int) -> dict[str, float]:
    """Update the prior if an update is due; return the numbers to log, by name.

    Args:
        problem: the training problem.
        state: changed in place; after an exception it is as before, and the call can be repeated.
        epoch: the number of the epoch that has ended, from 1; earlier epochs are ignored, as after
            a resume.

    Raises:
        FloatingPointError: the evidence is not finite.
    """
    schedule = problem.options.schedule
    if epoch <= state.epoch:
        return {}
    with unchanged_by_errors(state, problem.model):
        state.epoch = epoch
        take_replayed_decays(problem, state)  # of another member of an ensemble
        if problem.learns_label_noise and epoch != schedule.epochs:  # after the last, `finish` does
            learn_label_noise(problem, state, is_late=schedule.is_late(epoch))
        # Once some labels are known to be wrong, Λ is smaller, and updates would lower the decays
        # again.
        if problem.learns_label_noise and state.likelihood.parameters["noise"].item() > 0:
            return {}
        is_due = schedule.is_due_within(epoch) and not decay_policy.skips_update(problem, state)
        if not is_due and not has_new_rate(problem, state):
            return {}
        return update(problem, state)


def update(problem: Problem, state: LearnerState, is_last: bool = False) -> dict[str, float]:
    """Increase the evidence at the present parameters; return the numbers to log."""
    before, schedule = state.hyperparameters.prior_precision, problem.options.schedule
    evidences, state.record = fit(problem, state, schedule.steps, is_last)  # K + 1
    assert state.posterior is not None
    loss = state.posterior.fitted_curvature(any_weights=True).loss
    state.losses.append((state.epoch, loss / problem.num_data))
    decay_policy.look_at_update(problem, state, before)
    state.steps_at_update, state.measures.rate = state.steps[-1], problem.rate
    set_decays(problem, state)
    state.evidences.append(evidences[-1])
    state.evidences_of_steps += evidences[:-1]
    if schedule.keep == "best":
        remember_if_best(state, problem.model)
    return numbers_to_log(state, problem.model)


def fit(
    problem: Problem, state: LearnerState, steps: int, is_last: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Fit the Laplace posterior, then make steps on its log marginal likelihood."""
    hyper, options, N = state.hyperparameters, problem.options, problem.num_data
    problem.check_trainable()
    # Step 1: choose the data of the curvature: all of it, or a sample.
    plan = curvature_plan(problem, state, is_last)
    curvature, data = pass_of_update(problem, state, plan, is_last)
    is_sample, former = plan.num_examples < N, state.posterior
    state.measures.has_estimates |= is_sample or curvature.make_fisher().draws
    # Step 2: ask the rules beyond the evidence for limits on δ and for a held-out gradient.
    largest = None if is_last else partial(decay_policy.largest_precisions, problem, state)
    settles = is_last and options.policy.settles_noise and options.schedule.keep == "last"
    pull = None
    if steps and not is_last and problem.corrects_decays:
        pull = partial(held_out.correct, problem, state)
    vectors = None
    if plan.corrects_gamma:
        vectors = problem.vectors if plan.fisher == options.curvature.fisher else 1
    # Step 3: compute the curvature at θ, and make K steps on the evidence.
    state.posterior = posterior = Posterior(
        problem.model, state.likelihood, curvature, sigma_noise=hyper.sigma_noise,
        temperature=options.temperature, structure=options.hessian_structure,
        process_group=problem.ranks.process_group, former=former,
    )  # fmt: skip
    # Separate random numbers: the loop's must not depend on the times of updates.
    with seeded_random_numbers(problem.model, state.epoch):
        with own_random_numbers(problem.ranks):
            evidences, record = update_prior(
                hyper, posterior, data, N, steps, is_sample=is_sample,
                repeat_proof=is_last or not is_sample, largest=largest, settles_noise=settles,
                pull=pull, num_vectors=vectors, progress=problem.progress,
            )  # fmt: skip
        if is_sample:
            check_sample(data, posterior)
        record |= plan._asdict() | {"num_data": N}
        if problem.corrects_decays:
            measures, decays = state.measures, state.weight_decays(problem)
            record["weight_decay"] = hyper.groups.summary(decays)
            record |= {"held_out_rise": measures.rise, "log_factor": measures.log_factor}
        if posterior.factors is not None:
            state.kfac_approx = posterior.factors.options.kfac_approx
        # Step 4: make a step on everything else that the evidence learns. The last update leaves
        # the ranges unchanged, because its posterior must belong to them.
        if state.ranges is not None and not is_last:
            state.ranges.learn(posterior, problem.loader, N)
        to_learn = problem.learned_by_evidence if steps else {}
        if to_learn:
            state.likelihood, sigma = likelihood_step(posterior, data, to_learn)
            if hyper.learn_sigma_noise:
                hyper.set(hyper.prior_precision, sigma)
    if to_learn and is_last:  # the last posterior must belong to the final parameters
        seconds, (refitted, record) = record["seconds"], fit(problem, state, 0, is_last)
        evidences = evidences[:-1] + refitted
        seconds = {part: seconds[part] + s for part, s in record["seconds"].items()}
        record |= {"evidence_before": evidences[0], "seconds": seconds}
    return evidences, record


def finish(problem: Problem, state: LearnerState, average: bool = True) -> dict[str, float]:
    """Take the average, update the prior there, and return the numbers to log.

    A training may end within an epoch, early, or with the parameters of its best epoch.
    average=False then keeps the network's parameters, also with keep="best". Before the end of the
    burn-in, and without any training, the posterior is fitted without changing δ. With updates=0
    there is no posterior. After an error the function can be called again.

    Raises:
        FloatingPointError: the evidence is not finite.
        ValueError: more parameters are trainable than at the start.
    """
    problem.check_trainable(may_freeze=True)
    if problem.steps_per_epoch and state.steps[-1] > state.epoch * problem.steps_per_epoch:
        state.epoch += 1  # an unfinished epoch counts as ended
    # Step 1: replace the last step's parameters by the average.
    if average:
        take_average(problem, state)
    state.kept_epoch = state.epoch
    # Step 2: make the last update, or fit a posterior without one, at the present parameters.
    updates = problem.options.schedule.updates
    numbers = last_update(problem, state, keeps_parameters=not average) if updates else {}
    for average_of_part in state.averages:  # not earlier: errors call this again
        average_of_part.clear()
    if state.posterior is not None and not is_sharded(problem.model):
        state.posterior.gather()  # so that one rank alone can predict
    decay_policy.warn_at_the_end(problem, state)
    log_benefit_of_held_out(problem, state)
    log_lost_strength(problem, state)
    return numbers


def last_update(
    problem: Problem, state: LearnerState, *, keeps_parameters: bool
) -> dict[str, float]:
    """Update the prior at the present parameters, if an update is due and was not made yet."""
    schedule, numbers = problem.options.schedule, dict[str, float]()
    with unchanged_by_errors(state, problem.model, parameters=schedule.keep == "best"):
        is_trained, is_fitted = state.steps[-1] > 0, state.posterior_is_current(problem)
        is_updated = state.steps[-1] == state.steps_at_update and (is_fitted or not state.posterior)
        if is_trained and problem.learns_label_noise:
            before = state.likelihood
            learn_label_noise(problem, state)
            is_fitted = is_fitted and state.likelihood == before
        record = {"corrects_gamma": False} | state.record
        fitted_with = tuple(map(record.get, CurvaturePlan._fields))
        may_update = schedule.keep == "last" or schedule.is_due(state.epoch)
        if is_trained and state.epoch >= schedule.burn_in and not is_updated and may_update:
            numbers = update(problem, state, is_last=True)
        elif not is_fitted or fitted_with != curvature_plan(problem, state, is_last=True):
            if is_updated:  # replace the evidence of the same update
                state.evidences.pop()
            evidences, state.record = fit(problem, state, 0, is_last=True)
            state.evidences.append(evidences[-1])
        if not keeps_parameters and go_back_to_best(state, problem.model):
            if problem.learns_label_noise:
                learn_label_noise(problem, state)
            state.evidences.append(fit(problem, state, 0, is_last=True)[0][-1])
            set_decays(problem, state)
    return numbers


# --- details of an epoch's end and of keep="best" ---


def has_new_rate(problem: Problem, state: LearnerState) -> bool:
    """Return whether the learning rate has changed since the last update, which makes one due.

    If the end is known, updates are frequent enough without this rule.
    """
    schedule, rates = problem.options.schedule, sorted((state.measures.rate, problem.rate))
    is_open = schedule.epochs is None or state.epoch > schedule.epochs
    may_update = is_open and schedule.every is None and state.measures.rate > 0
    return may_update and rates[1] > NEW_RATE * rates[0]


def take_replayed_decays(problem: Problem, state: LearnerState) -> None:
    """Use the weight decays that another training had from this epoch on."""
    if state.epoch in problem.replayed:
        delta, sigma, likelihood = problem.replayed[state.epoch]
        state.likelihood = likelihood_of(likelihood)
        state.hyperparameters.set(delta, sigma)
        set_decays(problem, state)


def remember_if_best(state: LearnerState, model: nn.Module) -> None:
    """Store the network and the learned values if no update had a higher evidence."""
    hyper, value = state.hyperparameters, state.evidences[-1]
    if state.best is None or value > state.best["evidence"]:
        state.best = {
            "evidence": value,
            "epoch": state.epoch,
            "model": deepcopy(model.state_dict()),
            "prior_precision": hyper.prior_precision,
            "sigma_noise": hyper.sigma_noise,
            "likelihood": str(state.likelihood),
            "log_factor": state.measures.log_factor,
        }


def go_back_to_best(state: LearnerState, model: nn.Module) -> bool:
    """Restore the network of the best update; return False if this is the last update."""
    best = state.best
    if best is None or best["evidence"] <= state.evidences[-1]:
        return False
    model.load_state_dict(best["model"])
    state.hyperparameters.set(best["prior_precision"], best["sigma_noise"])
    state.likelihood = likelihood_of(best["likelihood"])
    state.measures.log_factor = best["log_factor"]
    state.kept_epoch = best["epoch"]
    return True
