"""Types of metrics: values for the metrics of a predictive, and points of its curves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, TypeVar

__all__ = ["Metrics"]

T = TypeVar("T")
U = TypeVar("U")
Interval = tuple[float, float]
"""Lower and upper end of an interval."""
Difference = tuple[float, float, float]
"""A difference, and the lower and upper end of its interval."""


@dataclass(frozen=True)
class Metric:
    """Names and unit of a metric, and the direction of better values."""

    title: str
    short: str = ""
    """Name on the terminal. Metrics without a short name are only in the report."""
    unit: str = ""
    """Unit. A share is shown as a percentage, with the unit "%"."""
    better: Literal["lower", "higher"] | float | None = None
    """Direction of better values, or the best value itself."""
    decimals: int | None = 4
    """Number of decimals; None for metrics in the unit of the data, which may be of any size."""
    out_of_distribution: bool = False
    """Whether it measures the detection of out-of-distribution data."""


def _metric(*arguments: Any, **options: Any) -> Any:
    return field(default=None, metadata={"metric": Metric(*arguments, **options)})


def _coverage(percent: int, short: str = "") -> Any:
    return _metric(f"Coverage of the {percent} % interval", short, "%", percent / 100)


def _detection(*arguments: Any) -> Any:
    return _metric(*arguments, out_of_distribution=True)


@dataclass(frozen=True, repr=False)
class Metrics(Generic[T]):
    """A value for each metric of a predictive, or None if the metric does not apply.

    The value is a number, an interval, a difference, or a tensor with one contribution per example.
    `marglik.compute_metrics` defines each metric.
    """

    nll: T | None = _metric("Negative log-likelihood", "NLL", "nats per example", "lower")
    nll_observed_labels: T | None = _metric(
        "... of labels as wrong as in training", "", "nats", "lower"
    )
    nll_true_class: T | None = _metric("... of the true class", "", "nats", "lower")
    rmse: T | None = _metric(
        "Root mean squared error", "RMSE", "unit of the target", "lower", decimals=None
    )
    accuracy: T | None = _metric("Accuracy", "accuracy", "%", "higher")
    brier: T | None = _metric("Brier score", "", "", "lower")
    coverage50: T | None = _coverage(50)
    coverage90: T | None = _coverage(90, "90 % interval covers")
    coverage95: T | None = _coverage(95)
    aurc: T | None = _metric("Area under the risk–coverage curve", "", "", "lower")
    ece: T | None = _metric("Expected calibration error", "ECE", "%", "lower")
    auroc: T | None = _detection("Area under the ROC curve", "AUROC of ood", "", "higher")
    auroc_epistemic: T | None = _detection(
        "Area under the ROC curve, by the epistemic part", "", "", "higher"
    )
    aupr: T | None = _detection("Area under the precision–recall curve", "", "", "higher")
    fpr95: T | None = _detection("False positives at 95 % true positives", "", "%", "lower")

    def items(self) -> Iterator[tuple[str, T]]:
        """Return (name, value) of the metrics with a value."""
        return ((name, value) for name in METRICS if (value := getattr(self, name)) is not None)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __or__(self, other: "Metrics[T]") -> "Metrics[T]":
        """Return these metrics, with values replaced or added from ``other``."""
        return replace(self, **dict(other.items()))

    def map(self, function: Callable[[T], U]) -> "Metrics[U]":
        """Return the metrics with a function applied to each value."""
        return Metrics(**{name: function(value) for name, value in self.items()})


METRICS: dict[str, Metric] = {f.name: f.metadata["metric"] for f in fields(Metrics)}
"""Name of a field of `Metrics` -> its description."""


@dataclass(frozen=True)
class Bins:
    """Confidence and accuracy by bins of the confidence."""

    edges: list[float]
    """Edges of the bins, one more than the number of bins."""
    counts: list[int]
    confidence: list[float | None]
    """Mean confidence of each bin; None for an empty bin."""
    accuracy: list[float | None]


@dataclass(frozen=True)
class Coverage:
    """The share of targets inside the central interval of each level."""

    levels: list[float]
    coverage: list[float]
    count: int
    """Number of targets."""


@dataclass(frozen=True)
class Curve:
    """Points of a curve; both coordinates are shares in 0..1."""

    x: list[float]
    y: list[float]
