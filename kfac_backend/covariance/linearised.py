"""Compute outputs of the linearised network f(x) + J(x) (θ − θ*) at given θ, without J."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from kfac_backend.engine.batches import detached
from kfac_backend.engine.model_calls import call_with, plain_attention
from kfac_backend.engine.operations.padding import NoTangentOfPadding
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.sharding import check_whole


def linearised_outputs(
    model: nn.Module, changes: Mapping[str, Float[Tensor, "S *shape"]], x: Any
) -> Float[Tensor, "S N *R C"]:
    """Return f(x) + J(x) Δ for S changes Δ of the parameters, with J the Jacobian at θ*.

    J Δ is computed by forward-mode differentiation, without a graph. Each change costs about three
    forward passes, for any number of outputs. Outputs may have any shape, and batches any type.
    Padding of an embedding is a constant, as in backward mode.

    Args:
        model: the network at θ*, in its present mode (train or eval).
        changes: maps a parameter's name to S changes θ − θ*; other parameters keep their values.
        x: inputs, moved to the model's device.

    Raises:
        TypeError: the model's output is not a tensor.
        NotImplementedError: an operation has no forward derivative.
    """
    check_whole(model, "The linearised network")
    parameters = {name: model.get_parameter(name).detach() for name in changes}
    device = next(model.parameters()).device
    with (
        torch.inference_mode(False), torch.no_grad(), full_float32(), plain_attention(),
    ):  # fmt: skip
        x = detached(x, device)
        # Change by change: each is a forward pass with a tangent, without a graph.
        outputs = []
        for change in zip(*changes.values(), strict=True):
            by_name = dict(zip(changes, change, strict=True))
            outputs.append(_outputs(model, parameters, by_name, x))
    return torch.stack(outputs)


def _outputs(
    model: nn.Module, parameters: Mapping[str, Tensor], change: Mapping[str, Tensor], x: Any
) -> Tensor:
    # Parameters θ* with the tangent Δ: one forward pass computes f and J Δ together.
    with forward_ad.dual_level(), NoTangentOfPadding():
        duals = {
            name: forward_ad.make_dual(p, change[name].view_as(p).to(p.dtype))
            for name, p in parameters.items()
        }
        try:
            f, Jv = forward_ad.unpack_dual(call_with(model, duals, x))
        except (NotImplementedError, RuntimeError) as error:
            if "forward" not in str(error):
                raise
            raise NotImplementedError(
                f"{type(model).__name__} cannot be linearised: {str(error).splitlines()[0]} "
                "Replace the operation, or use the predictives 'probit' and 'mc', which need only "
                "the outputs' covariances."
            ) from error
    f = at_least_float32(f)
    return f if Jv is None else f + at_least_float32(Jv)
