"""Posteriors with corrected eigenvalues; `test_precision` has them against dense matrices."""

import pytest
import torch

from marglik import Posterior, maximize_evidence
from tests import oracles
from tests.marglik.posteriors import DELTAS, data, fitted, network

DELTA = DELTAS.double()


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_the_evidence_is_a_lower_bound_that_is_not_maximised(kfac_approx):
    """Below the evidence of the exact blocks, by Hadamard's inequality."""
    laplace, x = fitted(kfac_approx=kfac_approx, temperature=0.6, corrected=True)
    assert laplace.model.training
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
