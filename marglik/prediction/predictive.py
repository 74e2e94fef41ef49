"""Predictives: functions from inputs to predictions, at the MAP or under the posterior."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfac_backend.model.batches import to_device
from kfac_backend.model.calls import call_with, check_output
from kfac_backend.model.rule_assignment import check_module
from kfac_backend.options import Likelihood, check_option, check_positive
from kfac_backend.precision import at_least_float32
from marglik.eval_mode import in_eval_mode
from marglik.posterior.posterior import Posterior
from marglik.posterior.subset import Layers
from marglik.prediction.links import (
    Calibration,
    Prediction,
    check_link,
    predict_from_gaussian,
    predict_from_outputs,
)

__all__ = [
    "Predictive",
    "PredictiveConfig",
    "PredictiveMethod",
    "laplace_predictive",
    "map_predictive",
]

PredictiveMethod = Literal["probit", "bridge", "mc", "nn"]
CalibrationMethod = Literal["held_out", "none"]
Predictive = Callable[[Any], Prediction]

COPIES = {"classification": 4, "bernoulli": 6, "regression": 2}
"""How many arrays as large as all networks' outputs there are at once, at the most; measured."""


@dataclass(frozen=True)
class _OfModel:
    """A predictive that knows its network, whose own loss tells how labels stand for outputs."""

    predict: Predictive
    model: nn.Module
    likelihood: Likelihood

    def __call__(self, x: Any) -> Prediction:
        return self.predict(x)


