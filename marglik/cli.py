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
from marglik.commands.several_ranks import is_another_rank, launch, number_to_launch

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

ERRORS = ValueError, TypeError, RuntimeError, OSError, FloatingPointError
"""Those that end in one line; of RuntimeErrors some, see `_is_named`."""

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
        if number := number_to_launch(options):
            return launch(arguments, number)
        # Where stderr is a file or a pipe, bars are hidden.
        lines = options.get("progress", False) and not sys.stderr.isatty() and not is_another_rank()
        with progress_lines() if lines else nullcontext():
            module.run(own[asked], options)
        return 0
    except KeyboardInterrupt:
        way_out = GOES_ON.get(asked or "", "what was written so far is kept")
        if not is_another_rank():
            print(f"\nmarglik: interrupted; {way_out}.", file=sys.stderr)
        return 130
    except ArgumentError as error:
        said = explained(error, own.get(asked or ""), arguments)
        ends = "" if said.endswith(("?", ".")) else "."
        _print_error(f"{said}{ends} See marglik{f' {asked}' if asked else ''} --help.")
        return 2
    except ERRORS as error:
        if isinstance(error, RuntimeError) and not _is_named(error):
            raise
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        if not _is_said_by_the_first_rank(error):
            said = explained(error, own.get(asked or ""), arguments)
            _print_error(said + _way_out(asked, error))
        return 2


def _is_named(error: RuntimeError) -> bool:
    """Whether an error is one that users are told of in a line."""
    from kfac_backend.distributed import RankError  # imports torch, which marglik --help is spared

    return isinstance(error, (NotImplementedError, RankError))


def _is_said_by_the_first_rank(error: Exception) -> bool:
    if not is_another_rank():
        return False
    from marglik.training.ranks import known_to_rank_0  # imports torch, too

    return known_to_rank_0(error)


def _way_out(asked: str | None, error: Exception) -> str:
    """How a command goes on that found the disk full, or lost a rank."""
    from kfac_backend.distributed import RankError  # imports torch, which marglik --help is spared
    from kfac_backend.files import DiskFullError

    if asked not in GOES_ON:
        return ""
    if isinstance(error, (RankError, ChildProcessError)):
        return f" {GOES_ON[asked][0].upper()}{GOES_ON[asked][1:]}."
    return f" After that, {GOES_ON[asked]}." if isinstance(error, DiskFullError) else ""


def _print_error(message: str) -> None:
    which = f" on rank {os.environ['RANK']}" if is_another_rank() else ""
    print(f"marglik: error{which}: {' '.join(message.split())}", file=sys.stderr)


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
