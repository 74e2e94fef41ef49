"""A batch in parts and in its own memory format: the factors are those of the whole batch."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import curvature, kronecker_factors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.model import batches
from tests.kfac_backend.block_checks import MODES, assert_same
from tests.kfac_backend.networks import Model, data, network, random_model
from tests.uses import kfac_blocks


@pytest.mark.parametrize("kfac_approx", MODES)
def test_parts_of_a_batch_give_what_the_batch_gives(kfac_approx, monkeypatch):
    model, (x, y) = network(), data()
    whole = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    # The largest activation has 4·4·4 entries of 8 bytes an example.
    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 3 * 512)
    sizes = seen_sizes(model)
    split = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert_same(split, whole, rtol=1e-12, atol=1e-14)
    assert split.num_data == 7 and split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert max(sizes) <= 4  # 7 examples in even parts of three; the proof takes four


def seen_sizes(model: nn.Module) -> list[int]:
    """Receives the number of examples of each forward pass."""
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return sizes


@pytest.mark.parametrize("kfac_approx", MODES)
def test_small_batches_run_together(kfac_approx):
    """Sequences of two lengths stay apart."""
    model = random_model(
        lambda m, x: m.last(torch.tanh(m.first(x)).mean(1)),
        first=nn.Linear(2, 4),
        last=nn.Linear(4, 3),
    )
    torch.manual_seed(1)
    lengths = [4, 4, 4, 4, 6, 6, 6]
    data = [(torch.randn(2, R, 2).double(), torch.randint(3, (2,))) for R in lengths]

    def factors(batches):
        return kronecker_factors(model, batches, "classification", kfac_approx=kfac_approx)

    apart = [factors([batch]) for batch in data]
    sizes = seen_sizes(model)
    together = factors(data)
    assert_same(together, sum(apart[1:], apart[0]), rtol=1e-12, atol=1e-14)
    assert together.num_data == 14
    assert sizes[-2:] == [8, 6]


def cut_to_the_longest(m, batch):
    return m.fc(batch["x"][:, : batch["lengths"].max()].mean(1))


def at_most_eight(m, batch):
    assert len(batch["x"]) <= 8
    return m.fc(batch["x"].mean(1))


@pytest.mark.parametrize("function", [cut_to_the_longest, at_most_eight])
def test_batches_that_mean_something_together_stay_apart(function):
    """Joined, they would have other outputs, or none."""
    model = random_model(function, fc=nn.Linear(3, 2))
    torch.manual_seed(1)
    batches = []
    for longest in (2, 4, 3):
        x, lengths = torch.randn(4, 4, 3).double(), torch.full((4,), longest)
        batches.append({"x": x, "lengths": lengths, "labels": torch.tensor([0, 1, 1, 0])})
    apart = [kronecker_factors(model, [batch], "classification") for batch in batches]
    found = kronecker_factors(model, batches, "classification")
    assert_same(found, sum(apart[1:], apart[0]), rtol=1e-12, atol=1e-14)


def test_a_loader_may_use_its_memory_again():
    model = random_model(lambda m, x: m.fc(x), fc=nn.Linear(3, 2))
    torch.manual_seed(1)
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    whole = kronecker_factors(model, [(x, y)], "classification")

    def reused():
        some = x[:4].clone(), y[:4].clone()
        for k in (0, 4, 8):
            some[0].copy_(x[k : k + 4])
            some[1].copy_(y[k : k + 4])
            yield some

    for most in ({"cpu": 2**17}, {}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(curvature, "MOST_JOINED", most)
            assert_same(kronecker_factors(model, reused(), "classification"), whole)


def test_an_empty_batch_between_others_is_named():
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="A batch has no examples"):
        kronecker_factors(nn.Linear(3, 2), [(x, y), (x[:0], y[:0]), (x, y)], "classification")


def test_batches_that_exhaust_the_memory_together_stay_apart(monkeypatch):
    model = network()
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(3, (8,))
    data = list(zip(x.split(2), y.split(2), strict=True))
    whole = kronecker_factors(model, [(x, y)], "classification")
    add = CurvaturePass._add

    def small(self, x, y):
        if len(y) > 3:
            raise torch.OutOfMemoryError
        add(self, x, y)

    monkeypatch.setattr(CurvaturePass, "_add", small)
    sizes = seen_sizes(model)
    assert_same(kronecker_factors(model, data, "classification"), whole, rtol=1e-12, atol=1e-14)
    assert sizes[-4:] == [2] * 4
    with pytest.raises(torch.OutOfMemoryError, match="batches of 8 examples. Batches of 2 fit"):
        kronecker_factors(model, zip(x.split(2), y.split(2), strict=True), "classification")
    with pytest.raises(torch.OutOfMemoryError, match="batches of 4 examples. Batches of 2 fit"):
        kronecker_factors(model, [(x[:4], y[:4])], "classification")


def test_a_model_that_takes_whole_batches_only_is_not_split(monkeypatch):
    def forward(m, x):
        assert len(x) == 6
        return m.fc(x.reshape(6, 4))

    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 1)
    model = Model(forward, fc=nn.Linear(4, 3))
    x, y = torch.randn(6, 2, 2), torch.zeros(6, dtype=torch.long)
    assert kronecker_factors(model, [(x, y)] * 3, "classification").num_data == 18


def test_a_model_that_views_its_images_runs_in_their_own_memory_format():
    model = random_model(
        lambda m, x: m.fc(torch.tanh(m.conv(x)).view(len(x), -1)),
        conv=nn.Conv2d(2, 3, 3, padding=1),
        fc=nn.Linear(48, 3),
    )
    x, y = data()
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # negative control
        model(x.contiguous(memory_format=torch.channels_last))
    factors = kronecker_factors(model, [(x, y)], "classification")
    for name, block in kfac_blocks(model, x, "classification", "expand").items():
        assert_close(factors.to_dense(name), block)
