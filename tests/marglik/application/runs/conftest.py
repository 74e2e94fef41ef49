"""Small runs for the commands' tests, each made once."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread):
    """Each file's tests, since a fixture of the package's would last until the last test of all."""


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the trained run."""
    return shutil.copytree(trained, tmp_path / "run")
