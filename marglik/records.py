"""What a run's files hold, as types: ``results.json``, ``evaluation.json``, lines of ``log.jsonl``.

Training and evaluation make these records, the terminal and the report read them. `to_json` and
`from_json` convert them. A field that is None is left out of the file.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import (
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

__all__ = ["Metrics"]

T = TypeVar("T")
U = TypeVar("U")
Interval = tuple[float, float]
"""Lower and upper end."""
Difference = tuple[float, float, float]
"""A difference, and the lower and upper end of its interval."""


# Metrics


@dataclass(frozen=True)
class Metric:
    """What a metric is called, and which of its values are better."""

    title: str
    short: str = ""
    """What it is called on a terminal; metrics without a short name are in the report alone."""
    unit: str = ""
    """Shares are shown as percentages: their unit is "%"."""
    better: Literal["lower", "higher"] | float | None = None
    """A number is the best value itself."""
    decimals: int | None = 4
    """None for numbers in a unit of the data's own, which may be large or small."""
    out_of_distribution: bool = False
    """Whether it is of telling out-of-distribution data from the test set."""


def _metric(*arguments: Any, **options: Any) -> Any:
    return field(default=None, metadata={"metric": Metric(*arguments, **options)})


def _coverage(percent: int, short: str = "") -> Any:
    return _metric(f"Coverage of the {percent} % interval", short, "%", percent / 100)


def _detection(*arguments: Any) -> Any:
    return _metric(*arguments, out_of_distribution=True)


@dataclass(frozen=True, repr=False)
class Metrics(Generic[T]):
    """A value for each metric that a predictive has, None for the others.

    The value is a number, an interval, a difference, or a tensor of each example's contribution.
    `marglik.compute_metrics` defines each.
    """

    nll: T | None = _metric("Negative log-likelihood", "NLL", "nats per example", "lower")
    nll_observed_labels: T | None = _metric("... if test labels are as wrong", "", "nats", "lower")
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
        """(name, value) of the metrics that there are."""
        return ((name, value) for name in METRICS if (value := getattr(self, name)) is not None)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __or__(self, other: "Metrics[T]") -> "Metrics[T]":
        """These metrics and the other's, which come first where both have one."""
        return replace(self, **dict(other.items()))

    def map(self, function: Callable[[T], U]) -> "Metrics[U]":
        """A function of each value."""
        return Metrics(**{name: function(value) for name, value in self.items()})


METRICS: dict[str, Metric] = {f.name: f.metadata["metric"] for f in fields(Metrics)}
"""Name of a field of `Metrics` -> what it is."""


# An evaluation


