"""YAML of any origin, found to be no larger than it looks before anything is made of it."""

from typing import Any

import yaml

__all__ = ["check_yaml"]

DEEPEST, MOST = 100, 100_000
"""Nesting, and values with each alias counted as what it stands for. Options need some hundreds."""


def check_yaml(text: str | bytes) -> None:
    """Raise a ValueError for YAML whose nesting or aliases would take all memory or the stack.

    Eleven lines of aliases stand for nine to the eleventh values; YAML's fast parser crashes at a
    hundred thousand brackets. What is no YAML at all is left to whoever reads it.
    """
    sizes: dict[str, int] = {}
    stack: list[tuple[str | None, int]] = [(None, 0)]
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            _count(event, stack, sizes)
    except yaml.YAMLError:
        return


def _count(event: Any, stack: list[tuple[str | None, int]], sizes: dict[str, int]) -> None:
    """Add an event to what was counted: for each open node its anchor and the values in it."""
    if isinstance(event, yaml.CollectionStartEvent):
        stack.append((event.anchor, 1))
        if len(stack) > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        return
    if isinstance(event, yaml.CollectionEndEvent):
        anchor, more = stack.pop()
    elif isinstance(event, yaml.ScalarEvent):
        anchor, more = event.anchor, 1
    elif isinstance(event, yaml.AliasEvent):
        if event.anchor in [open_anchor for open_anchor, _ in stack]:
            raise ValueError(f"'*{event.anchor}' stands for something that it lies in")
        anchor, more = None, sizes.get(event.anchor or "", 1)
    else:
        return
    if anchor is not None:
        sizes[anchor] = more
    outer, before = stack[-1]
    stack[-1] = outer, before + more
    if before + more > MOST:
        raise ValueError(f"it stands for more than {MOST:,} values")
