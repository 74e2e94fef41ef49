"""One training run from data to results: what `marglik train` does."""

import logging
import re
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kfac_backend.files import sha256_of_tensors
from kfac_backend.likelihoods import Classification, Likelihood, likelihood_of
from kfac_backend.ranks import Ranks
from marglik.augmentation import LearnedAugmentation
from marglik.data.batches import Batches, split_batches
from marglik.data.out_of_distribution import OutOfDistributionImages, out_of_distribution_images
from marglik.data.record import data_record
from marglik.data.splits import DataSource, SplitName, Splits, hold_out, tensors_in
from marglik.models import Standardised
from marglik.posterior.posterior import Posterior
from marglik.posterior.posterior_file import load_posterior, save_posterior
from marglik.posterior.prior import PriorGroups
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.evaluation import Scores, compared, evaluate, predictives_of
from marglik.prediction.links import Calibration
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    label_noise_of,
    map_predictive,
)
from marglik.prediction.simple_models import evaluate_simple_models, simple_models_in_words
from marglik.prediction.verdict import in_one_sentence, instability
from marglik.runs.build import (
    build_fabric,
    check_model,
    with_learned_augmentation,
    with_standardised_columns,
)
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.optimizers import OptimizerConfig, build_optimizer
from marglik.runs.results import (
    augmentation_results,
    calibration_in_units,
    evaluation_in_units,
    metrics_of,
    posterior_results,
    suspicious_results,
)
from marglik.specification import build_from_spec
from marglik.storage.checkpoint import Checkpoints, check_same_run, leaves
from marglik.storage.provenance import Provenance, environment
from marglik.storage.run_folder import (
    CHECKPOINT,
    EVALUATION,
    RESULTS,
    RunLog,
    begin_run,
    read_log,
    read_posterior,
    read_record,
    remove_states,
    write_record,
    write_results,
)
from marglik.training.decay_policy import DecayPolicy
from marglik.training.learner import PriorLearner
from marglik.training.loaders import WithExamples
from marglik.training.loop import OneDevice, OnlineResult, OnlineTraining, ranks_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_logger = logging.getLogger(__name__)

NOT_OF_THE_RESULT = (
    "output", "overwrite", "resume", "accelerator", "progress", "baseline",
)  # fmt: skip
"""Options of the run that do not affect its results, and may differ when it is resumed."""
CHEAP_SECONDS, CHEAP_SHARE = 20.0, 0.25
"""A plain network is trained unasked in so many seconds, or in this share of the run so far."""


