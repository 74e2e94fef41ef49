"""Parse the options of the six commands of `marglik`, and call the functions of the commands.

Each command is a function. jsonargparse derives options from its arguments and help texts from its
docstring. The modules of a command are imported only for this command, because importing torch
takes seconds.
"""

import json
import os
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from importlib.resources import files
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

from marglik.application.provenance import Provenance, check_yaml
from marglik.application.runs.printing import printable, progress_lines, say

try:  # not `kfac_backend.extras.extra`, whose package imports torch
    from docstring_parser import parse as parse_docstring
    from jsonargparse import (
        ActionConfigFile,
        ActionYesNo,
        ArgumentError,
        ArgumentParser,
        DefaultHelpFormatter,
        get_loader,
        set_loader,
    )
    from yaml import YAMLError
except ModuleNotFoundError as error:  # print one line instead of a traceback
    sys.exit(f"marglik: {error.name} is not installed: pip install 'marglik[command]'.")

COMMANDS = {
    "train": "train a network on images, tables, sequences, graphs or tensors",
    "fit": "fit a posterior to a network that was trained elsewhere",
    "evaluate": "compute metrics on test data and out-of-distribution data",
    "predict": "predict the targets of new rows of a table, in the unit of the target",
    "acquire": "choose the rows of a table to label next",
    "report": "write an HTML report about one run, or a comparison of several runs",
}
ARGUMENTS = {
    "evaluate": "FOLDER [OPTIONS]",
    "predict": "FOLDER ROWS -o FILE [OPTIONS]",
    "acquire": "FOLDER POOL -n NUMBER -o FILE [OPTIONS]",
    "report": "FOLDERS [OPTIONS]",
}
DESCRIPTION = (
    "Train a network, learn one weight decay per parameter tensor during the training, and get "
    "calibrated predictions."
)
FUNCTIONS = {
    "train": "marglik.application.runs.train:train",
    "fit": "marglik.application.runs.fit:fit",
    "evaluate": "marglik.application.runs.evaluate:evaluate_run",
    "predict": "marglik.application.runs.predict:predict_rows",
    "acquire": "marglik.application.runs.predict:acquire_rows",
}
"""Function of each command, imported on demand, because importing torch takes seconds."""
FIRST_STEP = "marglik train --config digits"
RESUME = "The same command with --resume continues from its last checkpoint, if there is one."

