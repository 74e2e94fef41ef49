"""References of attention and of the Transformer layers against the modules of torch."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.attention_references import attention, decoder_layer, encoder_layer
from tests.random_numbers import normal
from tests.taps import Taps

close = torch.testing.assert_close
MODES = ["expand", "reduce"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


MASKS = {
    "none": (None, None),
    "causal": (torch.ones(3, 4).triu(1).bool(), None),
    "added": (normal(3, 4, seed=5), None),
    "a mask per head": (normal(2 * 2, 3, 4, seed=6) > 0.8, None),
    "added per head": (normal(2 * 2, 3, 4, seed=6), None),
    "padding": (None, torch.tensor([[False, False, True, True], [False, True, False, False]])),
    "added padding": (None, torch.tensor([[0, -math.inf, 0.5, 0], [0, 0, 0, -math.inf]]).double()),
    "both": (torch.ones(3, 4).triu(1).bool(), torch.tensor([[False] * 3 + [True], [False] * 4])),
}
OPTIONS = {
    "packed": {},
    "no bias": {"bias": False},
    "separate": {"kdim": 3, "vdim": 5},
    "separate, no bias": {"kdim": 3, "bias": False},
    "zero attention": {"add_zero_attn": True},
    "appended key": {"add_bias_kv": True},
    "both appended": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3},
    "sequence first": {"batch_first": False},
}


def mask_of(mask: Tensor | None, n: int, heads: int) -> Tensor | None:
    """Part of an attn_mask that belongs to example n."""
    if mask is None or mask.dim() == 2:
        return mask
    return mask[n * heads : (n + 1) * heads]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_reference_attention_is_the_module(options, need_weights):
    kwargs = {"batch_first": True, **OPTIONS[options]}
    module = nn.MultiheadAttention(4, 2, **kwargs).double().eval()
    for p in module.parameters():
        nn.init.normal_(p)
    q, k, v = normal(2, 3, 4), normal(2, 4, module.kdim, seed=1), normal(2, 4, module.vdim, seed=2)
    for mask, padding in MASKS.values():
        inputs = (q, k, v) if module.batch_first else tuple(t.transpose(0, 1) for t in (q, k, v))
        out, _ = module(
            *inputs, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights
        )
        out = out if module.batch_first else out.transpose(0, 1)
        for n in range(2):
            padding_n = None if padding is None else padding[n]
            arguments = (q[n], k[n], v[n], mask_of(mask, n, 2), padding_n)
            close(attention(Taps(), module, "", *arguments), out[n], **EXACT)


LAYERS = {
    "relu": {},
    "gelu": {"activation": "gelu"},
    "norm first": {"norm_first": True},
    "norm first, gelu, no bias": {"norm_first": True, "activation": "gelu", "bias": False},
}


def randomize(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.normal_(p, std=0.7)


@pytest.mark.parametrize("options", LAYERS)
def test_reference_transformer_layers_are_the_modules(options):
    kwargs = {"batch_first": True, "dtype": torch.float64, **LAYERS[options]}
    encoder = nn.TransformerEncoderLayer(4, 2, 5, 0.0, **kwargs)
    decoder = nn.TransformerDecoderLayer(4, 2, 5, 0.0, **kwargs)
    x, memory = normal(2, 3, 4), normal(2, 4, 4, seed=1)
    square, wide = torch.ones(3, 3).triu(1).bool(), MASKS["added"][0]
    padding, memory_padding = MASKS["padding"][1][:, 1:], MASKS["padding"][1]
    padding = padding & torch.tensor([False, True, True])  # a key that is there for every query
    for layer in (encoder, decoder):
        randomize(layer)
    for mask, pad, memory_mask, memory_pad in (
        (None, None, None, None),
        (square, None, wide, None),
        (None, padding, None, memory_padding),
    ):
        out = encoder(x, src_mask=mask, src_key_padding_mask=pad)
        decoded = decoder(x, memory, mask, memory_mask, pad, memory_pad)
        for n in range(2):
            pad_n = None if pad is None else pad[n]
            memory_pad_n = None if memory_pad is None else memory_pad[n]
            close(encoder_layer(Taps(), encoder, "", x[n], mask, pad_n), out[n], **EXACT)
            masks = (mask, memory_mask, pad_n, memory_pad_n)
            close(decoder_layer(Taps(), decoder, "", x[n], memory[n], *masks), decoded[n], **EXACT)
