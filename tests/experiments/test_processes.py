"""Runs side by side: results, errors, threads."""

import logging
import os
import time
from typing import NamedTuple

import pytest
import torch

from experiments.processes import as_they_finish, default_jobs


class Square(NamedTuple):
    name: str
    x: int


def square(task):
    logging.getLogger("marglik.training.loop").info("at work")
    if task.x == 3:
        raise ValueError("three is refused")
    return task.x**2, torch.get_num_threads(), os.getpid()


def test_results_errors_and_logs_come_with_their_tasks(capfd):
    first, wrong, last = Square("first 100%", 1), Square("wrong", 3), Square("last", 5)
    found = dict(as_they_finish(square, [first, wrong, last], jobs=2))
    assert found[first][0] == 1
    assert found[last][0] == 25
    assert str(found[wrong]) == "three is refused"
    assert isinstance(found[wrong], ValueError)
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert found[first][1] == found[last][1] == threads
    assert len({found[first][2], found[last][2], os.getpid()}) == 3  # a process for each
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["first 100%: at work", "last: at work", "wrong: at work"]


@pytest.mark.parametrize(("device", "expected"), [("cpu", os.cpu_count()), ("cuda", 1)])
def test_default_number_of_jobs(device, expected):
    assert default_jobs(device) == expected


def test_leaving_ends_the_processes(tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    going = as_they_finish(begin_or_wait, [None, *paths], jobs=3)
    assert next(going)[1] == "began"
    while not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.1)
    going.close()
    deadline = time.monotonic() + 20
    while any(is_running(int(path.read_text())) for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begin_or_wait(path):
    if path is None:
        return "began"
    path.write_text(str(os.getpid()))
    time.sleep(600)
    return "ended"


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
