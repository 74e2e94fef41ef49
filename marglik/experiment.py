"""One training run from data to results: what `marglik train` does."""

import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, nn

from kfac_backend.curvature_pass import CurvaturePass
from kfac_backend.files import atomic_path
from kfac_backend.laplace_interface import KfacEF, KfacGGN
from marglik.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.data import ImageBatches, ImageData, ImageSplits
from marglik.evaluation import (
    PredictiveConfig,
    classification_metrics,
    laplace_predictive,
    map_predictive,
)
from marglik.hyperparameters import Hyperparameters
from marglik.laplace import KronLaplace
from marglik.modes import eval_mode
from marglik.optimizers import OptimizerConfig, build_optimizer
from marglik.prior import (
    PriorGroups,
    precision_to_weight_decay,
    weight_decay_to_precision,
)
from marglik.report import plot_run, save_figure
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
    run: RunConfig = RunConfig(),  # noqa: B008
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
        run: everything else.

    Raises:
        ValueError: options, data or model that do not fit together; before any training.
        NotImplementedError: a layer without a K-FAC rule; before any training.
        FileExistsError: the output folder holds a run already.
        FloatingPointError: training diverged.
    """
    start = time.perf_counter()
    fabric = _fabric(run)
    splits = data.load()
    model = fabric.to_device(model)
    _check_model(model, splits, curvature)
    PriorGroups.from_model(model, prior.structure)
    folder = Path(run.output or f"runs/{splits.name.lower().replace(' ', '_')}")
    initial_model = deepcopy(model) if run.baseline else None
    setup = _Setup(splits, optimizer, prior, curvature, predictive, run, fabric)
    schedule = prior.schedule(run.epochs)

    with RunLog(folder, tensorboard=run.tensorboard, overwrite=run.overwrite) as log:
        learned, metrics = setup.train_and_evaluate(model, "learned", schedule, log)
    num_data = learned.laplace.n_data
    updates = [record for record in learned.records if record["kind"] == "update"]
    results = {
        "data": splits.name,
        "model": type(model).__name__,
        "num_data": num_data,
        "metrics": metrics,
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
    write_json(folder / "results.json", results)  # before the baseline, which may fail
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, temporary)
    figure = plot_run(
        learned.records, prior.weight_decay, num_data, f"{type(model).__name__} on {splits.name}"
    )
    save_figure(figure, folder / "evidence.png")
    if initial_model is not None:
        never = replace(schedule, burn_in=run.epochs + 1)
        _, baseline_metrics = setup.train_and_evaluate(initial_model, "initial", never)
        metrics |= baseline_metrics
        results["seconds"] = time.perf_counter() - start
        write_json(folder / "results.json", results)
    return results | {"output": str(folder)}


@dataclass(frozen=True)
class _Setup:
    """What the learned run and its baseline share."""

    splits: ImageSplits
    optimizer: OptimizerConfig
    prior: PriorConfig
    curvature: CurvatureConfig
    predictive: PredictiveConfig
    run: RunConfig
    fabric: Fabric

    def train_and_evaluate(
        self, model: nn.Module, label: str, schedule: Schedule, log: RunLog | None = None
    ) -> tuple[OnlineResult, dict[str, dict[str, float]]]:
        """Train a network; its result, and metrics by "label, MAP" and "label, Laplace"."""
        run = self.run
        torch.manual_seed(run.seed)
        batches = self._batches("train", run.batch_size, training=True)
        curvature_batches = batches
        if self.curvature.batch_size is not None or (run.augment and not self.curvature.augment):
            curvature_batches = self._batches(
                "train",
                self.curvature.batch_size or run.batch_size,
                training=self.curvature.augment,
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
            return self._laplace(model, prior_precision)

        result = OnlineTraining(
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
        return result, self._evaluate(model, result.laplace, label)

    def _laplace(self, model: nn.Module, prior_precision: Tensor) -> KronLaplace:
        settings = self.curvature
        empirical = settings.fisher == "empirical"
        stochastic = {"stochastic": settings.fisher == "mc", "num_samples": settings.mc_samples}
        options = {
            "rank_tolerance": settings.rank_tolerance,
            "backward_precision": settings.backward_precision,
            "batched": settings.batched,
        }
        return KronLaplace(
            model,
            "classification",
            prior_precision=prior_precision,
            temperature=self.prior.temperature,
            backend=KfacEF if empirical else KfacGGN,
            backend_kwargs=options if empirical else options | stochastic,
            kfac_approx=settings.kfac_approx,
        )

    def _evaluate(
        self, model: nn.Module, laplace: KronLaplace, label: str
    ) -> dict[str, dict[str, float]]:
        generator = torch.Generator(self.fabric.device).manual_seed(self.run.seed)
        predictives = {
            f"{label}, MAP": map_predictive(model),
            f"{label}, Laplace": laplace_predictive(laplace, self.predictive, generator),
        }
        batch_size = self.predictive.batch_size
        return {
            name: {
                f"{split}/{key}": value
                for split in ("validation", "test")
                if getattr(self.splits, split) is not None
                for key, value in classification_metrics(
                    predict,
                    self._batches(split, batch_size, training=False),
                    len(self.splits.classes),
                    self.run.progress,
                ).items()
            }
            for name, predict in predictives.items()
        }

    def _batches(self, split: str, batch_size: int, *, training: bool) -> ImageBatches:
        return ImageBatches(
            getattr(self.splits, split),
            self.splits.mean,
            self.splits.std,
            batch_size,
            shuffle=training,
            augment="crop_flip" if training and self.run.augment else "none",
            device=self.fabric.device,
            seed=self.run.seed,
        )


def _fabric(run: RunConfig) -> Fabric:
    available = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = available if run.accelerator == "auto" else run.accelerator
    try:
        return Fabric(accelerator=accelerator, devices=1, precision=run.precision)
    except RuntimeError as error:
        raise ValueError(
            f"--accelerator {run.accelerator} is not to be had here: {error} Pass auto or cpu."
        ) from error


def _check_model(model: nn.Module, splits: ImageSplits, curvature: CurvatureConfig) -> None:
    """Fail before training: a curvature that cannot be had, images or classes that do not fit."""
    parameter = next(model.parameters(), torch.empty(0))
    images = splits.train.images[:2].to(parameter.device, parameter.dtype) / 255
    shape = tuple(images.shape[1:])
    with eval_mode(model):
        curvature_pass = CurvaturePass(
            model,
            "classification",
            kfac_approx=curvature.kfac_approx,
            fisher=curvature.fisher,
            rank_tolerance=curvature.rank_tolerance,
            backward_precision=curvature.backward_precision,
        )
        try:
            with torch.no_grad():
                outputs = model(images)
        except RuntimeError as error:
            raise ValueError(
                f"{type(model).__name__} cannot take images of shape {shape}: {error}. Set the "
                "model's options to fit the data."
            ) from error
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"{type(model).__name__} returns {type(outputs).__name__}; logits are needed, a "
                "tensor."
            )
        if outputs.shape != (len(images), len(splits.classes)):
            raise ValueError(
                f"{type(model).__name__} returns shape {tuple(outputs.shape)} for {len(images)} "
                f"images, but {splits.name} has {len(splits.classes)} classes; set "
                f"--model.num_classes {len(splits.classes)}."
            )
        curvature_pass.add(images, splits.train.labels[:2])


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
