"""Run `marglik train`: from the data to the results."""

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from marglik.application.data.record import data_record
from marglik.application.data.splits import DataSource
from marglik.application.provenance import Provenance
from marglik.application.records import Results
from marglik.application.run_folder import (
    CHECKPOINT,
    RunLog,
    begin_run,
    read_results,
    remove_states,
    write_evaluation,
    write_results,
)
from marglik.application.runs import trainings
from marglik.application.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.application.runs.loggers import MetricsLogger
from marglik.application.runs.optimizers import OptimizerConfig
from marglik.application.runs.results import learned_results, posterior_results
from marglik.application.runs.setup import Setup, checked_setup, gains_in_words, identity_of
from marglik.application.runs.trainings import Training
from marglik.posterior_file import load_posterior, save_posterior
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.predictive import PredictiveConfig
from marglik.storage.checkpoint import check_same_run, leaves
from marglik.training.loop import OnlineResult, Record

_logger = logging.getLogger(__name__)

CHEAP_SECONDS, CHEAP_SHARE = 20.0, 0.25
"""Maximum cost of a plain network that is trained by default: seconds, or share of the time of the
run so far."""


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
    """Train a network and learn its weight decays on images, tokens, graphs, tables or tensors.

    A sequence is one example with a label, and therefore a loss term, at each position. The
    objective sums the loss over positions and averages it over examples. Metrics are means over
    positions, so the NLL is in nats per token.

    A run may train several networks:

    - "learned": the network that learns the weight decays. The run saves it with its posterior, and
      evaluates the MAP, the temperature-scaled MAP and the Laplace predictives.
    - "member_1", ...: networks that form an ensemble with the learned network.
    - "plain": a network for comparison. The run saves only its metrics.

    If torchrun starts several processes, they share the work, and the first process writes the
    files.

    Args:
        model: class of the network, which returns logits, or means for regression. Any importable
            class works, such as marglik.models.WideResNetFixup, marglik.models.LeNet,
            marglik.models.MLP, or my_file.MyNet.
        data: class of the data: images (such as marglik.data.Digits), a table
            (marglik.data.TableFile), any tensors (marglik.data.TensorFile), or your own importable
            class.
        optimizer: the optimiser of the network.
        prior: the prior and its updates.
        curvature: the curvature pass.
        predictive: the Laplace predictive of the final evaluation.
        ood: class of out-of-distribution images, on which the predictives should be uncertain.
        likelihood: distribution of the targets: classification; regression with learned Gaussian
            noise; bernoulli for independent binary outputs; heteroscedastic, poisson,
            "student_t(df=4)" and others, see docs/likelihoods.md.
        run: all other options.
        provenance: the options, and the specifications that build model and data. They are saved
            with the posterior, so that it can be loaded without these arguments.
    """
    start = time.perf_counter()
    gains = gains_in_words(likelihood, prior, run)
    setup = checked_setup(
        model, data, optimizer, prior, curvature, predictive, ood, likelihood, run, provenance
    )
    ranks, leads = setup.ranks, setup.ranks.rank == 0  # only the first rank writes files
    identity = identity_of(setup, type(model).__name__)
    ranks.agree(leaves(identity))
    folder = Path(run.output or f"runs/{re.sub('[^a-z0-9]+', '_', setup.splits.name.lower())}")
    learned, *members, plain = trainings.named_trainings(setup, folder, identity)
    finished = _finished_results(folder, identity) if run.resume and leads else None
    results, scores, baseline = ranks.gather(finished)[0], None, run.baseline
    is_table = setup.splits.table is not None

    # Trainings of an interrupted run continue from their checkpoints. Everything else is computed
    # again, with the same result.
    if results is None:
        log = _open_folder(folder, learned, setup)
        logger = MetricsLogger(run.logger, folder, identity) if leads and run.logger else None
        ready = time.perf_counter()

        def on_record(record: Record) -> None:
            for writer in (log, logger):
                if writer is not None:
                    writer.write(record)

        _, outcome = trainings.train_network(setup, learned, on_record)
        start += time.perf_counter() - ready - outcome.seconds  # with time before a resume
        of_posterior = posterior_results(setup, outcome)  # before the posterior uses held-out data
        trainings.calibrate(setup, outcome.laplace)
        ensemble = trainings.train_ensemble(setup, outcome, members) if members else None
        _save(setup, folder, outcome, ensemble)
        evaluation, scores = trainings.evaluate_learned(setup, outcome.laplace, ensemble)
        of_training = learned_results(setup, outcome, evaluation, scores)
        seconds = time.perf_counter() - start
        results = Results(identity=identity, seconds=seconds, **of_posterior, **of_training)
        if is_table and baseline is not False:
            results = trainings.compare_with_simple_models(setup, results, scores)
        if leads:
            write_evaluation(folder, evaluation, folder)
            if logger is not None:
                logger.close(evaluation.predictives)
            write_results(folder, results)  # write now, because the plain network may fail
        is_cheap, no_verdict = _cost_of_plain(setup, outcome, seconds)
        baseline = is_cheap if baseline is None else baseline
        if gains and not baseline:
            results = replace(results, verdict=no_verdict)

    # Write the verdict. A finished run may be resumed with another baseline option.
    lacks_simple = is_table and run.baseline and results.simple_models is None
    lacks_plain = gains and baseline and plain.name not in results.networks
    if lacks_simple or lacks_plain:
        if scores is None:
            ensemble = Ensemble.load(folder, setup.model) if members else None
            posterior = load_posterior(folder, setup.model)
            _, scores = trainings.evaluate_learned(setup, posterior, ensemble)
        if lacks_simple:
            results = trainings.compare_with_simple_models(setup, results, scores)
        if lacks_plain:
            results = trainings.compare_with_plain(setup, plain, results, scores, gains)
    results = replace(results, complete=True)
    if leads:
        write_results(folder, results)
        remove_states(folder)
    return replace(results, output=str(folder))


