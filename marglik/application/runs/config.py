"""Options of a run. The command line uses the docstrings as help."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kfac_backend.options import (
    CurvatureOptions,
    PassOptions,
    TargetOptions,
    check_fraction,
    check_option,
    check_positive,
)
from marglik.application.runs.loggers import LoggerName, check_logger
from marglik.posterior.prior import PriorStructure, UpdateMethod
from marglik.training.loop import CompileMode
from marglik.training.options import WEIGHT_DECAY, CurvatureFrom, Schedule

Accelerator = Literal["auto", "cpu", "cuda"]
Augmentation = Literal["none", "standard", "learned"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
PriorMethod = UpdateMethod | Literal["fixed"]
PriorRules = PriorStructure | dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(PassOptions):
    """Options of the curvature pass."""

    def options(self, targets: TargetOptions = TargetOptions()) -> CurvatureOptions:  # noqa: B008
        """Return the options of the pass, with ``targets`` for the targets of the data."""
        of_pass = {field.name: getattr(self, field.name) for field in fields(PassOptions)}
        return CurvatureOptions(**of_pass | asdict(targets))


@dataclass(frozen=True, kw_only=True)
class PriorConfig(Schedule):
    """The prior, in units of weight decay, and its updates.

    Args:
        weight_decay: initial weight decay of all groups. It corresponds to the prior precision
            weight_decay * N for N training examples.
        structure: parameters that share a weight decay. per_tensor has one weight decay per
            parameter tensor. scalar has one for all parameters. per_type has one each for weights,
            biases and scalars. per_child has one per top-level child of the model. A mapping of
            group names to patterns of parameter names defines other groups, such as {convolutions:
            "stage*.weight", rest: "*"}.
        method: method that maximises the evidence in an update. adam takes gradient steps. mackay
            iterates MacKay's fixed point, which needs no step size. fixed makes no updates: it
            keeps weight_decay, and in regression a noise of 1.
        curvature_from: data of the curvature pass of an update. pass uses all data in each update,
            with the options of curvature. auto uses a random sample, usually so large that the pass
            takes a tenth of the time of the training steps between two updates. The GGN of the
            sample is exact if even an exact pass over all data would take at most as long as these
            training steps. Otherwise it is an estimate (fisher=random_signs). The last update of
            auto computes the exact GGN of all data. If this would take longer than a tenth of the
            training, the last update is an estimate, too.
    """

    weight_decay: float = WEIGHT_DECAY
    structure: PriorRules = "per_tensor"
    method: PriorMethod = "adam"
    curvature_from: CurvatureFrom = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("prior.weight_decay", self.weight_decay)
        if not self.updates:
            raise ValueError(
                "prior.updates is 0, so there would be no posterior to save. Pass at least 1, or "
                "prior.method fixed, which keeps weight_decay."
            )

    def schedule(self, epochs: int) -> Schedule:
        """Return the schedule of a run of ``epochs`` epochs. A fixed prior has no updates."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Schedule)}
        own["epochs"] = epochs
        if self.method == "fixed":
            own["burn_in"] = epochs + 1
        return Schedule(**own)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the training, device, and output folder.

    Args:
        epochs: number of passes over the training examples.
        batch_size: number of examples (images, sequences, graphs) in a batch.
        output: folder to write to; null selects runs/NAME with the name of the data.
        resume: whether to continue the run in the output folder, with the same options as before.
            If there is no run, a new run starts. On a CPU with the same number of threads, a
            resumed run gives exactly the results of an uninterrupted run. resume takes precedence
            over overwrite. A checkpoint is written at the start, before each update and at the end.
            Further checkpoints follow after epochs and updates, but at most one a minute.
        overwrite: whether to replace a run in the output folder.
        members: number of networks in the ensemble. The first network learns the weight decays.
            Each other network starts from other initial parameters, and in each epoch uses the
            weight decays that the first network had in this epoch. Each network costs one training
            run.
        baseline: whether to train a plain network for comparison, with the initial weight decay, a
            cosine learning rate schedule, and no averaging of the parameters. By default it is
            trained if this takes less than 20 seconds or a quarter of the run. resume can add it
            later. For a table, scikit-learn also fits a linear model and gradient-boosted trees to
            the same rows, unless baseline is false.
        augmentation: augmentation of the training images. "standard" crops images at random (after
            padding by 4 pixels) and flips them. "learned" averages the network over transformed
            copies of each image, in training and prediction, which multiplies the cost. The
            evidence learns the ranges of shifts, rotations, scales and shears. For colour images it
            also learns the strength of recolouring and the probability of a flip. See
            `marglik.augmentation`.
        held_out: share of the training examples that is held out for calibration, and to correct
            the weight decays of a classifier, if the data has no validation set. The network is not
            trained on these examples. After the calibration, the posterior is fitted to them, too.
            With 0, no examples are held out and there is no calibration.
        seed: seed of all random numbers.
        accelerator: device. auto selects cuda if it is available. Apple's mps is not supported,
            because it lacks float64, which the evidence needs.
        precision: precision of the training steps, by its name in Lightning. Parameters, curvature
            and predictions stay in float32.
        compile: mode of torch.compile for the training steps. null does not compile.
            reduce-overhead records CUDA graphs on a GPU. Compilation changes the results only by
            rounding.
        progress: whether to show progress bars on a terminal and lines of text elsewhere.
        logger: logger of the numbers of each epoch and update, and of the test metrics: tensorboard
            or wandb (Weights & Biases). null logs nothing. The curves of TensorBoard are in the
            folder tensorboard of the output folder. Needs pip install 'marglik[loggers]'.
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
    logger: LoggerName | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("batch_size", "epochs", "members"):
            check_positive(name, getattr(self, name))
        check_fraction("held_out", self.held_out)
        if self.logger is not None:
            check_option("logger", self.logger, LoggerName)
            check_logger(self.logger)


def check_seed(seed: int) -> None:
    """Raise a ValueError for a seed that torch's generators do not accept."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} is not supported. Pass a number in 0..{2**63 - 1}.")
