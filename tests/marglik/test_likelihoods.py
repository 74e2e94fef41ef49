"""Each likelihood from the fit to the metrics: evidence and predictive by brute force, float64.

A linear layer whose inputs are all one vector, so that B ⊗ A is exact: H = Σ_n Λ_n ⊗ x xᵀ.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.testing import assert_close

from kfac_backend.likelihoods import likelihood_of
from marglik import (
    Laplace,
    Posterior,
    Prediction,
    PredictiveConfig,
    PriorLearner,
    calibrate,
    compute_metrics,
    laplace_predictive,
    load_posterior,
    map_predictive,
    predict_all,
    save_posterior,
)
from tests.marglik.plain_loop import learn

N, D, DELTA = 40, 3, 2.0


def _targets(text, C):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(N, C, generator=generator, dtype=torch.float64)
    counts = torch.poisson(z.exp(), generator=generator)
    return {
        "heteroscedastic": z[:, : C // 2],
        "known_noise": torch.cat([z, z.abs() + 0.2], 1),
        "poisson": counts,
        "negative_binomial(r=2.0)": counts,
        "weibull(shape=1.5)": torch.cat([z.exp(), (z < 0.5).double()], 1),
        "weighted(of='poisson')": torch.cat([counts, z.square()], 1),
        "weighted(of='classification')": torch.stack([torch.arange(N) % 3, z[:, 0].abs()], 1),
        "ordinal(cuts=[-0.5, 0.5])": torch.bucketize(z[:, 0], torch.tensor([-0.5, 0.5]).double()),
        "classification(weights=[0.5, 2.0, 1.0])": torch.arange(N) % 3,
        "noisy_classification(noise=0.3)": torch.arange(N) % 3,
    }.get(text, z)


# Text -> number of outputs.
CASES = {
    "regression_per_output(noise=[0.5, 2.0])": 2,
    "heteroscedastic": 2,
    "poisson": 2,
    "negative_binomial(r=2.0)": 1,
    "student_t(df=4.0, scale=0.8)": 2,
    "known_noise": 1,
    "ordinal(cuts=[-0.5, 0.5])": 1,
    "classification(weights=[0.5, 2.0, 1.0])": 3,
    "noisy_classification(noise=0.3)": 3,
    "weibull(shape=1.5)": 1,
    "weighted(of='poisson')": 1,
    "weighted(of='classification')": 3,
}


def case(text, at_map=False):
    """A fitted posterior, its data, and H; at parameters drawn at random, or the MAP."""
    C, likelihood = CASES[text], likelihood_of(text)
    torch.manual_seed(0)
    model = nn.Linear(D, C, bias=False).double()
    x, y = torch.tensor([[0.4, -0.3, 0.5]]).double().expand(N, D), _targets(text, C)
    if at_map:
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=200, line_search_fn="strong_wolfe"
        )

        def objective():
            optimizer.zero_grad()
            value = likelihood.loss(model(x), y) + 0.5 * DELTA * model.weight.square().sum()
            value.backward()
            return value

        optimizer.step(objective)
    posterior = Posterior(model, text, prior_precision=DELTA)
    posterior.fit([(x[:15], y[:15]), (x[15:], y[15:])])
    f = model(x).detach()
    lam = sum(s.T @ s for s in likelihood.root(f, y))  # Σ_n Λ_n
    H = torch.kron(lam, torch.outer(x[0], x[0]))
    return posterior, x, y, H


@pytest.mark.parametrize("text", CASES)
def test_evidence_and_noise_are_near_those_of_the_exact_posterior(text):
    """By importance sampling at the MAP, with draws from a wider Gaussian than the posterior."""
    posterior, x, y, H = case(text, at_map=True)
    likelihood, P = likelihood_of(text), len(H)
    covariance = 1.5 * torch.linalg.inv(H + DELTA * torch.eye(P).double())
    proposal = torch.distributions.MultivariateNormal(posterior.mean, covariance)
    torch.manual_seed(0)
    thetas = proposal.sample((20_000,))
    f = torch.einsum("scd,nd->snc", thetas.view(len(thetas), -1, D), x)
    losses = likelihood.losses(f, y.expand(len(f), *y.shape)).sum((1, 2))
    if likelihood.has_sigma:
        losses = losses + 0.5 * y.numel() * math.log(2 * math.pi)
    prior = 0.5 * P * math.log(DELTA / (2 * math.pi)) - 0.5 * DELTA * thetas.square().sum(1)
    log_w = prior - losses - proposal.log_prob(thetas)
    exact = float(log_w.logsumexp(0)) - math.log(len(log_w))
    found = float(posterior.log_marginal_likelihood())
    assert abs(found - exact) < 0.1
    plain = float(posterior.evidence_terms.log_likelihood(posterior.sigma_noise))
    assert abs(plain - exact) > 0.3  # negative control: the evidence is not the fit
    if likelihood.kind == "continuous":
        w = log_w.softmax(0)[:, None]
        one = torch.ones(()).double()
        mean, noise, _ = likelihood.moments(f[:, 0], torch.zeros_like(f[:, 0]), one)
        expected = (w * noise).sum(0), (w * mean.square()).sum(0) - (w * mean).sum(0).square()
        of = laplace_predictive(posterior)(x[:1])
        for a, b in zip((of.aleatoric[0], of.epistemic[0]), expected, strict=True):
            assert_close(a, b, rtol=0.2, atol=1e-9)


@pytest.mark.parametrize("text", CASES)
def test_predictive_is_the_mixture_and_its_metrics_are_those_of_its_density(text, tmp_path):
    posterior, x, y, _ = case(text)
    likelihood = likelihood_of(text)
    config = PredictiveConfig(method="mc", samples=20_000, calibration="none")
    X = 0.5 * torch.randn(6, D, generator=torch.Generator().manual_seed(2)).double()
    found = laplace_predictive(posterior, config, torch.Generator().manual_seed(0))(X)
    # By draws of the parameters, through the linear layer itself.
    thetas = posterior.sample(20_000, torch.Generator().manual_seed(3))
    f = torch.einsum("scd,nd->snc", thetas.view(len(thetas), -1, D), X)
    if likelihood.kind == "classes":
        assert_close(found.mean, likelihood.log_probabilities(f).exp().mean(0), rtol=0, atol=0.01)
    else:
        mean, noise, _ = likelihood.moments(f, torch.zeros_like(f), torch.ones(()))
        scale = (noise.mean(0) + mean.var(0)).sqrt()
        assert ((found.mean - mean.mean(0)).abs() < 0.05 * scale + 0.02).all()
        assert_close(found.aleatoric, noise.mean(0), rtol=0.1, atol=1e-6)
        assert_close(found.epistemic, mean.var(0), rtol=0.35, atol=0.01)
    plain = map_predictive(posterior.model, text)(X)
    assert found.epistemic.max() > 0.01 and not plain.epistemic.any()  # the posterior counts
    # Calibrated, saved and loaded, it predicts; metrics are numbers.
    calibrated = calibrate(posterior, [(x, y)])
    assert calibrated.calibration_fit.nll <= calibrated.calibration_fit.nll_uncalibrated + 1e-6
    save_posterior(posterior, tmp_path)
    again = load_posterior(tmp_path, nn.Linear(D, CASES[text], bias=False).double())
    assert again.likelihood == likelihood
    prediction, targets = predict_all(
        laplace_predictive(again, generator=torch.Generator().manual_seed(0)), [(x, y)]
    )
    assert_close(prediction.mean, calibrated(x).mean)
    metrics = compute_metrics(prediction, targets, text)
    assert all(math.isfinite(value) for _, value in metrics.items())


@pytest.mark.parametrize("text", ["poisson", "student_t(df=4.0, scale=0.8)", "regression"])
def test_coverage_is_that_of_targets_drawn_from_the_prediction(text):
    """Of draws from the negative binomial, Student's t and the Gaussian with these moments.

    Of counts the share of a count's probability that is inside, so that coverage is exact.
    """
    rng = np.random.default_rng(0)
    mean, variance = np.full((20_000, 1), 6.0), np.full((20_000, 1), 15.0)
    of = {
        "poisson": stats.nbinom(6.0**2 / 9, 6 / 15),
        "regression": stats.norm(6, 15**0.5),
        "student_t(df=4.0, scale=0.8)": stats.t(4, 6, (15 / 2) ** 0.5),
    }
    m, v = torch.from_numpy(mean), torch.from_numpy(variance)
    prediction = Prediction(m, 0.6 * v, 0.4 * v)
    for name, drawn in of.items():
        y = torch.from_numpy(drawn.rvs(mean.shape, random_state=rng).astype(float))
        metrics = compute_metrics(prediction, y, text)
        log_p = drawn.logpmf(y) if name == "poisson" else drawn.logpdf(y)
        nll = -float(log_p.mean())
        if name == text:
            assert abs(metrics.coverage90 - 0.9) < 0.01
            assert_close(metrics.nll, nll, rtol=1e-9, atol=1e-9)
        elif text != "poisson":  # negative control: another family's numbers are less likely
            assert metrics.nll > nll + 0.005 or name == "poisson"


def test_coverage_and_scores_know_what_is_censored():
    """Of draws from the prediction, half of them censored at times that do not depend on them."""
    rng, shape = np.random.default_rng(0), (20_000, 1)
    scale = 1 / 1.5
    log_t = stats.gumbel_l(0.3 + 0.5772156649 * scale, scale).rvs(shape, random_state=rng)
    end = rng.normal(0.3, 1, shape)
    seen, event = np.minimum(log_t, end), log_t <= end
    mean, noise = torch.full(shape, 0.3).double(), torch.full(shape, math.pi**2 / 6 * scale**2)
    prediction = Prediction(mean, noise.double(), torch.zeros(shape).double())

    def metrics(event):
        y = torch.from_numpy(np.concatenate([np.exp(seen), event], 1).astype(float))
        return compute_metrics(prediction, y, "weibull(shape=1.5)")

    found, of_events = metrics(event), metrics(np.ones(shape))
    for level in (50, 90, 95):
        assert abs(getattr(found, f"coverage{level}") - level / 100) < 0.015
    assert abs(of_events.coverage50 - 0.5) > 0.05  # negative control
    late = np.where(event, seen - 0.3, np.maximum(seen - 0.3, 0))
    assert_close(found.rmse, float((late**2).mean() ** 0.5))


class Outputs(nn.Module):
    """A linear layer, and what makes probabilities of its outputs, or nothing."""

    def __init__(self, function=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(D, 3).double(), function or nn.Identity()

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("likelihood", "function"),
    [("classification", nn.Softmax(-1)), ("bernoulli", lambda z: (3 * z).sigmoid())],
)
def test_each_way_warns_once_of_outputs_that_are_probabilities(likelihood, function):
    """A posterior's fits and those of a learner together, calibration, and dense Laplace."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.argmax(1) if likelihood == "classification" else (x > 0).double()
    data = [*zip(x.split(15), y.split(15), strict=True)]  # the last one is smaller

    def said(use):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            use()
        return [str(warning.message) for warning in seen if "probabil" in str(warning.message)]

    def train(model):
        learn(model, torch.optim.SGD(model.parameters(), 0.1), PriorLearner(likelihood), data, 6)

    for made, times in ((function, 1), (None, 0)):
        posterior = Posterior(Outputs(made), likelihood)
        fits = said(lambda of=posterior: [of.fit(data), of.fit(data)])
        calibration = said(lambda of=posterior: calibrate(of, data))
        learner = said(lambda made=made: train(Outputs(made)))
        ways = [fits, calibration, learner]
        if likelihood == "classification":
            dense = Laplace(Outputs(made), likelihood, "all", "full")
            ways.append(said(lambda of=dense: of.fit(data)))
        assert [len(texts) for texts in ways] == [times] * len(ways)
        assert all("takes logits" in text for texts in ways for text in texts)
