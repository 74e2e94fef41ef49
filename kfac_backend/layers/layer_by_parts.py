"""Layers made of several linear maps, such as attention, with hooks on each map.

K-FAC needs the input and the output gradient of each linear map. If a layer computes several maps
in one call, hooks cannot capture them. In a pass its forward is therefore replaced by one that
computes the same and calls the maps one by one. The proof on the first batch compares both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend.sharding import whole_shape


class LinearPart(nn.Module):
    """One linear map of a layer, y = x Wᵀ + b, with the layer's own parameters.

    Args:
        layer: the layer.
        weight: name of its weight (d_out, d_in).
        bias: name of its bias (d_out,), if there is one.
        slot: the index of this map, if tensors contain several: packed below each other like
            attention's queries, keys and values, or stacked (E, d_out, d_in) like experts.
        slots: "weight" and "bias" -> the number of maps packed in that tensor, if it is more than
            one.
    """

    def __init__(
        self,
        layer: nn.Module,
        weight: str,
        bias: str | None = None,
        slot: int = 0,
        slots: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        # In a list, so that torch does not register the layer as a submodule of its own part.
        self._layer = [layer]
        self.parameter_of = {"weight": weight} | ({} if bias is None else {"bias": bias})
        self.slot, self.slots = slot, dict(slots or {})

    @property
    def weight(self) -> Tensor:
        """The map's own matrix (d_out, d_in) in the layer's tensor."""
        return self._own("weight")

    @property
    def bias(self) -> Tensor | None:
        """The map's bias (d_out,), if it has one."""
        return self._own("bias") if "bias" in self.parameter_of else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b for x (N, ..., d_in)."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the class of the whole layer, and the weight's name."""
        return f"{type(self._layer[0]).__name__}.{self.parameter_of['weight']}"

    def _own(self, local: str) -> Tensor:
        # Look up by name each time, because a curvature pass replaces the layer's tensors.
        tensor = whole_shape(getattr(self._layer[0], self.parameter_of[local]))
        slots = self.slots.get(local, 1)
        if slots == 1:
            return tensor
        behind = tensor.shape[-1:] if local == "weight" else ()
        return tensor.reshape(slots, -1, *behind)[self.slot]


class TransposedPart(LinearPart):
    """Map y = x W + b whose weight is stored as (d_in, d_out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b for x (N, ..., d_in)."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class FunctionalLayer(nn.Module):
    """Layer that represents a call such as ``F.conv2d(x, weight, bias)``; it never runs.

    Args:
        places: maps "weight" and "bias" to the parameter's module, and its name there.
        settings: the attributes that the rule reads from such a layer: stride, padding and so on.
        slot: index of the matrix, if the weight is a stack of them.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[nn.Module, str]],
        settings: Mapping[str, Any],
        slot: int | None = None,
    ) -> None:
        super().__init__()
        self._slot = slot
        self._places = dict(places)  # a dictionary, so that the modules are no submodules
        self.settings = dict(settings)
        vars(self).update(settings)

    @property
    def weight(self) -> Tensor:
        """The weight."""
        weight = whole_shape(getattr(*self._places["weight"]))
        return weight if self._slot is None else weight[self._slot]

    @property
    def bias(self) -> Tensor | None:
        """The bias, if the call has one that is a parameter."""
        return getattr(*self._places["bias"]) if "bias" in self._places else None


class LayerByParts(ABC):
    """Computation of a layer's output by `LinearPart`s, which replaces its forward in a pass.

    ::

        @register_rule(LoRALinear)
        class LoRAByParts(LayerByParts):
            def parts(self, layer):
                return {"down": LinearPart(layer, "A"), "up": LinearPart(layer, "B")}

            def forward(self, layer, parts, x):
                return layer.base(x) + layer.scale * parts["up"](parts["down"](x))

    Layers that the forward calls, such as ``layer.base`` here, have their own rules. The first
    batch of a pass proves that the outputs and their derivatives equal the outputs and derivatives
    of the layer's own forward.
    """

    is_checked = True
    """Whether the proof is necessary; it is not if ``forward`` calls the layer's own forward."""

    num_examples: int | None = None
    """N of the present batch, if known."""

    differentiable = False
    """Whether a pass keeps the graphs of the parts' inputs with respect to the model's input."""

    @abstractmethod
    def parts(self, layer: Any) -> Mapping[str, LinearPart]:
        """Return name -> linear map; together the maps have all of the layer's parameters."""

    @abstractmethod
    def forward(
        self, layer: Any, parts: Mapping[str, LinearPart], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of the layer's own forward, computed by the parts."""
