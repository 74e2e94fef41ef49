"""Types of the files of a run: ``results.json``, ``evaluation.json``, lines of ``log.jsonl``.

Training and evaluation create these records. The terminal and the report show them. `to_json` and
`from_json` convert them. The file omits fields that are None.
"""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from marglik.prediction.links import Calibration, CalibrationFit
from marglik.prediction.metric_types import Bins, Coverage, Curve, Difference, Interval, Metrics

# An evaluation


@dataclass(frozen=True)
class Scores:
    """Metrics of a predictive, with 95 % intervals over the choice of test examples."""

    metrics: Metrics[float]
    intervals: Metrics[Interval] = Metrics()
    """Intervals of the metrics that have one."""


@dataclass(frozen=True)
class Against:
    """Differences of metrics to another predictive, on the same examples."""

    predictive: str
    differences: Metrics[Difference]


@dataclass(frozen=True)
class PredictiveRecord(Scores):
    """Scores of a predictive on the test set and on out-of-distribution data."""

    seconds: float | None = None
    """Time to predict the test set."""
    reliability: Bins | Coverage | None = None
    risk_coverage: Curve | None = None
    """Error rate of the most confident predictions by their share."""
    confusion: list[list[int]] | None = None
    """Confusion matrix, labels in rows and predictions in columns; None for many classes."""
    roc: Curve | None = None
    """Share of flagged out-of-distribution examples by the share of flagged test examples."""
    against: Against | None = None
    """Differences to the first predictive; None for the first one."""
    calibration: Calibration | None = None
    seconds_of_training: float | None = None
    """Training time of an ensemble's members."""


@dataclass(frozen=True)
class OutOfDistribution:
    """The out-of-distribution data of an evaluation. The entropy is the score that detects it."""

    name: str
    num_examples: int
    note: str | None = None


@dataclass(frozen=True)
class Example:
    """An example with its label, as the report shows it."""

    index: int
    """Index in the source, from 0: the row of a file, or the image of a data set, before any
    selection. For test examples the index among the test examples."""
    label: str
    predicted: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    """Name -> number about the example, such as its score. Names are titles of columns."""
    image: str | None = None
    """The image as a data URI."""
    explained_by: list["Example"] = field(default_factory=list)
    """Training examples with the largest effects on the prediction."""


@dataclass(frozen=True)
class Uncertain:
    """The most uncertain test images, for the last predictive. Entropies are in nats."""

    predictive: str
    examples: list[Example]


@dataclass(frozen=True)
class CalibrationRecord(CalibrationFit):
    """Result of a calibration on held-out data, with the name of the predictive."""

    predictive: str = ""


@dataclass(frozen=True)
class Evaluation:
    """``evaluation.json``: the predictives of a run on test and out-of-distribution data."""

    data: str
    likelihood: str
    num_test: int
    predictives: dict[str, PredictiveRecord]
    environment: dict[str, Any]
    """Device, threads and versions, on which results depend."""
    num_positions: int | None = None
    """Number of positions (tokens) that count, for sequences."""
    classes: list[str] | None = None
    ood: OutOfDistribution | None = None
    uncertain: Uncertain | None = None
    target_scale: list[float] | None = None
    """Mean and standard deviation by which targets were standardised for training."""
    num_seen: int | None = None
    """Number of test examples whose inputs were used for training or calibration."""
    posterior: str | None = None
    """SHA-256 sum of the evaluated ``posterior.json``."""
    output: str | None = None
    """The folder; None in the file itself, which may be moved."""
    calibrated: dict[str, CalibrationRecord] | None = None
    """Calibrations by `marglik evaluate`; None in the file."""

    @property
    def scores(self) -> dict[str, Scores]:
        """Metrics and intervals of each predictive."""
        return {n: Scores(one.metrics, one.intervals) for n, one in self.predictives.items()}

    @property
    def seen_in_words(self) -> str:
        """Sentence about `num_seen`; empty if it is 0 or None."""
        if not self.num_seen:
            return ""
        return (
            f"{self.num_seen:,} of the {self.num_test:,} test examples have inputs that were used "
            "for training or calibration. The metrics are therefore not valid for new data."
        )


# A training


@dataclass(frozen=True)
class Network:
    """Record of a network that a run trains, also for comparison."""

    predictives: dict[str, Scores]
    differences: dict[str, Metrics[Difference]] | None = None
    """Predictive -> metrics of the first network minus metrics of this network, on the same
    examples."""


@dataclass(frozen=True)
class Evidence:
    """Log marginal likelihoods of the training data (nats, sums over examples)."""

    first: float
    """Value at the first update."""
    final: float
    """Value at the final parameters."""
    epoch: int
    """Epoch of the final parameters."""


@dataclass(frozen=True)
class TensorDecay:
    """Weight decay of a parameter tensor, before and after the training."""

    initial: float
    learned: float
    effective_parameters: float
    parameters: int


