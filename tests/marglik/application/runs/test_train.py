"""`marglik train`: what a run leaves, on images, sequences, graphs and tensors."""

import html
import re
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from kfac_backend.likelihoods import RegressionPerOutput, StudentT
from marglik.application.cli import main
from marglik.application.data.splits import hold_out, split_batches
from marglik.application.report import write_report
from marglik.application.run_folder import read_log
from marglik.application.runs import trainings
from marglik.application.runs.config import CurvatureConfig, PriorConfig, RunConfig
from marglik.application.runs.train import train
from marglik.attribution.influence import influence, self_influence
from marglik.augmentation import Affine, LearnedAugmentation
from marglik.augmentation.ranges import ranges_of
from marglik.data import Digits, Splits
from marglik.models import MLP
from marglik.posterior_file import load_posterior
from marglik.prediction.ensemble import Ensemble
from marglik.prediction.links import CalibrationFit
from marglik.storage.record_files import read_posterior
from tests.experiments.data.text_and_graphs import dart_entries, nci1_texts, write_dart, write_nci1
from tests.marglik.application.runs.command_line import (
    DATA,
    MODEL,
    TRAIN,
    evaluated,
    metrics,
    refusal,
    results_of,
)
from tests.marglik.networks import NodeCounts, TokenNetwork

ROOT = Path(__file__).parents[4]
FILES = {
    "config.yaml", "evaluation.json", "fingerprints.safetensors", "log.jsonl", "model.safetensors",
    "posterior.json", "posterior.safetensors", "report.html", "results.json",
}  # fmt: skip
PREDICTIVES = ["MAP", "MAP, temperature-scaled", "Laplace, probit"]


def test_results_and_log(trained):
    results, records = results_of(trained), read_log(trained)
    assert {path.name for path in trained.iterdir()} == FILES
    assert results.evidence.final > results.evidence.first
    assert [r["epoch"] for r in records if r["kind"] == "update"] == [1, 2, 3]
    last = [r for r in records if r["kind"] == "update"][-1]
    for name, tensor in results.weight_decay.items():
        assert tensor.learned == pytest.approx(last["weight_decay"][name])
        assert tensor.learned != tensor.initial and 0 < tensor.effective_parameters
    learned, plain = results.networks["learned"], results.networks["plain"]
    assert (list(learned.predictives), list(plain.predictives)) == (PREDICTIVES, PREDICTIVES[:2])
    assert (learned.differences, list(plain.differences)) == (None, PREDICTIVES[:2])
    for scores in results.scores.values():
        assert {"nll", "ece", "auroc"} < {name for name, _ in scores.metrics.items()}
        assert scores.metrics.accuracy > 0.8
    # The evaluation and the page are of the same numbers.
    assert evaluated(trained).scores == learned.predictives
    page = (trained / "report.html").read_text()
    assert "MLP on digits (0, 1, 2)" in page
    assert results.verdict in html.unescape(page)
    charts = page.index('id="verdict-chart-1"'), page.index('id="verdict-chart-2"')
    assert page.index("plain network") < charts[0] < charts[1] < page.index("Summary</h2>")


def test_the_saved_posterior_is_that_of_the_results(trained):
    model, results, record = MLP(64, (6,), 3), results_of(trained), read_posterior(trained)
    laplace = load_posterior(trained, model)
    for name, tensor in load_file(trained / "model.safetensors").items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert laplace.log_marginal_likelihood().item() == pytest.approx(results.evidence.final)
    for name, tensor in results.weight_decay.items():
        delta = record["prior_precision"][name]
        assert tensor.learned == pytest.approx(delta / results.num_data)
    fit = CalibrationFit.of(laplace.calibrations["Laplace, probit"])
    assert asdict(results.calibration) == asdict(fit) | {"predictive": "Laplace, probit"}
    assert record["model"]["class_path"] == "marglik.models.MLP"


def test_the_plain_networks_likelihood_is_fitted_too():
    """By brute force: the scale of least NLL; and each output's own σ."""
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    noise = torch.randn(400, 2) * torch.tensor([0.1, 0.3])
    model = torch.nn.Linear(2, 2)
    part = x, (model(x) + noise).detach()
    batches = split_batches(Splits(part, None, part, "numbers"), "train", 150)
    fitted, sigma = trainings.fitted_to_residuals(StudentT(df=4), model, batches)
    scales = torch.linspace(0.05, 0.5, 451)
    losses = [StudentT(df=4, scale=s.item()).loss(*(model(x), part[1])) for s in scales]
    least = scales[torch.stack(losses).argmin()].item()
    assert (sigma, fitted.options["df"]) == (1.0, 4)
    assert fitted.options["scale"] == pytest.approx(least, abs=1e-3)
    fitted, sigma = trainings.fitted_to_residuals(RegressionPerOutput(), model, batches)
    found = sigma * fitted.parameters["noise"].float()
    torch.testing.assert_close(found, noise.square().mean(0).sqrt(), rtol=1e-3, atol=0)


