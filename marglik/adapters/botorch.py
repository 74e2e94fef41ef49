"""A network's Laplace posterior as a BoTorch model, for Bayesian optimisation.

```python
model = LaplaceModel(posterior)  # a fitted marglik.Posterior of a regression
acquisition = qLogExpectedImprovement(model, best_f=y.max())
candidate, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=64)
```

Install BoTorch with `pip install 'marglik[adapters]'`. BoTorch maximises the outputs. It works best
in float64, so use a network in float64.
"""

from typing import Any

import torch
from torch import Tensor

from kfac_backend.extras import extra
from marglik.posterior.posterior import Posterior

with extra("adapters"):
    from botorch.models.model import Model  # pyright: ignore[reportMissingImports]
    from botorch.posteriors.gpytorch import (  # pyright: ignore[reportMissingImports]
        GPyTorchPosterior,
    )
    from gpytorch.distributions import (  # pyright: ignore[reportMissingImports]
        MultitaskMultivariateNormal,
        MultivariateNormal,
    )
    from linear_operator import to_linear_operator  # pyright: ignore[reportMissingImports]

__all__ = ["LaplaceModel"]


class LaplaceModel(Model):
    """The linearised network N(f(X), J(X) Σ J(X')ᵀ), jointly over q points, with gradients in X.

    Acquisition functions over several points, such as qLogNoisyExpectedImprovement, need the joint
    covariance, and `optimize_acqf` needs its gradients. Posterior and network are constants: after
    new observations, train the network and fit the posterior again. The model uses the prior and
    the noise of the posterior, but not its calibrations. Source: Kristiadi et al. 2023, "Promises
    and pitfalls of the linearized Laplace in Bayesian optimization" (arXiv:2304.08309).

    Args:
        posterior: a fitted posterior of a regression with outputs (N, C).
        output_indices: indices of the model's outputs; None selects all.

    Raises:
        ValueError: the likelihood is not regression.
        AttributeError: the posterior is not fitted.
    """

    def __init__(self, posterior: Posterior, output_indices: list[int] | None = None) -> None:
        super().__init__()
        if posterior.likelihood.name != "regression":
            raise ValueError(
                f"The posterior's likelihood is '{posterior.likelihood}', but BoTorch's models are "
                "Gaussian. Use a network with likelihood 'regression'."
            )
        posterior.fitted_curvature()
        self.laplace = posterior
        """Posterior of the network."""
        self._outputs = list(range(posterior.n_outputs))
        if output_indices is not None:
            self._outputs = [self._outputs[i] for i in output_indices]

    @property
    def num_outputs(self) -> int:
        """Number M of outputs of the model."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """Empty shape: the model is one network."""
        return torch.Size()

    def subset_output(self, idcs: list[int]) -> "LaplaceModel":
        """Return the model of the outputs with these indices."""
        return LaplaceModel(self.laplace, [self._outputs[i] for i in idcs])

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the joint distribution of the outputs (..., q, m) at points (..., q, d).

        Args:
            X: the points.
            output_indices: indices of the m outputs; None selects all.
            observation_noise: True adds σ² to the variances. A tensor, which broadcasts to (..., q,
                m), adds its entries.
            posterior_transform: transform of BoTorch, such as a scalarisation of the outputs.
            kwargs: ignored; they are part of BoTorch's interface.
        """
        outputs = self._outputs
        if output_indices is not None:
            outputs = [outputs[i] for i in output_indices]
        mean, covariance = self.laplace.joint_output_distribution(X, outputs)
        if isinstance(observation_noise, Tensor):
            variances = observation_noise.to(mean).expand_as(mean)
            covariance = covariance + torch.diag_embed(variances.flatten(-2))
        elif observation_noise:
            variance = self.laplace.sigma_noise.to(mean).square()
            covariance = covariance + variance * torch.eye(covariance.shape[-1]).to(mean)
        # Almost equal points make the covariance singular up to rounding. GPyTorch adds jitter to
        # the decomposition of an operator if needed, but not of a tensor.
        operator = to_linear_operator(covariance)
        if len(outputs) == 1:
            normal = MultivariateNormal(mean[..., 0], operator)
        else:
            normal = MultitaskMultivariateNormal(mean, operator)  # covariance (q·m, q·m), by point
        posterior = GPyTorchPosterior(normal)
        if posterior_transform is not None:
            return posterior_transform(posterior=posterior, X=X)
        return posterior
