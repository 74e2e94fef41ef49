"""Options of a training run; each becomes an option of the command line, with this help."""

from dataclasses import asdict, dataclass, fields
from typing import Literal

from kfac_backend.options import CurvatureOptions, PassOptions, TargetOptions, check_option
from marglik.posterior.hyperparameters import UpdateMethod
from marglik.posterior.subset import Layers
from marglik.training.network import CompileMode
from marglik.training.schedule import CurvatureFrom, Keep, Schedule

__all__ = [
    "Accelerator",
    "CurvatureConfig",
    "PostHocConfig",
    "PostHocCurvatureConfig",
    "PostHocRunConfig",
    "Precision",
    "PriorConfig",
    "PriorMethod",
    "PriorRules",
    "RunConfig",
    "check_devices",
]

Accelerator = Literal["auto", "cpu", "cuda"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
PriorMethod = UpdateMethod | Literal["fixed"]
PostHocMethod = Literal["evidence", "validation", "fixed"]
PriorRules = Literal["layerwise", "scalar", "kind", "stage"] | dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(PassOptions):
    """The curvature pass.

    Args:
        batch_size: examples per batch of the pass; null takes that of training. On a GPU 1000, if
            they fit, are several times as fast as 128.
        augment: whether the pass sees augmented images if training does, as in the paper.
    """

    batch_size: int | None = None
    augment: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"curvature.batch_size must be at least 1, not {self.batch_size}.")
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"curvature.{error}") from error

    def options(self, targets: TargetOptions = TargetOptions()) -> CurvatureOptions:  # noqa: B008
        """The pass's options, for data that gives its targets in this way."""
        of_pass = {field.name: getattr(self, field.name) for field in fields(PassOptions)}
        return CurvatureOptions(**of_pass | asdict(targets))


@dataclass(frozen=True, kw_only=True)
class PostHocCurvatureConfig(CurvatureConfig):
    """The curvature pass of a fit to a trained network.

    Args:
        corrected: make a second pass over the data, for exact eigenvalues in the eigenbasis of the
            factors (EKFAC); on WRN-16-4 it takes about three times as long as the first.
    """

    corrected: bool = False


