"""Jacobians of a network's outputs in few parameters, and the outputs' covariances by them."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import jacrev

from kfac_backend.engine.batches import detached, to_device
from kfac_backend.engine.model_calls import call_with, plain_attention
from kfac_backend.engine.task import check_finite
from kfac_backend.precision import at_least_float32
from marglik.posterior.precision import Precision

_CHECKPOINT = "as of torch.utils.checkpoint. Checkpoint in train mode alone (if self.training)."
NO_JACOBIAN = {
    "doesn't have storage": "as of packed sequences. Use structure 'kron', or pad the sequences.",
    "saved tensor hooks": _CHECKPOINT,
    "setup_context": _CHECKPOINT,
}
"""A part of torch's error -> what the network does, and the way out."""


def jacobians(
    model: nn.Module, indices: Int[Tensor, "P"], x: Any, differentiable: bool = False
) -> tuple[Float[Tensor, "N *R C"], Float[Tensor, "N *R C P"]]:
    """Outputs f and their Jacobians J in some of the trainable parameters.

    Args:
        model: in the mode that it is to run in.
        indices: of the parameters, in the vector of all trainable ones.
        x: inputs, moved to the model's device.
        differentiable: whether both keep their graph in x.
    """
    trainable = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    x = to_device(x, device) if differentiable else detached(x, device)
    sizes = [p.numel() for p in trainable.values()]

    def outputs(vector: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(trainable.items(), vector.split(sizes), strict=True)
        f = call_with(model, {n: part.view(p.shape).to(p) for (n, p), part in parts}, x)
        return f, f

    with plain_attention():
        try:
            J, f = jacrev(outputs, has_aux=True)(parameter_vector(trainable.values()))
        except RuntimeError as error:
            way_out = next((out for sign, out in NO_JACOBIAN.items() if sign in str(error)), None)
            if way_out is None:
                raise
            raise NotImplementedError(
                f"torch cannot compute the model's Jacobian by vmap, {way_out}"
            ) from error
    check_finite(model, f, x)
    return (f, J[..., indices]) if differentiable else (f.detach(), J.detach()[..., indices])


def parameter_vector(parameters: Iterable[Tensor]) -> Tensor:
    """All parameters concatenated, (P,), each in row-major order whatever its memory format.

    `torch.nn.utils.parameters_to_vector` of torch 2.11 raises on weights in channels_last.
    """
    return torch.cat([p.reshape(-1) for p in parameters])


class JacobianCovariance:
    """A function from inputs to outputs f and their covariances J Σ Jᵀ, by whole Jacobians J.

    `OutputCovariance` computes the same under Kronecker factors, without J.

    Args:
        model: the network at the posterior's mean, in the mode (train or eval) it is in.
        indices: of the parameters that have a posterior, in the vector of all trainable ones.
        precision: of these.
        differentiable: whether calls keep their graph in the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        indices: Int[Tensor, "P"],
        precision: Precision,
        differentiable: bool = False,
    ) -> None:
        self._model, self._indices, self._precision = model, indices, precision
        self._differentiable = differentiable

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Outputs and covariances at a batch; arguments as of `OutputCovariance`."""
        f, J = jacobians(self._model, self._indices, x, self._differentiable)
        if positions is not None:
            f, J = f[positions], J[positions]
        if classes is not None:
            index = classes.to(f.device).expand(*f.shape[:-1], classes.shape[-1])
            f = f.gather(-1, index)
            J = J.gather(-2, index[..., None].expand(*index.shape, J.shape[-1]))
        return f, self._precision.square_form(at_least_float32(J), diagonal=variance_only)

    def joint(
        self, x: Float[Tensor, "T q *shape"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "T q K"], Float[Tensor, "T q_K q_K"]]:
        """Outputs and covariances of T sets of q inputs, as `OutputCovariance.joint`."""
        f, J = jacobians(self._model, self._indices, x.flatten(0, 1), True)
        f, J = f.unflatten(0, x.shape[:2]), at_least_float32(J).unflatten(0, x.shape[:2])
        if classes is not None:
            f, J = f[..., classes], J[..., classes, :]
        return f, self._precision.square_form(J.flatten(1, 2))
