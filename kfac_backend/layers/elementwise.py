"""Elementwise affine layers, y = w ∘ z(x) + bias: the exact GGN block of each tensor, in any mode.

An example's gradient is Σ_r z_r ∘ b_r for the weight and Σ_r b_r for the bias. A block is the Gram
matrix of these gradients, or its diagonal for a large tensor (`gram.LARGEST_DENSE`).
"""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.layers.gram import DiagonalGram, gram_of_gradients
from kfac_backend.layers.rule import (
    BlockSums,
    ExampleGradients,
    GradientFactor,
    PositionSums,
    Rule,
    Use,
)
from kfac_backend.options import Approximation
from kfac_backend.precision import at_least_float32

__all__ = [
    "BatchNormRule",
    "Bias",
    "BiasRule",
    "ElementwiseRule",
    "ExactRule",
    "GroupNormRule",
    "InstanceNormRule",
    "LayerNormRule",
    "OwnParameter",
    "OwnParameterRule",
    "PReLURule",
    "RMSNormRule",
    "Scale",
    "ScaleRule",
    "default_view",
]


class Bias(nn.Module):
    """Adds one learned scalar to every entry of its input.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3. Shape (1,) and not (), since
    laplace-torch rejects 0-dimensional parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + bias, in the shape of x."""
        return x + self.bias


class Scale(nn.Module):
    """Multiplies every entry of its input by one learned scalar.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · x, in the shape of x."""
        return x * self.scale


class ExactRule(Rule):
    """A rule that computes each example's gradient (or each row's): its blocks are exact."""

    needs_examples = True

    def __init__(self, layer: Any, mode: Approximation, names: Collection[str]) -> None:
        super().__init__(layer, mode, names)
        self.sums = {
            name: GradientFactor(gram_of_gradients(self.size(name)), by_example=True)
            for name in names
        }
        self._given_away: set[str] = set()

    def parameter(self, name: str) -> Tensor:
        """The parameter of that name."""
        return getattr(self.layer, name)

    def size(self, name: str) -> int:
        """P, how many entries a parameter has."""
        return self.parameter(name).numel()

    @abstractmethod
    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """The gradients (V·M, P) in each of the parameters ``names``, from output gradients b."""

    def begin_forward(self) -> None:
        """Reset the counts of uses."""
        for sums in self.sums.values():
            sums.begin_forward()

    def add_input(self, use: Use) -> None:
        """Count the use; the block has no input factor."""
        for sums in self.sums.values():
            sums.count_use()

    def add_gradient(self, use: Use, b: Tensor, sums: PositionSums) -> None:
        """Add the examples' gradients."""
        for name, gradients in self.gradients(use, b, sums).items():
            if use.rows is not None:
                gradients = use.rows.sums(gradients)
            self.sums[name].add(gradients[None])

    def end_vector(self) -> None:
        """Add the sums that waited for other uses."""
        for sums in self.sums.values():
            sums.end_vector()

    def share(self, name: str, other: Rule, others_name: str) -> None:
        """Add to the sums of another layer's parameter."""
        assert isinstance(other, ExactRule)
        self.sums[name] = other.sums[others_name]
        self._given_away.add(name)

    def block_sums(self) -> dict[str, BlockSums]:
        """The parameters' sums."""
        return {
            name: BlockSums(self._total(name, sums))
            for name, sums in self.sums.items()
            if name not in self._given_away
        }

    def _total(self, name: str, sums: GradientFactor) -> Tensor:
        total = sums.gram.total()
        if total is None:  # no row of the data reached the layer
            size = self.size(name)
            groups, size = (size, 1) if isinstance(sums.gram, DiagonalGram) else (1, size)
            total = at_least_float32(self.parameter(name).detach()).new_zeros(groups, size, size)
        return total

    def position_gradients(self, use: Use, b: Tensor) -> Tensor:
        """The gradients of all parameters, concatenated, as those of one position (M, 1, P)."""
        gradients = self.gradients(use, b, PositionSums())
        return torch.cat([gradients[name] for name in self.sums], -1)[:, None]

    def example_gradients(self, a: Tensor, b: Tensor) -> dict[str, ExampleGradients]:
        """The gradients (N, 1, C, P) themselves."""
        sizes = [self.size(name) for name in self.sums]
        return {
            name: ExampleGradients(part[None])
            for name, part in zip(self.sums, b.split(sizes, -1), strict=True)
        }