LONGEST = 500
"""Maximum number of characters of a parser error, which may quote a whole file."""

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Environment variable. With the value 1, errors print a traceback instead of one line."""

FROM_PYTHON_ALONE: dict[str, Any] = {
    "prior": {"epochs", "updates"},
    "curvature": {"mc_samples", "diagonal_above", "expand_scaling"},
    "predictive": {"samples", "networks", "batch_size", "calibration"},
}
"""Argument of `train` -> fields that are not options of the command."""
PRINT_CONFIG = (
    "Print all options and their values as YAML, and exit. skip_default omits options at their "
    "default."
)
"""Help of --print_config, instead of jsonargparse's text, which has a backspace in it."""
NOT_IN_BRIEF = (
    "print_config", "prior.", "curvature.", "accelerator", "precision", "compile", "progress",
)  # fmt: skip
"""Prefixes of options that --help omits. --help all shows all options with their whole texts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 for success, 2 for bad input, and 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in ("stdout", "stderr"):  # a stream is None if it is closed, for example by 2>&-
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))
    # Find the command before parsing, and add only its options to the parser. Importing the modules
    # of the other commands would take seconds.
    command = next((a for a in arguments if a in COMMANDS), None)
    # Classes of models and data may be in the working directory, as with ``python -m``. It is last
    # in the search path, so that no file in it can shadow an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not arguments:
        _parsers(None)[0].print_help(sys.stderr)
        return 2  # the status of incomplete command lines
    way_out = f" {RESUME}" if command == "train" else ""
    try:
        with _short_warnings():
            _run(command, arguments)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader of the output, for example `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _print_error(f"interrupted.{way_out}")
        return 130
    except ArgumentError as error:
        message = " ".join(str(error).split()).rstrip(".")
        if "are required" in message:
            message = message.replace(f"{command}.", "")
        message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
        of_class = " (--model.help CLASS, --data.help CLASS)"
        see = f"{command} --help{of_class if command != 'report' else ''}" if command else "--help"
        _print_error(f"error: {message}. See marglik {see}.")
        return 2
    except Exception as error:
        from kfac_backend.atomic_files import DiskFullError  # imported here, as it imports torch
        from kfac_backend.ranks import RankError

        # Errors whose messages contain a way out for users.
        named = (
            ValueError, TypeError, OSError, ArithmeticError, NotImplementedError, RankError,
            ModuleNotFoundError,
        )  # fmt: skip
        if not isinstance(error, named) or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        # After a full disk, the run can continue. After other errors, its options must change.
        way_out = way_out if isinstance(error, DiskFullError) else ""
        _print_error(f"error: {error}{way_out}")
        return 2


def _run(command: str | None, arguments: list[str]) -> None:
    brief = bool({"-h", "--help"} & {*arguments}) and "all" not in arguments and command == "train"
    parser, own = _parsers(command, brief)
    with _yaml_without_aliases():
        try:
            options: Any = parser.parse_args(_whole_names(arguments) if command else arguments)
        except RecursionError:  # newer versions of jsonargparse report it themselves
            raise ValueError(
                "The nesting depth of an options file exceeds Python's limit. Write the options "
                "with less nesting."
            ) from None
    if command is None:  # parse_args leaves only for --help and --version
        raise ValueError(f"Pass a command: {', '.join(COMMANDS)}.")
    # tqdm hides its bars if stderr is a file or a pipe, so lines replace them.
    progress = options[command].get("progress", False)
    lines = progress and not sys.stderr.isatty() and not _is_another_rank()
    with progress_lines() if lines else nullcontext():
        _call(command, own[command], options[command])


@contextmanager
def _yaml_without_aliases() -> Iterator[None]:
    """Context manager in which jsonargparse reads option files and values by `check_yaml`."""
    load = get_loader("yaml")

    def checked(text: str) -> Any:
        check_yaml(text)
        return load(text)

    set_loader("yaml", checked, (YAMLError, ValueError))
    try:
        yield
    finally:
        set_loader("yaml", load, (YAMLError,))


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Context manager that prints each warning on one line, without file name and line number."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: printable(f"marglik: warning: {message}\n")
    try:
        yield
    finally:
        warnings.formatwarning = before


def _print_error(message: str) -> None:
    prefix = f"rank {os.environ['RANK']}: " if _is_another_rank() else ""
    print(printable(f"marglik: {prefix}{' '.join(message.split())}"), file=sys.stderr)


def _parsers(
    command: str | None, brief: bool = False
) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser of marglik and the parsers of its commands. Only ``command`` has options.

    A ``brief`` parser can only print its help, see `NOT_IN_BRIEF`.
    """
    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description=DESCRIPTION,
        epilog=f"First example (takes seconds): {FIRST_STEP}",
        exit_on_error=False,
        allow_abbrev=False,
        # The parsers of the commands inherit it.
        formatter_class=BriefFormatter if brief else HelpFormatter,
    )
    commands = parser.add_subcommands(description="Options of a command: marglik COMMAND --help.")
    own = {}
    for name, summary in COMMANDS.items():
        own[name] = ArgumentParser(
            usage=f"marglik {name} {ARGUMENTS.get(name, '[OPTIONS]')}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"All options, in full: marglik {name} --help all" if brief else None,
            allow_abbrev=False,  # inherited by commands since jsonargparse 4.53
        )
        own[name].exit_on_error = False
        if name == command:
            _add_options(own[name], name, brief)
        commands.add_subcommand(name, own[name], help=summary)
    return parser, own


# The commands, with their options


