"""Record the options, classes and data of a run, so that it can be repeated."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Provenance:
    """Options of a run, and the specifications of its network and data."""

    options: str | None = None
    """All options as YAML."""
    model: dict[str, Any] | None = None
    """Specification of the network: ``{"class_path": ..., "init_args": {...}}``."""
    data: dict[str, Any] | None = None
    """Specification of the data: ``{"class_path": ..., "init_args": {...}}``."""


def check_yaml(text: str) -> None:
    """Raise a ValueError for YAML with aliases: a few lines with aliases may expand to gigabytes.

    Raises:
        ValueError: the text has aliases.
        yaml.YAMLError: the text is not YAML.
    """
    import yaml

    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has YAML aliases (*name), which are not supported; write them out")
