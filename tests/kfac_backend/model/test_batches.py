"""A batch in parts and in its own memory format: the factors are those of the whole batch."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.model import batches
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import assert_same_factors, data, network
from tests.uses import kfac_blocks


@pytest.mark.parametrize("kfac_approx", MODES)
def test_parts_of_a_batch_give_what_the_batch_gives(kfac_approx, monkeypatch):
    model, (x, y) = network(), data()
    whole = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    # The largest activation has 4·4·4 entries of 8 bytes an example.
    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 3 * 512)
    sizes = seen_sizes(model)
    split = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert_same_factors(split, whole, rtol=1e-12, atol=1e-14)
    assert split.num_data == 7 and split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert max(sizes) <= 4  # 7 examples in even parts of three; the proof takes four


def seen_sizes(model: nn.Module) -> list[int]:
    """Receives the number of examples of each forward pass."""
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return sizes


class OfSequences(nn.Module):
    """A label for each sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).mean(1))


@pytest.mark.parametrize("kfac_approx", MODES)
def test_small_batches_run_together(kfac_approx):
    """The first one alone, since it shows how many may; sequences of two lengths stay apart."""
    torch.manual_seed(1)
    model = OfSequences().double()
    lengths = [4, 4, 4, 4, 6, 6, 6]
    data = [(torch.randn(2, R, 2).double(), torch.randint(3, (2,))) for R in lengths]

    def factors(batches):
        return kronecker_factors(model, batches, "classification", kfac_approx=kfac_approx)

    apart = [factors([batch]) for batch in data]
    sizes = seen_sizes(model)
    together = factors(data)
    assert_same_factors(together, sum(apart[1:], apart[0]), rtol=1e-12, atol=1e-14)
    assert together.num_data == 14
    assert sizes[-3:] == [2, 6, 6]


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
    assert_same_factors(
        kronecker_factors(model, data, "classification"), whole, rtol=1e-12, atol=1e-14
    )
    assert sizes[-4:] == [2] * 4
    with pytest.raises(torch.OutOfMemoryError, match="batches of 6 examples. Batches of 3 fit"):
        kronecker_factors(model, iter(data), "classification")


def test_a_model_that_takes_whole_batches_only_is_not_split(monkeypatch):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            assert len(x) == 6
            return self.fc(x.reshape(6, 4))

    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 1)
    x, y = torch.randn(6, 2, 2), torch.zeros(6, dtype=torch.long)
    assert kronecker_factors(Fixed(), [(x, y)] * 3, "classification").num_data == 18


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_model_that_views_its_images_runs_in_their_own_memory_format(memory_format):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 3)

        def forward(self, x):
            return self.fc(torch.tanh(self.conv(x)).view(len(x), -1))

    torch.manual_seed(0)
    model, (x, y) = Viewing().double(), data()
    if memory_format == torch.channels_last:
        x = x.contiguous(memory_format=memory_format)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            kronecker_factors(model, [(x, y)], "classification")
        return
    factors = kronecker_factors(model, [(x, y)], "classification")
    for name, block in kfac_blocks(model, x, "classification", "expand").items():
        assert_close(factors.to_dense(name), block)