class ElementwiseRule(ExactRule):
    """A layer that multiplies by a ``weight`` and adds a ``bias``, both entry by entry."""

    parameter_names = frozenset({"weight", "bias"})
    needs_input = True

    @abstractmethod
    def normalised(self, a: Tensor) -> Tensor:
        """What the weight multiplies, z(x), in the shape of the output."""

    def own_axes(self, dimensions: int) -> range:
        """The axes along which there are separate parameters; the others but the first share them.

        By default the second, which is that of the channels.
        """
        return range(1, 2)

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """Sums over the shared axes of b ∘ z and of b."""
        own, rows = self.own_axes(b.dim()), 1 if use.rows is None else len(use.rows.axes)
        if rows > self.own_axes(b.dim() + rows - 1).start:
            raise NotImplementedError(
                f"{self.layer} has separate parameters along an axis that examples_of_rows or "
                f"counted_positions takes for rows: one of the first {rows}. Call the layer "
                "outside of it, or flatten the rows to one axis."
            )
        b, axes = at_least_float32(b), [axis for axis in range(1, b.dim()) if axis not in own]
        gradients = {}
        if "weight" in self.names:
            z = at_least_float32(self.normalised(use.a))
            product = (b.unflatten(0, (-1, len(z))) * z).flatten(0, 1)
            gradients["weight"] = _sum_over(product, axes)
        if "bias" in self.names:
            gradients["bias"] = _sum_over(b, axes)
        return gradients


class LayerNormRule(ElementwiseRule):
    """nn.LayerNorm: the last axes have parameters, which the axes before them share."""

    def own_axes(self, dimensions: int) -> range:
        """The normalised axes, which are the last."""
        return range(dimensions - len(self.layer.normalized_shape), dimensions)

    def normalised(self, a: Tensor) -> Tensor:
        """The input with mean 0 and variance 1."""
        return F.layer_norm(a, self.layer.normalized_shape, eps=self.layer.eps)


class RMSNormRule(LayerNormRule):
    """nn.RMSNorm: as LayerNorm, without mean and bias."""

    def normalised(self, a: Tensor) -> Tensor:
        """The input with mean square 1."""
        return F.rms_norm(a, self.layer.normalized_shape, eps=self.layer.eps)


class ChannelsFirstLayerNormRule(LayerNormRule):
    """Derived layers that normalise the second axis of (N, C, ...), as those of ConvNeXt do."""

    features = 1
    own_axes = ElementwiseRule.own_axes

    def normalised(self, a: Tensor) -> Tensor:
        """The input normalised over the second axis."""
        return super().normalised(a.movedim(1, -1)).movedim(-1, 1)


class ChannelsFirstRMSNormRule(ChannelsFirstLayerNormRule, RMSNormRule):
    """The same for layers derived from nn.RMSNorm."""


LayerNormRule.alternatives = (ChannelsFirstLayerNormRule,)
RMSNormRule.alternatives = (ChannelsFirstRMSNormRule,)


class GroupNormRule(ElementwiseRule):
    """nn.GroupNorm: one weight and one bias per channel."""

    def normalised(self, a: Tensor) -> Tensor:
        """The input with mean 0 and variance 1 in each group."""
        return F.group_norm(a, self.layer.num_groups, eps=self.layer.eps)


class InstanceNormRule(ElementwiseRule):
    """nn.InstanceNorm1d, 2d, 3d, with or without running statistics."""

    def normalised(self, a: Tensor) -> Tensor:
        """The input normalised channel by channel of each example."""
        layer = self.layer
        own = layer.training or not layer.track_running_stats
        mean, variance = (None, None) if own else (layer.running_mean, layer.running_var)
        return F.instance_norm(a, mean, variance, use_input_stats=own, eps=layer.eps)


class BatchNormRule(ElementwiseRule):
    """nn.BatchNorm1d, 2d, 3d in eval mode: a fixed map per channel.

    In train mode, which only the optimiser takes, the batch's own statistics normalise the input.
    """

    def normalised(self, a: Tensor) -> Tensor:
        """The input normalised by the running statistics, or by the batch's."""
        layer = self.layer
        if layer.training:
            return F.batch_norm(a, None, None, training=True, eps=layer.eps)
        return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)


