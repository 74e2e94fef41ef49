"""Runs side by side: results, errors, threads."""

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from experiments.processes import as_they_finish, default_jobs


class Task(NamedTuple):
    name: str
    x: int | None
    """None: it waits until it is ended."""
    waits_in: Path | None = None


def square(task):
    logging.getLogger("marglik.training.loop").info("at work")
    if task.waits_in is not None:
        task.waits_in.write_text(str(os.getpid()))
        time.sleep(600)
    if task.x == 3:
        raise ValueError("three is refused")
    return task.x**2, torch.get_num_threads(), os.getpid()


def test_results_errors_and_logs_come_with_their_tasks_and_leaving_ends_the_others(tmp_path, capfd):
    first, wrong = Task("first 100%", 5), Task("wrong", 3)
    waits = Task("waits", None, tmp_path / "process")
    going = as_they_finish(square, [first, waits, wrong], jobs=2)
    found = dict(next(going) for _ in range(2))
    result, threads, process = found[first]
    assert result == 25
    assert threads == max(1, (os.cpu_count() or 1) // 2)
    assert str(found[wrong]) == "three is refused"
    assert isinstance(found[wrong], ValueError)
    while not (waits.waits_in.exists() and waits.waits_in.read_text()):
        time.sleep(0.1)
    other = int(waits.waits_in.read_text())
    assert len({process, other, os.getpid()}) == 3  # a process for each
    assert is_running(other)
    going.close()
    deadline = time.monotonic() + 20
    while is_running(other):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["first 100%: at work", "waits: at work", "wrong: at work"]


@pytest.mark.parametrize(("device", "expected"), [("cpu", os.cpu_count()), ("cuda", 1)])
def test_default_number_of_jobs(device, expected):
    assert default_jobs(device) == expected


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
