"""Rule of embeddings: a linear layer of one-hot inputs, whose Gram matrix counts tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_backend.layers.gram import CountGram, Gram
from kfac_backend.layers.rows import Rows
from kfac_backend.layers.rule import Use
from kfac_backend.layers.weight_sharing import WeightSharingRule

LARGEST_VOCABULARY = 8192
"""Largest vocabulary for which reduce computes the tokens' dense Gram matrix."""


class EmbeddingRule(WeightSharingRule):
    """Rule of nn.Embedding on integers (N, ...): each token of an example is a position.

    The weight (V, d) is stored as (d_in, d_out), so its block is A ⊗ B. In expand mode A is
    diagonal, with the tokens' counts. In reduce mode it is dense. Tokens equal to ``padding_idx``
    do not count.
    """

    parameter_names = frozenset({"weight"})
    transposed = True
    takes_integers = True
    needs_input = True

    def make_sums(self) -> None:
        """Create A and B, unless A would be a large dense matrix."""
        self._dtype = torch.promote_types(self.layer.weight.dtype, torch.float32)
        super().make_sums()
        tokens = self.layer.num_embeddings
        if self.mode == "reduce" and not self.is_diagonal and tokens > LARGEST_VOCABULARY:
            raise NotImplementedError(
                f"{self.layer} in reduce mode needs a dense matrix of {tokens}×{tokens} tokens, "
                f"but at most {LARGEST_VOCABULARY} tokens are supported. Keep only its diagonal "
                f"(diagonal_above={LARGEST_VOCABULARY}). Or choose expand for this layer, which "
                "only needs counts: kfac_approx={'NAME OF THE LAYER': 'expand', '*': 'reduce'}."
            )

    @classmethod
    def check(cls, layer: Any) -> None:
        """Refuse max_norm, which changes the weight in a forward pass, and scaled gradients."""
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise NotImplementedError(
                f"{layer} has max_norm or scale_grad_by_freq, so its gradient is not the gradient "
                "of a linear layer. Omit these options, or freeze it (requires_grad_(False))."
            )

    def gram(self, of_rows: bool) -> Gram:
        """Return an empty factor: token counts in expand mode, otherwise dense or a diagonal."""
        # A sum of one-hot outer products is diagonal, unlike a sum over examples' mean one-hot
        # vectors.
        if of_rows and self.mode == "expand":
            return CountGram(self.layer.weight, self.layer.num_embeddings)
        return super().gram(of_rows)

    def inputs(self, a: Tensor) -> Tensor:
        """Return (N, ...) one-hot as (1, N, R, V), with zeros for padding."""
        one_hot = F.one_hot(_tokens(a), self.layer.num_embeddings).to(self._dtype)
        if self.layer.padding_idx is not None:
            one_hot[..., self.layer.padding_idx] = 0
        return one_hot[None]

    def input_sums(self, a: Tensor) -> tuple[Tensor, int]:
        """Return the count of each token in each example (1, N, V), and R."""
        tokens = _tokens(a)
        # Sum one-hot rows without making them: a token adds one to its own entry.
        counts = torch.zeros(len(a), self.layer.num_embeddings, device=a.device, dtype=self._dtype)
        counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=self._dtype))
        return counts[None], tokens.shape[1]

    def add_input_rows(self, a: Tensor) -> int:
        """Count the tokens; return R."""
        self.A["weight"].gram.add(a)
        return a[0].numel() if len(a) else 1

    def add_input(self, use: Use) -> None:
        """Count or average the tokens that are not padding."""
        super().add_input(self._without_padding(use))

    def add_gradient(self, use: Use, b: Tensor) -> None:
        """Add the positions that are not padding to B."""
        without = self._without_padding(use)
        super().add_gradient(without, b if without is use else b.flatten(0, -2))

    def _without_padding(self, use: Use) -> Use:
        """Return the use with a row per position, where padding belongs to no example.

        Without ``padding_idx`` the use is returned unchanged.
        """
        padding = self.layer.padding_idx
        if padding is None:
            return use
        # Reduce divides by the number of positions that count, which differs between examples.
        positions = _tokens(use.a)
        if use.rows is None:
            N, index = len(use.a), torch.arange(len(use.a), device=use.a.device)
            by_roots = False
        else:
            N, index, by_roots = use.rows.num_examples, use.rows.index, use.rows.by_roots
        index = torch.where(positions == padding, N, index[:, None]).flatten()
        return Use(positions.flatten(), Rows((len(index),), index, N, False, by_roots))


def _tokens(a: Tensor) -> Tensor:
    """Return (N, ...) as int64 (N, R)."""
    return (a.flatten(1) if a.dim() > 1 else a[:, None]).long()
