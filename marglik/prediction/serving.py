"""A predictive as one `nn.Module`, to export or compile: no hooks, no backward pass, no samples.

Another layer replaces the last layer of the network, z = W a + b. It appends the variances of the
outputs, v_c = Σ_j K_cj (Q_Aᵀ a)_j² + k_c with K_cj = Σ_i (Q_B)_ci² / s_ij. Operations after the
last layer, such as moving an axis, apply to outputs and variances.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from kfac_backend.covariance.contraction import bases
from kfac_backend.covariance.gradients import PosteriorPrecision
from kfac_backend.engine.batches import arguments, detached
from kfac_backend.engine.model_calls import close, logits_of
from kfac_backend.likelihoods import Likelihood
from kfac_backend.precision import at_least_float32
from marglik.posterior.posterior import Layers, Posterior, last_layer, trainable_layers
from marglik.prediction.links import Calibration, predict_from_outputs, probit_outputs

__all__ = ["PredictiveModule"]

SERVED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
WAY_OUT = (
    "Supported are the network itself (map_predictive), and the closed form of a last layer of "
    "type Linear or Conv: PredictiveConfig(layers='last', method='probit'), calibrated with these "
    "options."
)


class PredictiveModule(nn.Module):
    """A network and its predictive as one module: inputs -> (mean, variance).

    The mean is `Prediction.mean`: class probabilities, or expected targets. For numeric targets the
    variance is the variance of a new target, `Prediction.total_uncertainty`. For classes and binary
    outputs it is the variance of each output (logit), s/τ² J Σ Jᵀ. Both have the shape of
    `Prediction.mean`.

    `ModelPredictive.module` creates the module. It is always in eval mode. It contains a copy of
    the network and shares no tensor with it. It can be exported by `torch.export` and `torch.onnx`,
    compiled, moved and cast. In float16 or bfloat16 the layers of the network run in this dtype.
    Variances, σ and results stay in float32.

    Args:
        model: the network, which appends variances if ``has_variances``, see `with_variances`.
        likelihood: likelihood of the targets given the outputs.
        has_variances: whether the last axis of the outputs has C outputs and then C variances.
        calibration: s and τ.
        sigma_noise: σ of regression.
        label_noise: ε of the predicted labels; 0 predicts the true class.
    """

    sigma_noise: Tensor

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        has_variances: bool = False,
        calibration: Calibration = Calibration(),  # noqa: B008
        sigma_noise: float | Tensor = 1.0,
        label_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = deepcopy(model).requires_grad_(False)
        self.likelihood, self.has_variances = likelihood, has_variances
        self.calibration, self.label_noise = calibration, label_noise
        sigma = calibration.sigma_noise or sigma_noise
        device = next(model.parameters()).device
        # Without the dtype, a float would become a float32 tensor.
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device=device)
        self.register_buffer("sigma_noise", sigma)
        self.eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.model._apply(fn, recurse)
        self.sigma_noise = _moved(self.sigma_noise, fn)
        return self

    def train(self, mode: bool = True) -> "PredictiveModule":
        """Stay in eval mode."""
        return super().train(False)

    def forward(self, x: Any = None, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return mean and variance for the arguments of the network's forward."""
        args = (*more,) if x is None else (x, *more)
        f = at_least_float32(cast("Tensor", logits_of(self.model(*args, **named))))
        temperature = self.calibration.output_temperature
        if self.has_variances:
            f, variance = f.chunk(2, -1)
            variance = variance * (self.calibration.covariance_scale / temperature**2)
        else:
            variance = torch.zeros_like(f)
        f = f / temperature
        if self.likelihood.kind == "continuous":
            mean, noise, spread = self.likelihood.moments(f, variance, self.sigma_noise)
            return mean, noise + spread
        outputs = probit_outputs(f, variance)[None]
        prediction = predict_from_outputs(outputs, self.likelihood, label_noise=self.label_noise)
        return prediction.mean, variance


