"""Lines that a command prints while it runs, one for each step; imports nothing slow."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["progress_lines"]


@contextmanager
def progress_lines(prefix: str = "") -> Iterator[None]:
    """A context that prints what the package logs (epochs, updates, evaluations) to stderr.

    For files and pipes, where progress bars are hidden.

    Args:
        prefix: start of each line, such as the name of the run if several share stderr.
    """
    logger = logging.getLogger("marglik")
    handler = logging.StreamHandler(sys.stderr)  # flushes after each line
    handler.setFormatter(logging.Formatter(prefix.replace("%", "%%") + "%(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
