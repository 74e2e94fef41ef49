"""A small data set on disk."""

import pytest

from tests.marglik.data.image_helpers import image_files, write_folder


@pytest.fixture
def pets(tmp_path):
    """The folder of a small data set."""
    return write_folder(tmp_path / "pets", image_files())
