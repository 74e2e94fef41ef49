"""The paper's network, WRN-16 Fixup, at half its width, with no parameter frozen."""

import pytest
import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from marglik.models import WideResNetFixup
from tests import oracles


def trained(**options):
    """As after some training: at initialisation every residual branch is zero."""
    torch.manual_seed(0)
    model = WideResNetFixup(**options).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_laplace_torch_runs_on_the_backend(kfac_approx):
    model = trained(depth=16, widen_factor=2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 3, 16, 16, generator=generator)
    y = torch.tensor([0, 5, 9])
    la = Laplace(
        model, "classification", "all", "kron", backend=KfacGGN, prior_precision=10.0,
        backend_kwargs={"kfac_approx": kfac_approx},
    )  # fmt: skip
    la.fit(DataLoader(TensorDataset(x, y), 2))
    assert len(la.H_facs) == 50
    size = sum(p.numel() for p in model.parameters())
    assert la.n_params == size == sum(block.numel for block in la.H_facs.blocks)
    evidence = la.log_marginal_likelihood()
    assert torch.isfinite(evidence)
    assert evidence < la.log_likelihood
    la.optimize_prior_precision(n_steps=3, init_prior_prec=10.0, prior_structure="layerwise")
    assert la.log_marginal_likelihood() > evidence
    p = la(x[:1], pred_type="nn", link_approx="mc", n_samples=2)
    assert p.sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_scalars_are_exact_in_the_deep_network(kfac_approx):
    model = trained(depth=16, widen_factor=1).double()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors = kronecker_factors(
        model, [(x, torch.tensor([0, 5, 9]))], "classification", kfac_approx=kfac_approx
    )
    scalars = [name for name, p in model.named_parameters() if p.numel() == 1]
    assert len(scalars) == 32
    exact = oracles.dense_ggn(model, x, "classification", names=scalars).diagonal()
    ours = torch.stack([factors.to_dense(name).squeeze() for name in scalars])
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
