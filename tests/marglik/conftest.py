"""What tests of tiny networks share, and a small run of the commands, made once."""

import shutil
from pathlib import Path

import pytest

from marglik.application.cli import main
from tests.marglik import threads
from tests.marglik.application.runs.command_line import DATA, MODEL, NOISE, QUIET, TRAIN


@pytest.fixture(scope="module")
def one_thread():
    """One thread for all tests of a file that asks for it (``pytest.mark.usefixtures``)."""
    with threads.one_thread():
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """What marglik train leaves, with a baseline; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    options = [*DATA, *MODEL, *NOISE, "--baseline", "--curvature.fisher", "mc"]
    with threads.one_thread():
        assert main([*TRAIN, *options, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def evaluated(trained, tmp_path_factory) -> Path:
    """The same, evaluated in all ways; not to be written to."""
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "evaluated")
    options = [*NOISE, *QUIET, "--methods", "[probit, mc]"]
    with threads.one_thread():
        assert main(["evaluate", str(folder), *options]) == 0
    return folder
