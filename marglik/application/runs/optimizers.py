"""Build the network's optimiser and its learning rate schedule from options."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from kfac_backend.likelihoods import Likelihood
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions, check_option, check_positive
from marglik.posterior.prior import parameter_kind

OptimizerName = Literal["sgd", "adamw", "kfac"]

MOMENTUM = 0.9
"""Nesterov momentum of SGD, also with K-FAC."""
SCALARS = 0.1
"""Factor on the learning rate of parameters with a single entry, such as Fixup's scalars."""
SMALLEST_RATE = 1e-6
"""The final learning rate of the cosine schedule."""
DAMPING = 0.1


@dataclass(frozen=True)
class OptimizerConfig:
    """The network's optimiser and its learning rate.

    There is no weight decay here, because the gradient of the prior is a part of the objective's
    gradient. AdamW's decoupled weight decay would not lead to the maximum of the log joint, at
    which the Laplace approximation is made.

    Args:
        name: optimiser; kfac is SGD on gradients preconditioned by K-FAC, with the mode
            curvature.kfac_approx.
        lr: initial learning rate.
        damping: damping of kfac (0.1 if not given), added to the curvature of the mean loss in
            addition to the prior.
    """

    name: OptimizerName = "sgd"
    lr: float = 0.1
    damping: float | None = None

    def __post_init__(self) -> None:
        check_option("optimizer.name", self.name, OptimizerName)
        check_positive("optimizer.lr", self.lr)
        if self.damping is None:
            return
        check_positive("optimizer.damping", self.damping)
        if self.name != "kfac":
            raise ValueError(
                f"optimizer.damping is {self.damping}, but optimizer.name is {self.name}. Pass "
                "--optimizer.name kfac, or omit the damping."
            )


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    num_steps: int | None,
    likelihood: Likelihood | str = "classification",
    curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
    seed: int = 0,
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Return the optimiser of a model's trainable parameters and its learning rate schedule.

    Args:
        model: the model.
        config: the options.
        num_steps: number of steps in which the learning rate falls along a cosine; None keeps it
            constant, for a training that averages its parameters.
        likelihood: likelihood of the loss, for K-FAC.
        curvature: the mode of K-FAC, and the form of the batches' targets.
        seed: seed of the labels that K-FAC draws.
    """
    scalars, others = [], []
    for p in model.parameters():
        if p.requires_grad:
            (scalars if parameter_kind(p) == "scalars" else others).append(p)
    groups = [
        {"params": params, "lr": config.lr * factor}
        for params, factor in ((others, 1.0), (scalars, SCALARS))
        if params
    ]
    if config.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=MOMENTUM, nesterov=True
        )
    elif config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    else:
        # Damping on the product, to which the learned decays are added: a step is then a
        # natural-gradient step on the posterior.
        optimizer = KFAC(
            model,
            likelihood,
            config.lr,
            momentum=MOMENTUM,
            params=groups,
            options=PreconditionerOptions(damping=config.damping or DAMPING, damping_on="product"),
            curvature=curvature.replace(fisher="mc", mc_samples=1),
            loss_mean_over="examples",  # the loop's objective
            seed=seed,
        )
    if num_steps is None:
        return optimizer, None
    return optimizer, CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=SMALLEST_RATE)
