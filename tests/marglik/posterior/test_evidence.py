"""The evidence against dense log determinants and an exact Gaussian density, to 1e-8."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.layers import Bias, Scale
from kfac_backend.likelihoods import likelihood_of
from marglik.posterior.evidence import (
    EvidenceTerms,
    effective_parameters,
    log_marginal_likelihood,
)
from tests import oracles
from tests.evidence_oracles import bayesian_linear_regression_log_evidence, laplace_log_evidence
from tests.uses import kfac_blocks

EXACT = {"rtol": 0.0, "atol": 1e-8}


def fixup_network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False), Bias(), nn.ReLU(), Bias(),
        nn.Conv2d(3, 4, 3, stride=2, bias=False), Scale(), Bias(), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.double()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def dense_curvature(model, x, likelihood, kfac_approx):
    """K-FAC blocks of weights and biases, exact entries of scalars, in the order of parameters."""
    kfac = kfac_blocks(model, x, likelihood, kfac_approx)
    exact = oracles.dense_ggn_blocks(model, x, likelihood)
    return torch.block_diag(*(kfac.get(name, exact[name]) for name in exact))


@pytest.mark.parametrize(
    ("likelihood", "kfac_approx", "temperature"),
    [
        ("classification", "expand", 1.0),
        ("classification", "reduce", 0.4),
        ("regression", "expand", 0.4),
        ("bernoulli", "reduce", 1.0),
    ],
)
def test_fixup_network_equals_brute_force(likelihood, kfac_approx, temperature):
    model = fixup_network()
    x = torch.randn(5, 2, 5, 6, dtype=torch.float64)
    f = model(x).detach()
    y = (
        torch.tensor([0, 1, 2, 1, 0])
        if likelihood == "classification"
        else torch.rand(5, 3).double()
    )
    sigma = 0.3 if likelihood == "regression" else 1.0
    factors = kronecker_factors(
        model, [(x[:2], y[:2]), (x[2:], y[2:])], likelihood, kfac_approx=kfac_approx
    )
    terms = EvidenceTerms.from_factors(factors, flat(model))
    deltas = torch.rand(len(factors), dtype=torch.float64) + 0.1

    if likelihood == "classification":
        expected_likelihood = torch.distributions.Categorical(logits=f).log_prob(y).sum()
    elif likelihood == "regression":
        expected_likelihood = torch.distributions.Normal(f, sigma).log_prob(y).sum()
    else:
        p = torch.sigmoid(f)
        expected_likelihood = (y * p.log() + (1 - y) * (1 - p).log()).sum()
    H = dense_curvature(model, x, likelihood, kfac_approx) / sigma**2
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    expected = laplace_log_evidence(
        expected_likelihood, flat(model), H, deltas.repeat_interleave(sizes), temperature
    )
    assert float(log_marginal_likelihood(terms, deltas, sigma, temperature)) == pytest.approx(
        expected, rel=0, abs=1e-8
    )
    found = terms.log_likelihood(sigma, temperature)
    assert_close(found, expected_likelihood / temperature, **EXACT)
    gamma = effective_parameters(terms, deltas, sigma, temperature)
    P0 = torch.diag(deltas.repeat_interleave(sizes))
    H = H / temperature
    diagonal = (H @ torch.linalg.inv(H + P0)).diagonal()
    assert_close(gamma, torch.stack([part.sum() for part in diagonal.split(sizes.tolist())]))
    # Negative control: the other mode has another evidence.
    other = {"expand": "reduce", "reduce": "expand"}[kfac_approx]
    terms = EvidenceTerms.from_factors(
        kronecker_factors(model, [(x, y)], likelihood, kfac_approx=other), flat(model)
    )
    assert abs(float(log_marginal_likelihood(terms, deltas, sigma, temperature)) - expected) > 0.1


@pytest.mark.parametrize("outputs", [1, 2])
def test_bayesian_linear_regression_is_exact(outputs):
    torch.manual_seed(0)
    N, D, sigma, delta = 12, 4, 0.7, 1.3
    Phi, y = torch.randn(N, D).double(), torch.randn(N, outputs).double()
    model = nn.Linear(D, outputs, bias=False).double()
    precision = Phi.T @ Phi / sigma**2 + delta * torch.eye(D).double()
    with torch.no_grad():  # the posterior mode
        model.weight.copy_(torch.linalg.solve(precision, Phi.T @ y / sigma**2).T)
    expected = bayesian_linear_regression_log_evidence(
        Phi, y, torch.full((D,), delta, dtype=torch.float64), sigma
    )

    def evidence():
        factors = kronecker_factors(model, [(Phi, y)], "regression")
        terms = EvidenceTerms.from_factors(factors, flat(model))
        return float(log_marginal_likelihood(terms, delta, sigma))

    assert evidence() == pytest.approx(expected, rel=0, abs=1e-8)
    # Negative control: away from the mode it is not.
    with torch.no_grad():
        model.weight.mul_(1.1)
    assert abs(evidence() - expected) > 1e-3


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
