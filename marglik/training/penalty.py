"""The prior's part of a training step: the gradient of ½ Σ_g wd_g ‖θ_g‖².

The δ of a group that the data does not need grows without bound. SGD would then diverge: its step
on the penalty overshoots once learning rate times weight decay exceeds 2 (1.36 with Nesterov's
momentum of 0.9). So SGD's weight decays are limited to 1 / learning rate, at which a plain step
takes the parameter to zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Decay", "add_penalty", "check_no_weight_decay", "clip_gradients", "stable_decays"]

Decay = float | Tensor
"""Weight decay of a parameter tensor: one number, or one per entry."""


def check_no_weight_decay(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if the optimiser has a weight decay of its own."""
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError(
            "The optimiser has a weight decay of its own; the prior takes its place. "
            "Set the optimiser's weight_decay to 0."
        )


def stable_decays(
    named: Mapping[str, Tensor], optimizer: Any, decays: Sequence[Decay], variance: float
) -> tuple[list[Decay], list[str]]:
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
    stable, limited = [], []
    for (name, p), decay in zip(named.items(), decays, strict=True):
        largest = 1 / (rates[p] * variance) if rates.get(p) else float("inf")
        is_tensor = isinstance(decay, Tensor)
        stable.append(decay.clamp(max=largest) if is_tensor else min(decay, largest))
        if (decay > largest).any() if is_tensor else decay > largest:
            limited.append(name)
    return stable, limited


@torch.no_grad()
def add_penalty(
    parameters: list[nn.Parameter], weight_decays: list[Decay], scale: Tensor
) -> Tensor:
    """Add scale · wd · θ to the gradients; returns ½ Σ wd ‖θ‖², a scalar.

    The foreach functions need a few kernel launches for all tensors together; autograd would need
    several for each tensor.
    """
    gradients = []
    for p in parameters:
        # A parameter that the loss does not depend on still has its prior.
        gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
    values: list[Tensor] = list(parameters)
    decays: Any = [d.to(values[0]) if isinstance(d, Tensor) else d for d in weight_decays]
    roots = torch._foreach_mul(values, [d**0.5 for d in decays])
    penalty = 0.5 * torch.stack(torch._foreach_norm(roots)).square().sum()
    pulls = torch._foreach_mul(values, decays)
    torch._foreach_mul_(pulls, scale)
    # Not in place: after a compiled backward pass two parameters may share one gradient tensor.
    for p, gradient in zip(parameters, torch._foreach_add(gradients, pulls), strict=True):
        p.grad = gradient
    return penalty


@torch.no_grad()
def clip_gradients(
    parameters: list[nn.Parameter], running: Tensor | None, clip: float | None, scale: Tensor
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
    if clip is not None:
        # A gradient scaler skips a step whose gradients are not finite; so does the mean.
        is_large = norm.isfinite() & (running > 0) & (norm > clip * running)
        factor = torch.where(is_large, clip * running / norm, 1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        norm = norm * factor
    else:
        is_large = torch.zeros_like(norm, dtype=torch.bool)
    mean = torch.where(norm.isfinite(), running.lerp(norm, NEW_NORM), running)
    return mean, is_large.long()


NEW_NORM = 0.02
"""Weight of a step's norm in the running mean: about fifty steps count."""
