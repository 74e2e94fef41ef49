"""What the command line's options are made of: presets, fields of the configs, completion."""

import inspect
import json
from argparse import Action
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser, DefaultHelpFormatter

from marglik.storage.provenance import Provenance

__all__ = [
    "SHELLS",
    "HelpFormatter",
    "PresetOrFile",
    "add_config",
    "add_fields",
    "completion_action",
    "preset_names",
    "provenance_of",
    "taken",
    "whole_names",
]

SHELLS = ("bash", "zsh", "fish")
FILES = ("path", "checkpoint", "output")
FOLDERS = ("folders",)
"""Arguments of the commands that take files or folders, and those that take folders."""


def preset_names() -> list[str]:
    """The presets, which --config accepts by name."""
    return sorted(
        Path(p.name).stem for p in files("marglik.presets").iterdir() if ".yaml" in p.name
    )


def add_config(parser: ArgumentParser) -> None:
    """Add the option --config."""
    names = ", ".join(preset_names())
    parser.add_argument(
        "--config",
        action=PresetOrFile,
        help=f"YAML file of options, or the name of a preset: {names}.",
    )
    for action in parser._actions:  # jsonargparse's --print_config has a backspace in it
        if isinstance(action.metavar, str):
            action.metavar = action.metavar.replace("\b", "")


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
            super().__call__(parser, cfg, values, option_string)
        # Text of another encoding; the loader's own errors, which name no file: of tags that do not
        # fit, of 59:59:..., which is base 60.
        except (ValueError, OverflowError) as error:
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


def add_fields(
    parser: ArgumentParser, group: Any, config: type, prefix: str, names: Collection[str]
) -> None:
    """Add fields of a dataclass to a group of options, with their help from its docstring.

    Args:
        parser: the command's parser.
        group: the group, or the parser itself.
        config: the dataclass.
        prefix: the name of the dataclass among the options, with a dot; empty if its fields are
            options of their own, whose booleans then are --name and --no_name.
        names: the fields; others keep their defaults, and can be set from Python alone.
    """
    hints, help_of = get_type_hints(config), _help_of(config)
    for field in fields(config):
        if field.name in names:
            kind: dict[str, Any] = {"type": hints[field.name]}
            if isinstance(field.default, bool) and not prefix:
                kind = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
            default = None if field.default is MISSING else field.default
            text = help_of[field.name]
            group.add_argument(f"--{prefix}{field.name}", default=default, help=text, **kind)


def _help_of(config: Any) -> dict[str, str]:
    parents = [base for base in inspect.getmro(config) if base.__doc__]
    found: dict[str, str] = {}
    for base in reversed(parents):
        for param in parse_docstring(base.__doc__ or "").params:
            found[param.arg_name] = " ".join((param.description or "").split())
    return found


def taken(arguments: dict[str, Any], config: type[Any], prefix: str = "") -> Any:
    """The dataclass that the options of `add_fields` make; they are removed from ``arguments``."""
    if prefix:
        return config(**arguments.pop(prefix, {}))
    names = [field.name for field in fields(config) if field.name in arguments]
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


def completion_action(make_parser: Callable[[], ArgumentParser]) -> type[Action]:
    """The action of --completion, which prints a shell's script and ends.

    Args:
        make_parser: returns the parser with the options of all commands; called when the script is
            needed, since it takes seconds.
    """

    class PrintCompletion(Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            print(_completion_script(make_parser(), values))
            parser.exit(0)

    return PrintCompletion


def _completion_script(parser: ArgumentParser, shell: str) -> str:
    """The script by shtab, through jsonargparse, which knows what each option takes."""
    if find_spec("shtab") is None:
        raise ValueError(
            "--completion needs the package shtab, which is not installed: "
            "pip install 'marglik[completion]'."
        )
    import shtab

    commands: Any = parser._subcommands_action
    for command in commands._name_parser_map.values():
        for action in command._actions:
            if action.dest in FILES:
                action.complete = shtab.FILE
            elif action.dest in FOLDERS:
                action.complete = shtab.DIRECTORY
            elif names := _class_names(getattr(action, "_typehint", None) or action.type):
                # Otherwise jsonargparse would search all installed packages for subclasses of
                # torch.nn.Module.
                action.choices = names
    return parser.get_completion_script(f"shtab-{shell}")


def _class_names(hint: Any) -> list[str]:
    """The short names of our networks and data sources of a type; empty for other types."""
    from marglik import data, models

    bases = tuple(one for one in get_args(hint) or (hint,) if inspect.isclass(one))
    return [
        name
        for module in (models, data)
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name))
        and issubclass(found, bases)
        and not inspect.isabstract(found)
    ]
