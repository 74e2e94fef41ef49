"""The commands on several ranks: the files of one process, and an end where ranks differ."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from torch import distributed as dist
from torch.testing import assert_close

from marglik.application.records import to_json
from tests.marglik.application.runs.command_line import (
    DATA,
    MODEL,
    NOISE,
    TRAIN,
    command,
    results_of,
)
from tests.marglik.states import assert_near

HERE = "tests.marglik.application.runs.command_line"
# Each rank draws random signs of its own.
OPTIONS = [*TRAIN, *DATA, *MODEL, *NOISE, "--prior.curvature_from", "pass"]
TOLERANCE = 2e-3
"""Of float32 after three epochs and updates."""


def on_ranks(worlds, size, *arguments):
    """What each rank printed; the first one alone does."""
    found = worlds.all(size, f"{HERE}:command", *arguments)
    assert [status for status, *_ in found] == [0] * size, found
    assert all(out == "" for _, out, _ in found[1:])
    return found


@pytest.fixture(scope="module")
def alone(worlds, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    on_ranks(worlds, 1, *OPTIONS, "--output", str(folder))
    return folder


def assert_same_run(folder, other):
    """Evidence, weight decays, metrics and parameters, up to float32's order of sums."""
    found, expected = (to_json(results_of(run)) for run in (folder, other))
    for key in ("num_data", "held_out", "evidence", "weight_decay"):
        assert_near(found[key], expected[key], TOLERANCE, key)
    scores = results_of(folder).scores
    for name, one in results_of(other).scores.items():
        assert scores[name].metrics.nll == pytest.approx(one.metrics.nll, abs=TOLERANCE)
    parameters = load_file(other / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert_close(tensor, parameters[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_two_ranks_do_what_one_process_does(worlds, alone, tmp_path):
    run = tmp_path / "run"
    on_ranks(worlds, 2, *OPTIONS, "--output", str(run))
    assert_same_run(run, alone)
    assert {p.name for p in run.iterdir()} == {p.name for p in alone.iterdir()}
    lines, others = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (run, alone)
    )
    for found, expected in zip(lines, others, strict=True):
        assert list(found) == list(expected)
        if found["kind"] == "epoch":
            assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)


def with_own_clock(*arguments):
    """A command on ranks whose clocks disagree on whether a plain network takes little time."""
    with patch("marglik.application.runs.train.CHEAP_SECONDS", 1e9 if dist.get_rank() == 0 else -1):
        with patch("marglik.application.runs.train.CHEAP_SHARE", 0):
            return command(*arguments)


def test_the_first_rank_decides_whether_a_plain_network_is_cheap(worlds, tmp_path):
    """If the others did not follow, it would wait for them."""
    ranks = worlds.all(2, f"{__name__}:with_own_clock", *OPTIONS, "--output", str(tmp_path))
    assert [status for status, *_ in ranks] == [0, 0], ranks
    assert "plain" in results_of(tmp_path).networks


def test_fewer_examples_than_ranks_in_a_batch_end(worlds, tmp_path):
    wrong = [*OPTIONS, "--output", str(tmp_path / "run"), "--batch_size", "1"]
    for status, _, err in worlds.all(2, f"{HERE}:command", *wrong):
        assert status == 2 and "Use batches of at least 2 examples" in err
    assert not (tmp_path / "run").exists()


NET = """
import os
from marglik.models import MLP

class Net(MLP):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if Net.calls == 40 and os.environ.get("RANK") == "1" and not os.path.exists("mended"):
            os.kill(os.getpid(), 9)
        return super().forward(x)
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OWN = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[4])}


@pytest.mark.slow
def test_two_nodes_do_to_the_bit_what_two_ranks_of_one_do(worlds, tmp_path):
    """As users call it: each node's torchrun starts one rank, and they meet at an address."""
    on_ranks(worlds, 2, *OPTIONS, "--output", str(tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    node = [*torchrun, "-m", "--", "marglik", *OPTIONS, "--output", str(tmp_path / "two")]
    nodes = [subprocess.Popen(node, cwd=tmp_path, env=os.environ | OWN) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0]
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    assert_near(two, one, tolerance=0)
    found, expected = (to_json(results_of(tmp_path / run)) for run in ("two", "one"))
    assert [found[key] for key in ("evidence", "weight_decay")] == [
        expected[key] for key in ("evidence", "weight_decay")
    ]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_which_resumes(alone, tmp_path):
    """As users call it: torchrun ends the other rank, and one process goes on."""
    (tmp_path / "net.py").write_text(NET)
    options = ["net.Net" if option == "marglik.models.MLP" else option for option in OPTIONS]
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    train = ["marglik", *options, "--output", str(tmp_path / "run")]
    start = {"cwd": tmp_path, "env": os.environ | OWN, "capture_output": True, "text": True}
    failed = subprocess.run([*torchrun, "-m", "--", *train], **start)
    assert failed.returncode != 0 and "Signal 9 (SIGKILL)" in failed.stderr, failed.stderr
    (tmp_path / "mended").touch()
    subprocess.run([sys.executable, "-m", *train, "--resume"], **start, check=True)
    assert_same_run(tmp_path / "run", alone)