class PReLURule(ElementwiseRule):
    """nn.PReLU: the slope multiplies the negative part; one for all channels or one for each."""

    parameter_names = frozenset({"weight"})

    def own_axes(self, dimensions: int) -> range:
        """The channels', if they have a slope each; otherwise none."""
        none = range(dimensions, dimensions)
        return none if self.layer.num_parameters == 1 else super().own_axes(dimensions)

    def normalised(self, a: Tensor) -> Tensor:
        """The negative part."""
        return a.clamp(max=0.0)


class BiasRule(ExactRule):
    """`layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    parameter_names = frozenset({"bias"})

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """Σ b_n."""
        if b.dim() <= 2:  # nothing to share, and b itself must not wait
            return {"bias": at_least_float32(b).reshape(len(b), -1).sum(1, keepdim=True)}
        # Summed by features first: the convolution or linear layer in front needs that sum, too,
        # and `PositionSums` keeps it.
        return {"bias": sums(b, features=1 if b.dim() == 4 else -1).sum(1, keepdim=True)}


class ScaleRule(ExactRule):
    """`layers.Scale`, θ·x: the derivative is the inner product of input and output gradient."""

    parameter_names = frozenset({"scale"})
    needs_input = True

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """a_n · b_n."""
        a, b = at_least_float32(use.a), at_least_float32(b)
        if a.dim() == 1:
            a, b = a[:, None], b[:, None]
        if not a.is_contiguous():  # channels last: bring both into the order in memory
            a, b = a.movedim(1, -1), b.movedim(1, -1)
        a, b = a.flatten(1), b.flatten(1).unflatten(0, (-1, len(a)))
        return {"scale": _inner_products(a, b).flatten()[:, None]}


class OwnParameter(nn.Module):
    """One parameter of a module as a layer, declared by `register_parameters` or followed.

    It is never run. Its rule receives gradients in the copies of the parameter.

    Args:
        module: the module that has the parameter.
        name: the parameter's name there.
        view: the shape, beginning with 1, as which it is broadcast.
    """

    def __init__(self, module: nn.Module, name: str, view: tuple[int, ...]) -> None:
        super().__init__()
        # In a list, so that torch does not register the module as a submodule.
        self._module, self.name, self.view = [module], name, view

    @property
    def holder(self) -> nn.Module:
        """The module that has the parameter."""
        return self._module[0]

    @property
    def value(self) -> nn.Parameter:
        """The parameter."""
        return getattr(self.holder, self.name)

    def copies(self, value: Tensor, N: int) -> Tensor:
        """A copy (N, ...) for each example, expanded without taking more memory."""
        one = value.reshape(self.view)
        return one.expand(N, *one.shape[1:])

    def extra_repr(self) -> str:
        """The module's class and the parameter's name."""
        return f"{type(self.holder).__name__}.{self.name}"


class OwnParameterRule(ExactRule):
    """The exact block of an `OwnParameter`."""

    def parameter(self, name: str) -> Tensor:
        """The parameter."""
        return self.layer.value

    def gradients(self, use: Use, b: Tensor, sums: PositionSums) -> dict[str, Tensor]:
        """The copies' gradients."""
        (name,) = self.names
        return {name: at_least_float32(b).flatten(1)}


def default_view(p: Tensor) -> tuple[int, ...] | None:
    """The parameter's own shape if its first axis has one entry."""
    return tuple(p.shape) if p.dim() > 1 and p.shape[0] == 1 else None


def _sum_over(x: Tensor, axes: list[int]) -> Tensor:
    """The sum over some axes, as rows (M, P)."""
    return (x.sum(axes) if axes else x).reshape(len(x), -1)


def _inner_products(a: Float[Tensor, "N D"], b: Float[Tensor, "V N D"]) -> Float[Tensor, "V N"]:
    """a_n · b_vn, with half the memory traffic of (a * b).sum().

    It is the trace of a k×k product of a and b, each cut into k pieces.
    """
    k = next(k for k in (4, 2, 1) if a.shape[-1] % k == 0)
    a, b = a.unflatten(-1, (k, -1)), b.unflatten(-1, (k, -1))
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
