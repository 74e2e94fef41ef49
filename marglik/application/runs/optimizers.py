"""Create the optimiser of the network and its learning rate schedule from options."""

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
"""Nesterov momentum of SGD and K-FAC."""
SCALARS = 0.1
"""Factor on the learning rate of parameters with a single entry, such as Fixup's scalars."""
SMALLEST_RATE = 1e-6
"""Final learning rate of the cosine schedule."""
DAMPING = 0.1


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser of the network, and its learning rate.

    It has no weight decay, because the gradient of the objective includes the gradient of the
    prior. AdamW's decoupled weight decay would not lead to the maximum of the log joint, where the
    Laplace approximation is computed.

    Args:
        name: optimiser. kfac is SGD on gradients that are preconditioned by K-FAC, with the mode
            curvature.kfac_approx.
        lr: initial learning rate.
        damping: damping of kfac (0.1 if not given). It is added, with the prior, to the curvature
            of the mean loss.
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
    """Return the optimiser of the trainable parameters and its learning rate schedule.

    The learning rate decreases along a cosine in ``num_steps`` steps. None leaves it to
    `OnlineTraining`, for a training that averages the parameters. Likelihood, curvature and seed
    are for K-FAC.
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
        # Damp the product, to which the prior is added, too. A step is then a natural-gradient step
        # on the posterior.
        optimizer = KFAC(
            model,
            likelihood,
            config.lr,
            momentum=MOMENTUM,
            params=groups,
            options=PreconditionerOptions(damping=config.damping or DAMPING, damping_on="product"),
            curvature=curvature.replace(fisher="mc", mc_samples=1),
            loss_mean_over="examples",  # as in the objective of the loop
            seed=seed,
        )
    if num_steps is None:
        return optimizer, None
    return optimizer, CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=SMALLEST_RATE)
