"""Options that several commands read: presets, and the fields of a dataclass."""

import json
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser, DefaultHelpFormatter

from marglik.storage.provenance import Provenance
from marglik.storage.yaml_text import check_yaml

__all__ = [
    "HelpFormatter",
    "PresetOrFile",
    "add_fields",
    "preset_names",
    "provenance_of",
    "take_fields",
    "whole_names",
]

Config = TypeVar("Config")


def preset_names() -> list[str]:
    """The names that --config takes besides paths."""
    return sorted(
        Path(p.name).stem for p in files("marglik.presets").iterdir() if ".yaml" in p.name
    )


class PresetOrFile(ActionConfigFile):
    """--config: a YAML file, or the name of a preset that the package ships."""

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Read the file, as jsonargparse's own action does."""
        if values in preset_names():
            values = str(files("marglik.presets") / f"{values}.yaml")
        elif not Path(values).is_file():
            raise FileNotFoundError(
                f"--config {values or repr('')}: no such file, nor a preset "
                f"({', '.join(preset_names())})."
            )
        try:
            text = Path(values).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--config {values}: not a text file ({error}); it must be a YAML file of options."
            ) from error
        try:
            check_yaml(text)
        except ValueError as error:
            raise ValueError(
                f"--config takes a YAML file with a mapping of options; as for {values}, {error}."
            ) from error
        super().__call__(parser, cfg, values, option_string)


class HelpFormatter(DefaultHelpFormatter):
    """Leaves out the hundreds of subclasses that torch.nn.Module has.

    They are not even looked for: that would import packages that happen to be installed, such as
    transformers, and take tens of seconds.
    """

    def _get_help_string(self, action: Any) -> str:
        # By its text, since torch itself takes seconds to import.
        if "torch.nn.modules.module.Module" in str(getattr(action, "_typehint", "")):
            action.extra_help = str  # the empty text
        return super()._get_help_string(action)


def whole_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with --model NAME as the class of `marglik.models`, where it has that name.

    jsonargparse knows classes by their short names, once they are imported; but torchvision has
    an MLP, too.
    """
    from marglik import models

    found = list(arguments)
    for i, argument in enumerate(found):
        option, equals, name = argument.partition("=")
        if option == "--model" and name in models.__all__:
            found[i] = f"{option}{equals}marglik.models.{name}"
        elif argument in models.__all__ and found[i - 1] == "--model":
            found[i] = f"marglik.models.{argument}"
    return found


def add_fields(parser: ArgumentParser, config: type, title: str) -> None:
    """A dataclass's fields as options of their own; truth values as --name and --no_name."""
    group = parser.add_argument_group(title)
    help_of = {p.arg_name: p.description for p in parse_docstring(config.__doc__ or "").params}
    for field in fields(config):
        if isinstance(field.default, bool):
            kind: dict[str, Any] = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
        else:
            kind = {"type": get_type_hints(config)[field.name]}
        description = " ".join((help_of[field.name] or "").split())
        group.add_argument(f"--{field.name}", default=field.default, help=description, **kind)


def take_fields(arguments: dict[str, Any], config: type[Config]) -> Config:
    """A dataclass from the options of `add_fields`, which are taken out of the arguments."""
    names = [field.name for field in fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: arguments.pop(name) for name in names})


def provenance_of(parser: ArgumentParser, options: Any) -> Provenance:
    """The options as they are written down, the preset, and how network and data are made.

    --config is taken out of the options, which have what it says.
    """
    shipped = {str(files("marglik.presets") / f"{name}.yaml"): name for name in preset_names()}
    given = [shipped.get(str(path)) for path in options.pop("config", None) or ()]
    preset = ", ".join(name for name in given if name) or None
    plain = json.loads(parser.dump(options, format="json_compact"))
    return Provenance(parser.dump(options), plain.get("model"), plain.get("data"), preset)
