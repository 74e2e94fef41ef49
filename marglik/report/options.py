"""A run's options, what differs between runs, and what to call a run by it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "differing", "flatten", "run_labels"]

MISSING = "(not set)"
"""Shown where a run does not have an option that another has."""

OF_NO_CONSEQUENCE = {"output", "overwrite", "progress", "tensorboard", "config"}
"""Options that change no number of a run."""
MOST_IN_LABEL = 3
LONGEST_LABEL = 48


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options under dotted names; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that are not the same in all runs, in order of their first appearance.

    Where a run lacks an option that is None in the others, they agree: null is what an option
    that was left alone is.
    """
    names = dict.fromkeys(name for one in options for name in one)
    return [
        name
        for name in names
        if name not in OF_NO_CONSEQUENCE and len({repr(one.get(name)) for one in options}) > 1
    ]


def run_labels(folders: Sequence[Path], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to call each run: by the options that it differs in, or else by its folder.

    One option of words is called by its value ("expand", "reduce"), others with their name
    ("seed 1"). Folders take over where more than three options differ, or where options leave two
    runs with one name.
    """
    names = _without_arguments_of_other_classes(differing(options), options)
    if 0 < len(names) <= MOST_IN_LABEL:
        short = _short_names(names)
        labels = [
            ", ".join(_label(short[name], one.get(name), name in one) for name in names)
            for one in options
        ]
        if len(set(labels)) == len(labels) and max(map(len, labels)) <= LONGEST_LABEL:
            return labels
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    return labels


def _without_arguments_of_other_classes(
    names: Sequence[str], options: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Without model.init_args.* where model.class_path differs, whose value says enough."""
    classes = [name.removesuffix("class_path") for name in names if name.endswith(".class_path")]
    return [name for name in names if not any(name.startswith(f"{c}init_args.") for c in classes)]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted name, or the whole where two would be the same."""
    last = {name: name.rsplit(".", 1)[-1] for name in names}
    counts = Counter(last.values())
    return {name: part if counts[part] == 1 else name for name, part in last.items()}


def _label(name: str, value: Any, is_set: bool) -> str:
    if not is_set:
        return f"{name} {MISSING}"
    if name.endswith("class_path"):
        return str(value).rsplit(".", 1)[-1]
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z].*", value):
        return value
    return f"{name} {'null' if value is None else value}"
