"""Rules of elementwise affine layers, y = w ∘ z(x) + bias: the exact GGN block in any mode.

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
    """Layer that adds one learned scalar to every entry of its input.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3. The shape is (1,) and not (),
    because laplace-torch rejects 0-dimensional parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + bias, in the shape of x."""
        return x + self.bias


class Scale(nn.Module):
    """Layer that multiplies every entry of its input by one learned scalar.

    Source: Zhang, Dauphin & Ma 2019, "Fixup Initialization", rule 3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · x, in the shape of x."""
        return x * self.scale


class ExactRule(Rule):
    """Base class of rules that compute each example's (or row's) gradient, so blocks are exact."""

    needs_examples = True

    def make_sums(self) -> None:
        """Create one sum for each parameter; there is no input factor."""
        self.B = {name: FactorSum(gram_of_gradients(self.parameter(name))) for name in self.names}

    def parameter(self, name: str) -> Tensor:
        """Return the parameter of that name."""
        return getattr(self.layer, name)

    @abstractmethod
    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """Return the gradients (M, P) of the parameters ``names``, from output gradients b.

        A scalar's gradient may be returned as terms of a sum, (M, c).
        """

    def add_gradient(self, use: Use, b: Tensor) -> None:
        """Add the examples' gradients."""
        for name, gradients in self.gradients(use, b).items():
            # An example's gradient is the sum over its rows. Sum before the outer product, which
            # would otherwise lose the products of different rows.
            if use.rows is not None:
                gradients = use.rows.sums(gradients)
            self.B[name].add(unshared_copy(gradients, b)[None])

    def position_gradients(self, use: Use, b: Tensor) -> Tensor:
        """Return the gradients of all parameters, concatenated, as one position (M, 1, P)."""
        gradients = self.gradients(use, b)
        rows = [self.B[name].gram.entries(gradients[name][None])[0] for name in self.names]
        return torch.cat(rows, -1)[:, None]

    def example_gradients(self, a: Tensor, b: Tensor) -> dict[str, ExampleGradients]:
        """Return the gradients (N, 1, C, P) themselves."""
        sizes = [self.parameter(name).numel() for name in self.names]
        parts = zip(self.names, b.split(sizes, -1), strict=True)
        return {name: ExampleGradients(part[None]) for name, part in parts}


class ChannelsRule(ExactRule):
    """Rule of layers with y = w ∘ z(x) + bias, separately for each channel.

    It supports BatchNorm, GroupNorm, InstanceNorm and PReLU. Derived rules have other axes.
    """

    parameter_names = frozenset({"weight", "bias"})
    needs_input = True

    multiplier: ClassVar[str] = "weight"
    """Name of the parameter that multiplies."""

    def normalised(self, a: Tensor) -> Tensor:
        """Return z(x), the factor of the weight, in the shape of the output."""
        return _normalised(self.layer, a)

    def own_axes(self, dimensions: int) -> range:
        """Return the axes with separate parameters; all others except the first share them.

        By default this is the channel axis, the second, or none if the channels share one
        parameter.
        """
        alone = self.parameter(next(iter(self.names))).numel() == 1
        return range(dimensions, dimensions) if alone else range(1, 2)

    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """Return sums of b ∘ z and of b over the shared axes."""
        feature_axes, rows = self.own_axes(b.dim()), 1 if use.rows is None else len(use.rows.axes)
        if rows > self.own_axes(b.dim() + rows - 1).start:
            raise NotImplementedError(
                f"{self.layer} has separate parameters along one of the first {rows} axes, which "
                "are rows in examples_of_rows or counted_positions. Call the layer outside of "
                "this context, or flatten the rows to one axis."
            )
        # ∂f/∂w = Σ z ∘ b and ∂f/∂bias = Σ b, over all axes except the first that share the
        # parameter.
        axes = [axis for axis in range(1, b.dim()) if axis not in feature_axes]
        gradients = {}
        if self.multiplier in self.names:
            z, b_z = at_least_float32(self.normalised(use.a)), at_least_float32(b)
            gradients[self.multiplier] = (
                _rows(sum_over(b_z * z, axes)) if len(feature_axes) else _inner_products(z, b_z)
            )
        if "bias" in self.names:
            # Keep a scalar's sum by features, because the layer in front may need these sums, too.
            if not len(feature_axes) and b.dim() > 2:
                axes = [1] if b.dim() == 3 else axes[1:]
            gradients["bias"] = _rows(sum_over(b, axes))
        return gradients


