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
from collections.abc import Iterator
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
from kfac_backend.ranks import Ranks
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
RISE = 0.5
"""Increase of the logarithm of the common factor in an update with an open gate."""
DECLINE = 0.9
"""Factor on that logarithm in an update with a closed gate."""
LOWERING = 0.3 * 10
"""Weight of the held-out gradient relative to the evidence's, both in nats of all N examples."""


@dataclass(frozen=True)
class HeldOutLook:
    """Held-out losses and gradients at the average of the parameters."""

    losses: Tensor
    """−log((1 − ε) p_τ(y) + ε/C) of each held-out term (nats), (M,), with τ and ε fitted there."""
    rise: float
    """z, see `rise`."""
    gradients: list[list[Tensor]]
    """∇V of each part of the data, one tensor for each trainable parameter; empty if not needed."""
    parameters: list[Tensor]
    """θ̄ of each trainable parameter."""


# --- the held-out gradient ---


def response(spectrum: Tensor, time: float) -> Tensor:
    """Return f(s) = (1 − e^(−hs))/s for eigenvalues s > 0 and a time h; 1/s for h = ∞."""
    return -torch.expm1(-time * spectrum) / spectrum


def displacements(
    posterior: Posterior, parameters: list[Tensor], times: list[float]
) -> list[Tensor | None]:
    """Return f(H/(σ²T) + P₀) δ_g θ_g of each tensor: its shrinkage per unit of log δ_g; collective.

    With several ranks each computes some of the tensors, and None stands for the others.

    Args:
        posterior: a fitted posterior with Kronecker factors; it gives H, δ, σ and T.
        parameters: θ of each trainable tensor, in the posterior's order.
        times: h of each tensor; ∞ for a minimum.
    """
    ranks, blocks = posterior.ranks, [*posterior.fitted_factors().blocks.values()]
    holders = ranks.holders([not block.is_meta for block in blocks])
    owners = ranks.owners([block.cost for block in blocks], holders)
    bases = _bases([b for b, owner in zip(blocks, owners, strict=True) if owner == ranks.rank])
    scale = 1 / (posterior.sigma_noise.double().square() * posterior.temperature).item()
    deltas = posterior.precision_per_block(posterior.prior_precision).tolist()
    moved: list[Tensor | None] = []
    for block, owner, theta, delta, time in zip(
        blocks, owners, parameters, deltas, times, strict=True
    ):
        if owner != ranks.rank:
            moved.append(None)
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
            (F if (x := rows[key]) is None else Factor(x @ x.mT), name)
            for key, (F, name) in factors.items()
        ],
        vectors=True,
    )
    bases: dict[int, Basis] = {}
    for (key, x), (values, vectors, clipped) in zip(rows.items(), solved, strict=True):
        values, vectors = values.double(), vectors.double()
        if x is not None:
            F, _ = factors[key]  # the evidence has computed its eigenvalues
            zeros = values.new_zeros(*values.shape[:-1], F.shape[-1] - values.shape[-1])
            F.eigenvalues = torch.cat([zeros, values], -1), clipped
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


