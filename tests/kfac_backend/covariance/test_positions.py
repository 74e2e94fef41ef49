"""Covariances of the outputs at several positions, (N, R, C), by dense Jacobians."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.models import GPT
from experiments.timing import peak_memory
from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.output_covariance import OutputCovariance
from tests.kfac_backend.covariance.posteriors import (
    SEQUENCES,
    assert_choices,
    brute_force,
    posterior,
    sequences,
)
from tests.kfac_backend.networks import random_model
from tests.marglik.networks import randomised


@pytest.mark.parametrize(
    ("name", "memory"), [*((name, None) for name in SEQUENCES), ("gpt", 1), ("pixels, groups", 1)]
)
def test_chosen_positions_and_classes(name, memory):
    model, x, _ = sequences(name)
    blocks, dense = posterior(model, x)
    covariance = OutputCovariance(model, blocks, memory=memory)
    f, expected = model(x).detach(), brute_force(model, x, dense)
    assert_choices(covariance, x, f, expected)
    # Each example alone, and all in another order.
    for n in range(len(x)):
        assert_close(covariance(x[n : n + 1])[1][0], expected[n], rtol=1e-9, atol=1e-11)
    assert_close(covariance(x.flip(0))[1], expected.flip(0), rtol=1e-9, atol=1e-11)


def test_memory_is_kept_besides_the_result():
    """Gradients of all layers, of several pairs, would be far beyond it."""
    model = randomised(GPT(20, 4, 20, 2, 2, tied=True))
    x = torch.randint(20, (3, 4), generator=torch.Generator().manual_seed(0))
    blocks = {}
    for name, p in model.named_parameters():
        rows, columns = len(p), p[0].numel() if p.dim() > 1 else None
        block = EigenBlock(torch.ones(rows).double(), torch.eye(rows).double())
        if columns is not None:
            alpha, Q_A = torch.ones(columns).double(), torch.eye(columns).double()
            block = EigenBlock(block.beta, block.Q_B, alpha, Q_A)
        blocks[name] = block, block.spectrum(1.0)
    peaks, found = {}, {}
    for memory in (2**21, 2**30):
        covariance = OutputCovariance(model, blocks, memory=memory)
        found[memory] = covariance(x)[1]
        peak = peak_memory(lambda of=covariance: of(x), torch.device("cpu"))
        peaks[memory] = peak - found[memory].nbytes
    assert_close(found[2**21], found[2**30])
    assert peaks[2**21] < 1.1 * 2**21 + 2**19  # with the activations
    assert peaks[2**30] > 2 * peaks[2**21]  # negative control


def test_batches_that_cannot_be_taken_apart():
    """Their examples' positions are worked on in turn, each example's own."""

    class Whole:
        """A batch that only its network can read."""

        def __init__(self, rows):
            self.rows = rows

        def to(self, device):
            return self

    model = random_model(
        lambda m, x: m.fc(torch.tanh(x.rows if isinstance(x, Whole) else x)), fc=nn.Linear(3, 4)
    )
    _, x, _ = sequences("linear")
    blocks, dense = posterior(model, x)
    expected = brute_force(model, x, dense)
    assert_choices(OutputCovariance(model, blocks), Whole(x), model(x).detach(), expected)