class _WithVariances(nn.Module):
    """A linear layer or a convolution that appends the variances of its outputs.

    Args:
        layer: the layer.
        precision: posterior precision of "weight" and "bias". A missing parameter is a constant.
    """

    factor: Tensor
    constant: Tensor

    def __init__(self, layer: nn.Module, precision: PosteriorPrecision) -> None:
        super().__init__()
        weight = cast("Tensor", layer.weight)
        C, d_in = weight.flatten(1).shape
        wide = at_least_float32(weight.detach())
        self.layer, self.axis = layer, -1 if isinstance(layer, nn.Linear) else 1
        factor, rotation = wide.new_zeros(C, d_in), torch.eye(d_in).to(wide)
        if "weight" in precision:
            block, spectrum = precision["weight"]
            Q_B, Q_A, spectrum = bases(block, spectrum, False)
            factor = _of_outputs(None if Q_B is None else Q_B[0], spectrum[0].reciprocal())
            rotation = rotation if Q_A is None else Q_A[0]
        constant = wide.new_zeros(C)
        if "bias" in precision:
            block, spectrum = precision["bias"]
            Q_B = block.Q_B if block.Q_B.dim() == 2 else None  # None for a diagonal block
            constant = _of_outputs(Q_B, spectrum.flatten().reciprocal())
        self.register_buffer("factor", factor.to(wide))
        self.register_buffer("constant", constant.to(wide))
        # A layer of the same kind, with the same padding, computes Q_Aᵀ a.
        self.rotate = deepcopy(layer)
        rows = rotation.mT.reshape(d_in, *weight.shape[1:]).to(wide)
        self.rotate.weight = nn.Parameter(rows.contiguous())
        self.rotate.register_parameter("bias", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Cast only the layer: variances are sums of squares, which can overflow float16.
        self.layer._apply(fn, recurse)
        self.rotate._apply(lambda t: _moved(t, fn), recurse)
        self.factor, self.constant = _moved(self.factor, fn), _moved(self.constant, fn)
        return self

    def forward(self, a: Tensor) -> Tensor:
        """Return the outputs and then their variances along the axis of features."""
        z = self.layer(a).movedim(self.axis, -1)
        coordinates = self.rotate(a.to(self.factor)).movedim(self.axis, -1)
        variances = coordinates.square() @ self.factor.mT + self.constant
        return torch.cat([z.to(variances), variances], -1).movedim(-1, self.axis)


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor after ``fn`` of `nn.Module._apply`, but in at least float32."""
    moved = fn(tensor)
    wide = torch.promote_types(moved.dtype, torch.float32)
    return moved if moved.dtype == wide else tensor.to(moved.device, wide)


def _of_outputs(Q_B: Tensor | None, inverse: Tensor) -> Tensor:
    """Return Σ_i (Q_B)_ci² inverse_i: output variances from variances in the eigenbasis."""
    return inverse if Q_B is None else Q_B.square() @ inverse


def with_variances(laplace: Posterior, x: Any) -> nn.Module:
    """Return a copy of a posterior's network that appends last-layer variances to its outputs.

    Args:
        laplace: the posterior.
        x: some inputs, on which the copy is compared with `Posterior.output_distribution`.

    Raises:
        NotImplementedError: the posterior or the network is not supported.
    """
    name = last_layer(laplace.model, x)
    layer, network = laplace.model.get_submodule(name), type(laplace.model).__name__
    if laplace.structure != "kron":
        raise NotImplementedError(
            f"A posterior of structure {laplace.structure!r} cannot be exported as a module. Fit "
            f"one of structure 'kron'. {WAY_OUT}"
        )
    if type(layer) not in SERVED_LAYERS or getattr(layer, "groups", 1) > 1:
        raise NotImplementedError(
            f"The last layer of {network}, '{name}', is {type(layer).__name__} or has groups, and "
            f"cannot be exported as a module. {WAY_OUT}"
        )
    names = {id(p): of_model for of_model, p in laplace.model.named_parameters()}
    own = {local: names[id(p)] for local, p in layer.named_parameters(recurse=False)}
    blocks = laplace.precision_blocks(set(own.values()))
    precision = {local: blocks[own[local]] for local in own if own[local] in blocks}
    # Replace the layer within one deepcopy, so that hooks and tied weights are kept.
    model = deepcopy(laplace.model, {id(layer): _WithVariances(deepcopy(layer), precision)})
    f, variance = laplace.output_distribution(x, "last", variance_only=True)
    refusal = NotImplementedError(
        f"The outputs of {network} are not the outputs of its last layer '{name}', so their "
        f"variances cannot be exported as a module. {WAY_OUT}"
    )
    args, kwargs = arguments(model, detached(x, f.device))
    try:
        with torch.no_grad():
            outputs = at_least_float32(cast("Tensor", logits_of(model.eval()(*args, **kwargs))))
    except Exception as error:  # from code that expects C outputs
        raise refusal from error
    expected = torch.cat([f.to(outputs), variance.to(outputs)], -1)
    is_alike = outputs.shape == expected.shape and close(outputs, expected)
    if not is_alike or not _passes_on(model, name, args, kwargs):
        raise refusal
    return model


@torch.no_grad()
def _passes_on(model: nn.Module, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the model's outputs are entries of a layer's output, chosen by position only.

    Equality at the user's inputs is not enough: a ReLU may have no effect there.
    """
    layer = cast("_WithVariances", model.get_submodule(name))
    numbers: list[Tensor] = []

    def random_numbers(_: nn.Module, inputs: Any, z: Tensor) -> Tensor:
        generator = torch.Generator(z.device).manual_seed(len(numbers))
        half = z.chunk(2, layer.axis)[0]
        r = 1e3 * torch.randn(half.shape, generator=generator, device=z.device).to(z)
        numbers.append(r)
        # −r replaces the variances. A choice by value, such as a maximum, selects other entries.
        return torch.cat([r, -r], layer.axis)

    handle = layer.register_forward_hook(random_numbers)
    try:
        outputs = at_least_float32(cast("Tensor", logits_of(model(*args, **kwargs))))
    finally:
        handle.remove()
    first, second = outputs.chunk(2, -1)
    is_own = torch.isin(first.flatten(), numbers[-1].to(first).flatten()).all()
    return bool(is_own) and torch.equal(second, -first)


def module_maker(
    laplace: Posterior,
    method: str,
    layers: Layers,
    calibration: Calibration,
    label_noise: float,
) -> Callable[[Any], PredictiveModule]:
    """Return a function that creates the module of a predictive from some inputs, or raises.

    Args:
        laplace: the posterior.
        method: method of the predictive.
        layers: layers whose uncertainty the predictive includes.
        calibration: s, τ and σ of the predictive.
        label_noise: ε of the predicted labels.
    """
    likelihood = laplace.likelihood
    reason = ""
    if method == "linearised" or (method == "mc" and likelihood.kind != "continuous"):
        reason = f"predictive.method {method!r} draws samples, which a module cannot."
    elif not likelihood.has_probit:
        reason = f"Likelihood '{likelihood}' has no closed form, and a module cannot draw samples."
    elif layers == "all" and len(trainable_layers(laplace.model)) > 1:
        reason = "predictive.layers 'all' needs backward passes, which a module cannot make."

    def make(x: Any) -> PredictiveModule:
        if reason:
            raise NotImplementedError(f"{reason} {WAY_OUT}")
        return PredictiveModule(
            with_variances(laplace, x),
            likelihood,
            has_variances=True,
            calibration=calibration,
            sigma_noise=laplace.sigma_noise,
            label_noise=label_noise,
        )

    return make
