"""The evidence of K-FAC's own factors is that of a pass, where both must agree."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from kfac_backend.options import CurvatureOptions
from marglik import Hyperparameters, OnlineTraining, Posterior, PriorGroups, Schedule
from tests.kfac_backend.networks import data as image_data
from tests.kfac_backend.networks import network as image_network
from tests.random_numbers import normal

N = 12


def training(lr, curvature_from, likelihood="classification", kfac_approx="expand", **options):
    """Three epochs of one batch of all the data, with an update after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = normal(N, 6, 3)  # six positions, each with a term
    y = normal(N, 6, 4, seed=1)
    if likelihood == "classification":
        y = y.argmax(-1)
    loader = DataLoader(TensorDataset(x, y), N)
    curvature = CurvatureOptions(kfac_approx=kfac_approx)
    optimizer = KFAC(
        model,
        likelihood,
        lr,
        options=PreconditionerOptions(factor_every=1, update_every=1, ema_decay=0.9),
        curvature=curvature,
        **{"mean_over": "examples", **options},
    )

    def make_posterior(delta: Tensor, sigma: Tensor) -> Posterior:
        return Posterior(model, likelihood, curvature, prior_precision=delta, sigma_noise=sigma)

    return OnlineTraining(
        model,
        optimizer,
        loader,
        likelihood,
        Hyperparameters(
            PriorGroups.from_model(model), 1.0, learn_sigma_noise=likelihood != "classification"
        ),
        make_posterior,
        Schedule(epochs=3, every=1, steps=4, average=None),
        curvature_from=curvature_from,
    )


@pytest.mark.parametrize("mean_over", ["examples", "terms"])
@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_of_frozen_parameters_and_all_data_it_is_that_of_a_pass(likelihood, kfac_approx, mean_over):
    runs = {
        kind: training(0.0, kind, likelihood, kfac_approx, mean_over=mean_over).run()
        for kind in ("pass", "optimizer")
    }
    expected, found = runs["pass"], runs["optimizer"]
    assert len(expected.evidences) == 12
    assert_close(
        torch.tensor(found.evidences), torch.tensor(expected.evidences), rtol=1e-10, atol=0
    )
    assert found.evidence == pytest.approx(expected.evidence, rel=1e-10)
    assert_close(found.laplace.prior_precision, expected.laplace.prior_precision, rtol=1e-9, atol=0)
    assert_close(found.laplace.sigma_noise, expected.laplace.sigma_noise, rtol=1e-9, atol=0)


def test_of_parameters_that_move_it_is_another_but_the_posterior_is_of_the_last():
    expected, run = training(0.1, "pass").run(), training(0.1, "optimizer")
    found = run.run()
    assert found.evidences[0] != pytest.approx(expected.evidences[0], rel=1e-3)
    factors = kronecker_factors(run.model, run.train_loader, "classification")
    for name, block in factors.blocks.items():
        assert_close(found.laplace.factors.blocks[name].to_dense(), block.to_dense())
    assert found.evidence == pytest.approx(float(found.laplace.log_marginal_likelihood()))


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


def test_what_has_no_factors_is_a_named_error():
    run = training(0.1, "pass")
    make_laplace = run.learner._make_posterior
    arguments = (run.train_loader, "classification", run.hyperparameters, make_laplace)
    sgd = torch.optim.SGD(run.model.parameters(), 0.1)
    with pytest.raises(ValueError, match="takes K-FAC's factors, and SGD has none"):
        OnlineTraining(run.model, sgd, *arguments, Schedule(), curvature_from="optimizer")
    with pytest.raises(ValueError, match="of all trainable parameters, and '0.bias' has none"):
        training(0.1, "optimizer", exclude=["0.bias"])
    run = training(0.1, "optimizer")
    with pytest.raises(TypeError, match="needs marglik.Posterior, not object"):
        OnlineTraining(
            run.model, run.network.optimizer, run.train_loader, "classification",
            run.hyperparameters, lambda delta, sigma: object(), Schedule(),
            curvature_from="optimizer",
        )  # fmt: skip
    with pytest.raises(ValueError, match="'auto', 'pass', 'optimizer'"):
        training(0.1, "factors")
