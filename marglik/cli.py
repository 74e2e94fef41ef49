"""The command `marglik`: options are the functions' own arguments, read by jsonargparse."""

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from marglik.runs.commands import ADD_OPTIONS, RUN
from marglik.runs.launch import is_another_rank, launch, leave_message, number_to_launch
from marglik.runs.options import SHELLS, HelpFormatter, completion_action, whole_names
from marglik.runs.terminal import harmless_output, progress_lines

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

GOES_ON = {
    "train": "the same command with --resume continues from its last checkpoint",
    "fit": "the same command continues after the curvature pass, if that was finished",
}
"""How to continue a command that was interrupted; follows "interrupted; " and "After that, "."""

REQUESTS_TO_END = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that schedulers, containers and closed terminals send before they kill a process; Windows
does not have all of them."""

LONGEST = 500
"""Most characters of an error of the parser, which may quote a whole file."""

ERRORS = ValueError, TypeError, RuntimeError, OSError, FloatingPointError, OverflowError
"""Errors that give a one-line message; of RuntimeErrors only some do, see `_is_named`."""

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Environment variable: 1 shows the traceback of errors that otherwise give a one-line message."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    The status is 0 for success, 2 for bad input, 130 after Ctrl-C, and 128 plus the number of a
    signal that asks the process to end (143 for SIGTERM). All of them clean up first.
    """
    with harmless_output(), _requests_to_end() as received, _modules_of_this_folder():
        return _run(arguments, received)


@contextmanager
def _modules_of_this_folder() -> Iterator[None]:
    """Let classes of models and data be imported from the working directory.

    ``python -m marglik`` puts it first in the search path, the installed command does not. Here it
    comes last, so that no file in it can shadow an installed module. It is named, as jsonargparse
    changes to the folder of a --config while it reads it.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed
        here = ""
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextmanager
def _requests_to_end() -> Iterator[list[int]]:
    """Treat requests to end like Ctrl-C; yields the list of signals received so far.

    A signal that is ignored (nohup) or has another handler (of a scheduler's wrapper) is left
    alone. So is a rank of torchrun, which may wait for another in code that runs no handler. Only
    the main thread may set handlers.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    ours = []
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and "TORCHELASTIC_RUN_ID" not in os.environ:
        ours = [s for s in REQUESTS_TO_END if signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: Sequence[str] | None, received: Sequence[int]) -> int:
    """Run the command; ``received`` is filled with the requests to end."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Before parsing, since only this command's options are added to the parser: those of the others
    # would take seconds to import.
    asked = next((a for a in arguments if a in COMMANDS), None)
    own: dict[str, ArgumentParser] = {}
    try:
        if not arguments:
            print(_short_help(), file=sys.stderr)
            return 2  # as for any other incomplete command line
        parser, own = _parsers(*filter(None, [asked]))
        try:
            options: Any = parser.parse_args(arguments if asked is None else whole_names(arguments))
        except OverflowError as error:  # of a number in base 60, which YAML knows
            raise ValueError(f"A number among the options is too large: {error}.") from error
        if asked is None:  # parse_args leaves only for --help, --version and --completion
            raise ValueError(f"Pass a command: {', '.join(COMMANDS)}.")
        options = options[asked]
        if number := number_to_launch(options):
            launch(["-m", "marglik", *arguments], number)
            return 0
        # tqdm hides its bars where stderr is a file or a pipe, so lines take their place.
        lines = options.get("progress", False) and not sys.stderr.isatty() and not is_another_rank()
        with progress_lines() if lines else nullcontext():
            RUN[asked](own[asked], options)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # nobody reads stdout any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        way_out = GOES_ON.get(asked or "", "what was written so far is kept")
        number = next(iter([*received, *interrupt.args]), signal.SIGINT)
        asked_to = number != signal.SIGINT
        what = f"ended by {signal.Signals(number).name}" if asked_to else "interrupted"
        if not leave_message(f"{what}; {way_out}."):
            print(f"\nmarglik: {what}; {way_out}.", file=sys.stderr)
        return 128 + number
    except ArgumentError as error:
        said = " ".join(str(error).split()).rstrip(".")
        said = said if len(said) <= LONGEST else f"{said[:LONGEST]}..."
        _print_error(f"{said}. See marglik{f' {asked}' if asked else ''} --help.")
        return 2
    except ERRORS as error:
        if isinstance(error, RuntimeError) and not _is_named(error):
            raise
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        _print_error(f"{error}{_way_out(asked, error)}", _is_lost_rank(error))
        return 2
    except MemoryError as error:
        _print_error(
            f"There is not enough memory ({error or 'none is left'}). Use smaller batches, less "
            "data or a smaller network."
        )
        return 2


def _is_named(error: RuntimeError) -> bool:
    """Whether a RuntimeError is one of ours, whose message a user can act on."""
    return isinstance(error, NotImplementedError) or _is_lost_rank(error)


def _is_lost_rank(error: Exception) -> bool:
    from kfac_backend.ranks import RankError  # late: imports torch, slow for marglik --help

    return isinstance(error, RankError)


def _way_out(asked: str | None, error: Exception) -> str:
    """What to add to an error that the user can recover from: a full disk, or a lost rank."""
    from kfac_backend.files import DiskFullError  # late: imports torch

    if asked not in GOES_ON:
        return ""
    if isinstance(error, ChildProcessError):  # the way out of a rank's own message is in it
        is_said = GOES_ON[asked] in str(error).lower()
        return "" if is_said else f" {GOES_ON[asked][0].upper()}{GOES_ON[asked][1:]}."
    if _is_lost_rank(error):
        waits = " If a rank was only slow, pass a longer --rank_timeout."
        return f" {GOES_ON[asked][0].upper()}{GOES_ON[asked][1:]}.{waits}"
    return f" After that, {GOES_ON[asked]}." if isinstance(error, DiskFullError) else ""


def _print_error(message: str, is_consequence: bool = False) -> None:
    message = " ".join(message.split())
    if not leave_message(message, is_consequence):
        which = f" on rank {os.environ['RANK']}" if is_another_rank() else ""
        print(f"marglik: error{which}: {message}", file=sys.stderr)


def _short_help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: marglik COMMAND [OPTIONS]\n\n{textwrap.fill(DESCRIPTION, 80)}\n\n{commands}\n\n"
        f"To begin, in seconds:  {FIRST_STEP}\n"
        "Options of a command:  marglik COMMAND --help"
    )


def _parsers(*asked: str) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of marglik, and those of its commands; only those in ``asked`` have options."""
    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description=DESCRIPTION,
        epilog=f"To begin, in seconds: {FIRST_STEP}",
        exit_on_error=False,
        formatter_class=HelpFormatter,  # the commands' parsers inherit it
    )
    parser.add_argument(
        "--completion",
        action=completion_action(lambda: _parsers(*COMMANDS)[0]),
        choices=SHELLS,
        help="Print the script that completes commands and options in this shell, and exit.",
    )
    commands = parser.add_subcommands()
    own = {}
    for name, summary in COMMANDS.items():
        own[name] = ArgumentParser(
            usage=f"marglik {name} {ARGUMENTS.get(name, '[OPTIONS]')}",
            description=f"{summary[0].upper()}{summary[1:]}.",
        )
        own[name].exit_on_error = False
        if name in asked:
            ADD_OPTIONS[name](own[name])
        commands.add_subcommand(name, own[name], help=summary)
    return parser, own


if __name__ == "__main__":
    sys.exit(main())
