"""What the learner does to gradients and parameters around the steps of the network's optimiser.

The prior adds its gradient, that of ½ Σ_g wd_g ‖θ_g‖². The average θ̄ of the parameters is that of
Izmailov et al. 2018 (arXiv:1803.05407), algorithm 1; torch.optim.swa_utils does the sums.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_multi_avg_fn

from kfac_backend.engine.batches import to_device
from kfac_backend.engine.calls import arguments
from kfac_backend.engine.task import split_batch
from kfac_backend.options import TargetOptions, check_keys
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import local_part, norms_over_parts, with_local_part, without_row
from marglik.eval_mode import preserve_mode
from marglik.training.loaders import Loader


@torch.no_grad()
def add_penalty(
    parameters: list[nn.Parameter],
    weight_decays: Sequence[float],
    scale: Tensor | float,
    padding: Mapping[int, int] = {},  # noqa: B006
) -> Tensor:
    """Add scale · wd · θ to the gradients; returns ½ Σ wd ‖θ‖², a scalar.

    ``padding`` has the row of a parameter, by its number, that is a constant without a prior.

    The foreach functions need a few kernel launches for all tensors together; autograd would need
    several for each tensor.
    """
    # A parameter that the loss does not depend on still has its prior.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    values = list(map(local_part, parameters))
    for i, row in padding.items():
        values[i] = without_row(parameters[i], row)
    norms = norms_over_parts(torch._foreach_norm(values), parameters)
    norms = torch._foreach_mul(norms, [wd**0.5 for wd in weight_decays])
    penalty = 0.5 * torch.stack(norms).square().sum()
    if isinstance(scale, Tensor):
        pulls = torch._foreach_mul(values, list(weight_decays))
        torch._foreach_mul_(pulls, scale)
    else:
        pulls = torch._foreach_mul(values, [scale * wd for wd in weight_decays])
    # Not in place: after a compiled backward pass two parameters may share one gradient tensor.
    parts = torch._foreach_add(list(map(local_part, gradients)), pulls)
    for p, gradient, part in zip(parameters, gradients, parts, strict=True):
        p.grad = with_local_part(gradient, part)
    return penalty


class WeightAverage:
    """The mean of parameters over steps, as it runs.

    Args:
        parameters: whose values are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._values: list[Tensor] = []
        self.count = 0
        """Number of steps that are averaged."""

    @torch.no_grad()
    def add(self) -> None:
        """Include the present values."""
        if not self.count:
            self._values = [local_part(p).clone() for p in self._parameters]
        else:
            add = get_swa_multi_avg_fn()
            parts = list(map(local_part, self._parameters))
            add(self._values, parts, self.count)  # pyright: ignore[reportArgumentType]
        self.count += 1

    @torch.no_grad()
    def write(self) -> None:
        """Give the parameters their averages."""
        torch._foreach_copy_(list(map(local_part, self._parameters)), self._values)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of steps."""
        return {"values": [value.clone() for value in self._values], "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on the parameters' devices.

        Raises:
            ValueError: a state that lacks entries, or whose numbers were cast.
        """
        check_keys("the average", state, ("values", "count"))
        values = [*zip(state["values"], self._parameters)]  # noqa: B905  # none before it begins
        for value, p in values:
            if value.dtype != p.dtype:
                raise ValueError(
                    f"The state's averages are in {value.dtype}, and the parameters in {p.dtype}. "
                    "Load the state as it was saved, with the same model and dtype."
                )
        self.count = state["count"]
        self._values = [value.to(p, copy=True) for value, p in values]


@torch.no_grad()
def renew_batch_norm(
    model: nn.Module,
    loader: Loader,
    options: TargetOptions,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> None:
    """Set BatchNorm's running statistics to their means over the batches, at present parameters.

    The statistics that training collected belong to the parameters of the steps, not to their
    average. As `torch.optim.swa_utils.update_bn`, for any kind of batch and for several ranks.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    device = next(model.parameters()).device
    with preserve_mode(model):
        model.train()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's way to ask for the mean over all batches
        try:
            for batch in loader:
                x, y = split_batch(batch, options)
                if len(y):
                    # A copy, since a model may change its input in place.
                    args, kwargs = arguments(model, deepcopy(to_device(x, device)))
                    model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    statistics: Any = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    if ranks.size > 1:
        ranks.sum_(statistics)
        torch._foreach_div_(statistics, ranks.size)
