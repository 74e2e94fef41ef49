"""One evidence update, ours and laplace-torch's: eigendecompositions, then 100 steps of Adam."""

import torch
from laplace import KronLaplace as LaplaceTorchKronLaplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import Kron
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments.contenders import Work
from kfac_backend.options import KfacApprox
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.laplace_torch import KronLaplace
from marglik.posterior.prior import PriorGroups

__all__ = ["STEPS", "evidence_work"]

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
        fitted.load_state_dict(state | {"H": factors.to(device)})
        groups = PriorGroups.from_model(model)
        Hyperparameters(groups, 1.0, device=device).update(fitted, STEPS)

    peer = LaplaceTorchKronLaplace(model, "classification", backend=CurvlinopsGGN)
    peer.mean = parameters_to_vector(model.parameters()).detach()
    peer.loss, peer.n_outputs = factors.loss, factors.num_outputs
    peer.n_data = int(factors.num_data)
    kfacs = [[F for F in (block.B, block.A) if F is not None] for block in factors.blocks.values()]
    kron = Kron(kfacs)  # pyright: ignore[reportArgumentType]
    peer.H_facs = kron  # pyright: ignore[reportAttributeAccessIssue]

    def theirs() -> None:
        peer.H = kron.decompose()
        log_delta = torch.zeros(len(factors), device=device, requires_grad=True)
        optimizer = torch.optim.Adam([log_delta], lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            evidence: Tensor = peer.log_marginal_likelihood(log_delta.exp())
            (-evidence).backward()
            optimizer.step()

    return ours, theirs
