"""The network's optimiser and its learning-rate schedule, by their options."""

from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.optimizer.kfac import BaseOptimizer
from kfac_backend.optimizer.options import DampingOn, NormControl
from kfac_backend.options import CurvatureOptions, Fisher, check_positive
from marglik.posterior.prior import parameter_kind
from marglik.training.schedule import settling_rate

__all__ = ["KfacConfig", "OptimizerConfig", "build_optimizer"]


@dataclass(frozen=True)
class KfacConfig:
    """How optimizer.name=kfac preconditions the gradients; see `KfacPreconditioner`.

    Args:
        base: optimiser that takes the step with the preconditioned gradients: sgd with momentum, or
            nadamw.
        damping: number that is added to the curvature of the mean loss, beside the prior's with
            prior_is_damping. Tune it first, then norm_limit.
        damping_on: what is damped. product adds the damping to B ⊗ A, which is exact; factors adds
            its root to each of B and A, which is cheaper.
        prior_is_damping: whether to add the learned weight decay of each tensor to its damping, so
            that a step is a natural-gradient step on the posterior; for damping_on=product.
        fisher: which gradients the factors B are made of. mc draws labels from the model; empirical
            reuses the gradients of the training step; exact propagates all outputs back.
        factor_every: number of steps from one computation of the factors to the next.
        update_every: number of steps from one computation of the preconditioner to the next.
        ema_decay: decay of the moving average of the factors, in [0, 1); 0 takes the latest batch
            alone.
        norm_control: how the length of steps is limited, or none. kl_clip limits the change of the
            predictions (KL divergence) that a step makes at its learning rate, peak_kl_clip at the
            highest learning rate.
        norm_limit: limit of the change (nats); null takes 0.01 for peak_kl_clip and 0.001 for
            kl_clip.
    """

    base: BaseOptimizer = "sgd"
    damping: float = 0.1
    damping_on: DampingOn = "product"
    prior_is_damping: bool = True
    fisher: Fisher = "mc"
    factor_every: int = 10
    update_every: int = 10
    ema_decay: float = 0.9
    norm_control: NormControl = "kl_clip"
    norm_limit: float | None = None

    def __post_init__(self) -> None:
        try:
            self.preconditioner()
        except ValueError as error:
            raise ValueError(f"optimizer.kfac.{error}") from error
        if self.prior_is_damping and self.damping_on == "factors":
            raise ValueError(
                "optimizer.kfac.prior_is_damping needs damping_on=product, where a prior adds to "
                "the curvature; pass --optimizer.kfac.prior_is_damping false."
            )

    def preconditioner(self) -> PreconditionerOptions:
        """The options of the preconditioner."""
        others = ("base", "prior_is_damping", "fisher")
        return PreconditionerOptions(**{k: v for k, v in asdict(self).items() if k not in others})


@dataclass(frozen=True)
class OptimizerConfig:
    """The network's optimiser and its learning rate.

    There is no weight decay here: the prior's gradient is part of the objective's. AdamW's
    decoupled decay would not lead to the maximum of the log joint, which is what the Laplace
    approximation needs.

    Args:
        name: sgd, adamw, or kfac: SGD or NAdamW on gradients that K-FAC preconditions, in the mode
            curvature.kfac_approx.
        lr: initial learning rate.
        min_lr: final learning rate where it falls with a cosine.
        scalar_lr_factor: factor on the learning rate of parameters with a single entry.
        momentum: momentum of SGD, also behind K-FAC.
        nesterov: whether SGD uses Nesterov's momentum.
        kfac: options of K-FAC.
    """

    name: Literal["sgd", "adamw", "kfac"] = "sgd"
    lr: float = 0.1
    min_lr: float = 1e-6
    scalar_lr_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    kfac: KfacConfig = field(default_factory=KfacConfig)

    def __post_init__(self) -> None:
        if self.name != "kfac" and self.kfac != KfacConfig():
            raise ValueError(
                f"optimizer.kfac has options, but optimizer.name is {self.name}; pass "
                "--optimizer.name kfac."
            )
        check_positive("optimizer.lr", self.lr)
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"optimizer.min_lr must be in [0, lr={self.lr}], not {self.min_lr}.")
        check_positive("optimizer.scalar_lr_factor", self.scalar_lr_factor)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must be in [0, 1), not {self.momentum}.")
        if self.nesterov and self.name == "sgd" and self.momentum == 0:
            raise ValueError(
                "optimizer.nesterov needs momentum > 0; pass --optimizer.nesterov false."
            )


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    num_steps: int,
    likelihood: str = "classification",
    curvature: CurvatureOptions = CurvatureOptions(),  # noqa: B008
    seed: int = 0,
    settles: bool = False,
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """The optimiser of a model's trainable parameters, and its schedule over the steps.

    Args:
        model: the model.
        config: the options.
        num_steps: number of steps of the whole training.
        likelihood: likelihood of the loss, for K-FAC.
        curvature: the mode of K-FAC, and how batches give their targets.
        seed: seed of the labels that K-FAC draws.
        settles: whether the learning rate is `settling_rate`'s, for a training that averages its
            parameters; else it falls to config.min_lr with a cosine.
    """
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
    elif config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    else:
        optimizer = KFAC(
            model,
            likelihood,
            config.lr,
            base=config.kfac.base,
            momentum=config.momentum,
            nesterov=config.nesterov,
            params=groups,
            options=config.kfac.preconditioner(),
            curvature=curvature.in_training_steps(config.kfac.fisher),
            mean_over="examples",  # the loop's objective
            seed=seed,
        )
    if settles:
        return optimizer, settling_rate(optimizer, num_steps)
    return optimizer, CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=config.min_lr)