def _finished_results(folder: Path, identity: dict[str, Any]) -> Results | None:
    """Return the results in a folder, or None if they are not complete."""
    results = read_results(folder)
    if results is not None:
        check_same_run(identity, results.identity, folder)
    return results if results is not None and results.complete else None


def _open_folder(folder: Path, learned: Training, setup: Setup) -> RunLog | None:
    """Create the folder of a run or continue in it, and return the log on the first rank."""
    run, goes_on = setup.run, setup.run.resume and (folder / CHECKPOINT).is_dir()
    if run.resume and learned.checkpoints.exists():
        learned.checkpoints.load()  # raises for a checkpoint that is damaged or of another run
    if setup.ranks.rank > 0:
        return None
    begin_run(folder, setup.provenance.options, overwrite=run.overwrite, resume=goes_on)
    if setup.held_out:
        _logger.info("%d training examples are held out for calibration", setup.held_out)
    return RunLog(folder)


def _save(setup: Setup, folder: Path, outcome: OnlineResult, ensemble: Ensemble | None) -> None:
    """Write the posterior and the ensemble, if there is one, on the first rank."""
    outcome.laplace.gather()
    if setup.ranks.rank > 0:
        return
    if ensemble is not None:
        ensemble.save(folder)
    record, model = data_record(setup.splits, setup.provenance.data), setup.provenance.model
    save_posterior(outcome.laplace, folder, model=model, data=record, frozen=True)


def _cost_of_plain(setup: Setup, outcome: OnlineResult, so_far: float) -> tuple[bool, str]:
    """Return whether a plain network costs little, and a text that replaces the verdict.

    A plain network takes as long as the steps of the learned network, or less if these process
    several copies of each image.
    """
    model: Any = setup.model
    seconds = sum(record["seconds"] for record in outcome.records if record["kind"] == "epoch")
    seconds /= model.copies if setup.run.augmentation == "learned" else 1
    needed = f"{seconds / 60:.0f} min" if seconds > 120 else f"{seconds:.0f} s"
    no_verdict = (
        f"No verdict, because there is no plain network to compare with. It takes about {needed} "
        "more. Add --resume --baseline to the same command to train it."
    )
    is_cheap = seconds <= max(CHEAP_SECONDS, CHEAP_SHARE * so_far)
    return setup.ranks.gather((is_cheap, no_verdict))[0]  # clocks differ between ranks
