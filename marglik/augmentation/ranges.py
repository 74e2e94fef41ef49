"""Learn the ranges of a `LearnedAugmentation` by the evidence."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.factor_derivatives import FactorDerivatives
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import CurvatureOptions
from marglik.augmentation.learned import LearnedAugmentation
from marglik.eval_mode import eval_mode
from marglik.posterior.evidence import derivatives_in_factors
from marglik.posterior.posterior import Posterior


def evidence_gradient(
    posterior: Posterior,
    parts: Iterable[Iterable[Any]],
    tensors: Sequence[Tensor],
    options: CurvatureOptions | None = None,
    of_loss: float | None = None,
    likelihood: Likelihood | None = None,
    outputs: list[tuple[Tensor, Tensor]] | None = None,
) -> Iterator[list[Tensor]]:
    """Yield gradients of the evidence (nats) in tensors on which inputs or the likelihood depend.

    θ, δ, σ and T are fixed; see `kfac_backend.factor_gradients` for other fixed quantities. The
    gradients use the factors of the fit, even if the tensors change between two parts.

    Args:
        posterior: a fitted posterior.
        parts: parts, each an iterable of batches: all training data, or a random part of it. Each
            part gives one gradient per tensor.
        tensors: leaf tensors, such as buffers.
        options: options of the pass; None uses the options of the posterior.
        of_loss: weight of the loss. None is −1/(σ²T). 0 gives the gradient of −½ log det alone.
        likelihood: likelihood of the posterior with ``tensors`` as its parameters, see
            `Likelihood.with_parameters`. None uses the likelihood of the posterior.
        outputs: list to which the outputs and targets of this rank's data are added, on the CPU.
    """
    factors, sigma, T = posterior.fitted_factors(), posterior.sigma_noise, posterior.temperature
    of_factors = derivatives_in_factors(
        factors, posterior.prior_precision, sigma, T, posterior.ranks, posterior.mean.device
    )
    if likelihood is not None:
        factors = replace(factors, likelihood=likelihood)
    of_loss = -1 / (float(sigma) ** 2 * T) if of_loss is None else of_loss
    with eval_mode(posterior.model):  # as in the fit: a pass checks the modes when it is created
        derivatives = FactorDerivatives(
            factors, posterior.model, tensors, of_factors, of_loss, options or posterior.options,
            process_group=posterior.ranks.process_group, outputs=outputs,
        )  # fmt: skip
    for batches in parts:
        with eval_mode(posterior.model):
            gradients = derivatives.gradients(batches)
        yield gradients


STEPS = 2
"""Number of steps on the ranges in each update of the prior."""
EXAMPLES = 50
"""Minimum number of examples for the gradient of a step."""
SMALLEST = 0.01
"""Smallest range as a share of the largest. At zero the derivative of the evidence vanishes for a
symmetric range, so a range that reaches zero in an untrained network would stay there."""
LR = 0.1
"""Adam's step size, as a share of the largest range."""


def ranges_of(model: nn.Module) -> dict[str, float]:
    """Return name of a range -> η, for all augmentations in a network."""
    return {
        name: value
        for module in model.modules()
        if isinstance(module, LearnedAugmentation)
        for name, value in zip(module.names, module.ranges.tolist(), strict=True)
    }


def set_ranges(model: nn.Module, ranges: Mapping[str, float]) -> None:
    """Set the ranges of all augmentations in a network to a result of `ranges_of`."""
    for module in model.modules():
        if isinstance(module, LearnedAugmentation):
            values = [ranges[name] for name in module.names]
            module.ranges.copy_(torch.tensor(values))


class RangeLearner:
    """Learns ranges by Adam steps on the evidence, in shares of the largest range.

    Args:
        modules: the augmentations. `learn` changes their ranges in place.
    """

    def __init__(self, modules: Sequence[LearnedAugmentation]) -> None:
        self.modules = modules
        self._shares = [(m.ranges / m.largest.to(m.ranges)).requires_grad_() for m in self.modules]
        self._adam = torch.optim.Adam(self._shares, lr=LR)

    def learn(self, posterior: Posterior, data: Iterable[Any], num_data: int) -> None:
        """Make `STEPS` steps with the factors of a posterior, each on other batches of the data.

        Args:
            posterior: a posterior, fitted to the training data.
            data: batches of the training data.
            num_data: N.
        """
        parts = _random_parts(data, EXAMPLES / num_data)
        # Use one random vector per example instead of all C vectors: also unbiased, but cheaper.
        options = posterior.options
        if options.fisher == "exact":
            options = options.replace(fisher="random_signs", mc_samples=1)
        ranges = [module.ranges for module in self.modules]
        for gradients in evidence_gradient(posterior, parts, ranges, options):
            for module, share, gradient in zip(self.modules, self._shares, gradients, strict=True):
                largest = module.largest.to(gradient)
                share.data.copy_(module.ranges / largest)  # a checkpoint may have changed them
                share.grad = -gradient * largest
            self._adam.step()
            with torch.no_grad():
                for module, share in zip(self.modules, self._shares, strict=True):
                    module.ranges.copy_(share.clamp_(SMALLEST, 1.0) * module.largest.to(share))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Adam. The state of the network has the ranges."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, at the current ranges of the network."""
        self._adam.load_state_dict(state)


def _random_parts(data: Iterable[Any], share: float) -> Iterator[list[Any]]:
    """Yield a part for each of `STEPS` steps, with at least one random batch.

    The data is read once, and only up to the last batch that is needed.
    """
    total = len(data) if isinstance(data, Sized) else sum(1 for _ in data)
    number = max(1, min(math.ceil(share * total), total // STEPS))
    chosen = set(torch.randperm(total)[: STEPS * number].tolist())
    batches = (batch for index, batch in enumerate(data) if index in chosen)
    for _ in range(min(STEPS, total)):
        yield list(islice(batches, number))
