"""The interface of the library posteriors: its loop, against marglik's own fit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from marglik import Posterior

pytest.importorskip("posteriors")

import marglik.adapters.posteriors as kfac_laplace  # noqa: E402


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(12, 3).double()
    return model, list(zip(x.split(5), (x[:, :2].argmax(1)).split(5), strict=True))


def run(method, transform, model, batches, inplace=False) -> tuple[Any, Tensor]:
    """The loop that posteriors documents, the same for each method."""
    state = transform.init(dict(model.named_parameters()))
    for batch in batches:
        state, _ = transform.update(state, batch, inplace=inplace)
    return state, method.sample(state, torch.Size([2, 3]))


@pytest.mark.parametrize("inplace", [False, True])
def test_batch_by_batch_it_is_the_posterior_of_all_data(inplace):
    model, batches = problem()
    own = Posterior(model, "classification", prior_precision=0.3)
    own.fit(batches)
    transform = kfac_laplace.build(model, "classification", prior_precision=0.3)
    state, _ = run(kfac_laplace, transform, model, batches, inplace)
    assert int(state.step) == 3 and state.posterior.n_data == 12
    assert_close(state.posterior.log_marginal_likelihood(), own.log_marginal_likelihood())
    x = batches[0][0]
    assert_close(state.posterior.output_distribution(x), own.output_distribution(x))
    few, _ = run(kfac_laplace, transform, model, batches[:1])  # the transform starts anew
    assert int(few.step) == 1 and few.posterior.n_data == 5
    assert few.posterior.log_marginal_likelihood() != own.log_marginal_likelihood()


def test_update_changes_no_state_and_no_model():
    model, batches = problem()
    before = copy.deepcopy(model.state_dict())
    transform = kfac_laplace.build(model, "classification")
    first = transform.init({name: p + 1 for name, p in model.named_parameters()})
    second, _ = transform.update(first, batches[0])
    third, _ = transform.update(second, batches[1])
    assert first.posterior.factors is None
    assert [second.posterior.n_data, third.posterior.n_data] == [5, 10]
    assert_close(dict(model.state_dict()), dict(before))
    mean = torch.cat([(p + 1).flatten() for p in model.parameters()]).detach()
    assert_close(third.posterior.mean, mean)


def test_samples_have_the_posteriors_covariance():
    model, batches = problem()
    model[2].weight.requires_grad_(False)
    transform = kfac_laplace.build(model, "classification", prior_precision=2.0)
    state, _ = run(kfac_laplace, transform, model, batches)
    samples = kfac_laplace.sample(state, torch.Size([40_000]), torch.Generator().manual_seed(0))
    block = state.posterior.factors.blocks["2.bias"].to_dense() + 2 * torch.eye(2)
    found = torch.cov(samples["2.bias"].T)
    assert_close(found, torch.linalg.inv(block), rtol=0.05, atol=0.01)
    assert not torch.allclose(found, torch.eye(2).double() / 2, rtol=0.05, atol=0.01)  # the prior
    assert_close(samples["2.weight"][0], model[2].weight.detach())


def test_other_parameters_are_named():
    model, _ = problem()
    transform = kfac_laplace.build(model, "classification")
    with pytest.raises(ValueError, match=r"Parameter '0\.bias' is not in params"):
        transform.init({n: p for n, p in model.named_parameters() if n != "0.bias"})
