"""The rule of all layers with a weight matrix that positions share, and that of linear layers.

Here the formulas of `kfac_backend.expand_and_reduce` are applied to a layer: `add_input` and
`add_gradient` take one use's rows as the mode says, and add them to the two factors. `layers.rule`
has the order in which a pass calls these methods.
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from kfac_backend.blocks.sketch import Factor, SketchedFactor, add_factors
from kfac_backend.expand_and_reduce import gradient_sums, input_means
from kfac_backend.layers.gram.gram import DenseGram, DiagonalGram, Gram, SketchGram
from kfac_backend.layers.rows import Rows
from kfac_backend.layers.rule import ExampleGradients, Rule
from kfac_backend.layers.uses import BlockSums, GradientFactor, InputFactor, PositionSums, Use
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
        # With one group, the weight's and the bias's B are usually sums over the same rows. They
        # are then summed once, in `B_both`. `block_sums` adds it to what lies in the other two: a
        # pass may use both ways, since whether the rows are the same can differ between batches.
        self.B_weight = GradientFactor(DenseGram(), self.by_example)
        self.B_bias = GradientFactor(DenseGram(), self.by_example)
        self.B_both = GradientFactor(DenseGram(), self.by_example)
        self._given_away: set[str] = set()  # parameters that another rule reports
        self._rows_apart = False  # whether the factor over the weight's rows is a diagonal
        self._one_B = self.groups == 1 and self.same_gradients and len(names) == 2
        # `_one_B` is about the layer, and `share` can end it for the whole pass; `_one_B_now` is
        # about the present forward pass: `add_input` ends it where rows are given.
        self._one_B_now = self._one_B

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

    def use_diagonals(self, above: int | None) -> None:
        """Keep the diagonal of the factor over the weight's rows: B, or A if it is transposed."""
        groups, rows = self._whole_sizes()[0]
        self._rows_apart = above is not None and groups == 1 and rows > above
        if not self._rows_apart:
            return
        if self.transposed:
            self.A = InputFactor(DiagonalGram())
        else:
            self.B_weight, self.B_bias, self.B_both = (
                GradientFactor(DiagonalGram(), self.by_example) for _ in range(3)
            )

    @property
    def groups(self) -> int:
        """G, the number of independent weight matrices."""
        return 1

    def new_input_gram(self) -> Gram:
        """The Gram matrix that inputs are added to."""
        return DenseGram()

    def add_input_gram(self, a: Tensor) -> int:
        """Add the inputs of all positions to A; returns R."""
        rows = self.inputs(a)
        self.A.gram.add(rows.flatten(1, 2))
        return rows.shape[2]

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

    def begin_forward(self) -> None:
        """Reset the counts of uses and positions."""
        self._one_B_now = self._one_B
        for sums in (self.A, self.B_weight, self.B_bias, self.B_both):
            sums.begin_forward()

    def add_input(self, use: Use) -> None:
        """Add the weight's inputs to A; a bias has no input factor."""
        for sums in (self.B_weight, self.B_bias, self.B_both):
            sums.count_use()
        if use.rows is not None and self.mode != "expand":
            # Reduce divides the weight's sums by √R_n, but not the bias's. One such use is enough
            # to separate them for all uses of this forward pass: an example's sum goes over all of
            # them.
            self._one_B_now = False
        if "weight" not in self.names:
            return
        a, rows, mode = self.reduced_axes(use.a, use.rows, mean=True)
        if mode == "expand":
            if rows is not None:
                a = rows.counting(a)
            self.A.num_terms += len(a) * self.add_input_gram(a)
            return
        means, R = self.mean_inputs(a)
        if rows is None:
            self.A.add_means(means, R)
        else:  # a row may have R positions of its own; R_n counts all of them
            sums = rows.sums(means.movedim(1, 0) * R).movedim(0, 1)
            self.A.add_sums(sums, rows.counts * R, rows.by_roots)

    def end_forward(self) -> None:
        """Add the examples' means to A, and set by what the gradients' sums are divided."""
        self.A.end_forward()
        # R_n counts the positions of all uses, so it is known only now, after the last input.
        self.B_weight.roots = self.A.roots

    def add_gradient(self, use: Use, b: Tensor, sums: PositionSums) -> None:
        """Add to B: per group for the weight, over all outputs for the bias."""
        if self._one_B_now:
            self._add_bias_gradient(self.B_both, use, b, sums)
            return
        if "bias" in self.names:
            self._add_bias_gradient(self.B_bias, use, b, sums)
        if "weight" in self.names:
            reduced, rows, mode = self.reduced_axes(b, use.rows, mean=False)
            if mode == "expand" and rows is not None:
                reduced = rows.counting(reduced)
            # The cache belongs to the tensor b; another tensor must not push b out of it.
            known = sums if reduced is b else PositionSums()
            self.B_weight.add(self._weight_rows(reduced, mode, known, rows))

    def _add_bias_gradient(
        self, total: GradientFactor, use: Use, b: Tensor, sums: PositionSums
    ) -> None:
        # Plain sums, not divided by √R_n: a bias has no input factor that would take the other
        # √R_n.
        plain = None if use.rows is None else replace(use.rows, by_roots=False)
        reduced, rows, mode = self.reduced_axes(b, plain, mean=False)
        if mode == "expand" and rows is not None:
            reduced = rows.counting(reduced)
        of_bias = self._bias_rows(reduced, mode, sums if reduced is b else PositionSums())
        if mode == "reduce" and rows is not None:
            of_bias = rows.sums(of_bias[0])[None]
        total.add(of_bias)

    def _bias_rows(self, b: Tensor, mode: str, sums: PositionSums) -> Float[Tensor, "1 M d_out"]:
        if mode == "reduce":
            return sums(b, self.features)[None]
        return self.bias_gradients(b).flatten(0, 1)[None]

    def _weight_rows(self, b: Tensor, mode: str, sums: PositionSums, rows: Rows | None) -> Tensor:
        if mode == "expand":
            return self.weight_gradients(b).flatten(1, 2)
        if self.same_gradients:  # sum first (cached, see `PositionSums`), then split into groups
            by_group = sums(b, self.features).unflatten(-1, (self.groups, -1)).movedim(1, 0)
        else:
            by_group = gradient_sums(self.weight_gradients(b))
        return by_group if rows is None else rows.sums(by_group.movedim(1, 0)).movedim(0, 1)

    def end_vector(self) -> None:
        """Add the sums that waited for other uses."""
        for sums in (self.B_weight, self.B_bias, self.B_both):
            sums.end_vector()

    def share(self, name: str, other: Rule, others_name: str) -> None:
        """Add to the sums of another layer's weight or bias."""
        assert isinstance(other, WeightSharingRule) and name == others_name
        # A shared weight need not have a shared bias: their sums go over different uses now.
        for rule in (self, other):
            rule._one_B = False
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
        both = self.B_both.gram.total()
        B_weight = _either(both, self.B_weight.gram.total())
        A = self.A.gram.total()
        sums = {}
        if "bias" in self.names:
            B = _either(both, self.B_bias.gram.total())
            sums["bias"] = BlockSums(self._zeros(*self._bias_size()) if B is None else B)
        if "weight" in self.names:
            rows, columns = self._factor_sizes()
            if self.transposed:  # its rows are the inputs
                # The second factor is divided by the number of terms, in place. The bias's B, which
                # may be the same tensor, must not be.
                if B_weight is both and isinstance(both, Tensor):
                    B_weight = both.clone()
                first, second = A, B_weight
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
        sizes, own = {}, [name for name in self.names if name not in self._given_away]
        if "weight" in own:
            order = ("A", "B") if self.transposed else ("B", "A")
            for which, size in zip(order, self._factor_sizes(), strict=True):
                sizes["weight", which] = size
        if "bias" in own and not self._one_B:
            sizes["bias", "B"] = self._bias_size()
        return sizes

    def _whole_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(G, d) of the factors over the weight's rows and columns, if both are kept whole."""
        weight = self.layer.weight
        return (self.groups, len(weight) // self.groups), (self.groups, weight[0].numel())

    def _factor_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(G, d) of both factors as they are kept; a diagonal is d groups of one entry."""
        (groups, rows), columns = self._whole_sizes()
        return (rows, 1) if self._rows_apart else (groups, rows), columns

    def _bias_size(self) -> tuple[int, int]:
        d_out = len(self.layer.bias)
        return (d_out, 1) if self._rows_apart and not self.transposed else (1, d_out)

    def _zeros(self, groups: int, size: int) -> Factor:
        """The sum for a layer that saw no rows."""
        return at_least_float32(self.layer.weight.detach()).new_zeros(groups, size, size)


class LinearRule(WeightSharingRule):
    """nn.Linear on (N, ..., d_in), with any number of shared axes."""

    _sketch_rank: int | None = None

    def inputs(self, a: Tensor) -> Tensor:
        """(N, ..., d_in) as (1, N, R, d_in)."""
        if a.dim() < 2:
            raise ValueError(
                f"{self.layer} got shape {tuple(a.shape)}; needs a batch (N, ..., d_in)."
            )
        return a.flatten(1, -2)[None] if a.dim() > 2 else a[None, :, None]

    def use_sketches(self, rank: int) -> None:
        """Sum up wide factors as sketches: those whose sketch, with its rows, takes less memory."""
        self._sketch_rank = rank
        (_, first), (_, second) = self._whole_sizes()
        d_out, d_in = (second, first) if self.transposed else (first, second)
        if self._is_wide(d_in):
            self.A = InputFactor(SketchGram(rank))
        if self._is_wide(d_out):
            self.B_weight, self.B_bias, self.B_both = (
                GradientFactor(SketchGram(rank), self.by_example) for _ in range(3)
            )

    def factor_sizes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The sizes of those factors that are not sketched."""
        sizes = super().factor_sizes()
        return {which: size for which, size in sizes.items() if not self._is_wide(size[1])}

    def _is_wide(self, size: int) -> bool:
        return self._sketch_rank is not None and size > 4 * self._sketch_rank

    def _zeros(self, groups: int, size: int) -> Factor:
        """The sum for a layer that saw no rows."""
        if self._sketch_rank is None or not self._is_wide(size):
            return super()._zeros(groups, size)
        like = at_least_float32(self.layer.weight.detach())
        return SketchedFactor.zero(like, size, self._sketch_rank)


class TransposedLinearRule(LinearRule):
    """A layer y = x W + b whose weight is stored (d_in, d_out), as GPT-2's Conv1D."""

    transposed = True


def _either(first: Factor | None, second: Factor | None) -> Factor | None:
    """The sum of both, or the one that is not None."""
    if first is None or second is None:
        return second if first is None else first
    return add_factors(first, second)
