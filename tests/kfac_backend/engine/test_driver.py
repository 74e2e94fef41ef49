"""Several batches, one in parts and one in its own memory format: the factors are the batches'."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.engine import model_calls
from tests.kfac_backend.block_checks import MODES, assert_same
from tests.kfac_backend.networks import Model, data, network, random_model
from tests.random_numbers import normal
from tests.uses import kfac_blocks


@pytest.mark.parametrize("kfac_approx", MODES)
def test_parts_of_a_batch_give_what_the_batch_gives(kfac_approx, monkeypatch):
    model, (x, y) = network(), data()
    whole = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    # The largest activation has 4·4·4 entries of 8 bytes an example.
    monkeypatch.setattr(model_calls, "LARGEST_ACTIVATION", 3 * 512)
    sizes, whole_sizes = [], []

    def see(module, args):
        (sizes if torch.is_grad_enabled() else whole_sizes).append(len(args[0]))

    model.register_forward_pre_hook(see)
    split = kronecker_factors(model, [(x, y)] * 2, "classification", kfac_approx=kfac_approx)
    assert_same(split, whole + whole, rtol=1e-12, atol=1e-14)
    assert split.num_data == 14 and split.loss == pytest.approx(2 * whole.loss, rel=1e-12)
    assert max(sizes) <= 4  # 7 examples in even parts of three; the proof takes four
    assert whole_sizes.count(7) == 1  # to compare parts with it, once


def positions(x):
    """Which positions of sequences (N, T, d) that end in zeros count, up to the longest."""
    counts = (x != 0).any(-1)
    return counts[:, : counts.sum(1).max()]


def trimmed(m, x):
    """Sequences up to the longest of the batch, and a plain mean."""
    return m.head(m.first(x[:, : positions(x).shape[1]]).tanh()).mean(1)


def sequences(lengths, T=6):
    """Inputs, the first and the last as long and as large as any; and targets."""
    x = 0.3 * normal(len(lengths), T, 3).clamp(-1, 1)
    x[torch.arange(T) >= torch.tensor(lengths)[:, None]] = 0
    x[[0, -1], 0, 0] = 1
    return x, torch.arange(len(x)) % 3


def test_a_mapping_stays_whole(monkeypatch):
    """Its masks and lengths may mean the batch."""
    monkeypatch.setattr(model_calls, "LARGEST_ACTIVATION", 1)
    model = random_model(lambda m, batch: m.fc(batch["x"]), fc=nn.Linear(3, 2))
    sizes = []
    model.fc.register_forward_pre_hook(lambda layer, args: sizes.append(len(args[0])))
    batch = {"x": normal(9, 3), "labels": torch.arange(9) % 2}
    kronecker_factors(model, [batch], "classification")
    assert sizes[-1] == 9


def test_parts_with_other_rows_than_the_first_batch_are_an_error(monkeypatch):
    """Then it is too late to run the batch whole; it is not run in parts either."""
    model = random_model(trimmed, first=nn.Linear(3, 4), head=nn.Linear(4, 3))
    (x, y), (x_2, y_2) = sequences([6] * 4), sequences([6, 6, 3, 3])
    x_2[-1, 0, 0] = x_2[0, 0, 0] = 0.3
    # Two of `first`'s outputs.
    monkeypatch.setattr(model_calls, "LARGEST_ACTIVATION", 2 * 8 * 6 * 4)
    data = [(x, y), (x_2, y_2)]
    with pytest.raises(NotImplementedError, match="Pass batches of 2 examples or fewer"):
        kronecker_factors(model, data, "classification")
    data = [(a, b) for x, y in data for a, b in zip(x.split(2), y.split(2), strict=True)]
    found = kronecker_factors(model, data, "classification")
    first, *others = (kronecker_factors(model, [batch], "classification") for batch in data)
    assert_same(found, sum(others, first), rtol=1e-12, atol=1e-14)


def test_an_empty_batch_between_others_is_named():
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="A batch has no examples"):
        kronecker_factors(nn.Linear(3, 2), [(x, y), (x[:0], y[:0]), (x, y)], "classification")


def test_a_model_that_takes_whole_batches_only_is_not_split(monkeypatch):
    def forward(m, x):
        assert len(x) == 6
        return m.fc(x.reshape(6, 4))

    monkeypatch.setattr(model_calls, "LARGEST_ACTIVATION", 1)
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
