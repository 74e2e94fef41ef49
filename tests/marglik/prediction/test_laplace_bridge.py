"""The Laplace bridge against its formulas in loops, Dirichlet samples, and its own inverse."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.testing import assert_close

from tests.marglik.prediction.gaussians import entropy, gaussians, predict


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


def test_bridge_of_two_classes_by_hand():
    f = torch.tensor([[0.7, -0.7]], dtype=torch.float64)
    p = predict(f, torch.tensor([[[0.5, -0.1], [-0.1, 0.5]]]).double(), link="bridge")
    # Variance .5 − .4²/.8 = .3; α = (1 + e^{±1.4}) / 4 / .3, whose ratio is e^{1.4}.
    assert float(p.mean[0, 0]) == pytest.approx(1 / (1 + math.exp(-1.4)))
    alpha = np.array([(1 + math.exp(x)) / 1.2 for x in (1.4, -1.4)])
    share = alpha / alpha.sum()
    aleatoric = special.digamma(alpha.sum() + 1) - share @ special.digamma(alpha + 1)
    assert float(p.aleatoric) == pytest.approx(aleatoric)
    assert float(p.epistemic) == pytest.approx(entropy(share) - aleatoric)


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
