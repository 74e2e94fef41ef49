"""What a training run and its baseline share: batches, optimiser, loop, monitor, evaluation."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kfac_backend.options import Likelihood
from kfac_backend.ranks import Ranks
from marglik.data import Batches, ImageSplits, Splits
from marglik.data.batches import Shard, split_batches
from marglik.data.images.out_of_distribution import OutOfDistributionImages
from marglik.data.record import tensors_in
from marglik.posterior.hyperparameters import Hyperparameters
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.evaluation import predict_all
from marglik.prediction.evaluation_record import evaluate_network
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import PredictiveConfig, map_predictive
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.run_folder import RunLog
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineResult, OnlineTraining
from marglik.training.optimizers import OptimizerConfig, build_optimizer
from marglik.training.ranks import WithExamples

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["TrainingSetup"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingSetup:
    """Data, options and ranks of a run; trains, calibrates and evaluates networks with them.

    `marglik train` calls `train`, `calibrate` and `evaluate` in this order, once for the learned
    network and, on request, once for the baseline with a fixed prior.
    """

    splits: Splits
    """With a validation set where one was held out for calibration."""
    held_out: int
    """Number of examples that were held out of the training data; 0 if the validation set is the
    data's own, or there is none."""
    optimizer: OptimizerConfig
    prior: PriorConfig
    curvature: CurvatureConfig
    predictive: PredictiveConfig
    ood_images: OutOfDistributionImages | None
    run: RunConfig
    fabric: "Fabric"
    ranks: Ranks = Ranks(None)
    """The ranks of the Fabric, each of which has a part of every batch."""
    likelihood: Likelihood = "classification"

    def check(self) -> None:
        """Raise a ValueError unless each rank has at least one example of each full batch."""
        number, size = self.ranks.size, self.run.batch_size
        examples = len(tensors_in(self.splits.train)[-1])
        if min(size, examples) < number:
            what = f"batch_size {size}" if size < number else f"{examples} training examples"
            raise ValueError(
                f"{what}: {number} processes need batches of at least {number} examples, one for "
                "each. Use larger batches, or fewer --devices."
            )

    def options(self) -> dict[str, Any]:
        """All options, by group."""
        groups = ("optimizer", "prior", "curvature", "predictive", "run")
        return {name: asdict(getattr(self, name)) for name in groups}

    def train(
        self,
        model: nn.Module,
        prior: PriorConfig,
        checkpoints: Checkpoints | None = None,
        log: RunLog | None = None,
        kept: Hyperparameters | None = None,
    ) -> OnlineResult:
        """Train a network and its prior, starting from a checkpoint if there is one.

        With ``kept``, the weight decays of another training, only the network is trained.
        """
        run = self.run
        torch.manual_seed(run.seed)
        batches = self._batches("train", run.batch_size, shuffle=True, augment=run.augment)
        curvature_batches = batches
        if self.curvature.batch_size is not None or (run.augment and not self.curvature.augment):
            curvature_batches = self._curvature_batches()
        has_noise = self.likelihood == "regression"
        schedule = prior.schedule(run.epochs)
        if kept is not None:
            schedule = replace(schedule, updates=0)
        curvature = self.curvature.options(self.splits.targets)
        optimizer, scheduler = build_optimizer(
            model,
            self.optimizer,
            run.epochs * len(batches),
            self.likelihood,
            curvature=curvature,
            seed=run.seed,
            settles=schedule.averages,
        )

        learner = PriorLearner(
            self.likelihood,
            curvature,
            weight_decay=prior.weight_decay,
            structure=prior.structure,
            method="adam" if prior.method == "fixed" else prior.method,
            lr=prior.lr,
            temperature=prior.temperature,
            sigma_noise=prior.sigma_noise if has_noise else 1.0,
            learn_sigma_noise=has_noise,
            curvature_from=prior.curvature_from,
            schedule=schedule,
            hyperparameters=kept,
        )
        return OnlineTraining(
            model,
            optimizer,
            batches,
            learner,
            scheduler=scheduler,
            curvature_loader=curvature_batches,
            fabric=self.fabric,
            compile_mode=run.compile,
            prior_is_damping=self.optimizer.kfac.prior_is_damping,
            monitor=self._monitor(model, learner) if run.monitor else None,
            on_record=log.write if log else None,
            progress=run.progress,
        ).run(checkpoints)

    def ensemble(
        self,
        first: nn.Module,
        learned: OnlineResult,
        make_model: Callable[[], nn.Module],
        checkpoints: Mapping[str, Checkpoints],
    ) -> Ensemble:
        """The first network with others that train with its decays, each from a seed of its own."""
        models, seconds = [first], learned.seconds
        for k in range(1, self.run.members):
            _logger.info("training member %d of %d", k + 1, self.run.members)
            seed = self.run.seed + k
            torch.manual_seed(seed)
            model = self.fabric.to_device(make_model())
            of_member = replace(self, run=replace(self.run, seed=seed, monitor=0))
            states = checkpoints[f"member_{k}"]
            found = of_member.train(model, self.prior, states, kept=learned.kept)
            models.append(model)
            seconds += found.seconds
        sigma = learned.laplace.sigma_noise
        ensemble = Ensemble(models, self.likelihood, sigma, seconds=seconds)
        if self.predictive.is_calibrated and self.splits.validation is not None:
            batches = self._batches("validation", self.predictive.batch_size)
            ensemble.calibrate(
                batches,
                targets=self.splits.targets,
                progress=self.run.progress,
                ranks=self.ranks,
            )
        return ensemble

    def calibrate(self, laplace: Posterior) -> None:
        """Calibrate the predictives, then fit the posterior to the held-out examples as well.

        Does nothing without a validation set, or with predictive.calibration none.
        """
        if not self.predictive.is_calibrated or self.splits.validation is None:
            return
        batches = self._batches("validation", self.predictive.batch_size)
        calibrations_of(
            laplace, batches, self.predictive, progress=self.run.progress, ranks=self.ranks
        )
        if self.held_out:
            found = laplace.calibrations
            # One pass over all data, and not `override=False`: the factors of tensors that are used
            # in two ways do not add up.
            batch_size = self.curvature.batch_size or self.run.batch_size
            parts = self._curvature_batches(), self._batches("validation", batch_size)
            both = _Together([WithExamples(part) for part in parts])
            laplace.fit(both, progress_bar=self.run.progress)
            laplace.calibrations = found  # kept: a little more data changes the posterior little

    def evaluate(
        self,
        model: nn.Module,
        laplace: Posterior,
        ensemble: Ensemble | None = None,
    ) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The content of ``evaluation.json``, and what `compared` needs of each test example."""
        # Held-out examples have calibrated the predictives, and so cannot test them.
        splits = replace(self.splits, validation=None) if self.held_out else self.splits
        scores: dict[str, dict[str, Tensor]] = {}
        found = evaluate_network(
            map_predictive(model, self.likelihood, laplace.sigma_noise),
            laplace,
            [self.predictive],
            splits,
            self.likelihood,
            seed=self.run.seed,
            ensemble=ensemble,
            ood=self.ood_images,
            batch_size=self.predictive.batch_size,
            device=self.fabric.device,
            progress=self.run.progress,
            ranks=self.ranks,
            scores=scores,
        )
        return found, scores

    def _monitor(self, model: nn.Module, learner: PriorLearner) -> Any:
        """A function that evaluates the MAP every ``run.monitor`` epochs, for `OnlineTraining`.

        It returns NLL and accuracy (or RMSE) on the validation set, or the test set without one.
        """
        split = "test" if self.splits.validation is None else "validation"
        batches = self._batches(split, self.predictive.batch_size)

        def look(epoch: int) -> Mapping[str, float]:
            if epoch % self.run.monitor and epoch != self.run.epochs:
                return {}
            predict = map_predictive(model, self.likelihood, learner.hyperparameters.sigma_noise)
            predicted = predict_all(predict, batches, targets=self.splits.targets, ranks=self.ranks)
            found = compute_metrics(*predicted, self.likelihood)
            shown = ("cls/NLL", "cls/accuracy", "reg/NLL", "reg/RMSE")
            return {f"{split}/{name}": found[name] for name in shown if name in found}

        return look

    def _curvature_batches(self) -> Batches:
        """The training data in batches for the curvature pass."""
        return self._batches(
            "train",
            self.curvature.batch_size or self.run.batch_size,
            shuffle=self.curvature.augment,
            augment=self.run.augment and self.curvature.augment,
        )

    def _batches(
        self, split: Any, batch_size: int, *, shuffle: bool = False, augment: bool = False
    ) -> Batches:
        channels_last = self.run.channels_last
        if channels_last is None:  # faster on a GPU, where the splits are images
            channels_last = self.fabric.device.type == "cuda" and isinstance(
                self.splits, ImageSplits
            )
        return split_batches(
            self.splits,
            split,
            batch_size,
            shuffle=shuffle,
            augment=augment,
            seed=self.run.seed,
            device=self.fabric.device,
            channels_last=channels_last,
            shard=Shard(self.ranks.rank, self.ranks.size),
        )


class _Together:
    """The batches of several loaders, one loader after the other."""

    def __init__(self, loaders: Sequence[WithExamples]) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.loaders)
