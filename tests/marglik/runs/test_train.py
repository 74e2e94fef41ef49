"""`marglik train`: what a run leaves, and that it can be repeated, interrupted and continued on."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marglik.cli import main
from marglik.data import Digits, ImageBatches
from marglik.models import MLP
from marglik.posterior.posterior_file import load_posterior
from marglik.runs import train as experiment
from marglik.runs import training_setup
from marglik.runs.config import RunConfig
from marglik.storage.record_file import read_posterior
from marglik.storage.run_folder import read_log
from tests.marglik.runs.command_line import evaluated, refusal, results_of

ROOT = Path(__file__).parents[3]
SMALL = [
    "train", "--config", "digits", "--model", "marglik.models.MLP", "--model.in_features", "64",
    "--model.hidden", "[16]", "--epochs", "4", "--prior.every", "2", "--prior.burn_in", "0",
    "--prior.steps", "20", "--ood.num_images", "50", "--no_progress",
]  # fmt: skip
FILES = {
    "config.yaml", "evaluation.json", "log.jsonl", "manifest.json",
    "model.safetensors", "posterior.json", "posterior.safetensors", "report.html", "results.json",
}  # fmt: skip
WHICH = ("learned", "initial")
PREDICTIVES = ["MAP", "MAP, temperature-scaled", "Laplace, probit"]
METRICS = {
    "test/cls/NLL", "test/cls/accuracy", "test/cls/Brier", "test/cls/AURC", "test/cal/ECE",
    "ood/AUROC", "ood/AUPR", "ood/FPR95",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main([*SMALL, "--output", str(folder), "--baseline"]) == 0
    return folder


def without_numbers(printed):
    """The words of each line, with one sign for each number."""
    lines = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", printed).strip().splitlines()
    return [line.split() for line in lines]


def test_leaves_results_log_and_plot(run):
    results = results_of(run)
    assert {path.name for path in run.iterdir()} == FILES
    assert results["data"] == "digits"
    assert (results["num_data"], results["held_out"]) == (1294, 144)
    assert results["evidence"]["kept"] > results["evidence"]["first"]
    learned = {row["learned"] for row in results["weight_decay"].values()}
    assert len(learned) == len(results["weight_decay"]) == 4
    assert list(results["metrics"]) == [
        f"{which}, {name}" for which in ("learned", "initial") for name in PREDICTIVES
    ]
    for metrics in results["metrics"].values():
        assert set(metrics) - {"ood/AUROC_epistemic"} == METRICS
        assert metrics["test/cls/accuracy"] > 0.8
    assert results["config"]["run"]["epochs"] == 4
    records = read_log(run)
    assert [r["epoch"] for r in records if r["kind"] == "update"] == [2, 4]
    updates = {r["epoch"]: r for r in records if r["kind"] == "update"}
    best = updates[results["evidence"]["epoch"]]
    for name, row in results["weight_decay"].items():
        assert row["learned"] == pytest.approx(best["weight_decay"][name])
    assert "in_features: 64" in (run / "config.yaml").read_text()


def test_the_baseline_is_compared_on_the_same_examples(run):
    results = results_of(run)
    assert list(results["differences"]) == PREDICTIVES
    for name, found in results["differences"].items():
        learned, initial = (results["metrics"][f"{which}, {name}"] for which in WHICH)
        assert found.keys() == {"test/cls/NLL", "test/cls/accuracy", "test/cls/Brier"}
        for key, (difference, low, high) in found.items():
            assert difference == pytest.approx(learned[key] - initial[key], abs=1e-12)
            assert low < difference < high or key == "test/cls/accuracy"
            # Both have learned the same of the images: far less than independent sets would differ.
            ends = results["intervals"][f"learned, {name}"][key]
            assert high - low < 0.8 * (ends[1] - ends[0])
    page = (run / "report.html").read_text()
    assert "Learned minus initial weight decay, on the same test examples" in page


def test_leaves_the_network_and_its_posterior(run):
    state = load_file(run / "model.safetensors")
    model = MLP(64, hidden=(16,))
    laplace = load_posterior(run, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    results, posterior = results_of(run), read_posterior(run)
    # It has learned from what was held out, too.
    assert laplace.n_data == posterior["num_data"] == 1438
    assert laplace.log_marginal_likelihood().item() < results["evidence"]["kept"]
    for name, row in results["weight_decay"].items():
        assert row["learned"] == pytest.approx(posterior["prior_precision"][name] / 1294)
        gamma = posterior["effective_parameters"][name]
        assert row["effective_parameters"] == pytest.approx(gamma, rel=0.2) and gamma > 0
    saved = laplace.calibrations
    assert saved["Laplace, probit"] == results["calibration"]
    assert set(saved) == {f"Laplace, {link}" for link in ("probit", "mc")}
    assert posterior["model"]["class_path"] == "marglik.models.MLP"
    assert posterior["data"]["source"]["class_path"] == "marglik.data.Digits"


def test_leaves_the_evaluation_and_a_page(run):
    evaluation = evaluated(run)
    assert {f"learned, {k}": v["metrics"] for k, v in evaluation["predictives"].items()} == {
        k: v for k, v in results_of(run)["metrics"].items() if k.startswith("learned")
    }
    assert evaluation["ood"]["num_examples"] == 50
    assert len(evaluation["uncertain"]["examples"]) == 12
    page = (run / "report.html").read_text()
    assert "MLP on digits" in page
    for charts in ("curves", "weight-decay", "effective", "time", "reliability"):
        assert f'id="{charts}-chart-' in page


def test_same_seed_same_run(run, tmp_path):
    config = ["train", "--config", str(run / "config.yaml"), "--no_baseline"]
    assert main([*config, "--output", str(tmp_path / "again")]) == 0
    first, second = results_of(run), results_of(tmp_path / "again")
    assert second["evidence"] == first["evidence"]
    for name, metrics in second["metrics"].items():
        assert metrics == first["metrics"][name]


def test_digits_preset_keeps_its_promise(tmp_path, capsys):
    """What `make train` runs: at least 95 % right, evidence up, weight decays apart."""
    assert main(["train", "--config", "digits", "--output", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out.partition("\nWritten to")[0]
    shown = (ROOT / "docs/index.md").read_text().partition("It ends with\n\n```")[2]
    # Numbers to the digit would be those of one machine and version of torch.
    assert without_numbers(shown.partition("```")[0]) == without_numbers(printed)
    results = results_of(tmp_path / "run")
    metrics = results["metrics"]
    assert metrics["learned, MAP"]["test/cls/accuracy"] >= 0.95
    # On the test set, which has not chosen the calibration.
    nll = {name: values["test/cls/NLL"] for name, values in metrics.items()}
    assert nll["learned, Laplace, probit"] <= nll["learned, MAP"]
    assert results["evidence"]["kept"] > results["evidence"]["first"]
    learned = [row["learned"] for row in results["weight_decay"].values()]
    assert len(set(learned)) == len(learned) == 10


def test_a_failing_baseline_does_not_take_the_results_along(tmp_path, monkeypatch):
    evaluate, calls = training_setup.TrainingSetup.evaluate, []

    def failing(self, model, *of, **more):
        calls.append(model)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(self, model, *of, **more)

    monkeypatch.setattr(training_setup.TrainingSetup, "evaluate", failing)
    options = ["--epochs", "1", "--baseline", "--output", str(tmp_path / "run")]
    assert main([*SMALL, *options]) == 130
    assert len(calls) == 2
    found = list(results_of(tmp_path / "run")["metrics"])
    assert found == [f"learned, {name}" for name in PREDICTIVES]
    assert read_posterior(tmp_path / "run")["num_data"] == 1438


def test_table_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else names of predictives take several lines
    validation = ["--data.validation", "0.1", "--curvature.batch_size", "300"]
    options = ["--curvature.fisher", "mc", "--predictive.method", "mc"]
    assert main([*SMALL, *validation, *options, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "log marginal likelihood per example" in printed
    assert "Calibrated on 144 held-out loss terms: covariances times " in printed
    assert "5.0e-04 -> " in printed
    assert "learned, Laplace, mc" in printed and "validation/cls/NLL" in printed
    ends = results_of(tmp_path)["intervals"]["learned, MAP"]["test/cls/accuracy"]
    assert "-".join(f"{end:.4f}" for end in ends) in printed
    assert f"Written to {tmp_path}; the report is {tmp_path / 'report.html'}" in printed


def test_the_preset_overwrites_its_own_runs_alone(run, tmp_path, capsys):
    """It says overwrite, so that `make train` can be repeated."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("weeks of work")
    for overwrite in ("--overwrite", "--no_overwrite"):
        message = refusal(capsys, *SMALL, overwrite, "--output", str(mine))
        assert "holds model.safetensors but no manifest.json" in message
    assert [p.read_text() for p in mine.iterdir()] == ["weeks of work"]
    other = shutil.copytree(run, tmp_path / "run")
    options = [*SMALL[:1], "--config", str(run / "config.yaml"), "--overwrite"]
    message = refusal(capsys, *options, "--output", str(other))
    assert "holds a run of marglik train --config digits, which marglik train does not" in message
    assert (other / "results.json").read_bytes() == (run / "results.json").read_bytes()
    assert main([*SMALL, "--epochs", "1", "--output", str(other)]) == 0
    assert results_of(other)["config"]["run"]["epochs"] == 1
    # Without a baseline there is nothing to compare.
    assert "differences" not in results_of(other)
    assert "Learned minus" not in (other / "report.html").read_text()


