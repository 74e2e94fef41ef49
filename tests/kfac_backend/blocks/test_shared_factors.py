"""A factor that a weight and its bias share is decomposed once."""

import torch
from torch import nn

from kfac_backend import kronecker_factors
from kfac_backend.blocks import block as blocks


def test_a_shared_factor_is_solved_once(monkeypatch):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    factors = kronecker_factors(model, [(torch.randn(8, 5), torch.arange(8) % 3)], "classification")
    solve, solved = blocks.eigenvalues, []
    monkeypatch.setattr(
        blocks, "eigenvalues", lambda F, name: (solved.append(name), solve(F, name))[1]
    )
    found = factors.eigenvalues()
    assert len(solved) == 4  # B and A of each layer, of six factors in all
    for name, values in found.items():
        expected = torch.linalg.eigvalsh(factors.to_dense(name).double())
        torch.testing.assert_close(values.sort().values, expected, rtol=1e-4, atol=1e-5)
