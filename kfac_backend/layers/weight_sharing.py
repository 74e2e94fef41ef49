"""The rule of all layers with a weight matrix that positions share, and that of linear layers.

Here the formulas of `kfac_backend.expand_and_reduce` are applied to a layer: `add_input` and
`add_gradient` take one use's rows as the mode says, and add them to the two factors. `layers.rule`
has the order in which a pass calls these methods.
"""

from abc import abstractmethod
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from kfac_backend.expand_and_reduce import gradient_sums, input_means
from kfac_backend.layers.gram import DenseGram, DiagonalGram, Gram
from kfac_backend.layers.rows import Rows
from kfac_backend.layers.rule import (
    BlockSums,
    ExampleGradients,
    GradientFactor,
    InputFactor,
    PositionSums,
    Rule,
    Use,
)
from kfac_backend.options import Approximation, Mode
from kfac_backend.precision import at_least_float32

__all__ = ["LinearRule", "TransposedLinearRule", "WeightSharingRule"]


class WeightSharingRule(Rule):
    """A layer with a matrix ``weight``, applied at R positions, and a ``bias`` added at each.

    The weight's block is B ⊗ A, one per group; the bias's block is B over all outputs. A derived
    rule returns the inputs and gradients position by position (`inputs`, `weight_gradients`). A
    rule with faster ways overrides `mean_inputs` (reduce) and `add_input_gram` (expand).
    """

    parameter_names = frozenset({"weight", "bias"})

    same_gradients: ClassVar[bool] = True
    """Whether weight and bias have the same output gradients."""

    separate_axes: ClassVar[bool] = True
    """Whether each axis between the first and the last is a shared axis of its own, with its own
    mode; otherwise all positions are one shared axis."""

    def __init__(self, layer: Any, mode: Approximation, names: Collection[str]) -> None:
        super().__init__(layer, mode, names)
        # With a mode for each axis, `reduced_axes` reduces axes itself. It leaves the rule only the
        # pixels of an image, which are one axis (not `separate_axes`), and the last.
        last = mode if isinstance(mode, str) else list(mode.values())[-1]
        self.by_example = last == "reduce" and (isinstance(mode, str) or not self.separate_axes)
        self.A = InputFactor(self.new_input_gram())
        self.B_weight = GradientFactor(self.new_gradient_gram(), self.by_example)
        # With one group, B of weight and bias are usually sums over the same rows: they are one
        # sum until something comes that tells them apart (`_separate`).
        one = self.groups == 1 and self.same_gradients and len(names) == 2
        self.B_bias = self.B_weight if one else GradientFactor(DenseGram(), self.by_example)
        self._given_away: set[str] = set()  # parameters that another rule reports
        self._rows_apart = False  # whether the factor over the weight's rows is a diagonal

    @abstractmethod
    def inputs(self, a: Tensor) -> Tensor:
        """The layer's input as (G, N, R, d_in)."""

    def mean_inputs(self, a: Tensor) -> tuple[Tensor, int]:
        """The means â over positions, (G, N, d_in), and R."""
        rows = self.inputs(a)
        return input_means(rows), rows.shape[2]

    def weight_gradients(self, b: Tensor) -> Float[Tensor, "G M R d_out"]:
        """Output gradients (M, ...) at the weight's positions."""
        return self.bias_gradients(b).unflatten(-1, (self.groups, -1)).movedim(-2, 0)

    def bias_gradients(self, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """Output gradients (M, ...) at all positions of the output, features last."""
        rows = b.movedim(self.features, -1)  # no copy if the features lie last
        return rows.flatten(1, -2) if rows.dim() > 2 else rows[:, None]

    def weight_gradient_sums(self, b: Tensor) -> Float[Tensor, "G M d_out"]:
        """The sums of `weight_gradients` over positions."""
        return gradient_sums(self.weight_gradients(b))

    def use_diagonals(self, above: int | None) -> None:
        """Keep the diagonal of the factor over the weight's rows: B, or A if it is transposed."""
        groups, rows = self._whole_sizes()[0]
        self._rows_apart = above is not None and groups == 1 and rows > above
        if self._rows_apart and self.transposed:
            self.A.gram = DiagonalGram()
        elif self._rows_apart:
            for B in self._gradient_factors:
                B.gram = DiagonalGram()

    @property
    def groups(self) -> int:
        """G, the number of independent weight matrices."""
        return 1

    def new_input_gram(self) -> Gram:
        """The Gram matrix that inputs are added to."""
        return DenseGram()

    def new_gradient_gram(self) -> Gram:
        """The Gram matrix that the weight's gradients are added to."""
        return DenseGram()

    def add_input_gram(self, a: Tensor) -> int:
        """Add the inputs of all positions to A; returns R."""
        rows = self.inputs(a)
        self.A.gram.add(rows.flatten(1, 2))
        return rows.shape[2]

    def add_gradient_gram(self, b: Tensor) -> None:
        """Add the gradients at all of the weight's positions to its B."""
        self.B_weight.add(self.weight_gradients(b).flatten(1, 2))

    def reduced_axes(
        self, x: Tensor, rows: Rows | None, *, mean: bool
    ) -> tuple[Tensor, Rows | None, Mode]:
        """The tensor without the axes to reduce; its rows; the mode of the remaining axes.

        For a layer with one mode the tensor is returned as it is, and the caller does the rest.
        With a mode for each axis, the axes are reduced here, before the layer's own `inputs`, and
        the remaining ones are treated as expand treats positions. That order is right because
        all layers are linear: the mean of the patches is the patch of the mean. If
        `examples_of_rows` is used, the first named axis is that of the rows.

        Args:
            x: the layer's input (M, ...), or gradients with respect to its output (V·M, ...).
            rows: the rows' examples.
            mean: whether to take means over positions (an input) or sums (a gradient).

        Raises:
            ValueError: the number of modes differs from the number of shared axes.
        """
        if isinstance(self.mode, str):
            return x, rows, self.mode
        inner = range(1, x.dim() - 1) if self.separate_axes else range(1)
        modes = list(self.mode.values())
        number = len(inner) + (rows is not None)
        if number == 0:  # nothing is shared
            return x, rows, "expand"
        if number != len(modes):
            raise ValueError(
                f"kfac_approx names the axes {', '.join(self.mode)}, but {self.layer} shares its "
                f"weight over {number} (shape {tuple(x.shape)}, examples first). Name all shared "
                "axes in their order, the rows first where examples_of_rows gives their examples."
            )
        if rows is not None:
            x = rows.reduced(x, mean=mean) if modes.pop(0) == "reduce" else rows.counting(x)
        if not self.separate_axes:
            return x, None, modes[0]
        axes = [axis for axis, mode in zip(inner, modes, strict=True) if mode == "reduce"]
        if axes:
            x = x.mean(axes) if mean else x.sum(axes)
        return x, None, "expand"

    @property
    def _gradient_factors(self) -> list[GradientFactor]:
        """B of the weight and of the bias, or the one of both."""
        return list(dict.fromkeys((self.B_weight, self.B_bias)))

    def _separate(self) -> None:
        """Give the bias a B of its own, which begins with what both have in common so far."""
        if self.B_bias is self.B_weight:
            self.B_bias = deepcopy(self.B_weight)

    def begin_forward(self) -> None:
        """Reset the counts of uses and positions."""
        for sums in (self.A, *self._gradient_factors):
            sums.begin_forward()

    def add_input(self, use: Use) -> None:
        """Add the weight's inputs to A; a bias has no input factor."""
        if use.rows is not None and use.rows.by_roots and self.mode != "expand":
            # Reduce divides the weight's sums by √R_n, but not the bias's, which has no input
            # factor that would take the other √R_n.
            self._separate()
        for B in self._gradient_factors:
            B.count_use()
        if "weight" not in self.names:
            return
        # Step 1: axes with a mode of their own are reduced.
        a, rows, mode = self.reduced_axes(use.a, use.rows, mean=True)
        # Step 2, expand: each position that counts is a row of the Gram matrix.
        if mode == "expand":
            a = a if rows is None else rows.counting(a)
            self.A.num_terms += len(a) * self.add_input_gram(a)
            return
        # Step 2, reduce: the sum over each example's positions waits for those of other uses. A row
        # may have R positions of its own; R_n counts all of them.
        means, R = self.mean_inputs(a)
        sums = at_least_float32(means) * R  # (G, M, d_in)
        if rows is None:
            self.A.add_sums(sums, R, by_roots=False)
        else:
            self.A.add_sums(_by_example(rows, sums), rows.counts * R, rows.by_roots)

    def end_forward(self) -> None:
        """Add the examples' means to A, and set by what the gradients' sums are divided."""
        self.A.end_forward()
        # R_n counts the positions of all uses, so it is known only now, after the last input.
        self.B_weight.roots = self.A.roots

    def add_gradient(self, use: Use, b: Tensor, sums: PositionSums) -> None:
        """Add to B: per group for the weight, over all outputs for the bias."""
        if "bias" in self.names:
            self._add_gradient(self.B_bias, False, use, b, sums)
        if "weight" in self.names and not ("bias" in self.names and self.B_bias is self.B_weight):
            self._add_gradient(self.B_weight, True, use, b, sums)

    def _add_gradient(
        self, total: GradientFactor, of_weight: bool, use: Use, b: Tensor, sums: PositionSums
    ) -> None:
        # Step 1: axes with a mode of their own are reduced. A bias's sums are plain.
        rows = use.rows
        if rows is not None and not of_weight:
            rows = replace(rows, by_roots=False)
        x, rows, mode = self.reduced_axes(b, rows, mean=False)
        # Step 2, expand: each position that counts is a row of the Gram matrix.
        if mode == "expand":
            x = x if rows is None else rows.counting(x)
            if of_weight:
                self.add_gradient_gram(x)
            else:
                total.add(self.bias_gradients(x).flatten(0, 1)[None])
            return
        # Step 2, reduce: the sum over positions, and over the rows of each example.
        if of_weight and not self.same_gradients:
            summed = self.weight_gradient_sums(x)
        else:
            # The cache belongs to the tensor b; another tensor must not push b out of it.
            known = sums if x is b else PositionSums()
            groups = self.groups if of_weight else 1
            summed = known(x, self.features).unflatten(-1, (groups, -1)).movedim(1, 0)
        total.add(summed if rows is None else _by_example(rows, summed))  # (G, V·N, d_out)

    def end_vector(self) -> None:
        """Add the sums that waited for other uses."""
        for B in self._gradient_factors:
            B.end_vector()

    def share(self, name: str, other: Rule, others_name: str) -> None:
        """Add to the sums of another layer's weight or bias."""
        assert isinstance(other, WeightSharingRule) and name == others_name
        # A shared weight need not have a shared bias: their sums go over different uses now.
        for rule in (self, other):
            rule._separate()
        if name == "weight":
            self.A, self.B_weight = other.A, other.B_weight
        else:
            self.B_bias = other.B_bias
        self._given_away.add(name)

    def position_gradients(self, use: Use, b: Tensor) -> Float[Tensor, "M R d_out"]:
        """The gradients with features last; summed over positions if the weight is frozen."""
        rows = self.bias_gradients(b)
        return rows if "weight" in self.names else rows.sum(1, keepdim=True)

    def example_gradients(
        self, a: Tensor, b: Float[Tensor, "N R C d_out"]
    ) -> dict[str, ExampleGradients]:
        """Σ_r b ⊗ a for the weight, Σ_r b for the bias."""
        gradients = {}
        if "weight" in self.names:
            by_group = b.unflatten(-1, (self.groups, -1)).movedim(-2, 0)
            gradients["weight"] = ExampleGradients(by_group, self.inputs(a))
        if "bias" in self.names:
            gradients["bias"] = ExampleGradients(b[None])
        return gradients

    def block_sums(self) -> dict[str, BlockSums]:
        """Both blocks' sums."""
        # The Gram matrices themselves, which later become the block in place, not copies.
        rows, columns, of_bias = self._kept_sizes()
        B_weight, A = self.B_weight.gram.total(), self.A.gram.total()
        one = self.B_bias is self.B_weight
        B = B_weight if one else self.B_bias.gram.total()
        sums = {}
        if "bias" in self.names:
            sums["bias"] = BlockSums(self._zeros(*of_bias) if B is None else B)
        if "weight" in self.names:
            if self.transposed:  # its rows are the inputs
                # The second factor is divided by the number of terms, in place. The bias's B, which
                # may be the same tensor, must not be.
                first, second = A, B_weight
                if one and "bias" in self.names and B_weight is not None:
                    second = B_weight.clone()
            else:
                first, second = B_weight, A
            sums["weight"] = BlockSums(
                self._zeros(*rows) if first is None else first,
                self._zeros(*columns) if second is None else second,
                self.A.num_terms,
            )
        return {name: of_name for name, of_name in sums.items() if name not in self._given_away}

    def factor_sizes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The sizes of the weight's two factors, and of the bias's B if it has one of its own."""
        rows, columns, of_bias = self._kept_sizes()
        of_rows, of_columns = "AB" if self.transposed else "BA"
        sizes = {("weight", of_rows): rows, ("weight", of_columns): columns, ("bias", "B"): of_bias}
        own = set(self.names) - self._given_away
        if "weight" in own and self.B_bias is self.B_weight:
            own -= {"bias"}
        return {place: size for place, size in sizes.items() if place[0] in own}

    def _whole_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(G, d) of the factors over the weight's rows and columns, if both are kept whole."""
        weight = self.layer.weight
        return (self.groups, len(weight) // self.groups), (self.groups, weight[0].numel())

    def _kept_sizes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(G, d) of the factors over the weight's rows and columns, and of the bias's B.

        As they are kept: a diagonal is d groups of one entry.
        """
        (groups, rows), columns = self._whole_sizes()
        bias = getattr(self.layer, "bias", None)
        d_out = 0 if bias is None else len(bias)
        apart = self._rows_apart and not self.transposed
        return (
            (rows, 1) if self._rows_apart else (groups, rows),
            columns,
            (d_out, 1) if apart else (1, d_out),
        )

    def _zeros(self, groups: int, size: int) -> Tensor:
        """The sum for a layer that saw no rows."""
        return at_least_float32(self.layer.weight.detach()).new_zeros(groups, size, size)


class LinearRule(WeightSharingRule):
    """nn.Linear on (N, ..., d_in), with any number of shared axes."""

    def inputs(self, a: Tensor) -> Tensor:
        """(N, ..., d_in) as (1, N, R, d_in)."""
        if a.dim() < 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch (N, ..., d_in)."
            )
        return a.flatten(1, -2)[None] if a.dim() > 2 else a[None, :, None]


class TransposedLinearRule(LinearRule):
    """A layer y = x W + b whose weight is stored (d_in, d_out), as GPT-2's Conv1D."""

    transposed = True


def _by_example(rows: Rows, x: Float[Tensor, "G M d"]) -> Float[Tensor, "G N d"]:
    """Each example's sum over its rows, for V vectors (G, V·M, d) as (G, V·N, d)."""
    return rows.sums(x.movedim(1, 0)).movedim(0, 1)
