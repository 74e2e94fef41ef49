"""Call a model with many values of some parameters.

If these are the parameters of one linear layer, whose outputs the model returns, the other layers
run once, and the layer is one product for all values (`OneLinear`).
"""

import random
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_backend.engine.model_calls import call_with, has_known_code, uncompiled

MOST_ENTRIES = 2**20
"""Maximum number of entries of an activation that `call_with_each` computes at once, estimated."""
METADATA: set[Any] = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.is_complex,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
}  # fmt: skip
"""Functions of a tensor that do not read its values."""


def call_with_each(
    model: nn.Module, parameters: Mapping[str, Float[Tensor, "S *shape"]], x: Any
) -> Float[Tensor, "S N *rest"]:
    """Return the model's outputs at x for each of S values of some parameters, as `call_with`.

    Small inputs run for many values at once if the model consists of `VECTORISED` classes. For the
    parameters of a single linear layer, the other layers run once, see `OneLinear`.
    """
    (S,) = {len(values) for values in parameters.values()}
    tensors = [t for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]
    # The activations of one value: each token, and each example, becomes a vector of this width.
    width = max((size for p in model.parameters() for size in p.shape), default=1)
    entries = sum(t.numel() * (1 if t.is_floating_point() else width) for t in tensors)
    entries = max(1, entries, *(width * t.shape[:1].numel() for t in tensors))
    at_once = min(S, MOST_ENTRIES // entries) if tensors else 1
    if at_once > 1 and has_known_code(model):
        run = partial(call_with, model, x=x)
        return torch.vmap(run, chunk_size=at_once)(dict(parameters)).contiguous()
    samples = [
        dict(zip(parameters, values, strict=True))
        for values in zip(*(values.unbind() for values in parameters.values()), strict=True)
    ]
    # In train mode buffers are copied for each call, so search their places again.
    in_training = any(module.training for module in model.modules())
    places: list[Any] | None = None if in_training else []
    outputs = []
    with uncompiled():
        if S > 1 and not in_training and len({name.rpartition(".")[0] for name in parameters}) == 1:
            layer = OneLinear(samples[0])
            outputs.append(layer.run(model, x, places))
            if layer.gives(outputs[0]):
                return layer.outputs(parameters)
        for sample in samples[len(outputs) :]:
            outputs.append(call_with(model, sample, x, places=places))
    return torch.stack(outputs)


class OneLinear:
    """Record of one call of a model, from which its outputs at other weights of a layer follow.

    The output is W h + b for all values of W and b if three conditions hold. The call reads the
    values of W and b only in one `F.linear`, it does not read or change the result, and it returns
    it. Then no branch of the model's code can depend on W and b, and neither can h. Operations are
    seen by torch's dispatcher, which they all pass, and other functions that read a tensor, such as
    ``numpy``, by a `TorchFunctionMode`.

    Each call of the model must have the same h. A call is therefore refused if it draws random
    numbers by torch, NumPy or Python, or changes a buffer or an attribute of a module. The code
    must not depend on any other state that it changes itself.
    """

    def __init__(self, sample: Mapping[str, Tensor]) -> None:
        self._sample = {name: value.clone() for name, value in sample.items()}  # own memory
        self._inputs: list[tuple[Tensor, Tensor, Tensor | None, Tensor, int, object]] = []
        self._watched = {*map(address, self._sample.values())} - {None}
        self._is_refused = False
        self._is_inside = False

    def run(self, model: nn.Module, x: Any, places: list[Any] | None) -> Tensor:
        """Return the model's output with these parameters, and record its operations."""
        before = [*_state_of(model)]
        with _Operations(self), _Functions(self):
            output = call_with(model, self._sample, x, places=places)
        after = [*_state_of(model)]
        is_same = len(before) == len(after) and all(map(_is_same, before, after))
        self._is_refused |= not is_same
        return output

    def gives(self, output: Tensor) -> bool:
        """Return whether the layer's product gives the model's output at all values."""
        if self._is_refused or len(self._inputs) != 1:
            return False
        ((h, weight, bias, z, version, ambient),) = self._inputs
        learned = {id(value) for value in self._sample.values()}
        return (
            output is z
            and learned <= {id(weight), id(bias)}
            and id(h) not in learned
            and not torch.is_autocast_enabled(h.device.type)
            and h._version == version
            and ambient == _ambient(h)
        )

    def outputs(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return F.linear(h, W_s, b_s) for all values, (S, N, ..., C)."""
        ((h, weight, bias, *_),) = self._inputs
        values = {id(value): parameters[name] for name, value in self._sample.items()}
        W = values.get(id(weight), weight[None])  # (S or 1, C, d)
        product = (h.flatten(0, -2) @ W.flatten(0, 1).mT).unflatten(1, W.shape[:2]).movedim(1, 0)
        if bias is not None:
            product = product + values.get(id(bias), bias[None])[:, None]  # (S, M, C)
        return product.contiguous().unflatten(1, h.shape[:-1])

    def uses(self, arguments: Any) -> bool:
        """Return whether arguments contain a tensor with the memory of W, b or the result."""
        if isinstance(arguments, Tensor):
            return address(arguments) in self._watched
        if isinstance(arguments, Mapping):
            arguments = arguments.values()
        elif not isinstance(arguments, (list, tuple)):
            return False
        return any(map(self.uses, arguments))

    def function(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call one of torch's functions, and record it."""
        is_linear = function is F.linear and not kwargs and not self._inputs
        learned = {id(value) for value in self._sample.values()}
        if is_linear and learned & {id(value) for value in args[1:]}:
            h, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
            self._is_refused |= self.uses(h) or h.is_inference()  # which count no changes in place
            self._is_inside = True
            z = function(*args)
            self._is_inside = False
            version = 0 if h.is_inference() else h._version
            self._inputs.append((h, weight, bias, z, version, _ambient(h)))
            self._watched |= {address(z)} - {None}
            return z
        if function not in METADATA and self.uses((args, kwargs)):
            self._is_refused = True
        return function(*args, **kwargs)

    def operation(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record an operation of torch's dispatcher."""
        is_random = torch.Tag.nondeterministic_seeded in operation.tags
        if is_random or (not self._is_inside and self.uses((args, kwargs))):
            self._is_refused = True


class _Functions(TorchFunctionMode):
    """Report each call of a function that takes tensors."""

    def __init__(self, layer: OneLinear) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._layer.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Report each operation, also those inside of compiled and C++ code."""

    def __init__(self, layer: OneLinear) -> None:
        super().__init__()
        self._layer = layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._layer.operation(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def address(tensor: Tensor) -> tuple[str, int] | None:
    """Return the device and the address of a tensor's memory, which its views share.

    Return None for sparse tensors, whose memory no other tensor shares, and for tensors within
    transforms such as ``torch.func.vmap``. The dispatcher gets these without the transform.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore
    if is_wrapped or tensor.layout is not torch.strided:
        return None
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _ambient(h: Tensor) -> tuple[bool, ...]:
    """Return the modes of torch that the result of a layer depends on."""
    kind = h.device.type
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.is_autocast_enabled(kind)


def _state_of(model: nn.Module) -> Iterator[Any]:
    """Yield all that a call may change outside of torch's generators."""
    yield random.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        yield name, keys.tobytes(), *rest
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules", "_buffers"):
                yield name
                yield value
        for buffer in module._buffers.values():
            yield buffer
            yield None if buffer is None or buffer.is_inference() else buffer._version


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    plain = (int, float, str, tuple)
    return type(before) is type(after) and isinstance(before, plain) and before == after
