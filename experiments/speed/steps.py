"""Contenders of `update_step_timing`: one training step, plain or preconditioned, ours and peers'.

Each function takes a model and a batch, and returns one that makes one step. The model is a
WideResNetFixup (`contenders.network`). The peers have no block for its scalars, which keep their
plain gradients; ours has a block for each.
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.speed.contenders import Work
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import Fisher, Mode

__all__ = ["OURS", "PARTS", "PEERS", "Contender", "sgd"]

Contender = Callable[[nn.Module, Tensor, Tensor], Work]

DAMPING = 1e-2

NEVER = 10**9
"""An interval so long that only the first step is due."""


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """A step with Nesterov momentum, which all contenders take after the preconditioning."""
    optimizer = _nesterov(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def marglik(
    kfac_approx: Mode,
    fisher: Fisher = "mc",
    factor_every: int = 1,
    update_every: int = 1,
    counts_anew: bool = False,
) -> Contender:
    """K-FAC, with new factors and a new preconditioner in each step unless said otherwise.

    ``counts_anew`` begins each step as the first, in which inverses are made for later ones, too.
    """
    options = PreconditionerOptions(
        damping=DAMPING,
        factor_every=factor_every,
        update_every=update_every,
        ema_decay=0.0,
        norm_control="none",
    )

    def contender(model: nn.Module, x: Tensor, y: Tensor) -> Work:
        preconditioner = KfacPreconditioner(
            model, "classification", options, kfac_approx=kfac_approx, fisher=fisher
        )
        optimizer = _nesterov(model)

        def step() -> None:
            optimizer.zero_grad()
            if counts_anew:
                preconditioner._step = 0
            F.cross_entropy(model(x), y).backward()
            preconditioner.step()
            optimizer.step()

        return step

    return contender


def asdl(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """ASDL's K-FAC, expand only, one Monte Carlo sample: `KfacGradientMaker`."""
    from asdl import FISHER_MC, KfacGradientMaker, PreconditioningConfig  # pyright: ignore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each scalar that it does not support
        config = PreconditioningConfig(damping=DAMPING, data_size=len(x))
        maker = KfacGradientMaker(model, config, FISHER_MC)
    optimizer = _nesterov(model)

    def step() -> None:
        optimizer.zero_grad()
        f = maker.setup_model_call(model, x)
        maker.setup_loss_call(F.cross_entropy, f, y)
        maker.forward_and_backward()
        optimizer.step()

    return step


def curvlinops(kfac_approx: str) -> Contender:
    """K-FAC of curvlinops and its inverse, one Monte Carlo sample, after a plain backward pass."""

    def contender(model: nn.Module, x: Tensor, y: Tensor) -> Work:
        from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        parameters = [p for layer in layers for p in layer.parameters()]
        optimizer = _nesterov(model)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac = KFACLinearOperator(
                model,
                nn.CrossEntropyLoss(),
                parameters,
                [(x, y)],
                kfac_approx=kfac_approx,
                check_deterministic=False,
                num_per_example_loss_terms=1,
                num_data=len(x),
            )
            inverse = KFACInverseLinearOperator(kfac, damping=DAMPING, use_heuristic_damping=True)
            gradients = [p.grad for p in parameters if p.grad is not None]
            natural: Any = inverse @ gradients
            for p, of_p in zip(parameters, natural, strict=True):
                p.grad = of_p
            optimizer.step()

        return step

    return contender


def singd(kfac_approx: str) -> Contender:
    """Inverse-free K-FAC (Lin et al. 2023): dense factors, empirical Fisher, an update each step.

    It takes no sample and no backward pass of its own; it has its own step with momentum.
    """

    def contender(model: nn.Module, x: Tensor, y: Tensor) -> Work:
        from singd.optim.optimizer import SINGD  # pyright: ignore[reportMissingImports]

        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        parameters = [p for layer in layers for p in layer.parameters()]
        natural = SINGD(
            model, parameters, lr=1e-4, damping=DAMPING, T=1, lr_cov=1e-4, kfac_approx=kfac_approx
        )
        known = {id(p) for p in parameters}
        scalars = [p for p in model.parameters() if id(p) not in known]
        plain = torch.optim.SGD(scalars, 1e-4, momentum=0.9, nesterov=True)

        def step() -> None:
            natural.zero_grad()
            plain.zero_grad()
            F.cross_entropy(model(x), y).backward()
            natural.step()
            plain.step()

        return step

    return contender


OURS: dict[str, Contender] = {
    "marglik, expand": marglik("expand"),
    "marglik, reduce": marglik("reduce"),
    "marglik, expand, empirical": marglik("expand", "empirical"),
    "marglik, reduce, empirical": marglik("reduce", "empirical"),
}
"""New factors and a new preconditioner in each step; one Monte Carlo sample unless empirical."""


PARTS: dict[str, Contender] = {
    "old inverses": marglik("reduce", "mc", NEVER, NEVER),
    "new factors, expand": marglik("expand", "mc", 1, NEVER),
    "new factors, reduce": marglik("reduce", "mc", 1, NEVER),
    "new inverses, expand": marglik("expand", "mc", 1, 2, counts_anew=True),
    "new inverses, reduce": marglik("reduce", "mc", 1, 2, counts_anew=True),
}
"""Kinds of steps of a run that renews factors and inverses less often than each step."""


def _peers() -> dict[str, Contender]:
    peers: dict[str, Contender] = {}
    if find_spec("asdl"):
        peers["ASDL, expand"] = asdl
    if find_spec("curvlinops"):
        peers |= {f"curvlinops, {mode}": curvlinops(mode) for mode in ("expand", "reduce")}
    if find_spec("singd"):
        peers |= {f"singd, {mode}": singd(mode) for mode in ("expand", "reduce")}
    return peers


PEERS = _peers()
"""The installed peers. kfac-pytorch (KAISA) is left out: no package index has it."""


def _nesterov(model: nn.Module) -> torch.optim.Optimizer:
    # The step is so small that the network hardly changes over the repetitions.
    return torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, nesterov=True)
