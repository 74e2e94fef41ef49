"""What a command prints: tables, paragraphs, a line for each step; imports nothing slow."""

import logging
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

__all__ = ["harmless_output", "print_paragraph", "print_table", "printable", "progress_lines"]

GAP = 3
"""Spaces between columns."""
NARROWEST_NAME = 16
"""Least width of the first column, whose names are shortened to fit."""
HEADER = 12
"""Width to which headers are wrapped, unless the cells of their column are wider."""
CURSOR_UP = "\x1b[A"
"""What tqdm writes, by itself, to get from one bar to the next."""


def printable(text: str) -> str:
    r"""The text with its control characters as ``\x1b``, except for line ends, tabs and returns.

    Names of files, classes and tensors come from outside. A terminal would carry out what is in
    them: change its title, colour or contents. Marks that reverse the direction of writing, and
    bytes of file names that are no characters, are written out, too.
    """
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's controls, formats, surrogates, separators
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in hidden and c not in "\n\r\t"
        else c
        for c in text
    )


class _Harmless:
    """A text stream through which only `printable` text gets; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        moves = not text.replace(CURSOR_UP, "").strip("\n")
        self._stream.write(text if moves else printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def harmless_output() -> Iterator[None]:
    """A context in which stdout and stderr print only what is `printable`.

    A closed one (``>&-``) is replaced by one that prints nothing.
    """
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                stream = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect(_Harmless(stream)))  # pyright: ignore[reportArgumentType]
        yield


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
        rows: a name, aligned left, then cells, aligned right. Names that leave no room for a cell
            lose their middle.
    """
    width = shutil.get_terminal_size((80, 24)).columns
    cells = [max(map(len, column), default=0) for _, *column in zip(headers, *rows, strict=True)]
    whole = sum(max(len(h), size) + GAP for h, size in zip(headers, cells, strict=True)) - GAP
    heads = [
        [header] if whole <= width else _wrapped(header, max(size, HEADER))
        for header, size in zip(headers, cells, strict=True)
    ]
    sizes = [max(size, *map(len, head)) for head, size in zip(heads, cells, strict=True)]
    sizes[0] = min(sizes[0], max(width - GAP - max(sizes[1:], default=0), NARROWEST_NAME))
    first, block = 1, 0
    while first < len(headers):
        last, used = first, sizes[0]
        while last < len(headers) and (last == first or used + GAP + sizes[last] <= width):
            used += GAP + sizes[last]
            last += 1
        if block:
            print()
        _print_block([0, *range(first, last)], sizes, heads, rows)
        first, block = last, block + 1


def _wrapped(header: str, width: int) -> list[str]:
    return textwrap.wrap(header, width, break_long_words=False) or [""]


def _print_block(
    columns: Sequence[int],
    sizes: Sequence[int],
    heads: Sequence[Sequence[str]],
    rows: Sequence[Sequence[str]],
) -> None:
    depth = max(len(heads[column]) for column in columns)
    lines = [[""] * (depth - len(heads[column])) + [*heads[column]] for column in columns]
    chosen = [[row[column] for column in columns] for row in rows]
    for name, *others in [*zip(*lines, strict=True), *chosen]:
        shown = [f"{_shortened(name, sizes[0]):<{sizes[0]}}"]
        shown += [f"{cell:>{sizes[c]}}" for c, cell in zip(columns[1:], others, strict=True)]
        print((" " * GAP).join(shown).rstrip())


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    end = (longest - 3) // 2
    return f"{name[: longest - 3 - end]}...{name[-end:]}"


def print_paragraph(text: str) -> None:
    """Print a paragraph: wrapped on a terminal, as a single line in files and pipes."""
    width = shutil.get_terminal_size((80, 24)).columns
    print(textwrap.fill(text, width) if sys.stdout.isatty() else text)
