"""Compute Jacobians of a network's outputs for few parameters, and output covariances."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import jacrev
from torch.overrides import TorchFunctionMode

from kfac_backend.covariance.output_covariance import (
    check_classes,
    check_not_empty,
    check_positions,
)
from kfac_backend.engine.batches import detached, to_device
from kfac_backend.engine.model_calls import call_with, plain_attention, preserve_attributes
from kfac_backend.engine.task import check_finite
from kfac_backend.precision import at_least_float32
from marglik.posterior.precision import Precision

_CHECKPOINT = "torch.utils.checkpoint. Use checkpoints only in train mode (if self.training)."
NO_JACOBIAN = {
    "doesn't have storage": "packed sequences. Use structure 'kron', or pad the sequences.",
    "saved tensor hooks": _CHECKPOINT,
    "setup_context": _CHECKPOINT,
}
"""Maps a part of torch's error to its cause in the network, and the way out."""
CHANNELS = {F.layer_norm: -1, F.instance_norm: 1, F.batch_norm: 1}
"""Maps a norm to the first axis of its input that its weight and bias have."""


def jacobians(
    model: nn.Module,
    indices: Int[Tensor, "P"],
    x: Any,
    differentiable: bool = False,
    layer: str | None = None,
) -> tuple[Float[Tensor, "N *R C"], Float[Tensor, "N *R C P"]]:
    """Return outputs f and their Jacobians J with respect to some of the trainable parameters.

    Args:
        model: the model, in the mode in which it must run.
        indices: indices of the parameters in the vector of all trainable ones.
        x: inputs, moved to the model's device.
        differentiable: whether both results keep their graph in x.
        layer: name of a layer. The parameters are variable only in its own calls, and constants
            elsewhere.
    """
    trainable = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    x = to_device(x, device) if differentiable else detached(x, device)
    sizes = [p.numel() for p in trainable.values()]

    def outputs(vector: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(trainable.items(), vector.split(sizes), strict=True)
        values = {n: part.view(p.shape).to(p) for (n, p), part in parts}
        if layer is None:
            f = call_with(model, values, x)
        else:
            with _in_calls_of(model, layer, values):
                f = call_with(model, {}, x)
        return f, f

    affine = _AffineNorms() if differentiable else nullcontext()
    with plain_attention(), preserve_attributes(model), affine:
        try:
            J, f = jacrev(outputs, has_aux=True)(parameter_vector(trainable.values()))
        except RuntimeError as error:
            way_out = next((out for sign, out in NO_JACOBIAN.items() if sign in str(error)), None)
            if way_out is None:
                raise
            raise NotImplementedError(
                f"torch cannot compute the model's Jacobian by vmap with {way_out}"
            ) from error
    check_finite(model, f, x)
    return (f, J[..., indices]) if differentiable else (f.detach(), J.detach()[..., indices])


@contextmanager
def _in_calls_of(model: nn.Module, layer: str, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which a layer has these parameters only while it runs."""
    module = model.get_submodule(layer)
    names = {id(p): name for name, p in model.named_parameters()}
    places = [
        (of_module._parameters, local, names[id(p)])
        for of_module in module.modules()
        for local, p in of_module._parameters.items()
        if p is not None and names[id(p)] in values
    ]
    constants: list[Any] = []

    def before(*_: Any) -> None:
        constants[:] = [parameters[local] for parameters, local, _name in places]
        for parameters, local, name in places:
            parameters[local] = values[name]  # pyright: ignore  # a tensor, within call_with

    def after(*_: Any) -> None:
        for (parameters, local, _name), constant in zip(places, constants, strict=True):
            parameters[local] = constant

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _AffineNorms(TorchFunctionMode):
    """Context in which norms multiply by their weight, and add their bias, in a separate step.

    The vmap of torch 2.11 treats the mean and the deviation as constants when it maps the gradient
    of a norm's weight. The Jacobian's derivatives in the input would then silently lack a part.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in CHANNELS:
            return func(*args, **(kwargs or {}))
        call = inspect.signature(func).bind(*args, **(kwargs or {}))
        weight, bias = (call.arguments.pop(name, None) for name in ("weight", "bias"))
        output, axis = func(**call.arguments), CHANNELS[func]
        # (C,) of channels (N, C, ...), or the last axes of a layer norm
        shape = (-1, *[1] * (output.dim() - 2)) if axis == 1 else call.arguments["normalized_shape"]
        output = output if weight is None else output * weight.view(shape)
        return output if bias is None else output + bias.view(shape)


def parameter_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Concatenate all parameters, (P,), each in row-major order for any memory format.

    `torch.nn.utils.parameters_to_vector` of torch 2.11 raises an error for weights in
    channels_last.
    """
    return torch.cat([p.reshape(-1) for p in parameters])


class JacobianCovariance:
    """Function from inputs to outputs f and covariances J Σ Jᵀ, by whole Jacobians J.

    `OutputCovariance` computes the same with Kronecker factors, without J.

    Args:
        model: the network at the posterior's mean, in its present mode (train or eval).
        indices: indices of the parameters with a posterior, in the vector of all trainable ones.
        precision: precision of these parameters.
        differentiable: whether calls keep their graph in the inputs.
        layer: as in `jacobians`.
    """

    def __init__(
        self,
        model: nn.Module,
        indices: Int[Tensor, "P"],
        precision: Precision,
        differentiable: bool = False,
        layer: str | None = None,
    ) -> None:
        self._model, self._indices, self._precision = model, indices, precision
        self._differentiable, self._layer = differentiable, layer

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs and covariances for a batch; see `OutputCovariance`."""
        check_not_empty(x)
        f, J = jacobians(self._model, self._indices, x, self._differentiable, self._layer)
        mask = check_positions(positions, f.shape).to(f.device)
        shape = tuple(mask.shape) if positions is None else (int(mask.sum()),)
        columns = check_classes(classes, shape, f.shape[-1])
        f, J = f[mask], J[mask]  # (M, C), (M, C, P)
        if columns is not None:
            index = columns.to(f.device)
            f = f.gather(1, index)
            J = J.gather(1, index[..., None].expand(*index.shape, J.shape[-1]))
        covariance = self._precision.square_form(at_least_float32(J), diagonal=variance_only)
        return f.unflatten(0, shape), covariance.unflatten(0, shape)

    def joint(
        self, x: Float[Tensor, "T q *shape"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "T q K"], Float[Tensor, "T q_K q_K"]]:
        """Return outputs and covariances of T sets of q inputs, like `OutputCovariance.joint`."""
        f, J = jacobians(self._model, self._indices, x.flatten(0, 1), True)
        if f.dim() != 2:
            raise NotImplementedError(
                f"The model returned shape {tuple(f.shape)} for {len(f)} inputs. Joint covariances "
                "need outputs (N, C), as in regression."
            )
        if classes is not None:
            check_classes(torch.tensor(classes), (len(f),), f.shape[-1])
            f, J = f[..., classes], J[..., classes, :]
        f, J = f.unflatten(0, x.shape[:2]), at_least_float32(J).unflatten(0, x.shape[:2])
        return f, self._precision.square_form(J.flatten(1, 2))
