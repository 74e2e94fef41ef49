"""A batch in parts and in its own memory format: the factors are those of the whole batch."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
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


def test_an_empty_batch_between_others_is_named():
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="A batch has no examples"):
        kronecker_factors(nn.Linear(3, 2), [(x, y), (x[:0], y[:0]), (x, y)], "classification")


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
