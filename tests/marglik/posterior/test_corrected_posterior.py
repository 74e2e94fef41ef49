"""Posteriors with corrected eigenvalues, against the dense Gaussian of their blocks."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from marglik import Posterior, maximize_evidence
from tests import oracles
from tests.marglik import posteriors
from tests.marglik.posteriors import DELTAS, by_jacobians, data, network

DELTA = DELTAS.double()


def fitted(likelihood="classification", kfac_approx="expand", *, corrected=True):
    noise = {"sigma_noise": 0.4} if likelihood == "regression" else {}
    options = {"kfac_approx": kfac_approx, "temperature": 0.6, **noise}
    return posteriors.fitted(likelihood, corrected=corrected, **options)


def precision(laplace) -> Tensor:
    """Dense, with the noise, the temperature and the prior."""
    scale = 1 / (laplace.sigma_noise**2 * laplace.temperature)
    return torch.block_diag(*(
        scale * block.to_dense() + d * torch.eye(block.numel).double()
        for block, d in zip(laplace.factors.blocks.values(), DELTA, strict=True)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("likelihood", "kfac_approx"),
    [
        ("classification", "expand"),
        ("classification", "reduce"),
        (oracles.NOISY, "expand"),
        ("regression", "expand"),
        ("bernoulli", "reduce"),
    ],
)
def test_evidence_and_covariance(likelihood, kfac_approx):
    laplace, x = fitted(likelihood, kfac_approx)
    assert laplace.factors.is_corrected and laplace.model.training
    P = precision(laplace)
    log_det_prior = sum(p.numel() * d.log() for p, d in zip(laplace.params, DELTA, strict=True))
    scatter = sum(d * p.square().sum() for p, d in zip(laplace.params, DELTA, strict=True))
    expected = laplace.log_likelihood - 0.5 * (torch.logdet(P) - log_det_prior + scatter)
    found = laplace.log_marginal_likelihood()
    assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
    plain, _ = fitted(likelihood, kfac_approx, corrected=False)
    assert abs(plain.log_marginal_likelihood() - found) > 1e-3  # negative control
    _, covariance = laplace.output_distribution(x)
    assert_close(covariance, by_jacobians(laplace, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_the_evidence_is_a_lower_bound_that_is_not_maximised(kfac_approx):
    """Below the evidence of the exact blocks, by Hadamard's inequality."""
    laplace, x = fitted("classification", kfac_approx)
    exact = oracles.dense_ggn_blocks(laplace.model.eval(), x, "classification").values()
    log_det_ratio = sum(
        torch.logdet(H / laplace.temperature / d + torch.eye(len(H)).double())
        for H, d in zip(exact, DELTA, strict=True)
    )
    scatter = sum(d * p.square().sum() for p, d in zip(laplace.params, DELTA, strict=True))
    dense = laplace.log_likelihood - 0.5 * (log_det_ratio + scatter)
    assert laplace.log_marginal_likelihood() < dense - 1e-6
    with pytest.raises(ValueError, match="lower bound.*corrected=False"):
        maximize_evidence(laplace)
    assert torch.equal(laplace.prior_precision.double(), DELTA)


def test_what_cannot_be():
    model, batch = network(), data()
    posterior = Posterior(model, "classification")
    with pytest.raises(TypeError, match="read only once.*DataLoader or a list"):
        posterior.fit(iter([batch]), corrected=True)
    assert posterior.factors is None
    posterior.fit([batch], override=False, corrected=True)  # nothing was there
    with pytest.raises(ValueError, match="override=False adds data"):
        posterior.fit([batch], override=False, corrected=True)
