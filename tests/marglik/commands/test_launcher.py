"""Ranks of one machine end together, soon, and with one message; here they are tiny programs."""

import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from marglik.commands import several_ranks
from marglik.commands.several_ranks import launch, leave_last_words

START = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
pid = Path(sys.argv[1]) / f"pid {rank}"
pid.with_name(f"begun {rank}").write_text(str(os.getpid()))
pid.with_name(f"begun {rank}").rename(pid)
while len(list(pid.parent.glob("pid *"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
def say(words):
    folder = os.environ["MARGLIK_LAST_WORDS"].partition(":")[2]
    (Path(folder) / str(rank)).write_text(words)
def wait():
    time.sleep(60)
"""
"""With which the programs begin; without torch's import, which takes seconds."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The same in seconds that a test has."""
    monkeypatch.setattr(several_ranks, "STOPPED", 1.0)
    monkeypatch.setattr(several_ranks, "GRACE", 1.0)


def program(folder, code, number=3):
    """What `launch` returns for ranks that run some code."""
    path = folder / "program.py"
    path.write_text(START + code)
    return launch([str(path), str(folder)], number)


def assert_all_gone(folder, number=3):
    for i in range(number):
        pid = int((folder / f"pid {i}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_are_told_what_torchrun_tells_them(tmp_path, capfd):
    code = """
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
assert [int(os.environ[name]) for name in names] == [rank, rank, 0, 2, 2]
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
found = [None] * 2
dist.all_gather_object(found, rank)
assert found == [0, 1]
dist.destroy_process_group()
if rank == 1:
    print("all are here")
"""
    assert program(tmp_path, code, 2) == 0
    said = capfd.readouterr().out
    if torch.__version__.startswith("2.9."):  # whose gloo speaks, too
        assert "all are here" in said.splitlines()
    else:
        assert said == "all are here\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_and_no_other_speaks(tmp_path, capfd, number):
    code = f"""
if rank == 1:
    os.kill(os.getpid(), signal.{number.name})
say("lost the others")
wait()
"""
    with pytest.raises(ChildProcessError, match=f"Rank 1 of 3 was ended by {number.name}: by the"):
        program(tmp_path, code)
    assert_all_gone(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="a system that does not tell")
def test_a_stopped_rank_is_named(tmp_path, capfd):
    code = """
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
wait()
"""
    start = time.monotonic()
    with pytest.raises(ChildProcessError, match="Rank 2 of 3 was stopped for 1 s"):
        program(tmp_path, code)
    assert time.monotonic() - start < 10
    assert_all_gone(tmp_path)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="a system that does not tell")
def test_a_rank_that_is_stopped_for_a_moment_goes_on(tmp_path):
    code = """
if rank == 2:
    if not os.fork():
        time.sleep(0.4)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    assert program(tmp_path, code) == 0


def test_the_first_words_are_printed_and_one_that_does_not_end_is_killed(tmp_path, capfd):
    """A rank that hangs may not hear of a request to end."""
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    wait()
if rank == 0:
    time.sleep(0.3)
say(f"marglik: error on rank {rank}: rank 1 has done nothing")
sys.exit(2)
"""
    start = time.monotonic()
    assert program(tmp_path, code) == 2
    assert time.monotonic() - start < 10
    assert_all_gone(tmp_path)
    assert capfd.readouterr().err == "marglik: error on rank 2: rank 1 has done nothing\n"


def test_a_rank_that_ends_without_a_word_is_named(tmp_path, capfd):
    """Its traceback stands on stderr; what others say of it does not."""
    code = """
if rank == 1:
    raise KeyError("a mistake")
time.sleep(0.3)
say("lost the others")
sys.exit(2)
"""
    with pytest.raises(ChildProcessError, match="Rank 1 of 3 ended with exit status 1"):
        program(tmp_path, code)
    said = capfd.readouterr().err
    assert "KeyError: 'a mistake'" in said and "lost the others" not in said


def test_one_rank_that_is_asked_to_end_ends_all(tmp_path, capfd):
    code = """
def end(number, _):
    say("marglik: ended by SIGTERM")
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
wait()
"""
    assert program(tmp_path, code) == 143
    assert capfd.readouterr().err == "marglik: ended by SIGTERM\n"
    assert_all_gone(tmp_path)


def test_an_interrupt_ends_all_ranks(tmp_path):
    def interrupt():
        while sum(1 for _ in tmp_path.glob("pid *")) < 3:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    # A process that a script has started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = Timer(0.1, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            program(tmp_path, "wait()")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert_all_gone(tmp_path)


def test_last_words_are_left_where_a_launcher_waits_for_them(tmp_path, monkeypatch):
    monkeypatch.delenv("MARGLIK_LAST_WORDS", raising=False)
    assert not leave_last_words("to nobody")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MARGLIK_LAST_WORDS", f"{os.getpid()}:{tmp_path}")  # which is no parent
    assert not leave_last_words("to nobody")
    monkeypatch.setenv("MARGLIK_LAST_WORDS", f"{os.getppid()}:{tmp_path}")
    assert leave_last_words("to the launcher")
    assert Path(tmp_path, "3").read_text() == "to the launcher"
