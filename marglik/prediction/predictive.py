"""Predictives: functions from inputs to predictions, at the MAP or under the posterior.

`predict_all` applies a predictive to a whole data set.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from kfac_backend.covariance.output_covariance import default_memory
from kfac_backend.engine.batches import (
    NO_BATCH,
    each_batch,
    example_shapes,
    examples,
    num_examples,
    split_batch,
    to_device,
)
from kfac_backend.engine.model_calls import call_with
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import Task, check_finite
from kfac_backend.likelihoods import Likelihood, counted_terms, likelihood_of
from kfac_backend.options import TargetOptions, check_option, check_positive
from kfac_backend.precision import at_least_float32
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import is_sharded
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior, trainable_layers
from marglik.prediction.links import (
    Calibration,
    CalibrationFit,
    Prediction,
    predict_from_gaussian,
    predict_from_outputs,
)
from marglik.prediction.serving import WAY_OUT, PredictiveModule, module_maker

_logger = logging.getLogger(__name__)

PredictiveMethod = Literal["probit", "mc", "linearised"]
LayersOption = Literal["auto", "all", "last"]
CalibrationMethod = Literal["held_out", "none"]
Labels = Literal["true", "observed"]
"""Kind of the predicted label: the true class, or a label that is wrong as often as the training
labels."""
Predictive = Callable[[Any], Prediction]
T = TypeVar("T")

COPIES_OF_SAMPLES, COPIES_OF_COVARIANCE = 3, 6
"""Maximum number of arrays in memory at once that are as large as the samples, and as the
covariances, of the outputs."""

MOST_BACKWARD_PASSES = 2048
"""Maximum number of backward passes for one example with several positions."""

MOST_CLASSES = 4096
"""Maximum number of classes for a decomposition of the covariance (C, C) at each position. With
this number it takes a second on one core."""

MOST_DERIVATIVES = 2_000_000
"""Maximum number of entries C·P in an example's Jacobian for which layers="auto" selects all
layers. Milliseconds per image on one core with ten outputs, for all layers | the last layer: LeNet
on 8×8 images (2e5 entries) 0.8 | 0.1, LeNet on 32×32 images (1.4e6) 3.7 | 0.3, ResNet-20 (2.7e6)
77 | 2, ShuffleNet (3.5e6) 63 | 1."""

_DECIDED: "WeakSet[Posterior]" = WeakSet()
"""Posteriors for which the choice of the last layer has been logged."""


def _no_module(x: Any) -> PredictiveModule:
    raise NotImplementedError(f"This predictive cannot be exported as a module. {WAY_OUT}")


@dataclass(frozen=True)
class ModelPredictive:
    """A predictive, with the network and likelihood by which `predict_all` matches labels."""

    predict: Predictive = field(repr=False)
    model: nn.Module = field(repr=False)
    likelihood: Likelihood
    calibration: Calibration | None = field(default=None, kw_only=True)
    """s, τ and σ, if the predictive is calibrated."""
    targets: TargetOptions = field(default=TargetOptions(), kw_only=True, repr=False)
    """Form of the targets in batches; for a posterior the options of its fit."""
    make_module: Callable[[Any], PredictiveModule] = field(
        default=_no_module, kw_only=True, repr=False
    )
    """See `module`."""
    recipe: tuple[Callable[..., Any], tuple[Any, ...]] | None = field(
        default=None, kw_only=True, repr=False
    )
    """Function and arguments that create this predictive again, for pickle and copies."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and arguments that create the predictive again."""
        if self.recipe is None:
            raise TypeError(
                f"This {type(self).__name__} cannot be pickled or copied. Create it again from its "
                "network or posterior."
            )
        return self.recipe

    def __call__(self, x: Any) -> Prediction:
        """Return the prediction for inputs x."""
        return self.predict(x)

    def module(self, x: Any) -> PredictiveModule:
        """Return a module from inputs to means and variances, for serving, for example by ONNX.

        The module contains the network, and for a posterior the variances of the last layer with
        method "probit". Its results equal the results of the predictive at its calibration.

        Args:
            x: some inputs, on which the module is compared with the posterior.

        Raises:
            NotImplementedError: the predictive or the last layer of the network is not supported.
                The error lists the supported ones.
        """
        return self.make_module(x)


