"""The evidence's gradients, and what it refuses; `test_precision` has its value."""

import pytest
import torch
from torch.autograd import gradcheck

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.likelihoods import likelihood_of
from marglik.posterior.evidence import EvidenceTerms, log_marginal_likelihood


def small_terms(likelihood="regression"):
    generator = torch.Generator().manual_seed(0)
    eigenvalues = [torch.rand(n, dtype=torch.float64, generator=generator) * 9 for n in (3, 1, 5)]
    eigenvalues[0][0] = 0.0
    norms = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    sizes = torch.tensor([3.0, 1.0, 5.0], dtype=torch.float64)
    spectra = Spectra.of(KroneckerBlock(f"{v}", torch.diag(v)) for v in eigenvalues)
    return EvidenceTerms(spectra, sizes, norms, 4.2, 10, likelihood_of(likelihood))


def test_gradients_in_all_hyperparameters():
    terms = small_terms()
    values = [
        torch.tensor([0.3, 2.0, 5.0]).double().requires_grad_(),
        torch.tensor(0.8).double().requires_grad_(),
        torch.tensor(1.7).double().requires_grad_(),
    ]
    assert gradcheck(lambda *h: log_marginal_likelihood(terms, *h), values)
    scalar = torch.tensor(0.6).double().requires_grad_()
    assert gradcheck(lambda delta: log_marginal_likelihood(terms, delta), scalar)


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ((torch.ones(2),), "shape \\(2,\\); expected a scalar or \\(3,\\)"),
        ((torch.ones(3, 1),), "shape \\(3, 1\\)"),
        ((-1.0,), "must be positive, not -1.0"),
        ((1.0, 0.0), "sigma_noise must be positive"),
        ((1.0, 1.0, -2.0), "temperature must be positive"),
    ],
)
def test_wrong_hyperparameters(hyperparameters, message):
    with pytest.raises(ValueError, match=message):
        log_marginal_likelihood(small_terms(), *hyperparameters)
    with pytest.raises(ValueError, match="only regression has noise"):
        log_marginal_likelihood(small_terms("classification"), 1.0, 0.5)


def test_an_evidence_that_is_not_finite_names_the_block():
    terms = small_terms()
    terms.squared_norms[1] = torch.inf
    with pytest.raises(FloatingPointError, match="block 1 has eigenvalues up to"):
        log_marginal_likelihood(terms, 1.0)
