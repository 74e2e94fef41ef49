"""The prior's share of a training step: ½ Σ_g wd_g ‖θ_g‖², added to the gradients.

A group that the data does not need gets an ever larger δ. SGD's step on its penalty would
overshoot and diverge once learning rate times weight decay exceeds 2 (1.36 with Nesterov's momentum
of 0.9); a decay beyond 1 / learning rate, which takes its parameter to zero in one step, is limited
to that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Decay", "add_penalty", "check_no_weight_decay", "stable_decays"]

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
    model: nn.Module, optimizer: Any, decays: Sequence[Decay], variance: float
) -> tuple[list[Decay], list[str]]:
    """The weight decays of SGD's step, and the names of those that were limited to 1 / lr.

    Args:
        model: the network.
        optimizer: its optimiser, or a wrapper that has its groups. Others than SGD bear any
            decay: Adam's steps do not grow with the gradient, and K-FAC damps with it.
        decays: of each trainable tensor, in ``parameters()`` order.
        variance: what the penalty is multiplied by.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.SGD):
        return list(decays), []
    rates = {p: group["lr"] for group in inner.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    stable, limited = [], []
    for (name, p), decay in zip(named, decays, strict=True):
        largest = 1 / (rates[p] * variance) if rates.get(p) else float("inf")
        if isinstance(decay, Tensor):
            is_limited = bool((decay > largest).any())
            stable.append(decay.clamp(max=largest))
        else:
            is_limited = decay > largest
            stable.append(min(decay, largest))
        if is_limited:
            limited.append(name)
    return stable, limited


@torch.no_grad()
def add_penalty(
    parameters: list[nn.Parameter], weight_decays: list[Decay], scale: Tensor
) -> Tensor:
    """Add scale · wd · θ to the gradients; returns ½ Σ wd ‖θ‖², a scalar.

    A few launches for all tensors together; autograd would have several for each of them.
    """
    gradients = []
    for p in parameters:
        # Where the network did not use it, its prior holds.
        gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
    values: list[Tensor] = list(parameters)
    decays: Any = [d.to(values[0]) if isinstance(d, Tensor) else d for d in weight_decays]
    roots = torch._foreach_mul(values, [d**0.5 for d in decays])
    penalty = 0.5 * torch.stack(torch._foreach_norm(roots)).square().sum()
    pulls = torch._foreach_mul(values, decays)
    torch._foreach_mul_(pulls, scale)
    # Not in place: a compiled backward pass may have given two parameters one gradient.
    for p, gradient in zip(parameters, torch._foreach_add(gradients, pulls), strict=True):
        p.grad = gradient
    return penalty
