"""Embeddings: a linear layer of one-hot inputs, whose Gram matrix counts tokens."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_backend.layers.gram import CountGram, DenseGram, Gram
from kfac_backend.layers.rows import Rows
from kfac_backend.layers.rule import PositionSums, Use
from kfac_backend.layers.weight_sharing import WeightSharingRule
from kfac_backend.options import Approximation

__all__ = ["EmbeddingRule"]

LARGEST_VOCABULARY = 8192
"""Largest vocabulary for which reduce sums up the tokens' dense Gram matrix."""


class EmbeddingRule(WeightSharingRule):
    """nn.Embedding on integers (N, ...): each token of an example is a position.

    The weight (V, d) is stored inputs first, so its block is A ⊗ B. In expand mode A is diagonal,
    with the tokens' counts; in reduce mode it is dense. Tokens equal to ``padding_idx`` do not
    count.
    """

    parameter_names = frozenset({"weight"})
    transposed = True
    takes_integers = True
    needs_input = True
    separate_axes = False

    def __init__(self, layer: Any, mode: Approximation, names: Collection[str]) -> None:
        if not isinstance(mode, str):
            if len(mode) != 1:
                raise ValueError(
                    f"kfac_approx names the axes {', '.join(mode)}, but {layer} takes all its "
                    "positions together; give it one mode by its name."
                )
            (mode,) = mode.values()
        self._dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        super().__init__(layer, mode, names)

    @classmethod
    def check(cls, layer: Any) -> None:
        """Refuse max_norm, which changes the weight in a forward pass, and scaled gradients."""
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise NotImplementedError(
                f"{layer} has max_norm or scale_grad_by_freq, so that its gradient is not that of "
                "a linear layer. Leave them out, or freeze it (requires_grad_(False))."
            )

    def use_diagonals(self, above: int | None) -> None:
        """Keep A by its diagonal in reduce mode; in expand mode it is a diagonal anyway."""
        super().use_diagonals(above)
        tokens = self.layer.num_embeddings
        if self.by_example and not self._rows_apart and tokens > LARGEST_VOCABULARY:
            raise NotImplementedError(
                f"{self.layer} in reduce mode needs a dense matrix of {tokens}×{tokens} tokens; at "
                f"most {LARGEST_VOCABULARY} tokens are supported. Keep its diagonal "
                f"(diagonal_above={LARGEST_VOCABULARY}), or take expand for this layer, which "
                "needs only counts: kfac_approx={'NAME OF THE LAYER': 'expand', '*': 'reduce'}."
            )

    def _whole_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """In expand mode the tokens are groups of one entry."""
        # Σ of one-hot outer products is a diagonal; that of examples' mean one-hot vectors is not.
        tokens, features = self.layer.weight.shape
        return (1, tokens) if self.by_example else (tokens, 1), (1, features)

    def new_input_gram(self) -> Gram:
        """Counts of tokens in expand mode, else a dense matrix."""
        if self.by_example:
            return DenseGram()
        return CountGram(self.layer.num_embeddings, self._dtype)

    def inputs(self, a: Tensor) -> Tensor:
        """(N, ...) one-hot as (1, N, R, V), zero for padding."""
        tokens = a.flatten(1) if a.dim() > 1 else a[:, None]
        one_hot = F.one_hot(tokens.long(), self.layer.num_embeddings).to(self._dtype)
        if self.layer.padding_idx is not None:
            one_hot[..., self.layer.padding_idx] = 0
        return one_hot[None]

    def mean_inputs(self, a: Tensor) -> tuple[Tensor, int]:
        """The mean one-hot vector of each example (1, N, V), and R."""
        tokens = a.flatten(1).long() if a.dim() > 1 else a[:, None].long()
        R = tokens.shape[1]
        shares = torch.zeros(len(a), self.layer.num_embeddings, device=a.device, dtype=self._dtype)
        shares.scatter_add_(1, tokens, torch.full_like(tokens, 1 / R, dtype=self._dtype))
        return shares[None], R

    def add_input_gram(self, a: Tensor) -> int:
        """Count the tokens; returns R."""
        self.A.gram.add(a)
        return a[0].numel() if len(a) else 1

    def add_input(self, use: Use) -> None:
        """Count or average the tokens that are not padding."""
        super().add_input(self._without_padding(use))

    def add_gradient(self, use: Use, b: Tensor, sums: PositionSums) -> None:
        """Add the positions that are not padding to B."""
        without = self._without_padding(use)
        if without is not use:
            b, sums = b.flatten(0, -2), PositionSums()
        super().add_gradient(without, b, sums)

    def _without_padding(self, use: Use) -> Use:
        """The use with each position as a row of its own, of no example if it is padding.

        Without ``padding_idx`` the use is returned as it is.
        """
        padding = self.layer.padding_idx
        if padding is None:
            return use
        # Reduce divides by the positions that count, which differ from example to example.
        positions = use.a.flatten(1) if use.a.dim() > 1 else use.a[:, None]
        if use.rows is None:
            N, index = len(use.a), torch.arange(len(use.a), device=use.a.device)
            by_roots = False
        else:
            N, index, by_roots = use.rows.num_examples, use.rows.index, use.rows.by_roots
        index = torch.where(positions == padding, N, index[:, None]).flatten()
        return Use(positions.flatten(), Rows((len(index),), index, N, False, by_roots))
