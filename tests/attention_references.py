"""Plain float64 references of nn.MultiheadAttention and the Transformer layers, example by example.

Written from PyTorch's documentation, with the linear operations as taps, so that K-FAC's uses can
be read off: query, key and value projections are three groups of ``in_proj_weight`` (or three
weights of their own) and of ``in_proj_bias``; keys that ``key_padding_mask`` masks out are no
positions of the key and value projections. For each model that is made of them, a test compares the
outputs with those of torch's modules before any block (`assert_reference`). The modules hold the
parameters, float64, in evaluation mode. One example alone: no batch axis, queries (R, E), keys
(S, E).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.taps import Taps


def attention(
    taps: Taps,
    module: nn.MultiheadAttention,
    prefix: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Output (R, E) of MultiheadAttention.

    Args:
        taps: where the linear operations are made.
        module: the parameters.
        prefix: of the parameters' names, with its dot.
        query: (R, E); ``key`` (S, kdim), ``value`` (S, vdim).
        key: see ``query``.
        value: see ``query``.
        attn_mask: (R, S) or (heads, R, S); True is masked out, or floats that are added.
        key_padding_mask: (S,); the same for keys. True or -inf are no positions.
    """
    counted = None
    if key_padding_mask is not None:
        counted = _additive(key_padding_mask) > -math.inf
    packed = module.in_proj_weight is not None
    projected = []
    for g, (letter, x) in enumerate((("q", query), ("k", key), ("v", value))):
        rows = slice(g * module.embed_dim, (g + 1) * module.embed_dim)
        name = "in_proj_weight" if packed else f"{letter}_proj_weight"
        weight = module.in_proj_weight[rows] if packed else getattr(module, name)
        bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
        names = (prefix + name, prefix + "in_proj_bias")
        # Groups of a weight of its own: the one. Those of the bias are three in either case.
        groups = (g if packed else 0, g)
        projected.append(
            taps.linear(x, weight, bias, names, groups, counted if letter != "q" else None)
        )
    q, k, v = projected
    appended = 0
    if module.bias_k is not None:
        k, v = torch.cat([k, module.bias_k[0]]), torch.cat([v, module.bias_v[0]])
        appended += 1
    if module.add_zero_attn:
        zero = torch.zeros(1, module.embed_dim, dtype=torch.float64)
        k, v = torch.cat([k, zero]), torch.cat([v, zero])
        appended += 1
    heads = []
    d = module.embed_dim // module.num_heads
    for h in range(module.num_heads):
        features = slice(h * d, (h + 1) * d)
        scores = q[:, features] @ k[:, features].T / math.sqrt(d)  # (R, S)
        if attn_mask is not None:
            mask = _additive(attn_mask if attn_mask.dim() == 2 else attn_mask[h])
            scores = scores + _unmasked_columns(mask, appended)
        if key_padding_mask is not None:
            scores = scores + _unmasked_columns(_additive(key_padding_mask)[None], appended)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        heads.append(weights @ v[:, features])
    names = (prefix + "out_proj.weight", prefix + "out_proj.bias")
    return taps.linear(torch.cat(heads, -1), module.out_proj.weight, module.out_proj.bias, names)


def _additive(mask: Tensor) -> Tensor:
    """Mask as floats that are added to the scores."""
    if mask.dtype == torch.bool:
        return torch.where(mask, -math.inf, 0.0).double()
    return mask.double()


def _unmasked_columns(mask: Tensor, count: int) -> Tensor:
    """Mask with columns of zeros appended, for keys that the module itself appends."""
    return torch.cat([mask, torch.zeros(len(mask), count, dtype=torch.float64)], dim=-1)


def linear(taps: Taps, layer: nn.Linear, name: str, x: Tensor) -> Tensor:
    """Output of a Linear of this name."""
    return taps.linear(x, layer.weight, layer.bias, (f"{name}.weight", f"{name}.bias"))


def layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """(x − mean) / √(variance + ε) · weight + bias over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight
    return x if layer.bias is None else x + layer.bias


def activation(function: object, x: Tensor) -> Tensor:
    """Rectifier, or x Φ(x)."""
    if function is F.relu:
        return x.clamp(min=0)
    if function is F.gelu:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    raise NotImplementedError(f"This oracle knows relu and gelu, not {function}.")


def _feed_forward(
    taps: Taps,
    layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer,
    prefix: str,
    x: Tensor,
) -> Tensor:
    """linear2(activation(linear1(x)))."""
    x = activation(layer.activation, linear(taps, layer.linear1, prefix + "linear1", x))
    return linear(taps, layer.linear2, prefix + "linear2", x)


def encoder_layer(
    taps: Taps,
    layer: nn.TransformerEncoderLayer,
    prefix: str,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Output (R, E) of TransformerEncoderLayer: self-attention and two Linear, each with a skip."""

    def attend(x: Tensor) -> Tensor:
        name = prefix + "self_attn."
        return attention(taps, layer.self_attn, name, x, x, x, None, key_padding_mask)

    def feed(x: Tensor) -> Tensor:
        return _feed_forward(taps, layer, prefix, x)

    for norm, part in ((layer.norm1, attend), (layer.norm2, feed)):
        if layer.norm_first:
            x = x + part(layer_norm(norm, x))
        else:
            x = layer_norm(norm, x + part(x))
    return x


def decoder_layer(
    taps: Taps,
    layer: nn.TransformerDecoderLayer,
    prefix: str,
    x: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Output (R, E) of TransformerDecoderLayer: as the encoder's, with attention to a memory."""

    def attend(x: Tensor) -> Tensor:
        return attention(taps, layer.self_attn, prefix + "self_attn.", x, x, x, tgt_mask)

    def remember(x: Tensor) -> Tensor:
        name, padding = prefix + "multihead_attn.", memory_key_padding_mask
        return attention(taps, layer.multihead_attn, name, x, memory, memory, None, padding)

    def feed(x: Tensor) -> Tensor:
        return _feed_forward(taps, layer, prefix, x)

    for norm, part in ((layer.norm1, attend), (layer.norm2, remember), (layer.norm3, feed)):
        if layer.norm_first:
            x = x + part(layer_norm(norm, x))
        else:
            x = layer_norm(norm, x + part(x))
    return x