def _add_options(parser: ArgumentParser, command: str, brief: bool) -> None:
    """Add the options of a command: arguments of its function and fields of its configs."""
    if command == "report":
        text = "Folders written by marglik train, fit or evaluate. Several folders are compared."
        parser.add_argument("folders", nargs="+", type=str, help=text)
        text = "File to write the report to. null selects report.html in the folder of a single "
        text += "run, or comparison.html next to the first folder of several runs."
        parser.add_argument("--output", type=str | None, default=None, help=text)
        return
    presets = f", or the name of a preset: {', '.join(preset_names())}"
    text = f"YAML file of options{presets if command == 'train' else ''}."
    parser.add_argument("--config", action=PresetOrFile, help=text)
    function = resolve_name(FUNCTIONS[command])
    configs = _configs(function) if command == "train" else {}
    skip: Any = {"provenance", *configs, *_switches(function)}
    if command in ("predict", "acquire"):
        skip.add("output")
        text = f"CSV file to write the {'predictions' if command == 'predict' else 'rows'} to."
        parser.add_argument("-o", "--output", type=str, required=True, help=text)
    if command == "acquire":
        skip.add("number")
        text = "Number of rows to choose."
        parser.add_argument("-n", "--number", type=int, required=True, help=text)
    on_folder = command in ("evaluate", "predict", "acquire")
    parser.add_function_arguments(function, as_positional=on_folder, skip=skip)
    _add_switches(parser, function)
    if command == "train":
        config = configs.pop("run")
        parser.add_class_arguments(config, skip={*_switches(config)})
        _add_switches(parser, config)
    for name, config in configs.items():
        parser.add_class_arguments(config, name, skip=FROM_PYTHON_ALONE.get(name))
    for action in parser._actions:
        if action.dest == "print_config":
            action.metavar, action.help = "[=skip_default]", PRINT_CONFIG
        hidden = action.dest.startswith(NOT_IN_BRIEF) or action.dest.endswith(".help")
        if action.dest in configs or (brief and hidden):
            action.help = SUPPRESS


