"""The command `marglik`: options are the functions' own arguments, read by jsonargparse."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from marglik.commands.messages import check_values, explained
from marglik.commands.option_parsing import HelpFormatter, whole_names
from marglik.commands.progress import progress_lines

__all__ = ["main"]

COMMANDS = {
    "train": "train on images, sequences or graphs, learn the weight decays",
    "fit": "a posterior for a network that was trained elsewhere",
    "evaluate": "metrics of a posterior: on test, shifted and out-of-distribution data",
    "report": "one page about one run, or several side by side",
}

GOES_ON = {
    "train": "the same command with --resume goes on from its last checkpoint",
    "fit": "the same command goes on, with the curvature pass if that was done",
}
"""What a user does whose command was cut off."""

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Set to 1 to see the traceback of an error that otherwise ends in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # The others' options are not needed, whose modules take seconds to import.
    asked = next((a for a in arguments if a in COMMANDS), None)
    own = {}
    try:
        parser, own = _parsers(asked)
        options: Any = parser.parse_args(arguments if asked is None else whole_names(arguments))
        if asked is None:  # parse_args leaves only for --help and --version
            raise ValueError(f"Pass a command: {', '.join(COMMANDS)}.")
        module, options = _module(asked), options[asked]
        check_values(own[asked], options)
        # Where stderr is a file or a pipe, bars are hidden.
        lines = options.get("progress", False) and not sys.stderr.isatty()
        with progress_lines() if lines else nullcontext():
            module.run(own[asked], options)
        return 0
    except KeyboardInterrupt:
        way_out = GOES_ON.get(asked or "", "what was written so far is kept")
        print(f"\nmarglik: interrupted; {way_out}.", file=sys.stderr)
        return 130
    except ArgumentError as error:
        said = explained(error, own.get(asked or ""), arguments)
        ends = "" if said.endswith(("?", ".")) else "."
        _print_error(f"{said}{ends} See marglik{f' {asked}' if asked else ''} --help.")
        return 2
    except (ValueError, TypeError, NotImplementedError, OSError, FloatingPointError) as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        said = explained(error, own.get(asked or ""), arguments)
        _print_error(said + (_way_out(asked, error) if isinstance(error, OSError) else ""))
        return 2


def _way_out(asked: str | None, error: OSError) -> str:
    """How a command goes on that found the disk full."""
    from kfac_backend.files import DiskFullError  # imports torch, which marglik --help is spared

    if not isinstance(error, DiskFullError) or asked not in GOES_ON:
        return ""
    return f" After that, {GOES_ON[asked]}."


def _print_error(message: str) -> None:
    print(f"marglik: error: {' '.join(message.split())}", file=sys.stderr)


def _parsers(asked: str | None) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The command's parser, and those of its commands; only the one asked for has its options."""
    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description="Learn a weight decay per layer while the network trains, and get calibrated "
        "predictions afterwards.",
        exit_on_error=False,
        formatter_class=HelpFormatter,  # of the commands as well
    )
    commands = parser.add_subcommands()
    own = {}
    for name, summary in COMMANDS.items():
        own[name] = ArgumentParser(description=f"{summary[0].upper()}{summary[1:]}.")
        own[name].exit_on_error = False
        if name == asked:
            _module(name).add_arguments(own[name])
        commands.add_subcommand(name, own[name], help=summary)
    return parser, own


def _module(command: str) -> Any:
    return import_module(f"marglik.commands.{command}")


if __name__ == "__main__":
    sys.exit(main())
