"""Correct the learned weight decays by held-out labels, see `DecayPolicy`.

Training minimises L(θ; δ) = Σ ℓ_n/T + ½ Σ_g δ_g ‖θ_g‖². V is the held-out mean loss. A change of
log δ_g moves the parameters θ̄ by −f(H/T + P₀) δ_g θ̄_g after a time h of gradient flow, with f(s)
= (1 − e^(−hs))/s. So dV/d log δ_g = −∇V(θ̄)ᵀ f(H/T + P₀) δ_g θ̄_g, exact at the minimum of a
quadratic L. In the limit of long training f(s) = 1/s, as in Larsen et al. 1996 ("Adaptive
regularization in neural network modeling") and Lorraine et al. 2020 (arXiv:1911.02590). f is
computed for each block in the eigenbasis of B ⊗ A.

A step of SGD on the mean loss is a time of lr/((1 − momentum) N). Optimisers that divide the
gradient by its size have no such time, so f(s) = 1/s for them.
"""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_backend.blocks.block import CorrectedBlock, KroneckerBlock
from kfac_backend.blocks.eigen import eigendecompositions
from kfac_backend.engine.batches import (
    arguments,
    examples,
    length,
    split_batch,
    splits_by_example,
    to_device,
)
from kfac_backend.engine.model_calls import logits_of
from kfac_backend.engine.task import Task
from kfac_backend.layers.gram import Factor
from kfac_backend.likelihoods import counted_terms, with_label_noise
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import HeldOut, fit_sharpness
from marglik.random_state import random_numbers_restored, seeded_random_numbers
from marglik.training.average import averaged
from marglik.training.learned_numbers import outputs_and_labels
from marglik.training.options import LATE_SHARE
from marglik.training.problem import Problem
from marglik.training.state import LearnerState, Measures

NUM_PARTS = 10
"""Number of parts of the held-out data. Their gradients differ by sampling errors."""
OPEN = 1.0
"""Standard errors by which the held-out loss must exceed its best so far to open the gate."""
SIGNIFICANT = 1.0
"""Standard errors by which the derivative in the common factor must be below 0 to open the gate."""
RISE = 0.5
"""Increase of the logarithm of the common factor in an update with an open gate."""
DECLINE = 0.9
"""Factor on that logarithm in an update with a closed gate."""
LOWERING = 0.3 * 10
"""Weight of the held-out gradient relative to the evidence's, both in nats of all N examples."""


# --- the held-out gradient ---


def response(spectrum: Tensor, time: float) -> Tensor:
    """Return f(s) = (1 − e^(−hs))/s for eigenvalues s > 0 and a time h; 1/s for h = ∞."""
    return -torch.expm1(-time * spectrum) / spectrum


def displacements(
    posterior: Posterior, parameters: Sequence[Tensor], times: list[float]
) -> list[Tensor]:
    """Return f(H/(σ²T) + P₀) δ_g θ_g of each tensor: its shrinkage per unit of log δ_g; collective.

    Args:
        posterior: a fitted posterior with Kronecker factors; it gives H, δ, σ and T.
        parameters: θ of each trainable tensor, in the posterior's order. They need not be the
            parameters of the fit.
        times: h of each tensor; ∞ for a minimum.

    Returns:
        Tensors in float64, with the shapes of the parameters.
    """
    factors, ranks = posterior.fitted_factors(any_weights=True), posterior.ranks
    blocks = [*factors.blocks.values()]
    holders = ranks.holders([not block.is_meta for block in blocks])
    owners = ranks.owners([block.cost for block in blocks], holders)
    bases = _bases([b for b, owner in zip(blocks, owners, strict=True) if owner == ranks.rank])
    scale = 1 / (posterior.sigma_noise.double().square() * posterior.temperature).item()
    deltas = posterior.precision_per_block(posterior.prior_precision).tolist()
    moved: list[Tensor] = []
    for block, owner, theta, delta, time in zip(
        blocks, owners, parameters, deltas, times, strict=True
    ):
        if owner != ranks.rank:
            moved.append(torch.zeros_like(theta, dtype=torch.float64))
            continue
        pull = delta * theta.detach().double().flatten()
        pull[slice(*block.constants)] = 0.0  # constants have no prior
        of_B, of_A = bases[block.name]
        spectrum = (
            of_B.values[..., None]
            if of_A is None
            else (of_B.values[..., :, None] * of_A.values[..., None, :])
        )
        if isinstance(block, CorrectedBlock):
            spectrum = block.factor_eigenvalues()[0].view_as(spectrum)
        # Directions outside of the bases have the eigenvalue δ.
        at_zero = response(torch.tensor(delta, dtype=torch.float64), time).item()
        values = response(scale * spectrum + delta, time) - at_zero
        V = pull.view(*of_B.shape, -1)  # (..., d_out, d_in)
        V = of_B.coordinates(V.mT).mT  # Q_Bᵀ V, with rows multiplied from the right
        V = (V if of_A is None else of_A.coordinates(V)) * values
        V = V if of_A is None else of_A.combined(V)
        moved.append((at_zero * pull + of_B.combined(V.mT).mT.reshape(-1)).view(theta.shape))
    ranks.exchange_(zip(moved, owners, strict=True))
    return moved