@dataclass(frozen=True)
class PriorConfig:
    """The prior, in units of weight decay, and how it is learned.

    Args:
        weight_decay: the initial value for all groups; prior precision = weight decay * N /
            temperature.
        structure: layerwise (one per parameter tensor), scalar (one for all), kind (weights,
            biases, scalars), stage (one per top-level child of the model), or rules as a mapping
            of group names to patterns, such as {convolutions: "stage*.weight", rest: "*"}.
        every: epochs between updates.
        burn_in: the first epoch at whose end there may be an update.
        steps: hyperparameter steps per update.
        method: adam follows the gradient of the evidence; mackay iterates its fixed point; fixed
            keeps the initial weight decay, and sigma_noise.
        lr: Adam's step size, for the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: the first standard deviation of regression's noise, in units of the targets; it
            is learned. Start from a small one: a large one keeps the network from fitting.
        keep: last returns the parameters of the last update; best those of the update with the
            highest evidence, which may be an early one, before the network is at its mode.
        curvature_from: pass makes a curvature pass for each update; optimizer takes the moving
            averages of optimizer.name=kfac, and makes one pass at the end.
    """

    weight_decay: float = 5e-4
    structure: PriorRules = "layerwise"
    every: int = 5
    burn_in: int = 0
    steps: int = 100
    method: PriorMethod = "adam"
    lr: float = 0.1
    temperature: float = 1.0
    sigma_noise: float = 0.1
    keep: Keep = "last"
    curvature_from: CurvatureFrom = "pass"

    def __post_init__(self) -> None:
        for name in ("weight_decay", "lr", "temperature", "sigma_noise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"prior.{name} must be positive, not {getattr(self, name)}.")
        try:
            self.schedule(epochs=1)
        except ValueError as error:
            raise ValueError(f"prior.{error}") from error

    def schedule(self, epochs: int) -> Schedule:
        """When updates happen in a run of so many epochs; never if the prior is fixed."""
        burn_in = epochs + 1 if self.method == "fixed" else self.burn_in
        return Schedule(epochs, self.every, burn_in, self.steps, keep=self.keep)


@dataclass(frozen=True)
class RunConfig:
    """How long to train, on what device, and where the results go.

    Args:
        epochs: passes over the training examples.
        batch_size: examples (images, sequences, graphs) per step.
        augment: whether training crops (after padding by 4) and flips images at random; images
            alone.
        held_out: share of the training examples that are not trained on but calibrate the
            predictive, if the data has no validation set for it; the posterior is fitted to them,
            too, at the end. 0 for none, as predictive.calibration none.
        baseline: whether to train a second time with the initial weight decay kept fixed.
        monitor: number of epochs between evaluations of the MAP's NLL and accuracy on the
            validation set (the test set if there is none). They are logged, and nothing is chosen
            by them. 0 for none.
        seed: seed of initialisation, shuffling, augmentation and sampling.
        output: folder of the run's log, results and plot; null for runs/NAME OF THE DATA.
        overwrite: whether a run that is already in that folder may be replaced.
        resume: whether to continue the run in that folder, which must have been started with the
            same options; without one, a new run is started. On a CPU with the same number of
            threads the results are the same to the bit. It takes precedence over overwrite.
        checkpoint_minutes: least time between two checkpoints, from which resume continues. They
            are written at the ends of epochs and of updates and between batches of the final
            evaluation, always before an update, and removed when the run is complete.
        tensorboard: whether to write TensorBoard files as well.
        accelerator: cpu or cuda; auto takes cuda if there is one. (Apple's mps lacks float64, which
            the evidence needs.)
        devices: processes that share the work, one for each GPU, or all on the CPU; each has a part
            of every batch. null takes as many as torchrun has started, one without it.
        rank_timeout: seconds that a process waits for the others, after which all end.
        precision: Lightning's name for the precision of the network's steps; parameters, curvature
            and predictions stay in float32.
        channels_last: whether images lie in memory as (N, H, W, C), which makes convolutions
            faster; for images only. It changes nothing but rounding.
        compile: mode of torch.compile for the network's steps; reduce-overhead records CUDA graphs
            on a GPU. It changes nothing but rounding.
        progress: whether to show progress bars.
    """

    epochs: int = 30
    batch_size: int = 128
    augment: bool = False
    held_out: float = 0.1
    baseline: bool = False
    monitor: int = 0
    seed: int = 0
    output: str | None = None
    overwrite: bool = False
    resume: bool = False
    checkpoint_minutes: float = 1.0
    tensorboard: bool = False
    accelerator: Accelerator = "auto"
    devices: int | None = None
    rank_timeout: float = 40.0
    precision: Precision = "32-true"
    channels_last: bool = False
    compile: CompileMode | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.held_out < 1:
            raise ValueError(
                f"held_out must be a share in [0, 1), 0 for none, not {self.held_out}."
            )
        for name in ("monitor", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}.")
        check_devices(self.devices, self.rank_timeout)


@dataclass(frozen=True)
class PostHocConfig:
    """The prior of a network that is already trained.

    Args:
        method: evidence maximises the marginal likelihood; validation minimises the NLL on the
            validation split, with one precision for all parameters; fixed keeps the weight decay.
        structure: for method=evidence, as for `marglik train`.
        weight_decay: the initial value, which method=fixed keeps; the one that the network was
            trained with is a good choice. Prior precision = weight decay * N / temperature.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: standard deviation of regression's noise, learned with method=evidence.
        layers: all, or last for the last layer alone: the other layers are then constants,
            which is much faster for large networks.
    """

    method: PostHocMethod = "evidence"
    structure: PriorRules = "layerwise"
    weight_decay: float = 5e-4
    temperature: float = 1.0
    sigma_noise: float = 1.0
    layers: Layers = "all"

    def __post_init__(self) -> None:
        check_option("prior.method", self.method, PostHocMethod)
        check_option("prior.layers", self.layers, Layers)
        for name in ("weight_decay", "temperature", "sigma_noise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"prior.{name} must be positive, not {getattr(self, name)}.")
        if self.method == "validation" and self.structure not in ("layerwise", "scalar"):
            raise ValueError(
                "prior.method validation tunes one precision for all parameters; leave "
                "prior.structure out, or choose method evidence."
            )


@dataclass(frozen=True)
class PostHocRunConfig:
    """Where and how a posterior is fitted.

    Args:
        output: folder of the posterior; null for runs/NAME OF THE CHECKPOINT.
        batch_size: examples per batch of the curvature pass.
        seed: seed of sampling.
        overwrite: whether a run that is already in that folder may be replaced.
        accelerator: cpu or cuda; auto takes cuda if there is one.
        devices: processes that share the work, as of `marglik train`.
        rank_timeout: seconds that a process waits for the others, after which all end.
        progress: whether to show progress bars.
    """

    output: str | None = None
    batch_size: int = 128
    seed: int = 0
    overwrite: bool = False
    accelerator: Accelerator = "auto"
    devices: int | None = None
    rank_timeout: float = 40.0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}.")
        check_devices(self.devices, self.rank_timeout)


def check_devices(devices: int | None, rank_timeout: float) -> None:
    """Raise a ValueError for a number of processes, or of seconds, that is not positive."""
    if devices is not None and devices < 1:
        raise ValueError(f"devices must be at least 1, not {devices}.")
    if not rank_timeout > 0:
        raise ValueError(f"rank_timeout must be positive, not {rank_timeout}.")
