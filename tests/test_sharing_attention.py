"""References of attention and of the Transformer layers against the modules of torch."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.random_numbers import error, normal
from tests.sharing_attention import attention, decoder_layer, encoder_layer, linear
from tests.sharing_oracles import dense_ggn_of
from tests.taps import Taps, reference_blocks

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


def one_query(taps, query, keys, module, head) -> Tensor:
    return linear(taps, head, "head", attention(taps, module, "", query, keys, keys)[0])


@pytest.mark.parametrize("approx", MODES)
def test_one_query_of_one_example_is_exact_but_for_keys_and_values(approx):
    # Layers with a single position and a single example are exact in any network.
    module, head = nn.MultiheadAttention(4, 2).double(), nn.Linear(4, 3).double()
    randomize(module)
    query, keys = normal(2, 1, 4), normal(2, 3, 4, seed=1)

    def errors(N: int) -> dict[str, float]:
        examples = [(query[n], keys[n], module, head) for n in range(N)]
        found = reference_blocks(one_query, examples, "classification", approx)
        model = nn.ModuleDict({"attention": module, "head": head})
        parameters = {k.removeprefix("attention."): p for k, p in model.named_parameters()}

        def f(p: dict[str, Tensor]) -> Tensor:
            attention_p = {k: v for k, v in p.items() if not k.startswith("head")}
            inputs = [t[:N].transpose(0, 1) for t in (query, keys, keys)]
            x, _ = torch.func.functional_call(module, attention_p, tuple(inputs))
            return x[0] @ p["head.weight"].T + p["head.bias"]

        ggn, start, result = dense_ggn_of(f, parameters, "classification"), 0, {}
        for name, p in parameters.items():
            exact = ggn[start : start + p.numel(), start : start + p.numel()]
            start += p.numel()
            for g in range(3) if name.startswith("in_proj") else [0]:
                groups = 3 if name.startswith("in_proj") else 1
                part = slice(g * p.numel() // groups, (g + 1) * p.numel() // groups)
                result[f"{name}[{g}]"] = error(found[name][part, part], exact[part, part])
        return result

    one, two = errors(1), errors(2)
    exact = ("in_proj_weight[0]", "out_proj.weight[0]", "head.weight[0]")
    for name in exact:
        assert one[name] < 1e-12 and two[name] > 0.01
    assert min(one["in_proj_weight[1]"], one["in_proj_weight[2]"]) > 0.1
    for name in ("in_proj_bias[0]", "out_proj.bias[0]", "head.bias[0]"):
        assert max(one[name], two[name]) < 1e-12
