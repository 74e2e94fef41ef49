"""Each rival on a tiny problem, against a statement of what it is by brute force, in float64."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from experiments.predictions import rivals
from experiments.predictions.rivals import Task
from marglik.data import TensorBatches
from marglik.prediction.links import predict_from_outputs
from marglik.training.optimizers import OptimizerConfig

CLASSES = 3


def network():
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def blobs(n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return torch.stack([y.double(), (y == 1).double()], 1) + 0.4 * noise, y


@pytest.fixture
def task():
    x, y = blobs(60, 0)
    return Task(
        network,
        lambda seed: TensorBatches(x, y, 20, shuffle=True, seed=seed),
        TensorBatches(*blobs(40, 1), 16),
        epochs=8,
        optimizer=OptimizerConfig(lr=0.1),
        samples=4,
    )


@pytest.fixture
def start(task):
    return rivals.map_network(task)


def probabilities(model, x):
    return torch.softmax(model(x), -1)


def held_out(task):
    batches = list(task.held_out)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# One network


def test_the_map_minimises_the_loss_with_weight_decay(task):
    """The gradient of the objective vanishes where the training ends; without the decay not."""
    x, y = blobs(60, 0)
    whole = replace(
        task, make_loader=lambda seed: TensorBatches(x, y, 60), epochs=1500, weight_decay=0.01
    )
    model = rivals.map_network(whole).model
    loss = cross_entropy(model(x), y)
    decay = 0.005 * sum(p.square().sum() for p in model.parameters())
    for objective, vanishes in ((loss + decay, True), (loss, False)):
        gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        norm = parameters_to_vector(gradients).norm().item()
        assert (norm < 1e-3) == vanishes


def test_the_weight_decay_with_the_lowest_held_out_loss_is_chosen(task):
    x, y = held_out(task)
    grid = (1e-4, 1e-2, 1.0)
    losses = {}
    for weight_decay in grid:
        single = rivals.map_network(task, [weight_decay])
        losses[weight_decay] = cross_entropy(single.model(x), y).item()
    chosen = rivals.map_network(task, grid)
    assert chosen.chosen["weight_decay"] == min(losses, key=losses.get)
    assert chosen.search_seconds > chosen.training_seconds  # of two further trainings


# Temperature


def test_the_temperature_is_that_of_a_grid(task, start):
    x, y = held_out(task)
    with torch.no_grad():
        logits = 7 * start.model(x)  # overconfident
    grid = torch.logspace(-1.5, 1.5, 30001, dtype=torch.float64)
    losses = torch.stack([cross_entropy(logits / tau, y) for tau in grid])
    found = rivals.best_temperature(predict_from_outputs(logits[None], "classification"), y)
    assert found == pytest.approx(grid[losses.argmin()].item(), rel=5e-4)
    assert found > 2


def test_tempering_a_network_divides_its_logits(task, start):
    x, _ = held_out(task)
    found = rivals.tempered(start, task.held_out, temperature=2.5)(x)
    torch.testing.assert_close(found.mean, torch.softmax(start.model(x).detach() / 2.5, -1))
    torch.testing.assert_close(found.total, found.entropy)
    assert not found.epistemic.any()


def test_tempering_a_mixture_raises_its_probabilities(task, start):
    x, _ = held_out(task)
    ensemble = rivals.deep_ensemble(task, start, members=2)
    raw, found = ensemble(x), rivals.tempered(ensemble, task.held_out, temperature=0.5)(x)
    torch.testing.assert_close(found.mean, raw.mean**2 / (raw.mean**2).sum(1, keepdim=True))
    torch.testing.assert_close(found.epistemic / found.total, raw.epistemic / raw.total)


# Ensembles


def test_an_ensemble_is_the_mean_of_probabilities(task, start):
    x, _ = held_out(task)
    members = [start.model]
    members += [rivals.map_network(replace(task, seed=1000 * i)).model for i in (1, 2)]
    found = rivals.deep_ensemble(task, start, members=3)
    expected = sum(probabilities(model, x) for model in members) / 3
    torch.testing.assert_close(found(x).mean, expected.detach())
    of_logits = torch.softmax(sum(model(x) for model in members) / 3, -1)
    assert not torch.allclose(found(x).mean, of_logits, atol=1e-4)
    assert (found(x).epistemic > 0).all()
    assert found.training_seconds > start.training_seconds


# Dropout


def test_dropout_lies_ahead_of_every_layer_but_the_first():
    model = rivals.with_dropout(network(), 0.3)
    first, _, last = model
    assert isinstance(first, nn.Linear)
    dropout, linear = last
    assert (dropout.p, linear.out_features) == (0.3, CLASSES)
    with pytest.raises(ValueError, match="no second"):
        rivals.with_dropout(nn.Sequential(nn.Linear(2, 2)), 0.3)


def test_dropout_is_the_mean_over_masks(task, start):
    x, _ = held_out(task)
    found = rivals.mc_dropout(task, start, probabilities=(0.4,))
    assert found.chosen["dropout"] == 0.4
    hidden, activation, (_, last) = found.model
    torch.manual_seed(task.seed)
    features, expected = activation(hidden(x)), 0
    for _ in range(task.samples):
        kept = nn.functional.dropout(features, 0.4, training=True)
        expected = expected + torch.softmax(last(kept), -1)
    torch.testing.assert_close(found(x).mean, (expected / task.samples).detach())
    assert not torch.allclose(found(x).mean, probabilities(found.model.eval(), x), atol=1e-3)
    state = torch.get_rng_state()
    found(x)
    assert torch.equal(torch.get_rng_state(), state)


# laplace-torch


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_laplace_torch_is_what_its_readme_does(task, start, subset):
    """With torch's own loader, by which it counts the data; and its prior is not the first one."""
    from laplace import Laplace

    found = rivals.laplace_torch(task, start, subset)
    x, _ = held_out(task)
    loader = DataLoader(TensorDataset(*blobs(60, 0)), 20)
    laplace = Laplace(copy.deepcopy(start.model), "classification", subset, "kron")
    laplace.fit(loader)
    with_first_prior = laplace(x, link_approx="probit")
    laplace.optimize_prior_precision(method="marglik")
    assert isinstance(with_first_prior, torch.Tensor)
    expected = laplace(x, link_approx="probit")
    torch.testing.assert_close(found(x).mean, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found(x).mean, with_first_prior, atol=1e-3)
    torch.testing.assert_close(found(x).total, found(x).entropy)
