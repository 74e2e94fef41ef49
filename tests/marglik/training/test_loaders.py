"""Every pass asks a loader for its batches once, and takes each of them once."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from kfac_backend import kronecker_factors
from marglik import (
    KronLaplace,
    OnlineTraining,
    PriorLearner,
)
from marglik.prediction.evaluation import predict_all
from marglik.prediction.predictive import map_predictive
from marglik.training.loaders import count_examples

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, UPDATES, FIRST = 2, 1, 1
"""The learner looks at a first batch."""


class Counting:
    """A loader that notes what each pass over it was given."""

    def __init__(self, loader):
        self.loader = loader
        self.passes = []

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        taken = []
        self.passes.append(taken)
        batches = iter(self.loader)  # now, as a DataLoader does, and not with the first batch

        def each():
            for x, y in batches:
                taken.extend(x[:, 0].tolist())
                yield x, y

        return each()


def data():
    x = torch.arange(24.0).reshape(8, 3)
    return TensorDataset(x, torch.arange(8) % 2)


def network():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def online(loader, progress=False):
    model = network()
    return OnlineTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        loader,
        PriorLearner("classification", epochs=EPOCHS, every=2, steps=2),
        progress=progress,
    ).run()


PASSES = {
    "factors": (lambda loader, show: kronecker_factors(
        network(), loader, "classification", progress=show), 1),
    "fit": (lambda loader, show: KronLaplace(network(), "classification").fit(
        loader, progress_bar=show), 1),
    "predictions": (lambda loader, show: predict_all(
        map_predictive(network()), loader, progress=show), 1),
    "online training": (online, FIRST + EPOCHS + UPDATES),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_iterates_once(name):
    run, expected = PASSES[name]
    loader = Counting(DataLoader(data(), 3, shuffle=True))
    run(loader, True)
    assert len(loader.passes) == expected
    for taken in loader.passes[FIRST if expected > 1 else 0 :]:
        assert sorted(taken) == [3.0 * i for i in range(8)]


class Loud(TensorDataset):
    """Tells a shared counter of each example that is loaded."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.loaded = torch.zeros(1).share_memory_()

    def __getitem__(self, index):
        self.loaded += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 8), (True, 6)])
def test_batch_samplers_are_counted_without_loading(drop_last, expected):
    dataset = Loud(*data().tensors)
    sampler = BatchSampler(RandomSampler(dataset), 3, drop_last)
    assert count_examples(DataLoader(dataset, batch_sampler=sampler)) == expected
    assert dataset.loaded.item() == 0