@dataclass(frozen=True)
class Basis:
    """Eigenvectors Q of a factor, in float64, or for M rows x those with nonzero eigenvalues.

    For rows Q = xᵀ W, where W has the eigenvectors of the rows' inner products, divided by the
    roots of their eigenvalues.
    """

    values: Tensor
    """Eigenvalues (..., d), or (..., M)."""
    vectors: Tensor
    """Q (..., d, d), or W (..., M, M)."""
    rows: Tensor | None
    """x, (..., M, d); None if `vectors` is Q itself."""

    @property
    def shape(self) -> torch.Size:
        """Shape of vectors, (..., d)."""
        return torch.Size(
            (*self.values.shape[:-1], (self.vectors if self.rows is None else self.rows).shape[-1])
        )

    def coordinates(self, V: Tensor) -> Tensor:
        """Return V Q of V (..., d)."""
        return V @ self.vectors if self.rows is None else (V @ self.rows.mT) @ self.vectors

    def combined(self, V: Tensor) -> Tensor:
        """Return V Qᵀ of coordinates."""
        V = V @ self.vectors.mT
        return V if self.rows is None else V @ self.rows


def _bases(blocks: list[KroneckerBlock]) -> dict[str, tuple[Basis, Basis | None]]:
    """Return the eigenvectors of B and of A of each block, by its name."""
    plain = [block for block in blocks if not isinstance(block, CorrectedBlock)]
    factors = {id(F): (F, name) for block in plain for F, name in block.named_factors()}
    rows = {key: None if F.rows is None else F.rows.double() for key, (F, _) in factors.items()}
    solved = eigendecompositions(
        [
            (Factor(F.matrix.double() if (x := rows[key]) is None else x @ x.mT), name)
            for key, (F, name) in factors.items()
        ],
        vectors=True,
    )
    bases: dict[int, Basis] = {}
    for (key, x), (values, vectors, _) in zip(rows.items(), solved, strict=True):
        if x is not None:
            least = values[..., -1:] * torch.finfo(values.dtype).eps * values.shape[-1]
            vectors = vectors * values.rsqrt().where(values > least, 0.0)[..., None, :]
        bases[key] = Basis(values, vectors, x)
    result: dict[str, tuple[Basis, Basis | None]] = {}
    for block in blocks:
        if isinstance(block, CorrectedBlock):
            own = block.eigen.to(dtype=torch.float64)
            pairs = (own.beta, own.Q_B), (own.alpha, own.Q_A)
            of_B, of_A = (None if Q is None or v is None else Basis(v, Q, None) for v, Q in pairs)
        else:
            of_B, of_A = (bases.get(id(block.factors.get(letter))) for letter in "BA")
        assert of_B is not None
        result[block.name] = of_B, of_A
    return result


def times_left(problem: Problem, state: LearnerState) -> list[float]:
    """Return the time h of gradient flow in the remaining steps, for each trainable tensor.

    If the number of epochs is unknown, as many steps are assumed to remain as were made.
    """
    epochs = problem.options.schedule.epochs
    share = 1.0 if epochs is None else max(epochs - state.epoch, 1) / max(state.epoch, 1)
    times = [math.inf] * len(problem.named)
    T, N = problem.options.temperature, problem.num_data
    for part in problem.parts:
        if isinstance(part.optimizer, torch.optim.SGD):
            group = part.optimizer.param_groups[0]
            rate = group["lr"] / max(1 - group["momentum"], 1e-3) * state.gradient_scale
            for i in part.tensors:
                times[i] = rate * T * share * state.steps[part.index] / N
    return times


# --- a look at the held-out data ---


