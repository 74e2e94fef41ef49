"""Split multi-head attention into its projections; support layers with the batch axis second."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend.layers.layer_by_parts import LayerByParts, LinearPart
from kfac_backend.layers.rows import current_rows, examples_of_rows, rows_of_sequences


class AttentionByParts(LayerByParts):
    """Parts of nn.MultiheadAttention: queries, keys, values and the output are linear layers.

    The block of the packed ``in_proj_weight`` has queries, keys and values as its groups. Keys that
    the padding mask hides do not count. All options of the class are supported.
    """

    def parts(self, layer: nn.MultiheadAttention) -> dict[str, LinearPart]:
        """Return the three input projections; the output projection is a layer itself."""
        bias = None if layer.in_proj_bias is None else "in_proj_bias"
        packed = layer.in_proj_weight is not None
        slots = {"weight": 3, "bias": 3} if packed else {"bias": 3}
        return {
            name: LinearPart(
                layer, "in_proj_weight" if packed else f"{name[0]}_proj_weight", bias, slot, slots
            )
            for slot, name in enumerate(("query", "key", "value"))
        }

    def forward(
        self,
        layer: nn.MultiheadAttention,
        parts: Mapping[str, LinearPart],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `nn.MultiheadAttention.forward`; a batch is needed."""
        if query.dim() != 3:
            raise ValueError(
                f"nn.MultiheadAttention got queries of shape {tuple(query.shape)}. The curvature "
                "needs a batch of sequences, with three axes. For one sequence add the axis of "
                "examples, for example x[None] with batch_first=True."
            )
        if not layer.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # Step 1: the three input maps, each with its own hooks. Positions that padding hides are no
        # rows of keys and values, but they are queries like any other.
        with rows_of_sequences(query, layer.batch_first):
            q = parts["query"](query)  # (N, L, E)
        with rows_of_sequences(key, layer.batch_first, key_padding_mask):
            k, v = parts["key"](key), parts["value"](value)  # (N, S, E)
        mask = _mask(attn_mask, key_padding_mask, len(q), layer.num_heads, q.dtype)
        # Step 2: further keys that are not computed from the inputs.
        N, more = len(q), 0
        if layer.bias_k is not None and layer.bias_v is not None:
            # (1, 1, E), or (N, 1, E) with a copy for each example
            k = torch.cat([k, layer.bias_k.expand(N, -1, -1)], 1)
            v = torch.cat([v, layer.bias_v.expand(N, -1, -1)], 1)
            more += 1
        if layer.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            more += 1
        if mask is not None and more:
            mask = F.pad(mask, (0, more))
        # Step 3: attention head by head, (N, h, L, E/h), and the output map of each query.
        q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        attended, weights = _attention(q, k, v, mask, layer, need_weights)
        with rows_of_sequences(query, layer.batch_first):
            output = layer.out_proj(attended.transpose(1, 2).flatten(2))  # (N, L, E)
        if not layer.batch_first:
            output = output.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return output, weights


class SequenceFirst(LayerByParts):
    """Transformer layers with the batch axis second, which declare their rows' examples.

    The linear layers, attention and norms inside have their own rules, and the forward is the
    layer's own.
    """

    is_checked = False

    def parts(self, layer: nn.Module) -> dict[str, LinearPart]:
        """Return no parts: the linear maps and the attention inside are layers themselves."""
        return {}

    def forward(self, layer: Any, parts: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's own forward."""
        x: Tensor = args[0] if args else kwargs["src" if "src" in kwargs else "tgt"]
        first = layer.layers[0] if hasattr(layer, "layers") else layer
        original = type(layer).forward
        if first.self_attn.batch_first or x.dim() != 3 or current_rows() is not None:
            return original(layer, *args, **kwargs)
        # Row (r, n) of the layers inside belongs to example n.
        R, N = x.shape[:2]
        index = torch.arange(N, device=x.device).expand(R, N)
        with examples_of_rows(index, N, by_roots=False):
            return original(layer, *args, **kwargs)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    layer: nn.MultiheadAttention,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return attended values (N, h, L, E/h), and the weights (N, h, L, S) if they are needed."""
    dropout = layer.dropout if layer.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    N: int,
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the mask to add to the scores, broadcastable to (N, h, L, S), or None."""
    masks = []
    if attn_mask is not None:
        mask = _additive(attn_mask, dtype)  # (L, S) or (N·h, L, S)
        masks.append(mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (N, num_heads)))
    if key_padding_mask is not None:
        masks.append(_additive(key_padding_mask, dtype)[:, None, None])
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