@dataclass(frozen=True)
class PredictiveConfig:
    """How the Laplace posterior predicts.

    Args:
        method: probit, bridge, mc: the linearised network's outputs are Gaussian, with exact
            covariances; probit and bridge (for few classes) are closed forms of the class
            probabilities, mc averages samples of the outputs. nn: sampled networks.
        samples: samples of the outputs, for mc and for the parts of probit's uncertainty.
        networks: sampled networks for nn.
        layers: all layers' uncertainty, or that of the last one alone (not for nn), which costs no
            more than a forward pass.
        batch_size: test examples at a time.
        memory: MiB that the covariances' gradients may take, besides the activations of a few
            examples; batches are split inside to keep it. 96 on a CPU, 2048 on a GPU if null.
        calibration: held_out scales the covariance and the outputs by what held-out data say
            (probit, mc, bridge); none is the plain Laplace predictive.

    For sequences, whose outputs are many at once, method nn alone is there; a few networks are
    enough for a look.
    """

    method: PredictiveMethod = "probit"
    samples: int = 100
    networks: int = 20
    layers: Layers = "all"
    batch_size: int = 256
    memory: int | None = None
    calibration: CalibrationMethod = "held_out"

    def __post_init__(self) -> None:
        check_option("predictive.method", self.method, PredictiveMethod)
        check_option("predictive.layers", self.layers, Layers)
        check_option("predictive.calibration", self.calibration, CalibrationMethod)
        for name in ("samples", "networks", "batch_size", "memory"):
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            check_positive(f"predictive.{name}", value)
            if not isinstance(value, int):
                raise TypeError(f"predictive.{name} must be a whole number, not {value!r}.")
        if self.method == "nn" and self.layers != "all":
            raise ValueError(
                f"predictive.layers {self.layers!r} is not for method 'nn'; choose 'all', or "
                "another method."
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether held-out data are to scale the covariance; sampled networks have none."""
        return self.calibration == "held_out" and self.method != "nn"

    def check_outputs(self, axes: int) -> None:
        """Raise a ValueError unless outputs with so many axes can be predicted, 2 for (N, C)."""
        if axes > 2 and self.method != "nn":
            raise ValueError(
                f"predictive.method {self.method!r} is for one prediction per example, (N, C), "
                "since it needs the covariances of all outputs; for sequences take sampled "
                "networks: --predictive.method nn, with few of them, such as "
                "--predictive.networks 5."
            )

    def check_memory(
        self,
        outputs: int,
        examples: int,
        parameters: int,
        likelihood: Likelihood,
        memory: int,
        itemsize: int = 4,
    ) -> None:
        """Raise a ValueError if the samples cannot fit into the memory.

        Args:
            outputs: of one example, C or, of a sequence, R·C.
            examples: the most that can be in a batch; those of the data.
            parameters: of the network.
            likelihood: of the predictive.
            memory: bytes that there are.
            itemsize: bytes of a number.
        """
        batch = min(self.batch_size, examples)
        if self.method == "nn":
            option, count = "networks", self.networks
            of_one = 3 * parameters + COPIES[likelihood] * batch * outputs
        else:
            option, count = "samples", self.samples
            # Standard normal numbers; where there is no closed form, each example's outputs.
            sampled = likelihood == "classification" and self.method != "bridge"
            of_one = outputs + (3 * batch * outputs if sampled else 0)
        if count * of_one * itemsize <= memory:
            return
        # Other things need some, too.
        fitting = _rounded_down(memory // (3 * of_one * itemsize))
        way_out = "Take smaller batches (predictive.batch_size)"
        if fitting:
            way_out = f"{fitting} fit (--predictive.{option} {fitting}), more with smaller batches"
        raise ValueError(
            f"predictive.{option} {count} takes about {count * of_one * itemsize / 2**20:,.0f} MiB "
            f"for batches of {batch} examples with {outputs} outputs, and there are "
            f"{memory / 2**20:,.0f} MiB. {way_out}."
        )

    @property
    def label(self) -> str:
        """What tables call it."""
        last = ", last layer" if self.layers == "last" else ""
        return f"Laplace, {self.method}{last}"


def map_predictive(
    model: nn.Module,
    likelihood: Likelihood = "classification",
    sigma_noise: float | Tensor = 1.0,
    output_temperature: float = 1.0,
) -> Predictive:
    """The network's own prediction at its parameters, in eval mode; no epistemic uncertainty.

    Args:
        model: the network.
        likelihood: how outputs become a distribution of targets.
        sigma_noise: σ of regression.
        output_temperature: τ > 0, by which outputs are divided: temperature scaling.
    """
    check_module(model)
    check_option("likelihood", likelihood, Likelihood)
    check_positive("sigma_noise", sigma_noise)
    check_positive("output_temperature", output_temperature)

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        f = call_with(model, {}, to_device(x, next(model.parameters()).device))
        check_output(f)
        f = at_least_float32(f) / output_temperature
        return predict_from_outputs(f[None], likelihood, sigma_noise)

    return _OfModel(in_eval_mode(model, predict), model, likelihood)


def laplace_predictive(
    laplace: Posterior,
    config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    generator: torch.Generator | None = None,
    calibration: Calibration | None = None,
) -> Predictive:
    """The posterior's prediction.

    Its random numbers are drawn once, so that it is the same however inputs are put into batches.

    Args:
        laplace: the fitted posterior.
        config: how it predicts.
        generator: of the samples, on the model's device.
        calibration: s and τ. If left out, those that `calibrate` found for such a predictive of
            this posterior; where there are none, or ``config.calibration`` is "none", s = τ = 1.

    Raises:
        AttributeError: a posterior that is not fitted.
    """
    if laplace.factors is None:
        raise AttributeError("The Laplace approximation is not fitted; call fit() first.")
    likelihood: Likelihood = laplace.likelihood  # pyright: ignore[reportAssignmentType]
    remembered = laplace.calibrations.get(config.label) if config.is_calibrated else None
    if calibration is None:
        calibration = Calibration(**remembered["calibration"]) if remembered else Calibration()
    if config.method == "nn":
        return _network_samples(laplace, config, likelihood, generator)
    link, memory = config.method, config.memory and config.memory * 2**20
    check_link(link, likelihood)
    mean = at_least_float32(laplace.mean)
    shape = (config.samples, laplace.n_outputs)
    noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        f, covariance = laplace.output_distribution(x, config.layers, memory)
        return predict_from_gaussian(
            f, covariance, likelihood, link, noise, laplace.sigma_noise, calibration
        )

    return _OfModel(in_eval_mode(laplace.model, predict), laplace.model, likelihood)


def _network_samples(
    laplace: Posterior,
    config: PredictiveConfig,
    likelihood: Likelihood,
    generator: torch.Generator | None,
) -> Predictive:
    samples = laplace.sample(config.networks, generator)

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        x = to_device(x, samples.device)
        outputs = torch.stack([laplace.sampled_outputs(sample, x) for sample in samples])
        return predict_from_outputs(outputs, likelihood, laplace.sigma_noise)

    return _OfModel(in_eval_mode(laplace.model, predict), laplace.model, likelihood)


def _rounded_down(number: int) -> int:
    """The number with its first digit alone."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power
