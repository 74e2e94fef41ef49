"""The commands on several ranks: the files of one process, and one error where a rank fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.marglik.close_state import assert_near
from tests.marglik.runs.command_line import (
    DATA,
    MODEL,
    TRAIN,
    evaluated,
    is_empty,
    refusal,
    results_of,
)

HERE = "tests.marglik.runs.commands_on_ranks"
OPTIONS = [*TRAIN, *DATA, *MODEL, "--monitor", "2"]
TOLERANCE = 2e-3
"""Of float32 after four epochs and two updates of 20 steps."""


def on_ranks(worlds, size, *arguments):
    """What each rank printed."""
    found = worlds.all(size, f"{HERE}:command", *arguments)
    assert [status for status, *_ in found] == [0] * size, found
    return found


@pytest.fixture(scope="module")
def alone(worlds, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    on_ranks(worlds, 1, *OPTIONS, "--output", str(folder))
    return folder


@pytest.fixture(scope="module")
def together(worlds, tmp_path_factory):
    """The run of two ranks, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks") / "together"
    return folder, on_ranks(worlds, 2, *OPTIONS, "--output", str(folder))


def assert_same_run(folder, other):
    """Evidence, weight decays, metrics and parameters, up to float32's order of sums."""
    found, expected = results_of(folder), results_of(other)
    for key in ("num_data", "held_out", "evidence", "weight_decay"):
        assert_near(found[key], expected[key], TOLERANCE, key)
    for name, metrics in expected["metrics"].items():
        nll = metrics["test/cls/NLL"]
        assert found["metrics"][name]["test/cls/NLL"] == pytest.approx(nll, abs=TOLERANCE)
    parameters = load_file(other / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert_close(tensor, parameters[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_two_ranks_train_what_one_process_trains(alone, together):
    folder, printed = together
    assert_same_run(folder, alone)
    assert {p.name for p in folder.iterdir()} == {p.name for p in alone.iterdir()}
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    others = [json.loads(line) for line in (alone / "log.jsonl").read_text().splitlines()]
    for found, expected in zip(lines, others, strict=True):
        assert list(found) == list(expected)
        if found["kind"] == "epoch":
            assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
            assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.01)
    assert "log marginal likelihood per example" in printed[0][1]
    assert printed[1][1:] == ("", "")  # the first alone prints


def test_two_ranks_evaluate_what_one_process_evaluates(worlds, alone, tmp_path):
    """The same posterior, in batches of 50: the last has one part more than the other, or none."""
    found = {}
    for size in (1, 2):
        printed = on_ranks(
            worlds, size, "evaluate", str(alone), "--output", str(tmp_path / f"found {size}"),
            "--methods", "[probit, linearised]", "--predictive.networks", "5",
            "--predictive.batch_size", "50",
            "--progress", "false",
        )  # fmt: skip
        record = evaluated(tmp_path / f"found {size}")
        found[size] = record["predictives"]
        assert [out == "" for _, out, _ in printed] == [False, True][:size]
    for name, expected in found[1].items():
        assert_near(found[2][name]["metrics"], expected["metrics"], 1e-5, name)
        assert found[2][name].keys() == expected.keys()


@pytest.mark.parametrize("method", ["evidence", pytest.param("validation", marks=pytest.mark.slow)])
def test_two_ranks_fit_what_one_process_fits(worlds, alone, tmp_path, method):
    checkpoint = str(shutil.copy(alone / "model.safetensors", tmp_path / "net.safetensors"))
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        options = ["--prior.method", method, "--predictive.method", "mc", "--batch_size", "50"]
        on_ranks(
            worlds, size, "fit", "--checkpoint", checkpoint, *DATA, *MODEL, *options,
            "--output", str(folder), "--no_progress",
        )  # fmt: skip
        record = json.loads((folder / "posterior.json").read_text())
        found[size] = {k: record[k] for k in ("prior_precision", "calibrations", "num_data")
                       if k in record}  # fmt: skip
        factors = load_file(folder / "posterior.safetensors")
        found[size]["factors"] = {name: factors[name] for name in sorted(factors)}
    assert_near(found[2], found[1], 1e-3)


@pytest.mark.slow  # the loop's own test of it takes a quarter of the time
def test_a_run_goes_on_with_another_number_of_ranks(worlds, alone, tmp_path):
    """Killed on two ranks, gone on with by four, killed, and ended by one process."""
    run = [*OPTIONS, "--output", str(tmp_path / "run")]
    for size, rank in ((2, 1), (4, 0)):
        worlds.run(size, f"{HERE}:killed_after", 0.5, rank, [*run, "--resume"])
    on_ranks(worlds, 1, *run, "--resume")
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("more", "word"),
    [(["--prior.every", "3"], "config.prior.every is 2 on rank 0, 3 on rank 1"),
     (["--data.data.validation", "0.2"], "images.train is 1039 on rank 0, 924 on rank 1")],
)  # fmt: skip
def test_ranks_that_were_started_differently_end(worlds, tmp_path, more, word):
    found = worlds.all(2, f"{HERE}:different", [*OPTIONS, "--output", str(tmp_path / "run")], more)
    for rank, (status, out, err) in enumerate(found):
        assert (status, out) == (2, "")
        assert "The processes were started differently: " in err and word in err, (rank, err)
    assert is_empty(tmp_path / "run")


def test_what_one_rank_finds_wrong_ends_all(worlds, tmp_path):
    more = ["--model.in_features", "63"]
    found = worlds.all(2, f"{HERE}:different", [*OPTIONS, "--output", str(tmp_path / "run")], more)
    (status, _, waiting), (other, _, said) = found
    assert (status, other) == (2, 2)
    assert "MLP cannot take inputs" in said and "Rank 0 of 2 lost the others" in waiting


def test_numbers_of_ranks_that_cannot_be(capsys, monkeypatch, worlds, tmp_path):
    options = [*OPTIONS, "--output", str(tmp_path / "run")]
    assert "devices must be at least 1, not 0." in refusal(capsys, *options, "--devices", "0")
    said = refusal(capsys, *options, "--devices", "2", "--rank_timeout", "0")
    assert "rank_timeout must be positive" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = refusal(capsys, *options, "--devices", "3")
    assert "--devices 3: there are 2 GPUs on this machine. Pass 2 or less" in said
    for wrong, words in (
        (["--batch_size", "1"], "batch_size 1: 2 processes need batches of at least 2 examples"),
        (["--devices", "3"], "--devices 3: torchrun has started 2 processes."),
    ):
        for rank, found in enumerate(worlds.all(2, f"{HERE}:command", *options, *wrong)):
            assert found[0] == 2 and words in found[2], rank
    assert is_empty(tmp_path / "run")


@pytest.mark.slow
def test_the_command_starts_ranks_and_torchrun_does(alone, tmp_path):
    """Both as users call them, in processes of their own."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    # Without "--" torchrun takes our --monitor for an abbreviation of an option of its own.
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "marglik"]
    for name, start, more in (
        ("torchrun", torchrun, []), ("devices", ["-m", "marglik"], ["--devices", "2"]),
    ):  # fmt: skip
        output = ["--output", str(tmp_path / name)]
        subprocess.run(
            [sys.executable, *start, *OPTIONS, *output, *more], cwd=tmp_path, check=True,
            env=environment,
        )  # fmt: skip
        assert_same_run(tmp_path / name, alone)


FAULTS = {
    "kill": ("os.kill(os.getpid(), 9)", "Rank 1 of 2 was ended by SIGKILL"),
    "raise": ("raise ValueError('a fault')", "Rank 1 of 2: a fault"),
    "hang": ("time.sleep(100)", "Rank 0 of 2: Rank 0 of 2 lost the others"),
}
NET = """
import os, time
from marglik.models import MLP

class Net(MLP):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if Net.calls == 60 and os.environ.get("RANK") == "1" and not os.path.exists("mended"):
            {fault}
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_the_run_which_resumes(alone, tmp_path, name):
    """In a forward pass: one message with the cause, soon, and no process is left."""
    fault, words = FAULTS[name]
    (tmp_path / "net.py").write_text(NET.format(fault=fault))
    options = ["net.Net" if option == "marglik.models.MLP" else option for option in OPTIONS]
    command = [sys.executable, "-m", "marglik", *options, "--output", str(tmp_path / "run")]
    command += ["--devices", "2", "--rank_timeout", "20"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    start = {"cwd": tmp_path, "env": os.environ | own, "capture_output": True, "text": True}
    failed = subprocess.run(command, **start)
    errors = [line for line in failed.stderr.splitlines() if line.startswith("marglik: ")]
    assert failed.returncode == 2
    assert len(errors) == 1 and words in errors[0], failed.stderr
    assert "--resume continues" in errors[0] and "Traceback" not in failed.stderr
    (tmp_path / "mended").touch()
    subprocess.run([*command, "--resume"], **start, check=True)
    assert_same_run(tmp_path / "run", alone)