def without_numbers(printed):
    """The words of each line of the tables, with # for each number.

    Numbers, and what follows from them, the verdict and the labels to look at, would be those of
    one machine and version of torch.
    """
    tables = printed.partition("\ndigits: ")[2].partition("Laplace, probit:")[0]
    lines = re.sub(r"[-+]?\d+(\.\d+)?(e[+-]\d+)?", "#", tables).strip().splitlines()
    return [line.split() for line in lines]


def test_digits_preset_keeps_its_promise(tmp_path, capsys, monkeypatch):
    """What `make train` runs, in half of its epochs: 90 % right, evidence up, decays apart."""
    for limit in ("CHEAP_SECONDS", "CHEAP_SHARE"):  # as on a busy machine
        monkeypatch.setattr(f"marglik.application.runs.train.{limit}", 0.0)
    (command,) = re.findall(r"\$\(BIN\)/marglik (train .*)", (ROOT / "Makefile").read_text())
    shorter = ["--epochs", "20", "--output", str(tmp_path / "run")]
    assert main([*command.split(), *shorter]) == 0
    printed = capsys.readouterr().out.partition("\nWritten to")[0]
    shown = (ROOT / "docs/index.md").read_text().partition("output ends with\n\n```")[2]
    assert printed.lstrip().startswith("With learned weight decays and averaged parameters")
    assert without_numbers(shown.partition("```")[0]) == without_numbers(printed)
    results = results_of(tmp_path / "run")
    assert (results.num_data, results.held_out) == (809, 90)
    assert read_posterior(tmp_path / "run")["num_data"] == 899  # what was held out, too
    assert results.scores["learned, MAP"].metrics.accuracy >= 0.9
    # On the test set, which has not chosen the calibration: 898 images have a standard error of
    # 0.02 nats, and cannot tell predictives apart that differ by a hundredth.
    nll = {name: scores.metrics.nll for name, scores in results.scores.items()}
    assert nll["learned, Laplace, probit"] <= nll["learned, MAP"] + 0.01
    fit = results.calibration  # on the held-out data, which chose it
    assert fit.nll < fit.nll_map < fit.nll_uncalibrated
    assert fit.nll_temperature_scaled < fit.nll_map
    assert results.evidence.final > results.evidence.first
    learned = [tensor.learned for tensor in results.weight_decay.values()]
    assert len(set(learned)) == len(learned) == 10


def test_a_line_for_each_step_where_there_is_no_terminal(tmp_path, capsys):
    """And an ensemble, whose members train one after the other."""
    shorter = [option for option in TRAIN if option != "--no_progress"]
    more = ["--epochs", "1", "--members", "2", "--no_baseline", "--output", str(tmp_path)]
    assert main([*shorter, *DATA, *MODEL, *more]) == 0
    names = [*PREDICTIVES, "ensemble of 2"]
    steps = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    begin = ("epoch", "update", "training", "evaluating")
    assert [step for step in steps if step.startswith(begin)] == [
        "epoch 1 of 1", "update after epoch 1", "training member 2 of 2", "epoch 1 of 1",
        *(f"evaluating {name} on digits (0, 1, 2)" for name in names),
    ]  # fmt: skip
    assert list(metrics(tmp_path)) == names
    first, second = Ensemble.load(tmp_path, MLP(64, (6,), 3)).models
    assert not torch.equal(first.layers[1].weight, second.layers[1].weight)
    record = evaluated(tmp_path).predictives["ensemble of 2"]
    assert record.calibration is not None and record.seconds_of_training > 0
    assert main(["evaluate", str(tmp_path), "--no_progress"]) == 0
    assert list(metrics(tmp_path)) == names


def test_learned_augmentation(tmp_path, capsys):
    """With an ensemble, whose members have the first one's ranges, and a plain baseline."""
    more = ["--epochs", "2", "--members", "2", "--baseline", "--output", str(tmp_path)]
    assert main([*TRAIN, *DATA, *MODEL, *more, "--augmentation", "learned"]) == 0
    assert "The network averages 4 copies of each image." in capsys.readouterr().out
    found = results_of(tmp_path).augmentation
    ranges = {name: one.learned for name, one in found.ranges.items()}
    last = [r for r in read_log(tmp_path) if r["kind"] == "update"][-1]
    assert ranges == pytest.approx(last["ranges"])
    assert set(ranges) == {"move x", "move y", "rotate", "scale x", "scale y", "shear"}
    assert any(one.learned != pytest.approx(one.initial) for one in found.ranges.values())
    assert [len(row) for row in found.examples] == [5, 5, 5]
    model = LearnedAugmentation(MLP(64, (6,), 3), [Affine()])
    for member in Ensemble.load(tmp_path, model).models:
        assert ranges_of(member) == pytest.approx(ranges)
    names = list(metrics(tmp_path))
    before = metrics(tmp_path)
    assert main(["evaluate", str(tmp_path), "--no_progress"]) == 0
    assert list(metrics(tmp_path)) == names
    for name, values in metrics(tmp_path).items():
        assert values.nll == pytest.approx(before[name].nll, rel=1e-5)
    page = (tmp_path / "report.html").read_text()
    assert "Learned invariances" in page and "Copy 4" in page


