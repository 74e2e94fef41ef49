"""Elementwise affine layers, y = w ∘ z(x) + bias: the exact GGN block of each tensor, in any mode.

An example's gradient is Σ_r z_r ∘ b_r for the weight and Σ_r b_r for the bias. A block is the Gram
matrix of these gradients, or its diagonal for a large tensor (`gram.LARGEST_DENSE`).
"""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from kfac_backend.layers.gram import FactorSum, gram_of_gradients
from kfac_backend.layers.rule import ExampleGradients, Rule, Use, sum_over, unshared_copy
from kfac_backend.precision import at_least_float32


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

    def make_sums(self) -> None:
        """One sum for each parameter; there is no input factor."""
        self.B = {name: FactorSum(gram_of_gradients(self.parameter(name))) for name in self.names}

    def parameter(self, name: str) -> Tensor:
        """The parameter of that name."""
        return getattr(self.layer, name)

    @abstractmethod
    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """The gradients (M, P) in each of the parameters ``names``, from output gradients b.

        In a scalar they may come as terms of a sum, (M, c).
        """

    def add_gradient(self, use: Use, b: Tensor) -> None:
        """Add the examples' gradients."""
        for name, gradients in self.gradients(use, b).items():
            # An example's gradient is the sum over its rows. It comes before the outer product,
            # which would lose the products of different rows.
            if use.rows is not None:
                gradients = use.rows.sums(gradients)
            self.B[name].add(unshared_copy(gradients, b)[None])

    def position_gradients(self, use: Use, b: Tensor) -> Tensor:
        """The gradients of all parameters, concatenated, as those of one position (M, 1, P)."""
        gradients = self.gradients(use, b)
        rows = [self.B[name].gram.entries(gradients[name][None])[0] for name in self.names]
        return torch.cat(rows, -1)[:, None]

    def example_gradients(self, a: Tensor, b: Tensor) -> dict[str, ExampleGradients]:
        """The gradients (N, 1, C, P) themselves."""
        sizes = [self.parameter(name).numel() for name in self.names]
        parts = zip(self.names, b.split(sizes, -1), strict=True)
        return {name: ExampleGradients(part[None]) for name, part in parts}


class ChannelsRule(ExactRule):
    """A layer that multiplies z(x) by a weight and adds a bias, separately for each channel.

    It serves BatchNorm, GroupNorm, InstanceNorm and PReLU; derived rules have other axes.
    """

    parameter_names = frozenset({"weight", "bias"})
    needs_input = True

    multiplier: ClassVar[str] = "weight"
    """The name of the parameter that multiplies."""

    def normalised(self, a: Tensor) -> Tensor:
        """What the weight multiplies, z(x), in the shape of the output."""
        return _normalised(self.layer, a)

    def own_axes(self, dimensions: int) -> range:
        """The axes along which there are separate parameters; the others but the first share them.

        By default the second, which is that of the channels, or none if they have one parameter.
        """
        alone = self.parameter(next(iter(self.names))).numel() == 1
        return range(dimensions, dimensions) if alone else range(1, 2)

    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """Sums over the shared axes of b ∘ z and of b."""
        feature_axes, rows = self.own_axes(b.dim()), 1 if use.rows is None else len(use.rows.axes)
        if rows > self.own_axes(b.dim() + rows - 1).start:
            raise NotImplementedError(
                f"{self.layer} has separate parameters along one of the first {rows} axes, which "
                "are rows in examples_of_rows or counted_positions. Call the layer outside of "
                "this context, or flatten the rows to one axis."
            )
        # ∂f/∂w = Σ z ∘ b and ∂f/∂bias = Σ b, over all axes but the first that share the parameter.
        axes = [axis for axis in range(1, b.dim()) if axis not in feature_axes]
        gradients = {}
        if self.multiplier in self.names:
            z, b_z = at_least_float32(self.normalised(use.a)), at_least_float32(b)
            gradients[self.multiplier] = (
                _rows(sum_over(b_z * z, axes)) if len(feature_axes) else _inner_products(z, b_z)
            )
        if "bias" in self.names:
            # A scalar's sum is left at the features, whose sums the layer in front may need, too.
            if not len(feature_axes) and b.dim() > 2:
                axes = [1] if b.dim() == 3 else axes[1:]
            gradients["bias"] = _rows(sum_over(b, axes))
        return gradients