def train(
    model: nn.Module,
    data: DataSource,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    prior: PriorConfig = PriorConfig(),  # noqa: B008
    curvature: CurvatureConfig = CurvatureConfig(),  # noqa: B008
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    ood: DataSource | None = None,
    likelihood: str = "classification",
    run: RunConfig = RunConfig(),  # noqa: B008
    provenance: Provenance = Provenance(),  # noqa: B008
) -> dict[str, Any]:
    """Train a network and its weight decays together: on images, tokens, graphs or tensors.

    A sequence is one example with a label, and so a loss term, at each position. The objective sums
    the loss over positions and averages it over examples; metrics are means over positions, so that
    "cls/NLL" is in nats per token.

    Where torchrun has started several processes, they share the work and the first one writes the
    files. Returns the content of ``results.json``, and the folder under "output".

    Args:
        model: class of the network, whose outputs are logits, or means for regression. Any
            importable class will do, such as marglik.models.WideResNetFixup, marglik.models.LeNet,
            marglik.models.MLP, or my_file.MyNet.
        data: class of the data: images (such as marglik.data.Digits), a table
            (marglik.data.TableFile), any tensors (marglik.data.TensorFile), or an importable class
            of your own.
        optimizer: the network's optimiser.
        prior: the prior and its updates.
        curvature: the curvature pass.
        predictive: the Laplace predictive of the final evaluation.
        ood: class of out-of-distribution images, on which the predictives should be uncertain.
        likelihood: distribution of the targets: classification; regression with Gaussian noise,
            which is learned; bernoulli for independent yes-or-no outputs; heteroscedastic, poisson,
            "student_t(df=4)" and others, see docs/likelihoods.md.
        run: everything else.
        provenance: the options, and how model and data are built; saved with the posterior, which
            can then be loaded without them.

    Raises:
        ValueError: options, data or model that do not fit together, or a resume with other options
            than before; raised before any training.
        NotImplementedError: a layer without a K-FAC rule; raised before any training.
        FileExistsError: the output folder holds a run already, or other files.
        OSError: the output folder cannot be written to.
        FloatingPointError: training diverged.
        RankError: another process was started with other options.
    """
    start = time.perf_counter()
    fabric = build_fabric(run.accelerator, run.precision)
    ranks = ranks_of(fabric)
    leads = ranks.rank == 0  # it alone writes files and shows bars
    run = replace(run, progress=run.progress and leads)

    # Step 1: all that can be wrong with options, data and network is found before any work.
    gains = ["learned weight decays"] if prior.method != "fixed" else []
    gains += ["learned invariances"] if run.augmentation == "learned" else []
    if gains and "noise" in likelihood_of(likelihood).to_learn():
        gains += ["label noise"]
    gains += ["averaged parameters"] if prior.schedule(run.epochs).averages else []
    if run.baseline and not gains:
        raise ValueError(
            "baseline trains with the initial weight decay and no average, and so do prior.method "
            "fixed and prior.average null; drop one of them."
        )
    if run.members > 1 and provenance.model is None:
        raise ValueError(
            f"members={run.members}: the members are built from provenance.model, which is None. "
            "Pass Provenance(model={'class_path': ..., 'init_args': {...}})."
        )
    splits = data.load()
    augments = run.augmentation != "none"
    if not splits.are_images and (augments or ood):
        raise ValueError(
            f"{splits.name} holds no images; augmentation and ood are for images. Leave them out."
        )
    model, provenance = with_standardised_columns(model, splits, provenance)
    plain_model = model
    if run.augmentation == "learned":
        model, provenance = with_learned_augmentation(model, splits, provenance)
    ood_images = None if ood is None else out_of_distribution_images(ood, splits)
    model = model.to(fabric.device)
    check_model(model, splits, curvature, likelihood, predictive)
    PriorGroups.from_model(model, prior.structure)
    given = len(tensors_in(splits.train)[-1])
    kept = torch.arange(given)  # positions of the examples to train on, among those of the data
    if run.held_out and predictive.is_calibrated and splits.validation is None:
        splits, kept = hold_out(splits, run.held_out, run.seed)
    examples, held_out = len(kept), given - len(kept)
    if min(ranks.size, run.batch_size, examples) < ranks.size:
        raise ValueError(
            f"batch_size {run.batch_size}, {examples} training examples: {ranks.size} processes "
            f"need batches of at least {ranks.size} examples, one for each. Use larger batches, or "
            "fewer processes."
        )
    training = Training(
        splits, held_out, optimizer, prior, curvature, predictive, ood_images, run,
        fabric, ranks, likelihood_of(likelihood),
    )  # fmt: skip
    identity = _identity(training, model, provenance)
    ranks.agree(leaves(identity))
    plain_model = deepcopy(plain_model)  # at its initial parameters, without learned ranges

    # Step 2: the folder, which may hold this run, or an earlier part of it.
    folder = Path(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', splits.name.lower())}")
    states = {
        name: Checkpoints(folder / CHECKPOINT / name, run=identity, ranks=ranks)
        for name in ("learned", "plain", *(f"member_{k}" for k in range(1, run.members)))
    }

    def ended(results: dict[str, Any]) -> dict[str, Any]:
        if leads:
            write_results(folder, results)
            remove_states(folder)
        return results | {"output": str(folder)}

    finished = _finished(folder, identity) if run.resume and leads else {}
    finished = ranks.gather(finished)[0]
    if finished and (not run.baseline or "differences" in finished):
        return ended(finished)
    if finished:
        _, scores = training.evaluate(load_posterior(folder, model))
        return ended(training.against_plain(plain_model, states["plain"], finished, scores, gains))
    goes_on = run.resume and states["learned"].exists()
    if goes_on:
        states["learned"].load()  # raises before anything is changed
    log = None
    if leads:
        if run.resume and not goes_on and read_log(folder):
            raise FileNotFoundError(
                f"{folder} holds a run that was cut off, but no checkpoint to continue from. "
                "Start again: --overwrite instead of --resume."
            )
        begin_run(folder, provenance.options, overwrite=run.overwrite, resume=goes_on)
        log = RunLog(folder)

    # Step 3: train network and weight decays, calibrate, save, evaluate. What was trained before
    # comes from its last checkpoint; all else is done again, to the same end.
    if held_out:
        _logger.info("%d training examples are held out for calibration", held_out)
    ready = time.perf_counter()
    learned = training.train(model, states["learned"], log)
    trained = time.perf_counter()
    updates = [record for record in learned.records if record["kind"] == "update"]
    evidence = {
        "first": updates[0]["evidence_before"] if updates else learned.evidence,
        "kept": learned.evidence,
        "epoch": learned.epoch,
    }
    # Before the posterior sees what is held out.
    results = identity | posterior_results(learned.laplace, prior.weight_decay, splits)
    training.calibrate(learned.laplace)
    predictive = predictive.for_posterior(learned.laplace)
    fit = learned.laplace.calibrations.get(predictive.label)
    calibration = fit and Calibration(**fit["map_calibration"])
    noise = label_noise_of(learned.laplace.likelihood, calibration)
    ensemble = None
    if run.members > 1:
        ensemble = training.ensemble(model, learned, provenance.model, states)
    if leads:
        if ensemble is not None:
            ensemble.save(folder)
        record = data_record(splits, provenance.data)
        save_posterior(learned.laplace, folder, model=provenance.model, data=record, frozen=True)
    found, scores = training.evaluate(learned.laplace, ensemble)
    results |= metrics_of("fixed" if prior.method == "fixed" else "learned", found)
    results |= {
        "evidence": evidence,
        "held_out": held_out,
        "calibration": fit and {"predictive": predictive.label} | calibration_in_units(fit, splits),
        "num_positions": found["num_positions"],
        "suspicious_labels": suspicious_results(learned, splits, kept, noise),
        **augmentation_results(model, splits),
        # Training counts in full, though resumed; the rest is this process's.
        "seconds": learned.seconds + ready - start + time.perf_counter() - trained,
        "complete": False,
        **environment(fabric.device),
    }
    if splits.table is not None and run.baseline is not False:
        results = training.beside_simple_models(results, scores)
    if leads:
        write_record(folder / EVALUATION, found)
        write_results(folder, results)  # now, since the plain network may fail

    # Step 4: what was gained, if the plain network is asked for or costs little.
    of_steps = sum(record["seconds"] for record in learned.records if record["kind"] == "epoch")
    cost = ranks.gather(of_steps / getattr(model, "copies", 1))[0]
    is_cheap = cost <= max(CHEAP_SECONDS, CHEAP_SHARE * results["seconds"])
    if gains and (is_cheap if run.baseline is None else run.baseline):
        _logger.info("the plain network, to compare with")
        return ended(training.against_plain(plain_model, states["plain"], results, scores, gains))
    about = f"{cost / 60:.0f} min" if cost > 120 else f"{cost:.0f} s"
    said = (
        f"No verdict on what was gained: a plain network to compare with takes about {about} more. "
        "The same command with --resume --baseline adds it."
    )
    return ended(results | {"complete": True, "verdict": said if gains else None})


def _finished(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The results in a folder, verified with all other files; {} if there is still work to do.

    Raises:
        FileNotFoundError: the posterior is missing.
        ValueError: the results are of another run, or a file of the run is damaged.
    """
    results = read_record(folder / RESULTS)
    if results:
        check_same_run(identity, {key: results.get(key) for key in identity}, folder)
    if not results.get("complete"):
        return {}
    read_record(folder / EVALUATION)
    read_posterior(folder)
    return results


def _identity(training: "Training", model: nn.Module, provenance: Provenance) -> dict[str, Any]:
    """What identifies a run, as plain data: data, network, options.

    SHA-256 sums stand for all inputs, labels and initial parameters. A checkpoint is only resumed
    if its run has the same identity.
    """
    splits, ood = training.splits, training.ood_images
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    tensors = {name: tensors_in(part) for name, part in parts.items() if part is not None}
    groups = ("optimizer", "prior", "curvature", "predictive", "run")
    config = {name: asdict(getattr(training, name)) for name in groups}
    config["run"] = {k: v for k, v in config["run"].items() if k not in NOT_OF_THE_RESULT}
    return {
        "data": splits.name,
        "examples": {name: len(found[-1]) for name, found in tensors.items()},
        "normalisation": [splits.mean, splits.std],
        "ood": None if ood is None else ood.name,
        "model": type(_inner(model)).__name__,
        "model_options": (provenance.model or {}).get("init_args"),
        "likelihood": str(training.likelihood),
        "config": config,
        "sums": {
            "examples": sha256_of_tensors(t for found in tensors.values() for t in found),
            "ood": None if ood is None else sha256_of_tensors([ood.images]),
            "initial_parameters": sha256_of_tensors(model.state_dict().values()),
        },
    }


def _inner(model: nn.Module) -> nn.Module:
    """The network that the user named, inside of those that were put around it."""
    while isinstance(model, Standardised | LearnedAugmentation):
        model = model.model
    return model


@dataclass(frozen=True)
class Training:
    """What a run and its baseline share: data, options, ranks.

    `train`, `calibrate` and `evaluate` are called in this order for the learned network, then
    perhaps `against_plain`.
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
    fabric: "Fabric | OneDevice"
    ranks: Ranks = Ranks(None)
    """The ranks of the Fabric, each of which has a part of every batch."""
    likelihood: Likelihood = Classification()

    def train(
        self,
        model: nn.Module,
        checkpoints: Checkpoints | None = None,
        log: RunLog | None = None,
        first: PriorLearner | None = None,
        plain: bool = False,
    ) -> OnlineResult:
        """Train a network and its prior, starting from a checkpoint if there is one.

        With the learner of a ``first`` training only the network is trained, and its decays take
        their course; a ``plain`` one keeps the initial decay, and has neither an average nor a
        learned noise.
        """
        run, prior = self.run, self.prior
        torch.manual_seed(run.seed)
        batches = self._batches("train", run.batch_size, shuffle=True)
        held_out = None
        if self.splits.validation is not None:
            held_out = self._batches("validation", self.predictive.batch_size)
        schedule = prior.schedule(run.epochs)
        policy = DecayPolicy(clip=None) if plain else DecayPolicy()
        if plain:
            schedule = replace(schedule, updates=0, average=None)
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
            curvature_from=prior.curvature_from,
            schedule=schedule,
            policy=policy,
        )
        return OnlineTraining(
            model,
            optimizer,
            batches,
            first.replay() if first is not None else learner,
            scheduler=scheduler,
            fabric=self.fabric,
            held_out=held_out,
            compile_mode=run.compile,
            on_record=log.write if log else None,
            progress=run.progress,
        ).run(checkpoints)

    def ensemble(
        self,
        first: nn.Module,
        learned: OnlineResult,
        spec: dict[str, Any] | None,
        checkpoints: Mapping[str, Checkpoints],
    ) -> Ensemble:
        """The first network, and others by ``spec`` from other seeds, with its decays' course."""
        models, seconds = [first], learned.seconds
        assert learned.laplace is not None
        likelihood = learned.laplace.likelihood
        for k in range(1, self.run.members):
            _logger.info("training member %d of %d", k + 1, self.run.members)
            seed = self.run.seed + k
            torch.manual_seed(seed)
            model = build_from_spec(nn.Module, spec, named=None).to(self.fabric.device)
            of_member = replace(self, run=replace(self.run, seed=seed), likelihood=likelihood)
            states = checkpoints[f"member_{k}"]
            found = of_member.train(model, states, first=learned.learner)
            models.append(model)
            seconds += found.seconds
        sigma = float(learned.laplace.sigma_noise)
        same = replace(self, likelihood=likelihood)
        return same._calibrated(models, sigma, seconds)

    def _calibrated(self, models: list[nn.Module], sigma: float, seconds: float) -> Ensemble:
        """Networks that predict together, calibrated on the validation set if there is one."""
        labels = self.predictive.labels
        ensemble = Ensemble(models, self.likelihood, sigma, seconds=seconds, labels=labels)
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
            parts = [self._batches("train", self.run.batch_size, shuffle=True)]
            parts += [self._batches("validation", self.run.batch_size)]
            both = chain.from_iterable(map(WithExamples, parts))
            laplace.fit(both, progress_bar=self.run.progress)
            laplace.calibrations = found  # kept: a little more data changes the posterior little

    def evaluate(
        self, laplace: Posterior, ensemble: Ensemble | None = None
    ) -> tuple[dict[str, Any], Scores]:
        """The content of ``evaluation.json``, and what `compared` needs of each test example."""
        predictives = predictives_of(
            laplace, [self.predictive], ensemble, seed=self.run.seed, ranks=self.ranks
        )
        return self._evaluated(predictives, laplace.likelihood)

    def _evaluated(
        self, predictives: dict[str, Predictive], likelihood: Likelihood
    ) -> tuple[dict[str, Any], Scores]:
        found, scores = evaluate(
            predictives,
            self.splits,
            likelihood,
            labels=self.predictive.labels,
            ood=self.ood_images,
            batch_size=self.predictive.batch_size,
            device=self.fabric.device,
            progress=self.run.progress,
            ranks=self.ranks,
        )
        return evaluation_in_units(found, self.splits), scores

    def against_plain(
        self,
        model: nn.Module,
        checkpoints: Checkpoints,
        results: dict[str, Any],
        scores: Scores,
        gains: list[str],
    ) -> dict[str, Any]:
        """Train the plain network; returns the results with what it adds, first of all the verdict.

        Args:
            model: the network at its initial parameters.
            checkpoints: where its training is resumed from.
            results: those of the learned network.
            scores: of the learned network, see `evaluate`.
            gains: what the plain network does without, in words.
        """
        if self.likelihood.to_learn() and self.likelihood.has_label_noise:
            self = replace(self, likelihood=likelihood_of("classification"))
        try:
            plain = self.train(model.to(self.fabric.device), checkpoints, plain=True)
        except FloatingPointError as error:
            said = f"No verdict on what was gained, since the plain network diverged: {error}"
            return results | {"complete": True, "verdict": said}
        trained = time.perf_counter()
        sigma = 1.0
        if self.likelihood.has_sigma:  # of the residuals; the loss is half of σ²
            y = tensors_in(self.splits.train)[-1]
            sigma = (2 * plain.records[-1]["loss"] / y[0].numel()) ** 0.5
        scaled = self._calibrated([model], sigma, plain.seconds)
        predictives: dict[str, Predictive] = {"MAP": map_predictive(model, self.likelihood, sigma)}
        if scaled.calibration is not None:
            predictives["MAP, temperature-scaled"] = scaled
        found, others = self._evaluated(predictives, self.likelihood)
        merged = {k: results[k] | of for k, of in metrics_of("plain", found).items()}
        differences = {
            name: compared(scores[name], of) for name, of in others.items() if name in scores
        }
        # Both calibrated, where there is something to calibrate with.
        name = [*predictives][-1]
        (learned,) = [k for k in results["metrics"] if k in (f"learned, {name}", f"fixed, {name}")]
        here, there = (merged["metrics"][who] for who in (learned, f"plain, {name}"))
        said = in_one_sentence(differences.get(name, {}), here, there, gains)
        said += instability([of["loss"] for of in plain.records if of["kind"] == "epoch"])
        return (
            results
            | merged
            | {
                "differences": differences,
                "verdict": said,
                "seconds": results["seconds"] + plain.seconds + time.perf_counter() - trained,
                "complete": True,
            }
        )

    def beside_simple_models(self, results: dict[str, Any], scores: Scores) -> dict[str, Any]:
        """The results with those of scikit-learn's models on the same rows of a table."""
        train, validation = self.splits.train, self.splits.validation
        if self.held_out and validation is not None:  # the posterior has seen them, too
            train = torch.cat([train[0], validation[0]]), torch.cat([train[1], validation[1]])
        entries, changes = evaluate_simple_models(
            train, self.splits.test, likelihood_of(self.likelihood), [*scores.values()][-1]
        )
        if not entries:
            return results
        found = evaluation_in_units({"predictives": entries}, self.splits)
        metrics = {name: entry["metrics"] for name, entry in found["predictives"].items()}
        merged = {k: results[k] | of for k, of in metrics_of("scikit-learn", found).items()}
        return results | merged | {"simple_models": simple_models_in_words(metrics, changes)}

    def _batches(self, split: SplitName, batch_size: int, *, shuffle: bool = False) -> Batches:
        """A part of the data; what is shuffled is for training, and augmented as the run says."""
        return split_batches(
            self.splits,
            split,
            batch_size,
            shuffle=shuffle,
            augment=shuffle and self.run.augmentation == "standard",
            seed=self.run.seed,
            device=self.fabric.device,
            channels_last=self.fabric.device.type == "cuda" and self.splits.are_images,  # faster
            ranks=self.ranks,
        )
