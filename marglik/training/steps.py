"""What the learner does to gradients and parameters around each step of the network's optimiser.

The prior adds its gradient, that of ½ Σ_g wd_g ‖θ_g‖². The δ of a group that the data does not need
grows without bound. SGD would then diverge: its step on the penalty overshoots once learning rate
times weight decay exceeds 2 (1.36 with Nesterov's momentum of 0.9). So SGD's weight decays are
limited to 1 / learning rate, at which a plain step takes the parameter to zero.

The average θ̄ of the parameters is that of Izmailov et al. 2018 (arXiv:1803.05407), algorithm 1;
torch.optim.swa_utils does the sums.
"""

import weakref
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
from marglik.eval_mode import preserve_mode
from marglik.training.loaders import Loader

NEW_NORM = 0.02
"""Weight of a step's norm in the running mean of `clip_gradients`: about fifty steps count."""


def optimizers_of(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], named: Mapping[str, Tensor]
) -> list[torch.optim.Optimizer]:
    """The optimisers that take the steps, without wrappers such as Fabric's and Accelerate's.

    Raises:
        TypeError: what is no optimiser of torch.
        ValueError: a weight decay of their own, or a parameter that none of them holds.
    """
    found: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for index, optimizer in enumerate(found):
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"The optimiser is {type(optimizer).__name__}; a torch.optim.Optimizer is needed, "
                "or a list of them."
            )
        found[index] = optimizer
    groups = [group for optimizer in found for group in optimizer.param_groups]
    if any(group.get("weight_decay") for group in groups):
        raise ValueError(
            "The optimiser has a weight decay of its own; the prior takes its place. "
            "Set the optimiser's weight_decay to 0."
        )
    held = {id(p) for group in groups for p in group["params"]}
    if missing := [name for name, p in named.items() if id(p) not in held]:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"The optimiser does not hold {', '.join(missing[:4])}{more}, whose weight decays "
            "would be learned and never act. Pass the optimiser of this very model, made after the "
            "last change of its parameters, or a list if there are several; or freeze what is not "
            "trained (requires_grad_(False))."
        )
    return found


class StepWatch:
    """Sees by a hook that each step of an optimiser has the prior's gradient, and has it once.

    The hook holds it by a weak reference and is removed with it, so that what owns it may end in
    any way.

    Args:
        optimizer: whose steps are watched.
        parameters: those of its parameters to whose gradients the prior's is added.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        # The smallest, whose gradient may be held for longer than the loop would.
        self._parameter = min(parameters, key=Tensor.numel)
        self._waiting: tuple[Tensor | None, Tensor] | None = None
        watch = weakref.ref(self)

        def hook(*_: Any) -> None:
            if (own := watch()) is not None:
                own._after_step()

        self._handle = optimizer.register_step_post_hook(hook)
        weakref.finalize(self, self._handle.remove)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def check_not_added(self) -> None:
        """Raise a RuntimeError if the gradients have the prior's already, and no step took them."""
        if self._waiting is None:
            return
        gradient, finite = self._waiting
        # A gradient that was cleared since is another tensor, unless it was filled with zeros; a
        # gradient scaler takes no step with gradients that are not finite.
        if gradient is self._parameter.grad and finite:
            raise RuntimeError(
                "add_to_gradients was called twice for one step of the optimiser, and the prior "
                "would count twice. Call it once before each optimizer.step(), after the last "
                "backward pass, and optimizer.zero_grad() after the step."
            )

    def added(self, finite: Tensor) -> None:
        """Note that the gradients have the prior's now; whether they are all finite."""
        self._waiting = self._parameter.grad, finite

    def _after_step(self) -> None:
        if self._waiting is None:
            raise RuntimeError(
                "The optimiser has taken a step without the prior's gradient, so that no weight "
                "decay acts. Call add_to_gradients() before each optimizer.step(), after the "
                "backward passes; if no more is to be learned, end_of_training() or detach()."
            )
        self._waiting = None


def watches_of(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]
) -> list[StepWatch]:
    """A watch for each optimiser that holds some of the parameters."""
    watches = []
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own := [p for p in parameters if id(p) in held]:
            watches.append(StepWatch(optimizer, own))
    return watches


def stable_decays(
    named: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    decays: Sequence[float],
    variance: float,
) -> tuple[list[float], list[str]]:
    """Weight decays that optimisers can take, and the names of the parameters that were limited.

    SGD's decays are limited to 1 / (lr · variance). Other optimisers take any decay: Adam's steps
    do not grow with the gradient, and K-FAC's damping grows with the decay.

    Args:
        named: the trainable tensors.
        optimizers: their optimisers.
        decays: their weight decays.
        variance: factor on the penalty's gradient, see `add_penalty`.
    """
    groups = [g for of in optimizers if isinstance(of, torch.optim.SGD) for g in of.param_groups]
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    largest = [1 / (rates[p] * variance) if rates.get(p) else torch.inf for p in named.values()]
    limited = [name for name, wd, most in zip(named, decays, largest, strict=True) if wd > most]
    return list(map(min, decays, largest)), limited


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
    values: list[Tensor] = list(parameters)
    for i, row in padding.items():
        values[i] = parameters[i].clone()
        values[i][row] = 0
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
) -> tuple[Tensor, Tensor, Tensor]:
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
        The new running mean, whether the gradients were limited (0 or 1), and whether they are
        finite. On the device, since reading a number would wait for it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm().float() / scale
    running = norm if running is None else running.to(norm.device)
    running = torch.where(running.isfinite(), running, norm)  # a scaler's first step may be skipped
    is_large = torch.zeros_like(norm, dtype=torch.bool)
    if clip is not None:
        # A gradient scaler skips a step whose gradients are not finite; so does the mean.
        is_large = norm.isfinite() & (running > 0) & (norm > clip * running)
        factor = torch.where(is_large, clip * running / norm, 1.0)
        if norm.device.type != "cpu" or is_large:  # a GPU would have to be waited for
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        norm = norm * factor
    finite = norm.isfinite()
    return torch.where(finite, running.lerp(norm, NEW_NORM), running), is_large.long(), finite


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
