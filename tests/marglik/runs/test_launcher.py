"""Ranks of one machine end together, soon, and with one message; here they are tiny programs."""

import json
import os
import signal
import time
from threading import Timer

import pytest

from marglik.runs import launch as several_ranks
from marglik.runs.launch import launch, leave_message

START = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
pid = Path(sys.argv[1]) / f"pid {rank}"
pid.with_name(f"begun {rank}").write_text(str(os.getpid()))
pid.with_name(f"begun {rank}").rename(pid)
while len(list(pid.parent.glob("pid *"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
def leave_message(words, is_consequence=False):  # as that of several_ranks
    if is_consequence:
        time.sleep(2)
    record = {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": record}))
def wait():
    time.sleep(60)
"""
"""With which the programs begin; without torch's import, which takes seconds."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(several_ranks, "GRACE", 2)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def program(folder, code, number=3):
    """Launch ranks that run some code."""
    path = folder / "program.py"
    path.write_text(START + code)
    try:
        launch([str(path), str(folder)], number)
    finally:
        for i in range(number):
            with pytest.raises(ProcessLookupError):  # none is left
                os.kill(int((folder / f"pid {i}").read_text()), 0)


def test_ranks_are_told_what_torchrun_tells_them(tmp_path, capfd):
    code = """
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
found = [None] * 2
dist.all_gather_object(found, int(os.environ["LOCAL_RANK"]))
assert found == [0, 1]
dist.destroy_process_group()
if rank == 1:
    print("all are here")
"""
    program(tmp_path, code, 2)
    assert "all are here" in capfd.readouterr().out


FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "Rank 1 of 3 was ended by SIGKILL"),
    "a segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    "an exception": ("raise KeyError('a mistake')", "Rank 1 of 3 ended with exit status 1"),
    "a message": ("leave_message('a mistake'); sys.exit(2)", "Rank 1 of 3: a mistake"),
    "asked to end": ("leave_message('ended by SIGTERM'); sys.exit(143)", "3: ended by SIGTERM"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_rank_that_failed_is_named_and_no_other_speaks(name, tmp_path, capfd):
    """One of the others hangs, and one says that it has lost a rank."""
    fault, words = FAULTS[name]
    code = f"""
if rank == 1:
    {fault}
if rank == 0:
    leave_message("lost the others", is_consequence=True)
    sys.exit(2)
wait()
"""
    start = time.monotonic()
    with pytest.raises(ChildProcessError, match=words):
        program(tmp_path, code)
    assert time.monotonic() - start < 20
    out, err = capfd.readouterr()
    assert out == "" and ("KeyError: 'a mistake'" in err) == (name == "an exception")
    assert "lost the others" not in err


def test_a_rank_that_lost_the_others_says_so_if_no_other_has_failed(tmp_path):
    code = """
if rank == 1:
    leave_message("lost the others", is_consequence=True)
    sys.exit(2)
wait()
"""
    with pytest.raises(ChildProcessError, match="Rank 1 of 3: lost the others"):
        program(tmp_path, code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(tmp_path, number):
    def interrupt():
        while sum(1 for _ in tmp_path.glob("pid *")) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    timer = Timer(0.1, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            program(tmp_path, "wait()")
    finally:
        timer.join()
    assert interrupted.value.args == (number,)


def test_a_message_is_left_only_for_torchrun(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not leave_message("to nobody")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    assert leave_message("to torchrun")
    record = json.loads((tmp_path / "error").read_text())["message"]
    assert record["message"] == "to torchrun" and int(record["extraInfo"]["timestamp"]) > 0