@dataclass(frozen=True)
class Bins:
    """Confidence and accuracy by bins of the confidence."""

    edges: list[float]
    """One more than bins."""
    counts: list[int]
    confidence: list[float | None]
    """The mean of each bin; None where it is empty."""
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
    """Points of a curve of shares, in 0..1."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Scores:
    """Metrics of a predictive, with 95 % intervals over the choice of test examples."""

    metrics: Metrics[float]
    intervals: Metrics[Interval] = Metrics()
    """Of the metrics that have one."""


@dataclass(frozen=True)
class Against:
    """Differences from another predictive, on the same examples."""

    predictive: str
    differences: Metrics[Difference]


@dataclass(frozen=True)
class PredictiveRecord(Scores):
    """One predictive on the test set and on out-of-distribution data."""

    seconds: float | None = None
    """To predict the test set."""
    reliability: Bins | Coverage | None = None
    risk_coverage: Curve | None = None
    """Error rate among the most confident predictions, over their share."""
    confusion: list[list[int]] | None = None
    """Labels in rows, predictions in columns; None for many classes."""
    roc: Curve | None = None
    """Share of out-of-distribution examples that are flagged, over that of our own."""
    against: Against | None = None
    """None for the first predictive, which the others are compared with."""
    calibration: dict[str, Any] | None = None
    """The fields of `marglik.Calibration`."""
    seconds_of_training: float | None = None
    """Of the members of an ensemble."""


@dataclass(frozen=True)
class OutOfDistribution:
    """The out-of-distribution data of an evaluation."""

    name: str
    num_examples: int
    score: str
    """What tells it from our own."""
    note: str | None = None


@dataclass(frozen=True)
class UncertainImage:
    """A test image with its prediction; entropies are in nats."""

    index: int
    label: str
    predicted: str
    probability: float
    entropy: float
    aleatoric: float
    epistemic: float
    image: str
    """As a data URI."""


@dataclass(frozen=True)
class Uncertain:
    """The most uncertain test images, by the last predictive."""

    predictive: str
    examples: list[UncertainImage]


@dataclass(frozen=True)
class Environment:
    """What numbers depend on beside the options."""

    device: str
    threads: int
    python: str
    versions: dict[str, str]
    """Package -> version."""


@dataclass(frozen=True)
class CalibrationRecord:
    """What a calibration found on held-out data; NLLs are in nats, means over its loss terms."""

    predictive: str
    calibration: dict[str, Any]
    """The fields of `marglik.Calibration`."""
    map_calibration: dict[str, Any]
    """Those of the temperature-scaled MAP."""
    nll: float
    nll_uncalibrated: float
    nll_temperature_scaled: float
    nll_map: float
    num_terms: int


@dataclass(frozen=True)
class Evaluation:
    """``evaluation.json``: the predictives of a run on test and out-of-distribution data."""

    data: str
    likelihood: str
    num_test: int
    predictives: dict[str, PredictiveRecord]
    environment: Environment
    num_positions: int | None = None
    """Number of positions (tokens) that count, of sequences."""
    classes: list[str] | None = None
    ood: OutOfDistribution | None = None
    uncertain: Uncertain | None = None
    target_scale: list[float] | None = None
    """Mean and standard deviation that targets were standardised by for training."""
    num_seen: int | None = None
    """Number of test examples whose inputs the network was trained on or calibrated with."""
    posterior: str | None = None
    """SHA-256 sum of the evaluated ``posterior.json``."""
    output: str | None = None
    """The folder; None in the file itself, which may be moved."""
    calibrated: dict[str, CalibrationRecord] | None = None
    """The predictives that `marglik evaluate` has calibrated; None in the file."""

    @property
    def scores(self) -> dict[str, Scores]:
        """Metrics and intervals alone."""
        return {n: Scores(one.metrics, one.intervals) for n, one in self.predictives.items()}

    @property
    def seen_in_words(self) -> str:
        """What `num_seen` says, in a sentence; empty if it says nothing."""
        if not self.num_seen:
            return ""
        return (
            f"{self.num_seen:,} of the {self.num_test:,} test examples have inputs that the "
            "network was trained on or calibrated with: metrics on them are not those of new data."
        )


# A training


@dataclass(frozen=True)
class Network:
    """One of the networks that a run trains, or has trained to compare with: what is kept of it."""

    predictives: dict[str, Scores]
    differences: dict[str, Metrics[Difference]] | None = None
    """Predictive -> the first network's metrics minus this one's, on the same examples."""


@dataclass(frozen=True)
class Evidence:
    """Log marginal likelihoods of the training data (nats, sums over examples)."""

    first: float
    """At the first update."""
    final: float
    """At the final parameters."""
    epoch: int
    """The epoch that these are of."""


@dataclass(frozen=True)
class TensorDecay:
    """The weight decay of a parameter tensor."""

    initial: float
    learned: float
    effective_parameters: float
    parameters: int


@dataclass(frozen=True)
class SuspiciousLabel:
    """A training label that may be wrong."""

    index: int
    """Of the example in its source, from 0: the row of a file, the image of a data set before any
    of them are chosen or held out."""
    label: str
    predicted: str
    score: float
    wrong: float | None = None
    """The probability that it is wrong, where calibration found wrong labels."""
    image: str | None = None
    """As a data URI."""


@dataclass(frozen=True)
class SuspiciousLabels:
    """The training labels that look most wrong."""

    judged: int = 0
    """Number of labels."""
    number: int = 0
    """Number of those to look at, see `marglik.prediction.suspicious_labels`."""
    agreement: float = 0.0
    """Share of the labels that the network predicted, on average over training."""
    examples: list[SuspiciousLabel] = field(default_factory=list)
    unknown: str | None = None
    """Why none can be judged."""


@dataclass(frozen=True)
class Range:
    """A range of a learned augmentation."""

    initial: float
    learned: float
    largest: float


@dataclass(frozen=True)
class Augmentation:
    """What a learned augmentation came to."""

    ranges: dict[str, Range]
    copies: int
    """Number of copies of each image, whose outputs are averaged."""
    examples: list[list[str]]
    """Some training images, each followed by its copies, as data URIs."""


@dataclass(frozen=True)
class EpochRecord:
    """A line of the log: an epoch of network steps. Losses are in nats, means over examples."""

    epoch: int
    loss: float
    objective: float
    """Loss (over σ² in regression) and penalty."""
    lr: float
    """Learning rate after the last step."""
    seconds: float
    """Of its steps: for whoever reads the log, and to foretell what a plain network takes."""
    accuracy: float | None = None


@dataclass(frozen=True)
class UpdateRecord:
    """A line of the log: an update of the prior. Evidences are in nats."""

    epoch: int
    evidence_before: float
    """A sum over the data, before the first hyperparameter step."""
    evidence: float
    evidence_per_example: float
    prior_precision: dict[str, float]
    weight_decay: dict[str, float]
    """By group."""
    effective_parameters: dict[str, float]
    """By tensor."""
    clipped_eigenvalues: int
    """How many of the factors' eigenvalues rounding made negative; they count as 0."""
    seconds: dict[str, float]
    """Of the pass, of the eigenvalues and of the steps: for whoever reads the log, and for studies
    of cost. No number depends on them."""
    num_examples: int
    """M, if the update saw a sample."""
    num_data: int
    """N, the number of examples that these stand for."""
    fisher: str
    """Which Fisher the factors are of: see `CurvatureOptions`."""
    sigma_noise: float | None = None
    likelihood: str | None = None
    """With the numbers that it has come to, if it has some."""
    ranges: dict[str, float] | None = None
    """Of a learned augmentation."""
    held_out_rise: float | None = None
    """z, by how many standard errors the held-out loss lay above its best so far, where held-out
    labels correct the weight decays; see `DecayPolicy`."""
    log_factor: float | None = None
    """c of the factor e^c that the weight decays of groups with weights contain."""


