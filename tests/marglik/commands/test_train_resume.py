"""`marglik train --resume`: to the bit in another process, and never into another run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marglik.cli import main
from marglik.data import Digits
from marglik.models import MLP
from marglik.prediction import evaluation_record
from marglik.runs import train as experiment
from marglik.runs.config import RunConfig
from marglik.storage.checkpoint import Checkpoints
from marglik.storage.run_folder import RunFolder
from marglik.storage.run_log import RunLog, read_log
from marglik.training.network import NetworkTraining
from tests.marglik import threads
from tests.marglik.commands.command_line import DATA, MODEL, TRAIN, refusal

ELSEWHERE = "tests.marglik.commands.commands_on_ranks:command"
"""A command in a process of its own, which is a copy of one that has never trained."""
OPTIONS = [
    *TRAIN, *DATA, *MODEL, "--monitor", "2", "--curvature.fisher", "mc", "--baseline",
    "--predictive.method", "mc", "--checkpoint_minutes", "0",
]  # fmt: skip
RECORDS = 6  # of four epochs and two updates
LEFT = {
    "config.yaml", "evaluation.json", "evidence.png", "log.jsonl", "manifest.json",
    "model.safetensors", "posterior.json", "posterior.safetensors", "report.html", "results.json",
}  # fmt: skip


def command(folder, *more):
    return [*OPTIONS, "--output", str(folder), *more]


def interrupted(folder, where, stop):
    """Start a run that ends with its stop-th record, or with the baseline's stop-th state."""
    write, save = RunLog.write, Checkpoints.save
    count = 0

    def crash_if_due():
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt

    def interrupted_write(self, record):
        write(self, record)
        crash_if_due()

    def interrupted_save(self, state):
        save(self, state)
        if self.folder.name == where:
            crash_if_due()

    with pytest.MonkeyPatch.context() as patched:
        if where == "log":
            patched.setattr(RunLog, "write", interrupted_write)
        else:
            patched.setattr(Checkpoints, "save", interrupted_save)
        assert main(command(folder)) == 130
    return folder


INTERRUPTS = {
    "an update": ("log", 4),
    "the last update": ("learned", RECORDS + 1),  # the first is of the start
    "the final evaluation": ("learned_evaluation", 2),
    "the baseline's second epoch": ("baseline", 3),
    "the baseline's evaluation": ("baseline_evaluation", 3),
}


@pytest.fixture(scope="module")
def runs(worlds, tmp_path_factory):
    """A run that was not interrupted; those that were, by where; the last are copied first."""
    folder = tmp_path_factory.mktemp("runs")
    with threads.one_thread():
        assert main(command(folder / "whole")) == 0
        for i, (name, (where, stop)) in enumerate(INTERRUPTS.items()):
            interrupted(folder / str(i), where, stop)
            shutil.copytree(folder / str(i), folder / f"cut off after {name}")
    for i in range(len(INTERRUPTS)):
        ((status, *said),) = worlds.all(1, ELSEWHERE, *command(folder / str(i), "--resume"))
        assert status == 0, said
    return folder


@pytest.fixture
def cut_off(runs, tmp_path):
    """A run that was cut off in its third epoch."""
    return Path(shutil.copytree(runs / "cut off after an update", tmp_path / "cut off"))


@pytest.fixture
def whole(runs, tmp_path):
    """A run that is finished."""
    return Path(shutil.copytree(runs / "whole", tmp_path / "finished"))


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def without_seconds(value):
    if isinstance(value, list):
        return [without_seconds(v) for v in value]
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if not k.startswith("seconds")}
    return value


def log_of(folder):
    return without_seconds(read_log(folder))


