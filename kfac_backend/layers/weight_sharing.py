"""The rule of linear layers, and of all layers with a weight matrix that positions share.

It applies the formulas of `kfac_backend.expand_and_reduce` to a layer. `add_input` and
`add_gradient` reduce or expand one use's rows, by the mode, and add them to the two factors.
`layers.rule` documents the order in which a pass calls these methods.
"""

from abc import abstractmethod
from copy import deepcopy
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.layers.gram import DenseGram, DiagonalGram, FactorSum, Gram
from kfac_backend.layers.rule import ExampleGradients, Rule, Use, sum_over, unshared_copy


class WeightSharingRule(Rule):
    """A layer that applies a matrix ``weight`` and adds a ``bias`` at each of R positions.

    The weight's block is B ⊗ A, one per group. The bias's block is B over all outputs. A derived
    rule returns the inputs and gradients position by position (`inputs`, `weight_gradients`). A
    rule with faster methods overrides `input_sums` (reduce) and `add_input_rows` (expand).
    """

    parameter_names = frozenset({"weight", "bias"})

    same_gradients: ClassVar[bool] = True
    """Whether weight and bias have the same output gradients."""

    groups: int = 1
    """G, the number of independent weight matrices."""

    def make_sums(self) -> None:
        """Create A and B of the weight, and B of the bias."""
        above = self.diagonal_above
        self.is_diagonal = above is not None and self.groups == 1 and len(self.layer.weight) > above
        """Whether the factor over the weight's rows is a diagonal: B, or A if it is transposed."""
        if "weight" in self.names:
            self.A["weight"] = FactorSum(self.gram(of_rows=self.transposed))
            self.B["weight"] = FactorSum(self.gram(of_rows=not self.transposed))
        if "bias" in self.names:
            # With one group, B of weight and bias are usually sums over the same rows. They share
            # one sum until a use distinguishes them (`separate`).
            one = "weight" in self.names and self.groups == 1 and self.same_gradients
            self.B["bias"] = self.B["weight"] if one else FactorSum(self._bias_gram())
            # A mean over positions would be 1, so it is left out; a sum over them is R.
            if self.per_example:
                self.A["bias"] = FactorSum(DenseGram(self.layer.bias, 1, 1))
                if not self.same_gradients:
                    raise NotImplementedError(
                        f"expand_scaling='examples' is not supported for the bias of {self.layer}, "
                        "which has other positions than the weight. Use a layer without a bias, "
                        "freeze the bias (requires_grad_(False)), or pass "
                        "expand_scaling='positions'."
                    )

    @abstractmethod
    def inputs(self, a: Tensor) -> Tensor:
        """Return the layer's input as (G, N, R, d_in)."""

    def input_sums(self, a: Tensor) -> tuple[Tensor, int]:
        """Return the sums of inputs over positions, (G, N, d_in), and R."""
        rows = self.inputs(a)
        return rows.sum(2, dtype=torch.promote_types(a.dtype, torch.float32)), rows.shape[2]

    def weight_gradients(self, b: Tensor) -> Float[Tensor, "G M R d_out"]:
        """Return output gradients (M, ...) at the weight's positions."""
        return self.bias_gradients(b).unflatten(-1, (self.groups, -1)).movedim(-2, 0)

    def bias_gradients(self, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Return output gradients (M, ...) at all positions of the output, features last."""
        rows = b.movedim(self.features, -1)  # no copy if the features lie last
        return rows.flatten(1, -2) if rows.dim() > 2 else rows[:, None]

    def weight_gradient_sums(self, b: Tensor) -> Float[Tensor, "G M d_out"]:
        """Return the sums of `weight_gradients` over positions."""
        return self.bias_gradient_sums(b).unflatten(-1, (self.groups, -1)).movedim(1, 0)

    def bias_gradient_sums(self, b: Tensor) -> Float[Tensor, "M d_out"]:
        """Return the sums of `bias_gradients` over positions."""
        positions = [axis for axis in range(1, b.dim()) if axis != self.features % b.dim()]
        return sum_over(b, positions)

    def gram(self, of_rows: bool) -> Gram:
        """Return an empty factor over the weight's rows or columns; a diagonal for many rows."""
        weight, G = self.layer.weight, self.groups
        if of_rows and self.is_diagonal:
            return DiagonalGram(weight, len(weight))
        return DenseGram(weight, G, len(weight) // G if of_rows else weight.shape[1:].numel())

    def _bias_gram(self) -> Gram:
        bias, is_diagonal = self.layer.bias, self.is_diagonal and not self.transposed
        return DiagonalGram(bias, len(bias)) if is_diagonal else DenseGram(bias, 1, len(bias))

    def add_input_rows(self, a: Tensor) -> int:
        """Add the inputs of all positions to A; return R."""
        rows = self.inputs(a)
        self.A["weight"].gram.add(rows.flatten(1, 2))
        return rows.shape[2]

    def add_gradient_rows(self, b: Tensor) -> None:
        """Add the gradients at all of the weight's positions to its B."""
        self.B["weight"].gram.add(self.weight_gradients(b).flatten(1, 2))

    def separate(self) -> None:
        """Give the bias its own B, which starts with the sums that both share so far."""
        if "bias" in self.B and self.B["bias"] is self.B.get("weight"):
            self.B["bias"] = deepcopy(self.B["weight"])

    def add_input(self, use: Use) -> None:
        """Add the weight's inputs to A; a bias has no input factor, or the input 1."""
        if use.rows is not None and use.rows.by_roots and self.mode != "expand":
            # Reduce divides the weight's sums by √R_n. It does not divide the bias's, which has no
            # input factor for the other √R_n.
            self.separate()
        if not self.A:
            return
        a, rows = use.a, use.rows
        # Expand: each position that counts is a row of the Gram matrix.
        if self.mode == "expand":
            a = a if rows is None else rows.counting(a)
            R = self.add_input_rows(a) if "weight" in self.A else self.inputs(a[:1]).shape[2]
            for A in self.A.values():
                A.num_terms += len(a) * R
            if "bias" in self.A:  # as many ones, in one row
                ones = self.A["bias"].gram.like.new_full((1, 1, 1), len(a) * R)
                self.A["bias"].gram.add(ones.sqrt())
            return
        A = self.A["weight"]
        # Reduce: the sum over each example's positions waits for the sums of other uses. A row may
        # have R positions of its own; R_n counts all of them.
        sums, R = self.input_sums(a)  # (G, M, d_in)
        sums = unshared_copy(sums, a)
        # Divide by R only when all uses are known: a mean of means would weight uses equally,
        # however many positions they have.
        if rows is None:
            A.add_inputs(sums, R, by_roots=False)
        else:
            of_example = rows.sums(rows.weighted(sums.movedim(1, 0))).movedim(0, 1)
            A.add_inputs(of_example, rows.counts * R, rows.by_roots)

    def add_gradient(self, use: Use, b: Tensor) -> None:
        """Add to B: per group for the weight, over all outputs for the bias."""
        for name in self.B:
            if name == "weight" and self.B.get("bias") is self.B["weight"]:
                continue  # one sum for both
            weight = name == "weight"
            # Expand: each position that counts is a row of the Gram matrix.
            if self.mode == "expand":
                x = b if use.rows is None else use.rows.counting(b)
                if weight:
                    self.add_gradient_rows(x)
                else:
                    self.B[name].gram.add(self.bias_gradients(x).flatten(0, 1)[None])
                continue
            # Reduce: the sum over positions, and over the rows of each example.
            sums = self.weight_gradient_sums(b) if weight else self.bias_gradient_sums(b)[None]
            if use.rows is not None:
                sums = use.rows.sums(sums.movedim(1, 0)).movedim(0, 1)  # (G, N, d_out)
            # R_n counts the positions of all uses, and is known since the last input.
            roots = self.A["weight"].roots if weight else None
            sums = unshared_copy(sums, b)
            self.B[name].add(sums if roots is None else sums / roots.to(sums.dtype))

    def share(self, name: str, other: Rule, others_name: str) -> None:
        """Add to the sums of another layer's weight or bias."""
        # A shared weight need not have a shared bias: from now on their sums run over different
        # uses.
        for rule in (self, other):
            assert isinstance(rule, WeightSharingRule)
            rule.separate()
        super().share(name, other, others_name)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Return the gradients with features last; a frozen weight's are summed over positions."""
        rows = self.bias_gradients(b)
        return rows if "weight" in self.names else rows.sum(1, keepdim=True)

    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """Return Σ_r b ⊗ a for the weight, Σ_r b for the bias."""
        gradients = {}
        if "weight" in self.names:
            by_group = b.unflatten(-1, (self.groups, -1)).movedim(-2, 0)
            gradients["weight"] = ExampleGradients(by_group, self.inputs(a))
        if "bias" in self.names:
            gradients["bias"] = ExampleGradients(b[None])
        return gradients


class LinearRule(WeightSharingRule):
    """Rule of nn.Linear on (N, ..., d_in), with any number of shared axes."""

    def inputs(self, a: Tensor) -> Tensor:
        """Return (N, ..., d_in) as (1, N, R, d_in)."""
        if a.dim() < 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}, but needs a batch (N, ..., d_in). For "
                "one example add the axis: x[None]."
            )
        return (a.flatten(1, -2) if a.dim() > 2 else a.unsqueeze(1)).unsqueeze(0)


class TransposedLinearRule(LinearRule):
    """Rule of layers y = x W + b with a weight stored as (d_in, d_out), like GPT-2's Conv1D."""

    transposed = True
