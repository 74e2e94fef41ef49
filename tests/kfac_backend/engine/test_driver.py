"""Batches of several sizes, and in their own memory format: factors are sums over batches."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import MODES, assert_same
from tests.kfac_backend.networks import Model, data, network, random_model
from tests.uses import kfac_blocks


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_batch_runs_whole_and_batches_add_up(kfac_approx):
    model, (x, y) = network(), data(64)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    whole = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert sizes[-1] == 64 and max(sizes[:-1]) <= 10  # of the proof
    batches = list(zip(x.split(24), y.split(24), strict=True))
    parts = kronecker_factors(model, batches, "classification", kfac_approx=kfac_approx)
    assert_same(parts, whole, rtol=1e-10, atol=1e-12)
    assert parts.num_data == 64 and parts.loss == pytest.approx(whole.loss, rel=1e-12)


def test_an_empty_batch_between_others_is_named():
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="A batch has no examples"):
        kronecker_factors(nn.Linear(3, 2), [(x, y), (x[:0], y[:0]), (x, y)], "classification")


def test_a_model_that_takes_whole_batches_only_gets_them():
    def forward(m, x):
        assert len(x) == 6
        return m.fc(x.reshape(6, 4))

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