@dataclass(frozen=True)
class Results:
    """``results.json``: what `marglik train` has found."""

    identity: dict[str, Any]
    """Data, network, options, and sums of the first two: what a resume must agree in."""
    networks: dict[str, Network]
    """"learned" (or "fixed"), perhaps "plain", and scikit-learn's."""
    num_data: int
    """Number of examples that the network was trained on."""
    weight_decay: dict[str, TensorDecay]
    """By parameter tensor, from the input to the output."""
    evidence: Evidence
    environment: Environment
    seconds: float
    held_out: int = 0
    """Number of training examples that were held out for calibration."""
    target_scale: list[float] | None = None
    """Mean and standard deviation that targets were standardised by for training."""
    sigma_noise: list[float] | None = None
    """σ of the noise of regression; one for each output where they differ."""
    num_positions: int | None = None
    """Number of test positions (tokens) that count, of sequences."""
    calibration: CalibrationRecord | None = None
    suspicious_labels: SuspiciousLabels = SuspiciousLabels()
    augmentation: Augmentation | None = None
    verdict: str | None = None
    """Comparison with the plain network, in a few lines."""
    simple_models: str | None = None
    """What scikit-learn's models reach, in a sentence."""
    complete: bool = False
    """Whether all is done that was asked for."""
    output: str | None = None
    """The folder; None in the file itself, which may be moved."""

    @property
    def data(self) -> str:
        """Name of the data."""
        return self.identity["data"]

    @property
    def model(self) -> str:
        """Class of the network."""
        return self.identity["model"]

    @property
    def scores(self) -> dict[str, Scores]:
        """Those of all networks, under names such as "learned, MAP"."""
        return {
            f"{name}, {predictive}": scores
            for name, network in self.networks.items()
            for predictive, scores in network.predictives.items()
        }


# Conversion


def to_json(record: Any) -> dict[str, Any]:
    """A record as plain data, without the fields that are None."""
    return asdict(record, dict_factory=lambda items: {k: v for k, v in items if v is not None})


def from_json(kind: Any, value: Any) -> Any:
    """The value of a type, from plain data.

    Raises:
        TypeError: a record that lacks fields or has others, as that of another version.
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Metrics:
        return Metrics(**{name: from_json(arguments[0], part) for name, part in value.items()})
    if is_dataclass(origin):
        kinds = get_type_hints(origin)
        return origin(**{k: from_json(kinds.get(k), part) for k, part in value.items()})  # pyright: ignore[reportCallIssue]
    if origin in (Union, UnionType):  # of None, and one type or several records
        kinds = [one for one in arguments if one is not NoneType]
        if len(kinds) > 1 and isinstance(value, dict):
            kinds = [one for one in kinds if set(value) <= {f.name for f in fields(one)}] or kinds
        return None if value is None else from_json(kinds[0], value)
    if origin is tuple:
        return tuple(value)
    if origin is list:
        return [from_json(arguments[0], part) for part in value]
    if origin is dict:
        return {name: from_json(arguments[1], part) for name, part in value.items()}
    return value
