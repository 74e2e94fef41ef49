"""The settings of `marglik_cifar10`: sizes and presets."""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import yaml

from experiments.data import Source, specification
from marglik.prediction.predictive import PredictiveConfig, PredictiveMethod
from marglik.runs.config import CurvatureConfig, PriorConfig
from marglik.training.optimizers import OptimizerConfig

__all__ = [
    "PROTOCOLS",
    "Approach",
    "Config",
    "Preset",
    "Protocol",
    "Settings",
]

Preset = Literal["paper", "redux"]
Approach = Literal["expand", "reduce", "fixed"]
"""K-FAC's mode while the weight decay is learned, or the fixed weight decay (posterior: reduce)."""


@dataclass(frozen=True)
class Protocol:
    """Size of the experiment; all other settings are the preset's."""

    depth: int = 16
    widen_factor: int = 4
    epochs: int = 100
    every: int = 5
    """Epochs between updates."""
    max_train: int | None = None
    max_test: int | None = None
    monitor: int = 5
    """Epochs between evaluations of the held-out NLL."""
    held_out: float = 0.1
    """Share of the training images held out for calibration; the paper has none."""


PROTOCOLS = {
    "full": Protocol(held_out=0.02),
    "scaled": Protocol(
        depth=10, widen_factor=1, epochs=30, max_train=4000, max_test=2000, monitor=2
    ),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one run."""

    protocol: str = "scaled"
    preset: Preset = "paper"
    approach: Approach = "reduce"
    augment: bool = True
    seed: int = 0
    source: Source = "jpeg"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Precision of the network's steps."""
    compile: Literal["default", "reduce-overhead"] | None = None
    predictives: tuple[PredictiveMethod, ...] = ()
    """Predictives that are evaluated beside the preset's own."""
    jobs: int = 1
    """Number of runs at a time; they share the cores or the GPU."""
    scale: Protocol | None = None
    """Scale that replaces the protocol's, for tests."""

    @property
    def size(self) -> Protocol:
        """The size of the run."""
        return self.scale or PROTOCOLS[self.protocol]

    @property
    def name(self) -> str:
        """Path of the run below the folder of all runs."""
        setting = f"{self.approach}_{'augmented' if self.augment else 'plain'}_seed{self.seed}"
        parts = (self.preset, "original" if self.source == "original" else None,
                 "bf16" if self.precision == "bf16-mixed" else None, self.compile)  # fmt: skip
        return f"{self.protocol}/{'_'.join(part for part in parts if part)}/{setting}"


ON_GPU = {"batch_size": 1000, "backward_precision": "tf32"}
"""Options of the curvature pass on a GPU. Small batches would leave it waiting for the next kernel;
TF32 is torch's default in convolutions."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, from its configuration."""

    model: dict[str, Any]
    """``{"class_path": ..., "init_args": ...}``."""
    data: dict[str, Any]
    """Specification of the images, in the same form."""
    optimizer: OptimizerConfig
    prior: PriorConfig
    curvature: CurvatureConfig
    predictive: PredictiveConfig
    batch_size: int

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """The preset's settings at the protocol's size."""
        preset = yaml.safe_load(
            (files("marglik.presets") / f"cifar10_{config.preset}.yaml").read_text("utf-8")
        )
        scale, learned = config.size, config.approach != "fixed"
        prior = preset["prior"] | {"every": scale.every}
        # Presets count burn-in epochs of a run of a hundred.
        prior |= {"burn_in": prior["burn_in"] * scale.epochs // 100}
        if not learned:
            prior |= {"method": "fixed"}
        mode: dict[str, Any] = {"kfac_approx": config.approach if learned else "reduce"}
        if config.device == "cuda":
            mode |= ON_GPU
        size = {"depth": scale.depth, "widen_factor": scale.widen_factor}
        model = preset["model"]
        number = {"max_train": scale.max_train, "max_test": scale.max_test}
        return cls(
            model=model | {"init_args": model["init_args"] | size},
            data=specification(config.source, **number),
            optimizer=OptimizerConfig(**preset["optimizer"]),
            prior=PriorConfig(**prior),
            curvature=CurvatureConfig(**preset["curvature"] | mode),
            predictive=PredictiveConfig(**preset["predictive"]),
            batch_size=preset["batch_size"],
        )
