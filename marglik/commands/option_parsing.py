"""Options that several commands share: presets, and the fields of a dataclass as options."""

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
    """The presets, which --config accepts by name."""
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
                f"--config {values or repr('')}: no such file or preset; the presets are "
                f"{', '.join(preset_names())}."
            )
        try:
            text = Path(values).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--config {values}: not a text file ({error}); it must be a YAML file of options."
            ) from error
        try:
            check_yaml(text)
            super().__call__(parser, cfg, values, option_string)
        except (
            ValueError,
            OverflowError,
        ) as error:  # the loader's, of tags that do not fit, has no name of a file
            raise ValueError(
                f"--config takes a YAML file with a mapping of options; {values} is refused: "
                f"{error}."
            ) from error


class HelpFormatter(DefaultHelpFormatter):
    """Help without the list of the hundreds of subclasses of torch.nn.Module.

    They are not searched for either: that would import packages that happen to be installed, such
    as transformers, and take tens of seconds.
    """

    def _get_help_string(self, action: Any) -> str:
        # Compared as text, since importing torch takes seconds.
        if "torch.nn.modules.module.Module" in str(getattr(action, "_typehint", "")):
            action.extra_help = str  # a function that returns an empty text
        return super()._get_help_string(action)


def whole_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with --model NAME replaced by the path of our class of that name, if any.

    jsonargparse finds imported classes by their short names itself, but torchvision has an MLP,
    too, which makes the name ambiguous.
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
    """Add the fields of a dataclass as options; booleans as --name and --no_name."""
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
    """Make a dataclass from the options of `add_fields`, which are removed from ``arguments``."""
    names = [field.name for field in fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: arguments.pop(name) for name in names})


def provenance_of(parser: ArgumentParser, options: Any) -> Provenance:
    """The options as YAML, the preset, and how to build network and data.

    Removes --config from the options: its content is among them already.
    """
    shipped = {str(files("marglik.presets") / f"{name}.yaml"): name for name in preset_names()}
    given = [shipped.get(str(path)) for path in options.pop("config", None) or ()]
    preset = ", ".join(name for name in given if name) or None
    plain = json.loads(parser.dump(options, format="json_compact"))
    return Provenance(parser.dump(options), plain.get("model"), plain.get("data"), preset)
