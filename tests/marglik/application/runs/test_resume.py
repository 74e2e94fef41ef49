"""A run that is killed, or whose disk is full, goes on to the same bits; another one is refused.

A write is a file's content that is forced to the disk, or a file's new name. Each command runs in a
process of its own, which ends at a write or fails there.
"""

import errno
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from marglik.application.cli import main
from marglik.application.records import to_json
from marglik.application.run_folder import read_log
from marglik.storage.record_files import read_posterior, read_record
from marglik.training.loop import OnlineTraining
from tests.marglik.application.runs.command_line import (
    DATA,
    MODEL,
    NOISE,
    TRAIN,
    command,
    content,
    refusal,
    results_of,
    without_seconds,
)

HERE = "tests.marglik.application.runs.test_resume"
OPTIONS = [*DATA, *MODEL, *NOISE, "--baseline", "--curvature.fisher", "mc"]


def arguments(folder, *more):
    """Those of the run in conftest, and more."""
    return [*TRAIN, *OPTIONS, "--output", str(folder), *more]


def at_write(number, code, given):
    """Run a command; at its write of this number, the process is killed, or from there on all fail.

    Args:
        number: counted from 1; 0 for none.
        code: of the error of a failing write; 0 to be killed, with half of the file on the disk.
        given: the command's arguments.

    Returns:
        the number of writes, and what `command` returns.
    """
    seen = 0

    def watched(real):
        def write(*arguments, **keywords):
            nonlocal seen
            seen += 1
            if seen == number and real.__name__ == "fsync":
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            if seen == number and not code:
                os.kill(os.getpid(), signal.SIGKILL)
            if number and seen >= number and code:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **keywords)

        return write

    with ExitStack() as stack:
        stack.enter_context(patch("marglik.storage.checkpoint.MINUTES", 0.0))
        for name in ("replace", "fsync"):
            stack.enter_context(patch.object(os, name, watched(getattr(os, name))))
        found = command(*given)
    return seen, *found


@pytest.fixture(scope="module")
def whole(worlds, tmp_path_factory):
    """The folder of a run that nothing happened to, and its number of writes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ((writes, status, *printed),) = worlds.all(1, f"{HERE}:at_write", 0, 0, arguments(folder))
    assert status == 0, printed
    return folder, writes


def assert_same(folder, expected):
    """Names, network and posterior to the byte; the rest but for seconds."""
    assert {p.name for p in folder.iterdir()} == {p.name for p in expected.iterdir()}
    for name in ("model.safetensors", "posterior.safetensors", "posterior.json"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    for name in ("results.json", "evaluation.json"):
        a, b = (json.loads((f / name).read_text()) for f in (folder, expected))
        assert without_seconds(a) == without_seconds(b), name
    assert without_seconds(read_log(folder)) == without_seconds(read_log(expected))
    assert read_record(folder / "results.json") and read_posterior(folder)


def resumed(worlds, folder, expected):
    again = f"{HERE.rpartition('.')[0]}.command_line:command"
    ((status, _, said),) = worlds.all(1, again, *arguments(folder, "--resume"))
    assert status == 0, said
    assert_same(folder, expected)


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_write_goes_on(worlds, whole, tmp_path):
    folder, writes = whole
    for number in range(1, writes + 1):
        run = tmp_path / str(number)
        worlds.run(1, f"{HERE}:at_write", number, 0, arguments(run))
        resumed(worlds, run, folder)


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(worlds, whole, tmp_path):
    folder, writes = whole
    given = arguments(tmp_path / "run")
    ((_, status, _, said),) = worlds.all(1, f"{HERE}:at_write", writes // 2, errno.ENOSPC, given)
    assert status == 2 and os.strerror(errno.ENOSPC) in said.splitlines()[-1]
    assert "it needs " in said and "The same command with --resume" in said
    resumed(worlds, tmp_path / "run", folder)


@pytest.fixture(scope="module")
def stopped(worlds, whole, tmp_path_factory):
    """A run that was killed in an update."""
    return killed(worlds, round(0.3 * whole[1]), tmp_path_factory.mktemp("stopped") / "run")


def killed(worlds, number, folder):
    (ended,) = worlds.run(1, f"{HERE}:at_write", number, 0, arguments(folder))
    assert ended.args == ("ended", -signal.SIGKILL), ended
    return folder


@pytest.fixture
def cut_off(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "cut off"))


def test_a_killed_run_goes_on_to_the_same_bits(worlds, whole, cut_off, tmp_path):
    """In an update, before the first checkpoint, at the end; the slow test kills at each write."""
    folder, writes = whole
    resumed(worlds, cut_off, folder)
    for number in (3, 5, round(0.97 * writes)):
        resumed(worlds, killed(worlds, number, tmp_path / str(number)), folder)


OTHER = {
    "epochs": (["--epochs", "5"], "config.run.epochs is 3 there and 5 here"),
    "curvature": (["--curvature.fisher", "exact"], "config.curvature.fisher is mc there and exact"),
    "network": (["--model.hidden", "[7]"], "model_options.hidden is [6] there and [7]"),
    "data": (["--data.data.validation", "0.2"], "examples.train is "),
    "labels": (["--data.data.seed", "3"], "normalisation is "),
}


@pytest.mark.parametrize("other", OTHER)
def test_another_run_is_named_and_nothing_touched(other, cut_off, capsys):
    options, message = OTHER[other]
    before = content(cut_off)
    printed = refusal(capsys, *arguments(cut_off, "--resume", *options))
    assert message in printed and "Resume with the same options" in printed
    assert content(cut_off) == before


def test_a_finished_run_is_returned_and_another_overwrites_it(run, monkeypatch, capsys):
    before = content(run)
    with monkeypatch.context() as patched:
        patched.setattr(OnlineTraining, "train_epoch", None)
        assert main(arguments(run, "--resume")) == 0
    assert "log marginal likelihood per example" in capsys.readouterr().out
    assert {k: v for k, v in content(run).items() if k != "report.html"} == {
        k: v for k, v in before.items() if k != "report.html"
    }
    assert "Pass --overwrite, or another" in refusal(capsys, *arguments(run))
    preset = ("train", "--config", "digits", "--output", str(run))  # nor does a preset ask for it
    assert "Pass --overwrite, or another" in refusal(capsys, *preset)
    short = ["--overwrite", "--no_baseline", "--epochs", "1", "--seed", "1"]
    assert main(arguments(run, *short)) == 0
    found = results_of(run)
    assert found.identity["config"]["run"]["epochs"] == 1 and "plain" not in found.networks
    assert "Add --resume --baseline to the same command" in found.verdict
    # Added later, the plain network is the one that would have been trained at once.
    assert main(arguments(run, *short[2:], "--resume")) == 0
    later = results_of(run)
    assert main(arguments(run, "--overwrite", *short[2:])) == 0
    assert without_seconds(to_json(results_of(run))) == without_seconds(to_json(later))
    assert later.networks["plain"].differences


def test_a_failing_baseline_does_not_take_the_results_along(tmp_path, monkeypatch):
    epoch, calls = OnlineTraining.train_epoch, []

    def failing(self, *given):
        calls.append(given)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return epoch(self, *given)

    monkeypatch.setattr(OnlineTraining, "train_epoch", failing)
    assert main(arguments(tmp_path, "--epochs", "1")) == 130
    assert [*results_of(tmp_path).networks] == ["learned"]
