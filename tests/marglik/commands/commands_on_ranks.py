"""What ranks do in tests of the command line: called in each, see `tests.worlds`."""

import io
import os
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from pkgutil import resolve_name
from threading import Thread
from unittest.mock import patch

from kfac_backend.distributed import Ranks
from marglik.cli import main
from marglik.training.network import NetworkTraining


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, and what was printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def different(arguments: list[str], more: list[str]) -> tuple[int, str, str]:
    """A command that has more arguments on rank 1."""
    return command(*arguments, *(more if Ranks().rank == 1 else ()))


def killed_after(seconds: float, rank: int, arguments: list[str]) -> tuple[int, str, str]:
    """A command during which one rank is killed, so many seconds after its first step."""
    real = NetworkTraining.epoch
    started = []

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def epoch(*given, **keywords):
        if not started and Ranks().rank == rank:
            started.append(True)
            Thread(target=die, daemon=True).start()
        return real(*given, **keywords)

    with patch.object(NetworkTraining, "epoch", epoch):
        return command(*arguments)


def killed_at(target: str, call: int, arguments: list[str]) -> tuple[int, str, str]:
    """A command during which its process is killed at a call of a function; nothing is tidied up.

    Args:
        target: the function's full name.
        call: the number of the call that the process does not survive, counted from 1.
        arguments: of the command.
    """
    real, calls = resolve_name(target), 0

    def deadly(*given: object, **keywords: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **keywords)

    with patch(target.replace(":", "."), deadly):
        return command(*arguments)
