"""One training run from data to results: what `marglik train` does."""

import re
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from marglik.build import build_fabric, build_laplace
from marglik.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.data import ImageBatches, ImageData, ImageSplits
from marglik.data.out_of_distribution import ForeignImages, out_of_distribution_images
from marglik.data.split_batches import split_batches
from marglik.data_record import data_record
from marglik.evaluation_record import EvaluationConfig, evaluate
from marglik.figures import plot_run, save_figure
from marglik.hyperparameters import Hyperparameters
from marglik.laplace import KronLaplace
from marglik.model_check import check_model
from marglik.optimizers import OptimizerConfig, build_optimizer
from marglik.posterior_file import save_posterior
from marglik.predictive import PredictiveConfig, laplace_predictive, map_predictive
from marglik.prior import (
    PriorGroups,
    precision_to_weight_decay,
    weight_decay_to_precision,
)
from marglik.provenance import Provenance
from marglik.run_files import EVALUATION, EVIDENCE, RESULTS
from marglik.run_log import RunLog, environment, write_json
from marglik.schedule import Schedule
from marglik.training import OnlineResult, OnlineTraining

__all__ = ["train"]


def train(
    model: nn.Module,
    data: ImageData,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    prior: PriorConfig = PriorConfig(),  # noqa: B008
    curvature: CurvatureConfig = CurvatureConfig(),  # noqa: B008
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    evaluation: EvaluationConfig = EvaluationConfig(),  # noqa: B008
    ood: ImageData | None = None,
    run: RunConfig = RunConfig(),  # noqa: B008
    provenance: Provenance = Provenance(),  # noqa: B008
) -> dict[str, Any]:
    """Train a classifier of images and its weight decays together.

    Returns what `results.json` holds, and the folder under "output".

    Args:
        model: the network, whose outputs are logits; any importable class, such as
            marglik.models.WideResNetFixup, marglik.models.LeNet, marglik.models.MLP.
        data: the images.
        optimizer: the network's optimiser.
        prior: the prior and its updates.
        curvature: the curvature pass.
        predictive: the Laplace predictive of the final evaluation.
        evaluation: what is evaluated besides the test set.
        ood: images from elsewhere, which the predictives should find uncertain.
        run: everything else.
        provenance: the options, and how model and data are made, for whoever loads the posterior.

    Raises:
        ValueError: options, data or model that do not fit together; before any training.
        NotImplementedError: a layer without a K-FAC rule; before any training.
        FileExistsError: the output folder holds a run already.
        FloatingPointError: training diverged.
    """
    start = time.perf_counter()
    fabric = build_fabric(run.accelerator, run.precision)
    splits = data.load()
    foreign = None if ood is None else out_of_distribution_images(ood, splits)
    evaluation.check(splits)
    model = fabric.to_device(model)
    check_model(model, splits, curvature, predictive=predictive)
    PriorGroups.from_model(model, prior.structure)
    folder = Path(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', splits.name.lower())}")
    initial_model = deepcopy(model) if run.baseline else None
    setup = _Setup(
        splits, optimizer, prior, curvature, predictive, evaluation, foreign, run, fabric
    )
    schedule = prior.schedule(run.epochs)

    with RunLog(folder, tensorboard=run.tensorboard, overwrite=run.overwrite) as log:
        provenance.write_options(folder)
        learned = setup.train(model, schedule, log)
    save_posterior(
        learned.laplace,
        folder,
        model=provenance.model,
        data=data_record(splits, provenance.data),
    )
    found = setup.evaluate(model, learned.laplace)
    write_json(folder / EVALUATION, found)
    num_data = learned.laplace.n_data
    updates = [record for record in learned.records if record["kind"] == "update"]
    results = {
        "data": splits.name,
        "model": type(model).__name__,
        "num_data": num_data,
        "metrics": _metrics("learned", found),
        "evidence": {
            "first": updates[0]["evidence_before"] if updates else learned.evidence,
            "kept": learned.evidence,
            "epoch": learned.epoch,
        },
        "weight_decay": _weight_decay_table(model, learned, prior, num_data),
        "config": {
            "optimizer": asdict(optimizer),
            "prior": asdict(prior),
            "curvature": asdict(curvature),
            "predictive": asdict(predictive),
            "run": asdict(run),
        },
        "seconds": time.perf_counter() - start,
        **environment(fabric.device),
    }
    write_json(folder / RESULTS, results)  # before the baseline, which may fail
    figure = plot_run(
        learned.records, prior.weight_decay, num_data, f"{type(model).__name__} on {splits.name}"
    )
    save_figure(figure, folder / EVIDENCE)
    if initial_model is not None:
        never = replace(schedule, burn_in=run.epochs + 1)
        initial = setup.train(initial_model, never)
        results["metrics"] |= _metrics("initial", setup.evaluate(initial_model, initial.laplace))
        results["seconds"] = time.perf_counter() - start
        write_json(folder / RESULTS, results)
    return results | {"output": str(folder)}


@dataclass(frozen=True)
class _Setup:
    """What the learned run and its baseline share."""

    splits: ImageSplits
    optimizer: OptimizerConfig
    prior: PriorConfig
    curvature: CurvatureConfig
    predictive: PredictiveConfig
    evaluation: EvaluationConfig
    foreign: ForeignImages | None
    run: RunConfig
    fabric: Fabric

    def train(
        self, model: nn.Module, schedule: Schedule, log: RunLog | None = None
    ) -> OnlineResult:
        """Train a network and its prior."""
        run = self.run
        torch.manual_seed(run.seed)
        batches = self._batches(run.batch_size, run.augment)
        curvature_batches = batches
        if self.curvature.batch_size is not None or (run.augment and not self.curvature.augment):
            curvature_batches = self._batches(
                self.curvature.batch_size or run.batch_size,
                run.augment and self.curvature.augment,
                shuffle=self.curvature.augment,
            )
        num_data = batches.num_examples
        groups = PriorGroups.from_model(model, self.prior.structure)
        hyperparameters = Hyperparameters(
            groups,
            weight_decay_to_precision(self.prior.weight_decay, num_data, self.prior.temperature),
            method=self.prior.method,
            lr=self.prior.lr,
        )
        optimizer, scheduler = build_optimizer(model, self.optimizer, run.epochs * len(batches))

        def make_laplace(prior_precision: Tensor, sigma_noise: Tensor) -> KronLaplace:
            return build_laplace(
                model,
                "classification",
                self.curvature,
                prior_precision,
                temperature=self.prior.temperature,
            )

        return OnlineTraining(
            model,
            optimizer,
            batches,
            "classification",
            hyperparameters,
            make_laplace,
            schedule,
            temperature=self.prior.temperature,
            scheduler=scheduler,
            curvature_loader=curvature_batches,
            fabric=self.fabric,
            on_record=log.write if log else None,
            progress=run.progress,
        ).run()

    def evaluate(self, model: nn.Module, laplace: KronLaplace) -> dict[str, Any]:
        """The content of ``evaluation.json`` for a trained network."""
        generator = torch.Generator(self.fabric.device).manual_seed(self.run.seed)
        predictives = {
            "MAP": map_predictive(model),
            self.predictive.label: laplace_predictive(laplace, self.predictive, generator),
        }
        return evaluate(
            predictives,
            self.splits,
            "classification",
            self.evaluation,
            ood=self.foreign,
            batch_size=self.predictive.batch_size,
            device=self.fabric.device,
            progress=self.run.progress,
        ) | {"config": self._evaluated_with()}

    def _evaluated_with(self) -> dict[str, Any]:
        return {
            "predictive": asdict(self.predictive),
            "evaluation": asdict(self.evaluation),
            "seed": self.run.seed,
        }

    def _batches(self, batch_size: int, augment: bool, shuffle: bool = True) -> ImageBatches:
        batches = split_batches(
            self.splits,
            "train",
            batch_size,
            shuffle=shuffle,
            augment=augment,
            seed=self.run.seed,
            device=self.fabric.device,
        )
        assert isinstance(batches, ImageBatches)
        return batches


def _metrics(label: str, evaluation: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The metrics of each predictive, under names such as "learned, MAP"."""
    predictives = evaluation["predictives"].items()
    return {f"{label}, {name}": predictive["metrics"] for name, predictive in predictives}


def _weight_decay_table(
    model: nn.Module, learned: OnlineResult, prior: PriorConfig, num_data: int
) -> dict[str, dict[str, float]]:
    """Parameter name -> its learned weight decay, effective and all parameters."""
    laplace: KronLaplace = learned.laplace
    gamma = laplace.effective_parameters()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    delta = laplace.prior_precision.expand(len(trainable))
    weight_decay = precision_to_weight_decay(delta, num_data, prior.temperature)
    return {
        name: {
            "initial": prior.weight_decay,
            "learned": weight_decay[i].item(),
            "effective_parameters": gamma[i].item(),
            "parameters": p.numel(),
        }
        for i, (name, p) in enumerate(trainable.items())
    }