@dataclass(frozen=True)
class SuspiciousLabels:
    """The training labels that are most likely wrong.

    Their numbers are the score; the probability of being wrong, if calibration found wrong labels;
    and the change of the loss if the example is left out, see `marglik.self_influence`.
    """

    judged: int = 0
    """Number of labels that have a score."""
    number: int = 0
    """Number of suspicious labels, see `marglik.prediction.suspicious_labels`."""
    agreement: float = 0.0
    """Share of the labels that the network predicted, averaged over the training."""
    examples: list[Example] = field(default_factory=list)
    unknown: str | None = None
    """Reason if the labels have no scores."""

    @property
    def in_words(self) -> str:
        """Sentences about the numbers of labels."""
        return (
            f"Possibly wrong training labels: the {self.number:,} of {self.judged:,} with the "
            "highest scores. Averaged over the training, the network predicted "
            f"{100 * self.agreement:.0f} % of the labels. Examples are counted from 0, in the "
            "order of the file or of the images."
        )


@dataclass(frozen=True)
class Explanations:
    """The test predictions with the largest losses, and the training examples behind them.

    The effect of a training example is how much it raises the log-odds of the predicted class, or
    the mean of a number.
    """

    predictions: list[Example]
    unknown: str | None = None
    """Reason if predictions cannot be explained."""


@dataclass(frozen=True)
class Range:
    """A range of a learned augmentation."""

    initial: float
    learned: float
    largest: float


@dataclass(frozen=True)
class Augmentation:
    """Result of a learned augmentation."""

    ranges: dict[str, Range]
    copies: int
    """Number of copies of each image, whose outputs are averaged."""
    examples: list[list[str]]
    """Some training images, each followed by its copies, as data URIs."""


@dataclass(frozen=True)
class EpochRecord:
    """What the report reads of an epoch in the log. Losses are in nats, means over examples."""

    epoch: int
    loss: float
    objective: float
    """Loss (divided by σ² in regression) plus penalty."""


@dataclass(frozen=True)
class UpdateRecord:
    """What the report reads of an update of the prior in the log."""

    epoch: int
    evidence_per_example: float
    """Evidence in nats."""
    weight_decay: dict[str, float]
    """Name of a group -> weight decay."""
    num_examples: int
    """Number of examples that the update used: M of a sample, otherwise N."""
    num_data: int
    """N, the number of all examples."""
    fisher: str
    """Kind of the Fisher matrix of the factors, see `CurvatureOptions`."""
    ranges: dict[str, float] | None = None
    """Ranges of a learned augmentation."""


@dataclass(frozen=True)
class Results:
    """``results.json``: the results of `marglik train`."""

    identity: dict[str, Any]
    """Data, network and options, with checksums. They must be equal to resume a run."""
    networks: dict[str, Network]
    """Networks by name: "learned" (or "fixed"), perhaps "plain", and models of scikit-learn."""
    num_data: int
    """Number of training examples."""
    weight_decay: dict[str, TensorDecay]
    """Name of a parameter tensor -> weight decay, from the input to the output."""
    evidence: Evidence
    environment: dict[str, Any]
    seconds: float
    held_out: int = 0
    """Number of training examples that were held out for calibration."""
    target_scale: list[float] | None = None
    """Mean and standard deviation by which targets were standardised for training."""
    sigma_noise: list[float] | None = None
    """σ of the noise of regression; one for each output if they differ."""
    num_positions: int | None = None
    """Number of test positions (tokens) that count, for sequences."""
    calibration: CalibrationRecord | None = None
    suspicious_labels: SuspiciousLabels = SuspiciousLabels()
    explanations: Explanations | None = None
    augmentation: Augmentation | None = None
    verdict: str | None = None
    """Comparison with the plain network, in a few lines."""
    simple_models: str | None = None
    """Sentences about the models of scikit-learn."""
    complete: bool = False
    """Whether all requested work is done."""
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
        """Scores of all networks, under names such as "learned, MAP"."""
        return {
            f"{name}, {predictive}": scores
            for name, network in self.networks.items()
            for predictive, scores in network.predictives.items()
        }


# Conversion


def to_json(record: Any) -> dict[str, Any]:
    """Return a record as plain data, without the fields that are None."""
    return asdict(record, dict_factory=lambda items: {k: v for k, v in items if v is not None})


def from_json(kind: Any, value: Any) -> Any:
    """Return a value of the type ``kind`` from plain data.

    Raises:
        TypeError: fields are missing or unknown, for example in a record of another version.
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Metrics:
        return Metrics(**{name: from_json(arguments[0], part) for name, part in value.items()})
    if is_dataclass(origin):
        kinds = get_type_hints(origin)
        return origin(**{k: from_json(kinds.get(k), part) for k, part in value.items()})  # pyright: ignore[reportCallIssue]
    if origin in (Union, UnionType):  # None, and either one type or several records
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