def derivatives_in_log_decays(
    problem: Problem, state: LearnerState, moved: list[Tensor], temperature: float, noise: float
) -> Tensor:
    """Return dV/d log δ of each tensor by part of the held-out data: (parts, tensors), float64.

    Collective.

    Args:
        problem: the training; its network has the parameters θ̄.
        state: its state.
        moved: the result of `displacements` at θ̄.
        temperature: τ in the losses −log((1 − ε) p_τ(y) + ε/C), whose mean is V.
        noise: ε there.
    """
    model, batches = problem.model, problem.held_out
    parameters, flat = [*problem.named.values()], [u.flatten() for u in moved]
    device = parameters[0].device
    sums = torch.zeros(NUM_PARTS, len(moved), dtype=torch.float64, device=device)
    counts = torch.zeros(NUM_PARTS, 1, dtype=torch.float64, device=device)
    with eval_mode(model), torch.enable_grad():
        for part, x, labels in _parts(problem, state, batches):
            x = to_device(x, device)  # a copy: a model may change its input in place
            x = x.clone() if isinstance(x, Tensor) else deepcopy(x)
            args, kwargs = arguments(model, x)
            outputs = logits_of(model(*args, **kwargs))
            counted = counted_terms(labels, state.likelihood)
            outputs, labels = outputs.flatten(0, -2), labels.flatten().to(outputs.device)
            if counted is not None:
                is_counted = counted.flatten().to(outputs.device)
                outputs, labels = outputs[is_counted], labels[is_counted]
            slopes = _slopes(outputs.detach(), labels, temperature, noise)
            gradients = torch.autograd.grad(outputs, parameters, slopes, allow_unused=True)
            counts[part] += len(labels)
            sums[part] -= torch.stack([
                u.new_zeros(()) if g is None else torch.dot(g.flatten().double(), u)
                for g, u in zip(gradients, flat, strict=True)
            ])  # fmt: skip
    problem.ranks.sum_([sums, counts])
    return (sums / counts)[counts[:, 0] > 0].cpu()


def held_out_losses(problem: Problem, state: LearnerState) -> tuple[Tensor, float, float]:
    """Return −log((1 − ε) p_τ(y) + ε/C) of each held-out term (nats), (M,), and τ and ε.

    Collective. τ and ε are those that fit the terms best, at the network's present parameters.
    """
    batches = problem.held_out
    assert batches is not None
    f, spread, y = outputs_and_labels(problem, state, batches)
    likelihood = state.likelihood
    if likelihood.has_label_noise:
        likelihood = likelihood.replace(noise=0.0)
    fit = fit_sharpness(HeldOut(likelihood, f, spread, y, is_sampled=True), scale=0.0)
    temperature, noise = problem.ranks.gather((fit.output_temperature, fit.label_noise))[0]
    return _losses(f.double(), y, temperature, noise), temperature, noise


def _losses(f: Tensor, y: Tensor, temperature: float, noise: float) -> Tensor:
    """Return −log((1 − ε) softmax(f/τ)_y + ε/C) of each term, (M,)."""
    log_p = (f / temperature).log_softmax(-1).gather(-1, y.long()[:, None])[:, 0]
    return -with_label_noise(log_p, log_p.new_tensor(noise), f.shape[-1])


@torch.no_grad()
def _slopes(f: Tensor, y: Tensor, temperature: float, noise: float) -> Tensor:
    """Return the derivatives of `_losses` in f, r (p − e_y)/τ, (M, C).

    p = softmax(f/τ), and r = (1 − ε) p_y / ((1 − ε) p_y + ε/C). For a small network, autograd would
    take as long as the rest of its backward pass.
    """
    log_p, labels = (f / temperature).log_softmax(-1), y.long()[:, None]
    log_p_y = log_p.gather(-1, labels)
    log_q = with_label_noise(log_p_y, log_p_y.new_tensor(noise), f.shape[-1])
    r = (log_p_y + math.log1p(-noise) - log_q).exp()
    return r / temperature * log_p.exp().scatter_add_(-1, labels, -torch.ones_like(log_p_y))


