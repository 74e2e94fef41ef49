"""What a model must be after an error or Ctrl-C: exactly what it was before."""

from typing import Any

import torch
from torch import nn

__all__ = ["everything_of"]


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What must be the same afterwards: values, objects and their types, flags, hooks, modes."""
    found: dict[Any, Any] = {"grad mode": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        found[name, "mode"] = module.training
        found[name, "forward"] = vars(module).get("forward")
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_with_kwargs", "_always_called")):
                found[name, key] = dict(value)
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                flags = type(tensor), tensor.requires_grad, tensor.grad is None, tensor.dtype
                found[name, local] = id(tensor), *flags
                found[name, local, "values"] = tensor.detach().flatten().tolist()
    return found
