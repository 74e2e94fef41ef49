"""The average θ̄ of a network's parameters, and BatchNorm's statistics at it.

Source: Izmailov et al. 2018 (arXiv:1803.05407), algorithm 1; torch.optim.swa_utils does the sums.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from kfac_backend.model.batches import split_batch, to_device
from kfac_backend.model.calls import arguments
from kfac_backend.ranks import Ranks
from marglik.eval_mode import kept_mode
from marglik.training.loaders import Loader
from marglik.training.schedule import Average

__all__ = ["WeightAverage", "renew_batch_norm"]

EMA_DECAY = 0.999


class WeightAverage:
    """A running average of parameters: their mean, or an exponential moving average.

    Args:
        average: "last", every step with the same weight; "ema", with a decay of 0.999 a step.
    """

    def __init__(self, average: Average) -> None:
        self._add = get_swa_multi_avg_fn() if average == "last" else get_ema_multi_avg_fn(EMA_DECAY)
        self._values: list[Tensor] = []
        self.count = 0
        """Number of steps that are averaged."""

    @torch.no_grad()
    def add(self, parameters: list[nn.Parameter]) -> None:
        """Include the present values."""
        if not self.count:
            self._values = [p.detach().clone() for p in parameters]
        else:
            self._add(self._values, parameters, self.count)  # pyright: ignore[reportArgumentType]
        self.count += 1

    @torch.no_grad()
    def write(self, parameters: list[nn.Parameter]) -> None:
        """Give the parameters their averages."""
        torch._foreach_copy_(list[Tensor](parameters), self._values)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of steps."""
        return {"values": [value.clone() for value in self._values], "count": self.count}

    def load_state_dict(self, state: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Restore what `state_dict` returned, on the parameters' devices."""
        self.count = state["count"]
        self._values = [v.to(p, copy=True) for v, p in zip(state["values"], parameters)]  # noqa: B905


@torch.no_grad()
def renew_batch_norm(
    model: nn.Module,
    loader: Loader,
    dict_key_y: str,
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
    with kept_mode(model):
        model.train()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's way to ask for the mean over all batches
        try:
            for batch in loader:
                # A copy, since a model may change its input in place.
                x, y = split_batch(deepcopy(to_device(batch, device)), dict_key_y)
                if len(y):
                    args, kwargs = arguments(model, x)
                    model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    statistics: Any = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    if ranks.size > 1:
        ranks.sum_(statistics, "the statistics of BatchNorm")
        torch._foreach_div_(statistics, ranks.size)
