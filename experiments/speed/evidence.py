"""Timing of an evidence update, ours and others': eigenvalues, then 100 steps of Adam.

The update is timed alone, or with the curvature pass over the data before it. A transformer's
widest factors are timed by themselves: eigenvalues for the evidence, eigenvectors for the
predictive, an inverse for K-FAC.
"""

from collections.abc import Sequence
from typing import Any

import scipy.linalg
import torch
from laplace import KronLaplace as LaplaceTorchKronLaplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import Kron
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments.speed.contenders import Work
from kfac_backend.blocks.eigen import eigenvalues, eigh
from kfac_backend.options import KfacApprox, Mode
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.laplace_torch import KronLaplace
from marglik.posterior.prior import PriorGroups
from marglik.training.update import update_prior

__all__ = ["STEPS", "evidence_work", "factor_work", "peer_update", "update"]

STEPS = 100

Batches = Sequence[tuple[Tensor, Tensor]]


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
        Hyperparameters(groups, 1.0, device=device).update(fitted, STEPS)

    kfacs = [[F for F in (block.B, block.A) if F is not None] for block in factors.blocks.values()]
    kron = Kron(kfacs)  # pyright: ignore[reportArgumentType]
    num_data, num_outputs = int(factors.num_data), factors.num_outputs
    return ours, lambda: _climb_theirs(model, kron, factors.loss, num_data, num_outputs)


def _climb_theirs(
    model: nn.Module, kron: Kron, loss: float, num_data: int, num_outputs: int
) -> None:
    """laplace-torch's eigenvectors, and steps on its evidence with a precision per tensor."""
    device = next(model.parameters()).device
    peer = LaplaceTorchKronLaplace(model, "classification", backend=CurvlinopsGGN)
    learned = [p for p in model.parameters() if p.requires_grad]
    peer.mean = parameters_to_vector(learned).detach()
    peer.loss, peer.n_outputs, peer.n_data = loss, num_outputs, num_data
    peer.H_facs = kron  # pyright: ignore[reportAttributeAccessIssue]
    peer.H = kron.decompose()
    log_delta = torch.zeros(len(learned), device=device, requires_grad=True)
    optimizer = torch.optim.Adam([log_delta], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        evidence: Tensor = peer.log_marginal_likelihood(log_delta.exp())
        (-evidence).backward()
        optimizer.step()


def update(model: nn.Module, batches: Batches, **options: Any) -> dict[str, float]:
    """An update of one precision per tensor as in the online loop; returns seconds of its parts."""
    device = next(model.parameters()).device
    hyperparameters = Hyperparameters(PriorGroups.from_model(model), 1.0, device=device)
    laplace = KronLaplace(model, "classification", **options)
    num_data = sum(len(x) for x, _ in batches)
    _, record = update_prior(hyperparameters, laplace, batches, num_data, STEPS)
    return record["seconds"]


def peer_update(model: nn.Module, batches: Batches, kfac_approx: Mode) -> None:
    """The same with laplace-torch and curvlinops, summing batches as `laplace.KronLaplace.fit`.

    Fixup's scalars, which curvlinops does not take, are frozen.
    """
    for p in model.parameters():
        p.requires_grad_(p.numel() > 1)
    backend: Any = CurvlinopsGGN(model, "classification")
    num_data = sum(len(x) for x, _ in batches)
    with torch.no_grad():
        num_outputs = model(batches[0][0][:1]).shape[-1]
    loss: Any = 0.0
    kron: Any = None
    for x, y in batches:
        of_batch, factors = backend.kron(x, y, N=num_data, kfac_approx=kfac_approx)
        loss, kron = loss + of_batch, factors if kron is None else kron + factors
    _climb_theirs(model, kron, float(loss), num_data, num_outputs)


def factor_work(size: int, device: torch.device) -> dict[str, Work]:
    """Work on one float32 factor (size, size), by our functions and others'.

    The names say what needs the work: "evidence", "predictive", or "inverse" for a K-FAC step.
    laplace-torch takes eigenvectors in float32 for all of them. SciPy's drivers are LAPACK's, with
    its own BLAS.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * size, size, generator=generator) * torch.logspace(0, -3, size)
    factor = (rows.mT @ rows / len(rows)).to(device)
    damped = factor + 1e-3 * torch.eye(size, device=device)
    work: dict[str, Work] = {
        "ours, evidence (eigenvalues, float64)": lambda: eigenvalues(factor, "factor"),
        "ours, predictive (eigenvectors, float32)": lambda: eigh(factor, "factor"),
        "ours, inverse (Cholesky)": lambda: torch.cholesky_inverse(torch.linalg.cholesky(damped)),
        "laplace-torch, evidence and predictive (eigenvectors, float32)": lambda: torch.linalg.eigh(
            factor
        ),
        "torch, inverse (LU)": lambda: torch.linalg.inv(damped),
    }
    if device.type == "cpu":
        matrix = factor.double().numpy()
        for driver in ("ev", "evr"):
            work[f"SciPy, evidence (eigenvalues, float64, {driver})"] = lambda driver=driver: (
                scipy.linalg.eigvalsh(matrix, driver=driver)
            )
    return work
