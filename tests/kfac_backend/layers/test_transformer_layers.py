"""nn.Transformer's layers against a brute-force reference of their uses."""

import pytest
import torch

from kfac_backend import kronecker_factors
from tests.kfac_backend.block_checks import (
    assert_blocks,
    assert_reference,
    randomize,
)
from tests.kfac_backend.layers.attention_models import (
    PADDING,
    Layered,
    Stack,
    batch_of,
    examples_of,
    layered,
    stack,
)
from tests.oracles import ggn_blocks
from tests.taps import reference_blocks_of_modes

LAYERS = {
    "relu": {},
    "gelu": {"activation": "gelu"},
    "norm first": {"norm_first": True},
    "norm first, gelu, no bias": {"norm_first": True, "activation": "gelu", "bias": False},
    "sequence first, causal": {"batch_first": False, "causal": True},
    "padding": {"causal": True},
}


POOLED = [(case, True) for case in LAYERS]


@pytest.mark.parametrize(("case", "pool"), [*POOLED, ("relu", False), ("padding", False)])
def test_transformer_layers(case, pool):
    model = randomize(Layered(pool, **LAYERS[case]))
    more = {"padding": PADDING[:2]} if case == "padding" else {}
    batch = batch_of(pool, N=2, **more)
    examples = examples_of(model, batch)
    assert_reference(layered, examples, model(batch))
    exact = ggn_blocks(model, lambda run: run(batch), "classification")
    norms = {k: block for k, block in exact.items() if "norm" in k}
    for mode, expected in reference_blocks_of_modes(layered, examples, "classification").items():
        assert set(expected) | set(norms) == set(exact) and len(norms) >= 5
        least = min(block.abs().max() for block in expected.values())
        assert least > 1e-6  # no comparison of zeros
        factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        assert_blocks(factors, expected | norms)


@pytest.mark.parametrize("gradients", [True, False])
def test_stack_of_encoder_layers(gradients):
    padding = torch.tensor([[False] * 4, [True, False, False, True], [False] * 3 + [True]])
    model, batch = randomize(Stack()), batch_of(True, padding_mask=padding)
    examples = examples_of(model, batch)
    assert_reference(stack, examples, model(batch))
    for mode, expected in reference_blocks_of_modes(stack, examples, "classification").items():
        with torch.set_grad_enabled(gradients):
            factors = kronecker_factors(model, [batch], "classification", kfac_approx=mode)
        assert_blocks(factors, expected)