def _parts(
    problem: Problem, state: LearnerState, batches: Any
) -> Iterator[tuple[int, Any, Tensor]]:
    """Yield a part's number, inputs and labels: batches in turn, or pieces of few batches.

    With ten batches or more, the parts of several ranks together are the parts of one process.
    """
    task = Task(state.likelihood, problem.options.curvature)
    pieces = -(-NUM_PARTS // max(length(batches) or NUM_PARTS, 1))
    number = 0
    for batch in batches:
        x, labels = split_batch(batch, task.options)
        labels = task.targets(problem.model, x, labels)
        N = len(labels)
        count = min(pieces, N) if splits_by_example(x, labels) else 1
        for i in range(count):
            piece = slice(i * N // count, (i + 1) * N // count)
            yield number % NUM_PARTS, examples(x, piece) if count > 1 else x, labels[piece]
            number += 1


# --- the rule ---


def rise_of(best: Tensor | None, losses: Tensor) -> float:
    """Return z, the mean increase of losses since the best update, over its standard error.

    It is 0 without a best update, and for a single loss, which has no standard error.
    """
    if best is None or best.shape != losses.shape or len(losses) < 2:
        return 0.0
    difference = losses - best
    error = difference.std().item() / math.sqrt(len(losses))
    return difference.mean().item() / max(error, 1e-12)


def may_raise(problem: Problem, state: LearnerState, z: float) -> bool:
    """Return whether the common factor rises if the held-out loss falls as all decays rise.

    Not before half of the epochs that precede the last third, or of ``updates``, have ended.
    """
    schedule, limit = problem.options.schedule, problem.options.policy.raise_limit
    total = schedule.updates if schedule.epochs is None else (1 - LATE_SHARE) * schedule.epochs
    return limit is not None and z > OPEN and state.epoch >= total / 2


def correct(problem: Problem, state: LearnerState, posterior: Posterior) -> Tensor | None:
    """Change the common factor. Return the pull on log δ of each group, (G,), or None; collective.

    The pull is added to the gradient of −log evidence (nats). The held-out data is evaluated at the
    average of the parameters, and the curvature is the posterior's.
    """
    hyper, policy, measures = state.hyperparameters, problem.options.policy, state.measures
    by_part = None
    # A loader that shuffles has the same order each time, so that losses can be compared by term.
    with (
        random_numbers_restored(problem.loader, problem.held_out),
        seeded_random_numbers(problem.model, 0),
        averaged(problem, state),
    ):
        # Step 1: fit τ and ε to the held-out labels, and compare their losses with the best ones.
        losses, temperature, noise = held_out_losses(problem, state)
        z = problem.ranks.gather(rise_of(measures.best_losses, losses))[0]
        # Step 2: compute the derivatives of the held-out loss in the weight decays, if needed.
        if policy.lowering or may_raise(problem, state, z):
            posterior.prior_precision = hyper.groups.per_tensor(hyper.prior_precision)
            with torch.no_grad():
                parameters = [*problem.named.values()]
                moved = displacements(posterior, parameters, times_left(problem, state))
            by_part = derivatives_in_log_decays(problem, state, moved, temperature, noise)
    # Step 3: raise the weight decays of all weights, or lower those of some tensors.
    rises, in_groups = False, None
    if by_part is not None:
        in_groups = torch.stack([hyper.groups.sum_over_tensors(row) for row in by_part])
        in_common = in_groups[:, state.holds_weights(problem)].sum(1)
        rises = may_raise(problem, state, z) and is_negative(in_common)
    move_gate(measures, losses, z, policy.raise_limit if rises else None)
    if rises or in_groups is None or not policy.lowering:
        return None
    return LOWERING * problem.num_data * shrunk(in_groups).clamp(min=0)


def move_gate(measures: Measures, losses: Tensor, z: float, limit: float | None) -> None:
    """Raise the common factor up to a limit, or lower it for None. Store the best losses and z."""
    best, measures.rise = measures.best_losses, z
    if best is None or best.shape != losses.shape or losses.mean() < best.mean():
        measures.best_losses = losses
    if limit is None:
        measures.log_factor *= DECLINE
    else:
        measures.log_factor = min(limit, measures.log_factor + RISE)


def is_negative(of_parts: Tensor) -> bool:
    """Return whether the mean over parts, (P,), is below 0 by ``SIGNIFICANT`` standard errors.

    A single part has no standard error, so it shows nothing.
    """
    if len(of_parts) < 2:
        return False
    error = of_parts.std().item() / math.sqrt(len(of_parts))
    return of_parts.mean().item() < -SIGNIFICANT * error


def shrunk(of_parts: Tensor) -> Tensor:
    """Return the mean over parts, times max(0, 1 − 1/t²), t the mean over its standard error.

    It is 0 for a single part, which has no standard error.
    """
    mean = of_parts.mean(0)
    if len(of_parts) < 2:
        return torch.zeros_like(mean)
    error = of_parts.std(0) / math.sqrt(len(of_parts))
    return mean * (1 - (error / mean.abs().clamp(min=1e-30)).square()).clamp(min=0)
