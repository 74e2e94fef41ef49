"""Split mixtures of experts with stacked weights: each expert is a linear layer.

Each expert's block is B_e ⊗ A_e over the M_e positions that were routed to it. Their number R_ne
differs between examples, like the nodes of graphs, with the same convention. Under expand A_e is
the mean over all M_e positions. Under reduce both sums of an example are scaled by 1/√R_ne, and A_e
is the mean over all N examples, including those that were not routed to the expert.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kfac_backend.layers.layer_by_parts import LayerByParts, LinearPart, TransposedPart
from kfac_backend.layers.rows import current_rows, examples_of_rows


class ExpertsByParts(LayerByParts):
    """Parts of the experts of transformers' models (Mixtral, Qwen-MoE, gpt-oss, ...).

    All implementations are supported. Such a layer gets the concatenated positions of all examples,
    (M, d).
    """

    def parts(self, layer: Any) -> dict[str, LinearPart]:
        """Return the two maps of each expert: into its gates, and back."""
        kind, E = TransposedPart if layer.is_transposed else LinearPart, layer.num_experts
        slots = {"weight": E, "bias": E}
        return {
            f"{name}.{e}": kind(layer, name, f"{name}_bias" if layer.has_bias else None, e, slots)
            for name in _names(layer)
            for e in range(E)
        }

    def forward(
        self,
        layer: Any,
        parts: Mapping[str, LinearPart],
        hidden_states: Float[Tensor, "M d"],
        top_k_index: Int[Tensor, "M k"],
        top_k_weights: Float[Tensor, "M k"],
    ) -> Tensor:
        """Compute the layer's own forward."""
        first, last = _names(layer)
        has_norm = getattr(layer, "has_post_expert_norm", False)  # since transformers 5.20
        # Step 1: pairs of a position and an expert, sorted by the expert. Numbers beyond the
        # experts stand for experts on other devices.
        expert = top_k_index.flatten()
        sizes = expert.bincount(minlength=layer.num_experts)[: layer.num_experts].tolist()
        pairs = expert.argsort(stable=True)[: sum(sizes)]
        position = pairs // top_k_index.shape[1]
        index, N = self._examples(hidden_states)
        # Step 2: each expert on its positions, with their examples declared for the hooks.
        outputs = []
        for e, rows in enumerate(position.split(sizes)):
            with examples_of_rows(None if index is None else index[rows], N):
                h = parts[f"{first}.{e}"](hidden_states[rows])
                h = layer._apply_gate(h) if _has_gate(layer) else layer.act_fn(h)
                h = parts[f"{last}.{e}"](h)
                outputs.append(layer.post_expert_norm(h) if has_norm else h)
        # Step 3: a position's output is the weighted sum of its experts' outputs.
        weighted = torch.cat(outputs) * top_k_weights.flatten()[pairs, None]
        total = torch.zeros_like(hidden_states)
        return total.index_add(0, position, weighted.to(total.dtype))

    def _examples(self, hidden_states: Tensor) -> tuple[Tensor | None, int]:
        """Return the example of each position, as declared or from N equal parts of positions."""
        M, rows, N = len(hidden_states), current_rows(), self.num_examples
        if rows is not None and len(rows.index) == M:
            return rows.as_given.flatten(), rows.num_examples
        if not N or M % N:
            return None, 0
        return torch.arange(M, device=hidden_states.device) // (M // N), N


def _names(layer: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if _has_gate(layer) else "up_proj"), "down_proj"


def _has_gate(layer: nn.Module) -> bool:
    """Return whether experts have a gate. Before transformers 5.3 all have, without saying so."""
    return getattr(layer, "has_gate", True)
