"""One training run from data to results: what `marglik train` does."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from kfac_backend.atomic_files import sha256_of_tensors
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
from marglik.prediction.evaluation import ExampleScores, evaluate, predictives_of
from marglik.prediction.intervals import differences
from marglik.prediction.links import Calibration
from marglik.prediction.predictive import (
    Predictive,
    PredictiveConfig,
    label_noise_of,
    map_predictive,
)
from marglik.prediction.simple_models import evaluate_simple_models, simple_models_in_words
from marglik.prediction.verdict import in_one_sentence, instability
from marglik.records import Environment, Evaluation, Evidence, Metrics, Network, Results
from marglik.runs.build import (
    build_fabric,
    check_model,
    with_learned_augmentation,
    with_standardised_columns,
)
from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.runs.optimizers import OptimizerConfig, build_optimizer
from marglik.runs.results import (
    augmentation_record,
    calibration_in_units,
    evaluation_in_units,
    posterior_results,
    scores_in_units,
    suspicious_record,
)
from marglik.specification import build_from_spec
from marglik.storage.checkpoint import Checkpoints, check_same_run, leaves
from marglik.storage.provenance import Provenance, environment
from marglik.storage.run_folder import (
    CHECKPOINT,
    RunLog,
    begin_run,
    read_evaluation,
    read_log,
    read_posterior,
    read_results,
    remove_states,
    write_evaluation,
    write_results,
)
from marglik.training.decay_policy import DecayPolicy
from marglik.training.learner import PriorLearner
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


@dataclass(frozen=True)
class Training:
    """One of the networks that a run trains.

    Args:
        name: names its checkpoints.
        build: makes the network at its initial parameters.
        seed: of all its random numbers.
        decays: "learned" by the evidence; "replayed" takes the decays of the learned training,
            epoch by epoch; "fixed" keeps the initial one, and has neither an average nor a learned
            noise.
    """

    name: str
    build: Callable[[], nn.Module]
    seed: int
    decays: Literal["learned", "replayed", "fixed"]


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
) -> Results:
    """Train a network and its weight decays together: on images, tokens, graphs or tensors.

    A sequence is one example with a label, and so a loss term, at each position. The objective sums
    the loss over positions and averages it over examples; metrics are means over positions, so that
    the NLL is in nats per token.

    A run is a list of trainings. What is evaluated and kept of each:

    - "learned": network and posterior; the MAP, temperature-scaled too, and Laplace predictives.
    - "member_1", ...: networks, which predict together with the learned one.
    - "plain": nothing but the metrics of its MAP, and the learned network's differences from them.

    Where torchrun has started several processes, they share the work and the first one writes the
    files.

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
    gains = _gains(likelihood, prior, run)
    if run.members > 1 and provenance.model is None:
        raise ValueError(
            f"members={run.members}: the members are built from provenance.model, which is None. "
            "Pass Provenance(model={'class_path': ..., 'init_args': {...}})."
        )
    splits = data.load()
    if not splits.are_images and (run.augmentation != "none" or ood):
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
    number = len(tensors_in(splits.train)[-1])
    train_indices = torch.arange(number)  # of the examples to train on, among those of the data
    if run.held_out and predictive.is_calibrated and splits.validation is None:
        splits, train_indices = hold_out(splits, run.held_out, run.seed)
    examples = len(train_indices)
    if min(ranks.size, run.batch_size, examples) < ranks.size:
        raise ValueError(
            f"batch_size {run.batch_size}, {examples} training examples: {ranks.size} processes "
            f"need batches of at least {ranks.size} examples, one for each. Use larger batches, or "
            "fewer processes."
        )
    setup = Setup(
        splits, number - examples, optimizer, prior, curvature, predictive, ood_images, run,
        fabric, ranks, likelihood_of(likelihood),
    )  # fmt: skip
    identity = _identity(setup, model, provenance)
    ranks.agree(leaves(identity))
    plain_model = deepcopy(plain_model)  # at its initial parameters, without learned ranges

    # Step 2: the list of trainings, and the folder, which may hold this run or a part of it.
    learned = Training("learned", lambda: model, run.seed, "learned")
    members = [
        Training(
            f"member_{k}",
            lambda: build_from_spec(nn.Module, provenance.model, named=None),
            run.seed + k,
            "replayed",
        )
        for k in range(1, run.members)
    ]
    plain = Training("plain", lambda: plain_model, run.seed, "fixed")
    folder = Path(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', splits.name.lower())}")
    states = {
        training.name: Checkpoints(folder / CHECKPOINT / training.name, run=identity, ranks=ranks)
        for training in (learned, *members, plain)
    }
    results = _finished(folder, identity) if run.resume and leads else None
    results, scores, baseline = ranks.gather(results)[0], None, run.baseline
    if results is None:
        log = _open_folder(folder, states[learned.name], provenance, run, leads)

        # Step 3: train, calibrate, save, evaluate. What was trained before comes from its last
        # checkpoint; all else is done again, to the same end.
        if setup.held_out:
            _logger.info("%d training examples are held out for calibration", setup.held_out)
        ready = time.perf_counter()
        _, outcome = setup.train(learned, states[learned.name], log)
        trained = time.perf_counter()
        # Before the posterior sees what is held out.
        results = posterior_results(outcome.laplace, prior.weight_decay, splits)
        setup.calibrate(outcome.laplace)
        predictive = predictive.for_posterior(outcome.laplace)
        fit = outcome.laplace.calibrations.get(predictive.label)
        noise = label_noise_of(outcome.laplace.likelihood, None)
        calibration = Calibration(**fit["map_calibration"] if fit else {"label_noise": noise})
        ensemble = setup.ensemble(model, outcome, members, states) if members else None
        outcome.laplace.gather()
        if leads:
            if ensemble is not None:
                ensemble.save(folder)
            record = data_record(splits, provenance.data)
            save_posterior(
                outcome.laplace, folder, model=provenance.model, data=record, frozen=True
            )
        evaluation, scores = setup.evaluate(outcome.laplace, ensemble)
        name = "fixed" if prior.method == "fixed" else learned.name
        updates = [record for record in outcome.records if record["kind"] == "update"]
        results = Results(
            identity=identity,
            networks={name: Network(evaluation.scores)},
            evidence=Evidence(
                updates[0]["evidence_before"] if updates else outcome.evidence,
                outcome.evidence,
                outcome.epoch,
            ),
            environment=Environment(**environment(fabric.device)),
            held_out=setup.held_out,
            calibration=fit and calibration_in_units(predictive.label, fit, splits),
            num_positions=evaluation.num_positions,
            suspicious_labels=suspicious_record(outcome, splits, train_indices, calibration),
            augmentation=augmentation_record(model, splits),
            # Training counts in full, though resumed; the rest is this process's.
            seconds=outcome.seconds + ready - start + time.perf_counter() - trained,
            **results,
        )
        if splits.table is not None and baseline is None:
            results = setup.beside_simple_models(results, scores)
        if leads:
            write_evaluation(folder, evaluation)
            write_results(folder, results)  # now, since the plain network may fail
        seconds = sum(record["seconds"] for record in outcome.records if record["kind"] == "epoch")
        cost = ranks.gather(seconds / getattr(model, "copies", 1))[0]
        if baseline is None:
            baseline = cost <= max(CHEAP_SECONDS, CHEAP_SHARE * results.seconds)
        if gains and not baseline:
            time_of_plain = f"{cost / 60:.0f} min" if cost > 120 else f"{cost:.0f} s"
            results = replace(
                results,
                verdict="No verdict on what was gained: a plain network to compare with takes "
                f"about {time_of_plain} more. The same command with --resume --baseline adds it.",
            )

    # Step 4: what was gained, if the plain network is asked for or costs little. A finished run may
    # be asked for what it was trained without.
    lacks_simple = bool(splits.table is not None and baseline and results.simple_models is None)
    lacks_plain = bool(gains and baseline and plain.name not in results.networks)
    if lacks_simple or lacks_plain:
        if not scores:
            ensemble = Ensemble.load(folder, model) if members else None
            scores = setup.evaluate(load_posterior(folder, model), ensemble)[1]
        if lacks_simple:
            results = setup.beside_simple_models(results, scores)
        if lacks_plain:
            _logger.info("the plain network, to compare with")
            results = setup.against_plain(plain, states[plain.name], results, scores, gains)
    results = replace(results, complete=True)
    if leads:
        write_results(folder, results)
        remove_states(folder)
    return replace(results, output=str(folder))


def _gains(likelihood: str, prior: PriorConfig, run: RunConfig) -> list[str]:
    """What the learned network has and a plain one lacks, in words."""
    is_fixed = prior.method == "fixed"
    if is_fixed and run.augmentation == "learned":
        raise ValueError(
            "prior.method fixed learns nothing, and augmentation learned would keep its initial "
            "ranges; drop one of them."
        )
    gains = [] if is_fixed else ["learned weight decays"]
    gains += ["learned invariances"] if run.augmentation == "learned" else []
    of_targets = likelihood_of(likelihood)
    if of_targets.has_label_noise and of_targets.to_learn():
        if is_fixed:
            raise ValueError(
                f"prior.method fixed learns nothing, and likelihood {likelihood} would keep 0 as "
                "its share of wrong labels: give it, as in 'noisy_classification(noise=0.2)', or "
                "take 'classification', whose calibration fits it."
            )
        gains += ["label noise"]
    gains += ["averaged parameters"] if prior.schedule(run.epochs).averages else []
    if run.baseline and not gains:
        raise ValueError(
            "baseline trains with the initial weight decay and no average, and so do prior.method "
            "fixed and prior.average null; drop one of them."
        )
    return gains


def _finished(folder: Path, identity: dict[str, Any]) -> Results | None:
    """The results in a folder, verified with all other files; None if there is still work to do.

    Raises:
        FileNotFoundError: the posterior is missing.
        ValueError: the results are of another run, or a file of the run is damaged.
    """
    results = read_results(folder)
    if results is not None:
        check_same_run(identity, results.identity, folder)
    if results is None or not results.complete:
        return None
    read_evaluation(folder)
    read_posterior(folder)
    return results


def _open_folder(
    folder: Path, checkpoints: Checkpoints, provenance: Provenance, run: RunConfig, leads: bool
) -> RunLog | None:
    """Begin the run's folder, or go on in it; returns the log, for the rank that leads.

    Raises:
        FileNotFoundError: a run that was cut off, without a checkpoint.
    """
    goes_on = run.resume and checkpoints.exists()
    if goes_on:
        checkpoints.load()  # raises before anything is changed
    if not leads:
        return None
    if run.resume and not goes_on and read_log(folder):
        raise FileNotFoundError(
            f"{folder} holds a run that was cut off, but no checkpoint to continue from. "
            "Start again: --overwrite instead of --resume."
        )
    begin_run(folder, provenance.options, overwrite=run.overwrite, resume=goes_on)
    return RunLog(folder)


def _identity(setup: "Setup", model: nn.Module, provenance: Provenance) -> dict[str, Any]:
    """What identifies a run, as plain data: data, network, options.

    SHA-256 sums stand for all inputs, labels and initial parameters. A checkpoint is only resumed
    if its run has the same identity.
    """
    splits, ood = setup.splits, setup.ood_images
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    tensors = {name: tensors_in(part) for name, part in parts.items() if part is not None}
    groups = ("optimizer", "prior", "curvature", "predictive", "run")
    config = {name: asdict(getattr(setup, name)) for name in groups}
    config["run"] = {k: v for k, v in config["run"].items() if k not in NOT_OF_THE_RESULT}
    return {
        "data": splits.name,
        "examples": {name: len(part[-1]) for name, part in tensors.items()},
        "normalisation": [splits.mean, splits.std],
        "ood": None if ood is None else ood.name,
        "model": type(_inner(model)).__name__,
        "model_options": (provenance.model or {}).get("init_args"),
        "likelihood": str(setup.likelihood),
        "config": config,
        "sums": {
            "examples": sha256_of_tensors(t for part in tensors.values() for t in part),
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
class Setup:
    """What the trainings of a run share: data, options, ranks."""

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

    def likelihood_of(self, training: Training, first: OnlineResult | None) -> Likelihood:
        """The likelihood of a training, perhaps with the numbers that the first has learned."""
        if training.decays == "replayed":
            assert first is not None and first.laplace is not None
            return first.laplace.likelihood
        learns_noise = self.likelihood.has_label_noise and bool(self.likelihood.to_learn())
        is_plain = training.decays == "fixed" and learns_noise
        return likelihood_of("classification") if is_plain else self.likelihood

    def train(
        self,
        training: Training,
        checkpoints: Checkpoints | None = None,
        log: RunLog | None = None,
        first: OnlineResult | None = None,
    ) -> tuple[nn.Module, OnlineResult]:
        """Train a network and its prior, starting from a checkpoint if there is one.

        Args:
            training: which network, and where its decays come from.
            checkpoints: of this training.
            log: takes the records of epochs and updates.
            first: of the training whose decays are replayed.
        """
        run, prior = self.run, self.prior
        torch.manual_seed(training.seed)
        model = training.build().to(self.fabric.device)
        torch.manual_seed(training.seed)
        likelihood = self.likelihood_of(training, first)
        batches = self._batches("train", run.batch_size, shuffle=True, seed=training.seed)
        held_out = None
        if self.splits.validation is not None:
            held_out = self._batches("validation", self.predictive.batch_size)
        schedule = prior.schedule(run.epochs)
        policy = DecayPolicy()
        if training.decays == "fixed":
            policy = DecayPolicy(clip=None)
            schedule = replace(schedule, updates=0, average=None)
        curvature = self.curvature.options(self.splits.targets)
        optimizer, scheduler = build_optimizer(
            model,
            self.optimizer,
            run.epochs * len(batches),
            likelihood,
            curvature=curvature,
            seed=training.seed,
            settles=schedule.averages,
        )

        learner = PriorLearner(
            likelihood,
            curvature,
            weight_decay=prior.weight_decay,
            structure=prior.structure,
            method="adam" if prior.method == "fixed" else prior.method,
            curvature_from=prior.curvature_from,
            schedule=schedule,
            policy=policy,
        )
        if first is not None and first.learner is not None:
            learner = first.learner.replay()
        outcome = OnlineTraining(
            model,
            optimizer,
            batches,
            learner,
            scheduler=scheduler,
            fabric=self.fabric,
            held_out=held_out,
            compile_mode=run.compile,
            on_record=log.write if log else None,
            progress=run.progress,
        ).run(checkpoints)
        return model, outcome

    def ensemble(
        self,
        model: nn.Module,
        first: OnlineResult,
        members: Sequence[Training],
        checkpoints: Mapping[str, Checkpoints],
    ) -> Ensemble:
        """The first network, and the members, which are trained with its decays' course."""
        models, seconds = [model], first.seconds
        for number, training in enumerate(members, 2):
            _logger.info("training member %d of %d", number, len(members) + 1)
            member, outcome = self.train(training, checkpoints[training.name], first=first)
            models.append(member)
            seconds += outcome.seconds
        laplace: Any = first.laplace
        sigma = float(laplace.sigma_noise)
        return self._calibrated(models, laplace.likelihood, sigma, seconds)

    def _calibrated(
        self, models: list[nn.Module], likelihood: Likelihood, sigma: float, seconds: float
    ) -> Ensemble:
        """Networks that predict together, calibrated on the validation set if there is one."""
        labels = self.predictive.labels
        ensemble = Ensemble(models, likelihood, sigma, seconds=seconds, labels=labels)
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
            calibrations = laplace.calibrations
            # One pass over all data, and not `override=False`: the factors of tensors that are used
            # in two ways do not add up.
            parts = [self._batches("train", self.run.batch_size, shuffle=True)]
            parts += [self._batches("validation", self.run.batch_size)]
            laplace.fit(chain(*parts), progress_bar=self.run.progress)
            # They stay, as a little more data changes the posterior little.
            laplace.calibrations = calibrations

    def evaluate(
        self, laplace: Posterior, ensemble: Ensemble | None = None
    ) -> tuple[Evaluation, ExampleScores]:
        """The content of ``evaluation.json``, and the scores of each test example."""
        predictives = predictives_of(
            laplace, [self.predictive], ensemble, seed=self.run.seed, ranks=self.ranks
        )
        return self._evaluated(predictives, laplace.likelihood)

    def _evaluated(
        self, predictives: dict[str, Predictive], likelihood: Likelihood
    ) -> tuple[Evaluation, ExampleScores]:
        evaluation, scores = evaluate(
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
        return evaluation_in_units(evaluation, self.splits), scores

    def against_plain(
        self,
        plain: Training,
        checkpoints: Checkpoints,
        results: Results,
        scores: ExampleScores,
        gains: list[str],
    ) -> Results:
        """Train the plain network; returns the results with what it adds, above all the verdict.

        Args:
            plain: its training.
            checkpoints: where that is resumed from.
            results: those of the learned network.
            scores: of the learned network, see `evaluate`.
            gains: what the plain network does without, in words.
        """
        try:
            model, outcome = self.train(plain, checkpoints)
        except FloatingPointError as error:
            said = f"No verdict on what was gained, since the plain network diverged: {error}"
            return replace(results, verdict=said)
        trained = time.perf_counter()
        likelihood, sigma = self.likelihood_of(plain, None), 1.0
        losses = [record["loss"] for record in outcome.records if record["kind"] == "epoch"]
        if likelihood.has_sigma:  # of the residuals; the loss is half of σ²
            y = tensors_in(self.splits.train)[-1]
            sigma = (2 * losses[-1] / y[0].numel()) ** 0.5
        scaled = self._calibrated([model], likelihood, sigma, outcome.seconds)
        predictives: dict[str, Predictive] = {"MAP": map_predictive(model, likelihood, sigma)}
        if scaled.calibration is not None:
            predictives["MAP, temperature-scaled"] = scaled
        evaluation, others = self._evaluated(predictives, likelihood)
        changes = {n: differences(scores[n], other) for n, other in others.items() if n in scores}
        # Both calibrated, where there is something to calibrate with.
        first, name = next(iter(results.networks.values())), [*predictives][-1]
        said = in_one_sentence(
            changes.get(name, Metrics()),
            first.predictives[name].metrics,
            evaluation.predictives[name].metrics,
            gains,
        )
        network = Network(evaluation.scores, changes)
        return replace(
            results,
            networks=results.networks | {plain.name: network},
            verdict=said + instability(losses),
            seconds=results.seconds + outcome.seconds + time.perf_counter() - trained,
        )

    def beside_simple_models(self, results: Results, scores: ExampleScores) -> Results:
        """The results with those of scikit-learn's models on the same rows of a table."""
        train, validation = self.splits.train, self.splits.validation
        if self.held_out and validation is not None:  # the posterior has seen them, too
            train = torch.cat([train[0], validation[0]]), torch.cat([train[1], validation[1]])
        models, changes = evaluate_simple_models(
            train, self.splits.test, likelihood_of(self.likelihood), [*scores.values()][-1]
        )
        if not models:
            return results
        models = {name: scores_in_units(one, self.splits) for name, one in models.items()}
        return replace(
            results,
            networks=results.networks | {"scikit-learn": Network(models)},
            simple_models=simple_models_in_words(models, changes),
        )

    def _batches(
        self, split: SplitName, batch_size: int, *, shuffle: bool = False, seed: int | None = None
    ) -> Batches:
        """A part of the data; what is shuffled is for training, and augmented as the run says."""
        return split_batches(
            self.splits,
            split,
            batch_size,
            shuffle=shuffle,
            augment=shuffle and self.run.augmentation == "standard",
            seed=self.run.seed if seed is None else seed,
            device=self.fabric.device,
            channels_last=self.fabric.device.type == "cuda" and self.splits.are_images,  # faster
            ranks=self.ranks,
        )
