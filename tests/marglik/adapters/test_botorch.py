"""BoTorch's interface: distributions against dense matrices, and its own acquisition functions."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import Posterior

pytest.importorskip("botorch")
from botorch.acquisition.logei import (  # noqa: E402
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling.normal import SobolQMCNormalSampler  # noqa: E402

from marglik.adapters.botorch import LaplaceModel  # noqa: E402
from tests.marglik.posteriors import by_jacobians  # noqa: E402

SIGMA, DELTA, T = 0.3, 0.7, 0.5
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def fitted(outputs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x = torch.rand(9, 2).double()
    posterior = Posterior(
        model, "regression", sigma_noise=SIGMA, prior_precision=DELTA, temperature=T
    )
    posterior.fit([(x, torch.randn(9, outputs).double())])
    return posterior, x


@pytest.mark.parametrize("outputs", [1, 2])
def test_posterior_is_the_joint_gaussian(outputs):
    posterior, _ = fitted(outputs)
    model, X = LaplaceModel(posterior), torch.rand(5, 3, 2).double()
    found = model.posterior(X)
    assert found.mean.shape == found.variance.shape == (5, 3, outputs)
    assert (model.num_outputs, model.batch_shape) == (outputs, torch.Size())
    assert_close(found.mean, posterior.model(X).detach())
    noisy = model.posterior(X, observation_noise=True)
    by_point = model.posterior(X, observation_noise=torch.full((1, outputs), 0.2).double())
    eye = torch.eye(3 * outputs).double()
    for t in range(5):
        expected = by_jacobians(posterior, X[t], joint=True)
        covariance = found.distribution.covariance_matrix[t]
        assert_close(covariance, expected)
        assert_close(noisy.distribution.covariance_matrix[t], expected + SIGMA**2 * eye)
        assert_close(by_point.distribution.covariance_matrix[t], expected + 0.2 * eye)
        # Negative control: points one by one.
        assert (covariance.diag().diag() - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("outputs", [1, 2])
def test_points_may_coincide(outputs):
    """As the optimiser of an acquisition function moves them; their covariance is singular."""
    posterior, _ = fitted(outputs)
    X = torch.rand(1, 2).double().expand(3, 2).clone().requires_grad_()
    found = LaplaceModel(posterior).posterior(X)
    samples = found.rsample(torch.Size([50]))
    assert_close(samples[:, 0], samples[:, 2], rtol=0, atol=1e-2)
    samples.sum().backward()
    assert X.grad is not None and torch.isfinite(X.grad).all()


def test_some_outputs_and_transforms():
    posterior, _ = fitted(3)
    model, X = LaplaceModel(posterior), torch.rand(4, 2).double()
    whole = model.posterior(X).distribution.covariance_matrix
    rows = [2, 5, 8, 11]
    for some in (model.subset_output([2]).posterior(X), model.posterior(X, output_indices=[2])):
        assert_close(some.distribution.covariance_matrix, whole[rows][:, rows])
    both = model.subset_output([2, 0])
    assert both.num_outputs == 2
    assert_close(both.posterior(X).mean, posterior.model(X)[:, [2, 0]].detach())
    weights = torch.tensor([1.0, -2.0, 0.5]).double()
    scalar = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    mixing = torch.kron(torch.eye(4).double(), weights[None])
    assert_close(scalar.distribution.covariance_matrix, mixing @ whole @ mixing.mT)


def test_their_acquisition_functions_climb():
    posterior, x = fitted()
    model = LaplaceModel(posterior)
    best = posterior.model(x).max().item()
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    at_random = torch.rand(256, 1, 2, generator=torch.Generator().manual_seed(0)).double()
    acquisition = qLogExpectedImprovement(model, best, sampler)
    torch.manual_seed(0)
    candidate, value = optimize_acqf(acquisition, BOUNDS, 1, num_restarts=4, raw_samples=32)
    assert value >= acquisition(at_random).max() - 1e-6
    assert_close(value, acquisition(candidate)[0])
    noisy = qLogNoisyExpectedImprovement(model, x, sampler, prune_baseline=True)
    pair, value = optimize_acqf(noisy, BOUNDS, 2, num_restarts=3, raw_samples=16)
    assert pair.shape == (2, 2) and value is not None and torch.isfinite(value)
    assert value > noisy(torch.cat([at_random[:64], at_random[64:128]], 1)).median()


def test_what_it_cannot_work_with_is_named():
    posterior, _ = fitted()
    with pytest.raises(ValueError, match="likelihood is 'classification'"):
        LaplaceModel(Posterior(nn.Linear(2, 2), "classification"))
    with pytest.raises(AttributeError, match="not fitted"):
        LaplaceModel(Posterior(nn.Linear(2, 2), "regression"))
    with pytest.raises(ValueError, match=r"x has shape \(2,\). Pass sets of inputs"):
        LaplaceModel(posterior).posterior(torch.rand(2).double())
