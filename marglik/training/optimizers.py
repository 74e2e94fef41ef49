"""The network's optimiser and its schedule, as the paper's experiment has them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from marglik.posterior.prior import parameter_kind

__all__ = ["OptimizerConfig", "build_optimizer"]


@dataclass(frozen=True)
class OptimizerConfig:
    """The network's optimiser; its learning rate falls by a cosine, a little every step.

    There is no weight decay here: the prior's gradient is part of the loss, for SGD and AdamW
    alike. (AdamW's decoupled decay would not lead to the maximum of the log joint, which is what
    the Laplace approximation needs.)

    Args:
        name: SGD or AdamW.
        lr: first learning rate.
        min_lr: last learning rate.
        scalar_lr_factor: times the learning rate for parameters with a single entry.
        momentum: SGD's momentum.
        nesterov: whether SGD's momentum is Nesterov's.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    min_lr: float = 1e-6
    scalar_lr_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr must be positive, not {self.lr}.")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"optimizer.min_lr must be in [0, lr={self.lr}], not {self.min_lr}.")
        if not self.scalar_lr_factor > 0:
            raise ValueError(
                f"optimizer.scalar_lr_factor must be positive, not {self.scalar_lr_factor}."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must be in [0, 1), not {self.momentum}.")
        if self.nesterov and self.name == "sgd" and self.momentum == 0:
            raise ValueError(
                "optimizer.nesterov needs momentum > 0; pass --optimizer.nesterov false."
            )


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, num_steps: int
) -> tuple[torch.optim.Optimizer, CosineAnnealingLR]:
    """The optimiser of a model's trainable parameters, and its schedule over the steps."""
    scalars, others = [], []
    for p in model.parameters():
        if p.requires_grad:
            (scalars if parameter_kind(p) == "scalars" else others).append(p)
    groups = [
        {"params": params, "lr": config.lr * factor}
        for params, factor in ((others, 1.0), (scalars, config.scalar_lr_factor))
        if params
    ]
    if config.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    return optimizer, CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=config.min_lr)
