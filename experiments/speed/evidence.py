"""An evidence update, ours and laplace-torch's: eigenvalues, then 100 steps of Adam."""

from collections.abc import Sequence
from typing import Any

import torch
from laplace import KronLaplace as LaplaceTorchKronLaplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import Kron
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments.speed.contenders import Work
from kfac_backend.options import KfacApprox
from marglik.posterior.laplace_torch import KronLaplace
from marglik.posterior.prior import Hyperparameters, PriorGroups
from marglik.training.learner import update_prior

__all__ = ["evidence_work", "update"]

STEPS = 100


def evidence_work(model: nn.Module, kfac_approx: KfacApprox) -> tuple[Work, Work]:
    """An update of one precision per tensor at the same factors: ours, laplace-torch's."""
    device = next(model.parameters()).device
    data = [(torch.randn(32, 3, 32, 32, device=device), torch.randint(10, (32,), device=device))]
    fitted = KronLaplace(model, "classification", kfac_approx=kfac_approx)
    fitted.fit(data)
    assert fitted.factors is not None
    factors, state = fitted.factors, fitted.state_dict()

    def ours() -> None:
        # Blocks keep their eigenvalues: new ones, on the same factors.
        fitted.load_state_dict(state)
        groups = PriorGroups.from_model(model)
        Hyperparameters(groups, 1.0).update(fitted, STEPS)

    kfacs = [[F for F in (block.B, block.A) if F is not None] for block in factors.blocks.values()]

    def theirs() -> None:
        peer = LaplaceTorchKronLaplace(model, "classification", backend=CurvlinopsGGN)
        learned = [p for p in model.parameters() if p.requires_grad]
        peer.mean = parameters_to_vector(learned).detach()
        peer.loss, peer.n_outputs = factors.loss, factors.num_outputs
        peer.n_data = int(factors.num_data)
        peer.H_facs = Kron(kfacs)  # pyright: ignore
        peer.H = peer.H_facs.decompose()
        log_delta = torch.zeros(len(learned), device=device, requires_grad=True)
        optimizer = torch.optim.Adam([log_delta], lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            evidence: Tensor = peer.log_marginal_likelihood(log_delta.exp())
            (-evidence).backward()
            optimizer.step()

    return ours, theirs


def update(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], **options: Any
) -> dict[str, float]:
    """An update of one precision per tensor as in the online loop; returns seconds of its parts."""
    hyperparameters = Hyperparameters(PriorGroups.from_model(model), 1.0)
    laplace = KronLaplace(model, "classification", **options)
    num_data = sum(len(x) for x, _ in batches)
    _, record = update_prior(hyperparameters, laplace, batches, num_data, STEPS)
    return record["seconds"]
