"""The command `marglik`: the options of its four commands, and the call of what they do.

Options are fields of dataclasses, whose docstrings are their help, read by jsonargparse. What a
command needs is imported when it is asked for, since torch takes seconds.
"""

import inspect
import json
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from marglik.runs.printing import progress_lines
from marglik.storage.provenance import Provenance

try:  # not `kfac_backend.extras.extra`, whose package imports torch
    from docstring_parser import parse as parse_docstring
    from jsonargparse import (
        ActionConfigFile,
        ActionYesNo,
        ArgumentError,
        ArgumentParser,
        DefaultHelpFormatter,
    )
except ModuleNotFoundError as error:  # in one line, also for the command that was installed
    sys.exit(f"marglik: {error.name} is not installed: pip install 'marglik[command]'.")

COMMANDS = {
    "train": "train on images, sequences, graphs, tensors; learn the weight decays",
    "fit": "fit a posterior to a network that was trained elsewhere",
    "evaluate": "compute metrics on test and out-of-distribution data",
    "report": "write a page about one run, or several side by side",
}
ARGUMENTS = {"evaluate": "FOLDER [OPTIONS]", "report": "FOLDERS [OPTIONS]"}
DESCRIPTION = (
    "Learn a weight decay per layer while the network trains, and get calibrated predictions "
    "afterwards."
)
FUNCTIONS = {
    "train": "marglik.runs.train.train",
    "fit": "marglik.runs.fit.fit",
    "evaluate": "marglik.runs.evaluate.evaluate_run",
    "report": "marglik.report.write_report",
}
FIRST_STEP = "marglik train --config digits"
RESUME = "The same command with --resume continues from its last checkpoint."

LONGEST = 500
"""Most characters of an error of the parser, which may quote a whole file."""

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Environment variable: 1 shows the traceback of errors that otherwise give a one-line message."""

# Title -> options; what matters first comes first. "prior.steps" is the field of the config
# that is the argument "prior" of `train`; a name without a dot is a field of the argument "run".
TRAIN = {
    "the run": (
        "epochs", "batch_size", "output", "resume", "overwrite", "members", "baseline",
        "optimizer.name", "optimizer.lr", "prior.weight_decay",
    ),
    "training": ("augmentation", "held_out", "seed", "optimizer.damping"),
    "how the weight decays are learned": (
        "prior.structure", "prior.every", "prior.burn_in", "prior.steps", "prior.method",
        "prior.average", "prior.keep", "prior.curvature_from",
    ),
    "the curvature": (
        "curvature.kfac_approx", "curvature.fisher", "curvature.batch_size",
        "curvature.unsupported", "curvature.backward_precision",
    ),
    "predictions": ("predictive.method",),
    "the machine": (
        "accelerator", "precision", "compile", "progress",
    ),
}  # fmt: skip
BRIEF = ("the run", "training", "predictions")
"""The groups that --help shows; --help all shows all, with what each option does in full."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    The status is 0 for success, 2 for bad input, and 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Before parsing, since only this command's options are added to the parser: those of the others
    # would take seconds to import.
    command = next((a for a in arguments if a in COMMANDS), None)
    # Last in the search path, so that no file here can shadow an installed module: classes of
    # models and data may be in the working directory, as they may with ``python -m``.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not arguments:
        _parsers(None)[0].print_help(sys.stderr)
        return 2  # as for any other incomplete command line
    way_out = f" {RESUME}" if command == "train" else ""
    try:
        _run(command, arguments)
        return 0
    except KeyboardInterrupt:
        _print_error(f"interrupted.{way_out}")
        return 130
    except ArgumentError as error:
        said = " ".join(str(error).split()).rstrip(".")
        said = said if len(said) <= LONGEST else f"{said[:LONGEST]}..."
        of_class = re.search(r"key \"(model|data|ood)\": .* class_path '(?:.*?)(\w+)'", said)
        asked = "--{}.help {}".format(*of_class.groups()) if of_class else "--help"
        _print_error(f"error: {said}. See marglik{f' {command}' if command else ''} {asked}.")
        return 2
    except Exception as error:
        from kfac_backend.files import DiskFullError  # late: imports torch
        from kfac_backend.ranks import RankError

        # Errors with a message that is written for users, who can act on it.
        named = (
            ValueError, TypeError, OSError, ArithmeticError, NotImplementedError, RankError,
            ModuleNotFoundError,
        )  # fmt: skip
        if not isinstance(error, named) or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        # A full disk ends good work, which can go on.
        way_out = way_out if isinstance(error, DiskFullError) else ""
        _print_error(f"error: {error}{way_out}")
        return 2


