"""What a command prints: tables, paragraphs, a line for each step; imports nothing slow."""

import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["print_paragraph", "print_table", "progress_lines"]

GAP = "   "
"""Between columns."""
HEADER = 12
"""Width to which headers are wrapped, unless the cells of their column are wider."""
NARROWEST_NAME = 16
"""Least width of the names of rows, which are shortened to leave room for a column."""


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


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns that do not fit follow below in another block, with the row names.

    Args:
        headers: headers of all columns, that of the row names first; wrapped if the table would
            otherwise be too wide.
        rows: a name, aligned left, then cells, aligned right. Long names lose their middle.
    """
    width = shutil.get_terminal_size((80, 24)).columns
    (title, *names), *columns = zip(headers, *rows, strict=True)
    whole = sum(max(map(len, column)) + len(GAP) for column in [(title, *names), *columns])
    lines: list[list[str]] = []  # of each column but the first: its header, wrapped, and its cells
    for header, *cells in columns:
        size = max(HEADER if whole > width else len(header), *map(len, cells))
        lines.append([*textwrap.wrap(header, size, break_long_words=False), *cells])
    depth = max(map(len, lines))
    lines = [[*[""] * (depth - len(column)), *column] for column in lines]
    sizes = [max(map(len, column)) for column in lines]
    longest = max(NARROWEST_NAME, width - len(GAP) - max(sizes))
    names = [_shortened(name, longest) for name in names]
    lines.insert(0, [*[""] * (depth - len(rows) - 1), title, *names])
    sizes.insert(0, max(map(len, lines[0])))
    first = 1
    while first < len(lines):
        # As many columns as fit beside the names, but one at least.
        last, used = first + 1, sizes[0] + len(GAP) + sizes[first]
        while last < len(lines) and used + len(GAP) + sizes[last] <= width:
            used += len(GAP) + sizes[last]
            last += 1
        for name, *cells in zip(lines[0], *lines[first:last], strict=True):
            shown = [f"{cell:>{size}}" for cell, size in zip(cells, sizes[first:last], strict=True)]
            print(GAP.join([f"{name:<{sizes[0]}}", *shown]).rstrip())
        first = last
        if first < len(lines):
            print()


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    end = (longest - 3) // 2
    return f"{name[: longest - 3 - end]}...{name[-end:]}"


def print_paragraph(text: str) -> None:
    """Print a paragraph: wrapped on a terminal, as a single line in files and pipes."""
    width = shutil.get_terminal_size((80, 24)).columns
    print(textwrap.fill(text, width) if sys.stdout.isatty() else text)
