"""The command `marglik`: options are the functions' own arguments, read by jsonargparse."""

import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from marglik.runs.commands import (
    ADD_OPTIONS,
    RUN,
    HelpFormatter,
    is_another_rank,
    start_ranks,
    whole_names,
)
from marglik.runs.terminal import progress_lines

__all__ = ["main"]

COMMANDS = {
    "train": "train on images, sequences, graphs, tensors; learn the weight decays",
    "fit": "fit a posterior to a network that was trained elsewhere",
    "evaluate": "compute metrics on test, shifted and out-of-distribution data",
    "report": "write a page about one run, or several side by side",
}

ARGUMENTS = {"evaluate": "PATH [OPTIONS]", "report": "FOLDERS [OPTIONS]"}
DESCRIPTION = (
    "Learn a weight decay per layer while the network trains, and get calibrated predictions "
    "afterwards."
)
FIRST_STEP = "marglik train --config digits"
RESUME = "The same command with --resume continues from its last checkpoint."

LONGEST = 500
"""Most characters of an error of the parser, which may quote a whole file."""

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Environment variable: 1 shows the traceback of errors that otherwise give a one-line message."""


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
        print(_short_help(), file=sys.stderr)
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
        _print_error(f"error: {said}. See marglik{f' {command}' if command else ''} --help.")
        return 2
    except Exception as error:
        if not _is_named(error) or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        _print_error(f"error: {error}{way_out if _ends_good_work(error) else ''}")
        return 2


def _run(command: str | None, arguments: list[str]) -> None:
    parser, own = _parsers(command)
    options: Any = parser.parse_args(whole_names(arguments) if command else arguments)
    if command is None:  # parse_args leaves only for --help and --version
        raise ValueError(f"Pass a command: {', '.join(COMMANDS)}.")
    start_ranks(options[command], arguments)
    # tqdm hides its bars where stderr is a file or a pipe, so lines take their place.
    progress = options[command].get("progress", False)
    lines = progress and not sys.stderr.isatty() and not is_another_rank()
    with progress_lines() if lines else nullcontext():
        RUN[command](own[command], options[command])


def _is_named(error: Exception) -> bool:
    """Whether an error's message is written for users, who can act on it."""
    from kfac_backend.ranks import RankError  # late: imports torch, slow for marglik --help

    named = ValueError, TypeError, OSError, ArithmeticError, NotImplementedError, RankError
    return isinstance(error, named)


def _ends_good_work(error: Exception) -> bool:
    """Whether nothing is wrong with what was asked for: the disk is full, or a rank was lost."""
    from kfac_backend.files import DiskFullError
    from kfac_backend.ranks import RankError

    return isinstance(error, DiskFullError | RankError)


def _print_error(message: str) -> None:
    which = f"rank {os.environ['RANK']}: " if is_another_rank() else ""
    print(f"marglik: {which}{' '.join(message.split())}", file=sys.stderr)


def _short_help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: marglik COMMAND [OPTIONS]\n\n{textwrap.fill(DESCRIPTION, 80)}\n\n{commands}\n\n"
        f"To begin, in seconds:  {FIRST_STEP}\n"
        "Options of a command:  marglik COMMAND --help"
    )


def _parsers(command: str | None) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of marglik, and those of its commands, of which one has its options."""
    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description=DESCRIPTION,
        epilog=f"To begin, in seconds: {FIRST_STEP}",
        exit_on_error=False,
        formatter_class=HelpFormatter,  # the commands' parsers inherit it
    )
    commands = parser.add_subcommands()
    own = {}
    for name, summary in COMMANDS.items():
        own[name] = ArgumentParser(
            usage=f"marglik {name} {ARGUMENTS.get(name, '[OPTIONS]')}",
            description=f"{summary[0].upper()}{summary[1:]}.",
        )
        own[name].exit_on_error = False
        if name == command:
            ADD_OPTIONS[name](own[name])
        commands.add_subcommand(name, own[name], help=summary)
    return parser, own


if __name__ == "__main__":
    sys.exit(main())
