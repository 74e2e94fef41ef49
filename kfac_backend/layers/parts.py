"""Layers made of several linear maps: an equal forward, in which hooks see each map."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LayerByParts", "LinearPart"]


class LinearPart(nn.Module):
    """One linear map of a layer, y = x Wᵀ + b, whose parameters are the layer's own.

    Args:
        layer: the layer.
        weight: name of its weight (d_out, d_in).
        bias: name of its bias (d_out,), if there is one.
        slot: which of a tensor's equal parts, one below the other, is this map's.
        slots: "weight" and "bias" -> how many maps that tensor holds, if more than this one.
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
        self._layer = [layer]  # not a submodule
        self.parameter_of = {"weight": weight} | ({} if bias is None else {"bias": bias})
        self.slot, self.slots = slot, dict(slots or {})

    @property
    def weight(self) -> Tensor:
        """(d_out, d_in)."""
        return self._own("weight")

    @property
    def bias(self) -> Tensor | None:
        """(d_out,), if there is one."""
        return self._own("bias") if "bias" in self.parameter_of else None

    def forward(self, x: Tensor) -> Tensor:
        """X Wᵀ + b for x (N, ..., d_in)."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Whose part it is."""
        return f"{type(self._layer[0]).__name__}.{self.parameter_of['weight']}"

    def _own(self, local: str) -> Tensor:
        # By name, as the tensor is another one while a curvature pass runs.
        tensor = getattr(self._layer[0], self.parameter_of[local])
        slots = self.slots.get(local, 1)
        return tensor if slots == 1 else tensor.chunk(slots)[self.slot]


class LayerByParts(ABC):
    """How a layer computes its output by `LinearPart`s; takes the place of its forward in a pass.

    ::

        @register_rule(LoRALinear)
        class LoRAByParts(LayerByParts):
            def parts(self, layer):
                return {"down": LinearPart(layer, "A"), "up": LinearPart(layer, "B")}

            def forward(self, layer, parts, x):
                return layer.base(x) + layer.scale * parts["up"](parts["down"](x))

    Other layers that are called inside, as ``layer.base`` here, are seen as ever. The first batch
    of a pass proves that the outputs and their derivatives are those of the layer's own forward.
    """

    is_checked = True

    @abstractmethod
    def parts(self, layer: Any) -> Mapping[str, LinearPart]:
        """The linear maps by their names; together they know all of the layer's own parameters."""

    @abstractmethod
    def forward(
        self, layer: Any, parts: Mapping[str, LinearPart], *args: Any, **kwargs: Any
    ) -> Any:
        """What the layer's forward returns, by way of the parts."""
