"""Tables and paragraphs, as wide as the terminal, or 80 columns in a file."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

__all__ = ["print_paragraph", "print_table"]

GAP = 3
"""Spaces between columns."""
NARROWEST_NAME = 16
"""Least width of the first column, whose names are shortened to fit."""
HEADER = 12
"""Width to which headers are wrapped, unless the cells of their column are wider."""


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