@dataclass(frozen=True)
class PredictiveConfig:
    """Options of the predictive of a Laplace posterior.

    Args:
        method: method that turns outputs into probabilities. probit and mc compute the exact
            covariance of the linearised network's outputs. probit then has a closed form, and mc
            averages over samples of the outputs. linearised samples parameters of the linearised
            network instead. It takes about three forward passes per sample, for any number of
            outputs.
        samples: number of samples of the outputs, for mc, and for probit's split of the uncertainty
            into aleatoric and epistemic parts.
        networks: number of samples of the parameters, for linearised.
        layers: layers whose uncertainty is included: all, only the last, or an automatic choice.
            all includes every layer, which takes one backward pass for each output of an example.
            last includes only the last layer, which costs no more than a forward pass. linearised
            does not support last. auto selects last, and logs this, if the number of outputs times
            the number of parameters is above 2 million. Otherwise it selects all. It always selects
            all for networks of one layer, for linearised, and if the curvature has no Kronecker
            factors.
        batch_size: number of test examples in a batch.
        calibration: calibration of the predictive. held_out scales the covariance and the outputs
            by factors that are fitted to held-out data. none is the plain Laplace predictive.
        labels: true or observed labels to predict. true predicts the true class. observed predicts
            the given label, which is wrong as often as a training label. Test labels must be of the
            same kind. The two predictions differ if calibration, or the likelihood
            noisy_classification, finds wrong labels.

    For sequences, the covariance at each of R positions takes R·C backward passes per example. Use
    method linearised for sequences, or only the last layer.

    Raises:
        ValueError: an option is not supported.
    """

    method: PredictiveMethod = "probit"
    samples: int = 100
    networks: int = 20
    layers: LayersOption = "auto"
    batch_size: int = 256
    calibration: CalibrationMethod = "held_out"
    labels: Labels = "true"

    def __post_init__(self) -> None:
        check_option("predictive.method", self.method, PredictiveMethod)
        check_option("predictive.layers", self.layers, LayersOption)
        check_option("predictive.calibration", self.calibration, CalibrationMethod)
        check_option("predictive.labels", self.labels, Labels)
        for name in ("samples", "networks", "batch_size"):
            check_positive(f"predictive.{name}", getattr(self, name))
        if self.method == "linearised" and self.layers == "last":
            raise ValueError(
                f"predictive.layers {self.layers!r} is not supported by method 'linearised'. "
                "Choose 'all', or another method."
            )

    def for_network(self, num_parameters: int, num_outputs: int) -> "PredictiveConfig":
        """Return the config with layers="auto" resolved by the network's size."""
        if self.layers != "auto":
            return self
        is_cheap = num_parameters * num_outputs <= MOST_DERIVATIVES
        return replace(self, layers="all" if is_cheap or self.method == "linearised" else "last")

    def for_posterior(self, laplace: Posterior) -> "PredictiveConfig":
        """Return the config with layers="auto" resolved for a posterior; log "last" once.

        The result is "all" if a single layer has a posterior, or if it is from Jacobians.
        """
        alone = len(trainable_layers(laplace.model)) == 1 or laplace.structure != "kron"
        P, C = (0 if alone else laplace.n_params), laplace.n_outputs
        config = self.for_network(P, C)
        if config.layers != self.layers and config.layers == "last" and laplace not in _DECIDED:
            _DECIDED.add(laplace)
            _logger.warning(
                "Predictions include only the last layer's uncertainty. All layers would take %d "
                "backward passes through %d parameters per example. To include them, pass "
                "predictive.layers all.",
                C, P,
            )  # fmt: skip
        return config

    @property
    def is_calibrated(self) -> bool:
        """Whether factors fitted to held-out data scale the covariance and the outputs."""
        return self.calibration == "held_out"

    def label_noise(self, likelihood: Likelihood, calibration: Calibration | None) -> float:
        """Return ε for the predicted label: 0 for true labels, otherwise see `label_noise_of`."""
        return 0.0 if self.labels == "true" else label_noise_of(likelihood, calibration)

    @property
    def label(self) -> str:
        """Name in tables and files, after "auto" has been resolved."""
        return f"Laplace, {self.method}{', last layer' if self.layers == 'last' else ''}"

    def check_cost(self, positions: int, classes: int, likelihood: Likelihood) -> None:
        """Raise a ValueError if the outputs' covariances would take hours for a single example.

        Args:
            positions: R of one example, 1 for outputs (N, C).
            classes: C.
            likelihood: classification needs the covariance (C, C) and its root at each position,
                other likelihoods only the variances (C,).
        """
        passes = 0 if self.layers == "last" else positions * classes
        too_wide = likelihood.kind == "classes" and classes > MOST_CLASSES
        too_long = positions > 1 and passes > MOST_BACKWARD_PASSES
        if self.method != "linearised" and (too_wide or too_long):
            last = "" if too_wide else ", or --predictive.layers last"
            raise ValueError(
                f"predictive.method {self.method!r} needs the covariances of {classes} outputs at "
                f"{positions} positions, with {passes} backward passes per example. More than "
                f"{MOST_CLASSES} classes or {MOST_BACKWARD_PASSES} passes take very long. Pass "
                f"--predictive.method linearised, which samples the same outputs{last}."
            )


