"""What attention does that no other layer does; `test_every_layer` has its blocks."""

import torch

from tests.kfac_backend.block_checks import assert_same, factors_of, randomize
from tests.kfac_backend.layers.attention_models import PADDING, batch_of, stack


def test_a_stack_that_takes_a_fast_path_without_gradients():
    model, batch = randomize(stack()), batch_of(padding_mask=PADDING)
    expected = factors_of(model, [batch], "reduce")
    with torch.no_grad():
        assert_same(factors_of(model, [batch], "reduce"), expected)
