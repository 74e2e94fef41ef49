"""Options of a run; each becomes an option of the command line, with this help."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kfac_backend.options import (
    CurvatureOptions,
    PassOptions,
    TargetOptions,
    check_positive,
)
from marglik.data.splits import check_fraction
from marglik.posterior.prior import PriorStructure, UpdateMethod
from marglik.training.decay_policy import WEIGHT_DECAY
from marglik.training.loop import CompileMode
from marglik.training.schedule import CurvatureFrom, Schedule

Accelerator = Literal["auto", "cpu", "cuda"]
Augmentation = Literal["none", "standard", "learned"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
PriorMethod = UpdateMethod | Literal["fixed"]
PriorRules = PriorStructure | dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(PassOptions):
    """The curvature pass."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"curvature.{error}") from error

    def options(self, targets: TargetOptions = TargetOptions()) -> CurvatureOptions:  # noqa: B008
        """The options of the pass, for data that gives its targets as ``targets`` says."""
        of_pass = {field.name: getattr(self, field.name) for field in fields(PassOptions)}
        return CurvatureOptions(**of_pass | asdict(targets))


@dataclass(frozen=True, kw_only=True)
class PriorConfig(Schedule):
    """The prior, in units of weight decay, and how it is learned; its epochs are the run's.

    Args:
        weight_decay: initial weight decay of all groups. It stands for the prior precision
            weight_decay * N, with N the number of training examples.
        structure: which parameters share a weight decay. layerwise has one per parameter tensor,
            scalar a single one, kind one each for weights, biases and scalars, stage one per
            top-level child of the model. A mapping of group names to patterns of parameter names
            makes other groups, such as {convolutions: "stage*.weight", rest: "*"}.
        method: how an update raises the evidence. adam takes gradient steps; mackay iterates
            MacKay's fixed point, which needs no step size; fixed makes no updates, and so keeps
            weight_decay, and in regression a noise of 1.
        curvature_from: which pass over the data an update makes. auto takes a sample, and estimates
            the curvature (fisher=random_signs) where exact passes would take longer than the
            training, the last one a tenth of it; pass makes each over all data, as curvature says.
    """

    weight_decay: float = WEIGHT_DECAY
    structure: PriorRules = "layerwise"
    method: PriorMethod = "adam"
    curvature_from: CurvatureFrom = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("prior.weight_decay", self.weight_decay)
        if not self.updates:
            raise ValueError(
                "prior.updates is 0, which leaves no posterior to save. Pass at least 1, or "
                "prior.method fixed, which keeps weight_decay."
            )

    def schedule(self, epochs: int) -> Schedule:
        """When updates happen in a run of ``epochs`` epochs; never if the prior is fixed."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Schedule)}
        own["epochs"] = epochs
        if self.method == "fixed":
            own["burn_in"] = epochs + 1
        return Schedule(**own)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long to train, on what device, and where the results go.

    Args:
        epochs: number of passes over the training examples.
        batch_size: number of examples (images, sequences, graphs) in a batch.
        output: folder to write to; null for runs/NAME of the data.
        resume: whether to continue the run in that folder, which must have been started with the
            same options; if there is none, a new run starts. On a CPU with the same number of
            threads, the results are the same to the bit as without the interruption. It takes
            precedence over overwrite. Checkpoints are written after epochs and updates, at most
            once a minute, and in any case before an update.
        overwrite: whether to replace a run that is already in that folder.
        members: number of networks that predict together. The first learns the weight decays, the
            others replay their course from other initial parameters, for one training each.
        baseline: whether to train a plain network, too, with the initial weight decay kept, a rate
            that falls with a cosine and no average, to say what was gained. By default where that
            takes less than 20 seconds or a quarter of the run. With resume it may be added later.
            With a table, a linear model and gradient-boosted trees of scikit-learn are fitted to
            the same rows as well, unless this is false.
        augmentation: of images. "standard" crops (after padding by 4 pixels) and flips training
            images at random. "learned" averages the network over transformed copies of each image,
            in training and prediction, at a multiple of the cost, and learns by the evidence how
            far to move, turn, scale, shear (and with colours recolour and flip) them; see
            `marglik.augmentation`.
        held_out: share of the training examples that is held out to calibrate the predictive, if
            the data has no validation set. The network is not trained on them, but the posterior is
            fitted to them, too, at the end. 0 holds none out, and calibrates nothing then.
        seed: seed of all random numbers.
        accelerator: cpu or cuda; auto takes cuda if it is available. (Apple's mps is not supported,
            since it lacks float64, which the evidence needs.)
        precision: precision of the training steps, by Lightning's name; parameters, curvature and
            predictions stay in float32.
        compile: mode of torch.compile for the training steps; null does not compile.
            reduce-overhead records CUDA graphs on a GPU. It changes the results by rounding only.
        progress: whether to show progress bars on a terminal, and lines of text elsewhere.
    """

    epochs: int = 30
    batch_size: int = 128
    output: str | None = None
    resume: bool = False
    overwrite: bool = False
    members: int = 1
    baseline: bool | None = None
    augmentation: Augmentation = "none"
    held_out: float = 0.1
    seed: int = 0
    accelerator: Accelerator = "auto"
    precision: Precision = "32-true"
    compile: CompileMode | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("batch_size", "epochs", "members"):
            check_positive(name, getattr(self, name))
        check_fraction("held_out", self.held_out)


def check_seed(seed: int) -> None:
    """Raise a ValueError for a seed that torch's generators do not take."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in 0..{2**63 - 1}, not {seed}.")
