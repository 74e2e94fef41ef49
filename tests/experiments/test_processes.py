"""Runs side by side: results, errors, threads."""

import logging
import os
import time
from typing import NamedTuple

import pytest
import torch

from experiments.processes import as_they_finish, default_jobs


def square(x):
    if x == 3:
        raise ValueError("three is refused")
    return x * x, torch.get_num_threads(), os.getpid()


def test_results_and_errors_come_with_their_tasks():
    found = dict(as_they_finish(square, [1, 3, 5], jobs=2))
    assert found[1][0] == 1
    assert found[5][0] == 25
    assert str(found[3]) == "three is refused"
    assert isinstance(found[3], ValueError)
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert found[1][1] == found[5][1] == threads
    assert len({found[1][2], found[5][2], os.getpid()}) == 3  # a process for each


@pytest.mark.parametrize(("device", "expected"), [("cpu", os.cpu_count()), ("cuda", 1)])
def test_default_number_of_jobs(device, expected):
    assert default_jobs(device) == expected


class Named(NamedTuple):
    name: str


def log(task):
    logging.getLogger("marglik.training.loop").info("at work")


def test_what_tasks_log_is_shown_with_their_names(capfd):
    dict(as_they_finish(log, [Named("first 100%"), Named("second")], jobs=2))
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["first 100%: at work", "second: at work"]


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