def _configs(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a function that are dataclasses of options, with their classes."""
    hints, others = get_type_hints(function).items(), ("provenance", "return")
    return {name: kind for name, kind in hints if is_dataclass(kind) and name not in others}


def _switches(source: Callable[..., Any]) -> dict[str, Any]:
    """Return the boolean arguments of a function or dataclass, with their defaults."""
    yes_or_no = (bool, bool | None)
    parameters = signature(source).parameters.items()
    return {name: p.default for name, p in parameters if p.annotation in yes_or_no}


def _add_switches(parser: ArgumentParser, source: Callable[..., Any]) -> None:
    """Add boolean arguments as the options --name and --no_name."""
    params = parse_docstring(source.__doc__ or "").params
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in params}
    for name, default in _switches(source).items():
        action = ActionYesNo(yes_prefix="", no_prefix="no_")
        parser.add_argument(f"--{name}", default=default, help=texts[name], action=action)


def _call(command: str, parser: ArgumentParser, options: Any) -> None:
    """Run a command, write its report and print its results."""
    from marglik.application.report import write_report
    from marglik.application.runs.printing import print_evaluation, print_results

    if command == "report":
        say(f"Written to {write_report(options.folders, options.output)}")
        return
    import torch

    from marglik.application.runs.config import check_seed

    trains = command in ("train", "fit")
    if trains:
        _fill_in_sizes(options)
    provenance = _provenance(parser, options)
    # Seed before `instantiate`, which draws the initial parameters of the model.
    check_seed(options.seed)
    torch.manual_seed(options.seed)
    function, arguments = resolve_name(FUNCTIONS[command]), parser.instantiate(options).as_dict()
    if command == "train":
        of_run = _configs(function)["run"]
        arguments["run"] = of_run(**{f.name: arguments.pop(f.name) for f in fields(of_run)})
    if trains:
        arguments["provenance"] = provenance
    results = function(**arguments)
    if command == "predict":
        is_calibrated = "calibrated" if results["calibrated"] else "not calibrated"
        say(f"{results['rows']} rows predicted ({results['predictive']}, {is_calibrated})")
        say(f"Written to {results['output']}")
        return
    if command == "acquire":
        chosen = f"{results['rows']} of {results['pool']} rows chosen"
        say(f"{chosen} ({results['method'].replace('_', ' ')})\nWritten to {results['output']}")
        return
    if not _is_another_rank():
        show = print_results if command == "train" else print_evaluation
        show(results, write_report([results.output]))


# Options from dataclasses and from files


def preset_names() -> list[str]:
    """Return the names of the presets that --config accepts."""
    return sorted(
        Path(p.name).stem
        for p in files("marglik.application.presets").iterdir()
        if ".yaml" in p.name
    )


class PresetOrFile(ActionConfigFile):
    """The option --config: a YAML file or the name of a preset in the package."""

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Find the file, and let jsonargparse read it."""
        if values in preset_names():
            values = str(files("marglik.application.presets") / f"{values}.yaml")
        elif not Path(values).is_file():
            raise FileNotFoundError(
                f"--config {values or repr('')}: there is no such file or preset. The presets are "
                f"{', '.join(preset_names())}."
            )
        super().__call__(parser, cfg, values, option_string)


def _whole_names(arguments: Sequence[str]) -> list[str]:
    """Complete names of marglik's classes to paths, because other packages may use the same names.

    Raises:
        ValueError: a name without a path is not a class of marglik, or an option has no class.
    """
    from torch import nn

    from marglik import data, models

    of_data = data, data.DataSource
    kinds = {"--model": (models, nn.Module), "--data": of_data, "--ood": of_data}

    def names_of_classes(option: str) -> list[str]:
        package, kind = kinds[option]
        public = {name: getattr(package, name) for name in package.__all__}
        classes = {name: cls for name, cls in public.items() if isinstance(cls, type)}
        return [n for n, cls in classes.items() if issubclass(cls, kind) and cls is not kind]

    options = {argument.partition("=")[0] for argument in arguments}
    for option in sorted(options):
        of_class, _, name = option.partition(".")
        is_unknown = of_class in kinds and not {of_class, "--config"} & options
        if is_unknown and name not in ("", "help"):
            raise ValueError(
                f"{option} is an option of a class. Pass {of_class} CLASS before it. marglik has "
                f"the classes {', '.join(names_of_classes(of_class))}. You can also pass the path "
                "of another class, such as my_file.MyClass."
            )
    completed: list[str] = []
    for argument in arguments:
        option, joined, name = argument.partition("=")
        if not joined:
            option, name = "".join(completed[-1:]), argument
        if option in kinds and name.isidentifier() and name != "null":
            ours = names_of_classes(option)
            if name not in ours:
                raise ValueError(
                    f"{option} {name}: marglik has no such class. It has {', '.join(ours)}. Pass "
                    "one of them, or the path of another class, such as my_file.MyClass."
                )
            path = f"{kinds[option][0].__name__}.{name}"
            argument = f"{option}={path}" if joined else path
        completed.append(argument)
    return completed


class HelpFormatter(DefaultHelpFormatter):
    """Help formatter that omits the list of subclasses of torch.nn.Module.

    To list its hundreds of subclasses, jsonargparse would import other installed packages, such as
    transformers. This would take tens of seconds.
    """

    def _get_help_string(self, action: Any) -> str:
        # Compare as text, because importing torch takes seconds.
        if "torch.nn.modules.module.Module" in str(getattr(action, "_typehint", "")):
            action.extra_help = str  # a function that returns an empty text
        return super()._get_help_string(action)


class BriefFormatter(HelpFormatter):
    """Help formatter that shows the first sentence of each option and its default."""

    def _get_help_string(self, action: Any) -> str:
        text = (action.help or "").split(". ")[0].rstrip(".")
        default = "" if action.default in (None, SUPPRESS) else f" (default: {action.default})"
        return f"{text}{default}".replace("%", "%%")


def _provenance(parser: ArgumentParser, options: Any) -> Provenance:
    """Return the options as YAML, and the specifications of network and data.

    Removes --config from the options, because they include its content.
    """
    options.pop("config", None)
    plain = json.loads(parser.dump(options, format="json_compact"))
    return Provenance(parser.dump(options), plain.get("model"), plain.get("data"))


def _fill_in_sizes(options: Any) -> None:
    """Set the network's sizes from the data if the options leave them at None."""
    from marglik.application.runs.build import sizes_of
    from marglik.data import DataSource
    from marglik.specification import build_from_spec

    sizes = options.model.get("init_args") or {}
    names = ("in_features", "num_classes", "in_channels", "image_size")
    missing = [name for name in names if sizes.get(name, 0) is None]
    if missing:
        data = build_from_spec(DataSource, options.data.as_dict(), named=None)
        with warnings.catch_warnings():  # the run loads the data again, and then warns
            warnings.simplefilter("ignore")
            sizes_of_data = sizes_of(data.load(), options.likelihood)
        for name in missing:
            sizes[name] = sizes_of_data.get(name)


def _is_another_rank() -> bool:
    """Return whether torchrun started this process with a nonzero rank."""
    return os.environ.get("RANK", "0") != "0"


if __name__ == "__main__":
    sys.exit(main())
