"""The paper's network, WRN-16 Fixup, at half its width, with no parameter frozen."""

import pytest
import torch

from kfac_backend import kronecker_factors
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