def map_predictive(
    model: nn.Module,
    likelihood: Likelihood | str = "classification",
    sigma_noise: float | Tensor = 1.0,
    output_temperature: float = 1.0,
    label_noise: float = 0.0,
) -> ModelPredictive:
    """Return the predictive of the network at its parameters, without epistemic uncertainty.

    The network runs in eval mode.

    Args:
        model: the network.
        likelihood: likelihood of the targets given the outputs.
        sigma_noise: σ of regression, in the unit of the targets.
        output_temperature: τ > 0, by which outputs are divided (temperature scaling).
        label_noise: ε of the predicted labels; 0 predicts the true class.

    Raises:
        ValueError: σ or τ is not positive; or in a prediction, outputs are not finite.
    """
    check_module(model)
    likelihood = likelihood_of(likelihood)
    check_positive("sigma_noise", sigma_noise)
    check_positive("output_temperature", output_temperature)

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        f = outputs_of(model, x) / output_temperature
        return predict_from_outputs(f[None], likelihood, sigma_noise, label_noise=label_noise)

    def module(x: Any) -> PredictiveModule:
        temperature = Calibration(0.0, output_temperature)
        return PredictiveModule(
            model,
            likelihood,
            calibration=temperature,
            sigma_noise=sigma_noise,
            label_noise=label_noise,
        )

    arguments = model, likelihood, sigma_noise, output_temperature, label_noise
    predict = eval_mode(model)(predict)
    return ModelPredictive(
        predict, model, likelihood, make_module=module, recipe=(map_predictive, arguments)
    )


def laplace_predictive(
    laplace: Posterior,
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    generator: torch.Generator | None = None,
    calibration: Calibration | None = None,
    ranks: Ranks = Ranks(None),  # noqa: B008
) -> ModelPredictive:
    """Return the predictive of a posterior.

    The predictive draws its random numbers once, so predictions do not depend on the batches.

    Args:
        laplace: the fitted posterior.
        config: options of the predictive.
        generator: generator of the samples, on the model's device. None draws the same samples at
            each call, which `calibrate` also uses by default.
        calibration: s and τ. None uses the calibration of this predictive that `calibrate` stored
            in the posterior. Without one, or if ``config.calibration`` is "none", s = τ = 1.
        ranks: the ranks that predict together. They share the computation of eigenvectors, so all
            of them must call this function.

    Raises:
        AttributeError: the posterior is not fitted.
        ValueError: the weights differ from the weights of the fit, now or in a prediction.
    """
    laplace.check_weights()
    config = config.for_posterior(laplace)
    model, likelihood, sigma = laplace.model, laplace.likelihood, laplace.sigma_noise
    generator = generator or torch.Generator(laplace.mean.device).manual_seed(0)
    if calibration is None and (fit := remembered_calibration(laplace, config)) is not None:
        calibration = fit.calibration
    used = calibration or Calibration()
    recipe = _at_state, (laplace, config, generator.get_state(), calibration)
    label_noise = config.label_noise(likelihood, calibration)
    if used.covariance_scale == 0:  # the predictive of the MAP, which needs no covariances
        sigma = used.sigma_noise or sigma
        of_map = map_predictive(model, likelihood, sigma, used.output_temperature, label_noise)

        def at_weights(x: Any) -> Prediction:
            laplace.check_weights()
            return of_map(x)

        def module_at_weights(x: Any) -> PredictiveModule:
            laplace.check_weights()
            return of_map.module(x)

        return replace(
            of_map,
            predict=at_weights,
            calibration=calibration,
            targets=laplace.options,
            make_module=module_at_weights,
            recipe=recipe,
        )
    if config.layers == "all":  # eigenvectors of a single layer are not worth sharing
        laplace.share_eigenvectors(ranks)
    elif ranks.size > 1 and not is_sharded(model):
        laplace.gather()
    if config.method == "linearised":
        parameters = laplace.sample(config.networks, generator)

        def of_networks(x: Any) -> Prediction:
            f = outputs_of(model, x)
            spread = laplace.linearised_outputs(parameters, x) - f
            outputs = f + math.sqrt(used.covariance_scale) * spread
            outputs = outputs / used.output_temperature
            sigma_noise = used.sigma_noise or sigma
            return predict_from_outputs(outputs, likelihood, sigma_noise, label_noise=label_noise)

        predict: Predictive = eval_mode(model)(of_networks)
    else:
        predict = _from_covariances(laplace, config, generator, used, label_noise)
    predict = torch.no_grad()(predict)
    assert config.layers != "auto"
    module = module_maker(laplace, config.method, config.layers, used, label_noise)
    return ModelPredictive(
        predict,
        model,
        likelihood,
        calibration=calibration,
        targets=laplace.options,
        make_module=module,
        recipe=recipe,
    )


