"""YAML from untrusted sources, checked for its size when expanded, before it is loaded."""

import re
from typing import Any

import yaml

__all__ = ["check_yaml"]

DEEPEST, MOST = 100, 100_000
"""Deepest nesting, and most values with aliases expanded. Options need some hundreds of values."""

MOST_DIGITS = 4300
"""Of a whole number; Python refuses to convert longer ones."""


def check_yaml(text: str | bytes) -> None:
    """Raise a ValueError for YAML whose nesting, aliases or numbers are too large to be loaded.

    Eleven lines of nested aliases can expand to 9^11 values, and the C parser crashes at a hundred
    thousand open brackets. Of a long number Python would say how to allow it, and not where it is.
    Text that is not YAML passes: the parser that loads it complains.
    """
    sizes: dict[str, int] = {}
    stack: list[tuple[str | None, int]] = [(None, 0)]
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            _count(event, stack, sizes)
    except yaml.YAMLError:
        return


def _count(event: Any, stack: list[tuple[str | None, int]], sizes: dict[str, int]) -> None:
    """Count a parser event.

    Args:
        event: the event.
        stack: (anchor, number of values so far) of each open node.
        sizes: anchor -> number of values of each closed node.
    """
    if isinstance(event, yaml.CollectionStartEvent):
        stack.append((event.anchor, 1))
        if len(stack) > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        return
    if isinstance(event, yaml.CollectionEndEvent):
        anchor, more = stack.pop()
    elif isinstance(event, yaml.ScalarEvent):
        number = re.fullmatch("[-+]?([0-9][0-9_:]*)", event.value)  # 1:30 is 90 in YAML 1.1
        if number and len(number[1]) > MOST_DIGITS:
            raise ValueError(f"it has a number of {len(number[1]):,} digits")
        anchor, more = event.anchor, 1
    elif isinstance(event, yaml.AliasEvent):
        if event.anchor in [open_anchor for open_anchor, _ in stack]:
            raise ValueError(f"'*{event.anchor}' refers to a node that contains it")
        anchor, more = None, sizes.get(event.anchor or "", 1)
    else:
        return
    if anchor is not None:
        sizes[anchor] = more
    outer, before = stack[-1]
    stack[-1] = outer, before + more
    if before + more > MOST:
        raise ValueError(f"it expands to more than {MOST:,} values")
