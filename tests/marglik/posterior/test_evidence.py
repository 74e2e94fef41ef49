"""The evidence's gradients, and what it refuses; `test_precision` has its value."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.likelihoods import likelihood_of
from marglik import maximize_evidence
from marglik.posterior.evidence import EvidenceTerms
from marglik.posterior.posterior import Posterior
from tests import oracles
from tests.marglik.posteriors import DELTAS, data, fitted, network


def small_terms(likelihood="regression"):
    generator = torch.Generator().manual_seed(0)
    eigenvalues = [torch.rand(n, dtype=torch.float64, generator=generator) * 9 for n in (3, 1, 5)]
    eigenvalues[0][0] = 0.0
    norms = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    spectra = Spectra.of(KroneckerBlock(f"{v}", torch.diag(v)) for v in eigenvalues)
    tensors, names = torch.arange(len(norms)), ["a", "b", "c"]
    return EvidenceTerms(spectra, norms, tensors, 4.2, 10, likelihood_of(likelihood), names)


def test_gradients_in_all_hyperparameters():
    terms = small_terms()
    values = [
        torch.tensor([0.3, 2.0, 5.0]).double().requires_grad_(),
        torch.tensor(0.8).double().requires_grad_(),
        torch.tensor(1.7).double().requires_grad_(),
    ]
    assert gradcheck(terms.log_marginal_likelihood, values)
    # What Adam steps along is the same, by a formula.
    for likelihood in ("regression", "classification"):
        terms = small_terms(likelihood)
        evidence = terms.log_marginal_likelihood(*values)
        in_delta, in_sigma = torch.autograd.grad(evidence, values[:2])
        delta, sigma, T = (value.detach() for value in values)
        expected = in_delta * delta, in_sigma * sigma
        assert_close(terms.gradient(delta, sigma, T), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": torch.ones(3)}, "shape \\(3,\\). Pass a scalar or \\(2,\\)"),
        ({"prior_precision": torch.ones(2, 1)}, "shape \\(2, 1\\)"),
        ({"prior_precision": -1.0}, "must be positive, not -1.0"),
        ({"sigma_noise": 0.0}, "sigma_noise must be positive"),
        ({"sigma_noise": math.nan}, "sigma_noise .*, not nan"),
        ({"temperature": -2.0}, "temperature must be positive"),
        ({"likelihood": "gamma"}, "'gamma' is not supported"),
        (
            {"likelihood": "classification", "sigma_noise": 0.5},
            "[Oo]nly regression supports a noise",
        ),
    ],
)
def test_wrong_hyperparameters(options, message):
    """When a posterior is made, and when they are set; a name becomes a likelihood there, too."""
    with pytest.raises(ValueError, match=message):
        Posterior(nn.Linear(2, 3), **{"likelihood": "regression"} | options)
    posterior = Posterior(nn.Linear(2, 3), "regression")
    with pytest.raises(ValueError, match=message):
        for name, value in options.items():
            setattr(posterior, name, value)


def test_a_fit_keeps_its_likelihood():
    model, data = nn.Linear(2, 3), [(torch.ones(4, 2), torch.zeros(4).long())]
    posterior = Posterior(model, "regression")
    posterior.likelihood = "classification"  # before the fit
    posterior.fit(data)
    with pytest.raises(ValueError, match="fitted with .*'classification'.* Fit another posterior"):
        posterior.likelihood = "bernoulli"
    with pytest.raises(ValueError, match="curvature belongs to likelihood 'classification'"):
        Posterior(model, "regression").restore(posterior.factors)


def test_an_evidence_that_is_not_finite_names_the_tensor():
    terms = replace(small_terms(), tensors=torch.tensor([2, 0, 1]))
    terms.squared_norms[1] = torch.inf
    with pytest.raises(FloatingPointError, match="block of 'a' has eigenvalues up to"):
        terms.log_marginal_likelihood(torch.ones(3).double(), torch.ones(()))


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_the_evidence_is_a_lower_bound_that_is_not_maximised(kfac_approx):
    """Below the evidence of the exact blocks, by Hadamard's inequality."""
    laplace, x = fitted(kfac_approx=kfac_approx, temperature=0.6, corrected=True)
    assert laplace.model.training
    exact = oracles.dense_ggn_blocks(laplace.model.eval(), x, "classification").values()
    log_det_ratio = sum(
        torch.logdet(H / laplace.temperature / d + torch.eye(len(H)).double())
        for H, d in zip(exact, DELTAS.double(), strict=True)
    )
    scatter = sum(
        d * p.square().sum() for p, d in zip(laplace.model.parameters(), DELTAS, strict=True)
    )
    log_p = laplace.evidence_terms.log_likelihood(temperature=laplace.temperature)
    dense = log_p - 0.5 * (log_det_ratio + scatter)
    assert laplace.log_marginal_likelihood() < dense - 1e-6
    with pytest.raises(ValueError, match="lower bound.*corrected=False"):
        maximize_evidence(laplace)
    assert torch.equal(laplace.prior_precision, DELTAS.to(laplace.prior_precision))


def test_what_corrected_eigenvalues_cannot_be_fitted_to():
    model, batch = network(), data()
    posterior = Posterior(model, "classification")
    with pytest.raises(TypeError, match="read only once.*DataLoader or a list"):
        posterior.fit(iter([batch]), corrected=True)
    assert posterior.factors is None
    posterior.fit([batch], override=False, corrected=True)  # nothing was there
    with pytest.raises(ValueError, match="override=False adds data"):
        posterior.fit([batch], override=False, corrected=True)
