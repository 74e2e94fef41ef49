"""What tests of tiny networks share."""

import pytest

from tests.marglik import threads
from tests.marglik.worlds import Worlds


@pytest.fixture(scope="session")
def worlds():
    """Ranks for tests, from one process that is started once."""
    found = Worlds()
    yield found
    found.close()


@pytest.fixture(scope="module")
def one_thread():
    """One thread for all tests of a file that asks for it (``pytest.mark.usefixtures``)."""
    with threads.one_thread():
        yield