class LastAxesRule(ChannelsRule):
    """Rule of LayerNorm and RMSNorm: the last axes have parameters, which the others share."""

    def own_axes(self, dimensions: int) -> range:
        """Return the normalised axes, which are the last."""
        return range(dimensions - len(self.layer.normalized_shape), dimensions)


class ChannelsFirstRule(LastAxesRule):
    """Rule of derived layers that normalise the second axis of (N, C, ...), as in ConvNeXt."""

    features = 1
    own_axes = ChannelsRule.own_axes

    def normalised(self, a: Tensor) -> Tensor:
        """Return the input normalised over the second axis."""
        return super().normalised(a.movedim(1, -1)).movedim(-1, 1)


LastAxesRule.alternatives = (ChannelsFirstRule,)


class BiasRule(ChannelsRule):
    """Rule of `layers.Bias`, x + θ: the derivative is the sum of the output's gradient."""

    parameter_names = frozenset({"bias"})
    needs_input = False


class ScaleRule(ChannelsRule):
    """Rule of `layers.Scale`, θ·x: the derivative is the inner product of input and gradient."""

    parameter_names = frozenset({"scale"})
    multiplier = "scale"


def _normalised(layer: nn.Module, a: Tensor) -> Tensor:
    """Return the factor z of a layer's weight: a norm's output without weight and bias."""
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
            # In train mode, which only the optimiser uses, the batch's statistics normalise.
            if layer.training:
                return F.batch_norm(a, None, None, training=True, eps=layer.eps)
            return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)
        case nn.PReLU():
            return a.clamp(max=0.0)  # the slope multiplies the negative part
        case Scale():
            return a
    raise NotImplementedError(f"There is no elementwise rule for {layer}.")


class OwnParameter(nn.Module):
    """One parameter of a module as a layer. It was registered or is followed.

    The layer never runs. Its rule receives gradients of the copies of the parameter.

    ``view`` is the broadcast shape, beginning with 1.
    """

    def __init__(self, module: nn.Module, name: str, view: tuple[int, ...]) -> None:
        super().__init__()
        # In a list, so that torch does not register the module as a submodule.
        self._module, self.name, self.view = [module], name, view

    @property
    def holder(self) -> nn.Module:
        """Module that has the parameter."""
        return self._module[0]

    @property
    def value(self) -> nn.Parameter:
        """The parameter."""
        return getattr(self.holder, self.name)

    def copies(self, value: Tensor, N: int) -> Tensor:
        """Return a copy (N, ...) for each example, expanded without further memory."""
        one = value.reshape(self.view)
        return one.expand(N, *one.shape[1:])


class OwnParameterRule(ExactRule):
    """Rule with the exact block of an `OwnParameter`."""

    def parameter(self, name: str) -> Tensor:
        """Return the parameter."""
        return self.layer.value

    def gradients(self, use: Use, b: Tensor) -> dict[str, Tensor]:
        """Return each example's gradient, the gradient of its copy (N, P)."""
        (name,) = self.names
        return {name: at_least_float32(b).flatten(1)}


def _rows(x: Tensor) -> Tensor:
    """Return (M, ...) as rows (M, P)."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def _inner_products(a: Float[Tensor, "N ..."], b: Float[Tensor, "N ..."]) -> Float[Tensor, "N c"]:
    """Return terms of a_n · b_n, with half the memory traffic of (a * b).sum().

    The terms are the diagonal of a c×c product of a and b, each cut into c pieces.
    """
    if a.dim() == 1:
        return (a * b)[:, None]
    if not a.is_contiguous():  # channels last: read both in the order of memory
        a, b = a.movedim(1, -1), b.movedim(1, -1)
    a, b = a.flatten(1), b.flatten(1)
    c = next(c for c in (4, 2, 1) if a.shape[-1] % c == 0)
    a, b = a.unflatten(-1, (c, -1)), b.unflatten(-1, (c, -1))
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1)
