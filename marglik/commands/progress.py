"""What a command prints while it runs, a line for each step; it imports nothing slow."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["progress_lines"]


@contextmanager
def progress_lines(prefix: str = "") -> Iterator[None]:
    """Show what the package logs (epochs, updates, evaluations) on stderr, a line at a time.

    For where progress bars are hidden, as they are in files and pipes.

    Args:
        prefix: of each line, such as the run's name where several share stderr.
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
