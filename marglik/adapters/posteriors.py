"""The Kronecker-factored Laplace approximation in the interface of the library posteriors.

```python
transform = kfac_laplace.build(model, "classification", prior_precision=1.0)
state = transform.init(dict(model.named_parameters()))
for batch in loader:
    state, _ = transform.update(state, batch)
parameters = kfac_laplace.sample(state)
```

with ``import marglik.adapters.posteriors as kfac_laplace``, in place of one of posteriors' own
methods, such as ``posteriors.laplace.diag_ggn``. Needs `pip install posteriors`.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.options import CurvatureOptions, Likelihood
from marglik.posterior.posterior import Posterior

try:
    from posteriors.types import Transform  # pyright: ignore[reportMissingImports]
    from tensordict import TensorClass  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "marglik.adapters.posteriors needs posteriors: pip install posteriors."
    ) from error

__all__ = ["KfacLaplaceState", "build", "sample", "update"]


class KfacLaplaceState(TensorClass["frozen"]):
    """A Gaussian over the parameters, whose precision is Kronecker-factored, block by block.

    ``params`` is its mean, name -> tensor. ``posterior`` is the `marglik.Posterior` of a network
    that belongs to the state; it is not fitted before the first update, and marglik's predictives,
    evidence and files accept it. ``step`` counts the batches.
    """

    params: Any
    posterior: Any
    step: Tensor


def build(
    model: nn.Module,
    likelihood: Likelihood,
    options: CurvatureOptions = CurvatureOptions(),  # noqa: B008
    **hyperparameters: Any,
) -> Transform:
    """The transform (init, update) of a Laplace approximation; `update` adds a batch's curvature.

    Other methods of posteriors take a function; this one takes a module, since the factors are made
    from the inputs and gradients of its layers.

    Args:
        model: the network; it is copied, so that its own parameters may change later.
        likelihood: "classification", "regression" or "bernoulli".
        options: all options of the curvature pass.
        hyperparameters: those of `marglik.Posterior`, such as ``prior_precision``.
    """

    def init(params: dict[str, Tensor]) -> KfacLaplaceState:
        """The state around the MAP parameters ``dict(model.named_parameters())``, without data."""
        own = copy.deepcopy(model)
        of_model = dict(own.named_parameters())
        if of_model.keys() != params.keys():
            wrong = sorted(of_model.keys() ^ params.keys())[0]
            where = "not in params" if wrong in of_model else "none of the model"
            raise ValueError(
                f"Parameter '{wrong}' is {where}; pass dict(model.named_parameters())."
            )
        with torch.no_grad():
            for name, p in of_model.items():
                p.copy_(params[name])
        posterior = Posterior(own, likelihood, options, **hyperparameters)
        return KfacLaplaceState(params, posterior, torch.tensor(0))

    own_update: Any = update  # typed for our state alone, where a transform's takes any
    return Transform(init, own_update)


def update(
    state: KfacLaplaceState, batch: Any, inplace: bool = False
) -> tuple[KfacLaplaceState, Tensor]:
    """The state with this batch's curvature added (a sum over the data), and an empty tensor.

    Args:
        state: the state so far.
        batch: (x, y), or a mapping.
        inplace: whether to change the state itself.
    """
    posterior = state.posterior if inplace else copy.copy(state.posterior)
    posterior.fit([batch], override=False)
    if inplace:
        state.step.add_(1)
        return state, torch.tensor([])
    return KfacLaplaceState(state.params, posterior, state.step + 1), torch.tensor([])


def sample(
    state: KfacLaplaceState,
    sample_shape: torch.Size = torch.Size(),  # noqa: B008
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Samples of the parameters, name -> (*sample_shape, *shape); frozen ones keep their values.

    Predict with them by `marglik.Posterior.linearised_outputs`: the GGN is the curvature of the
    linearised network.
    """
    posterior: Posterior = state.posterior
    samples = posterior.sample(sample_shape.numel(), generator)
    parts = iter(samples.split([p.numel() for p in posterior.params], 1))
    return {
        name: next(parts).reshape(*sample_shape, *p.shape)
        if p.requires_grad
        else p.detach().expand(*sample_shape, *p.shape)
        for name, p in posterior.model.named_parameters()
    }
