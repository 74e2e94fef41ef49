"""What the tests of this folder share with those of marglik."""

from tests.marglik.conftest import one_thread

__all__ = ["one_thread"]
