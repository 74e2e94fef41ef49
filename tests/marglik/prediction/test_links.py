"""Predictions of Gaussian outputs against integration, sampling, and formulas in loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import linalg, special, stats
from torch.testing import assert_close

from kfac_backend.likelihoods import Classification
from marglik.prediction.links import Calibration, deviations, predict_from_outputs
from tests.marglik.prediction.gaussians import gaussians, predict


def entropy(p):
    return float(special.entr(np.asarray(p)).sum(-1).mean())


def binary_entropy(f):
    return special.entr(special.expit(f)) + special.entr(special.expit(-f))


def expectation(function, mean, std):
    """E function(f) of f ~ N(mean, std²), by sums, which converge exponentially for these."""
    f, step = np.linspace(mean - 10 * std, mean + 10 * std, 10_001, retstep=True)
    return float((function(f) * stats.norm(mean, std).pdf(f)).sum() * step)


def test_mc_and_probit_by_loops():
    f, covariance = gaussians(4)
    noise = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p, probit = (predict(f, covariance, link=link, samples=7) for link in ("mc", "probit"))
    for n in range(len(f)):
        root = linalg.cholesky(covariance[n].numpy(), lower=True)
        sampled = [special.softmax(f[n].numpy() + root @ z) for z in noise.numpy()]
        assert_close(p.mean[n], torch.tensor(np.mean(sampled, axis=0)))
        assert float(p.aleatoric[n]) == pytest.approx(entropy(sampled))
        scaled = f[n].numpy() / np.sqrt(1 + math.pi / 8 * np.diag(covariance[n]))
        assert_close(probit.mean[n], torch.tensor(special.softmax(scaled)))
    assert_close((probit.aleatoric, probit.epistemic), (p.aleatoric, p.epistemic))
    assert_close(p.total_uncertainty, p.entropy)
    assert (probit.total_uncertainty - probit.entropy).abs().max() > 1e-3  # as is said there


def test_mc_does_not_turn_with_rounding():
    """The eigenvectors of equal eigenvalues are arbitrary, and so must not decide."""
    f, _ = gaussians(10, n=30)
    covariance = 4 * torch.eye(10, dtype=torch.float64).expand(30, -1, -1)
    rounding = torch.randn(30, 10, 10, dtype=torch.float64) * 1e-15
    other = predict(f, covariance + rounding + rounding.mT)
    assert_close(other.mean, predict(f, covariance).mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 20, 40])
def test_deviations_have_the_covariance_that_is_given(rank, dtype):
    """L z of the unit vectors z are the columns of L; also of covariances that are singular."""
    factor = torch.randn(5, 40, rank, generator=torch.Generator().manual_seed(0)).to(dtype)
    covariance = factor @ factor.mT / 40
    covariance[0] = torch.diag(torch.linspace(-1e-3, 1, 40))  # rounded more than by rounding
    columns, _ = deviations(covariance, Classification(), torch.eye(40, dtype=dtype))
    found = torch.einsum("snc,snd->ncd", columns, columns)
    expected = covariance.clone()
    expected[0].clamp_(min=0)
    assert_close(found, expected, rtol=0, atol=200 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("std", "largest"), [(0.0, 1e-15), (1.0, 1e-14), (3.0, 2e-7), (5.0, 6e-5), (10.0, 4e-3)]
)
def test_quadrature_is_as_exact_as_stated(std, largest):
    means = torch.cat([torch.linspace(-4, 4, 9), torch.linspace(0, 3 * std, 7)]).double()
    variance = torch.full((len(means), 1, 1), std**2).double()
    p, probit = (predict(means[:, None], variance, "bernoulli", link) for link in ("mc", "probit"))
    scaled = special.expit(means / math.sqrt(1 + math.pi / 8 * std**2))
    assert_close(probit.mean[:, 0], scaled)
    assert_close((probit.aleatoric, probit.epistemic), (p.aleatoric, p.epistemic))
    exact = [
        [expectation(g, m, std) if std else g(m) for g in (special.expit, binary_entropy)]
        for m in means.tolist()
    ]
    mean, aleatoric = torch.tensor(exact, dtype=torch.float64).T
    error = float((p.mean[:, 0] - mean).abs().max())
    assert error < largest
    assert float((p.aleatoric[:, 0] - aleatoric).abs().max()) < max(4 * largest, 1e-13)
    if std >= 3:  # the numbers stated are not far too large either
        assert error > largest / 10


def test_regression_has_variances():
    f, covariance = gaussians(3)
    sigma = torch.tensor([0.5, 1.0, 2.0]).double()
    for noise in (0.5, sigma):
        p = predict(f, covariance, "regression", "probit", sigma_noise=noise)
        assert_close(p.mean, f)
        assert_close(p.epistemic, covariance.diagonal(dim1=1, dim2=2))
        assert_close(p.aleatoric, torch.as_tensor(noise).double().square().expand(4, 3))


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli", "regression"])
def test_networks_by_loops(likelihood):
    outputs = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    p = predict_from_outputs(outputs, likelihood, sigma_noise=0.3)
    for n in range(3):
        rows = outputs[:, n].numpy()  # (S, C)
        if likelihood == "classification":
            sampled = [special.softmax(row) for row in rows]
            mean, aleatoric = np.mean(sampled, axis=0), entropy(sampled)
            epistemic = entropy(mean) - aleatoric
        elif likelihood == "bernoulli":
            mean, aleatoric = special.expit(rows).mean(0), binary_entropy(rows).mean(0)
            epistemic = binary_entropy(special.logit(mean)) - aleatoric
        else:
            mean, aleatoric = rows.mean(0), np.full(4, 0.09)
            epistemic = (rows**2).mean(0) - mean**2
        assert p.mean[n].numpy() == pytest.approx(mean)
        assert p.aleatoric[n].numpy() == pytest.approx(aleatoric)
        assert p.epistemic[n].numpy() == pytest.approx(epistemic)


LINKS = [*itertools.product(["classification", "bernoulli"], ["probit", "mc"])]


def test_calibrated_outputs_are_those_of_the_formula():
    """One output: ∫ σ((f + √s √v z)/τ) φ(z) dz, by sums."""
    f, v, s, tau = 1.3, 2.0, 0.4, 0.6
    mean, variance = torch.tensor([[f]]).double(), torch.tensor([[[v]]]).double()
    found = predict(mean, variance, "bernoulli", calibration=Calibration(s, tau))
    expected = expectation(special.expit, f / tau, math.sqrt(s * v) / tau)
    assert found.mean.item() == pytest.approx(expected, rel=1e-5)
    assert predict(mean, variance, "bernoulli").mean.item() != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("variance", [0.0, 1e6])
@pytest.mark.parametrize(("likelihood", "link"), LINKS)
def test_extreme_outputs_and_singular_covariances_stay_finite(likelihood, link, variance):
    dtype = torch.float32
    rows = [[1e3, -1e3, 0.0], [1e3, 999.0, -1e3], [0.0, 0.0, 0.0], [-1e3, -1e3, -1e3]]
    f = torch.tensor(rows, dtype=dtype)
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    for covariance in (torch.eye(3, dtype=dtype), torch.outer(direction, direction)):
        p = predict(f, variance * covariance.expand(4, 3, 3), likelihood, link)
        assert p.mean.dtype == dtype
        for values in (p.mean, p.aleatoric, p.epistemic, p.entropy):
            assert torch.isfinite(values).all() and (values >= 0).all()
        if likelihood == "classification":
            assert_close(p.mean.sum(1), torch.ones(4, dtype=dtype))


def test_wrong_options():
    f, covariance = gaussians(3)
    with pytest.raises(ValueError, match="link='bridge' is not supported; choose one of 'probit'"):
        predict(f, covariance, link="bridge")
    variance = covariance.diagonal(dim1=1, dim2=2)
    with pytest.raises(ValueError, match=r"needs the covariances .* not the variances \(4, 3\)"):
        predict(f, variance)
