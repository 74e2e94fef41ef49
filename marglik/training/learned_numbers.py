"""Learn the parameters of a likelihood: by the evidence, or label noise by held-out data.

The evidence cannot learn ε, the share of random labels. Early in training it explains the misfit of
the network as noise, and the network then never fits. A network that has fitted wrong labels shows
no noise. Λ and its log determinant also fall as ε rises, so the evidence prefers a large ε.
Held-out labels determine ε: ε and a temperature τ together maximise their likelihood, Σ log((1 − ε)
p_τ(y) + ε/C). A network that does not fit yet gets a large τ, not a large ε. A network that is
confident in wrong predictions gets a large ε. The training uses only ε, because it learns the scale
of the outputs itself.

Training starts without noise. In the last third of the epochs (`Schedule.is_late`), ε is estimated
after each epoch. It stays 0 until the estimates of three epochs in a row are above 0, because a
single epoch may show a little noise for clean labels, too. In a shorter training all epochs of the
last third must show noise. Once ε is above 0, the weight decays do not change until the last
update. The weight decays of "classification" have kept the network from fitting wrong labels. With
noise from the first epoch, Λ would be smaller, and the weight decays would fall. The network would
also ignore right labels of difficult examples before it could learn them. On digits, noise from the
first epoch raised the NLL by up to .02 compared with "classification", and noise from the last
third on lowered it (experiments/labels/README.md).

Without held-out labels, ε is estimated from the training labels before the last third, while the
network fits most labels and not yet the wrong ones. ε and τ are fitted after each epoch of the
first two thirds. The minimum over each three epochs in a row is taken, and ε is the largest of
these minima. The minimum is necessary, because a network that has learned little may be confident
in wrong predictions for one or two epochs. A network that fits wrong labels at once shows too
little noise, and is trained as with "classification".
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_backend.engine.batches import check_read_twice
from kfac_backend.engine.model_calls import forked_random_numbers
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Heteroscedastic, Likelihood
from kfac_backend.sharding import check_whole
from marglik.augmentation.ranges import evidence_gradient
from marglik.eval_mode import eval_mode
from marglik.loaders import Loader, own_iteration
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import HeldOut, collected, fit_sharpness, scaled_loss
from marglik.prediction.predictive import outputs_of
from marglik.random_state import random_numbers_restored
from marglik.training.decay_policy import set_decays
from marglik.training.problem import Problem
from marglik.training.samples import sampled
from marglik.training.state import LearnerState

_logger = logging.getLogger(__name__)

EPOCHS_THAT_SHOW = 3
"""Number of epochs in a row that must show label noise. Fewer are not reliable, because a network
that is about to fit may be confident in wrong predictions."""


def check_learned_numbers(problem: Problem, state: LearnerState, batch: Any) -> None:
    """Raise an error if this data cannot determine the learned parameters; collective.

    Raises:
        ModuleNotFoundError: scipy, which fits label noise, is missing.
        NotImplementedError: a block, or an operation of the network, cannot be differentiated.
        ValueError, TypeError: held-out batches do not fit the network; or, without them, there are
            too few epochs to estimate noise from the training labels.
    """
    if problem.learned_by_evidence or state.ranges is not None:
        _check_derivatives(problem, state, batch)
    if not problem.learns_label_noise and not problem.corrects_decays:
        return
    with extra("statistics"):
        import scipy.optimize  # noqa: F401  # imported here: it takes long
    num_early = problem.options.schedule.num_early
    if problem.held_out is not None:
        check_read_twice(problem.held_out)
        outputs_and_labels(problem, state, problem.held_out)
    elif num_early < EPOCHS_THAT_SHOW:
        raise ValueError(
            f"To learn the share of wrong labels from the training labels, {EPOCHS_THAT_SHOW} "
            "epochs in a row are needed before the last third of the epochs. This training has "
            f"{num_early}. Pass a tenth of the data as held_out=batches, without training on them. "
            "Or pass the share, for example 'noisy_classification(noise=0.2)', or train longer."
        )
    elif problem.ranks.rank == 0:
        _logger.warning(
            "without held-out labels, the share of wrong labels is estimated from the training "
            "labels before the network fits them, and is often too small. For a better estimate, "
            "pass a tenth of the data as held_out=batches, without training on them, or pass the "
            "share: 'noisy_classification(noise=0.2)'."
        )


def _check_derivatives(problem: Problem, state: LearnerState, batch: Any) -> None:
    """Raise an error if the evidence of a batch has no derivative in the learned quantities."""
    if (structure := problem.options.hessian_structure) != "kron":
        raise NotImplementedError(
            f"hessian_structure={structure!r} has no derivatives in the likelihood's parameters "
            "and the augmentations' ranges. Choose 'kron', or fix these parameters."
        )
    names = problem.learned_by_evidence
    modules = [] if state.ranges is None else state.ranges.modules
    if modules:
        check_whole(problem.model, "Learning the ranges of augmentations")
    curvature, group = problem.options.curvature, problem.ranks.process_group
    posterior = Posterior(problem.model, state.likelihood, curvature, process_group=group)
    with forked_random_numbers(problem.model):
        posterior.fit([batch])
        if modules:
            list(evidence_gradient(posterior, [[batch]], [module.ranges for module in modules]))
        if names:
            likelihood_step(posterior, [batch], names)


def likelihood_step(
    posterior: Posterior, data: Loader, names: Collection[str]
) -> tuple[Likelihood, Tensor]:
    """Update parameters ξ of the likelihood, and σ, by the evidence at fixed θ and δ.

    The evidence is log p(D|θ, ξ)/T − ½ log det(H(ξ)/T + P₀). The outputs at θ determine the first
    term. The second term is replaced by its tangent in log ξ, which takes one more pass over the
    data. The sum is maximised within a factor e of the present ξ. For the noise of an output, a
    fixed point is MacKay's σ² = SSE/(N − T γ).

    For a noise, the tangent of the blocks' log det is Σ_b γ_b. The whole GGN determines fewer
    directions, because tensors share them: max_b γ_b ≤ γ ≤ Σ_b γ_b. The tangent is therefore
    multiplied by max_b γ_b / Σ_b γ_b. On 150 points and three layers the whole GGN has γ = 22, its
    blocks have max_b γ_b = 17 and Σ_b γ_b = 50. On 80 points the sum makes the noise 53 % too
    large, the maximum 11 % (K-FAC overestimates γ_b, too). With the sum, the strength of
    "heteroscedastic" also shrinks to nothing. The steps on δ use each block's own γ_b.

    Args:
        posterior: a fitted posterior.
        data: batches of all its data, or of a sample.
        names: keys of `Likelihood.parameters`.
    """
    factors, T = posterior.fitted_factors(), posterior.temperature
    likelihood, sigma = factors.likelihood, posterior.sigma_noise.double().cpu()
    # Leaves for the pass, with an entry for each output if there are several.
    present = [
        xi.expand(posterior.n_outputs).clone() if xi.dim() else xi.clone()
        for xi in (likelihood.parameters[name] for name in names)
    ]
    bounds = [likelihood.lower_bounds()[name] for name in names]

    def at(values: Sequence[Tensor]) -> Likelihood:
        return likelihood.with_parameters(dict(zip(names, values, strict=True)))

    # Step 1: the gradient of −½ log det, and the outputs.
    own: list[tuple[Tensor, Tensor]] = []
    (of_det,) = evidence_gradient(
        posterior, [data], present, of_loss=0.0, likelihood=at(present), outputs=own
    )
    gamma = posterior.effective_parameters()
    share = (gamma.max() / gamma.sum().clamp(min=1e-30)).cpu()
    tangent = [
        share * g.cpu() * (xi - low) for g, xi, low in zip(of_det, present, bounds, strict=True)
    ]
    outputs = [pair for of_rank in posterior.ranks.gather(own) for pair in of_rank]
    weight = factors.num_data / sum(len(y) for _, y in outputs)  # N/M for a sample

    def log_p(likelihood: Likelihood) -> Tensor:
        losses = weight * torch.stack([likelihood.losses(f, y).sum() for f, y in outputs]).sum()
        # With σ, such a noise is a part of σ, whose normaliser the loss omits.
        scale = likelihood.parameters["noise"].log().mean() if likelihood.has_sigma else 0.0
        count = factors.num_loss_terms * factors.num_outputs
        return -(losses / sigma.square() + count * scale) / T

    # Step 2: the maximum, in the logarithm of the difference between ξ and its lower bound.
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
    parameters = dict(zip(names, (xi.detach().tolist() for xi in moved()), strict=True))
    noise = torch.tensor(parameters["noise"] if likelihood.has_sigma else 1.0, dtype=torch.float64)
    return likelihood.replace(**parameters), sigma * noise.log().mean().exp()


SMALLEST_STRENGTH = 1e-3
"""Strength of "heteroscedastic" below which all inputs have about the same noise."""


def log_lost_strength(problem: Problem, state: LearnerState) -> None:
    """Log if the learned noise of "heteroscedastic" no longer depends on the input.

    If the first updates lower the strength k before the network has fitted the means, u hardly
    changes the noise any more, and k may fall until the end (`experiments.uci.input_noise`).
    """
    likelihood = getattr(state.likelihood, "of", state.likelihood)  # without weights of examples
    learns_strength = "strength" in problem.learned_by_evidence
    if not isinstance(likelihood, Heteroscedastic) or not learns_strength or problem.ranks.rank:
        return
    fixed = "heteroscedastic(strength=1.0)"
    if likelihood is not state.likelihood:
        fixed = f'weighted(of="{fixed}")'
    if (strength := likelihood.parameters["strength"].item()) < SMALLEST_STRENGTH:
        _logger.warning(
            "the learned strength of the noise is %.1e, so all inputs have about the same noise. "
            "If the noise should depend on the input, train with %s, and compare both on held-out "
            "data.",
            strength,
            fixed,
        )


# --- the share of wrong labels ---

NO_NOISE = 1e-3
"""Smaller shares count as no noise."""
MOST_LABELS = 10_000
"""Maximum number of training labels that are evaluated after an epoch, with one rank."""


@torch.no_grad()
def outputs_and_labels(
    problem: Problem, state: LearnerState, batches: Loader
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, spreads of zero, and targets of labelled examples; collective.

    Raises:
        ValueError: there is no batch, no target that counts, or targets do not fit the outputs.
    """
    model = problem.model

    def outputs_and_spread(x: Any, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        with eval_mode(model):
            f = outputs_of(model, x)
        return f, torch.zeros_like(f.flatten(0, -2))[:, None]

    # The loop draws the same numbers with and without learning ε. Loaders with their own generator
    # keep their order: other rounding would move the end of ε's fit.
    with random_numbers_restored(problem.loader, batches):
        return collected(
            outputs_and_spread, batches, model, state.likelihood, problem.options.curvature, 1,
            problem.ranks,
        )  # fmt: skip


def validation_loss(problem: Problem, state: LearnerState, batches: Loader) -> float:
    """Return the NLL of validation data at the present parameters; collective."""
    f, spread, y = outputs_and_labels(problem, state, batches)
    sigma = state.hyperparameters.sigma_noise.item()
    data = HeldOut(state.likelihood, f, spread, y, sigma, is_sampled=True)
    return problem.ranks.gather(scaled_loss(data))[0]


def learn_label_noise(problem: Problem, state: LearnerState, *, is_late: bool = True) -> None:
    """Update the likelihood's share of wrong labels late in the training, and estimate it before.

    Collective. With several ranks each has a part of the data; all get exactly the same share.
    """
    loader, N, shares = problem.loader, problem.num_data, state.shown_noise
    if problem.held_out is not None:
        if is_late or problem.options.schedule.is_late(state.epoch + EPOCHS_THAT_SHOW - 1):
            shares.append(_noise_of(problem, state, problem.held_out))
    elif not is_late:
        if N > MOST_LABELS and problem.ranks.size == 1:  # several ranks read batches in step
            loader = sampled(loader, MOST_LABELS, N, problem.ranks, state.epoch)
        shares.append(_noise_of(problem, state, own_iteration(loader)))
    if not is_late:
        return
    if problem.held_out is not None:  # the latest, once three in a row show noise
        noise = shares[-1] if min(shares[-EPOCHS_THAT_SHOW:]) >= NO_NOISE else 0.0
    else:
        last = len(shares) + 1 - EPOCHS_THAT_SHOW
        in_a_row = (shares[i : i + EPOCHS_THAT_SHOW] for i in range(last))
        noise = max(map(min, in_a_row), default=0.0)
    state.likelihood = state.likelihood.replace(noise=noise if noise >= NO_NOISE else 0.0)
    set_decays(problem, state)


def _noise_of(problem: Problem, state: LearnerState, batches: Loader) -> float:
    """Return the ε that, with a temperature, makes the labels of these batches most likely."""
    f, spread, y = outputs_and_labels(problem, state, batches)
    with torch.enable_grad():
        without = state.likelihood.replace(noise=0.0)  # so that the prior towards 0 applies
        data = HeldOut(without, f, spread, y, is_sampled=True)
        noise = fit_sharpness(data, scale=0.0).label_noise
    return problem.ranks.gather(noise)[0]


def log_benefit_of_held_out(problem: Problem, state: LearnerState) -> None:
    """Log what held-out labels would add, if the training labels alone show wrong ones."""
    if not problem.learns_label_noise or problem.held_out is not None or problem.ranks.rank:
        return
    if noise := state.likelihood.parameters["noise"].item():
        _logger.warning(
            "the training labels show a share of random labels of %.2f. Held-out labels would "
            "determine this share, and correct weight decays that let the network fit wrong "
            "labels. Pass held_out=batches, see docs/weight-decay.md.",
            noise,
        )