def _run(command: str | None, arguments: list[str]) -> None:
    brief = bool({"-h", "--help"} & {*arguments}) and "all" not in arguments and command == "train"
    parser, own = _parsers(command, brief)
    options: Any = parser.parse_args(_whole_names(arguments) if command else arguments)
    if command is None:  # parse_args leaves only for --help and --version
        raise ValueError(f"Pass a command: {', '.join(COMMANDS)}.")
    # tqdm hides its bars where stderr is a file or a pipe, so lines take their place.
    progress = options[command].get("progress", False)
    lines = progress and not sys.stderr.isatty() and not _is_another_rank()
    with progress_lines() if lines else nullcontext():
        _call(command, own[command], options[command])


def _print_error(message: str) -> None:
    which = f"rank {os.environ['RANK']}: " if _is_another_rank() else ""
    print(f"marglik: {which}{' '.join(message.split())}", file=sys.stderr)


def _parsers(
    command: str | None, brief: bool = False
) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of marglik, and those of its commands, of which one has its options.

    A ``brief`` one is for its help alone, see `BRIEF`.
    """
    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description=DESCRIPTION,
        epilog=f"To begin, in seconds: {FIRST_STEP}",
        exit_on_error=False,
        # The commands' parsers inherit it.
        formatter_class=BriefFormatter if brief else HelpFormatter,
    )
    commands = parser.add_subcommands()
    own = {}
    for name, summary in COMMANDS.items():
        own[name] = ArgumentParser(
            usage=f"marglik {name} {ARGUMENTS.get(name, '[OPTIONS]')}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"All options in full: marglik {name} --help all" if brief else None,
        )
        own[name].exit_on_error = False
        if name == command:
            _add_options(own[name], name, brief)
        commands.add_subcommand(name, own[name], help=summary)
    return parser, own


# The commands: their options, and what they do


def _function(command: str) -> Callable[..., Any]:
    """What a command calls; imported late, since torch takes seconds."""
    module, _, name = FUNCTIONS[command].rpartition(".")
    return getattr(import_module(module), name)


def _add_options(parser: ArgumentParser, command: str, brief: bool) -> None:
    """The arguments of the command's function, and those fields of its configs that are options."""
    if command == "report":
        text = "Folders that marglik train, fit or evaluate has written; several are compared."
        parser.add_argument("folders", nargs="+", type=str, help=text)
        text = "File to write the page to; null writes report.html into the first folder."
        parser.add_argument("--output", type=str | None, default=None, help=text)
        return
    _add_config(parser)
    function = _function(command)
    if command != "train":
        positional = command == "evaluate"
        parser.add_function_arguments(function, as_positional=positional, skip={"provenance"})
        return
    configs, groups = _configs(function), TRAIN
    skip: Any = {*configs, "run", "provenance"}
    parser.add_function_arguments(function, as_positional=False, skip=skip)
    if brief:
        groups = {title: names for title, names in TRAIN.items() if title in BRIEF}
        for action in parser._actions:
            if action.dest == "print_config" or str(action.dest).endswith(".help"):
                action.help = SUPPRESS
    _add_groups(parser, groups, configs)


def _call(command: str, parser: ArgumentParser, options: Any) -> None:
    """Do what a command does; write the page about its run, and print its results."""
    from marglik.report import write_report
    from marglik.runs.printing import print_evaluation, print_results

    if command == "report":
        print(f"Written to {write_report(options.folders, options.output)}")
        return
    import torch

    from marglik.runs.config import check_seed

    if command != "evaluate":
        _fill_in_sizes(options)
    provenance = _provenance(parser, options)
    # Before `instantiate`, which draws the model's initial parameters.
    check_seed(options.seed)
    torch.manual_seed(options.seed)
    function, arguments = _function(command), parser.instantiate(options).as_dict()
    if command == "train":
        arguments = _with_configs(arguments, _configs(function))
    if command != "evaluate":
        arguments["provenance"] = provenance
    results = function(**arguments)
    if not _is_another_rank():
        show = print_results if command == "train" else print_evaluation
        show(results, write_report([results["output"]]))


# How options are made of dataclasses, and files of options are read


def preset_names() -> list[str]:
    """The presets, which --config accepts by name."""
    return sorted(
        Path(p.name).stem for p in files("marglik.presets").iterdir() if ".yaml" in p.name
    )