def test_the_plain_network_is_what_torch_trains(tmp_path, monkeypatch):
    """SGD with one weight decay and a cosine, and nothing else."""
    real, seen = trainings.train_network, []

    def train_both(setup, training, *given, **more):
        by_torch = deepcopy(training.build())
        model, outcome = real(setup, training, *given, **more)
        if training.name == "plain":
            batches = trainings._batches(setup, "train", 64)
            next(iter(batches))  # the loop has looked at the data, which draws an order
            optimizer = SGD(by_torch.parameters(), 0.1, 0.9, weight_decay=0.02, nesterov=True)
            schedule = CosineAnnealingLR(optimizer, 2 * len(batches), 1e-6)
            for x, y in (batch for _ in range(2) for batch in batches):
                optimizer.zero_grad()
                cross_entropy(by_torch(x), y).backward()
                optimizer.step()
                schedule.step()
            seen.extend(zip(model.parameters(), by_torch.parameters(), strict=True))
        return model, outcome

    monkeypatch.setattr(trainings, "train_network", train_both)
    run = RunConfig(epochs=2, batch_size=64, output=str(tmp_path), progress=False)
    prior = PriorConfig(weight_decay=0.02)
    results = train(MLP(64, (16,), 10), Digits(test_fraction=0.6), prior=prior, run=run)
    assert "the plain network" in results.verdict and len(seen) == 4
    for ours, theirs in seen:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class WithCopies(MLP):
    """Its ``copies`` are not those of a `LearnedAugmentation`."""

    copies = ()


def test_the_plain_network_lacks_label_noise_alone(tmp_path):
    """Each network counts the classes alike."""
    weights, networks = [9, *[1] * 9], []
    for name in ("classification", "noisy_classification"):
        torch.manual_seed(0)
        run = RunConfig(epochs=1, baseline=True, output=str(tmp_path / name), progress=False)
        likelihood = f"{name}(weights={weights})"
        model, data = WithCopies(64, (8,), 10), Digits(test_fraction=0.6)
        networks.append(train(model, data, likelihood=likelihood, run=run).networks["plain"])
    first, second = (network.predictives["MAP"].metrics for network in networks)
    assert first.nll == pytest.approx(second.nll, rel=1e-4)


def test_validation_labels_correct_the_decays(tmp_path):
    def updates(*options):
        run = ["--no_baseline", "--overwrite", "--output", str(tmp_path / "r"), *options]
        assert main([*TRAIN, *DATA, *MODEL, *run]) == 0
        return [record for record in read_log(tmp_path / "r") if record["kind"] == "update"]

    corrected = updates()
    assert [record["log_factor"] for record in corrected] == [0, 0, 0]
    assert corrected[1]["held_out_rise"] < 0  # the loss falls
    without = updates("--data.data.validation", "0", "--held_out", "0")
    assert not any("log_factor" in record for record in without)


def test_a_run_without_updates_is_refused_at_once():
    with pytest.raises(ValueError, match="no posterior to save.*prior.method fixed"):
        PriorConfig(updates=0)


class WrongDigits(Digits):
    """Every twentieth training label is the next digit."""

    def load(self):
        splits = super().load()
        labels = splits.train[1]
        labels[::20] = (labels[::20] + 1) % 10
        self.wrong = splits.indices_in_source[::20].tolist()  # of all digits
        return splits


