"""The noise of each output that the evidence learns, on linear models, whose evidence is exact."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import Posterior, PriorLearner
from marglik.training.learner import noise_step
from tests.evidence_oracles import bayesian_linear_regression_log_evidence

N, D, DELTA = 60, 12, 3.0


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    W = torch.randn(3, D, generator=generator, dtype=torch.float64)
    noise = torch.tensor([0.1, 0.5, 2.0]).double()
    y = x @ W.T + noise * torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, y


def posterior_at_the_maximum(x, y, noises):
    """Of a linear layer whose weights are the posterior mean under these noises."""
    model = nn.Linear(D, 3, bias=False).double()
    relative = noises / noises.log().mean().exp()
    posterior = Posterior(
        model,
        f"regression_per_output(noise={relative.tolist()})",
        prior_precision=DELTA,
        sigma_noise=noises.log().mean().exp(),
    )
    with torch.no_grad():
        for c in range(3):
            precision = x.T @ x / noises[c] ** 2 + DELTA * torch.eye(D).double()
            model.weight[c] = torch.linalg.solve(precision, x.T @ y[:, c] / noises[c] ** 2)
    posterior.fit([(x, y)])
    return posterior


def exact_evidence(x, y, noises):
    """Of independent outputs, each with its noise."""
    prior = torch.full((D,), DELTA).double()
    return sum(
        bayesian_linear_regression_log_evidence(x, y[:, c], prior, float(noises[c]))
        for c in range(3)
    )


def test_evidence_and_its_steps_are_those_of_bayesian_linear_regression(data):
    x, y = data
    noises, evidences = torch.ones(3).double(), []
    for _ in range(200):
        posterior = posterior_at_the_maximum(x, y, noises)
        evidences.append(float(posterior.log_marginal_likelihood()))
        if len(evidences) < 3:
            assert_close(evidences[-1], exact_evidence(x, y, noises), rtol=1e-9, atol=1e-9)
        likelihood, sigma = noise_step(posterior, [(x[:20], y[:20]), (x[20:], y[20:])])
        before, noises = noises, sigma * likelihood.noise
        if torch.allclose(noises, before, rtol=1e-6, atol=0):
            break
    assert all(b > a - 1e-9 for a, b in zip(evidences, evidences[1:], strict=False))
    # The fixed point: no noise nearby has a higher evidence.
    best = exact_evidence(x, y, noises)
    for c in range(3):
        for factor in (0.97, 1.03):
            moved = noises.clone()
            moved[c] *= factor
            assert exact_evidence(x, y, moved) < best
    # Negative control: the noises of least squares alone, without γ, are too small.
    residuals = y - posterior_at_the_maximum(x, y, noises).model(x).detach()
    assert exact_evidence(x, y, residuals.square().mean(0).sqrt()) < best - 0.1


def test_training_learns_them_and_a_resumed_one_keeps_them(data):
    x, y = data
    model = nn.Linear(D, 3, bias=False).double()
    learner = PriorLearner(
        "regression_per_output", learn_sigma_noise=True, every=1, average=None, loss_scale=2 / 3
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = [(x, y)]
    learner.start(model, optimizer, loader, epochs=8)
    for epoch in range(1, 9):
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            learner.add_to_gradients()
            optimizer.step()
        learner.end_of_epoch(epoch)
    noises = learner.hyperparameters.sigma_noise * learner.likelihood.noise
    residual = (y - model(x)).square().mean(0).sqrt().detach()
    assert ((noises / residual - 1).abs() < 0.5).all()
    assert noises[2] / noises[0] > 5  # a shared noise would be equal

    again = PriorLearner(
        "regression_per_output", learn_sigma_noise=True, every=1, average=None, loss_scale=2 / 3
    )
    again.load_state_dict(learner.state_dict())
    again.start(model, optimizer, loader, epochs=8)
    assert again.likelihood == learner.likelihood != "regression_per_output"
