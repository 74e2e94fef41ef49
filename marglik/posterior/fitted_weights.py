"""Store the weights of a posterior's fit, and check that its network still has them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.sharding import is_part, local_part, reshard

STATISTICS = "running_mean", "running_var"


class FittedWeights:
    """A network's trainable parameters and running statistics at a fit.

    Frozen parameters and other buffers are not stored. For a network under `fully_shard` it stores
    this rank's part. Each value has the dtype of its tensor in the network.

    Args:
        model: the network.
        parameters: the values of its trainable parameters by name, in a dtype that can hold them
            all. The running statistics are copied.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        statistics = {name: value.clone() for name, value in running_statistics(model).items()}
        self.values: dict[str, Tensor] = statistics | _in_own_dtypes(parameters, model)
        """Values by name."""
        # Torch's state of the network's tensors at the last comparison. The tensors are kept, so
        # that no other tensor gets their ids.
        self._compared: tuple[list[Any], list[Tensor]] = [], []

    def move(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Convert to the network's present dtypes and devices.

        ``parameters`` are the values of the trainable ones, converted already.
        """
        current = weights_of(model)
        moved = {name: value.to(current[name]) for name, value in self.values.items()}
        self.values = moved | _in_own_dtypes(parameters, model)

    def check(self, model: nn.Module, *, by_value: bool) -> None:
        """Raise a ValueError that names the first weight that differs from the network's.

        Args:
            model: the network.
            by_value: see `Posterior.check_weights`.
        """
        current = weights_of(model)
        versions = [
            (id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in current.values()
        ]
        is_same = not by_value and versions == self._compared[0]
        for name in dict.fromkeys([*current, *self.values]):
            if is_same and not name.endswith(STATISTICS):  # torch does not count their versions
                continue
            now, fitted = current.get(name), self.values.get(name)
            if now is not None and fitted is not None and now.dtype != fitted.dtype:
                raise ValueError(
                    f"{type(model).__name__} is in {now.dtype} ('{name}'), but the posterior was "
                    f"fitted in {fitted.dtype}. Convert both with posterior.to(dtype={now.dtype}), "
                    "or fit again."
                )
            if now is None or fitted is None or not torch.equal(now.to(fitted), fitted):
                raise ValueError(
                    f"{type(model).__name__} no longer has the weights at which the posterior was "
                    f"fitted: '{name}' has other values, or was frozen or unfrozen. Fit again, or "
                    "restore the weights with model.load_state_dict(posterior.fitted_weights(), "
                    "strict=False)."
                )
        self._compared = versions, list(current.values())


def _in_own_dtypes(parameters: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    current = trainable_parameters(model)
    return {name: value.to(current[name].dtype) for name, value in parameters.items()}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name; under `fully_shard` this rank's parts."""
    reshard(model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return trainable parameters and running statistics by name; parts if sharded."""
    named = trainable_parameters(model)
    current = {name: local_part(p) if is_part(p) else p for name, p in named.items()}
    return running_statistics(model) | current


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return running means and variances by name, of BatchNorm and similar layers."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(STATISTICS)}