def gradients_in_log_decays(
    look: HeldOutLook,
    moved: list[Tensor | None],
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> Tensor:
    """Return dV/d log δ of each tensor by part of the held-out data: (parts, tensors), float64.

    Collective: the rank with the tensor's entry in ``moved`` computes its derivative.
    """
    rows = [
        torch.stack([
            look.parameters[0].new_zeros((), dtype=torch.float64)
            if u is None
            else -(g.double() * u).sum()
            for g, u in zip(of_part, moved, strict=True)
        ])
        for of_part in look.gradients
    ]  # fmt: skip
    by_part = torch.stack(rows)
    ranks.sum_([by_part])
    return by_part.cpu()


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


def look_at_held_out(problem: Problem, state: LearnerState) -> HeldOutLook:
    """Return the losses of the held-out labels at the average, and their gradients; collective."""
    model, ranks, batches = problem.model, problem.ranks, problem.held_out
    assert batches is not None
    parameters = list(problem.named.values())
    device = parameters[0].device
    # A loader that shuffles has the same order each time, so that losses can be compared by term.
    with (
        random_numbers_restored(problem.loader, batches),
        seeded_random_numbers(model, 0),
        averaged(problem, state),
    ):
        f, spread, y = outputs_and_labels(problem, state, batches)
        likelihood = state.likelihood
        if likelihood.has_label_noise:
            likelihood = likelihood.replace(noise=0.0)
        fit = fit_sharpness(HeldOut(likelihood, f, spread, y, is_sampled=True), scale=0.0)
        temperature, noise = ranks.gather((fit.output_temperature, fit.label_noise))[0]
        losses = _losses(f.double(), y, temperature, noise)
        z = ranks.gather(rise_of(state.measures.best_losses, losses))[0]
        if not (problem.options.policy.lowering or may_raise(problem, state, z)):
            return HeldOutLook(losses, z, [], [])
        sums = [[torch.zeros_like(p) for p in parameters] for _ in range(NUM_PARTS)]
        counts = torch.zeros(NUM_PARTS, dtype=torch.float64)
        with eval_mode(model), torch.enable_grad():
            for part, x, labels in _parts(problem, state, batches):
                x = to_device(x, device)  # a copy: a model may change its input in place
                x = x.clone() if isinstance(x, Tensor) else deepcopy(x)
                args, kwargs = arguments(model, x)
                outputs = logits_of(model(*args, **kwargs))
                counted = counted_terms(labels, likelihood)
                outputs, labels = outputs.flatten(0, -2), labels.flatten().to(outputs.device)
                if counted is not None:
                    is_counted = counted.flatten().to(outputs.device)
                    outputs, labels = outputs[is_counted], labels[is_counted]
                value = _losses(outputs, labels, temperature, noise).sum()
                gradients = torch.autograd.grad(value, parameters, allow_unused=True)
                counts[part] += len(labels)
                for total, gradient in zip(sums[part], gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        for of_part in sums:
            ranks.sum_(of_part)
        counts = torch.stack(ranks.gather(counts)).sum(0)
        means = [
            [total / number for total in of_part]
            for of_part, number in zip(sums, counts.tolist(), strict=True)
            if number
        ]
        return HeldOutLook(losses, z, means, [p.detach().clone() for p in parameters])


def _losses(f: Tensor, y: Tensor, temperature: float, noise: float) -> Tensor:
    """Return −log((1 − ε) softmax(f/τ)_y + ε/C) of each term."""
    log_p = (f / temperature).log_softmax(-1).gather(-1, y.long()[:, None])[:, 0]
    return -with_label_noise(
        log_p, torch.tensor(noise, dtype=f.dtype, device=f.device), f.shape[-1]
    )


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


def correct(
    problem: Problem, state: LearnerState, look: HeldOutLook, posterior: Posterior
) -> Tensor | None:
    """Change the common factor. Return the pull on log δ of each group, (G,), or None.

    The pull is added to the gradient of −log evidence (nats).
    """
    hyper, policy, in_groups = state.hyperparameters, problem.options.policy, None
    rises = False
    if look.gradients:
        with torch.no_grad():
            posterior.prior_precision = hyper.groups.per_tensor(hyper.prior_precision)
            moved = displacements(posterior, look.parameters, times_left(problem, state))
            by_part = gradients_in_log_decays(look, moved, problem.ranks)
        in_groups = torch.stack([hyper.groups.sum_over_tensors(row) for row in by_part])
        in_common = shrunk(in_groups[:, state.holds_weights(problem)].sum(1))
        rises = may_raise(problem, state, look.rise) and in_common.item() < 0
    move_gate(state.measures, look, policy.raise_limit if rises else None)
    if rises or in_groups is None or not policy.lowering:
        return None
    return LOWERING * problem.num_data * shrunk(in_groups).clamp(min=0)


def move_gate(measures: Measures, look: HeldOutLook, limit: float | None) -> None:
    """Raise the common factor up to a limit, or lower it for None. Store the best losses."""
    losses, best, measures.rise = look.losses, measures.best_losses, look.rise
    if best is None or best.shape != losses.shape or losses.mean() < best.mean():
        measures.best_losses = losses
    if limit is None:
        measures.log_factor *= DECLINE
    else:
        measures.log_factor = min(limit, measures.log_factor + RISE)


def shrunk(of_parts: Tensor) -> Tensor:
    """Return the mean over parts, times max(0, 1 − 1/t²), t the mean over its standard error.

    It is 0 for a single part, which has no standard error.
    """
    mean = of_parts.mean(0)
    if len(of_parts) < 2:
        return torch.zeros_like(mean)
    error = of_parts.std(0) / math.sqrt(len(of_parts))
    return mean * (1 - (error / mean.abs().clamp(min=1e-30)).square()).clamp(min=0)