def test_nan_in_the_data_is_found_before_training(tmp_path, capsys, monkeypatch):
    batches = ImageBatches.__iter__

    def broken(self):
        for x, y in batches(self):
            yield x * float("nan"), y

    monkeypatch.setattr(ImageBatches, "__iter__", broken)
    message = refusal(capsys, *SMALL, "--output", str(tmp_path / "run"))
    assert "The inputs contain NaN or infinity" in message
    assert not (tmp_path / "run").exists()


def test_nan_in_training_is_one_line(tmp_path, capsys):
    options = ["--optimizer.lr", "1e30", "--output", str(tmp_path / "run")]
    assert "training loss is not finite in epoch 1" in refusal(capsys, *SMALL, *options)


def test_train_is_a_function_too(tmp_path):
    torch.manual_seed(0)
    results = experiment.train(
        MLP(64, hidden=(8,)),
        Digits(),
        run=RunConfig(epochs=1, output=str(tmp_path), progress=False),
    )
    assert results["metrics"]["learned, MAP"]["test/cls/NLL"] > 0
    assert read_posterior(tmp_path)["model"] is None  # nobody said how it was made


def test_a_line_for_each_step_where_there_is_no_terminal(tmp_path, capsys):
    options = [option for option in SMALL if option != "--no_progress"]
    more = ["--epochs", "2", "--monitor", "2", "--baseline"]
    assert main([*options, *more, "--output", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    steps = [line.split(":")[0] for line in lines]
    epochs = [f"epoch {i} of 2" for i in (1, 2)]
    evaluating = [f"evaluating {name} on digits" for name in PREDICTIVES]
    held_out, *steps = steps
    assert held_out == "144 training examples are held out for calibration"
    assert steps == [
        *epochs, "update after epoch 2", *evaluating,
        "second training, with the initial weight decay", *epochs, *evaluating,
    ]  # fmt: skip
    seen = "validation/cls/NLL"  # of what was held out
    assert "loss " in lines[1] and seen not in lines[1] and seen in lines[2]
    assert "log marginal likelihood per example -" in lines[3]
