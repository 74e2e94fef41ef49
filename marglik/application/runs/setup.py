"""Check and prepare the data, network, options and devices that the trainings of a run share."""

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from kfac_backend.atomic_files import sha256_of_tensors
from kfac_backend.likelihoods import Classification, Likelihood, likelihood_of
from kfac_backend.ranks import Ranks
from marglik.application.data.out_of_distribution import (
    OutOfDistributionImages,
    out_of_distribution_images,
)
from marglik.application.data.splits import DataSource, Splits, hold_out, tensors_in
from marglik.application.provenance import Provenance
from marglik.application.runs.build import (
    build_fabric,
    check_model,
    device_of,
    with_learned_augmentation,
    with_standardised_columns,
)
from marglik.application.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.application.runs.optimizers import OptimizerConfig
from marglik.posterior.prior import PriorGroups
from marglik.prediction.predictive import PredictiveConfig
from marglik.training.loop import ranks_of

NOT_OF_THE_RESULT = [
    "output",
    "overwrite",
    "resume",
    "accelerator",
    "progress",
    "logger",
    "baseline",
]
"""Options that do not affect the results of a run. A resumed run may change them."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup that the trainings of a run share: data, network, options, devices."""

    splits: Splits
    """The data, with a validation set if one was held out for calibration."""
    held_out: int = 0
    """Number of training examples that were held out."""
    ood_images: OutOfDistributionImages | None = None
    model: nn.Module
    """The network that learns the weight decays, at its initial parameters."""
    provenance: Provenance = Provenance()
    optimizer: OptimizerConfig = OptimizerConfig()
    prior: PriorConfig = PriorConfig()
    curvature: CurvatureConfig = CurvatureConfig()
    predictive: PredictiveConfig = PredictiveConfig()
    likelihood: Likelihood = Classification()
    run: RunConfig = RunConfig()
    fabric: Any
    """A launched Fabric; None for one process in full precision."""
    ranks: Ranks = Ranks(None)
    """Ranks of the Fabric, each of which has a part of every batch."""

    @property
    def device(self) -> torch.device:
        """Device of the networks and their data."""
        return next(self.model.parameters()).device


def checked_setup(
    model: nn.Module,
    data: DataSource,
    optimizer: OptimizerConfig,
    prior: PriorConfig,
    curvature: CurvatureConfig,
    predictive: PredictiveConfig,
    ood: DataSource | None,
    likelihood: str,
    run: RunConfig,
    provenance: Provenance,
) -> Setup:
    """Check the arguments of `marglik.application.runs.train.train`, and return the setup."""
    fabric = build_fabric(run.accelerator, run.precision)
    ranks = ranks_of(fabric)
    run = replace(run, progress=run.progress and ranks.rank == 0)
    if run.members > 1 and provenance.model is None:
        raise ValueError(
            f"members={run.members} needs provenance.model to build the members, but it is None. "
            "Pass Provenance(model={'class_path': ..., 'init_args': {...}})."
        )
    splits = data.load()
    check_test_labels(splits, likelihood_of(likelihood))
    if not splits.are_images and (run.augmentation != "none" or ood):
        raise ValueError(
            f"{splits.name} contains no images. augmentation and ood are for images. Omit both."
        )
    model, provenance = with_standardised_columns(model, splits, provenance)
    if run.augmentation == "learned":
        model, provenance = with_learned_augmentation(model, splits, provenance)
    ood_images = None if ood is None else out_of_distribution_images(ood, splits)
    model = model.to(device_of(run.accelerator) if fabric is None else fabric.device)
    check_model(model, splits, curvature, likelihood, predictive)
    PriorGroups.from_model(model, prior.structure)  # raises for rules that match nothing
    number = len(tensors_in(splits.train)[-1])
    if run.held_out and predictive.is_calibrated and splits.validation is None:
        splits = hold_out(splits, run.held_out, run.seed)
    examples = len(tensors_in(splits.train)[-1])
    if 2 * examples < number and ranks.rank == 0:
        warnings.warn(
            f"held_out={run.held_out} leaves {examples} of {number} examples for training. The "
            "other examples are only used for calibration. The usual value is 0.1.",
            stacklevel=2,
        )
    if min(run.batch_size, examples) < ranks.size:
        raise ValueError(
            f"batch_size={run.batch_size} with {examples} training examples is too small: each of "
            f"{ranks.size} processes needs at least one example per batch. Use batches of at least "
            f"{ranks.size} examples, or fewer processes."
        )
    return Setup(
        splits=splits, held_out=number - examples, ood_images=ood_images, model=model,
        provenance=provenance, optimizer=optimizer, prior=prior, curvature=curvature,
        predictive=predictive, likelihood=likelihood_of(likelihood), run=run, fabric=fabric,
        ranks=ranks,
    )  # fmt: skip


