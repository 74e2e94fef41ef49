"""Options of runs: which differ between runs, and labels of runs made from these."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "differing", "flatten", "run_labels"]

MISSING = "(not set)"
"""Text for an option that a run does not have, but another has."""

WITHOUT_EFFECT = {"output", "overwrite", "progress", "tensorboard", "config"}
"""Options that do not affect the numbers of a run."""
MOST_IN_LABEL = 3
LONGEST_LABEL = 48


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as a flat mapping with dotted names; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that differ between runs, in order of their first appearance.

    An option that a run lacks counts as null: options that are not set are null.
    """
    names = dict.fromkeys(name for one in options for name in one)
    return [
        name
        for name in names
        if name not in WITHOUT_EFFECT and len({repr(one.get(name)) for one in options}) > 1
    ]


def run_labels(folders: Sequence[Path], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each run: the options in which it differs, or else its folder.

    An option with a word as its value is shown by the value ("expand", "reduce"), others with their
    name ("seed 1"). Folders are used if more than three options differ, or if two runs would get
    the same label.
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
    """The names without model.init_args.* if model.class_path differs: the class says enough."""
    classes = [name.removesuffix("class_path") for name in names if name.endswith(".class_path")]
    return [name for name in names if not any(name.startswith(f"{c}init_args.") for c in classes)]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted name, or the whole name if two would be the same."""
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