def _at_state(
    laplace: Posterior, config: PredictiveConfig, state: Tensor, calibration: Calibration | None
) -> ModelPredictive:
    """Return the predictive whose generator starts in this state."""
    generator = torch.Generator(laplace.mean.device)
    generator.set_state(state)
    return laplace_predictive(laplace, config, generator, calibration)


def _from_covariances(
    laplace: Posterior,
    config: PredictiveConfig,
    generator: torch.Generator | None,
    calibration: Calibration,
    label_noise: float,
) -> Predictive:
    """Return the predictive by the link "probit" or "mc"."""
    likelihood, link, layers = laplace.likelihood, config.method, config.layers
    assert link != "linearised" and layers != "auto"
    mean = at_least_float32(laplace.mean)
    shape = (config.samples, laplace.n_outputs)
    noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
    # Each output of regression and Bernoulli has its own target, so variances are enough.
    variance_only = likelihood.kind != "classes"

    def of_outputs(f: Tensor, covariance: Tensor) -> Prediction:
        return predict_from_gaussian(
            f, covariance, likelihood, link, noise, laplace.sigma_noise, calibration, label_noise
        )

    def of_some(x: Any, positions: Tensor | None = None) -> Prediction:
        f, covariance = laplace.output_distribution(
            x, layers, positions=positions, variance_only=variance_only
        )
        return of_outputs(f.flatten(0, -2), covariance.flatten(0, -2 if variance_only else -3))

    @eval_mode(laplace.model)
    def by_positions(x: Any) -> Prediction:
        N = num_examples(x)
        one = x if N is None else examples(x, slice(1))
        *axes, C = outputs_of(laplace.model, one).shape[1:]
        config.check_cost(math.prod(axes), C, likelihood)
        if not axes:
            without_positions.add(example_shapes(x))
            return of_some(x)
        # Do not hold the covariances and samples of all positions in memory at once.
        columns = 1 if variance_only else C
        of_position = C * (COPIES_OF_SAMPLES * config.samples + COPIES_OF_COVARIANCE * columns)
        most = max(1, default_memory(mean.device) // (of_position * mean.element_size()))
        parts = Prediction.cat([of_some(*part) for part in _some_positions(x, N, axes, most)])
        return Prediction(*(part.unflatten(0, (-1, *axes)) for part in parts.tensors()))

    without_positions: set[Any] = set()  # shapes of inputs whose outputs were (N, C)

    def predict(x: Any) -> Prediction:
        # Do not run the model only to count the positions. The ranks of a sharded model must run it
        # equally often.
        if example_shapes(x) in without_positions and not is_sharded(laplace.model):
            f, covariance = laplace.output_distribution(x, layers, variance_only=variance_only)
            if f.dim() == 2:
                return of_outputs(f, covariance)
        return by_positions(x)

    return predict


def predict_all(
    predict: Predictive,
    batches: Iterable[Any],
    *,
    targets: TargetOptions | None = None,
    progress: bool = False,
    ranks: Ranks = Ranks(None),  # noqa: B008
    **keywords: Any,
) -> tuple[Prediction, Tensor]:
    """Return predictions and targets of all batches, on the CPU.

    Sequences become one row per position that counts. Metrics of the result are means over
    positions (tokens), not over sequences.

    Args:
        predict: the predictive.
        batches: (x, y), or mappings.
        targets: form of the targets in batches. None uses the predictive's own, for a posterior the
            options of its fit. With ``shift_labels="auto"`` the network determines whether labels
            are shifted. Predictives without a network do not shift them.
        progress: whether to show a progress bar.
        ranks: the ranks that each predict a contiguous part of every batch, which may be empty. The
            loader yields this rank's part, as `marglik.data.Batches` does. All ranks get all
            predictions, in the order of the data.
        keywords: options that override fields of ``targets``, such as ``dict_key_y="target"``.

    Raises:
        ValueError: there is no batch, or no target counts.
    """
    own: TargetOptions = getattr(predict, "targets", TargetOptions())
    targets = (targets or own).replace(**keywords)
    model = getattr(predict, "model", None)
    if model is None and targets.shift_labels == "auto":
        targets = targets.replace(shift_labels=False)
    task = Task(getattr(predict, "likelihood", "classification"), targets)
    likelihood = task.likelihood

    def of_batch(x: Any, y: Any) -> tuple[Prediction, Tensor]:
        y = task.targets(model, x, y)
        task.check_axis(model, x, y)
        prediction = predict(x).to("cpu")
        task.check_sizes(prediction.mean)
        return _of_counted_terms(prediction, y.cpu(), likelihood)

    parts = gathered(of_batch, batches, targets, "Predicting", progress, ranks)
    predicted = list(parts)
    if not predicted:
        raise ValueError(NO_BATCH)
    if not sum(len(y) for _, y in predicted):
        raise ValueError(
            "No target counts: all labels are ignored or masked. Check the labels, ignore_index "
            "and the mask of the data (dict_key_mask)."
        )
    predictions, all_targets = zip(*predicted, strict=True)
    return Prediction.cat(list(predictions)), torch.cat(all_targets)


def gathered(
    of_batch: Callable[[Any, Any], T],
    batches: Iterable[Any],
    targets: TargetOptions,
    doing: str,
    progress: bool,
    ranks: Ranks,
) -> Iterator[T]:
    """Yield ``of_batch(x, y)`` for each rank's part of each batch, in data order; collective.

    An empty part yields nothing. Tensors in results must be on the CPU, because a pickled CUDA
    tensor would be restored on the sender's GPU.
    """
    for batch in each_batch(batches, doing, progress):
        x, y = split_batch(batch, targets)
        part = of_batch(x, y) if len(y) or ranks.size == 1 else None
        yield from (one for one in ranks.gather(part) if one is not None)


def _of_counted_terms(
    prediction: Prediction, y: Tensor, likelihood: Likelihood
) -> tuple[Prediction, Tensor]:
    """Return prediction and targets of the positions that count, (M, ...)."""
    # Only for sequences. A predictive of another library has no likelihood. The default,
    # classification, would take some of its targets for ignored labels.
    counted = counted_terms(y, likelihood) if y.dim() < prediction.mean.dim() else None
    if counted is not None:
        return prediction.terms(counted), y[counted]
    if prediction.mean.dim() > 2:
        return prediction.terms(), y.flatten(0, prediction.mean.dim() - 2)
    return prediction, y


def label_noise_of(likelihood: Likelihood, calibration: Calibration | None) -> float:
    """Return the share ε of random labels from the calibration, or without one the likelihood."""
    if calibration is not None:
        return calibration.label_noise
    return float(likelihood.parameters["noise"]) if likelihood.has_label_noise else 0.0


def remembered_calibration(laplace: Posterior, config: PredictiveConfig) -> CalibrationFit | None:
    """Return the stored calibration of this predictive; None if there is or should be none."""
    label = config.for_posterior(laplace).label
    record = laplace.calibrations.get(label) if config.is_calibrated else None
    return None if record is None else CalibrationFit.of(record)


def outputs_of(model: nn.Module, x: Any) -> Tensor:
    """Return the network's outputs for inputs on any device, at least in float32.

    Raises:
        ValueError: the outputs contain NaN or infinity.
    """
    f = call_with(model, {}, to_device(x, next(model.parameters()).device))
    check_finite(model, f, x)
    return at_least_float32(f)


def _some_positions(
    x: Any, N: int | None, axes: list[int], most: int
) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield examples with a mask of at most ``most`` of their positions, in order.

    Inputs that cannot be split by examples stay whole, without a mask.
    """
    R = math.prod(axes)
    if N is None:
        yield x, None
        return
    size = max(1, most // R)
    for start in range(0, N, size):
        n = min(size, N - start)
        step = R if size > 1 else min(R, most)
        for first in range(0, R, step):
            mask = torch.zeros(n, R, dtype=torch.bool)
            mask[:, first : first + step] = True
            yield examples(x, slice(start, start + n)), mask.view(n, *axes)