class LastAxesRule(ChannelsRule):
    """LayerNorm and RMSNorm: the last axes have parameters, which the axes before them share."""

    def own_axes(self, dimensions: int) -> range:
        """The normalised axes, which are the last."""
        return range(dimensions - len(self.layer.normalized_shape), dimensions)


class ChannelsFirstRule(LastAxesRule):
    """Derived layers that normalise the second axis of (N, C, ...), as those of ConvNeXt do."""

    features = 1
    own_axes = ChannelsRule.own_axes

    def normalised(self, a: Tensor) -> Tensor:
        """The input normalised over the second axis."""
        return super().normalised(a.movedim(1, -1)).movedim(-1, 1)


LastAxesRule.alternatives = (ChannelsFirstRule,)


class BiasRule(ChannelsRule):
    """`layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    parameter_names = frozenset({"bias"})
    needs_input = False


class ScaleRule(ChannelsRule):
    """`layers.Scale`, θ·x: the derivative is the inner product of input and output gradient."""

    parameter_names = frozenset({"scale"})
    multiplier = "scale"


def _normalised(layer: nn.Module, a: Tensor) -> Tensor:
    """The input z that a layer's weight multiplies: a norm's output without weight and bias."""
    match layer:
        case nn.LayerNorm():
            return F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        case nn.RMSNorm():
            return F.rms_norm(a, layer.normalized_shape, eps=layer.eps)
        case nn.GroupNorm():
            return F.group_norm(a, layer.num_groups, eps=layer.eps)
        case _InstanceNorm():
            batch_statistics = layer.training or not layer.track_running_stats
            mean, variance = (
                (None, None) if batch_statistics else (layer.running_mean, layer.running_var)
            )
            return F.instance_norm(
                a, mean, variance, use_input_stats=batch_statistics, eps=layer.eps
            )
        case _BatchNorm():
            # In train mode, which only the optimiser takes, the batch's statistics normalise.
            if layer.training:
                return F.batch_norm(a, None, None, training=True, eps=layer.eps)
            return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)
        case nn.PReLU():
            return a.clamp(max=0.0)  # the slope multiplies the negative part
        case Scale():
            return a
    raise NotImplementedError(f"There is no elementwise rule for {layer}.")


class OwnParameter(nn.Module):
    """One parameter of a module as a layer, declared by `register_parameters` or followed.

    It is never run. Its rule receives gradients in the copies of the parameter.

    ``view`` is the shape, beginning with 1, as which it is broadcast.
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

    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """Each example's gradient, which is the one in its copy (N, P)."""
        (name,) = self.names
        return {name: at_least_float32(b).flatten(1)}


def _rows(x: Tensor) -> Tensor:
    """(M, ...) as rows (M, P)."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def _inner_products(a: Float[Tensor, "N ..."], b: Float[Tensor, "N ..."]) -> Float[Tensor, "N c"]:
    """The terms of a_n · b_n, with half the memory traffic of (a * b).sum().

    They are the diagonal of a c×c product of a and b, each cut into c pieces.
    """
    if a.dim() == 1:
        return (a * b)[:, None]
    if not a.is_contiguous():  # channels last: both in the order in memory
        a, b = a.movedim(1, -1), b.movedim(1, -1)
    a, b = a.flatten(1), b.flatten(1)
    c = next(c for c in (4, 2, 1) if a.shape[-1] % c == 0)
    a, b = a.unflatten(-1, (c, -1)), b.unflatten(-1, (c, -1))
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1)
