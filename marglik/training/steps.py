"""What the learner does to gradients and parameters around each step of the network's optimiser.

The prior adds its gradient, that of ½ Σ_g wd_g ‖θ_g‖². The δ of a group that the data does not need
grows without bound. SGD would then diverge: its step on the penalty overshoots once learning rate
times weight decay exceeds 2 (1.36 with Nesterov's momentum of 0.9). So SGD's weight decays are
limited to 1 / learning rate, at which a plain step takes the parameter to zero.

The average θ̄ of the parameters is that of Izmailov et al. 2018 (arXiv:1803.05407), algorithm 1;
torch.optim.swa_utils does the sums.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_multi_avg_fn

from kfac_backend.model.batches import split_batch, to_device
from kfac_backend.model.calls import arguments
from kfac_backend.options import check_keys
from kfac_backend.ranks import Ranks
from marglik.eval_mode import kept_mode
from marglik.training.loaders import Loader

NEW_NORM = 0.02
"""Weight of a step's norm in the running mean of `clip_gradients`: about fifty steps count."""


def check_no_weight_decay(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if the optimiser has a weight decay of its own."""
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError(
            "The optimiser has a weight decay of its own; the prior takes its place. "
            "Set the optimiser's weight_decay to 0."
        )


def stable_decays(
    named: Mapping[str, Tensor], optimizer: Any, decays: Sequence[float], variance: float
) -> tuple[list[float], list[str]]:
    """Weight decays that the optimiser can take, and the names of the parameters that were limited.

    SGD's decays are limited to 1 / (lr · variance). Other optimisers take any decay: Adam's steps
    do not grow with the gradient, and K-FAC's damping grows with the decay.

    Args:
        named: the trainable tensors.
        optimizer: their optimiser, or a wrapper of it with the attribute ``optimizer``.
        decays: their weight decays.
        variance: factor on the penalty's gradient, see `add_penalty`.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.SGD):
        return list(decays), []
    rates = {p: group["lr"] for group in inner.param_groups for p in group["params"]}
    largest = [1 / (rates[p] * variance) if rates.get(p) else torch.inf for p in named.values()]
    limited = [name for name, wd, most in zip(named, decays, largest, strict=True) if wd > most]
    return list(map(min, decays, largest)), limited


@torch.no_grad()
def add_penalty(
    parameters: list[nn.Parameter], weight_decays: Sequence[float], scale: Tensor | float
) -> Tensor:
    """Add scale · wd · θ to the gradients; returns ½ Σ wd ‖θ‖², a scalar.

    The foreach functions need a few kernel launches for all tensors together; autograd would need
    several for each tensor.
    """
    # A parameter that the loss does not depend on still has its prior.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    values: list[Tensor] = list(parameters)
    norms = torch._foreach_mul(torch._foreach_norm(values), [wd**0.5 for wd in weight_decays])
    penalty = 0.5 * torch.stack(norms).square().sum()
    if isinstance(scale, Tensor):
        pulls = torch._foreach_mul(values, list(weight_decays))
        torch._foreach_mul_(pulls, scale)
    else:
        pulls = torch._foreach_mul(values, [scale * wd for wd in weight_decays])
    # Not in place: after a compiled backward pass two parameters may share one gradient tensor.
    for p, gradient in zip(parameters, torch._foreach_add(gradients, pulls), strict=True):
        p.grad = gradient
    return penalty


@torch.no_grad()
def clip_gradients(
    parameters: list[nn.Parameter],
    running: Tensor | None,
    clip: float | None,
    scale: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Limit the norm of all gradients together to ``clip`` times its running mean.

    A high and constant learning rate is at the edge of what is stable, and a weight decay moves a
    network over that edge now and then: a few large steps, from which it may never come back. The
    running mean follows the gradients, so that no limit needs to be chosen. Source: the idea is
    that of Seetharaman et al. 2020 (arXiv:2007.14469), who take a quantile of all norms so far.

    Args:
        parameters: their gradients are changed in place.
        running: the running mean of the norms; None before the first step.
        clip: None only follows the norm.
        scale: factor that the gradients contain, as of a gradient scaler.

    Returns:
        The new running mean, and whether the gradients were limited (0 or 1). On the device, since
        reading a number would wait for it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm().float() / scale
    running = norm if running is None else running.to(norm.device)
    is_large = torch.zeros_like(norm, dtype=torch.bool)
    if clip is not None:
        # A gradient scaler skips a step whose gradients are not finite; so does the mean.
        is_large = norm.isfinite() & (running > 0) & (norm > clip * running)
        factor = torch.where(is_large, clip * running / norm, 1.0)
        if norm.device.type != "cpu" or is_large:  # a GPU would have to be waited for
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        norm = norm * factor
    mean = torch.where(norm.isfinite(), running.lerp(norm, NEW_NORM), running)
    return mean, is_large.long()


class WeightAverage:
    """The mean of parameters over steps, as it runs."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self.count = 0
        """Number of steps that are averaged."""

    @torch.no_grad()
    def add(self, parameters: list[nn.Parameter]) -> None:
        """Include the present values."""
        if not self.count:
            self._values = [p.detach().clone() for p in parameters]
        else:
            add = get_swa_multi_avg_fn()
            add(self._values, parameters, self.count)  # pyright: ignore[reportArgumentType]
        self.count += 1

    @torch.no_grad()
    def write(self, parameters: list[nn.Parameter]) -> None:
        """Give the parameters their averages."""
        torch._foreach_copy_(list[Tensor](parameters), self._values)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of steps."""
        return {"values": [value.clone() for value in self._values], "count": self.count}

    def load_state_dict(self, state: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Restore what `state_dict` returned, on the parameters' devices.

        Raises:
            ValueError: a state that lacks entries, or whose numbers were cast.
        """
        check_keys("the average", state, ("values", "count"))
        values = [*zip(state["values"], parameters)]  # noqa: B905  # none before it begins
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
        ranks.sum_(statistics)
        torch._foreach_div_(statistics, ranks.size)
