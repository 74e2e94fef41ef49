"""`marglik train --resume`: to the bit in another process, and never into another run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marglik.cli import main
from marglik.data import ClassSubset, Digits
from marglik.models import MLP
from marglik.runs import train as experiment
from marglik.runs.config import RunConfig
from marglik.storage.run_folder import read_log
from marglik.training.network import NetworkTraining
from tests.marglik import threads
from tests.marglik.runs.command_line import DATA, MODEL, TRAIN, refusal, results_of

HERE = "tests.marglik.runs.commands_on_ranks"
"""Commands in processes of their own, which are copies of one that has never trained."""
OPTIONS = [
    *TRAIN, *DATA, *MODEL, "--monitor", "2", "--curvature.fisher", "mc", "--baseline",
    "--predictive.method", "mc",
]  # fmt: skip
RECORDS = 6  # of four epochs and two updates
LEFT = {
    "config.yaml", "evaluation.json", "log.jsonl", "manifest.json",
    "model.safetensors", "posterior.json", "posterior.safetensors", "report.html", "results.json",
}  # fmt: skip


def command(folder, *more):
    return [*OPTIONS, "--output", str(folder), *more]


INTERRUPTS = {
    "an update": ("log", 4),
    "the last update": ("learned", RECORDS - 1),  # it follows the last state
    "the baseline's second epoch": ("baseline", 2),
    "nothing": ("nowhere", 0),
}
"""Of one run, each in a process of its own that goes on where the one before it was."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was not interrupted; a folder for those that are."""
    folder = tmp_path_factory.mktemp("runs")
    with threads.one_thread():
        assert main(command(folder / "whole", "--resume")) == 0  # there is nothing to go on with
    return folder


@pytest.fixture(scope="module")
def worked(runs, worlds):
    """What each of the processes did; the folder as each has left it."""
    found = {}
    for name, (where, stop) in INTERRUPTS.items():
        # Presets may say overwrite, as that of the digits does; how it is run may differ, too.
        more = ["--resume", "--overwrite"] if found else []
        more += ["--accelerator", "cpu"] if name == "the last update" else []
        arguments = command(runs / "run", *more)
        (found[name],) = worlds.all(1, f"{HERE}:interrupted", where, stop, arguments)
        status = 0 if name == "nothing" else 130
        assert found[name]["status"] == status, (name, found[name])
        shutil.copytree(runs / "run", runs / f"cut off after {name}")
    return found


@pytest.fixture
def cut_off(runs, worked, tmp_path):
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


def without_seconds(value):
    if isinstance(value, list):
        return [without_seconds(v) for v in value]
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if not k.startswith("seconds")}
    return value


def log_of(folder):
    return without_seconds(read_log(folder))


def test_other_processes_come_to_the_same(runs, worked):
    """What a run leaves, to the bit; only options, times, and what shows them differ."""
    whole, folder = runs / "whole", runs / "run"
    assert names_in(whole) == names_in(folder) == LEFT
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


def test_only_what_is_missing_is_done(worked):
    """What was done after the last state, the third epoch, is done again."""
    epochs = [work["epochs"] for work in worked.values()]
    assert epochs == [[1, 2, 3], [3, 4], [1, 2], [3, 4]]
    # Three predictives, each on the test and the validation set, of two networks.
    assert [work["predicted"] for work in worked.values()] == [0, 0, 6, 6]


@pytest.mark.parametrize("where", list(INTERRUPTS)[:-1])
def test_what_was_cut_off_was_not_the_end(where, runs, worked):
    """Negative control: the resumed runs had something to do."""
    folder = runs / f"cut off after {where}"
    assert (folder / "checkpoint" / "learned" / "state.pt").exists()
    records, finished = len(read_log(folder)), where.startswith("the baseline")
    assert finished or records == {"an update": 4, "the last update": RECORDS - 1}.get(
        where, RECORDS
    )
    assert (folder / "results.json").exists() == finished
    if finished:
        assert len(results_of(folder)["metrics"]) == 3
        assert (folder / "checkpoint" / "baseline" / "state.pt").exists()


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
    "data": (["--data.data.validation", "0.2"], "images.train is 1039 there, 924 here"),
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


def test_what_is_left_of_a_finished_run_is_removed(whole, cut_off):
    """A kill in the very last moment."""
    (cut_off / "checkpoint").rename(whole / "checkpoint")
    before = results_of(whole)
    assert main(command(whole, "--resume")) == 0
    assert not (whole / "checkpoint").exists()
    assert results_of(whole) == before


def test_overwrite_starts_anew(cut_off, runs):
    """With another seed, which is the negative control of the comparison to the bit."""
    assert main(command(cut_off, "--overwrite", "--seed", "1", "--no_baseline")) == 0
    assert names_in(cut_off) == LEFT
    assert len(read_log(cut_off)) == RECORDS
    assert log_of(cut_off) != log_of(runs / "whole")
    state = load_file(cut_off / "model.safetensors")
    expected = load_file(runs / "whole" / "model.safetensors")
    assert not any(torch.equal(state[name], expected[name]) for name in expected)


def test_a_folder_of_states_that_is_missing_is_no_silent_restart(cut_off, capsys):
    shutil.rmtree(cut_off / "checkpoint")
    before = content(cut_off)
    message = refusal(capsys, *command(cut_off, "--resume", "--overwrite"))
    assert "cut off, but no checkpoint to continue from. Start again: --over" in message
    assert content(cut_off) == before


def test_the_function_resumes_too(tmp_path, monkeypatch):
    monkeypatch.setattr("marglik.storage.checkpoint.MINUTES", 0.0)

    def run(folder, **options):
        torch.manual_seed(0)
        config = RunConfig(epochs=2, output=str(folder), progress=False, **options)
        data = ClassSubset(Digits(), [0, 1])
        return experiment.train(MLP(64, hidden=(8,), num_classes=2), data, run=config)

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
