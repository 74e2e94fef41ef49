"""The same training in a loop of one's own, whose decays callbacks must reach to the bit."""

import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import PriorLearner
from tests.marglik.plain_loop import learn

N, EPOCHS, EVERY, STEPS, LR, WEIGHT_DECAY = 30, 5, 2, 7, 0.1, 1e-2
OPTIONS = {"weight_decay": WEIGHT_DECAY, "every": EVERY, "steps": STEPS}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def dataset():
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def loader():
    """Without a shuffle: trainers draw their seeds in other places."""
    return DataLoader(dataset(), 8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), LR, momentum=0.9)


def in_an_own_loop(clip, data=None, options=OPTIONS):
    """A network and its learner, after a loop with the learner's two lines."""
    model, prior = network(), PriorLearner("classification", **options)
    return model, learn(model, sgd(model), prior, data or loader(), EPOCHS, clip=clip)


def assert_fitted_where_the_network_is(prior, net, updates):
    """The last of so many updates was made at the network's parameters, and with its decays."""
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(prior.posterior.mean, weights)
    assert len(prior.learner.evidences) == updates
    learned = prior.learner.state.hyperparameters.prior_precision
    assert_close(prior.posterior.prior_precision.double(), learned, rtol=1e-6, atol=0)
