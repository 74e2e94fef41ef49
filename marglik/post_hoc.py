"""Set the prior of a trained network, by the evidence or by the validation loss.

If you can, learn the prior during the training instead (`marglik.training.loop`). A trained network
is not at the MAP of a prior that changes afterwards. Source of the evidence after training:
Daxberger et al. 2021 (arXiv:2106.14806).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kfac_backend.extras import extra
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import (
    LARGEST_PRECISION,
    SMALLEST_PRECISION,
    PriorGroups,
    PriorStructure,
)
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import laplace_predictive, predict_all

SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e6


@dataclass(frozen=True)
class PriorFit:
    """A chosen prior precision, which the posterior already has."""

    prior_precision: dict[str, float]
    """Group name -> δ, which includes N: the weight decay is T δ/N."""
    sigma_noise: float
    """σ of regression, in the unit of the targets; 1 otherwise."""
    objective: float
    """Log marginal likelihood (nats), or validation loss, at this prior."""


def maximize_evidence(
    laplace: Posterior,
    structure: PriorStructure | Mapping[str, str] = "per_tensor",
    *,
    learn_sigma_noise: bool = True,
) -> PriorFit:
    """Set δ, and σ of regression, to the values that maximise the evidence.

    It runs L-BFGS-B on log δ and log σ with the exact gradient, from the current values. This takes
    some milliseconds after the eigenvalues have been computed.

    Args:
        laplace: a fitted posterior. The function sets its δ and σ.
        structure: groups of tensors that share a δ, see `PriorGroups.from_model`.
        learn_sigma_noise: whether to change σ of regression.

    Raises:
        ValueError: the eigenvalues are corrected, or the structure does not fit the model.
        FloatingPointError: the optimiser did not converge.
    """
    with extra("statistics"):
        from scipy.optimize import minimize  # imported here: it takes long

    if laplace.fitted_curvature().is_corrected:
        # They are a diagonal in another basis than the eigenbasis: Σ log ≥ log det (Hadamard).
        raise ValueError(
            "With corrected eigenvalues the evidence is only a lower bound, and its maximum is "
            "misleading. Fit with corrected=False, call maximize_evidence, then fit with "
            "corrected=True to predict."
        )
    groups, terms = PriorGroups.from_model(laplace.model, structure), laplace.evidence_terms
    # Start at the geometric mean of each group's tensors.
    logs = laplace.precision_per_block(laplace.prior_precision.double()).log()
    sums, numbers = (terms.sum_over_blocks(v, groups.index) for v in (logs, torch.ones_like(logs)))
    initial = (sums / numbers.clamp(min=1)).tolist()
    learns_noise = learn_sigma_noise and laplace.likelihood.has_sigma
    bounds = [(np.log(SMALLEST_PRECISION), np.log(LARGEST_PRECISION))] * len(initial)
    if learns_noise:
        initial.append(math.log(laplace.sigma_noise.item()))
        bounds.append((np.log(SMALLEST_NOISE), np.log(LARGEST_NOISE)))

    @torch.enable_grad()
    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(values, device=logs.device, requires_grad=True)
        deltas = groups.per_tensor(v[: len(groups.names)].exp())
        delta = deltas.to(terms.squared_norms)[terms.tensors]
        sigma = v[-1].exp() if learns_noise else laplace.sigma_noise
        value = -terms.log_marginal_likelihood(delta, sigma, laplace.temperature)
        (gradient,) = torch.autograd.grad(value, v)
        return value.item(), gradient.cpu().numpy()

    # ftol is relative to the objective, which is a sum over the data.
    options = {"ftol": 1e-13, "gtol": 1e-6, "maxiter": 1000}
    minimum = minimize(
        objective, initial, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    # "ABNORMAL" means that rounding stopped the line search: it is at the maximum.
    if not minimum.success and "ABNORMAL" not in str(minimum.message):
        raise FloatingPointError(
            f"The evidence could not be maximised over the prior: {minimum.message}. Set "
            "posterior.prior_precision to another initial value, or choose the prior by held-out "
            "data (minimize_validation_loss)."
        )
    values = torch.tensor(minimum.x, device=logs.device).exp()
    delta = values[: len(groups.names)]
    delta_per_tensor = groups.per_tensor(delta)
    # With as many parameters as tensors, δ has one value per parameter.
    has_as_many = laplace.n_layers in (len(laplace.indices), laplace.n_params)
    if laplace.structure != "kron" and has_as_many:
        delta_per_tensor = delta_per_tensor[terms.tensors]
    laplace.prior_precision = delta_per_tensor
    if learns_noise:
        laplace.sigma_noise = values[-1]
    return PriorFit(groups.summary(delta), laplace.sigma_noise.item(), -minimum.fun)


def minimize_validation_loss(
    laplace: Posterior,
    loss: Callable[[Posterior], float] | Iterable[Any],
    *,
    bounds: tuple[float, float] = (1e-2, 1e8),
    grid_size: int = 11,
) -> PriorFit:
    """Set one δ for all parameters to the value that minimises a loss on validation data.

    It searches a grid on log δ first, because the loss may have several minima, and then uses
    Brent's method around the best point of the grid. After an error δ is unchanged. A warning
    appears if the loss still decreases at a bound of the search.

    Args:
        laplace: a fitted posterior. The function sets its δ.
        loss: a loader of validation data, to minimise the NLL of the posterior's predictive, or any
            function of the posterior.
        bounds: smallest and largest δ.
        grid_size: number of points of the grid, at least three.

    Raises:
        TypeError: the loss is neither a loader nor a function, or it is an iterator, which can be
            read only once.
        ValueError: the bounds are not an interval of positive numbers, or the grid is too small.
        FloatingPointError: the loss is not finite at any point of the grid.
    """
    with extra("statistics"):
        from scipy.optimize import minimize_scalar  # imported here: it takes long

    if not callable(loss) and (isinstance(loss, Iterator) or not isinstance(loss, Iterable)):
        raise TypeError(
            f"loss is {type(loss).__name__}. Pass a loader or a list of batches (x, y), which is "
            "read once for each δ, or a function of the posterior."
        )
    if not 0 < bounds[0] < bounds[1] < math.inf or grid_size < 3:
        raise ValueError(
            f"bounds={bounds} and grid_size={grid_size} are not supported. The bounds of δ must be "
            "positive, finite and ascending, and the grid needs at least three points."
        )
    chosen: float | torch.Tensor = laplace.prior_precision
    losses: dict[float, float] = {}

    def at(log_delta: float) -> float:
        laplace.prior_precision = math.exp(log_delta)
        value = float(loss(laplace)) if callable(loss) else _nll(laplace, loss)
        losses[log_delta] = value if math.isfinite(value) else math.inf
        return losses[log_delta]

    grid = np.linspace(math.log(bounds[0]), math.log(bounds[1]), grid_size)
    try:
        best = int(np.argmin([at(point) for point in grid]))
        if not math.isfinite(losses[grid[best]]):
            raise FloatingPointError(
                f"The validation loss is not finite for any δ in {bounds}. Check the network's "
                "outputs."
            )
        around = grid[max(best - 1, 0)], grid[min(best + 1, grid_size - 1)]
        minimize_scalar(at, bounds=around, method="bounded", options={"xatol": 0.05})
        log_delta = min(losses, key=lambda point: losses[point])
        chosen = math.exp(log_delta)
    finally:
        laplace.prior_precision = chosen
    if min(log_delta - grid[0], grid[-1] - log_delta) < (grid[1] - grid[0]) / 10:
        warnings.warn(
            f"The validation loss still decreases at δ = {chosen:.3g}, a bound of the search. "
            "Pass wider bounds.",
            stacklevel=2,
        )
    sigma = laplace.sigma_noise.item()
    return PriorFit({"all": laplace.prior_precision.item()}, sigma, losses[log_delta])


def _nll(laplace: Posterior, batches: Iterable[Any]) -> float:
    """Return the NLL of the predictive (nats, mean over terms), with the same samples each time."""
    generator = torch.Generator(laplace.mean.device).manual_seed(0)
    predict = laplace_predictive(laplace, generator=generator)
    prediction, targets = predict_all(predict, batches)
    nll = compute_metrics(prediction, targets, laplace.likelihood).nll
    assert nll is not None  # each likelihood has one
    return nll
