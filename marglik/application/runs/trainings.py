"""Build, train, calibrate, evaluate and compare the networks of a run."""

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.likelihoods import Likelihood
from marglik.application.data.splits import SplitName, split_batches, tensors_in
from marglik.application.evaluation import ExampleScores, evaluate, predictives_of
from marglik.application.records import Evaluation, Network, Results
from marglik.application.run_folder import CHECKPOINT
from marglik.application.runs.optimizers import build_optimizer
from marglik.application.runs.setup import Setup
from marglik.application.simple_models import evaluate_simple_models, simple_models_in_words
from marglik.data.batches import Batches
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import calibrations_of
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.intervals import differences
from marglik.prediction.metric_types import Metrics
from marglik.prediction.predictive import Predictive, map_predictive, outputs_of
from marglik.prediction.verdict import in_words, instability
from marglik.specification import build_from_spec
from marglik.storage.checkpoint import Checkpoints
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineResult, OnlineTraining, Record
from marglik.training.options import DecayPolicy

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Training of one network of a run."""

    name: str
    """ "learned", whose weight decays the evidence learns; "member_1" and so on, which replay these
    weight decays; or "plain", with the initial weight decay, without an average and without learned
    noise."""
    build: Callable[[], nn.Module]
    """Function that returns the network at its initial parameters."""
    seed: int
    checkpoints: Checkpoints


def named_trainings(setup: Setup, folder: Path, identity: dict[str, Any]) -> list[Training]:
    """Return the trainings of the learned network, the members of the ensemble, the plain network.

    Checkpoints of a run with another ``identity`` in the folder raise an error when they are read.
    """
    model: Any = setup.model
    # Copy the network at its initial parameters, without a learned augmentation.
    plain_model = deepcopy(model.model if setup.run.augmentation == "learned" else model)
    member = partial(build_from_spec, nn.Module, setup.provenance.model, named=None)

    def training(name: str, build: Callable[[], nn.Module], seed: int) -> Training:
        states = Checkpoints(folder / CHECKPOINT / name, run=identity, ranks=setup.ranks)
        return Training(name, build, seed, states)

    seed = setup.run.seed
    return [
        training("learned", lambda: model, seed),
        *(training(f"member_{k}", member, seed + k) for k in range(1, setup.run.members)),
        training("plain", lambda: plain_model, seed),
    ]


def train_network(
    setup: Setup,
    training: Training,
    on_record: Callable[[Record], None] | None = None,
    first: OnlineResult | None = None,
) -> tuple[nn.Module, OnlineResult]:
    """Train a network and its prior, from a checkpoint if there is one.

    ``on_record`` gets the record of each epoch and update. ``first`` is the result of the learned
    network, whose weight decays a member replays.
    """
    run, prior, splits, likelihood = setup.run, setup.prior, setup.splits, setup.likelihood
    torch.manual_seed(training.seed)
    model = training.build().to(setup.device)
    torch.manual_seed(training.seed)
    schedule, policy = prior.schedule(run.epochs), DecayPolicy()
    curvature = setup.curvature.options(splits.targets)
    if training.name == "plain":
        schedule, policy = replace(schedule, updates=0, average=None), DecayPolicy(clip=None)
        if likelihood.has_label_noise and likelihood.to_learn():
            likelihood = likelihood.replace(noise=0.0)
    learner = PriorLearner(
        likelihood, curvature, weight_decay=prior.weight_decay, structure=prior.structure,
        method="adam" if prior.method == "fixed" else prior.method,
        curvature_from=prior.curvature_from, schedule=schedule, policy=policy,
    )  # fmt: skip
    if first is not None and first.learner is not None:
        likelihood, learner = first.laplace.likelihood, first.learner.replay()
    batches = _batches(setup, "train", run.batch_size, training.seed)
    optimizer, scheduler = build_optimizer(
        model, setup.optimizer, None if schedule.averages else run.epochs * len(batches),
        likelihood, curvature=curvature, seed=training.seed,
    )  # fmt: skip
    outcome = OnlineTraining(
        model, optimizer, batches, learner, scheduler=scheduler, fabric=setup.fabric,
        held_out=_validation_batches(setup), compile_mode=run.compile,
        on_record=on_record, progress=run.progress,
    ).run(training.checkpoints)  # fmt: skip
    return model, outcome


def calibrate(setup: Setup, laplace: Posterior) -> None:
    """Calibrate the predictives, then fit the posterior to all examples, including held-out ones.

    Without a validation set, or with predictive.calibration none, it does nothing.
    """
    batches, progress = _validation_batches(setup), setup.run.progress
    if batches is None or not setup.predictive.is_calibrated:
        return
    calibrations_of(laplace, batches, setup.predictive, progress=progress, ranks=setup.ranks)
    if setup.held_out:
        calibrations = laplace.calibrations
        # Make one pass over all data instead of `override=False`, because factors of tensors with
        # two kinds of use cannot be added.
        size, seed = setup.run.batch_size, setup.run.seed
        parts = _batches(setup, "train", size, seed), _batches(setup, "validation", size)
        laplace.fit(chain(*parts), progress_bar=progress)
        laplace.calibrations = calibrations  # the posterior hardly changes with more data


def train_ensemble(setup: Setup, first: OnlineResult, members: Sequence[Training]) -> Ensemble:
    """Return the ensemble of the learned network and members that replay its weight decays."""
    models, seconds = [setup.model], first.seconds
    for number, training in enumerate(members, 2):
        _logger.info("training member %d of %d", number, len(members) + 1)
        member, outcome = train_network(setup, training, first=first)
        models.append(member)
        seconds += outcome.seconds
    sigma = float(first.laplace.sigma_noise)
    return _calibrated(setup, models, first.laplace.likelihood, sigma, seconds)


def _calibrated(
    setup: Setup, models: list[nn.Module], likelihood: Likelihood, sigma: float, seconds: float
) -> Ensemble:
    """Return the ensemble of these networks, calibrated if the run calibrates."""
    labels, targets = setup.predictive.labels, setup.splits.targets
    ensemble = Ensemble(models, likelihood, sigma, seconds=seconds, labels=labels)
    batches, progress = _validation_batches(setup), setup.run.progress
    if batches is not None and setup.predictive.is_calibrated:
        ensemble.calibrate(batches, targets=targets, progress=progress, ranks=setup.ranks)
    return ensemble


def evaluate_learned(
    setup: Setup, laplace: Posterior, ensemble: Ensemble | None
) -> tuple[Evaluation, ExampleScores]:
    """Return the content of ``evaluation.json``, and the scores of each test example."""
    run, ranks = setup.run, setup.ranks
    predictives = predictives_of(laplace, [setup.predictive], ensemble, seed=run.seed, ranks=ranks)
    return _evaluated(setup, predictives, laplace.likelihood)


def _evaluated(
    setup: Setup, predictives: dict[str, Predictive], likelihood: Likelihood
) -> tuple[Evaluation, ExampleScores]:
    predictive = setup.predictive
    return evaluate(
        predictives, setup.splits, likelihood, labels=predictive.labels, ood=setup.ood_images,
        batch_size=predictive.batch_size, device=setup.device, progress=setup.run.progress,
        ranks=setup.ranks,
    )  # fmt: skip


def compare_with_plain(
    setup: Setup, plain: Training, results: Results, scores: ExampleScores, gains: list[str]
) -> Results:
    """Train the plain network, and return the results with the verdict.

    The learned network has ``results`` and, by `evaluate_learned`, ``scores``. It learns ``gains``.
    """
    _logger.info("training the plain network for the comparison")
    try:
        model, outcome = train_network(setup, plain)
    except FloatingPointError as error:
        verdict = f"No verdict, because the plain network diverged: {error}"
        return replace(results, verdict=verdict)
    trained = time.perf_counter()
    learner: Any = outcome.learner
    likelihood, sigma = learner.options.likelihood, 1.0
    losses = [record["loss"] for record in outcome.records if record["kind"] == "epoch"]
    if likelihood.has_sigma:  # estimate σ from the residuals: the loss is half of σ²
        y = tensors_in(setup.splits.train)[-1]
        sigma = (2 * losses[-1] / y[0].numel()) ** 0.5
    if likelihood.to_learn() and not likelihood.has_label_noise:  # the learned network has them too
        size, device = setup.predictive.batch_size, setup.device
        train = split_batches(setup.splits, "train", size, device=device)
        likelihood, sigma = fitted_to_residuals(likelihood, model, train)
    scaled = _calibrated(setup, [model], likelihood, sigma, outcome.seconds)
    predictives: dict[str, Predictive] = {"MAP": map_predictive(model, likelihood, sigma)}
    if scaled.calibration is not None:
        predictives["MAP, temperature-scaled"] = scaled
    evaluation, others = _evaluated(setup, predictives, likelihood)
    changes = {n: differences(scores[n], other) for n, other in others.items() if n in scores}
    # Compare the calibrated networks if there is data for a calibration.
    first, name = next(iter(results.networks.values())), [*predictives][-1]
    metrics = first.predictives[name].metrics, evaluation.predictives[name].metrics
    num_test = len(tensors_in(setup.splits.test)[-1])
    verdict = in_words(changes.get(name, Metrics()), *metrics, num_test, gains)
    verdict += instability(losses)
    return replace(
        results,
        networks=results.networks | {plain.name: Network(evaluation.scores, changes)},
        verdict=verdict,
        seconds=results.seconds + outcome.seconds + time.perf_counter() - trained,
    )


def fitted_to_residuals(
    likelihood: Likelihood, model: nn.Module, batches: Batches
) -> tuple[Likelihood, float]:
    """Return the likelihood with parameters that maximise it on ``batches``, and σ.

    Only parameters without a given value change, by at most a factor of e⁵.
    """
    with torch.no_grad(), eval_mode(model):
        outputs = [(outputs_of(model, x).double().cpu(), y.double().cpu()) for x, y in batches]
    C, names = outputs[0][0].shape[-1], [*likelihood.to_learn()]
    start = [likelihood.parameters[name] for name in names]
    start = [xi.expand(C).clone() if xi.dim() else xi for xi in start]  # one for each output
    bounds = [likelihood.lower_bounds()[name] for name in names]
    moves = [torch.zeros_like(xi, requires_grad=True) for xi in start]

    def moved() -> list[Tensor]:
        factors = [(5 * (move / 5).tanh()).exp() for move in moves]
        return [low + (xi - low) * a for xi, low, a in zip(start, bounds, factors, strict=True)]

    optimizer = torch.optim.LBFGS(moves, max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        at = likelihood.with_parameters(dict(zip(names, moved(), strict=True)))
        # The loss omits the normaliser of σ. The noise is a factor of σ, so add log noise.
        losses = torch.cat([at.losses(f, y).flatten(0, -2) for f, y in outputs]).sum(-1).mean()
        value = losses + (at.parameters["noise"].log().sum() if at.has_sigma else 0.0)
        value.backward()
        return value

    optimizer.step(loss)
    values = dict(zip(names, (xi.detach() for xi in moved()), strict=True))
    sigma = values["noise"].log().mean().exp().item() if likelihood.has_sigma else 1.0
    return likelihood.replace(**{name: xi.tolist() for name, xi in values.items()}), sigma


def compare_with_simple_models(setup: Setup, results: Results, scores: ExampleScores) -> Results:
    """Return the results with scikit-learn's models on the same rows of a table."""
    train, validation = setup.splits.train, setup.splits.validation
    if setup.held_out and validation is not None:  # the network's posterior uses these rows, too
        train = torch.cat([train[0], validation[0]]), torch.cat([train[1], validation[1]])
    network = [*scores.values()][-1]
    models, changes = evaluate_simple_models(train, setup.splits, setup.likelihood, network)
    if not models:
        return results
    return replace(
        results,
        networks=results.networks | {"scikit-learn": Network(models)},
        simple_models=simple_models_in_words(models, changes),
    )


def _validation_batches(setup: Setup) -> Batches | None:
    """Return batches of the validation data; None if there is no validation data."""
    has_some = setup.splits.validation is not None
    return _batches(setup, "validation", setup.predictive.batch_size) if has_some else None


def _batches(setup: Setup, split: SplitName, batch_size: int, seed: int = 0) -> Batches:
    """Return batches of a part of the data. Only training data is shuffled and augmented."""
    trains, device, are_images = split == "train", setup.device, setup.splits.are_images
    return split_batches(
        setup.splits, split, batch_size, shuffle=trains, seed=seed, device=device,
        augment=trains and setup.run.augmentation == "standard",
        channels_last=device.type == "cuda" and are_images,  # faster
        ranks=setup.ranks,
    )  # fmt: skip