def _add_config(parser: ArgumentParser) -> None:
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
        super().__call__(parser, cfg, values, option_string)


def _whole_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with --model NAME as the path of our class: torchvision has an MLP, too."""
    from marglik import models

    found: list[str] = []
    for argument in arguments:
        name = argument.removeprefix("--model=")
        follows = name != argument or found[-1:] == ["--model"]
        is_ours = follows and name in models.__all__
        found.append(f"{argument[: -len(name)]}marglik.models.{name}" if is_ours else argument)
    return found


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


class BriefFormatter(HelpFormatter):
    """The first sentence about each option, and its default."""

    def _get_help_string(self, action: Any) -> str:
        text = (action.help or "").split(". ")[0].rstrip(".")
        default = "" if action.default in (None, SUPPRESS) else f" (default: {action.default})"
        return f"{text}{default}".replace("%", "%%")


def _configs(function: Callable[..., Any]) -> dict[str, type]:
    """What stands before the last dot of an option -> the dataclass that it is a field of.

    Nothing stands before the fields of the argument ``run``.
    """
    found: dict[str, type] = {}
    waiting = {
        name: hint for name, hint in get_type_hints(function).items() if name != "provenance"
    }
    while waiting:
        name, hint = waiting.popitem()
        if is_dataclass(hint):
            config: Any = hint
            found["" if name == "run" else name] = config
            waiting |= {f"{name}.{own}": of for own, of in get_type_hints(hint).items()}
    return found


def _add_groups(
    parser: ArgumentParser, groups: dict[str, tuple[str, ...]], configs: dict[str, type]
) -> None:
    """Add fields of dataclasses as options in groups, with their help from the docstrings.

    Args:
        parser: the command's.
        groups: title -> names of options. Fields that are not named keep their defaults, and can be
            set from Python alone.
        configs: see `_configs`. Booleans of the run, whose names have no dot, are --name and
            --no_name.
    """
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            prefix, _, own = name.rpartition(".")
            config = configs[prefix]
            default = next(field.default for field in fields(config) if field.name == own)
            kind: dict[str, Any] = {"type": get_type_hints(config)[own]}
            if kind["type"] in (bool, bool | None) and not prefix:
                kind = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
            group.add_argument(f"--{name}", default=default, help=_help_of(config)[own], **kind)


@cache
def _help_of(config: Any) -> dict[str, str]:
    """Field -> its help, from the docstrings of the dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(config)):
        for param in parse_docstring(base.__doc__ or "").params:
            found[param.arg_name] = " ".join((param.description or "").split())
    return found


def _with_configs(arguments: dict[str, Any], configs: dict[str, type[Any]]) -> dict[str, Any]:
    """A function's arguments: its options, with configs in place of their fields."""
    arguments = dict(arguments)
    run = {f.name: arguments.pop(f.name) for f in fields(configs[""]) if f.name in arguments}
    for prefix in sorted(configs, key=lambda name: -name.count(".")):  # the inner ones first
        if prefix:
            *outer, own = prefix.split(".")
            inside = arguments
            for name in outer:
                inside = inside[name]
            inside[own] = configs[prefix](**inside.get(own, {}))
    return arguments | {"run": configs[""](**run)}


def _provenance(parser: ArgumentParser, options: Any) -> Provenance:
    """The options as YAML, and how to build network and data.

    Removes --config from the options: its content is among them already.
    """
    options.pop("config", None)
    plain = json.loads(parser.dump(options, format="json_compact"))
    return Provenance(parser.dump(options), plain.get("model"), plain.get("data"))


def _fill_in_sizes(options: Any) -> None:
    """Give the network the sizes of the data where the options leave them at None."""
    from marglik.data import DataSource
    from marglik.runs.build import build_from_spec, sizes_of

    sizes = options.model.get("init_args") or {}
    names = ("in_features", "num_classes", "in_channels", "image_size")
    missing = [name for name in names if sizes.get(name, 0) is None]
    if missing:
        data = build_from_spec(DataSource, options.data.as_dict(), named=None)
        found = sizes_of(data.load())
        for name in missing:
            sizes[name] = found.get(name)


def _is_another_rank() -> bool:
    """Whether this process is a rank other than the first, as torchrun's environment says."""
    return os.environ.get("RANK", "0") != "0"


if __name__ == "__main__":
    sys.exit(main())
