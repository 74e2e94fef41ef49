"""What tests of tiny networks share."""

import pytest

from tests.marglik import threads


@pytest.fixture(scope="module")
def one_thread():
    """One thread for all tests of a file that asks for it (``pytest.mark.usefixtures``)."""
    with threads.one_thread():
        yield