def check_test_labels(splits: Splits, likelihood: Likelihood) -> None:
    """Warn of labels that occur only in the test data; raise a ValueError if all test labels do.

    It checks only data with one label per example. In texts, a rare token may occur in one part
    only.
    """
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    *others, y = (tensors_in(part)[-1].cpu() for part in parts)
    if not likelihood.has_labels or y.dim() > 1:
        return
    labels = y.unique()
    unknown = labels[~torch.isin(labels, torch.cat(others)) & (labels != splits.ignore_index)]
    if not len(unknown):
        return
    numbers = [int(label) for label in unknown]
    names = [str(k) if splits.classes is None else splits.classes[k] for k in numbers]
    message = (
        f"{splits.name}: test examples have the label(s) "
        f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}, which no training example "
        "has. A network cannot learn them. Check that equal numbers stand for the same class in "
        "both parts."
    )
    if len(unknown) == len(labels):
        raise ValueError(f"{message} The test data has no other labels.")
    warnings.warn(message, stacklevel=3)


def gains_in_words(likelihood: str, prior: PriorConfig, run: RunConfig) -> list[str]:
    """Return names of the quantities that the run learns, unlike a plain network."""
    is_fixed = prior.method == "fixed"
    if is_fixed and run.augmentation == "learned":
        raise ValueError(
            "prior.method fixed learns nothing, so augmentation learned would keep its initial "
            "ranges. Omit one of the two."
        )
    gains = [] if is_fixed else ["learned weight decays"]
    gains += ["learned invariances"] if run.augmentation == "learned" else []
    of_targets = likelihood_of(likelihood)
    if of_targets.has_label_noise and of_targets.to_learn():
        if is_fixed:
            raise ValueError(
                f"prior.method fixed learns nothing, so likelihood {likelihood} would keep a share "
                "of wrong labels of 0. Pass the share, for example "
                "'noisy_classification(noise=0.2)', or choose 'classification', whose calibration "
                "fits the share."
            )
        gains += ["label noise"]
    gains += ["averaged parameters"] if prior.schedule(run.epochs).averages else []
    if run.baseline and not gains:
        raise ValueError(
            "baseline trains a network with the initial weight decay and no average. prior.method "
            "fixed with prior.average null trains the same network. Omit one of them."
        )
    return gains


def identity_of(setup: Setup, model_name: str) -> dict[str, Any]:
    """Return the identity of a run as plain data: data, network, options.

    SHA-256 sums represent all inputs, labels and initial parameters. Only a run with the same
    identity can resume a checkpoint.
    """
    splits, ood = setup.splits, setup.ood_images
    tensors = {name: tensors_in(part) for name, part in splits.parts.items() if part is not None}
    groups = ("optimizer", "prior", "curvature", "predictive", "run")
    config = {name: asdict(getattr(setup, name)) for name in groups}
    config["run"] = {k: v for k, v in config["run"].items() if k not in NOT_OF_THE_RESULT}
    return {
        "data": splits.name,
        "examples": {name: len(part[-1]) for name, part in tensors.items()},
        "normalisation": [splits.mean, splits.std],
        "ood": None if ood is None else ood.name,
        "model": model_name,
        "model_options": (setup.provenance.model or {}).get("init_args"),
        "likelihood": str(setup.likelihood),
        "config": config,
        "sums": {
            "examples": sha256_of_tensors(t for part in tensors.values() for t in part),
            "ood": None if ood is None else sha256_of_tensors([ood.images]),
            "initial_parameters": sha256_of_tensors(setup.model.state_dict().values()),
        },
    }
