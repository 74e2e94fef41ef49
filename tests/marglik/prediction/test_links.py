"""Predictions of Gaussian outputs against integration, sampling, and formulas in loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, linalg, special, stats
from torch.testing import assert_close

from marglik.prediction.links import Prediction, predict_from_outputs
from tests.marglik.prediction.gaussians import entropy, gaussians, predict


def binary_entropy(f):
    return special.entr(special.expit(f)) + special.entr(special.expit(-f))


def expectation(function, mean, std):
    """E function(f) of f ~ N(mean, std²), by adaptive integration around the function's bend."""
    density = stats.norm(mean, std).pdf
    bend = np.clip(0, mean - 9 * std, mean + 9 * std)
    pieces = sorted({mean - 10 * std, bend - 5, bend, bend + 5, mean + 10 * std})
    parts = [
        integrate.quad(lambda f: function(f) * density(f), a, b, epsabs=1e-13, epsrel=1e-12)
        for a, b in itertools.pairwise(np.clip(pieces, mean - 10 * std, mean + 10 * std))
    ]
    return sum(value for value, _ in parts)


def by_cubature(f, covariance, degree=40):
    """Mean probabilities and mean entropy of softmax(N(f, covariance)), on a grid of nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(degree)
    z = np.stack(np.meshgrid(*[nodes] * len(f), indexing="ij"), -1).reshape(-1, len(f))
    w = np.prod(np.meshgrid(*[weights / weights.sum()] * len(f), indexing="ij"), axis=0).ravel()
    p = special.softmax(f.numpy() + z @ np.linalg.cholesky(covariance.numpy()).T, axis=1)
    return w @ p, w @ special.entr(p).sum(1)


@pytest.mark.parametrize("C", [2, 3])
def test_many_samples_approach_the_integral(C):
    f, covariance = gaussians(C)
    p = predict(f, covariance, samples=200_000)
    for n in range(len(f)):
        mean, aleatoric = by_cubature(f[n], covariance[n])
        assert np.abs(p.mean[n].numpy() - mean).max() < 4e-3
        assert abs(float(p.aleatoric[n]) - aleatoric) < 4e-3
        assert abs(float(p.epistemic[n]) - (entropy(mean) - aleatoric)) < 6e-3
    # Negative control: outputs without their correlations.
    apart = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    assert (predict(f, apart, samples=200_000).mean - p.mean).abs().max() > 0.02


def test_mc_averages_samples_along_the_symmetric_root():
    f, covariance = gaussians(4)
    noise = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = predict(f, covariance, samples=7)
    for n in range(len(f)):
        root = linalg.sqrtm(covariance[n].numpy())
        sampled = [special.softmax(f[n].numpy() + root @ z) for z in noise.numpy()]
        assert_close(p.mean[n], torch.tensor(np.mean(sampled, axis=0)))
        assert float(p.aleatoric[n]) == pytest.approx(entropy(sampled))


def test_mc_does_not_turn_with_rounding():
    """The eigenvectors of equal eigenvalues are arbitrary, and so must not decide."""
    f, _ = gaussians(10, n=30)
    covariance = 4 * torch.eye(10, dtype=torch.float64).expand(30, -1, -1)
    rounding = torch.randn(30, 10, 10, dtype=torch.float64) * 1e-15
    other = predict(f, covariance + rounding + rounding.mT)
    assert_close(other.mean, predict(f, covariance).mean, rtol=1e-9, atol=1e-12)


def test_probit_by_loops():
    f, covariance = gaussians(3)
    p = predict(f, covariance, link="probit")
    for n in range(len(f)):
        scaled = [
            float(f[n, c]) / math.sqrt(1 + math.pi / 8 * float(covariance[n, c, c]))
            for c in range(3)
        ]
        total = sum(math.exp(s) for s in scaled)
        assert p.mean[n].tolist() == pytest.approx([math.exp(s) / total for s in scaled])
    sampled = predict(f, covariance)
    assert_close((p.aleatoric, p.epistemic), (sampled.aleatoric, sampled.epistemic))
    assert (p.total - p.entropy).abs().max() > 1e-3  # as is said there


@pytest.mark.parametrize(
    ("std", "largest"), [(0.0, 1e-15), (1.0, 1e-14), (3.0, 2e-7), (5.0, 6e-5), (10.0, 4e-3)]
)
def test_quadrature_is_as_exact_as_stated(std, largest):
    means = torch.cat([torch.linspace(-4, 4, 9), torch.linspace(0, 3 * std, 7)]).double()
    p = predict(means[:, None], torch.full((len(means), 1, 1), std**2).double(), "bernoulli")
    if std == 0:
        exact = [(special.expit(m), binary_entropy(m)) for m in means.tolist()]
    else:
        exact = [
            [expectation(g, m, std) for g in (special.expit, binary_entropy)]
            for m in means.tolist()
        ]
    mean, aleatoric = torch.tensor(exact, dtype=torch.float64).T
    error = float((p.mean[:, 0] - mean).abs().max())
    assert error < largest
    assert float((p.aleatoric[:, 0] - aleatoric).abs().max()) < max(4 * largest, 1e-13)
    if std >= 3:  # the numbers stated are not far too large either
        assert error > largest / 10


def test_bernoulli_outputs_are_predicted_one_by_one():
    f, covariance = gaussians(3)
    p, probit = (predict(f, covariance, "bernoulli", link) for link in ("mc", "probit"))
    assert p.mean.shape == p.aleatoric.shape == p.epistemic.shape == f.shape
    for n, c in itertools.product(range(len(f)), range(3)):
        mean, variance = float(f[n, c]), float(covariance[n, c, c])
        assert float(p.mean[n, c]) == pytest.approx(
            expectation(special.expit, mean, math.sqrt(variance)), abs=1e-6
        )
        assert float(probit.mean[n, c]) == pytest.approx(
            special.expit(mean / math.sqrt(1 + math.pi / 8 * variance))
        )
    assert_close((probit.aleatoric, probit.epistemic), (p.aleatoric, p.epistemic))
    assert 1e-4 < (probit.mean - p.mean).abs().max() < 0.03


def test_regression_has_variances():
    f, covariance = gaussians(3)
    sigma = torch.tensor([0.5, 1.0, 2.0]).double()
    for noise in (0.5, torch.tensor(0.5), torch.tensor([0.5]), sigma):
        p = predict(f, covariance, "regression", "probit", sigma_noise=noise)
        assert_close(p.mean, f)
        assert_close(p.epistemic, covariance.diagonal(dim1=1, dim2=2))
        expected = torch.as_tensor(noise).double().square().expand(4, 3)
        assert_close(p.aleatoric, expected)
        assert_close(p.total, expected + p.epistemic)


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
    one = predict_from_outputs(outputs[:1], likelihood)
    assert one.epistemic.abs().max() < 1e-15
    if likelihood != "regression":
        assert_close(one.aleatoric, one.entropy)


@pytest.mark.parametrize(
    ("likelihood", "link"),
    [("classification", "mc"), ("classification", "bridge"), ("bernoulli", "mc")],
)
def test_parts_sum_to_the_entropy(likelihood, link):
    f, covariance = gaussians(3, n=50)
    p = predict(f, covariance, likelihood, link)
    assert_close(p.total, p.entropy)
    assert (p.aleatoric > 0).all() and (p.epistemic > 0).all()


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli"])
@pytest.mark.parametrize("link", ["probit", "mc"])
def test_without_covariance_it_is_the_map(likelihood, link):
    f, covariance = gaussians(3)
    p = predict(f, 0 * covariance, likelihood, link)
    expected = predict_from_outputs(f[None], likelihood)
    assert_close(p.mean, expected.mean)
    assert_close(p.aleatoric, expected.aleatoric)
    assert p.epistemic.abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize(
    ("likelihood", "link"),
    [*itertools.product(["classification", "bernoulli"], ["probit", "mc"])]
    + [("classification", "bridge")],
)  # fmt: skip
def test_extreme_outputs_and_singular_covariances_stay_finite(likelihood, link, variance, dtype):
    rows = [[1e3, -1e3, 0.0], [1e3, 999.0, -1e3], [0.0, 0.0, 0.0], [-1e3, -1e3, -1e3]]
    f = torch.tensor(rows, dtype=dtype)
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    whole, rank_one = torch.eye(3, dtype=dtype), torch.outer(direction, direction)
    for covariance in (whole, rank_one, torch.ones(3, 3, dtype=dtype), whole - 1 / 3):
        p = predict(f, variance * covariance.expand(4, 3, 3), likelihood, link)
        assert p.mean.dtype == dtype
        for values in (p.mean, p.aleatoric, p.epistemic, p.entropy):
            assert torch.isfinite(values).all() and (values >= 0).all()
        if likelihood == "classification":
            assert_close(p.mean.sum(1), torch.ones(4, dtype=dtype))
            if link != "probit":
                assert_close(p.total, p.entropy, rtol=1e-4, atol=1e-5)


def test_predictions_are_joined_and_moved():
    f, covariance = gaussians(3)
    whole = predict(f, covariance)
    parts = [predict(f[part], covariance[part]) for part in (slice(1), slice(1, 4))]
    joined = Prediction.cat(parts)
    for name in ("mean", "aleatoric", "epistemic"):
        assert_close(getattr(joined, name), getattr(whole, name))
    assert whole.to("meta").epistemic.device.type == "meta"
    shown = f"Prediction(mean: {tuple(f.shape)}, aleatoric: ({len(f)},), epistemic: ({len(f)},))"
    assert repr(whole) == shown


def test_wrong_options():
    f, covariance = gaussians(3)
    with pytest.raises(ValueError, match="'bridge' is for classification, not 'bernoulli'; choose"):
        predict(f, covariance, "bernoulli", "bridge")
    with pytest.raises(ValueError, match="link='linearized' is not supported; choose one of 'prob"):
        predict(f, covariance, link="linearized")
    with pytest.raises(ValueError, match="likelihood='poisson' is not supported"):
        predict(f, covariance, "poisson")
    with pytest.raises(ValueError, match="likelihood='poisson' is not supported"):
        predict_from_outputs(f[None], "poisson")


def bridge_by_loops(f, S):
    """Zero-sum correction, then α_k = (1 − 2/C + e^{m_k}/C² Σ_j e^{−m_j}) / v_k."""
    C = len(f)
    rows = [sum(S[i][j] for j in range(C)) for i in range(C)]
    m = [f[i] - rows[i] * sum(f) / sum(rows) for i in range(C)]
    v = [S[i][i] - rows[i] ** 2 / sum(rows) for i in range(C)]
    inverse = sum(math.exp(-x) for x in m)
    return np.array([(1 - 2 / C + math.exp(m[k]) / C**2 * inverse) / v[k] for k in range(C)])


@pytest.mark.parametrize("C", [2, 3, 6])
def test_bridge_by_loops_and_dirichlet_samples(C):
    f, covariance = gaussians(C)
    p = predict(f, covariance, link="bridge")
    errors_of_doubled = []  # negative control: a Dirichlet of the same mean
    for n in range(len(f)):
        alpha = bridge_by_loops(f[n].tolist(), covariance[n].tolist())
        assert p.mean[n].tolist() == pytest.approx(alpha / alpha.sum())
        samples = stats.dirichlet(alpha).rvs(100_000, random_state=n)
        assert abs(float(p.aleatoric[n]) - entropy(samples)) < 5e-3
        doubled = stats.dirichlet(2 * alpha).rvs(100_000, random_state=n)
        errors_of_doubled.append(abs(float(p.aleatoric[n]) - entropy(doubled)))
    assert max(errors_of_doubled) > 0.02


def laplace_of_dirichlet(alpha):
    """Mean and covariance of its Laplace approximation in logits (MacKay 1998)."""
    C, inverse = len(alpha), 1 / alpha
    mean = np.log(alpha) - np.log(alpha).mean()
    covariance = np.diag(inverse) - (inverse[:, None] + inverse - inverse.mean()) / C
    return torch.tensor(mean)[None], torch.tensor(covariance)[None]


@pytest.mark.parametrize("alpha", [[2.0, 3.0, 0.5], [40.0, 0.1], [1.0, 5.0, 20.0, 300.0]])
def test_bridge_gives_back_a_dirichlet(alpha):
    """Its Gaussian has a certain sum, which must not be divided by; nor does another one matter."""
    alpha = np.array(alpha)
    f, covariance = laplace_of_dirichlet(alpha)
    assert abs(float(covariance.sum())) < 1e-12
    share = alpha / alpha.sum()
    aleatoric = special.digamma(alpha.sum() + 1) - share @ special.digamma(alpha + 1)
    for same in ((f, covariance), (f + 3.0, covariance), (f, covariance + 5.0)):
        p = predict(*same, link="bridge")
        assert p.mean[0].tolist() == pytest.approx(share)
        assert float(p.aleatoric) == pytest.approx(aleatoric)


@pytest.mark.parametrize("C", [2, 3])
def test_bridge_without_covariance_is_its_own_limit(C):
    """Which is the MAP for two classes only."""
    f, covariance = gaussians(C)
    p = predict(f, 0 * covariance, link="bridge")
    limit = predict(f, 1e-13 * torch.eye(C).double().expand(4, C, C), link="bridge")
    assert_close(p.mean, limit.mean)
    assert_close(p.aleatoric, p.entropy)
    assert_close(predict(f, torch.ones(4, C, C).double(), link="bridge").mean, limit.mean)
    difference = (p.mean - torch.softmax(f, -1)).abs().max()
    assert difference < 1e-12 if C == 2 else difference > 0.1