def test_train_is_a_function_too_and_finds_wrong_labels(tmp_path, capsys):
    run = RunConfig(epochs=6, batch_size=32, output=str(tmp_path), progress=False)
    prior = PriorConfig(updates=3, curvature_from="pass")
    data = WrongDigits(test_fraction=0.6)
    exact = CurvatureConfig(fisher="exact")  # draws nothing, so that the numbers are repeated below
    results = train(MLP(64, (16,), 10), data, prior=prior, curvature=exact, run=run)
    assert results.scores["learned, MAP"].metrics.nll > 0
    assert read_posterior(tmp_path)["model"] is None  # nobody said how it was made
    found = results.suspicious_labels
    assert found.judged == results.num_data and 20 <= found.number <= 50
    # Positions among all digits, of which a part was for testing, and one was held out.
    assert sum(example.index in data.wrong for example in found.examples) >= 8
    digits = data.load_undivided().train[1]
    first = next(e for e in found.examples if e.index in data.wrong)
    assert first.label == str(int(digits[first.index] + 1) % 10)
    assert max(len(example.image) for example in found.examples) < 4000
    # By the functions of the library, with the data of the fit, of which a tenth was held out.
    splits = hold_out(data.load(), 0.1, 0)
    fitted = [*split_batches(splits, "train", 64), *split_batches(splits, "validation", 64)]
    posterior = load_posterior(tmp_path, MLP(64, (16,), 10))
    own = self_influence(posterior, fitted)[: results.num_data]
    place = {int(index): i for i, index in enumerate(splits.indices_in_source)}
    for example in found.examples:
        expected = own[place[example.index]].item()
        assert example.numbers["self-influence"] == pytest.approx(expected, rel=1e-3)
    of_wrong = own[[place[i] for i in data.wrong if i in place]]
    assert of_wrong.mean() > 2 * own.mean()
    explained = results.explanations.predictions
    index = [one.index for one in explained]
    images, _ = next(iter(split_batches(splits, "test", 10**4)))
    with torch.no_grad():
        f = posterior.model.eval()(images)
    losses = cross_entropy(f, splits.test[1], reduction="none")
    assert losses[index].min() > losses.median() and len(index) == 4
    queries = [(images[index], f[index].argmax(1))]
    options = {"measurement": "log_odds", "curvature": "ekfac"}
    effects = -influence(posterior, queries, fitted, **options)[:, : results.num_data]
    for one, of_query, label in zip(explained, effects, f[index].argmax(1), strict=True):
        assert one.predicted == str(int(label)) and len(one.explained_by) == 3
        most = of_query.abs().topk(3)
        assert [place[example.index] for example in one.explained_by] == most.indices.tolist()
        for example, i in zip(one.explained_by, most.indices, strict=True):
            assert example.numbers["effect"] == pytest.approx(of_query[i].item(), rel=1e-3)
            assert example.label == str(int(splits.train[1][i])) and example.image
    text = Path(write_report([tmp_path])).read_text()
    assert "Training examples behind predictions" in text and "self-influence" in text


# Sequences and graphs

OTHERS = {
    "sequences": (
        "experiments.data.dart.DART", "TokenNetwork",
        ["--data.context", "16", "--data.num_train", "40", "--data.num_test", "20",
         "--data.validation", "0.1", "--curvature.fisher", "mc",
         "--predictive.method", "linearised"],
    ),
    "graphs": ("experiments.data.nci1.NCI1", "NodeCounts", ["--data.validation", "0.2"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_sequences_and_graphs(kind, tmp_path, capsys):
    if kind == "sequences":
        data = write_dart(tmp_path / "dart.json.gz", dart_entries(40))
    else:
        data = write_nci1(tmp_path / "nci1.tar.gz", nci1_texts(60))
    source, model, more = OTHERS[kind]
    named = ["--model", f"tests.marglik.networks.{model}", "--data", source]
    options = [*named, "--data.path", str(data), *more]
    adam = ["--optimizer.name", "adamw", "--optimizer.lr", "0.02", "--epochs", "2"]
    run = tmp_path / "run"
    command = [*TRAIN, *adam, *options, "--output", str(run)]
    assert main([*command, "--precision", "bf16-mixed"]) == 0
    results, before = results_of(run), evaluated(run)
    of_sequences, positions = kind == "sequences", before.num_positions
    assert (
        results.identity["examples"]["train"] == results.num_data == read_posterior(run)["num_data"]
    )
    assert results.num_positions == positions and (positions is not None) == of_sequences
    laplace = load_posterior(run, TokenNetwork() if of_sequences else NodeCounts())
    kept = results.evidence.final
    assert laplace.log_marginal_likelihood().item() == pytest.approx(kept)
    # It is evaluated as at its end, and says what its metrics are about.
    if of_sequences:
        options = [*options[:-4], *options[-2:]]  # without those of the curvature
    capsys.readouterr()
    assert main(["evaluate", str(run), "--no_progress", *options]) == 0
    for name, found in metrics(run).items():
        assert found == before.predictives[name].metrics
    assert ("positions (tokens)" in capsys.readouterr().out) == of_sequences
    assert (
        "nats per position, lower is better" in (run / "report.html").read_text()
    ) == of_sequences
    assert "contains no images. augmentation" in refusal(
        capsys, *command, "--overwrite", "--augmentation", "learned"
    )
