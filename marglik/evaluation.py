"""MAP and Laplace predictives on data, and what they are worth."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from tqdm.auto import tqdm

from kfac_backend.capture import call_with
from marglik.laplace import KronLaplace
from marglik.loaders import Loader
from marglik.modes import eval_mode

__all__ = [
    "PredictiveConfig",
    "PredictiveMethod",
    "classification_metrics",
    "laplace_predictive",
    "map_predictive",
]

PredictiveMethod = Literal["linearized", "probit", "bridge", "nn"]
Predictive = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PredictiveConfig:
    """How the Laplace posterior predicts.

    Args:
        method: linearized: softmax averaged over sampled linearised networks, one Jacobian-vector
            product each; for any size of network. probit, bridge: closed forms of the same
            linearisation, from all Jacobians; for small networks. nn: sampled networks themselves.
        samples: posterior samples of the methods that sample.
        batch_size: test examples at a time; probit and bridge hold batch size x outputs x
            parameters numbers.
    """

    method: PredictiveMethod = "linearized"
    samples: int = 20
    batch_size: int = 256

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"predictive.{name} must be positive, not {getattr(self, name)}.")


def map_predictive(model: nn.Module) -> Predictive:
    """A function from inputs to the network's class probabilities at its parameters."""

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        with eval_mode(model):
            return torch.softmax(model(x), dim=-1)

    return predict


def laplace_predictive(
    laplace: KronLaplace, config: PredictiveConfig, generator: torch.Generator | None = None
) -> Predictive:
    """A function from inputs to class probabilities; posterior samples are drawn once, here.

    Source of the linearised predictive: Immer, Korzepa & Bauer 2021 (arXiv:2008.08400).
    """
    if config.method in ("probit", "bridge"):
        return lambda x: laplace(x, pred_type="glm", link_approx=config.method)
    samples = laplace.sample(config.samples, generator)
    linearized = config.method == "linearized"
    names = [name for name, p in laplace.model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        with eval_mode(laplace.model):
            outputs = _outputs(laplace.model, names, samples, x, linearized)
            return torch.stack([torch.softmax(f, dim=-1) for f in outputs]).mean(0)

    return predict


def _outputs(
    model: nn.Module, names: list[str], samples: Tensor, x: Tensor, linearized: bool
) -> Iterator[Tensor]:
    """The outputs at x for each sampled parameter vector (S, P), linearised at the MAP or not."""
    parameters = {name: model.get_parameter(name).detach() for name in names}
    mean = parameters_to_vector(parameters.values())  # pyright: ignore[reportArgumentType]
    sizes = [p.numel() for p in parameters.values()]

    def unflatten(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split(sizes)
        return {n: part.view_as(parameters[n]) for n, part in zip(names, parts, strict=True)}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return call_with(model, values, x)

    for sample in samples:
        if linearized:
            f_and_change = torch.func.jvp(outputs, (parameters,), (unflatten(sample - mean),))
            yield f_and_change[0] + f_and_change[1]
        else:
            yield outputs(unflatten(sample))


def classification_metrics(
    predict: Predictive, batches: Loader, num_classes: int, progress: bool = False
) -> dict[str, float]:
    """NLL (nats, mean over examples), accuracy and ECE (15 bins) of class probabilities."""
    nll, accuracy = MeanMetric(), MulticlassAccuracy(num_classes, average="micro")
    ece = MulticlassCalibrationError(num_classes, n_bins=15)
    metrics: dict[str, Metric] = {"cls/NLL": nll, "cls/accuracy": accuracy, "cal/ECE": ece}
    hidden = None if progress else True  # None: shown on a terminal only
    for batch in tqdm(batches, desc="Evaluation", leave=False, disable=hidden):
        x, y = _pair(batch)
        # Rounding above 1 would make torchmetrics take probabilities for logits.
        p = predict(x).cpu().clamp(max=1.0)
        y = y.cpu()
        tiny = torch.finfo(p.dtype).tiny
        nll.update(-p[torch.arange(len(y)), y].clamp(min=tiny).log())
        accuracy.update(p, y)
        ece.update(p, y)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    return x, y
