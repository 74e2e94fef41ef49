"""A cache of its own for every test, and a small data set on disk."""

import pytest

from tests.marglik.data.image_helpers import image_files, write_archive, write_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or leaves anything in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path):
    """The folder of a small data set."""
    return write_folder(tmp_path / "pets", image_files())


@pytest.fixture(params=["folder", "archive"])
def source(request, tmp_path):
    """A function that writes a data set, as a folder or an archive, and returns its path."""
    if request.param == "folder":
        return lambda files: write_folder(tmp_path / "pets", files)
    return lambda files: write_archive(tmp_path / "pets.tar.gz", files)