@pytest.mark.parametrize("where", INTERRUPTS)
def test_another_process_comes_to_the_same(where, runs):
    """What a run leaves, to the bit; only options, times, and what shows them differ."""
    whole, folder = runs / "whole", runs / str(list(INTERRUPTS).index(where))
    assert names_in(folder) == LEFT
    for name in ("model.safetensors", "posterior.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert log_of(folder) == log_of(whole)
    for name in ("results.json", "evaluation.json"):
        found, expected = (json.loads((path / name).read_text()) for path in (folder, whole))
        assert without_seconds(found) == without_seconds(expected), name
    results = results_of(folder)
    assert results["seconds"] > 0
    names = ("MAP", "MAP, temperature-scaled", "Laplace, mc")
    assert list(results["metrics"]) == [f"{w}, {n}" for w in ("learned", "initial") for n in names]


@pytest.mark.parametrize("where", INTERRUPTS)
def test_what_was_cut_off_was_not_the_end(where, runs):
    """Negative control: the resumed runs had something to do."""
    folder = runs / f"cut off after {where}"
    assert (folder / "checkpoint" / "learned" / "state.json").exists()
    records, finished = len(read_log(folder)), where.startswith("the baseline")
    assert finished or records == (4 if where == "an update" else RECORDS)
    assert (folder / "results.json").exists() == finished
    if finished:
        assert len(results_of(folder)["metrics"]) == 3
        assert (folder / "checkpoint" / "baseline" / "state.json").exists()


def test_another_seed_is_another_run(runs, tmp_path):
    """Negative control of the comparison to the bit."""
    assert main(command(tmp_path / "other", "--seed", "1", "--no_baseline")) == 0
    assert log_of(tmp_path / "other") != log_of(runs / "whole")
    state = load_file(tmp_path / "other" / "model.safetensors")
    expected = load_file(runs / "whole" / "model.safetensors")
    assert not any(torch.equal(state[name], expected[name]) for name in expected)


def test_the_monitor_is_in_the_log(runs):
    seen = [set(r) & {"validation/cls/NLL", "validation/cls/accuracy"} for r in log_of(runs / "2")]
    assert [len(names) for names in seen] == [0, 2, 0, 0, 2, 0]


def test_a_finished_run_is_returned(whole, monkeypatch, capsys):
    monkeypatch.setattr(NetworkTraining, "epoch", None)
    (whole / "report.html").unlink()
    before = content(whole)
    assert main(command(whole, "--resume")) == 0
    after = content(whole)
    assert after.pop("report.html")
    assert after == before
    assert "log marginal likelihood per example" in capsys.readouterr().out


OTHER = {
    "epochs": (["--epochs", "5"], "config.run.epochs is 4 there, 5 here"),
    "seed": (["--seed", "3"], "config.run.seed is 0 there, 3 here"),
    "baseline": (["--no_baseline"], "config.run.baseline is True there, False here"),
    "optimizer": (["--optimizer.lr", "0.06"], "config.optimizer.lr is 0.05 there, 0.06 here"),
    "prior": (["--prior.method", "mackay"], "config.prior.method is adam there, mackay here"),
    "curvature": (["--curvature.fisher", "exact"], "config.curvature.fisher is mc there, exact"),
    "network": (["--model.hidden", "[13]"], "model_options.hidden is [12] there, [13]"),
    "activation": (
        ["--model.activation", "tanh"],
        "model_options.activation is relu there, tanh here",
    ),
    "data": (["--data.data.validation", "0.2"], "images.train is 1039 there, 924 here"),
    "evaluation": (
        ["--evaluation.uncertain", "3"],
        "config.evaluation.uncertain is 12 there, 3 here",
    ),
    "out-of-distribution data": (["--ood", "marglik.data.Noise"], "ood is None there, noise here"),
}


@pytest.mark.parametrize(
    ("state", "other"), [*(("cut_off", other) for other in OTHER), ("whole", "epochs")]
)
def test_another_option_is_named_and_nothing_touched(other, state, request, capsys):
    folder = request.getfixturevalue(state)
    options, message = OTHER[other]
    before = content(folder)
    printed = refusal(capsys, *command(folder, "--resume", *options))
    assert message in printed
    assert "Resume with the options that it was started with" in printed
    assert content(folder) == before


def test_only_what_is_missing_is_trained(cut_off, runs, monkeypatch):
    """And the options of how often states are kept and where it runs may differ."""
    epoch, numbers = NetworkTraining.epoch, []

    def counted(self, number, *arguments):
        numbers.append(number)
        return epoch(self, number, *arguments)

    monkeypatch.setattr(NetworkTraining, "epoch", counted)
    options = ["--checkpoint_minutes", "5", "--accelerator", "cpu", "--tensorboard"]
    assert main(command(cut_off, "--resume", *options)) == 0
    assert numbers == [3, 4, 1, 2, 3, 4]  # the second time for the baseline
    assert names_in(cut_off) == LEFT | {"tensorboard"}
    assert log_of(cut_off) == log_of(runs / "whole")


def test_an_evaluation_is_not_begun_anew(runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs / "cut off after the final evaluation", tmp_path / "run")
    kept, predict_all = [], evaluation_record.predict_all

    def counted(*arguments, earlier, **keywords):
        kept.append(len(earlier))
        return predict_all(*arguments, earlier=earlier, **keywords)

    monkeypatch.setattr(evaluation_record, "predict_all", counted)
    assert main(command(folder, "--resume")) == 0
    # The test set of the MAP, and what follows; then the baseline's.
    assert kept[0] == 2 and not any(kept[2:])


def test_resume_goes_before_overwrite(cut_off, runs):
    """Presets may say overwrite, as that of the digits does."""
    assert main(command(cut_off, "--resume", "--overwrite")) == 0
    assert log_of(cut_off) == log_of(runs / "whole")
    assert results_of(cut_off)["metrics"] == results_of(runs / "whole")["metrics"]


def test_two_processes_do_not_share_a_folder(cut_off, capsys):
    before = content(cut_off)
    with RunFolder(cut_off).locked():
        assert "Another process runs in" in refusal(capsys, *command(cut_off, "--resume"))
        assert content(cut_off).items() >= before.items()


def test_what_is_left_of_a_finished_run_is_removed(whole, cut_off):
    """A kill in the very last moment."""
    (cut_off / "checkpoint").rename(whole / "checkpoint")
    before = results_of(whole)
    assert main(command(whole, "--resume")) == 0
    assert not (whole / "checkpoint").exists()
    assert results_of(whole) == before


def test_what_a_killed_process_was_writing_is_removed(whole):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (whole / f".partial-{killed.pid}-posterior.safetensors").write_bytes(b"half")
    assert main(command(whole, "--resume")) == 0
    assert names_in(whole) == LEFT


def test_without_resume_a_run_that_was_cut_off_is_refused(cut_off, whole, capsys):
    before = content(cut_off)
    assert "--resume to continue it" in refusal(capsys, *command(cut_off))
    assert content(cut_off) == before


def test_without_resume_a_finished_run_is_refused(whole, capsys):
    message = refusal(capsys, *command(whole))
    assert "--overwrite" in message and "--resume" not in message


def test_overwrite_starts_anew(cut_off, runs):
    assert main(command(cut_off, "--overwrite", "--epochs", "1", "--no_baseline")) == 0
    assert names_in(cut_off) == LEFT
    assert len(read_log(cut_off)) == 2


def test_resume_without_a_run_is_a_new_one(runs, tmp_path):
    assert main(command(tmp_path / "run", "--resume")) == 0
    assert log_of(tmp_path / "run") == log_of(runs / "whole")


@pytest.mark.parametrize("name", ["learned", "baseline"])
def test_a_damaged_state_is_one_line(name, runs, tmp_path, capsys):
    """The results of the learned run, which are there already, are not lost by it."""
    folder = shutil.copytree(runs / "cut off after the baseline's second epoch", tmp_path / "run")
    (tensors,) = (folder / "checkpoint" / name).glob("tensors-*")
    tensors.write_bytes(tensors.read_bytes()[:-5])
    before = without_seconds(results_of(folder))
    assert tensors.name in refusal(capsys, *command(folder, "--resume"))
    assert without_seconds(results_of(folder)) == before


@pytest.mark.parametrize("name", sorted(LEFT - {"report.html"}))
def test_a_finished_run_of_which_a_byte_is_altered_is_refused(name, whole, capsys):
    content = bytearray((whole / name).read_bytes())
    content[len(content) // 2] ^= 1
    (whole / name).write_bytes(content)
    assert name in refusal(capsys, *command(whole, "--resume"))
    (whole / name).unlink()
    assert re.search(f"{name} is missing|no {name}", refusal(capsys, *command(whole, "--resume")))


@pytest.mark.parametrize("overwrite", ["--overwrite", "--no_overwrite"])
@pytest.mark.parametrize("name", ["learned", "baseline"])
def test_a_state_that_is_missing_is_no_silent_restart(name, overwrite, runs, tmp_path, capsys):
    folder = shutil.copytree(runs / "cut off after the baseline's second epoch", tmp_path / "run")
    (folder / "checkpoint" / name / "state.json").unlink()
    before = content(folder)
    message = refusal(capsys, *command(folder, "--resume", overwrite))
    assert f"{name}/state.json is missing" in message and "--overwrite instead of" in message
    assert content(folder) == before


def test_a_folder_of_states_that_is_missing_is_no_silent_restart(cut_off, capsys):
    shutil.rmtree(cut_off / "checkpoint")
    before = content(cut_off)
    message = refusal(capsys, *command(cut_off, "--resume", "--overwrite"))
    assert "cut off, but no checkpoint to continue from. Start again: --over" in message
    assert content(cut_off) == before


def test_resume_is_not_for_what_another_command_left(checkpoint, tmp_path, capsys):
    folder = tmp_path / "fit"
    assert (
        main(["fit", *DATA, *MODEL, "--checkpoint", str(checkpoint), "--output", str(folder)]) == 0
    )
    before = content(folder)
    assert f"{folder} " in refusal(capsys, *command(folder, "--resume"))
    assert content(folder) == before


def test_the_function_resumes_too(tmp_path, monkeypatch):
    def run(folder, **options):
        torch.manual_seed(0)
        config = RunConfig(
            epochs=2, output=str(folder), progress=False, checkpoint_minutes=0, **options
        )
        return experiment.train(MLP(64, hidden=(8,)), Digits(), run=config)

    with monkeypatch.context() as patched:
        epoch = NetworkTraining.epoch

        def interrupted_epoch(self, number, *arguments):
            if number == 2:
                raise KeyboardInterrupt
            return epoch(self, number, *arguments)

        patched.setattr(NetworkTraining, "epoch", interrupted_epoch)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "a")
    resumed, expected = run(tmp_path / "a", resume=True), run(tmp_path / "b")
    assert resumed["metrics"] == expected["metrics"]
    again = run(tmp_path / "a", resume=True)
    assert again["seconds"] == resumed["seconds"] and again["output"] == str(tmp_path / "a")
