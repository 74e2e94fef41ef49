"""The moving averages of training as the factors of a data set: those of a pass, at rest."""

import pytest
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from tests.kfac_backend.networks import data as image_data
from tests.kfac_backend.networks import network as image_network


def test_factors_of_all_layers_of_a_network():
    """Convolutions, groups, norms, scales: those of a pass, over three batches of equal ones."""
    model, (x, y) = image_network(), image_data()
    optimizer = KFAC(
        model,
        "classification",
        lr=0.0,
        curvature=CurvatureOptions(),
        options=PreconditionerOptions(factor_every=1, update_every=1),
    )
    with pytest.raises(RuntimeError, match="no factors before the first step"):
        optimizer.preconditioner.factors(len(x), 0.0)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    expected = kronecker_factors(model, [(x, y)] * 5, "classification", CurvatureOptions())
    found = optimizer.preconditioner.factors(5 * len(x), expected.loss)
    assert list(found.blocks) == list(expected.blocks)
    assert (found.num_data, found.num_loss_terms) == (expected.num_data, expected.num_loss_terms)
    for name in expected.blocks:
        assert_close(found.to_dense(name), expected.to_dense(name), rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match="needs num_terms"):
        _ = found + found
