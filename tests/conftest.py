"""What all tests share: a working directory of their own, random numbers, and the cores."""

import os

import pytest
import torch

from tests.worlds import Worlds


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Whatever a test writes without saying where (runs/, results/) stays out of the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def the_same_numbers_each_time():
    """A test that fails by chance, once in a thousand runs, tells nobody anything."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def worlds():
    """Ranks for tests, from one process that is started once."""
    found = Worlds()
    yield found
    found.close()


def pytest_collectstart(collector):
    """The same numbers in the tensors that a file of tests makes as it is imported."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(1)


def pytest_configure(config):
    """With several processes of tests (`-n auto`), each takes its share of the cores."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
